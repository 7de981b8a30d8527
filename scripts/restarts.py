"""Decides whether to restart a run that ended; every launcher uses these rules.

    python -m scripts.restarts RECORD --checkpoint STEP      (STEP is empty without a checkpoint)

A scheduler that restarts jobs itself (Slurm, a JobSet) runs this before each start. It counts the
starts since the newest checkpoint in the file RECORD, waits before the second and later ones, each
time longer, and exits with 2 after too many: another start would not help.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from typing import NamedTuple

from data.errors import UserError
from data.untrusted_files import parse_json
from trainer import entry
from trainer.options import AtLeastZero, StorePath, option, parse

CANNOT_PASS = 2  # an error that would recur
TRANSIENT = os.EX_TEMPFAIL  # 75: another start may succeed
STOPPED, PREEMPTED = 130, 143
LIMIT = 5  # consecutive starts, after the first, without a new checkpoint
FIRST_PAUSE, LONGEST_PAUSE = 15, 600  # seconds
_BEGINNING = b'{"checkpoint": '  # of a record


def may_pass(code: int) -> bool:
    """Returns whether another start may succeed after a process ended with `code`.

    These are 75, a crash (1, or a signal: 134, 137, 139, ...) and a preemption (143); not success,
    a user's error (2), a missing program (126, 127), or Ctrl-C (130).
    """
    return code in (1, TRANSIENT) or (code > 128 and code != STOPPED)


def pause_before(start: int) -> int:
    """Returns the pause before a start; start 1 is the first after the newest checkpoint."""
    return 0 if start < 2 else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (start - 2))


class Decision(NamedTuple):
    """The next action after a run: `restart` after `pause` seconds, and the reason."""

    restart: bool
    pause: int
    reason: str


@dataclasses.dataclass
class Restarts:
    """Counts the starts since the newest checkpoint."""

    limit: int = LIMIT
    checkpoint: int = -1
    starts: int = 1

    def begin(self, checkpoint: int | None) -> None:
        """Counts a start, before which `checkpoint` was the newest."""
        if (newest := -1 if checkpoint is None else checkpoint) > self.checkpoint:
            self.checkpoint, self.starts = newest, 1
        else:
            self.starts += 1

    def exhausted(self) -> str | None:
        """Returns why there were too many starts without a new checkpoint, or None."""
        if self.starts <= self.limit + 1:
            return None
        since = (
            "without a checkpoint"
            if self.checkpoint < 0
            else f"without one after the checkpoint of step {self.checkpoint}"
        )
        return f"{self.starts - 1} starts {since}: the reason is in the log"

    def after(self, code: int, checkpoint: int | None) -> Decision:
        """Returns what to do after a run that ended with `code`, given the newest checkpoint."""
        if not may_pass(code):
            return Decision(False, 0, f"ended with {code}")
        self.begin(checkpoint)
        if reason := self.exhausted():
            return Decision(False, 0, reason)
        pause = max(FIRST_PAUSE, pause_before(self.starts))
        return Decision(
            True,
            pause,
            f"ended with {code}; starting again in {pause} s from "
            + (
                "the beginning"
                if self.checkpoint < 0
                else f"the checkpoint of step {self.checkpoint}"
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    record: StorePath = option(
        "the file that counts the starts, in a folder or bucket shared by all starts",
        positional=True,
    )
    checkpoint: str = option("the newest checkpoint's step; empty for none", "", metavar="STEP")
    limit: AtLeastZero = option("starts without a new checkpoint, after the first", LIMIT)
    longest_pause: AtLeastZero = option(
        "the longest pause before a start", LONGEST_PAUSE, metavar="SECONDS"
    )


def main(argv: list[str] | None = None) -> int:
    """Counts a start, waits, and returns 0, or 2 after too many starts."""
    from data.paths import is_remote

    args = parse(Options, argv)
    return entry.run(lambda: _count(args), None if is_remote(args.record) else args.record)


def _count(args: Options) -> None:
    """Counts a start and waits; raises UserError after too many starts."""
    from data.work_folder import write_bytes

    if not re.fullmatch(r"\d*", args.checkpoint, re.ASCII):
        raise UserError(f"--checkpoint: found {args.checkpoint}; expected a step, or nothing")
    newest = int(args.checkpoint) if args.checkpoint else None
    counted = _counted(args.record, args.limit)
    if counted is None:
        counted = Restarts(args.limit, -1 if newest is None else newest)
    else:
        counted.begin(newest)
    content = {"checkpoint": counted.checkpoint, "starts": counted.starts}
    write_bytes(args.record, json.dumps(content).encode())
    if reason := counted.exhausted():
        raise UserError(f"{reason}; fix it and remove {args.record}")
    if pause := min(args.longest_pause, pause_before(counted.starts)):
        print(
            f"start {counted.starts} since the newest checkpoint: waiting {pause} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(pause)


def _counted(record: str, limit: int) -> Restarts | None:
    """Returns what a file has counted; None without one, or if a power loss has torn it.

    Raises:
      UserError: the file is not a record.
    """
    from data.work_folder import read_bytes

    content = read_bytes(record) or b""
    try:
        stored = parse_json(content)
        return Restarts(limit, int(stored["checkpoint"]), int(stored["starts"]))
    except (ValueError, KeyError, TypeError) as error:
        is_ours = content[: len(_BEGINNING)] == _BEGINNING[: len(content)]
        if isinstance(error, json.JSONDecodeError) and is_ours:
            return None
        raise UserError(
            f"{record}: exists, but was not written by this command, so it is not overwritten; "
            "pass another file"
        ) from None


if __name__ == "__main__":
    entry.leave(main())
