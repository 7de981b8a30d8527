"""NF4 and int8 as bitsandbytes computes them, to the bit: against numbers that it made, and itself.

python -m tests.model.test_codecs     # makes the stored numbers again
"""

import base64
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model import codecs
from model.codecs import Nf4
from model.quantized_weights import Int8Weight, assemble, declare_parts, quantized
from model.sharding import Parameter

STORED = pathlib.Path(__file__).with_name("bitsandbytes_vectors.json")
# Shape, and dtype of the weights; 12 x 192 has a last group of blocks that is not full, 40 x 576
# several groups.
CASES = [((12, 192), "float32"), ((40, 576), "bfloat16"), ((256, 128), "float16")]


def weight(shape, dtype):
    """A matrix with a block of zeros, an outlier, and numbers of several magnitudes."""
    drawn = np.random.RandomState(0).standard_normal(shape) * np.logspace(-3, 0, shape[0])[:, None]
    drawn[0, :64], drawn[1, 1] = 0, 7.5
    return drawn.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def pack(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def by_bitsandbytes(shape, dtype):
    """What bitsandbytes makes of the weight: the arrays of NF4, the dequantized matrix, and the
    same of int8."""
    import torch
    from bitsandbytes import functional

    tensor = torch.tensor(weight(shape, dtype).astype(np.float32)).to(getattr(torch, dtype))
    codes, state = functional.quantize_4bit(
        tensor, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    state.dtype = torch.float32
    made = {
        "codes": codes.numpy().reshape(shape[0], -1),
        "absmax": state.absmax.numpy().reshape(shape[0], -1),
        "nested": state.state2.absmax.numpy(),
        "offset": np.float32(state.offset.item()),
        "nf4": functional.dequantize_4bit(codes, state).numpy(),
    }
    rows, scales, _ = functional.int8_vectorwise_quant(tensor.clone())
    return made | {
        "rows": rows.numpy(),
        "scales": scales.numpy(),
        "int8": functional.int8_vectorwise_dequant(rows, scales).numpy(),
    }


def ours(shape, dtype, offset):
    nf4 = codecs.quantize_nf4(weight(shape, dtype), offset)
    int8 = codecs.quantize_int8(weight(shape, dtype))
    return {
        **nf4._asdict(),
        "nf4": codecs.dequantize_nf4(nf4),
        "rows": int8.codes,
        "scales": int8.absmax,
        "int8": codecs.dequantize_int8(int8),
    }


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_equal_to_stored_numbers_of_bitsandbytes(shape, dtype):
    """Every code, scale and dequantized number, to the bit."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    case = stored["cases"][f"{shape[0]}x{shape[1]} {dtype}"]
    weight = ours(shape, dtype, case["offset"])
    assert stored["bitsandbytes"] == "0.50.2"
    assert {name: pack(weight[name]) for name in ("absmax", "nested", "scales")} == case["arrays"]
    assert {name: digest(weight[name]) for name in ("codes", "nf4", "rows", "int8")} == case[
        "digests"
    ]
    # Our mean is rounded once; that of torch depends on the order of its sums.
    assert abs(ours(shape, dtype, None)["offset"] - case["offset"]) <= 2 * np.spacing(
        np.float32(case["offset"])
    )


@pytest.mark.parametrize(
    ("shape", "dtype"), [*CASES, ((576, 1536), "bfloat16"), ((2, 64), "float32")], ids=str
)
def test_equal_to_bitsandbytes_itself(shape, dtype):
    """The same with the program."""
    theirs = by_bitsandbytes(shape, dtype)
    weight = ours(shape, dtype, theirs["offset"])
    for name, array in theirs.items():
        assert np.array_equal(array, weight[name]), name


def test_tables():
    """16 ascending levels and 256, among which are 0 and 1; what two codes of zero stand for."""
    levels = codecs.dynamic_levels()
    assert (
        len(set(levels.tolist())) == 256
        and (np.diff(levels) > 0).all()
        and levels[-1] == 1
        and 0 in levels
    )
    assert (np.diff(codecs.NF4_LEVELS) > 0).all()
    assert codecs.NF4_LEVELS[codecs.NF4_ZEROS & 15] == codecs.NF4_LEVELS[codecs.NF4_ZEROS >> 4] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"]
)
def test_a_device_opens_what_numpy_does(name, dtype):
    """To the bit, compiled; the sum of product and offset is rounded as twice, not once."""
    shape = {"q": (192, 3, 64), "o": (3, 64, 192), "d": (448, 192)}[
        name.rpartition(".weight")[0].rpartition(".")[2][0]
    ]
    stacked = np.random.RandomState(1).standard_normal((2, *shape)).astype(np.float32)
    parts = declare_parts(
        f"layers.{name}", Parameter((2, *shape), ("layers", *"xyz"[: len(shape)])), "nf4"
    )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = quantized(
        {f"layers.{name}": stacked},
        "nf4",
        {f"layers.{name}": stacked.shape},
        parts,
        dict.fromkeys(parts, device),
    )

    def opened(arrays):
        own = Parameter(shape, "xyz"[: len(shape)])
        by_part = {key.rpartition(".")[2]: x[1] for key, x in arrays.items()}
        return assemble(
            name, by_part, own, {key: x.shape for key, x in by_part.items()}, ()
        ).dequantize(jnp.dtype(dtype))

    inputs = 2 if "o_proj" in name else 1
    matrix = stacked[1].reshape(np.prod(shape[:inputs]), -1).T
    expected = codecs.dequantize_nf4(codecs.quantize_nf4(matrix)).T.reshape(shape)
    assert np.array_equal(np.asarray(jax.jit(opened)(arrays)), expected.astype(jnp.dtype(dtype)))


def test_int8_on_a_device():
    """To the bit, compiled."""
    rows = codecs.quantize_int8(np.random.RandomState(2).standard_normal((96, 40)))
    opened = jax.jit(
        lambda codes, absmax: Int8Weight(codes.T, absmax[None]).dequantize(jnp.float32)
    )(rows.codes, rows.absmax)
    assert np.array_equal(np.asarray(opened).T, codecs.dequantize_int8(rows))


def test_what_codes_cost():
    """4.127 bits a weight, as the paper says."""
    made = codecs.quantize_nf4(np.ones((4096, 4096), np.float32))
    assert (
        isinstance(made, Nf4)
        and abs(8 * sum(np.asarray(x).nbytes for x in made) / 4096**2 - 4.127) < 1e-3
    )


def write_stored():
    """Writes what bitsandbytes makes of the cases."""
    import bitsandbytes
    import torch

    cases = {}
    for shape, dtype in CASES:
        made = by_bitsandbytes(shape, dtype)
        cases[f"{shape[0]}x{shape[1]} {dtype}"] = {
            "offset": float(made["offset"]),
            "arrays": {name: pack(made[name]) for name in ("absmax", "nested", "scales")},
            "digests": {name: digest(made[name]) for name in ("codes", "nf4", "rows", "int8")},
        }
    content = {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__, "cases": cases}
    STORED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_stored()
