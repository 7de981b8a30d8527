"""Attacks on files of our own: checkpoints and prepared data, file by file."""

import contextlib
import io
import pathlib

import jax
import numpy as np
import optax

from data.encode import EncodingRules
from data.prepare import prepare
from data.prepared import Documents
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed, refusal
from tests.soak.damage import copied, damage_file
from trainer.checkpoint.readers import find_checkpoint
from trainer.checkpoint.store import CheckpointStore

OPTIMIZER = optax.adamw(1e-3)


def checkpoints(base: pathlib.Path) -> Case:
    """Returns the case: a file of a run's newest checkpoint is damaged. Opened by its path, the
    checkpoint is refused or intact; opened by the run's, it is intact or the previous one is
    used."""
    generator = np.random.default_rng(0)
    (base / "assets").mkdir()
    (base / "assets" / "config.json").write_text("{}")
    saved = {}
    with CheckpointStore(base / "run") as store:
        for step in (10, 20):
            model = {
                name: jax.numpy.asarray(generator.normal(size=(8, 8)), "float32")
                for name in ("a.weight", "b.weight")
            }
            saved[step] = model, OPTIMIZER.init(model), {"step": step}
            store.save(
                step,
                model=model,
                optimizer=saved[step][1],
                data={"step": step},
                assets=base / "assets",
            )
    files = _files(base / "run" / "checkpoints" / "20")
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved[20][:2]
    )

    def check(path: pathlib.Path) -> int:
        folder = find_checkpoint(path, ["model", "optimizer", "data", "assets"])
        restored = CheckpointStore(folder.parents[1]).restore(int(folder.name), *abstract)
        expected = jax.tree.leaves(saved[restored.step][:2])
        for value, truth in zip(
            jax.tree.leaves((restored.model, restored.optimizer)), expected, strict=True
        ):
            if np.asarray(value).tobytes() != np.asarray(truth).tobytes():
                raise Failed(f"checkpoint {restored.step} was restored with other numbers")
        if restored.data != saved[restored.step][2]:
            raise Failed(f"checkpoint {restored.step} was restored with data {restored.data}")
        return restored.step

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        run = copied(base / "run", folder / "run")
        name = files[generator.integers(len(files))]
        damage_file(run / "checkpoints" / "20" / name, generator)
        outcome = "whole by its path"
        with refusal(str(run / "checkpoints" / "20")) as messages:
            check(run / "checkpoints" / "20")
        if messages:
            outcome = "refused by its path"
        step = check(run)
        return f"{outcome}; by the run's, step {step}"

    return case


def prepared(base: pathlib.Path) -> Case:
    """Returns the case: a file of prepared data is damaged; the same call still gives the same
    documents."""
    small_run.recipe(base, ROOT, conversations=12)
    tokenizer = Tokenizer.load(ROOT / "data" / "fixtures" / "tiny_tokenizer")

    def documents(folder: pathlib.Path) -> list[bytes]:
        source = Source(str(base / "conversations.json"))
        made = prepare(
            Sources((source,), held_out_fraction=0.2),
            tokenizer,
            EncodingRules(128),
            folder,
            progress=False,
        )
        return [
            _bytes(split, number)
            for split in (made.train, made.held_out)
            for number in range(len(split))
        ]

    truth = documents(base / "prepared")
    files = _files(base / "prepared")

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        copy = copied(base / "prepared", folder / "prepared")
        name = files[generator.integers(len(files))]
        way = damage_file(copy / name, generator)
        output = io.StringIO()
        with contextlib.redirect_stderr(output), refusal(str(copy)) as messages:
            if documents(copy) != truth:
                raise Failed(f"{name} {way}: other documents")
        if messages:
            return "named when the document was read"
        return (
            "named and made again" if "rebuilding it" in output.getvalue() else "the same documents"
        )

    return case


def _bytes(documents: Documents, number: int) -> bytes:
    document = documents[number]
    return document.tokens.tobytes() + document.loss_mask.tobytes() + document.record_id.encode()


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
