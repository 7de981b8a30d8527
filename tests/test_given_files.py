"""A file or folder named by a user is read only if it is a plain file, or inside of the folder;
otherwise it is a one-line error."""

import contextlib
import json
import os
import random
import shutil
import signal
import struct
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml

from data import prepared
from data.encode import EncodingRules
from data.prepare import prepare
from data.report import Report
from data.sources import Source, Sources, read
from data.tokenizer import Tokenizer
from data.trajectories import builder
from eval import compare, line_cases, needle, report_input, ruler
from eval.journal import Journal
from scripts import chat, import_hf, plan, run_status
from tests import small_model, small_run
from tests.conftest import REPOSITORY
from tests.data.trajectories import made
from tests.test_terminal import control_characters, evil_text
from trainer import entry
from trainer.checkpoint import readers
from trainer.checkpoint.arrays import stored_shapes
from trainer.config import load as configuration
from trainer.huggingface import adapter_config, assets, card, folder, peft
from trainer.model_source import open_model
from trainer.run.opening import check_run
from trainer.run.outcome import WRONG_INPUT, outcome_of

SECONDS = 5.0  # in which an error must have been printed, on a busy machine


class TooLong(BaseException):
    """A reader takes too long."""


@contextlib.contextmanager
def limited(seconds):
    """Raises TooLong in the context's work when time is up."""

    def stop(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_model(path):
    model = folder.folder_config(path)
    Tokenizer.load(path)
    assets.copy_assets(path, path.parent / "copied")
    folder.weights_fingerprint(path)
    open_model(str(path)).ending_at([])
    return model


def read_checkpoint(path):
    checkpoint = readers.find_checkpoint(path, ["model", "assets", "data"])
    open_model(str(path))
    assets.trained_date(checkpoint / "assets")
    assets.source_dtype(checkpoint / "assets")
    stored_shapes(checkpoint, "model")
    readers.read_data(path)
    card.model_card(checkpoint, small_model.CONFIG)


def read_adapter(path):
    adapter_config.read_config(path)
    with peft.opened_adapter(path, None):
        pass


def read_data(path, format="sharegpt"):
    list(read(Source(str(path), format), Report()))


def read_trajectories(path):
    root = path / "data"
    builder.prepare_trajectories(root, made.TASK.name, path / "prepared")


def read_prepared_trajectories(path):
    builder._read(path)


def read_run(path):
    return report_input.read_run(path)


def continue_run(path):
    config = configuration.load(
        ["--config", str(path.parent / "recipe.yaml"), "--run_dir", str(path)]
    )
    check_run(config)


READERS = {
    "model": read_model,
    "adapter": read_adapter,
    "checkpoint": read_checkpoint,
    "run": read_run,
    "begun": continue_run,
    "status": lambda path: run_status.read_status(str(path)),
    "answers": lambda path: Journal(path / "answers.jsonl", {"model": "m"}).close(),
    "compared": compare.read,
    "prepared": prepared.read,
    "episodes": read_trajectories,
    "trajectories": read_prepared_trajectories,
    "records": read_data,
    "texts": lambda path: read_data(path, "text"),
    "tokens": lambda path: read_data(path, "tokens"),
}


@pytest.fixture(scope="module")
def valid_folders(tmp_path_factory):
    """A valid folder of each kind, by its reader's name."""
    import_module("transformers.models.auto.tokenization_auto")  # slow: not within a limit of time
    root = tmp_path_factory.mktemp("given")
    hf = small_model.write(root)
    assert import_hf.main([str(hf), str(root / "checkpoint")]) == 0

    run = root / "run"
    run.mkdir()
    recipe = small_run.recipe(root, REPOSITORY)
    config = configuration.load(["--config", str(recipe)])
    (run / "config.yaml").write_text(configuration.dump(config))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run / "held_out.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    row = {
        "task": "t",
        "tokens": 9,
        "depth": None,
        "cases": 1,
        "score": 1.0,
        "low": 0.0,
        "high": 1.0,
    }
    row["beyond_trained_length"] = False
    (run / "results.json").write_text(
        json.dumps({"about": {}, "evaluation": "needle", "results": [row]})
    )
    case = {"task": "t", "tokens": 9, "score": 1.0, "generated": "g", "answer": "a"}
    (run / "cases.jsonl").write_text(json.dumps(case) + "\n")
    (run / "loss_by_position.json").write_text('{"curves": {"1": []}}')
    read = read_run(run)
    assert read.config and read.evaluations and read.curves and read.logs
    answers = root / "answers"
    answers.mkdir()
    Journal(answers / "answers.jsonl", {"model": "m"}).close()
    sources = Sources((Source(str(root / "conversations.json")),))
    made_data = prepare(
        sources,
        Tokenizer.load(small_model.TOKENIZER),
        EncodingRules(128),
        root / "p",
        progress=False,
    )
    episodes = root / "episodes"
    made.folder_of(episodes / "data")
    trajectories = builder.prepare_trajectories(episodes / "data", made.TASK.name, root / "t")
    for name in ("records", "texts", "tokens"):
        (root / name).mkdir()
    (root / "records/a.json").write_text(
        json.dumps(json.loads((root / "conversations.json").read_text())[:3])
    )
    (root / "texts/a.txt").write_text("A text.")
    np.save(root / "tokens/a.npy", np.arange(9, dtype=np.int32))
    adapter = root / "adapter"
    adapter.mkdir()
    peft_config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(peft_config))
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1, np.float32)}, adapter / "adapter_model.safetensors")
    return {
        "model": hf,
        "adapter": adapter,
        "checkpoint": root / "checkpoint",
        "run": run,
        "begun": run,
        "status": run,
        "compared": run,
        "answers": answers,
        "prepared": made_data.folder,
        "episodes": episodes,
        "trajectories": trajectories.folder,
        "records": root / "records",
        "texts": root / "texts",
        "tokens": root / "tokens",
    }


