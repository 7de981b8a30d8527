"""Runs commands as real processes without the seconds that imports take: each is forked from a
server that has imported them.

    process = server().start("train", ["--config", ...], log=folder / "log")
    process.kill()
    process.wait(60)

The server never queries a device, so a forked process chooses its own.
"""

import atexit
import functools
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from tests import quick_compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMPORTED = (
    "train",
    "trainer.loop",
    "trainer.text",
    "trainer.stages",
    "scripts.prepare",
    "scripts.export_hf",
    "scripts.import_hf",
    "eval.line_retrieval",
    "eval.line_cases",
    "data.prepare",
    "trainer.huggingface.write",
    "trainer.huggingface.card",
    "trainer.reporting.boards",
    "tests.soak.digest",
)


class Forked:
    """A process that the server has forked."""

    def __init__(self, server: "Server", pid: int) -> None:
        self.server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal's number after a signal; None while the
        process runs."""
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.poll() is None:  # the server has not reaped it, so the number is still its own
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that imports and forks."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_compiler.XLA_FLAGS,
            "OMP_NUM_THREADS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._lock, self._started = threading.Lock(), []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.forks"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, request: dict) -> Any:
        """Returns the server's answer to a request."""
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server of forked processes has ended")
        return json.loads(line)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: pathlib.Path,
        uid: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Forked:
        """Starts `module.main(arguments)` with its output appended to `log`, as another user if
        `uid` is passed."""
        request = {
            "module": module,
            "arguments": list(map(str, arguments)),
            "log": str(log),
            "uid": uid,
            "environment": environment or {},
        }
        process = Forked(self, self.ask(request))
        self._started.append(process)
        return process

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        log: pathlib.Path,
        timeout: float = 300,
        **options: Any,
    ) -> int:
        """Starts a command like `start`, waits until it ends, and returns its exit code."""
        process = self.start(module, arguments, log, **options)
        try:
            return process.wait(timeout)
        finally:
            process.kill()

    def end_all(self) -> None:
        """Kills the processes that are still running."""
        for process in self._started:
            process.kill()
            process.wait(60)
        self._started.clear()


@functools.cache
def server() -> Server:
    """Returns the server shared by this process's cases; it ends, with everything it started, when
    this process does."""
    return Server()


def _become(request: dict) -> None:
    """Runs the command in a forked process; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        devnull = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((devnull, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        os.environ.update(request["environment"])
        if request["uid"] is not None:
            os.setgroups([])
            os.setgid(request["uid"])
            os.setuid(request["uid"])
        code = importlib.import_module(request["module"]).main(request["arguments"]) or 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # As Python ends: waits for threads that still save, and JAX leaves its cluster.
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    """Serves requests, one line of JSON each on standard input, until it ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    answers, running = os.fdopen(os.dup(1), "w"), set()
    os.dup2(2, 1)
    while line := os.read(
        0, 1 << 20
    ):  # one request at a time, since the client waits for each answer
        request = json.loads(line)
        if "poll" in request:
            if (answer := _poll(request["poll"])) is not None:
                running.discard(request["poll"])
        elif not (answer := os.fork()):
            answers.close()
            _become(request)
        else:
            running.add(answer)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
