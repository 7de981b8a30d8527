"""Calls gcloud without prompts, and classifies its failures."""

from __future__ import annotations

import enum
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..restarts import FIRST_PAUSE, LONGEST_PAUSE


class Kind(enum.Enum):
    """Why a call of gcloud failed."""

    ABSENT = "there is no such resource"
    LOGIN = "gcloud is not logged in, or lacks the permission"
    QUOTA = "the quota does not allow it"
    CAPACITY = "there is no capacity now"
    NETWORK = "the connection failed"
    OTHER = "gcloud refused it"


# In this order: a message of an earlier kind often contains words of a later one.
_KINDS = (
    (
        Kind.LOGIN,
        r"gcloud auth login|gcloud config set account|Reauthentication|UNAUTHENTICATED"
        r"|PERMISSION_DENIED|invalid_grant|active account|do(es)? not have permission"
        r"|Required '.*' permission|HTTPError 40[13]",
    ),
    (Kind.ABSENT, r"NOT_FOUND|[Nn]ot found|HTTPError 404|does not exist"),
    (
        Kind.CAPACITY,
        r"no (more )?capacity|STOCKOUT|POOL_EXHAUSTED|not enough resources|insufficient capacity",
    ),
    (Kind.QUOTA, r"[Qq]uota|QUOTA_EXCEEDED|RESOURCE_EXHAUSTED"),
    (
        Kind.NETWORK,
        r"[Nn]etwork is unreachable|resolve host|ServerNotFound|find the server|[Tt]imed? ?out"
        r"|[Cc]onnection|Max retries|UNAVAILABLE|HTTPError 50\d|exited with return code \[?255"
        r"|Broken pipe",
    ),
)


def kind_of(message: str) -> Kind:
    """Returns the kind of failure in gcloud's standard error."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, message)), Kind.OTHER)


class GcloudError(Exception):
    """A failed gcloud call: its kind, and the last line that gcloud printed."""

    def __init__(self, message: str) -> None:
        self.kind = kind_of(message)
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        self.reason = next(
            (line for line in lines if line.startswith("ERROR")),
            lines[-1] if lines else "it printed nothing",
        )
        super().__init__(f"{self.kind.value}: {self.reason}")


class Refused(Exception):
    """A user's error, in one line."""


def split(text: str) -> list[str]:
    """Returns the words of a command."""
    return text.split()


def say(text: str) -> None:
    """Prints a line, marked as the launcher's."""
    print(f"launch_tpu: {text}", file=sys.stderr, flush=True)


class Gcloud:
    """gcloud for one zone and project."""

    def __init__(self, zone: str, project: str | None, patience: int = 3600) -> None:
        """`patience`: seconds of waiting for a lost network."""
        self.zone, self.patience = zone, patience
        self.project = ["--project", project] if project else []
        self.where = ["--zone", zone, *self.project]
        self.environment = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}

    @property
    def region(self) -> str:
        """The zone's region."""
        return self.zone.rpartition("-")[0]

    def once(self, *words: str) -> str:
        """Returns what a command prints.

        Raises:
          GcloudError: it failed.
          Refused: gcloud is not installed.
        """
        with self._open(words, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate()
        if process.returncode:
            raise GcloudError(errors or f"exited with return code [{process.returncode}]")
        return output

    def shown(self, *words: str) -> int:
        """Runs a command with its output on the terminal. Returns 0. Raises GcloudError."""
        errors: list[str] = []

        def forward() -> None:
            for line in process.stderr or ():
                errors.append(line)
                sys.stderr.write(line)

        with self._open(words, stdout=None, stderr=subprocess.PIPE) as process:
            thread = threading.Thread(target=forward)
            thread.start()
            process.wait()
            thread.join()
        if process.returncode:
            raise GcloudError("".join(errors) or f"exited with return code [{process.returncode}]")
        return 0

    def stream(self, *words: str) -> subprocess.Popen:
        """Starts a command; the caller reads its standard output, as bytes."""
        return self._open(words, text=False)

    def _open(self, words: tuple[str, ...], **options: Any) -> subprocess.Popen:
        try:
            return subprocess.Popen(
                ["gcloud", *words, "--quiet"] if "--" not in words else ["gcloud", *words],
                stdin=subprocess.DEVNULL,
                env=self.environment,
                **{"text": True, "stdout": subprocess.PIPE, **options},
            )
        except FileNotFoundError:
            raise Refused(
                "gcloud is not installed here: https://cloud.google.com/sdk/docs/install"
            ) from None

    def __call__(self, *words: str) -> str:
        """`once`, retried with growing pauses while the network is down."""
        return self.patiently(lambda: self.once(*words))

    def patiently(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, waiting for a lost network. Raises GcloudError."""
        pause, waited = FIRST_PAUSE, 0
        while True:
            try:
                return call()
            except GcloudError as error:
                if error.kind is not Kind.NETWORK or waited >= self.patience:
                    raise
                say(f"{error}; trying again in {pause} s")
                sleep(pause)
                waited, pause = waited + pause, min(LONGEST_PAUSE, 2 * pause)

    def describe(self, *words: str) -> Any | None:
        """Returns the parsed output of `describe` or `list`; None if the resource is absent."""
        try:
            return json.loads(self(*words, "--format", "json") or "null")
        except GcloudError as error:
            if error.kind is Kind.ABSENT:
                return None
            raise


def sleep(seconds: float) -> None:
    """Waits; all of the launcher's pauses go through here."""
    time.sleep(seconds)
