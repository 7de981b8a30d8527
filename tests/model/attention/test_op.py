"""`attention` on meshes with other axes than ours: against dense float64, with and without
coordinates; whatever does not fit is refused by the name of its argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from model.attention import Mask, TokenCoords, attention, inverse, permutation
from model.attention.kernels import get_kernel

from .cases import QUICK, check, documents, inputs
from .dense import dense_attention

LENGTH = 48
AXES = {"batch_axes": "dp", "head_axis": "tp", "sequence_axis": "cp"}
ALONE = np.ones((2, LENGTH), np.int32)  # each row is one document


def mesh_of(**sizes):
    """Returns a mesh of devices with these axes."""
    devices = np.array(jax.devices()[: np.prod([*sizes.values()])])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def results(mesh, coords, arrays, sinks=None, **options):
    """Returns out, lse, dq, dk and dv of arrays in the layout's order."""
    *qkv, dout = arrays

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, dout):
        (out, lse), pullback = jax.vjp(
            lambda *arrays: attention(
                *arrays, coords, mesh=mesh, sinks=sinks, return_lse=True, **options
            ),
            *(q, k, v),
        )
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    return run(*qkv, dout)


@pytest.mark.parametrize(
    ("order", "schedule", "layout"),
    [
        (("dp", "cp", "tp"), "ring", "striped"),
        (("dp", "cp", "tp"), "balanced", "zigzag"),
        (("tp", "cp", "dp"), "ring", "contiguous"),
    ],
)
def test_axes_may_have_any_names_and_order(order, schedule, layout):
    arrays, coords = inputs("8/2", LENGTH), documents("packed", LENGTH)
    permuted = permutation(LENGTH, 2, layout)
    got = results(
        mesh_of(**dict.fromkeys(order, 2)),
        TokenCoords(*(x[:, permuted] for x in coords)),
        [x[:, permuted] for x in arrays],
        schedule=schedule,
        layout=layout,
        **AXES,
    )
    check(got, dense_attention(*arrays[:3], *coords, arrays[3]), permuted)


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        ("striped", Mask()),
        ("contiguous", Mask()),
        ("striped", Mask(causal=False)),
        ("contiguous", Mask(window=9)),
        ("striped", Mask(window=9, global_tokens=3)),
    ],
)
def test_without_coordinates_each_row_is_one_document(layout, mask):
    arrays, coords = inputs("8/2", LENGTH), documents("one", LENGTH)
    order = permutation(LENGTH, 4, layout)
    got = results(
        mesh_of(dp=2, cp=4), None, [x[:, order] for x in arrays], layout=layout, mask=mask, **AXES
    )
    options = {"window": mask.window, "global_tokens": mask.global_tokens, "causal": mask.causal}
    check(got, dense_attention(*arrays[:3], *coords, arrays[3], **options), order)


def test_arrays_on_one_device_need_neither_coordinates_nor_layout():
    arrays = inputs("4/4", LENGTH)
    got = results(mesh_of(x=1), None, arrays, batch_axes=("x",), head_axis=None, sequence_axis=None)
    expected = dense_attention(*arrays[:3], *documents("one", LENGTH), arrays[3])
    check(got, expected, np.arange(LENGTH))


