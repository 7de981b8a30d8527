"""A run that stands still ends with 75 in every process, each printing its stacks and then the
reason."""

import os
import subprocess
import sys
import time

import pytest

from scripts.launch_local import free_port
from trainer.config.schema import DistributedConfig
from trainer.run.watchdog import USUAL_STEPS, Watchdog

STALLING = """
import sys, time
from trainer.config.schema import DistributedConfig
from trainer.run import cluster
from trainer.run.watchdog import Watchdog

def loads_a_record_that_never_comes():
    time.sleep(100)

address, number, doing = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if address:
    config = DistributedConfig(coordinator=address, process_id=number, num_processes=2)
    cluster.join(config, simulated=True, run="run")
minutes = 2.5 / 60
watchdog = Watchdog(DistributedConfig(stall_minutes=minutes, compile_minutes=minutes), period=0.2)
watchdog.begin_step(7)
if doing == "silent":
    from trainer.run import watchdog as module
    module.SILENT_SECONDS = 2
    watchdog.limit = None
    if number == 1:
        time.sleep(1)
        watchdog.close()
elif number != 1:
    watchdog.begin_step(8)
loads_a_record_that_never_comes()
"""


def run_stalling(repository, doing, processes=2):
    address = f"127.0.0.1:{free_port()}" if processes > 1 else ""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", STALLING, address, str(number), doing],
            cwd=repository,
            text=True,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for number in range(processes)
    ]
    outputs = [process.communicate(timeout=60)[1] for process in running]
    return [process.returncode for process in running], outputs


def test_all_processes_name_the_slowest_one_after_their_stacks(repository):
    codes, outputs = run_stalling(repository, "steps")
    assert codes == [75, 75]
    for words in outputs:
        assert "in loads_a_record_that_never_comes" in words and "Thread 0x" in words
        last = words.rstrip().splitlines()[-1]
        assert last.startswith("error: nothing has moved for 0.0 minutes (step ")
        assert "process 1 is in step 7 (in a step)" in last


def test_a_silent_process_is_named(repository):
    codes, outputs = run_stalling(repository, "silent")
    assert codes == [75, 75]
    for words in outputs:
        assert (
            words.rstrip()
            .splitlines()[-1]
            .startswith("error: process 1 of 2 has not been heard from for 2 s")
        )


def test_a_single_process_ends_too(repository):
    codes, outputs = run_stalling(repository, "alone", processes=1)
    assert codes == [75] and outputs[0].rstrip().splitlines()[-1].startswith(
        "error: nothing has moved for 0.0 minutes (step 8"
    )


@pytest.fixture
def watchdog():
    watchdog = Watchdog(
        DistributedConfig(stall_minutes=1, compile_minutes=3, evaluate_minutes=0), period=100
    )
    yield watchdog
    watchdog.close()


def test_each_phase_has_its_limit(watchdog):
    assert watchdog.limit is None
    watchdog.begin_step(1)
    assert watchdog.limit == 180, "the first step may tune kernels"
    with watchdog.phase("evaluating", 0):
        assert watchdog.limit is None
    assert watchdog.limit == 180
    watchdog.begin_step(2)
    watchdog.since -= 1
    watchdog.begin_step(3)
    assert watchdog.limit == 60
    for step in range(4, 10):
        watchdog.since -= 100  # a step takes 100 s
        watchdog.begin_step(step)
    assert watchdog.limit == pytest.approx(USUAL_STEPS * 100, rel=0.01)
    with watchdog.phase("saving", 30):
        assert watchdog.limit == 1800
    assert time.monotonic() - watchdog.since < 1


@pytest.mark.parametrize("minutes", [-1.0, float("inf"), float("nan")])
def test_minutes_are_checked(minutes):
    with pytest.raises(ValueError, match=r"distributed\.stall_minutes"):
        DistributedConfig(stall_minutes=minutes)
