"""Attacks on files written by others: Hugging Face models and adapters, line-retrieval cases,
episodes."""

import contextlib
import json
import math
import pathlib

import numpy as np

from data.trajectories.builder import prepare_trajectories
from data.trajectories.episodes import Episode, read_episode
from data.trajectories.tasks import get_task
from eval import line_cases as cases
from eval.scoring import outcome, score
from model.adapter import AdapterConfig
from tests import small_model
from tests.data.trajectories import made
from tests.soak.attacks import Case, Failed, refusal
from tests.soak.damage import WAYS, copied, damage_bytes, damage_file, damage_json, damage_json_file
from trainer.huggingface.adapter_config import read_config
from trainer.huggingface.peft import adapter_layout, read_adapter, write_adapter
from trainer.model_source import open_model

# How many times larger a damaged config may make the model before it counts as one that cannot be
# opened.
FACTOR = 64


def models(base: pathlib.Path) -> Case:
    """Returns the case: a model's folder with one damaged file, opened with its tokenizer and all
    weights read."""
    good = small_model.write(base)
    names = sorted(path.name for path in good.iterdir() if path.name != "README.md")
    texts = [name for name in names if name.endswith(".json")]

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        copy = copied(good, folder / "hf")
        name = str(generator.choice(texts if generator.random() < 0.8 else names))
        if name in texts and generator.random() < 0.9:
            damage_json_file(copy / name, generator)
        elif generator.random() < 0.5:
            damage_file(copy / name, generator)
        else:
            (copy / name).write_bytes(damage_bytes((copy / name).read_bytes(), generator))
        with refusal(str(copy), name) as messages:
            source = open_model(str(copy))
            tokenizer = source.tokenizer()
            tokenizer.decode(tokenizer.encode("Who are you? <s> é"))
            if (
                math.prod((source.config.hidden_size, source.config.num_hidden_layers))
                > FACTOR * 64
            ):
                return "opened as a larger model"
            with contextlib.ExitStack() as stack:
                for weight in source.stored(stack).values():
                    np.asarray(weight)
        return f"refused: {name}" if messages else f"opened: {name}"

    return case


def adapters(base: pathlib.Path) -> Case:
    """Returns the case: an adapter in PEFT's format with one of its two files damaged."""
    from tests.model.build import llama

    adapter = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
    config = small_model.CONFIG.with_adapter(adapter)
    generator = np.random.default_rng(0)
    params = {
        entry.name: generator.normal(size=entry.shape).astype(np.float32)
        for entry in adapter_layout(config)
    }
    write_adapter(params, config, "a base", base / "adapter")
    model = llama(config)
    shapes = {name: value.shape for name, value in read_adapter(base / "adapter", model).items()}

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        copy = copied(base / "adapter", folder / "adapter")
        name = str(generator.choice(["adapter_config.json", "adapter_model.safetensors"]))
        if name.endswith(".json"):
            damage_json_file(copy / name, generator)
        elif generator.random() < 0.3:
            damage_file(copy / name, generator)
        else:
            # Mostly in the header: a changed weight is another valid adapter, which the file cannot
            # reveal.
            content = (copy / name).read_bytes()
            size = 8 + int.from_bytes(content[:8], "little")
            (copy / name).write_bytes(damage_bytes(content[:size], generator) + content[size:])
        with refusal(str(copy)) as messages:
            written, _ = read_config(copy)
            read = read_adapter(copy, model)
            if {key: value.shape for key, value in read.items()} != shapes:
                raise Failed("read with other shapes")
            if written.rank < 1 or not math.isfinite(written.scale):
                raise Failed(f"read as {written}")
        return f"refused: {name}" if messages else f"read: {name}"

    return case


def line_cases(base: pathlib.Path) -> Case:
    """Returns the case: a file of line-retrieval cases with one damaged line, read and scored."""
    good = base / "cases.jsonl"
    cases.write(cases.generate(10, 4, seed=0), good)
    lines = good.read_text(encoding="utf-8").splitlines()

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        path = folder / "cases.jsonl"
        spoilt, number = list(lines), int(generator.integers(len(lines)))
        if generator.random() < 0.7:
            spoilt[number] = json.dumps(damage_json(json.loads(lines[number]), generator))
            path.write_text("\n".join(spoilt) + "\n", encoding="utf-8")
        else:
            path.write_bytes(damage_bytes(good.read_bytes(), generator))
        with refusal(str(path)) as messages:
            read = cases.read(path)
            for group in score(outcome(line_case, "<1>", 100, 512, 100) for line_case in read):
                if (
                    not 0 <= group.low <= group.accuracy <= group.high <= 1
                    or not 0 < group.chance <= 1
                ):
                    raise Failed(f"scored {group}")
            if any(not 0 <= line_case.depth <= 1 for line_case in read):
                raise Failed("a depth outside of the prompt")
        return "refused with the file's name" if messages else "read"

    return case


def trajectories(base: pathlib.Path) -> Case:
    """Returns the case: a folder of episodes with one damaged; in one case of 25 all are
    prepared."""
    task = get_task("cartpole_swingup")
    made.folder_of(base)

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        copy = copied(base / task.domain, folder / task.domain)
        files = sorted(copy.glob("*/buffer/*.npz"))
        path = files[generator.integers(len(files))]
        kind = generator.integers(3)
        if kind == 0:
            damage_file(path, generator, WAYS[1:])
        elif kind == 1:
            path.write_bytes(damage_bytes(path.read_bytes(), generator))
        else:
            with np.load(path) as stored:
                arrays = {name: stored[name] for name in stored.files}
            name = str(generator.choice(list(Episode._fields)))
            arrays[name] = _damaged_array(arrays[name], generator)
            np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        with refusal(str(path)) as messages:
            episode = read_episode(path, task)
            if any(
                not np.isfinite(part[1:]).all() or len(part) != len(episode.reward)
                for part in episode
            ):
                raise Failed("read with other lengths, or numbers that are not finite")
        if generator.random() < 0.04:
            prepared = prepare_trajectories(folder, task.name, folder / "prepared")
            if len(prepared) + len(prepared.dropped) != len(files) or bool(
                prepared.dropped
            ) != bool(messages):
                raise Failed(
                    f"prepared {len(prepared)} and left out {len(prepared.dropped)} of {len(files)}"
                )
        return "refused with the file's name" if messages else "read"

    return case


def _damaged_array(array: np.ndarray, generator: np.random.Generator) -> np.ndarray | None:
    changes = (
        None,
        array[:-1],
        array[:0],
        array[None],
        array * np.nan,
        array * np.inf,
        np.float32(1),
        np.concatenate([array, array], -1),
        *(array.astype(kind) for kind in (str, complex, np.int64, bool, object)),
    )
    return changes[generator.integers(len(changes))]
