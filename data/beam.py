"""Prepares data with Apache Beam; the only module that uses it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from data.engine import GROUP, Step
from data.errors import TransientError, UserError, first_line, is_transient
from data.printable import printable

RUNNERS = {
    # Not Beam's DirectRunner, which downloads another runner, Prism, if it can.
    "direct": "apache_beam.runners.portability.fn_api_runner.FnApiRunner",
    "dask": "apache_beam.runners.dask.dask_runner.DaskRunner",
    "flink": "FlinkRunner",
    "spark": "SparkRunner",
    "dataflow": "DataflowRunner",
}

_MOST_PARTITIONS = 1024  # of Dask: each is a task for its scheduler
_AT_A_STEP = re.compile(r" \[while running '[^']*'\]$")  # Beam adds it to messages


@dataclass(frozen=True)
class Beam:
    """The workers of a Beam runner. They need the sources, and the folder `data.prepared`, at the
    same paths as this process."""

    runner: str = "direct"
    """One of RUNNERS."""
    options: tuple[str, ...] = ()
    """Flags for the runner, such as --flink_master=HOST:8081."""

    in_parts = True

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise UserError(f"--runner: found {self.runner}; {', '.join(RUNNERS)} would work")
        _check_flags(self.runner, self.options)

    def run(self, items: Sequence[Any], *steps: Step) -> None:
        if not items:
            return
        beam = library()
        options = beam.options.pipeline_options.PipelineOptions(
            [f"--runner={RUNNERS[self.runner]}", *_partitions(self, len(items)), *self.options]
        )
        try:
            # The log has a worker's traceback of an error that is raised here.
            with _silent("apache_beam.runners.common"), _pipeline(options) as pipeline:
                values = pipeline | beam.Create(list(items)) | beam.Reshuffle()
                for number, step in enumerate(steps):
                    transform = beam.GroupByKey() if step == GROUP else beam.FlatMap(step)
                    values = values | f"step {number}" >> transform
        except UserError as error:
            raise type(error)(_AT_A_STEP.sub("", str(error))) from error
        except Exception as error:  # each runner has its own types
            raise _failure(self.runner, error) from error


def _partitions(engine: Beam, items: int) -> list[str]:
    """Returns the flag that spreads items over Dask's workers, unless one is given; without it up
    to 128 items are one worker's."""
    given = any(flag.startswith(("--dask_npart", "--dask_partition")) for flag in engine.options)
    if engine.runner != "dask" or given:
        return []
    return [f"--dask_partition_size={-(-items // _MOST_PARTITIONS)}"]


@contextlib.contextmanager
def _pipeline(options: Any) -> Iterator[Any]:
    """Yields a pipeline, which runs when the context ends, and releases its results.

    Dask reruns tasks whose results were on a dead worker for as long as a client wants them: in a
    later pass, or after the workers' folder is removed, which would recreate it.
    """
    pipeline = library().Pipeline(options=options)
    try:
        with pipeline:
            yield pipeline
    finally:
        client = getattr(getattr(pipeline, "result", None), "client", None)
        if client is not None:
            client.close()


@contextlib.contextmanager
def _silent(logger: str) -> Iterator[None]:
    """Turns off a logger within the context."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _failure(runner: str, error: Exception) -> UserError:
    """Returns a one-line error for a runner's, whose text may hold a worker's traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [first_line(error)]
    kind = TransientError if is_transient(error) else UserError
    return kind(f"Beam's {runner} runner failed: {printable(lines[-1].strip())}")


def _check_flags(runner: str, flags: Sequence[str]) -> None:
    """Raises UserError for a flag that Beam does not have; it would only log a warning."""
    options = library().options.pipeline_options
    if "." in RUNNERS[runner]:
        importlib.import_module(RUNNERS[runner].rsplit(".", 1)[0])  # defines flags of its own
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, conflict_handler="resolve", exit_on_error=False
    )
    kinds = [options.PipelineOptions]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if "_add_argparse_args" in vars(kind):
            kind._add_argparse_args(parser)
    try:
        unknown = parser.parse_known_args(list(flags))[1]
    except argparse.ArgumentError as error:
        raise UserError(f"flags of Beam's {runner} runner: {printable(str(error))}") from None
    if unknown:
        raise UserError(
            f"flags of Beam's {runner} runner: {printable(unknown[0])} is unknown; those of "
            "apache_beam.options.pipeline_options would work"
        )


def library() -> ModuleType:
    """Returns the module apache_beam.

    Raises:
      UserError: it is not installed.
    """
    try:
        with _silent("root"):  # of what Google's cloud would need
            import apache_beam
    except ImportError:
        raise UserError(
            "--engine beam needs apache-beam; `make install EXTRAS=beam` installs it"
        ) from None
    return apache_beam
