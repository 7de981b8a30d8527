"""The arrays of a checkpoint on disk: their names and shapes, damage, and that listing them keeps
no memory."""

import gc
import shutil
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.checkpoint.arrays import open_arrays, stored_shapes
from trainer.checkpoint.commit import remove
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.saving import Contents, Saving

MODEL = {
    "norm.weight": jnp.arange(4.0),
    **{f"layers.{n}": jnp.full((2, 3), n, jnp.bfloat16) for n in range(8)},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    base = tmp_path_factory.mktemp("arrays")
    (base / "assets").mkdir()
    Saving(base / "checkpoints" / "1", Contents(MODEL, base / "assets")).wait()
    return base / "checkpoints" / "1"


def test_names_shapes_and_values_are_as_saved(checkpoint):
    shapes = {
        name: (array.shape, array.dtype)
        for name, array in stored_shapes(checkpoint, "model").items()
    }
    assert shapes == {name: (array.shape, array.dtype) for name, array in MODEL.items()}
    arrays = open_arrays(checkpoint, "model")
    for name, array in MODEL.items():  # layer 0 is all zeros
        np.testing.assert_array_equal(np.asarray(arrays[name]), np.asarray(array))


@pytest.mark.parametrize("first", [False, True])
def test_an_array_that_is_removed_meanwhile_is_not_read_as_zeros(checkpoint, tmp_path, first):
    """TensorStore fills chunks that it does not find, and its index is then read as empty."""
    folder = shutil.copytree(checkpoint, tmp_path / "1")
    arrays = open_arrays(folder, "model")
    if first:
        assert np.asarray(arrays["norm.weight"]).any()
    remove(folder)
    with pytest.raises(ValueError, match=r"NOT_FOUND.*layers\.3"):
        np.asarray(arrays["layers.3"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda item: (item / "_METADATA").unlink(),
        lambda item: (item / "_METADATA").write_text('{"tree_metadata": [1]}'),
        lambda item: (item / "_METADATA").write_text("[" * 100_000),
        lambda item: (item / "manifest.ocdbt").unlink(),
        lambda item: (item / "manifest.ocdbt").write_bytes(b"not one"),
        shutil.rmtree,
    ],
)
def test_unreadable_arrays_are_named(checkpoint, tmp_path, damage):
    shutil.copytree(checkpoint, tmp_path / "1")
    damage(tmp_path / "1" / "model")
    with pytest.raises(
        DamagedError,
        match=r"1: finds no index of the arrays of model \(.+\); an older checkpoint would work",
    ):
        stored_shapes(tmp_path / "1", "model")


def test_listing_shapes_keeps_no_memory(checkpoint):
    """A run that saves for days lists every array after every save."""
    stored_shapes(checkpoint, "model")
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(40):
            stored_shapes(checkpoint, "model")
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 40 * len(MODEL) * 100  # bytes; each array's JSON would be 3,000