def files_of(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def files_read(kind, path):
    """Returns the files of a folder that its reader reads."""
    names = {
        "begun": {"config.yaml", "metrics.jsonl", "held_out.jsonl"},
        "status": {"metrics.jsonl"},
        "compared": {"cases.jsonl"},
    }
    return sorted(names.get(kind, files_of(path)))


def by_link(file, outside):
    """The same contents, but outside the folder."""
    shutil.move(file, outside)
    file.symlink_to(outside)


def by_pipe(file, outside):
    file.unlink()
    os.mkfifo(file)


def by_device(file, outside):
    file.unlink()
    file.symlink_to("/dev/zero")


def by_nesting(file, outside):
    file.write_text("[" * 200_000)


def by_whole_nesting(file, outside):
    file.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def copied(path, to):
    """Copies a folder of a kind, with the recipe next to it; returns the copy."""
    shutil.copy(path.parent / "recipe.yaml", to / "recipe.yaml") if path.name == "run" else None
    return Path(shutil.copytree(path, to / path.name))


def error_of(reader, path):
    """Returns a reader's one-line error, "" if there is none; other errors are raised."""
    try:
        with limited(SECONDS):
            reader(path)
        return ""
    except Exception as error:
        code, message = outcome_of(error)
        if code != WRONG_INPUT:
            raise
        return message


@pytest.mark.parametrize("attack", [by_link, by_pipe, by_device])
@pytest.mark.parametrize("kind", READERS)
def test_only_plain_files_inside_the_folder_are_read(kind, attack, valid_folders, tmp_path):
    for number, name in enumerate(files_read(kind, valid_folders[kind])):
        (tmp_path / f"{number}").mkdir()
        copy = copied(valid_folders[kind], tmp_path / f"{number}")
        attack(copy / name, tmp_path / f"{number}" / "outside")
        message = error_of(READERS[kind], copy)
        assert Path(name).name in message and "\n" not in message, (name, message)
        assert "neither a file nor a folder" in message or "outside of its folder" in message, (
            name,
            message,
        )


@pytest.mark.parametrize("attack", [by_nesting, by_whole_nesting])
@pytest.mark.parametrize("kind", READERS)
def test_nesting_too_deep_is_a_one_line_error(kind, attack, valid_folders, tmp_path):
    for number, name in enumerate(files_read(kind, valid_folders[kind])):
        (tmp_path / f"{number}").mkdir()
        copy = copied(valid_folders[kind], tmp_path / f"{number}")
        attack(copy / name, None)
        message = error_of(READERS[kind], copy)
        assert "\n" not in message


def test_links_are_followed_only_inside_the_folder(valid_folders, tmp_path):
    """500 folders with a chain of links in place of a file are read as if without links, or refused
    if the chain leads outside."""
    draw = random.Random(0)
    kinds = ("model", "checkpoint", "run", "prepared", "answers")
    for number in range(500):
        kind = kinds[number % len(kinds)]
        (tmp_path / f"{number}").mkdir()
        copy = tmp_path / f"{number}" / "x"
        shutil.copytree(valid_folders[kind], copy, copy_function=os.link)
        file = copy / draw.choice(files_read(kind, copy))
        inside = draw.random() < 0.5
        real = file.parent / "kept" / "real" if inside else tmp_path / f"{number}" / "secret"
        real.parent.mkdir(exist_ok=True)
        file.rename(real)
        for hop in range(draw.randrange(3)):
            link = (copy if draw.random() < 0.5 else tmp_path / f"{number}") / f"hop{hop}"
            link.symlink_to(real if draw.random() < 0.5 else os.path.relpath(real, link.parent))
            real = link
        file.symlink_to(real if draw.random() < 0.5 else os.path.relpath(real, file.parent))
        message = error_of(READERS[kind], copy)
        assert ("outside of its folder" in message) == (not inside), (kind, file.name, message)
        assert not (inside and message), (kind, file.name, message)


def with_header(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(64)


TENSOR = '"{}": {{"dtype": "{}", "shape": {}, "data_offsets": {}}}'
HEADERS = {
    "longer than the file": with_header(b"{}", 1 << 62),
    "no length": b"\x01",
    "a million spaces": with_header(b" " * 10_000_000),
    "nested": with_header(b'{"a":' * 1_000_000),
    "not JSON": with_header(b"\xff" * 100),
    "an overflowing shape": with_header(
        ("{" + TENSOR.format("a", "F32", [1 << 40, 1 << 40], [0, 4]) + "}").encode()
    ),
    "a shape below zero": with_header(
        ("{" + TENSOR.format("a", "F32", [-1], [0, 4]) + "}").encode()
    ),
    "beyond the file": with_header(
        ("{" + TENSOR.format("a", "F32", [1 << 30], [0, 4 << 30]) + "}").encode()
    ),
    "an unknown dtype": with_header(("{" + TENSOR.format("a", "F3", [1], [0, 4]) + "}").encode()),
    "many tensors": with_header(
        (
            "{" + ", ".join(TENSOR.format(n, "F32", [0], [0, 0]) for n in range(50_000)) + "}"
        ).encode()
    ),
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(
    ("kind", "name"), [("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")]
)
def test_a_malformed_header_is_refused(kind, name, header, valid_folders, tmp_path):
    copy = copied(valid_folders[kind], tmp_path)
    (copy / name).write_bytes(HEADERS[header])
    message = error_of(READERS[kind], copy)
    assert str(copy) in message and "\n" not in message and len(message) < 500, message


ARRAY = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"
ARRAYS = {
    "a shape beyond the file": ARRAY.format("'<i4'", "(1000000000000,)"),
    "a shape below zero": ARRAY.format("'<i4'", "(-1,)"),
    "a shape of many digits": ARRAY.format("'<i4'", f"({'9' * 5000},)"),
    "objects, which would be unpickled": ARRAY.format("'|O'", "(1,)"),
    "brackets": "(" * 5000,
    "nothing": "",
}


@pytest.mark.parametrize("length", [None, 0xFFFFFFFF])
@pytest.mark.parametrize("header", ARRAYS)
def test_a_malformed_token_array_is_refused(header, length, tmp_path):
    """The header is malformed, or its declared length is wrong."""
    content, path = ARRAYS[header].encode(), tmp_path / "a.npy"
    size = struct.pack("<I", len(content) if length is None else length)
    path.write_bytes(b"\x93NUMPY\x02\x00" + size + content + bytes(64))
    message = error_of(lambda path: read_data(path, "tokens"), path)
    assert message.startswith(f"{path}: cannot be read as .npy") and "\n" not in message
    assert len(message) < 500, message


LINES = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
RECIPES = {
    "aliases": f"a0: &a0 [1]\n{LINES}\n",
    "an alias of itself": "model: &m [*m]\n",
    "merges": "a0: &a0 {x: 1}\n" + LINES.replace("[", "{<<: [").replace("]", "]}"),
    "brackets": "[" * 200_000,
    "braces": "{a: " * 200_000,
    "indents": "\n".join(" " * n + "a:" for n in range(2000)),
    "lists": "- " * 50_000,
    "questions": "? " * 50_000,
    "a long number": "model: " + "9" * 1_000_000,
    "a sexagesimal number": "model: " + "1" + ":1" * 100_000,
    "a long name": "a" * 1_000_000 + ": 1",
    "an object": "model: !!python/object/apply:os.system ['touch made']\n",
    "quotes": "model: '" + "''" * 200_000,
    "5 MiB": "# " + "a" * (5 << 20),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_that_explodes_is_refused(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES[recipe])
    message = error_of(lambda path: configuration.load(["--config", str(path)]), path)
    assert str(path) in message and "\n" not in message and len(message) < 1000, message


@pytest.mark.parametrize("kind", ["config.yaml", "run.yaml"])
@pytest.mark.parametrize("recipe", ["aliases", "merges", "brackets", "lists", "an object"])
def test_a_runs_recipe_that_explodes_is_refused(recipe, kind, tmp_path):
    (tmp_path / kind).write_text(RECIPES[recipe])
    reader = report_input.read_run if kind == "config.yaml" else assets.trained_date
    message = error_of(reader, tmp_path)
    assert kind in message and "\n" not in message and len(message) < 1000, message


SINGLE = {
    "recipe": lambda path: configuration.load(["--config", path]),
    "plan's recipe": lambda path: plan.parse(plan.read_text(path), path),
    "cases": line_cases.read,
    "haystack": needle.read_haystack,
    "document": chat.read_document,
    "questions": lambda path: ruler.qa_cases(path, len, [9], 1, 0),
    "records": read_data,
    "texts": lambda path: read_data(path, "text"),
    "tokens": lambda path: read_data(path, "tokens"),
    "tokenizer": Tokenizer.load,
}


@pytest.mark.parametrize("suffix", ["", ".json", ".npy", ".parquet", ".csv", ".jsonl.gz"])
@pytest.mark.parametrize("kind", SINGLE)
def test_a_pipe_or_device_named_by_the_user_is_refused(kind, suffix, tmp_path):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        message = error_of(SINGLE[kind], str(tmp_path / f"{name}{suffix}"))
        assert name in message and "\n" not in message, message


def corrupted(value, rng):
    """Returns a JSON value with an evil text in place of one of its texts, names or numbers."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.3:
            return {(evil_text(rng) if key == name else key): part for key, part in value.items()}
        return value | {name: corrupted(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], corrupted(value[index], rng), *value[index + 1 :]]
    return evil_text(rng)


@pytest.mark.parametrize("kind", READERS)
def test_evil_texts_in_files(kind, valid_folders, tmp_path, capsys):
    """Twelve in each small file: none reaches a terminal through the reader's messages."""
    rng, times = random.Random(kind), 2 if kind == "begun" else 12
    names = [
        name
        for name in files_read(kind, valid_folders[kind])
        if name.endswith((".json", ".jsonl", ".yaml"))
    ]
    copy = copied(valid_folders[kind], tmp_path) if names else None
    for name in names:
        text = (copy / name).read_text()
        first, _, rest = text.partition("\n") if name.endswith(".jsonl") else (text, "", "")
        for _ in range(times):
            content = json.dumps(corrupted(yaml.safe_load(first), rng), ensure_ascii=False)
            (copy / name).write_text(content + "\n" + rest)
            with limited(SECONDS):
                code = entry.run(lambda: READERS[kind](copy))
            output = "".join(capsys.readouterr())
            assert (
                code in (0, 2) and not control_characters(output) and "Traceback" not in output
            ), output
        (copy / name).write_text(text)
