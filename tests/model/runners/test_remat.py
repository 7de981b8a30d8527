"""What each remat policy keeps and recomputes; under `save_attention` no schedule recomputes
attention or keeps length x length."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from model.attention.kernels import Kernel, get_kernel
from model.memory.options import MemoryConfig
from model.memory.policies import POLICIES
from model.parameter_declarations import declare_layer
from tests.model.build import abstract, llama, mean_loss, packed_batch, tiny

# Every other size, model.lookup's blocks of tokens included, is smaller than a device's tokens.
ROWS, LENGTH = 1, 4096
SCHEDULES = [
    "ring",
    "all_gather",
    "balanced",
    {"name": "balanced", "split": True},
    "ulysses",
    {"name": "ulysses", "degree": 2},
    "attention2d",
]
QUICK_SCHEDULES = "ring", "all_gather"


@functools.partial(jax.jit, static_argnames=("kernel", "mask", "scale"))
def attention_forward(kernel, *blocks, mask, scale):
    return kernel.forward(*blocks, mask=mask, scale=scale)


@dataclasses.dataclass(frozen=True)
class MarkedKernel(Kernel):
    """The XLA kernel, with a forward that appears in a traced program as a call named
    `attention_forward`."""

    kernel: Kernel = dataclasses.field(
        default_factory=lambda: get_kernel("xla", query_tile=64, key_tile=64)
    )

    def forward(self, *blocks, **options):
        return attention_forward(self.kernel, *blocks, **options)

    def backward(self, *blocks, **options):
        return self.kernel.backward(*blocks, **options)


def equations(jaxpr):
    """Yields every equation, including those of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def traced(schedule, remat, gradient):
    model = llama(
        tiny(),
        {"sequence": 4},
        schedule=schedule,
        remat=remat,
        kernel=MarkedKernel(),
        projection_chunk=64,
        feed_forward_chunk=64,
        loss_chunk=64,
    )
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype)
        for name, dtype in (
            ("tokens", jnp.int32),
            ("targets", jnp.int32),
            ("index", jnp.int32),
            ("segment_ids", jnp.int32),
            ("positions", jnp.int32),
            ("loss_weights", jnp.float32),
        )
    }

    def loss(params, batch):
        return mean_loss(model)(params, batch)[0]

    program = jax.make_jaxpr(jax.grad(loss) if gradient else loss)(abstract(model), batch)
    return list(equations(program.jaxpr))


def kernel_calls(all_equations):
    """Counts calls of the kernel's forward that multiply matrices: partial evaluation leaves others
    that only hold constants."""
    return sum(
        call.params.get("name") == "attention_forward"
        and any(
            inner.primitive.name == "dot_general" for inner in equations(call.params["jaxpr"].jaxpr)
        )
        for call in all_equations
    )


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in QUICK_SCHEDULES else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEDULES
    ],
    ids=str,
)
def test_save_attention_never_recomputes_attention(schedule):
    """It runs as often as without a gradient; if layers keep only their inputs, twice as often."""
    once = kernel_calls(traced(schedule, "save_attention", gradient=False))
    assert once > 0
    saved = traced(schedule, "save_attention", gradient=True)
    assert kernel_calls(saved) == once
    assert kernel_calls(traced(schedule, "nothing", gradient=True)) == 2 * once
    shapes = {
        out.aval.shape
        for equation in saved
        for out in equation.outvars
        if hasattr(out.aval, "shape")
    }
    own, gathered = LENGTH // 4, LENGTH
    assert any(gathered in shape or own in shape for shape in shapes)
    assert not [
        shape for shape in shapes if sum(size in (own, gathered, own * 2) for size in shape) >= 2
    ]


