"""NF4 and int8 match bitsandbytes bit for bit: against stored vectors, and against the library.

python -m tests.model.test_codecs     # recreates the stored vectors
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
# Shape and dtype of the weights; 12 x 192 has an incomplete last group of blocks, 40 x 576
# several groups.
CASES = [((12, 192), "float32"), ((40, 576), "bfloat16"), ((256, 128), "float16")]


def weight(shape, dtype):
    """Returns a matrix with a block of zeros, an outlier, and values of several magnitudes."""
    drawn = np.random.RandomState(0).standard_normal(shape) * np.logspace(-3, 0, shape[0])[:, None]
    drawn[0, :64], drawn[1, 1] = 0, 7.5
    return drawn.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def pack(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def by_bitsandbytes(shape, dtype):
    """Returns bitsandbytes' results for the weight: the arrays of NF4, the dequantized matrix, and
    the same for int8."""
    import torch
    from bitsandbytes import functional

    tensor = torch.tensor(weight(shape, dtype).astype(np.float32)).to(getattr(torch, dtype))
    codes, state = functional.quantize_4bit(
        tensor, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    state.dtype = torch.float32
    results = {
        "codes": codes.numpy().reshape(shape[0], -1),
        "absmax": state.absmax.numpy().reshape(shape[0], -1),
        "nested": state.state2.absmax.numpy(),
        "offset": np.float32(state.offset.item()),
        "nf4": functional.dequantize_4bit(codes, state).numpy(),
    }
    rows, scales, _ = functional.int8_vectorwise_quant(tensor.clone())
    return results | {
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
def test_results_equal_stored_bitsandbytes_vectors(shape, dtype):
    """Every code, scale and dequantized value, bit for bit."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    case = stored["cases"][f"{shape[0]}x{shape[1]} {dtype}"]
    weight = ours(shape, dtype, case["offset"])
    assert stored["bitsandbytes"] == "0.50.2"
    assert {name: pack(weight[name]) for name in ("absmax", "nested", "scales")} == case["arrays"]
    assert {name: digest(weight[name]) for name in ("codes", "nf4", "rows", "int8")} == case[
        "digests"
    ]
    # Our mean is rounded once; torch's depends on the order of its sums.
    assert abs(ours(shape, dtype, None)["offset"] - case["offset"]) <= 2 * np.spacing(
        np.float32(case["offset"])
    )


@pytest.mark.parametrize(
    ("shape", "dtype"), [*CASES, ((576, 1536), "bfloat16"), ((2, 64), "float32")], ids=str
)
def test_results_equal_bitsandbytes(shape, dtype):
    """The same against the library itself."""
    theirs = by_bitsandbytes(shape, dtype)
    weight = ours(shape, dtype, theirs["offset"])
    for name, array in theirs.items():
        assert np.array_equal(array, weight[name]), name


def test_levels_are_ascending_and_contain_zero_and_one():
    """NF4 has 16 levels, the dynamic table 256; NF4_ZEROS is a byte of two zero codes."""
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
def test_dequantizing_nf4_on_a_device_equals_numpy(name, dtype):
    """Bit for bit, compiled; the product is rounded before the offset is added, not fused."""
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

    def dequantized(arrays):
        own = Parameter(shape, "xyz"[: len(shape)])
        by_part = {key.rpartition(".")[2]: x[1] for key, x in arrays.items()}
        return assemble(
            name, by_part, own, {key: x.shape for key, x in by_part.items()}, ()
        ).dequantize(jnp.dtype(dtype))

    inputs = 2 if "o_proj" in name else 1
    matrix = stacked[1].reshape(np.prod(shape[:inputs]), -1).T
    expected = codecs.dequantize_nf4(codecs.quantize_nf4(matrix)).T.reshape(shape)
    assert np.array_equal(
        np.asarray(jax.jit(dequantized)(arrays)), expected.astype(jnp.dtype(dtype))
    )


@pytest.mark.parametrize("rows", [slice(None), slice(3, 100), slice(5, 5)])
@pytest.mark.parametrize("columns", [slice(None), slice(10, 200), slice(64, 128), slice(319, 320)])
def test_a_part_of_an_nf4_matrix(rows, columns):
    """Also within blocks of 64 numbers, and of 256 scales."""
    codes = codecs.quantize_nf4(np.random.RandomState(3).standard_normal((384, 320)))
    part = codecs.dequantize_nf4(codes, rows, columns)
    assert np.array_equal(part, codecs.dequantize_nf4(codes)[rows, columns])


def test_dequantizing_int8_on_a_device_equals_numpy():
    """Bit for bit, compiled."""
    rows = codecs.quantize_int8(np.random.RandomState(2).standard_normal((96, 40)))
    dequantized = jax.jit(
        lambda codes, absmax: Int8Weight(codes.T, absmax[None]).dequantize(jnp.float32)
    )(rows.codes, rows.absmax)
    assert np.array_equal(np.asarray(dequantized).T, codecs.dequantize_int8(rows))


def test_nf4_takes_4_127_bits_per_weight():
    """The figure of the QLoRA paper."""
    quantized = codecs.quantize_nf4(np.ones((4096, 4096), np.float32))
    assert (
        isinstance(quantized, Nf4)
        and abs(8 * sum(np.asarray(x).nbytes for x in quantized) / 4096**2 - 4.127) < 1e-3
    )


def write_stored():
    """Writes bitsandbytes' results for the cases."""
    import bitsandbytes
    import torch

    cases = {}
    for shape, dtype in CASES:
        results = by_bitsandbytes(shape, dtype)
        cases[f"{shape[0]}x{shape[1]} {dtype}"] = {
            "offset": float(results["offset"]),
            "arrays": {name: pack(results[name]) for name in ("absmax", "nested", "scales")},
            "digests": {name: digest(results[name]) for name in ("codes", "nf4", "rows", "int8")},
        }
    content = {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__, "cases": cases}
    STORED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_stored()
