"""The choice of a kernel: which kernel serves what, in which order, as the guide shows."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from model.attention import choice
from model.attention.blocks import Keys, Queries
from model.attention.choice import AUTO, KERNELS, LIMITS, Request, require, select
from model.attention.coords import Mask, TokenCoords
from model.attention.kernels import get_kernel

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOPPER = Request("cuda", "NVIDIA H100 80GB HBM3", "bfloat16", head_dim=128)


@pytest.mark.parametrize(
    ("kernel", "request_", "name", "refused"),
    [
        ("auto", HOPPER, "mosaic", []),
        ("auto", HOPPER._replace(dtype="float32"), "gpu", ["mosaic"]),
        ("auto", HOPPER._replace(softcap=30.0), "xla", ["mosaic", "gpu"]),
        ("auto", HOPPER._replace(tiled=True), "gpu", ["mosaic"]),
        ("auto", HOPPER._replace(jax=(0, 12, 1)), "gpu", ["mosaic"]),
        ("auto", HOPPER._replace(device="NVIDIA L4"), "gpu", []),
        ("auto", Request("tpu", "TPU v5p", softcap=30.0), "tpu", []),
        ("auto", Request("tpu", "TPU v5p", head_dim=256), "tpu", []),
        ("auto", Request("tpu", "TPU v5p", head_dim=257), "xla", ["tpu"]),
        ("auto", Request(), "xla", []),
        ("mosaic", Request(device="cpu"), "xla", ["mosaic"]),
        ("reference", HOPPER, "reference", []),
    ],
)
def test_the_first_kernel_that_serves_is_selected_with_reasons_against_earlier_ones(
    kernel, request_, name, refused
):
    selected = select(kernel, request_)
    assert (selected.name, list(selected.refusals)) == (name, refused)
    assert all(
        f"{other!r} does not serve {reason}" in str(selected)
        for other, reason in selected.refusals.items()
    )


def test_every_order_ends_with_xla_and_every_platform_has_one():
    assert all(row.kernels[-1] == "xla" and set(row.kernels) <= set(LIMITS) for row in AUTO)
    assert LIMITS["xla"] == choice.Limits()
    for platform in ("tpu", "cuda", "default"):
        assert select("auto", Request(platform)).name in LIMITS


def test_a_refusal_names_the_field_and_the_kernels_that_serve():
    with pytest.raises(
        ValueError,
        match=r"^attention\.kernel: 'tpu' does not serve global_tokens = 4; 'auto', 'xla' and ",
    ):
        require("tpu", Request(global_tokens=4), "attention.kernel")
    require("auto", Request(global_tokens=4))


def test_every_name_creates_a_different_kernel():
    assert len({get_kernel(name) for name in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("name", ["mosaic", "cudnn", "reference"])
def test_a_tile_size_that_a_kernel_would_not_use_is_refused(name):
    reason = LIMITS[name].own_tiles
    with pytest.raises(
        ValueError, match=f"^kernel: {name!r}: {reason}, found {{'query_tile': 64}}; leave them 0$"
    ):
        get_kernel(name, query_tile=64)


def test_under_a_mesh_only_the_kernel_of_its_platform_is_traced():
    """Tracing the other platforms' kernels took half of the tracing time of a small step."""
    q = jnp.zeros((1, 16, 2, 8))
    coords = TokenCoords(jnp.zeros((1, 16), int), jnp.ones((1, 16), int))

    def forward(q):
        queries, keys = Queries(q, coords), Keys(q, q, coords)
        return get_kernel().forward(queries, keys, mask=Mask(), scale=1.0).out

    mesh, everywhere = Mesh(np.array(jax.devices()[:1]), "sequence"), PartitionSpec()
    under_mesh = jax.shard_map(
        forward, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    assert "pallas_call" in str(jax.make_jaxpr(forward)(q))
    assert "pallas_call" not in str(jax.make_jaxpr(under_mesh)(q))


def table() -> list[str]:
    """Returns what `auto` selects, as lines of a Markdown table."""
    requests = {
        "bfloat16": Request(dtype="bfloat16"),
        "float32": Request(dtype="float32"),
        "soft-capped scores": Request(dtype="bfloat16", softcap=50.0),
        "global tokens": Request(dtype="bfloat16", global_tokens=1),
        "head sizes above 256": Request(dtype="bfloat16", head_dim=257),
        "tile sizes set": Request(dtype="bfloat16", tiled=True),
    }
    devices = {
        "TPU": ("tpu", "TPU v5p"),
        "Hopper GPU": ("cuda", "NVIDIA H100"),
        "other NVIDIA GPU": ("cuda", "NVIDIA A100"),
        "CPU, other": ("default", "cpu"),
    }
    lines = [f"| device | {' | '.join(requests)} |", "|---" * (len(requests) + 1) + "|"]
    for title, (platform, device) in devices.items():
        names = (
            select("auto", request._replace(platform=platform, device=device)).name
            for request in requests.values()
        )
        lines.append(f"| {title} | {' | '.join(f'`{name}`' for name in names)} |")
    return lines


def test_the_guide_shows_the_table():
    assert "\n".join(table()) in (ROOT / "docs/attention.md").read_text(encoding="utf-8")


def test_recipes_are_checked_without_jax():
    program = "import sys, model.attention.options; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