# Policy -> the number of products with weights in a layer's gradient, and what the scan over layers
# stacks besides the coordinates. Each of a layer's seven weights is in three products: the forward
# one, its input's gradient and its own, 21 in total. Chunks recompute all seven in their backward
# pass, and attention's backward needs q, k and v once more: 31. Groups of layers first recompute the
# group: 38.
INPUT, OUT, LSE = "layer input", "attention output", "lse"
PRODUCTS_AND_STACKED = {
    "nothing": (31, {INPUT: 1}),
    "save_attention": (31, {INPUT: 1, OUT: 1, LSE: 1}),
    "offload": (31, {INPUT + " on the host": 1}),
    "offload_save_attention": (31, {INPUT + " on the host": 1, OUT: 1, LSE: 1}),
    "offload_attention": (
        31,
        {INPUT + " on the host": 1, OUT + " on the host": 1, LSE + " on the host": 1},
    ),
    "every_k": (38, {INPUT: 1}),
    "offload_every_k": (38, {INPUT + " on the host": 1}),
    # q has the shape of attention's output, and the feed-forward's input that of the layer's.
    "everything": (21, {INPUT: 2, OUT: 2, LSE: 1, "key or value": 2, "feed-forward": 2}),
}


def stacked_outputs(scan):
    """Returns the abstract values that a scan stacks; a carry has the same shape inside and
    outside."""
    inside = scan.params["jaxpr"].jaxpr.outvars
    return [
        outer.aval
        for outer, inner in zip(scan.outvars, inside, strict=True)
        if outer.aval.shape != inner.aval.shape
    ]


def stacked_by_the_forward_pass(equations, layers):
    """Returns what the outermost scan over this many layers keeps of each, by shape; integers are
    coordinates."""
    config, tokens = tiny(), LENGTH // 4
    names = {
        (tokens, config.hidden_size): INPUT,
        (tokens, config.num_attention_heads, config.head_dim): OUT,
        (config.num_attention_heads, tokens): LSE,
        (tokens, config.num_key_value_heads, config.head_dim): "key or value",
        (tokens, config.intermediate_size): "feed-forward",
    }
    scans = (
        stacked_outputs(equation)
        for equation in equations
        if equation.primitive.name == "scan" and equation.params["length"] == layers
    )
    kept = next(filter(None, scans))
    return collections.Counter(
        names[aval.shape[2:]] + " on the host" * (aval.memory_space == jax.memory.Space.Host)
        for aval in kept
        if aval.dtype == jnp.float32
    )


@pytest.mark.parametrize("remat", POLICIES)
def test_a_policy_keeps_what_it_declares_and_recomputes_the_rest(remat):
    """Read from the program of the gradient: a recomputed product does not change the loss."""
    weights = {
        parameter.shape for parameter in declare_layer(tiny()).values() if len(parameter.shape) > 1
    }
    gradient = traced("ring", remat, gradient=True)
    products = sum(
        equation.primitive.name == "dot_general"
        and any(
            variable.aval.shape in weights for variable in (*equation.invars, *equation.outvars)
        )
        for equation in gradient
    )
    groups = (
        tiny().num_hidden_layers // MemoryConfig.every_k
        if POLICIES[remat].every_k
        else tiny().num_hidden_layers
    )
    assert (products, stacked_by_the_forward_pass(gradient, groups)) == PRODUCTS_AND_STACKED[remat]


@pytest.mark.parametrize(
    "layers",
    [4, pytest.param(5, marks=pytest.mark.slow)],
    ids=["whole periods", "a remaining layer"],
)
def test_layers_of_two_kinds_keep_no_second_copy_of_weights(layers):
    """The forward scan returns no parameters; the gradient's scan returns them in their periods of
    two."""
    config = tiny(
        family="smollm3", num_hidden_layers=layers, no_rope_layers=(1, 0, 1, 0, 1)[:layers]
    )
    model = llama(config, remat="nothing")
    jaxpr = jax.make_jaxpr(jax.grad(lambda params, batch: mean_loss(model)(params, batch)[0]))(
        abstract(model), packed_batch(config, rows=1, length=64)
    ).jaxpr
    weights = {
        parameter.shape[1:]
        for name, parameter in model.parameters.items()
        if len(parameter.shape) > 2
    }
    outputs = {
        out.aval.shape
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan" and equation.params["length"] == layers // 2
        for out in equation.outvars
    }
    assert {(layers // 2, 2, *shape) for shape in weights} <= outputs
    assert not {(layers // 2, *shape) for shape in weights} & outputs
