"""The TPU kernel through the TPU compiler, which needs no TPU: it fits every generation, and a ring
adds no data movement around it."""

import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.attention import AttentionPartial, Mask, Queries, TokenCoords
from model.attention.blocks import BackwardInputs, StackedKeys
from model.attention.kernels import get_kernel
from model.config import TransformerConfig
from planning.topology import topology_devices
from tests.compiled_text import compile_step

TOKENS = 131072
KERNEL = "@tpu_custom_call"
CALL = 'custom_call_target="tpu_custom_call"'
# v3's kernels do not accept bfloat16.
GENERATIONS = {
    "v3:2x2": jnp.float32,
    "v4:2x2x1": jnp.bfloat16,
    "v5e:2x2": jnp.bfloat16,
    "v5p:2x2x1": jnp.bfloat16,
    "v6e:2x2": jnp.bfloat16,
    "tpu7x:2x2x1": jnp.bfloat16,
}
HEAD_SIZES = (64, 80, 96, 100, 128, 256)


def lower_both(topology, dtype, head_dim, mask=Mask(), kv_heads=2, softcap=None):
    """Lowers the forward and backward of 131,072 queries against as many keys, in place as in a
    ring, for one device."""
    mesh = Mesh(np.array(topology_devices(topology)[:1]), "sequence")

    def shape(*dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    kernel = get_kernel("tpu").with_softcap(softcap)
    options = {"mask": mask, "scale": head_dim**-0.5}
    q = shape(1, TOKENS, 4, head_dim, dtype=dtype)
    kv = shape(2, 1, TOKENS, kv_heads, head_dim, dtype=dtype)
    coords = TokenCoords(*[shape(1, TOKENS, dtype=jnp.int32)] * 2)
    rows, float32 = shape(1, 4, TOKENS, dtype=jnp.float32), shape(*q.shape, dtype=jnp.float32)
    blocks = Queries(q, coords), StackedKeys(kv, coords)
    forward = jax.jit(lambda *blocks: kernel.extend(*blocks, **options), donate_argnums=0)
    backward = jax.jit(lambda *blocks: kernel.gradients(*blocks, **options), donate_argnums=0)
    with jax.set_mesh(mesh):  # the kernel reads its device from it, as in training
        inputs = BackwardInputs(q, rows, rows)
        return forward.lower(AttentionPartial(float32, rows), *blocks), backward.lower(
            float32, *blocks, inputs
        )


def check(topology, dtype, head_dim, mask=Mask(), kv_heads=2, pair=False, softcap=None):
    """Counts the calls before compilation: jaxlib cannot parse everything that libtpu writes for
    v5p and v6e."""
    start = time.process_time()  # CPU time, independent of the machine's load
    lowered = lower_both(topology, dtype, head_dim, mask, kv_heads, softcap)
    for part in lowered:
        part.compile()
    assert time.process_time() - start < 60
    assert [part.as_text().count(KERNEL) for part in lowered] == [1, 2 if pair else 1]


def test_kernels_compile_at_128k_tokens_per_device():
    check("v5e:2x2", jnp.bfloat16, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "head_dim"), itertools.product(GENERATIONS, HEAD_SIZES))
def test_kernels_compile_for_every_generation_and_head_size(topology, head_dim):
    check(topology, GENERATIONS[topology], head_dim, pair=topology == "v3:2x2")


@pytest.mark.slow
def test_an_odd_number_of_kv_heads_takes_two_backward_kernels_on_two_cores():
    check("v5p:2x2x1", jnp.bfloat16, 128, kv_heads=1, pair=True)
    check("v5e:2x2", jnp.bfloat16, 128, kv_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(window=4096)], ids=str)
def test_kernels_compile_with_other_masks(mask):
    check("v5e:2x2", jnp.bfloat16, 128, mask)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_kernels_compile_with_a_softcap(topology):
    check(topology, jnp.bfloat16, 256, Mask(window=4096), softcap=50.0)


@pytest.mark.slow
def test_kernels_compile_with_float32():
    check("v5e:2x2", jnp.float32, 256)


def computations(text):
    """Returns the computations of a compiled text that contain an attention kernel: lists of
    (operation, result type, line)."""
    bodies, lines = [], []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = []
        operation = re.match(r"\s+(?:ROOT )?%[\w.-]+ = (.*?) ([a-z][\w-]*)\(", line)
        if operation:
            lines.append((operation[2], operation[1], line))
        if line.startswith("}") and any(CALL in line for *_, line in lines):
            bodies.append(lines)
    return bodies


SMALL = TransformerConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.slow
def test_a_bfloat16_step_compiles_for_v3():
    """Its kernels do not accept bfloat16 operands: tiles arrive as bfloat16 and are converted to
    float32 inside."""
    text = compile_step(SMALL, topology_devices("v3:2x2"), 8 * 1536).as_text()
    calls = [line for lines in computations(text) for _, _, line in lines if CALL in line]
    assert len(calls) == 9 and all("bf16[2,1,2,1536,64]" in line for line in calls)


def test_a_ring_is_one_kernel_per_round_without_copies():
    """A training step on v5e 2x4, 1536 tokens per device, 4 query heads of 64 on 2 KV heads."""
    kernel = get_kernel(query_tile=256, key_tile=256)
    text = compile_step(SMALL, topology_devices("v5e:2x4"), 8 * 1536, kernel=kernel).as_text()
    bodies = computations(text)
    calls = [line for lines in bodies for operation, _, line in lines if CALL in line]
    # The first round, the scan's and the last, in both directions. The forward is never rerun.
    assert [
        sum(name in line for line in calls) for name in ("attention_forward", "attention_backward")
    ] == [3, 3]
    for line in calls:
        operands = line[line.index("operand_layout_constraints") :]
        assert operands.count("bf16[2,1,2,1536,64]") == 2, "K and V are expanded or sliced"
    for lines in bodies:
        for operation, result, line in lines:
            if operation == "transpose" or (
                operation == "copy" and re.search(r"\[1,(1536,4|4,1536),64\]", result)
            ):
                raise AssertionError(f"data moved around a kernel: {line.strip()[:200]}")
