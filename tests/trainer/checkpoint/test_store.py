"""Checkpoints: bitwise, atomic, verified, restored onto other meshes."""

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from data.errors import TransientError, UserError
from tests.soak.slow_store import slow_store
from trainer.checkpoint import manifest, readers, saving
from trainer.checkpoint import store as run_store
from trainer.checkpoint.commit import MANIFEST, Files, remove, scratch_of
from trainer.checkpoint.items import restore_item
from trainer.checkpoint.manifest import DamagedError, ForeignError
from trainer.checkpoint.readers import (
    assets_dir,
    find_checkpoint,
    read_data,
    restore_model,
    stored_parameters,
)
from trainer.checkpoint.saving import SaveError, flatten
from trainer.checkpoint.store import CheckpointStore, save_checkpoint

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def placed(mesh_shape: tuple[int, int], values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    mesh = jax.make_mesh(mesh_shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = {"embed.weight": ("a", "b"), "layers.w.weight": (None, ("a", "b"))}
    return {
        n: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*specs.get(n, ()))))
        for n, v in values.items()
    }


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, -0.0, np.inf, 1e-45, 3.0], np.float32)
    return {
        "embed.weight": rng.standard_normal((8, 8)).astype(np.float32),
        "norm.weight": odd,
        "layers.w.weight": rng.standard_normal((3, 8, 4)).astype(jnp.bfloat16),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same_bits(a, b) -> bool:
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture
def warned(capsys):
    """Returns a context manager that expects the warning, matching a pattern, that an earlier
    checkpoint is used."""

    @contextlib.contextmanager
    def context(words):
        capsys.readouterr()
        try:
            yield
        finally:
            assert re.search(
                rf"(?m)^warning: .*(?:{words}).*; using the previous checkpoint$",
                capsys.readouterr().err,
            )

    return context


@pytest.fixture
def assets(tmp_path) -> Path:
    folder = tmp_path / "assets"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep/run.yaml").write_text("seed: 1\n")
    return folder


@pytest.fixture
def run(tmp_path, assets) -> Path:
    """A run with checkpoints at 10 and 20."""
    model = placed((2, 4), values())
    with CheckpointStore(tmp_path / "run") as store:
        for step in (10, 20):
            store.save(
                step, model=model, optimizer=TX.init(model), data={"step": step}, assets=assets
            )
    return tmp_path / "run"


@pytest.mark.parametrize("mesh", [(2, 4), (8, 1), (1, 2)])
def test_everything_comes_back_bitwise_on_any_mesh(run, mesh):
    model = placed(mesh, values())
    state = TX.init(model)
    store = CheckpointStore(run)
    assert store.latest_good() == 20
    restored = store.restore(20, abstract(model), abstract(state))
    assert restored.step == 20 and restored.data == {"step": 20}
    assert same_bits(restored.model, model) and same_bits(restored.optimizer, state)
    assert jax.tree.structure(restored.optimizer) == jax.tree.structure(state)
    assert all(restored.model[name].sharding == model[name].sharding for name in model)
    assert (store.path(20) / "assets/deep/run.yaml").read_text() == "seed: 1\n"


def test_donated_while_saving(tmp_path, assets):
    """The next step overwrites the arrays while they are being written."""
    step = jax.jit(lambda m: {k: v * 0 - 1 for k, v in m.items()}, donate_argnums=0)
    store, model = CheckpointStore(tmp_path / "run"), placed((2, 4), values())
    big = jax.device_put(np.arange(2**22, dtype=np.float32), model["norm.weight"].sharding)
    model["big"] = big
    store.save(1, model=model, assets=assets)
    for _ in range(5):
        model = step(model)
    jax.block_until_ready(model)
    store.wait()
    restored = restore_model(tmp_path / "run")
    assert all(type(array) is np.ndarray for array in restored.values())
    assert same_bits({k: restored[k] for k in values()}, values())
    np.testing.assert_array_equal(restored["big"], np.arange(2**22, dtype=np.float32))


def test_one_flipped_bit_in_any_file_is_found(run, warned):
    newest = run / "checkpoints/20"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert len(files) > 10
    for file in files:
        original = file.read_bytes()
        if not original:
            continue
        for offset in {0, len(original) // 2, len(original) - 1}:
            file.write_bytes(
                original[:offset] + bytes([original[offset] ^ 4]) + original[offset + 1 :]
            )
            with warned(file.name):
                assert CheckpointStore(run).latest_good() == 10
        file.write_bytes(original[:-1])
        with warned(file.name):
            assert CheckpointStore(run).latest_good() == 10
        file.unlink()
        with warned(f"{file.name} is missing|no {file.name}"):
            assert CheckpointStore(run).latest_good() == 10
        file.write_bytes(original)
    assert CheckpointStore(run).latest_good() == 20


@pytest.mark.parametrize(("item", "found"), [("model", True), ("optimizer", False)])
def test_a_reader_of_parameters_finds_damage_only_in_files_that_it_reads(run, item, found):
    newest = run / "checkpoints/20"
    largest = max(
        (path for path in (newest / item).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = largest.read_bytes()
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedError, match=largest.name) if found else contextlib.nullcontext():
        restore_model(newest)


def test_files_that_a_caller_has_compared_are_not_compared_again(run, read):
    assert restore_model(run / "checkpoints/20", verified=True) and not read


@pytest.mark.parametrize("use", ["_abstract_model", "restore_item"])
def test_a_removal_while_a_checkpoint_is_read_is_named(run, monkeypatch, use):
    original = getattr(readers, use)

    def after_removal(*arguments):
        remove(run / "checkpoints/20")
        return original(*arguments)

    monkeypatch.setattr(readers, use, after_removal)
    with pytest.raises(TransientError, match="checkpoints/20: was removed while it was read"):
        restore_model(run)


@pytest.mark.parametrize("times", [1, 9])
def test_a_checkpoint_that_training_replaces_meanwhile_is_not_damaged(
    run, monkeypatch, capsys, times
):
    """The run was once said to have nothing but damaged checkpoints."""
    remove(run / "checkpoints/10")
    original, moves = run_store.problem_in_any, iter(range(times))

    def after_a_save(folder, *arguments, **named):
        if next(moves, None) is not None:
            folder.rename(folder.with_name(str(int(folder.name) + 10)))
        return original(folder, *arguments, **named)

    monkeypatch.setattr(run_store, "problem_in_any", after_a_save)
    if times == 1:
        assert CheckpointStore(run).latest_good() == 30
    else:
        with pytest.raises(TransientError, match="/60: was removed while it was read, as the 4 b"):
            CheckpointStore(run).latest_good()
    assert capsys.readouterr().err == ""


def test_best_is_the_step_that_the_newest_checkpoint_names(run, assets):
    with pytest.raises(ForeignError, match="best: this run has no best checkpoint"):
        find_checkpoint(run / "best")
    with CheckpointStore(run) as store:
        store.save(30, model=placed((1, 2), values()), data={"best": {"step": 10}}, assets=assets)
    assert find_checkpoint(run / "best") == run / "checkpoints/10"


def test_every_file_and_folder_of_a_checkpoint_is_durable_before_it_counts(
    tmp_path, assets, monkeypatch
):
    """fsync on each file, each folder of the checkpoint, and the parent folder after the rename."""
    synced: dict[tuple[int, int], None] = {}
    fsync = os.fsync

    def record(handle):
        status = os.fstat(handle)
        synced[status.st_dev, status.st_ino] = None
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    with CheckpointStore(tmp_path / "run") as store:
        store.save(1, model=placed((1, 2), values()), assets=assets)
        store.wait()
    folder = tmp_path / "run/checkpoints/1"
    for path in [folder.parent, folder, *folder.rglob("*")]:
        status = path.stat()
        assert (status.st_dev, status.st_ino) in synced, path.relative_to(tmp_path)


@pytest.fixture
def read(monkeypatch):
    """The files compared with the manifest, one entry per comparison."""
    paths, record = [], Files.record

    def recording(files, name, *size):
        paths.append(files.folder / name)
        return record(files, name, *size)

    monkeypatch.setattr(Files, "record", recording)
    return paths


@pytest.mark.parametrize("use", [restore_model, stored_parameters])
def test_every_file_is_compared_once(run, read, use):
    for path in (run, run / "checkpoints/20"):
        read.clear()
        use(path)
        assert run / "checkpoints/20/assets/config.json" in read and len(read) == len(set(read)), (
            path
        )


def test_each_process_compares_a_share_and_relies_on_the_others(run, read, monkeypatch):
    newest, shares = run / "checkpoints/20", []
    received = ["", ""]
    monkeypatch.setattr(run_store, "exchange", lambda ours: [["", ""], received, ours])
    monkeypatch.setattr(run_store, "first_then_others", lambda work, tell: work("[10, 20]"))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for number in range(3):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        read.clear()
        assert find_checkpoint(run) == newest
        shares.append(set(read))
    listed = {newest / name for name in manifest.read_manifest(newest)["files"]}
    assert shares[0] | shares[1] | shares[2] == listed
    assert sum(map(len, shares)) == len(listed), "no file twice"
    received[:] = ["DamagedError", "model/d/1 is damaged"]
    with pytest.raises(ValueError, match=r"every checkpoint is damaged \(newest: model/d/1 is"):
        CheckpointStore(run).latest_good()
    with pytest.raises(DamagedError, match="model/d/1 is damaged"):
        find_checkpoint(newest, ["model"])


def test_all_processes_use_the_steps_that_the_first_one_sees(run, monkeypatch):
    monkeypatch.setattr(
        run_store, "first_then_others", lambda work, tell: work(None) and work(tell([10]))
    )
    assert CheckpointStore(run).steps_for_all() == [10]


def test_damaged_by_path_and_all_damaged(run, capsys):
    for step in (10, 20):
        (run / f"checkpoints/{step}/data/data.json").write_text('{"step": 11}')
    with pytest.raises(DamagedError, match=r"data/data\.json"):
        find_checkpoint(run / "checkpoints/10", ["data"])
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        CheckpointStore(run).latest_good()
    assert capsys.readouterr().err == "", "there is no other checkpoint to use"
    restore_model(run / "checkpoints/10")  # files that are not read may be damaged


def test_a_folder_in_place_of_the_manifest_is_damage(run, warned):
    manifest = run / "checkpoints/20/manifest.json"
    manifest.unlink()
    manifest.mkdir()
    with warned(r"checkpoints/20: manifest.json cannot be read \(Is a directory\)"):
        assert CheckpointStore(run).latest_good() == 10


def test_a_damaged_checkpoint_is_replaced_and_not_counted(run, assets, warned):
    model = placed((2, 4), values())
    (run / "checkpoints/20/assets/config.json").write_text("{ }")
    store = CheckpointStore(run, keep=2)
    with warned(""):
        assert store.latest_good() == 10
    store.save(15, model=model, assets=assets)
    store.wait()
    assert store.steps() == [10, 15, 20]
    store.save(20, model=model, assets=assets)
    store.wait()
    assert store.steps() == [15, 20]
    assert CheckpointStore(run).latest_good() == 20


def test_a_checkpoint_that_could_not_be_replaced_still_counts(run, assets, monkeypatch):
    def fail(path, target):
        if path.name == "20.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fail)
    store = CheckpointStore(run)
    store.save(20, model=placed((2, 4), values()), assets=assets)
    with pytest.raises(SaveError, match="Input/output error"):
        store.wait()
    assert store.latest_good() == 20 and os.listdir(run / "checkpoints/20")
    assert not list((run / "checkpoints").glob("*.tmp*"))


def test_retention(tmp_path, assets):
    with CheckpointStore(tmp_path / "run", keep=2) as store:
        for step in (5, 10, 100, 20):
            store.save(step, model=placed((2, 4), values()), assets=assets)
    assert store.steps() == [20, 100]
    assert sorted(p.name for p in store.folder.iterdir()) == ["100", "20"]


def test_foreign_and_absent(tmp_path, run, assets):
    assert CheckpointStore(tmp_path / "new").latest_good() is None
    with pytest.raises(ForeignError, match="no such folder"):
        find_checkpoint(tmp_path / "new")
    with pytest.raises(ForeignError, match="Hugging Face folder"):
        restore_model(assets)
    (tmp_path / "foreign/checkpoints/7/params").mkdir(parents=True)
    with pytest.raises(ForeignError, match="not a checkpoint of this project"):
        CheckpointStore(tmp_path / "foreign").latest_good()
    (tmp_path / "web").mkdir()
    (tmp_path / "web/manifest.json").write_text(json.dumps({"name": "a web page"}))
    with pytest.raises(ForeignError, match="another kind"):
        restore_model(tmp_path / "web")
    assert find_checkpoint(run) == find_checkpoint(run / "checkpoints") == run / "checkpoints/20"


def test_another_model_or_optimizer_is_named(run):
    model = placed((2, 4), values())
    path = run / "checkpoints/20"

    def message(other, state=TX.init(model)) -> str:  # noqa: B008 - not changed
        with pytest.raises(ValueError) as caught:
            CheckpointStore(run).restore(20, abstract(other), abstract(state))
        return str(caught.value)

    without = message({k: v for k, v in model.items() if k != "norm.weight"})
    assert "norm.weight is in the checkpoint, but not in this run" in without
    assert "extra is not in the checkpoint" in message({**model, "extra": model["norm.weight"]})
    wrong = message({**model, "norm.weight": jnp.zeros(7)})
    assert "norm.weight" in wrong and "[5]" in wrong and "[7]" in wrong
    assert "bfloat16" in message({**model, "norm.weight": jnp.zeros(5, jnp.bfloat16)})
    assert "version" not in wrong
    for state in (
        optax.sgd(0.1, momentum=0.9).init(model),
        jax.tree.map(lambda array: jnp.zeros((3, *array.shape)), TX.init(model)),
        {"nothing": ()},
    ):
        refused = message(model, state)
        assert "optimizer state" in refused
        assert refused.endswith("with the version and settings that began it, or begin a new one")

    shardings = {name: array.sharding for name, array in model.items()}
    with pytest.raises(ValueError, match="parameter extra is not in the checkpoint"):
        restore_model(path, {**shardings, "extra": shardings["norm.weight"]})
    del shardings["norm.weight"]
    with pytest.raises(
        ValueError, match=r"parameter norm\.weight is in the checkpoint, but not in"
    ):
        restore_model(path, shardings)


def test_a_checkpoint_in_a_bucket_comes_back_bitwise(s3, assets):
    """Orbax cannot read there."""
    model = placed((2, 4), values())
    state = TX.init(model)
    with CheckpointStore("s3://bucket/run") as store:
        store.save(1, model=model, optimizer=state, assets=assets)
    store = CheckpointStore("s3://bucket/run")
    assert store.latest_good() == 1
    restored = store.restore(1, abstract(model), abstract(state))
    assert same_bits(restored.model, model) and same_bits(restored.optimizer, state)
    assert all(restored.model[name].sharding == array.sharding for name, array in model.items())


def test_an_imported_model_has_no_optimizer(tmp_path, assets):
    model = placed((2, 4), values())
    save_checkpoint(tmp_path / "ck", model=model, assets=assets)
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == [
        "assets",
        "manifest.json",
        "model",
    ]
    assert same_bits(
        restore_model(tmp_path / "ck", {k: v.sharding for k, v in model.items()}), model
    )
    assert read_data(tmp_path / "ck") is None
    assert (assets_dir(tmp_path / "ck") / "config.json").exists()
    with pytest.raises(ForeignError, match="no optimizer"):
        restore_item(tmp_path / "ck", "optimizer", flatten(abstract(TX.init(model))))
    with pytest.raises(UserError, match="not an empty folder"):
        save_checkpoint(tmp_path / "ck", model=model, assets=assets)


def test_recorded_shapes_tell_padding_from_the_model(tmp_path, assets):
    """The assets here describe no model: only the manifest tells the 6 rows of the vocabulary from
    the 8 in memory."""
    rows = np.zeros((8, 4), np.float32)
    rows[:6] = 1 + np.arange(24, dtype=np.float32).reshape(6, 4)
    model = {
        "embed_tokens.weight": rows,
        "layers.input_layernorm.weight": np.ones((2, 4), np.float32),
    }
    shapes = {"embed_tokens.weight": (6, 4), "layers.input_layernorm.weight": (2, 4)}
    store = CheckpointStore(tmp_path / "recorded")
    store.save(1, model=model, optimizer={"mu": model}, data={}, assets=assets, shapes=shapes)
    save_checkpoint(tmp_path / "unknown", model=model, assets=assets)
    store.wait()
    assert manifest.read_manifest(store.path(1))["shapes"] == {
        name: list(shape) for name, shape in shapes.items()
    }
    assert "shapes" not in manifest.read_manifest(tmp_path / "unknown")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for size in (6, 7, 12):
        abstract = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=device)
            for name, value in model.items()
        }
        abstract["embed_tokens.weight"] = jax.ShapeDtypeStruct(
            (size, 4), np.float32, sharding=device
        )
        restored = store.restore(1, abstract, {"mu": abstract})
        for array in (
            restored.model["embed_tokens.weight"],
            restored.optimizer["mu"]["embed_tokens.weight"],
        ):
            assert array.shape == (size, 4) and not array[6:].any()
            np.testing.assert_array_equal(array[:6], rows[:6])
        with pytest.raises(
            ValueError, match=rf"embed_tokens\.weight is float32\[8, 4\] .* float32\[{size}, 4\]"
        ):
            restore_item(tmp_path / "unknown", "model", abstract)
    abstract["embed_tokens.weight"] = jax.ShapeDtypeStruct((5, 4), np.float32, sharding=device)
    with pytest.raises(
        ValueError,
        match=r"embed_tokens\.weight is float32\[8, 4\] in the checkpoint, .* float32\[5, 4\]",
    ):
        store.restore(1, abstract, {"mu": abstract})


def test_a_slow_store_delays_no_step(tmp_path, assets):
    """When `save` returns, it has waited for no file and no folder."""
    with slow_store(tmp_path / "run", 0.02) as waits, CheckpointStore(tmp_path / "run") as saving:
        for step in (1, 2):
            saving.save(step, model={"a": jnp.ones(4)}, assets=assets, data={"step": step})
    assert waits.main() == [] and saving.save_seconds >= 0.02
    assert sum("assets" in call or "data.json" in call for call in waits.others()) >= 6


def test_a_wait_for_a_save_ends_with_it_or_after_the_given_seconds(tmp_path, assets):
    written = threading.Event()
    with CheckpointStore(tmp_path / "run") as store:
        store.before = lambda: written.wait(60)
        store.wait_at_most(60)
        store.save(1, model={"a": jnp.ones(4)}, assets=assets)
        store.wait_at_most(0.01)
        assert store.steps() == []
        threading.Timer(0.2, written.set).start()
        store.wait_at_most(60)
        assert store.steps() == [1]


def test_a_failed_save_is_reported(tmp_path, assets, monkeypatch):
    store = CheckpointStore(tmp_path / "run")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("trainer.checkpoint.saving.publish", full)
    store.save(1, model=placed((2, 4), values()), assets=assets)
    with pytest.raises(SaveError, match=r"saving checkpoint .* No space left"):
        store.wait()
    assert store.steps() == []


@pytest.mark.parametrize(
    ("code", "processes", "may_pass"),
    [
        (errno.EIO, 1, True),
        (errno.ENOSPC, 1, True),
        (errno.EPERM, 1, False),
        (errno.EIO, 2, False),
        (errno.EPERM, 2, False),
    ],
)
def test_a_failed_save_says_whether_the_next_may_succeed(
    tmp_path, assets, monkeypatch, capsys, code, processes, may_pass
):
    """With several processes a failure always ends the run; the last line says if it may resume."""
    finish = saving.ocp.AsyncCheckpointer.wait_until_finished

    def fail(checkpointer):
        finish(checkpointer)
        if threading.current_thread() is not threading.main_thread():
            patch.setattr(jax, "process_count", lambda: processes)
            raise OSError(code, os.strerror(code))

    store = CheckpointStore(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(saving.ocp.AsyncCheckpointer, "wait_until_finished", fail)
        store.save(1, model={"a": np.ones(4)}, assets=assets)
        store._saving.thread.join()  # training goes on
        with pytest.raises(SaveError, match=os.strerror(code)) as failed:
            store.wait()
    assert failed.value.may_pass == may_pass
    ends = "training ends " + ("if its next save fails too" if may_pass else "before its next save")
    resumes = "; the same command resumes from the last checkpoint"
    resumes = resumes if processes > 1 and code == errno.EIO else ""
    assert f"{ends}{resumes}\n" in capsys.readouterr().err
    assert str(failed.value).endswith(f"{os.strerror(code)}{resumes}")
    store.save(2, model={"a": np.ones(4)}, assets=assets)
    store.wait()
    assert store.steps() == [2]


FULL = """
import resource, sys
import numpy as np
from trainer import entry
from trainer.checkpoint.store import CheckpointStore


def work():
    with CheckpointStore(sys.argv[1]) as store:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        model = {name: np.random.default_rng(0).random(9999) for name in ("a", "b")}
        store.save(1, model=model, optimizer=model, assets=sys.argv[2])
        store._saving.thread.join()  # training goes on
        print("step 2", file=sys.stderr, flush=True)


sys.exit(entry.run(work))
"""


def test_a_save_without_room_is_one_line_at_once_and_one_at_the_end(tmp_path, assets, repository):
    """Orbax's threads print many more."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "run"), str(assets)]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=120, check=False
    )
    warning, step, error = done.stderr.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/run/checkpoints/1: File too large; files may")
    assert step == "step 2" and error.startswith("error: ") and "File too large" in error
    assert done.returncode == 2


def test_a_save_that_cannot_be_read_back_neither_counts_nor_removes_older_ones(
    run, assets, monkeypatch
):
    """Orbax silently leaves out the index of its arrays if it does not find what its processes
    wrote."""
    finish = saving.ocp.AsyncCheckpointer.wait_until_finished

    def without_index(checkpointer):
        finish(checkpointer)
        (run / "checkpoints/30.tmp/model/manifest.ocdbt").unlink(missing_ok=True)

    monkeypatch.setattr(saving.ocp.AsyncCheckpointer, "wait_until_finished", without_index)
    store = CheckpointStore(run, keep=1)
    store.save(30, model=placed((2, 4), values()), assets=assets)
    with pytest.raises(
        OSError,
        match=r"saving checkpoint .*30 failed: .*30\.tmp: .* no index of the arrays of model",
    ):
        store.wait()
    assert store.steps() == [10, 20] and store.latest_good() == 20


@pytest.mark.parametrize("use", [restore_model, stored_parameters])
def test_a_checkpoint_sealed_without_its_index_is_a_one_line_error(run, use):
    newest = run / "checkpoints/20"
    (newest / "model/manifest.ocdbt").unlink()
    files = Files(newest)
    items = ["assets", "data", "model", "optimizer"]
    files.write(MANIFEST, manifest.manifest(items, manifest.seal(newest, files.names())))
    with pytest.raises(
        DamagedError, match=r"checkpoints/20: .* no index of the arrays of model.* would work"
    ):
        use(newest)


@pytest.mark.parametrize("name", ["lr[0.1]", "[!a]", "a*b", "a?b"])
def test_a_moved_checkpoint_is_read(run, tmp_path, name):
    moved = run.rename(tmp_path / name)
    assert same_bits(restore_model(moved), values())
    assert all(
        same_bits(np.asarray(x), values()[key]) for key, x in stored_parameters(moved).items()
    )


def test_a_process_that_fails_finishes_its_save_without_waiting_for_others(
    tmp_path, assets, monkeypatch
):
    """The other processes are in a step that this one has left: they would never reach the
    barrier."""
    barriers = []
    monkeypatch.setattr("trainer.checkpoint.saving.barrier", barriers.append)
    with pytest.raises(KeyError), CheckpointStore(tmp_path / "run") as store:
        store.save(1, model=placed((2, 4), values()), assets=assets)
        raise KeyError
    assert (
        barriers == ["checkpoint 1 begins"] and CheckpointStore(tmp_path / "run").latest_good() == 1
    )


def save_forever(run, assets, saved):
    """Does nothing but save, and sends the number of each step."""
    jax.config.update("jax_num_cpu_devices", 2)
    store = CheckpointStore(run, keep=2)
    for step in itertools.count((store.latest_good() or 0) + 1):
        model = {"w": jnp.full((256, 1024), step, jnp.float32)}
        store.save(step, model=model, data={"step": step}, assets=assets)
        saved.send(step)


def test_a_good_checkpoint_survives_kills_at_any_moment(tmp_path, assets):
    """Repeated kill -9 while it does nothing but save: there is always a good checkpoint, and its
    content is that of its step."""
    run, best = tmp_path / "run", 0
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # imported once
    for delay in (0.0, 0.013, 0.029, 0.047):
        received, saved = processes.Pipe(duplex=False)
        process = processes.Process(target=save_forever, args=(run, assets, saved))
        process.start()
        saved.close()
        for _ in range(3):
            received.recv()
        time.sleep(delay)
        process.kill()
        process.join()
        step = CheckpointStore(run).latest_good()
        assert step > best
        best = step
        assert read_data(run) == {"step": step}
        assert (restore_model(run)["w"] == step).all()
    shutil.rmtree(run)


def test_digests_of_large_checkpoints_are_compared_while_training_continues(
    run, assets, monkeypatch, warned
):
    monkeypatch.setattr(run_store, "DIGESTED_BEFORE", 0)
    with CheckpointStore(run) as store:
        assert store.latest_good(meanwhile=True) == 20  # it is intact
    files = (run / "checkpoints/20/model/ocdbt.process_0/d").iterdir()
    damaged = max(files, key=lambda path: path.stat().st_size)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    lines, compared = [], threading.Event()
    record = Files.record

    def waits(files, name, expected=None):
        return (expected in (None, -1) or compared.wait()) and record(files, name, expected)

    monkeypatch.setattr(Files, "record", waits)
    store = CheckpointStore(run)
    store.on_damage = lines.append
    assert store.latest_good(meanwhile=True) == 20 and not lines
    store.save(30, model=placed((2, 4), values()), assets=assets)
    time.sleep(0.3)
    assert store.steps() == [10, 20], "nothing counts before the digests are known"
    compared.set()
    store.wait()
    (line,) = lines
    assert "d/" in line and line.endswith("a restart uses the previous checkpoint")
    shutil.rmtree(run / "checkpoints/30")  # on_damage ends the processes before it counts
    with warned(r"checkpoints/20: model/.* is damaged"):
        assert CheckpointStore(run).latest_good(meanwhile=True) == 10
    damaged.write_bytes(content[:-1])
    (run / "checkpoints/20/damaged").unlink()
    with warned(r"checkpoints/20: .* is damaged \(\d+ bytes, written with"):
        assert CheckpointStore(run).latest_good(meanwhile=True) == 10


def test_a_save_that_has_lost_the_lock_removes_nothing(tmp_path, assets):
    """In a bucket, what it would remove may be the checkpoint of the process that has the lock."""
    store = CheckpointStore(tmp_path / "run")

    def lost():
        raise TransientError("another process has taken the lock")

    store.before = lost
    store.save(1, model={"a": np.ones(4)}, assets=assets)
    with pytest.raises(SaveError, match="taken the lock") as failed:
        store.wait()
    assert not failed.value.may_pass and scratch_of(store.path(1)).exists()


def test_one_checkpoint_that_cannot_be_removed_keeps_no_others(
    tmp_path, assets, monkeypatch, capsys
):
    def refuse_first(folder):
        if folder.name == "1":
            raise OSError(errno.EPERM, "Operation not permitted")
        shutil.rmtree(folder)

    monkeypatch.setattr("trainer.checkpoint.store.remove", refuse_first)
    store = CheckpointStore(tmp_path / "run", keep=1)
    for step in (1, 2, 3):
        store.save(step, model={"a": np.ones(4)}, assets=assets)
        store.wait()
    assert store.steps() == [1, 3]
    assert capsys.readouterr().err.count("1: beyond checkpoint.keep and not removed") == 2
