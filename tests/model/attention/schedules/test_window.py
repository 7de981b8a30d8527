"""What a sliding window does not save is told, and what would save more is true."""
import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model.attention import Mask, TokenCoords, attention
from model.attention.schedules.window import window_lines

WINDOW = Mask(window=4096)


@pytest.mark.parametrize(("schedule", "layout", "masks", "words"), [
    ("ring", "striped", [WINDOW], ["4,096 tokens in all layers", "still receives all keys", "those of 1 other device alone"]),
    ("ulysses", "striped", [WINDOW], ["still receives all keys", "attention.layout contiguous"]),
    ("all_gather", "zigzag", [Mask(), WINDOW], ["1 of every 2 layers", "leaves the layers without a window unbalanced"]),
    ("ring_self_attention", "striped", [WINDOW], ["ring_self_attention also computes the scores"]),
    ("ring", "striped", [Mask(window=40000)], ["still receives all keys"]),
])
def test_what_a_window_does_not_save_is_told(schedule, layout, masks, words):
    line, = window_lines(schedule, layout, 8, 4096, masks)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(("schedule", "layout", "size", "mask"), [
    ("ring", "contiguous", 8, WINDOW), ("balanced", "contiguous", 8, WINDOW), ("ring", "striped", 1, WINDOW),
    ("ring", "striped", 8, Mask()), ("ring", "striped", 8, Mask(window=4096, global_tokens=4)),
])
def test_nothing_is_told_where_nothing_is_lost(schedule, layout, size, mask):
    assert window_lines(schedule, layout, size, 4096, [mask]) == []


def hops(layout: str) -> int:
    """The permutations of K, V and coordinates that the compiled forward of a windowed ring has."""
    mesh = Mesh(jax.devices()[:8], "sequence", axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    vectors = jax.ShapeDtypeStruct((1, 128, 1, 8), "float32", sharding=sharding)
    coords = TokenCoords(*[jax.ShapeDtypeStruct((1, 128), "int32", sharding=sharding)] * 2)
    run = jax.jit(lambda q, k, v, coords: attention(q, k, v, coords, mesh=mesh, layout=layout, kernel="reference",
                                                    mask=Mask(window=16)))
    return run.lower(vectors, vectors, vectors, coords).as_text().count("collective_permute")


def test_the_proposed_layout_sends_less():
    assert "those of 1 other device alone" in window_lines("ring", "striped", 8, 16, [Mask(window=16)])[0]
    assert hops("contiguous") < hops("striped")
