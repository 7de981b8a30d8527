"""The collectives of a whole training step in the TPU compiler's output are exactly the declared
ones.

A small model on a v5e slice of 2 x 4 chips as fsdp 2 x tensor 2 x sequence 2: every dimension is
large enough to be split, and no activation has as many elements as any parameter, so that the
number of elements identifies what is sent.
"""

import math
from collections import Counter

import pytest

from model.config import TransformerConfig
from model.language_model import LanguageModel
from planning.compiled.overlap import crossings
from planning.compiled.transfers import COLLECTIVES
from planning.costs.step import BACKWARD_SUMS, FORWARD_SUMS, OUTER_SUMS
from planning.topology import topology_devices
from tests.compiled_text import compile_step
from trainer.config.schema import MeshConfig
from trainer.mesh import make_mesh

# How often a layer's parameter is gathered per direction; outside the layers, at most over both.
GATHERS = 1
MESH = MeshConfig(fsdp=2, tensor=2, sequence=2)
RING = MeshConfig(tensor=2, sequence=4)
CONTEXT, ROWS = 8192, 2
CONFIG = TransformerConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)


@pytest.fixture(scope="module")
def step():
    """The step's collectives."""
    compiled = compile_step(CONFIG, topology_devices("v5e:2x4"), CONTEXT, batch=ROWS, mesh=MESH)
    return crossings(compiled.as_text())


@pytest.fixture(scope="module")
def parameters():
    """(layers', others'): name -> the number of elements that one tensor rank gathers: a layer's
    weight, an embedding, ..."""
    model = LanguageModel(CONFIG, make_mesh(MESH, topology_devices("v5e:2x4")))
    layers, others = {}, {}
    for name, parameter in model.parameters.items():
        axes = [
            axis
            for entry in model.specs[name]
            for axis in ((entry,) if isinstance(entry, str) else entry or ())
        ]
        assert {"fsdp", "sequence"} <= set(axes), (
            f"{name} is not split over all devices that share a batch"
        )
        elements = math.prod(parameter.shape) // (MESH.tensor if "tensor" in axes else 1)
        if name.startswith("layers."):
            layers[name] = elements // CONFIG.num_hidden_layers
        else:
            others[name] = elements
    assert len(layers) == 9 and len(others) == 3
    return layers, others


# Now that one kernel computes attention's backward pass on v5e (there were two), the layer that the
# compiler peels off the loop has two hops of gradients without a kernel to overlap with
# (docs/notes/limits.md).
ONE_KERNEL = pytest.mark.xfail(
    strict=True, reason="no kernel overlaps two hops of one layer's gradients"
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            ("v5e:2x4", "offload"), id="v5e:2x4 offload", marks=[pytest.mark.slow, ONE_KERNEL]
        ),
        pytest.param(
            ("v4:2x2x2", "save_attention"), id="v4:2x2x2 save_attention", marks=pytest.mark.slow
        ),
    ],
)
def prefetching(request):
    """The collectives of a step that sends the layers' weights round the ring."""
    topology, remat = request.param
    compiled = compile_step(
        CONFIG, topology_devices(topology), CONTEXT, mesh=RING, remat=remat, prefetch=True
    )
    return crossings(compiled.as_text())


def of_kind(step, kind, **attributes):
    return [
        collective
        for collective in step
        if collective.kind == kind
        and all(getattr(collective, name) == value for name, value in attributes.items())
    ]


def sizes(collectives):
    return Counter(elements for collective in collectives for _, elements in collective.results)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_layers_parameters_are_gathered_once_in_each_direction(step, parameters, backward):
    expected = Counter(parameters[0].values())
    gathered = sizes(of_kind(step, "all-gather", loops=1, backward=backward))
    assert gathered == Counter({size: GATHERS * count for size, count in expected.items()})


