"""The reference's log-likelihoods in several processes; tests/trainer/test_preference.py compares
their values."""

import json
import os
import subprocess
import sys

import numpy as np

from scripts import launch_local
from trainer.reference import _stored, _write

# One of two processes: four pairs, one per row, in two steps. It starts twice, and prints the steps
# that each start computed and the log-likelihoods.
PROCESS = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from trainer.reference import reference_log_likelihoods

number, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)

class Loader:
    documents, batch_size = range(4), 2
    def __len__(self): return 4
    def row_pairs(self, row): return np.array([row])

def start():
    computed = []
    def log_likelihoods(step):
        computed.append(step)
        return jnp.full((2, 2), -1.5 - step)
    read, compute = lambda step: step, lambda: log_likelihoods
    path = folder / "pairs.f32"
    return computed, reference_log_likelihoods(Loader(), read, compute, path, False, "").tolist()

print(json.dumps([start(), start()]))
"""


def run_two_processes(repository, folders):
    """Returns the steps computed and the log-likelihoods: two processes' of two starts."""
    port = str(launch_local.free_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number), port, str(folder)],
            cwd=repository,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
        return [json.loads(output.splitlines()[-1]) for output in outputs]
    finally:
        for process in running:
            process.kill()


def test_processes_with_folders_of_their_own_compute_the_same_steps(repository, tmp_path):
    """As on machines whose data are in a bucket. Process 0 was interrupted after its first step,
    and process 1 has a file of an earlier start in which it was the first."""
    folders = tmp_path / "first", tmp_path / "other"
    known = np.array([[-1, -2], [-3, -4], [np.nan, np.nan], [np.nan, np.nan]], np.float32)
    _write(folders[0] / "pairs.f32", known)
    _write(folders[1] / "pairs.f32", np.full((4, 2), -9, np.float32))
    values = [[-1, -2], [-3, -4], [-2.5, -2.5], [-2.5, -2.5]]
    starts = [[[1], values], [[], values]]
    assert run_two_processes(repository, folders) == [starts, starts]


def test_two_runs_may_write_the_same_reference_at_once(tmp_path, monkeypatch):
    """As the runs of a sweep of preference.beta do, which have the same data and model."""
    path, rename = tmp_path / "pairs.f32", os.replace
    first, second = (np.full((4, 2), number, np.float32) for number in (1, 2))

    def after_another(scratch, target):
        monkeypatch.setattr(os, "replace", rename)
        _write(path, second)
        rename(scratch, target)

    monkeypatch.setattr(os, "replace", after_another)
    _write(path, first)
    assert np.array_equal(_stored(path, 4), first)
    assert list(tmp_path.iterdir()) == [path]
