"""Kills of workers of Beam's Dask runner, and of the command that waits for them, at random
instants: after a restart the prepared data equal those of one process, byte for byte.

    .venv-beam/bin/python -m tests.soak.beam_kills [WORKERS [DRIVERS [SEED]]]

WORKERS (10) preparations lose a worker, and DRIVERS (5) the command.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from data.clean import CleanConfig
from data.encode import EncodingRules
from data.engine import PROCESSES
from data.prepare import prepare
from data.sources import Source, Sources
from data.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parents[2]
FIXTURES = ROOT / "data/fixtures"
FILES, LONGEST = 8, 600  # seconds that a preparation may take


def sources(folder: pathlib.Path) -> Sources:
    """Writes conversations to files, some of which share them; returns the files as a source."""
    chats = json.loads((FIXTURES / "conversations.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        part = chats[number * 20 : number * 20 + 60]
        (folder / f"{number}.json").write_text(json.dumps(part), encoding="utf-8")
    dirty = Source(str(FIXTURES / "dirty.json"), template="vicuna_v1.1")
    return Sources((Source(str(folder)), dirty))


def make(base: pathlib.Path, name: str, address: str | None = None) -> pathlib.Path:
    """Prepares the data in the folder `name`, on the Dask cluster at an address or in one
    process."""
    from data.beam import Beam

    engine = Beam("dask", (f"--dask_client_address={address}",)) if address else PROCESSES
    made = prepare(
        sources(base / "in"),
        Tokenizer.load(FIXTURES / "tiny_tokenizer"),
        EncodingRules(256, clean=CleanConfig(near_duplicates=0.8)),
        base / name,
        progress=False,
        engine=engine,
    )
    return made.folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def started(base: pathlib.Path, name: str, address: str) -> subprocess.Popen:
    """Starts a preparation in a separate process."""
    command = [sys.executable, "-m", "tests.soak.beam_kills", "--make", str(base), name, address]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> bool:
    """Waits for a preparation; returns whether it succeeded."""
    stderr = process.communicate(timeout=LONGEST)[1]
    if process.returncode > 0:
        print("   ", (stderr.strip().splitlines() or ["no message"])[-1][:160], flush=True)
    return process.returncode == 0


def attacked(base: pathlib.Path, client, name: str, delay: float, kind: str) -> tuple[bool, int]:
    """Kills a worker or the command after some seconds, and starts the command until it succeeds.

    Returns:
      Whether the command was still working, and how often it was started.
    """
    address = client.scheduler.address
    process = started(base, name, address)
    time.sleep(delay)
    at_work = process.poll() is None
    if kind == "driver":
        process.kill()
    else:
        pids = list(client.run(os.getpid).values())
        os.kill(random.choice(pids), signal.SIGKILL)
    starts = 1
    while not finished(process):
        starts += 1
        if starts > 5:
            raise SystemExit(f"{name}: failed five times")
        process = started(base, name, address)
    return at_work, starts


def main() -> int:
    """Runs the kills; returns 1 if any folder differs."""
    from distributed import Client, LocalCluster

    workers, drivers, seed = [*map(int, sys.argv[1:4]), *(10, 5, 0)[len(sys.argv[1:4]) :]]
    random.seed(seed)
    with tempfile.TemporaryDirectory(prefix="longstripe-kills-") as temporary:
        base = pathlib.Path(temporary)
        truth = contents(make(base, "one"))
        cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
        with cluster, Client(cluster) as client:
            start = time.monotonic()
            assert finished(started(base, "whole", client.scheduler.address))
            seconds = time.monotonic() - start
            print(f"untouched: {seconds:.1f} s", flush=True)
            differ = 0
            for number in range(workers + drivers):
                kind, name = "worker" if number < workers else "driver", f"made-{number}"
                delay = random.uniform(0.2 * seconds, seconds)  # after the imports
                at_work, starts = attacked(base, client, name, delay, kind)
                [folder] = [path for path in (base / name).iterdir() if path.name[0] != "."]
                same = contents(folder) == truth
                differ += not same
                shutil.rmtree(base / name)
                print(
                    f"{kind} killed after {delay:5.1f} s{'' if at_work else ', at the end'}: "
                    f"{starts} starts, {'the same files' if same else 'OTHER FILES'}",
                    flush=True,
                )
    print(f"{workers + drivers} kills, {differ} with different files")
    return int(differ > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(pathlib.Path(sys.argv[2]), *sys.argv[3:])
        sys.exit(0)
    sys.exit(main())