def test_nothing_else_is_gathered(step, parameters):
    """Neither hidden states, keys, logits nor tokens, nor a parameter again per chunk of the
    sequence."""
    gathers = of_kind(step, "all-gather")
    assert max(collective.loops for collective in gathers) == 1
    assert {dtype for collective in gathers for dtype, _ in collective.results} == {"bf16"}, (
        "in the compute dtype"
    )
    outside = sizes(of_kind(gathers, "all-gather", loops=0))
    others = Counter(parameters[1].values())
    assert others.keys() == outside.keys() and all(
        count <= 2 * others[size] for size, count in outside.items()
    )


def test_gradients_are_summed_in_float32(step, parameters):
    """Matrices by one reduce-scatter each; sums in bfloat16 are of activations, over the tensor
    axis."""
    layers, others = parameters
    shards = MESH.fsdp * MESH.sequence
    scatters = of_kind(step, "reduce-scatter")
    assert {dtype for collective in scatters for dtype, _ in collective.results} == {"f32"}
    for loops, part in ((1, layers), (0, others)):
        matrices = Counter(
            elements // shards
            for name, elements in part.items()
            if not name.endswith("norm.weight")
        )
        assert sizes(of_kind(scatters, "reduce-scatter", loops=loops)) == matrices
    tokens = CONTEXT * ROWS // MESH.fsdp // MESH.sequence
    for collective in of_kind(step, "all-reduce"):
        for dtype, elements in collective.results:
            assert dtype == "f32" or (
                dtype == "bf16" and elements in (tokens * 512, tokens // 2 * 512)
            ), collective


def test_sums_of_hidden_states_over_tensor_match_the_cost_model(step):
    sums = Counter(
        (collective.loops > 0, collective.backward)
        for collective in of_kind(step, "all-reduce")
        for dtype, _ in collective.results
        if dtype == "bf16"
    )
    assert (sums[True, False], sums[True, True]) == (FORWARD_SUMS, BACKWARD_SUMS)
    assert sums[False, False] + sums[False, True] == OUTER_SUMS


def test_the_ring_sends_keys_values_their_gradients_and_coordinates(step):
    tokens, heads = CONTEXT // MESH.sequence, CONFIG.num_key_value_heads // MESH.tensor
    both = 2 * tokens * heads * CONFIG.head_dim
    allowed = {("bf16", both), ("f32", both), ("s32", 2 * tokens)}
    permutes = of_kind(step, "collective-permute")
    assert {collective.results for collective in permutes} == {(array,) for array in allowed}
    # Forward: K and V in one transfer. Backward: the same, and two hops of their gradients, in
    # float32 where they are accumulated.
    assert Counter(
        collective.backward for collective in permutes if collective.results[0][0] != "s32"
    ) == {False: 1, True: 3}
    assert not of_kind(step, "all-to-all") and {collective.kind for collective in step} < set(
        COLLECTIVES
    )


def test_prefetched_weights_and_their_gradients_overlap_with_kernels(prefetching):
    """No layer gathers or scatters: weights travel round the ring in both directions, and only the
    final hops of gradients have no kernel to overlap with."""
    assert not [
        collective
        for collective in prefetching
        if collective.kind in ("all-gather", "reduce-scatter") and collective.loops
    ]
    model = LanguageModel(CONFIG, make_mesh(RING, topology_devices("v5e:2x4")))
    layer = sum(
        math.prod(parameter.shape[1:]) // (RING.tensor if "tensor" in str(model.specs[name]) else 1)
        for name, parameter in model.parameters.items()
        if name.startswith("layers.")
    )
    shard = layer // RING.sequence
    for dtype in ("bf16", "f32"):
        in_ring = [
            collective
            for collective in of_kind(prefetching, "collective-permute")
            if collective.results == ((dtype, shard),)
        ]
        # In the loop over layers, and in the layer peeled off it.
        home = Counter(collective.computation for collective in in_ring if not collective.kernels)
        assert len(in_ring) > home.total() and max(home.values(), default=0) <= (dtype == "f32"), (
            home
        )
    weights = of_kind(prefetching, "collective-permute", results=(("bf16", shard),))
    assert {collective.backward for collective in weights} == {False, True}
