"""Trains on TPU slices of Google Cloud, from your own machine.

  scripts/launch_tpu.sh run NAME --zone Z --machine-type ct6e-standard-4t --topology 4x4 [--spot]
      -- --config configs/R.yaml
  scripts/launch_tpu.sh run NAME --zone Z --type v5p-128 --version V -- --config configs/R.yaml
  scripts/launch_tpu.sh create|install|start|follow|status|stop|delete NAME --zone Z [-- COMMAND]

run      creates, installs, starts and follows, and repeats all of it after a transient failure
create   requests the slices unless they exist, and waits until they are ready
install  sends this working tree (the files git tracks or would add), installs Python (with uv) and
         the locked requirements
start    starts COMMAND on the workers unless it is running: train.py's options, or another command
         of the project, such as python -m scripts.export_hf RUN HF_DIR; train.py and eval.* run on
         all workers, other commands on the first worker's CPU
follow   prints the first worker's log until COMMAND ends, then the last lines of the worker that
         failed; exits with its code
status   shows the slices and what is running there; with train.py's options after --, also the
         run's step, speed and checkpoint
stop     stops COMMAND; training saves the current step
delete   deletes the slices, and says what it deleted

The slices stay, and are billed, until `delete`. With --machine-type (or --api compute) they are
created by Compute Engine; with --type, by the older Cloud TPU API, which has no chips after v6e.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

from data.folders import scratch_folder
from data.printable import printable_output
from trainer.options import AboveZero, AtLeastZero, FreeText, add_options, option

from .restarts import CANNOT_PASS, LIMIT, PREEMPTED, STOPPED, TRANSIENT, Restarts
from .tpu import workers as remote
from .tpu.gcloud import Gcloud, GcloudError, Kind, Refused, say, sleep
from .tpu.slices import GroupSlices, QueuedSlices, Request, Slices, Worker

VERBS = ("run", "create", "install", "start", "follow", "status", "stop", "delete")
# Options that not every verb reads, and the verbs that do.
READ_BY = {
    "env": ("install", "run"),
    "setup": ("install", "run"),
    "worker": ("start", "follow", "run"),
    "restarts": ("run",),
    "price_per_hour": ("status",),
}
INSTALL_TRIES = 5
SETTLE_SECONDS = 60  # how long to wait for the other workers once a job has ended on one


class WorkerJob(NamedTuple):
    """A worker's report of its job."""

    host: str
    id: int
    """The job's start time, in nanoseconds."""
    command: int
    """The checksum of its command."""
    code: int | None
    """The exit code; None while it runs; 75 if it ended without a code, as after a reboot."""


def parse_jobs(text: str) -> list[WorkerJob]:
    """Returns the newest command's jobs from the output of `workers.JOB` on all workers.

    If that command runs only on the first worker, others still have an earlier command's files.
    """
    codes = {"running": None, "lost": TRANSIENT}
    lines = re.findall(r"^job (\S+) (\d+) (\d+) (running|lost|\d+)\s*$", text, re.MULTILINE)
    jobs = [
        WorkerJob(host, int(identity), int(command), codes[code] if code in codes else int(code))
        for host, identity, command, code in lines
    ]
    newest = max(jobs, key=lambda job: job.id, default=None)
    return [job for job in jobs if newest and job.command == newest.command]


def deciding(codes: Sequence[int]) -> int:
    """Returns a job's exit code: that of the worker that caused the others to end.

    A permanent error or a stop takes precedence, then a crash, then a lost connection, which a
    crash causes on the others.
    """

    order = [CANNOT_PASS, STOPPED, None, TRANSIENT, PREEMPTED, 0]  # None: a crash
    return min(codes, key=lambda code: order.index(code if code in order else None))