def test_several_axes_may_split_rows_and_heads_may_stay_whole():
    """With the gradients of sinks, which are sums over all axes but that of the heads."""
    arrays, order = inputs("8/2", LENGTH), permutation(LENGTH, 2, "striped")
    mesh, sinks = mesh_of(replica=2, cp=2), np.linspace(-1, 1, 8, dtype=np.float32)
    options = {"batch_axes": ["replica", "dp"], "head_axis": None, "sequence_axis": "cp"}

    def total(sinks):
        q, k, v, dout = (x[:, order] for x in arrays)
        out = attention(q, k, v, mesh=mesh, layout="striped", sinks=sinks, **options)
        return jnp.sum(out * dout), out

    gradient, out = jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICK)(sinks)
    expected = dense_attention(*arrays[:3], *documents("one", LENGTH), arrays[3], sinks=sinks)
    np.testing.assert_allclose(np.asarray(out)[:, inverse(order)], expected[0], atol=2e-5)
    np.testing.assert_allclose(gradient, expected[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("types", "given"), [("EEE", "nothing"), ("EEE", "documents"), ("AEA", "documents")]
)
def test_a_mesh_may_have_explicit_axes(types, given):
    """As those of `jax.make_mesh` are, whose arrays have their sharding in their types."""
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), tuple(kinds[kind] for kind in types))
    arrays, packed = inputs("8/2", LENGTH), documents("packed", LENGTH)
    coords = packed if given == "documents" else None
    with jax.set_mesh(mesh):
        got = results(mesh, coords, arrays, layout="contiguous", **AXES)
    options = {"mesh": mesh, "layout": "contiguous", **AXES}
    outside = jax.jit(lambda q, k, v: attention(q, k, v, coords, **options))(*arrays[:3])
    expected = dense_attention(*arrays[:3], *(coords or documents("one", LENGTH)), arrays[3])
    check(got, expected, np.arange(LENGTH))
    np.testing.assert_allclose(outside, got[0], atol=2e-5)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_coordinates_may_have_any_dtype_of_integers(dtype):
    """Differences of unsigned ones would wrap around."""
    arrays, coords = inputs("4/4", LENGTH), documents("packed", LENGTH)
    mesh, options = mesh_of(cp=1), {"kernel": get_kernel(query_tile=16, key_tile=16), **AXES}
    got = results(
        mesh, tuple(x.astype(dtype) for x in coords), arrays, mask=Mask(window=20), **options
    )
    check(got, dense_attention(*arrays[:3], *coords, arrays[3], window=20), np.arange(LENGTH))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sequence_axis": "sp"},
            "mesh: found the axis 'cp', over which nothing would be split; name it in batch_axes "
            "(dp), head_axis (tp) or sequence_axis (sp)",
        ),
        ({"batch_axes": ()}, "mesh: found the axis 'dp'"),
        ({"head_axis": None}, "mesh: found the axis 'tp'"),
        ({"head_axis": "cp"}, "batch_axes, head_axis and sequence_axis: found 'cp' twice"),
        ({"batch_axes": ("dp", "dp")}, "found 'dp' twice"),
        ({"batch_axes": ("dp", None)}, "batch_axes: found ('dp', None); needs names of axes"),
        ({"batch_axes": None}, "batch_axes: found None; needs names of axes, () for none"),
        ({"sequence_axis": ("cp", "tp")}, "sequence_axis: found ('cp', 'tp'); needs the name of"),
        ({"layout": None}, "layout: not given, and without coords the order of the tokens follows"),
        ({"layout": "natural"}, "layout: found 'natural'; known: contiguous, striped, zigzag"),
        ({"mask": True}, "mask: found True; needs a Mask, such as"),
        ({"mask": np.ones((1, 1, 48, 48), bool)}, "mask: found an array, bool (1, 1, 48, 48)"),
        ({"scale": float("nan")}, "scale: found nan; needs a finite Python number"),
        ({"scale": jnp.ones(())}, "scale: found an array, float32 (); needs a finite Python"),
        ({"kernel": None}, "kernel: found None; needs a name, or a Kernel"),
        ({"coords": ALONE}, "coords: found an array, int32 (2, 48); needs TokenCoords(index, "),
        ({"coords": (ALONE,)}, "coords: found a tuple of 1; needs TokenCoords(index, segment_ids)"),
        ({"coords": (ALONE, None)}, "coords.segment_ids: found shape (); needs [B, L] = (2, 48)"),
        (
            {"coords": (ALONE, ALONE + np.int64(2**32))},
            "coords.segment_ids: found 4294967297; needs numbers",
        ),
        (
            {"coords": (ALONE, ALONE), "kv_coords": (ALONE, ALONE, None, ALONE)},
            "coords.shared: not given, found kv_coords.shared; queries and keys need both",
        ),
        (
            {"coords": (ALONE, ALONE, None, ALONE), "kv_coords": (ALONE, ALONE)},
            "kv_coords.shared: not given, found coords.shared; queries and keys need both",
        ),
        ({"kv_coords": (ALONE, ALONE)}, "coords: not given, found kv_coords; needed unless"),
        ({"k": 24, "v": 24}, "coords: not given, found q (2, 48, 8, 8) and k (2, 24, 8, 8);"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    arrays = [jnp.ones((2, change.get(name, LENGTH), 8, 8)) for name in "qkv"]
    change = {name: value for name, value in change.items() if name not in "qkv"}
    options = {"layout": "contiguous", **AXES, **change}
    with pytest.raises(ValueError) as error:
        attention(*arrays, mesh=mesh_of(dp=2, cp=2, tp=2), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "heads", "message"),
    [
        (3, 4, "batch: 3 rows are not divisible by dp = 2; use a multiple of 2"),
        (2, 3, "heads: 3 key/value heads are not divisible by tp = 2"),
    ],
)
def test_a_size_that_an_axis_does_not_divide_is_refused_with_the_axis_name(rows, heads, message):
    x = jnp.ones((rows, LENGTH, heads, 8))
    with pytest.raises(ValueError) as error:
        attention(x, x, x, mesh=mesh_of(dp=2, cp=2, tp=2), layout="contiguous", **AXES)
    assert message in str(error.value)


@pytest.mark.parametrize("x", [jnp.ones((2, LENGTH, 8)), jnp.ones((2, LENGTH, 2, 8), int)])
def test_other_arrays_are_refused(x):
    with pytest.raises(ValueError, match=r"^q: found .*; needs floating-point numbers \[B, L,"):
        attention(x, x, x, mesh=mesh_of(cp=2), sequence_axis="cp", layout="contiguous")
