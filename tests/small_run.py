"""A very small run for the tests of the whole path: its recipe, train.py in a process of its own, and kills."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import yaml

STEPS = 40
SAVE_EVERY = 7
EVALUATE_EVERY = 10


def recipe(folder: pathlib.Path, repository: pathlib.Path, conversations: int = 120) -> pathlib.Path:
    """Writes recipe.yaml, and a small share of the fixtures' conversations beside it."""
    fixtures = repository / "data" / "fixtures"
    for name, count in (("conversations", conversations), ("conversations_held_out", 8)):
        records = json.loads((fixtures / f"{name}.json").read_text(encoding="utf-8"))
        # From all over the file: its records come sorted by kind.
        records = records[:: max(1, len(records) // count)][:count]
        (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    written = {
        "config_version": 2,
        "model": {
            "tokenizer": str(fixtures / "tiny_tokenizer"),
            "compute_dtype": "float32",
            "overrides": {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        },
        "data": {
            "sources": [{"path": str(folder / "conversations.json")}],
            "held_out_path": str(folder / "conversations_held_out.json"),
            "context_length": 128,
            "prepared": str(folder / "prepared"),
        },
        "mesh": {"fsdp": 2, "tensor": 2, "sequence": 2, "simulate": 8},
        "attention": {"layout": "striped", "schedule": "ring", "query_tile": 32, "key_tile": 32},
        "memory": {"feed_forward_chunk": 0, "loss_chunk": 0},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 5},
        "train": {"steps": STEPS, "batch_size": 4, "evaluate_every": EVALUATE_EVERY},
        "checkpoint": {"every": SAVE_EVERY, "keep": 2},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    return path


def start(repository: pathlib.Path, recipe: pathlib.Path, run: pathlib.Path, *flags: str) -> subprocess.Popen:
    """train.py as a user starts it; what it says goes to RUN.log."""
    command = [sys.executable, str(repository / "train.py"), "--config", str(recipe), "--run_dir", str(run), *flags]
    with open(f"{run}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=repository, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=log, stderr=log)


def finish(process: subprocess.Popen, run: pathlib.Path) -> str:
    """Waits for success; what was said since the run's first start."""
    code = process.wait(timeout=600)
    said = pathlib.Path(f"{run}.log").read_text(encoding="utf-8")
    assert code == 0, said
    return said


def kill_when(process: subprocess.Popen, run: pathlib.Path, condition) -> bool:
    """kill -9 as soon as `condition()` holds; False if the run came to its end before."""
    while process.poll() is None:
        if condition():
            process.send_signal(signal.SIGKILL)
            return process.wait(timeout=60) == -signal.SIGKILL
        time.sleep(0.002)
    finish(process, run)
    return False


def rows(path: pathlib.Path) -> list[dict]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_logged(run: pathlib.Path) -> int:
    """Whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
