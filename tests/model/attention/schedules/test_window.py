"""What a sliding window does not save, and what would save more."""

import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model.attention import Mask, TokenCoords, attention
from model.attention.schedules import SCHEDULES
from model.attention.schedules.plan import Block
from model.attention.schedules.window import window_lines

WINDOW = Mask(window=4096)


def block(tokens: int, heads: int = 8) -> Block:
    """Returns a block with as many KV heads as query heads."""
    return Block(batch=1, tokens=tokens, query_heads=heads, kv_heads=heads, head_dim=2)


@pytest.mark.parametrize(
    ("schedule", "layout", "masks", "words"),
    [
        (
            "ring",
            "striped",
            [WINDOW],
            [
                "4,096 tokens in all layers",
                "saves products but no communication",
                "1 other device alone",
            ],
        ),
        (
            "ulysses",
            "striped",
            [WINDOW],
            ["saves products but no communication", "attention.layout contiguous"],
        ),
        (
            "all_gather",
            "zigzag",
            [Mask(), WINDOW],
            ["1 of every 2 layers", "leaves the layers without a window unbalanced"],
        ),
        (
            "ring_self_attention",
            "striped",
            [WINDOW],
            ["ring_self_attention also computes the scores"],
        ),
        (
            "ring_self_attention",
            "striped",
            [Mask(window=4096, global_tokens=4)],
            ["ring_self_attention also computes the scores"],
        ),
        ("ring", "striped", [Mask(window=40000)], ["saves products but no communication"]),
        (
            "ring",
            "striped",
            [Mask(window=4096, global_tokens=4)],
            ["1 other device and the global tokens alone"],
        ),
        (
            "balanced",
            "contiguous",
            [Mask(window=4096, global_tokens=4)],
            ["saves products but no communication", "schedule ring"],
        ),
    ],
)
def test_a_line_names_what_a_window_does_not_save(schedule, layout, masks, words):
    (line,) = window_lines(schedule, layout, 8, block(4096), masks)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("schedule", "layout", "size", "mask"),
    [
        ("ring", "contiguous", 8, WINDOW),
        ("balanced", "contiguous", 8, WINDOW),
        ("ring", "striped", 1, WINDOW),
        ("ring", "striped", 8, Mask()),
        ("ring", "contiguous", 8, Mask(window=4096, global_tokens=4)),
    ],
)
def test_no_line_where_a_window_saves_everything(schedule, layout, size, mask):
    assert window_lines(schedule, layout, size, block(4096, size), [mask]) == []


def test_a_ring_is_proposed_only_if_the_heads_make_it_cheaper():
    """Ulysses sends queries and outputs; the keys and values of two other devices are smaller if 4
    query heads share a KV head."""
    grouped, each = (
        Block(batch=1, tokens=4096, query_heads=32, kv_heads=heads, head_dim=128)
        for heads in (8, 32)
    )
    mask = Mask(window=8000)
    assert (
        "those of 2 other devices alone"
        in window_lines("ulysses", "striped", 8, grouped, [mask])[0]
    )
    assert "other devices" not in window_lines("ulysses", "striped", 8, each, [mask])[0]


OPTIONS = (
    {"name": "ring", "bidirectional": True},
    {"name": "balanced", "split": True},
    {"name": "attention2d", "columns": 2},
    {"name": "ulysses", "degree": 2, "inner": "ring"},
    {"name": "ulysses", "degree": 2, "inner": "ring_self_attention"},
)
CASES = [
    pytest.param(
        schedule,
        layout,
        marks=pytest.mark.slow if schedule in OPTIONS or layout == "zigzag" else (),
    )
    for schedule in (*SCHEDULES, *OPTIONS)
    for layout in ("striped", "zigzag", "contiguous")
    if schedule != "local"
]


def transfers(schedule, layout: str, mask: Mask) -> int:
    """Returns the number of collectives in the traced forward pass of 128 tokens on 8 devices."""
    mesh = Mesh(jax.devices()[:8], "sequence", axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    vectors = jax.ShapeDtypeStruct((1, 128, 8, 8), "float32", sharding=sharding)
    coords = TokenCoords(*[jax.ShapeDtypeStruct((1, 128), "int32", sharding=sharding)] * 2)
    run = jax.jit(
        lambda q, k, v, coords: attention(
            q,
            k,
            v,
            coords,
            mesh=mesh,
            layout=layout,
            schedule=schedule,
            kernel="reference",
            mask=mask,
        )
    )
    text = run.lower(vectors, vectors, vectors, coords).as_text()
    return sum(
        text.count(collective) for collective in ("collective_permute", "all_gather", "all_to_all")
    )


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_a_line_appears_exactly_if_a_window_saves_no_transfer(schedule, layout):
    """For every schedule, by its traced collectives."""
    mask = Mask(window=16)
    as_much = transfers(schedule, layout, mask) == transfers(schedule, layout, Mask())
    assert bool(window_lines(schedule, layout, 8, block(16), [mask])) == as_much


def test_the_proposed_layout_sends_less():
    mask = Mask(window=16)
    assert (
        "those of 1 other device alone" in window_lines("ring", "striped", 8, block(16), [mask])[0]
    )
    assert transfers("ring", "contiguous", mask) < transfers("ring", "striped", mask)
