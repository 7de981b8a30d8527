"""A very small run for tests of train.py in a separate process, which they may kill."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import yaml

STEPS = 40
SAVE_EVERY = 7
EVALUATE_EVERY = 10
XLA_FLAGS = ""  # for the processes that `start` starts; set by conftest
# Metrics that differ between runs with bitwise equal results.
MEASURED = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "data_wait_seconds",
    "step_seconds",
    "compile_seconds",
    "peak_device_gib",
    "peak_host_gib",
    "wall_seconds",
)


# A row on each device, for tests in which the mesh does not matter: the recipe's compiles for longer.
DATA_PARALLEL = (
    *("--mesh.data", "8", "--mesh.fsdp", "1", "--mesh.tensor", "1", "--mesh.sequence", "1"),
    *("--train.batch_size", "8"),
)


def recipe(
    folder: pathlib.Path, repository: pathlib.Path, conversations: int = 120
) -> pathlib.Path:
    """Writes recipe.yaml and a few of the fixtures' conversations into a folder; returns the
    recipe's path."""
    fixtures = repository / "data" / "fixtures"
    for name, count in (("conversations", conversations), ("conversations_held_out", 8)):
        records = json.loads((fixtures / f"{name}.json").read_text(encoding="utf-8"))
        # From the whole file, whose records are sorted by kind.
        records = records[:: max(1, len(records) // count)][:count]
        (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    fields = {
        "config_version": 2,
        "model": {
            "tokenizer": str(fixtures / "tiny_tokenizer"),
            "compute_dtype": "float32",
            "overrides": {
                "vocab_size": 1024,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
            },
        },
        "data": {
            "sources": [{"path": str(folder / "conversations.json")}],
            "held_out_path": str(folder / "conversations_held_out.json"),
            "context_length": 128,
            "prepared": str(folder / "prepared"),
        },
        "mesh": {"fsdp": 2, "tensor": 2, "sequence": 2, "simulate": 8},
        # The kernel that compiles fastest.
        "attention": {"layout": "striped", "schedule": "ring", "kernel": "reference"},
        "memory": {"feed_forward_chunk": 0, "loss_chunk": 0},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5},
        "train": {"steps": STEPS, "batch_size": 4, "evaluate_every": EVALUATE_EVERY},
        "checkpoint": {"every": SAVE_EVERY, "keep": 2},
        "logging": {"tensorboard": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    return path


def adapter_run(recipe: pathlib.Path, folder: pathlib.Path, model: pathlib.Path, **sections):
    """Returns a function from a run's name in a folder, and flags, to the command line of a short
    run of adapters on a model, with a learning rate at which they learn something in a few steps.

    Args:
      recipe: as of `recipe`; sections: fields of sections that it gets too.
    """
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    written["model"] = {"compute_dtype": "float32"}
    written["data"] |= {"held_out_path": None, "held_out_fraction": 0.0}
    written["mesh"] = {"data": 4, "fsdp": 2, "simulate": 8}
    written["attention"] = {"kernel": "reference"}
    written["train"] = {"batch_size": 8}
    written["optimizer"] |= {"learning_rate": 0.02, "schedule": "constant", "warmup_steps": 0}
    for section, fields in sections.items():
        written[section] = written.get(section, {}) | fields
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")

    def line(run, *flags, model=model):
        return command(path, folder / run, "--model.path", model, *flags)

    return line


def command(recipe: pathlib.Path, run: pathlib.Path, *flags: object) -> list[str]:
    """Returns the words with which train.py begins or continues a run of a recipe."""
    return [str(word) for word in ("--config", recipe, "--run_dir", run, *flags)]


def spoil(checkpoint: pathlib.Path) -> str:
    """Flips a bit of a checkpoint's largest parameter file; returns the file's name."""
    files = [path for path in (checkpoint / "model").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    return victim.name


def losses(run: pathlib.Path) -> list[float]:
    """The losses of a run of text, step by step."""
    return [row["loss_nats_per_target"] for row in rows(run / "metrics.jsonl")]


def start(
    repository: pathlib.Path,
    recipe: pathlib.Path,
    run: pathlib.Path,
    *flags: str,
    log: pathlib.Path | None = None,
) -> subprocess.Popen:
    """Starts train.py as a user does, with its output in `log`, by default RUN.log."""
    words = [sys.executable, "train.py", *command(recipe, run, *flags)]
    with open(log or f"{run}.log", "a", encoding="utf-8") as file:
        environment = {"XLA_FLAGS": XLA_FLAGS, **os.environ, "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(words, cwd=repository, env=environment, stdout=file, stderr=file)


def finish(process: subprocess.Popen, run: pathlib.Path) -> str:
    """Waits for success and returns the output since the run's first start."""
    status = process.wait(timeout=600)
    output = pathlib.Path(f"{run}.log").read_text(encoding="utf-8")
    assert status == 0, output
    return output


def kill_when(process: subprocess.Popen, run: pathlib.Path, condition: Callable[[], bool]) -> bool:
    """Kills the process with SIGKILL as soon as `condition()` holds; returns False if the run ended
    before."""
    while process.poll() is None:
        if condition():
            process.send_signal(signal.SIGKILL)
            return process.wait(timeout=60) == -signal.SIGKILL
        time.sleep(0.002)
    finish(process, run)
    return False


def rows(path: pathlib.Path) -> list[dict]:
    """Returns the lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_measured(row: dict) -> dict:
    """Returns a line of a metrics file without times, rates and memory."""
    return {name: value for name, value in row.items() if name not in MEASURED}


def steps_logged(run: pathlib.Path) -> int:
    """Returns the number of complete lines in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