class Launcher:
    """The launcher's verbs, for the slices with one name."""

    def __init__(
        self, gcloud: Gcloud, slices: Slices, args: argparse.Namespace, command: list[str]
    ) -> None:
        self.gcloud, self.slices, self.args, self.command = gcloud, slices, args, command
        self.shown = ("", 0)  # the id of the job being printed, and the bytes printed of its log

    # Workers

    def _targets(self, words: Sequence[str]) -> list[Worker]:
        """Returns the workers that a command runs on: all, or one. Raises Refused."""
        number = self.args.worker
        if number == "all" or (number is None and remote.on_all_workers(words)):
            return self.slices.workers()
        return [self._host(number)]

    def _host(self, number: str | None) -> Worker:
        """Returns the first slice's host with this number, by default 0.

        Raises:
          Refused: there is no such host.
        """
        number, workers = "0" if number in (None, "all") else number, self.slices.workers()
        for worker in workers:
            if worker.number in (number, "all"):
                return worker._replace(number=number)
        raise Refused(
            f"--worker: found {number}; {self.args.name} has the hosts "
            f"{', '.join(sorted({worker.number for worker in workers}, key=int)) or 'none now'}"
        )

    def _each(self, workers: Sequence[Worker], call: Callable[[Worker], Any]) -> list[Any]:
        """Returns the results of `call` for all workers, run concurrently. Raises GcloudError."""
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            return list(pool.map(call, workers))

    def _ask(self, workers: Sequence[Worker], command: str) -> str:
        """Returns the output of a shell command on the workers. Raises GcloudError."""
        return "".join(
            self._each(workers, lambda worker: self.gcloud.once(*self.slices.ssh(worker, command)))
        )

    def _do(self, workers: Sequence[Worker], command: str) -> None:
        """Runs a shell command on the workers and shows its output. Raises GcloudError."""
        self._each(workers, lambda worker: self.gcloud.shown(*self.slices.ssh(worker, command)))

    # Verbs

    def create(self) -> int:
        """Returns 0 once the slices are ready."""
        self.slices.create(self.args.poll)
        return 0

    def install(self) -> int:
        """Installs on all workers, and retries network failures. Raises GcloudError."""
        for tries_left in reversed(range(INSTALL_TRIES)):
            try:
                self._install_once()
                return 0
            except GcloudError as error:
                if error.kind in (Kind.LOGIN, Kind.ABSENT) or not tries_left:
                    raise
                pause = 15 * 2 ** (INSTALL_TRIES - 1 - tries_left)
                say(f"the installation failed ({error}); trying again in {pause} s")
                sleep(pause)
        raise AssertionError("unreachable")

    def _install_once(self) -> None:
        workers = self.slices.workers()
        if self.args.setup:
            self._do(workers, self.args.setup)
        command = remote.INSTALL
        with scratch_folder() as folder:
            archive, variables = folder / "longstripe.tar.gz", folder / "longstripe.env"
            remote.write_archive(archive)
            self._each(workers, functools.partial(self._copy, archive))
            if self.args.env:  # otherwise those of the last installation stay
                # In a file that only its owner can read: every user sees command lines.
                variables.touch(mode=0o600)
                variables.write_text(
                    remote.environment_file(remote.read_variables(self.args.env)), encoding="utf-8"
                )
                self._each(workers, functools.partial(self._copy, variables))
                command = f"chmod 600 longstripe.env\n{command}"
        self._do(workers, command)

    def _copy(self, file: Path, worker: Worker) -> int:
        return self.gcloud.shown(*self.slices.scp(worker, str(file), file.name))

    def start(self) -> int:
        """Starts the command on its workers. Returns 0. Raises GcloudError and Refused."""
        words = remote.words_to_run(self.command)
        remote.check_recipe(words)
        workers = self._targets(words)
        # libtpu in a single process would wait for all hosts of the slice, so use the CPU.
        alone = {} if remote.on_all_workers(words) or self.args.worker else {"JAX_PLATFORMS": "cpu"}
        self._each(
            workers,
            lambda worker: self.gcloud.shown(
                *self.slices.ssh(
                    worker,
                    remote.start_command(words, {**self.slices.environment(worker), **alone}),
                )
            ),
        )
        return 0

    def _jobs(self) -> list[WorkerJob]:
        return parse_jobs(self._ask(self.slices.workers(), remote.JOB))

    def follow(self) -> int:
        """Prints the log until the job ends; returns its exit code, 75 if the slices are gone."""
        while True:
            try:
                jobs = self._jobs()
                if not jobs:
                    raise Refused(
                        f"nothing was started on {self.args.name}; run scripts/launch_tpu.sh start "
                        f"{self.args.name} ..."
                    )
                if any(job.code is not None for job in jobs):
                    return self._ended()
                self._print_log()
            except GcloudError as error:
                if error.kind is Kind.LOGIN:
                    raise
                say(f"{error}; checking again in {self.args.poll:.0f} s")
            state = self.slices.state()
            if state.name in ("GONE", "ABSENT"):
                say(
                    f"{self.args.name} is "
                    f"{state.name.lower()}{': ' * bool(state.reason)}{state.reason}"
                )
                return TRANSIENT
            sleep(self.args.poll)

    def _print_log(self) -> None:
        """Prints new lines of a worker's log, by default the first's, until the job or the
        connection ends."""
        with self.gcloud.stream(
            *self.slices.ssh(self._host(self.args.worker), remote.log_command(*self.shown))
        ) as process:
            output = cast(io.BufferedReader, process.stdout)
            identity = output.readline().decode().strip()
            if identity and identity != self.shown[0]:
                self.shown = (identity, 0)
            while piece := output.read1(65536):
                self.shown = (identity, self.shown[1] + len(piece))
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()

    def _ended(self) -> int:
        """Waits for the other workers, prints the failed worker's last lines, returns its code."""
        jobs = self._jobs()
        for _ in range(SETTLE_SECONDS // 5):
            if all(job.code is not None for job in jobs):
                break
            sleep(5)
            jobs = self._jobs()
        codes = [job.code for job in jobs if job.code is not None]
        self._print_log()
        code = deciding(codes) if codes else TRANSIENT
        hosts = [job.host for job in jobs if job.code == code]
        if running := [job.host for job in jobs if job.code is None]:
            say(f"still running: {', '.join(running)}")
        say(f"ended with {code}" + (f" on {', '.join(hosts)}" if code else ""))
        if code and (len(jobs) > 1 or self.slices.request.slices > 1):
            ends = self._ask(self.slices.workers(), remote.ENDS)
            for host in hosts[:1]:
                for line in re.findall(rf"^end {re.escape(host)} \w+\|(.*)$", ends, re.MULTILINE):
                    print(f"{host}: {line}", flush=True)
        return code

    def status(self) -> int:
        """Prints the state of slices, job and run. Returns 0, or 75 if the slices are not ready."""
        state = self.slices.state()
        print(
            f"slices       {self.args.name}: "
            f"{state.name.lower()}{', ' * bool(state.reason)}{state.reason}"
        )
        if state.name != "READY":
            return TRANSIENT
        jobs = self._jobs()
        if not jobs:
            print("command      none has been started")
        for job in jobs:
            print(f"{job.host:12} {'running' if job.code is None else f'ended with {job.code}'}")
        if self.command:
            price = (
                ["--price-per-hour", str(self.args.price_per_hour)]
                if self.args.price_per_hour
                else []
            )
            print(self._run_status(*price), end="")
        return 0

    def _run_status(self, *flags: str) -> str:
        """Returns the output of scripts.run_status on the first worker. Raises GcloudError."""
        words = remote.words_to_run(self.command)
        if words[0] != "train.py":
            return ""
        command = shlex.join([".venv/bin/python", "-m", "scripts.run_status", *words[1:], *flags])
        first = self.slices.workers()[0]._replace(number="0")
        return self._ask(
            [first],
            f"cd longstripe && if [ -e ~/longstripe.env ]; then . ~/longstripe.env; fi; {command}",
        )

    def newest_checkpoint(self) -> int | None:
        """Returns the newest checkpoint's step; None if there is none or it is unknown."""
        with contextlib.suppress(GcloudError):
            if match := re.search(r"^(\d+)\s*$", self._run_status("--checkpoint"), re.MULTILINE):
                return int(match[1])
        return None

    def stop(self) -> int:
        """Stops the job on all workers. Returns 0. Raises GcloudError."""
        self._do(self.slices.workers(), remote.STOP)
        say(f"stopped the command on {self.args.name}")
        return 0

    def delete(self) -> int:
        """Deletes the slices; returns 0. Raises GcloudError, or Refused if there are none."""
        deleted = self.slices.delete()
        if not deleted:
            project = self.args.project or "gcloud's default project"
            raise Refused(
                f"nothing was deleted: there is no {self.args.name} in zone {self.args.zone} of "
                f"{project}"
                + (
                    ""
                    if isinstance(self.slices, GroupSlices)
                    else "; for one on Compute Engine, add --api compute"
                )
            )
        say(f"deleted {', '.join(deleted)}")
        return 0

    def run(self) -> int:
        """Creates, installs, starts, follows, until another start cannot help; returns the exit
        code."""
        remote.check_recipe(remote.words_to_run(self.command))
        remote.read_variables(self.args.env)
        restarts = Restarts(self.args.restarts)
        while True:
            self.create()
            try:
                self.install()
                checkpoint = self.newest_checkpoint()
                restarts.checkpoint = max(
                    restarts.checkpoint, -1 if checkpoint is None else checkpoint
                )
                self.start()
                code = self.follow()
            except GcloudError as error:
                if error.kind is Kind.LOGIN or self.slices.state().name == "READY":
                    raise
                say(f"{self.args.name} was lost: {error}")
                code = TRANSIENT
            if code == 0:
                return 0
            decision = restarts.after(code, self.newest_checkpoint())
            say(decision.reason)
            if not decision.restart:
                return code
            sleep(decision.pause)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The launcher's options."""

    verb: str = option(", ".join(VERBS), positional=True, metavar="VERB")
    name: str = option("name of the slices", positional=True, metavar="NAME")
    zone: str | None = option("zone, such as us-east5-a", None, metavar="Z")
    project: str | None = option("project, if not gcloud's default", None, metavar="P")
    api: str | None = option(
        "the API that manages the slices; also implied by --machine-type and --type",
        None,
        choices=("queued", "compute"),
    )
    machine_type: str = option(
        "Compute Engine's machine type, such as ct6e-standard-4t", "", metavar="T"
    )
    topology: str = option(
        "the slice's chips along each side, such as 4x4; default: one host", "", metavar="T"
    )
    type: str = option("the Cloud TPU API's accelerator type, such as v5p-128", "", metavar="T")
    version: str = option(
        "the Cloud TPU API's runtime version, such as v2-alpha-tpuv5", "", metavar="V"
    )
    slices: int = option(
        "number of slices; train.py's mesh.dcn names the axes that cross them", 1, metavar="N"
    )
    spot: bool = option("use cheaper capacity that may be preempted")
    flex_start: str = option("use capacity for up to this time, such as 4h", "", metavar="TIME")
    reservation: str = option("the name of your reservation", "", metavar="R")
    create_options: FreeText = option(
        "additional gcloud options for creating slices, such as '--network=n --service-account=a "
        "--labels=team=x --internal-ips'",
        "",
        metavar="'...'",
    )
    ssh_options: FreeText = option(
        "additional gcloud options for ssh and scp, such as --tunnel-through-iap or --internal-ip",
        "",
        metavar="'...'",
    )
    env: list[str] = option(
        "a variable for the workers; without VALUE its local value: --env HF_TOKEN. It is sent in "
        "a file that only you can read; without --env, those of the last installation stay",
        [],
        metavar="NAME[=VALUE]",
    )
    worker: str | None = option(
        "where COMMAND runs, instead of the default above, and whose log is followed",
        None,
        metavar="all|N",
    )
    setup: FreeText = option(
        "shell command to run on every worker before the installation", "", metavar="COMMAND"
    )
    poll: AboveZero = option("seconds between checks of the slices", 30, metavar="SECONDS")
    restarts: AtLeastZero = option(
        "consecutive restarts without a new checkpoint after which `run` gives up",
        LIMIT,
        metavar="N",
    )
    price_per_hour: AboveZero | None = option(
        "hourly price of all slices together, for `status`", None, metavar="P"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/launch_tpu.sh",
        allow_abbrev=False,
        description=__doc__,
        usage="%(prog)s VERB NAME --zone Z [option ...] [-- COMMAND]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, Options)
    return parser


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the command after --. Raises Refused."""
    options, command = argv, []
    if "--" in argv:
        options, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = _parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args, unknown = parser.parse_known_args(options)
    if args.verb not in VERBS:
        raise Refused(f"unknown verb {args.verb}; expected one of {', '.join(VERBS)}")
    if unknown:
        raise Refused(f"unknown option {unknown[0]}; the command's options follow after --")
    if not args.zone:
        raise Refused("--zone is missing, such as --zone us-east5-a")
    if args.slices < 1:
        raise Refused(f"--slices: found {args.slices}; needs at least 1")
    if args.worker and not re.fullmatch(r"all|\d{1,6}", args.worker, re.ASCII):
        raise Refused(f"--worker: found {args.worker}; expected all, or a host's number, from 0")
    for name, verbs in READ_BY.items():
        if args.verb not in verbs and getattr(args, name) != parser.get_default(name):
            raise Refused(
                f"--{name.replace('_', '-')}: has no effect with {args.verb}; it is for "
                f"{', '.join(verbs)}"
            )
    if args.type and args.machine_type:
        raise Refused(
            "--type is for the Cloud TPU API, --machine-type for Compute Engine; pass only one"
        )
    if args.machine_type and args.api == "queued":
        raise Refused(
            "--machine-type is for Compute Engine, --api queued is the Cloud TPU API; pass only one"
        )
    return args, command


def _refuse(message: str) -> Any:
    raise Refused(f"{message}; scripts/launch_tpu.sh --help")


@printable_output()
def main(argv: list[str] | None = None) -> int:
    """Runs a verb. Returns the command's code; 2 for a user's error, 75 if a retry may help."""
    try:
        args, command = _parse(list(sys.argv[1:] if argv is None else argv))
        gcloud = Gcloud(args.zone, args.project)
        request = Request(
            args.name,
            args.slices,
            args.type,
            args.version,
            args.machine_type,
            args.topology,
            args.spot,
            args.flex_start,
            args.reservation,
            shlex.split(args.create_options),
        )
        kind = GroupSlices if args.machine_type or args.api == "compute" else QueuedSlices
        launcher = Launcher(
            gcloud, kind(gcloud, request, shlex.split(args.ssh_options)), args, command
        )
        return getattr(launcher, args.verb)()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_PASS
    except GcloudError as error:
        print(f"error: {error}", file=sys.stderr)
        return TRANSIENT if error.kind in (Kind.NETWORK, Kind.CAPACITY) else CANNOT_PASS
    except KeyboardInterrupt:
        print(
            f"\nlaunch_tpu: {os.path.basename(sys.argv[0])} stopped here; the workers continue",
            file=sys.stderr,
        )
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
