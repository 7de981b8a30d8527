"""A layer of a few numbers on one device, and its formula, which jax differentiates itself."""

import jax
import jax.numpy as jnp
import numpy as np

from model.attention import AttentionOp, TokenCoords
from model.attention.kernels import get_kernel
from model.linear import product

TOKENS, HIDDEN, HEADS, KEY_HEADS, SIZE = 16, 4, 4, 2, 2
SHAPES = {
    "norm": (HIDDEN,),
    "q_proj": (HIDDEN, HEADS, SIZE),
    "k_proj": (HIDDEN, KEY_HEADS, SIZE),
    "v_proj": (HIDDEN, KEY_HEADS, SIZE),
    "o_proj": (HEADS, SIZE, HIDDEN),
    "mlp": (HIDDEN, HIDDEN),
}
HEAD_AXES = {"norm": None, "q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 0, "mlp": None}


def arguments():
    """Weights, inputs, positions and coordinates."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
    }
    x = rng.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    index = np.arange(TOKENS, dtype=np.int32)[None]
    return weights, x, index, TokenCoords(index, np.ones_like(index))


def projected(weights, x, positions, which="qkv"):
    """Projections after a norm whose weight all heads share, and a factor that depends on
    positions."""
    x = x * weights["norm"] * jnp.cos(positions)[..., None]
    return tuple(product("bte,ehd->bthd", x, weights[f"{name}_proj"]) for name in which)


def attention_op():
    kernel = get_kernel("reference")
    return AttentionOp.create(SIZE, schedule="local", kernel=kernel, axis="sequence", size=1)


def attended(weights, x, positions, coords):
    """Attention's output by its formula."""
    q, k, v = projected(weights, x, positions)
    k, v = (jnp.repeat(t, HEADS // KEY_HEADS, 2) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    seen = coords.index[:, :, None] >= coords.index[:, None, :]
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def values_and_gradients(*functions):
    """Returns each function's value at `arguments`, and its gradients of weights and inputs."""
    return jax.jit(lambda *a: tuple(jax.value_and_grad(f, (0, 1))(*a) for f in functions))(
        *arguments()
    )
