"""Trains, evaluates and exports a small model, then prints the results and what to try next.

python -m scripts.quickstart [--run-dir DIR]       (what `make quickstart` runs)
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

from data.errors import UserError
from trainer.config.load import load
from trainer.config.schema import RunConfig
from trainer.options import command, option

RECIPE = "configs/quickstart.yaml"
CASES = "data/fixtures/line_cases.jsonl"  # held out of training
NEW_TOKENS = 16  # per answer
ROWS = 20  # prompts per evaluation batch
SUMMARY = """
Held-out loss, nats per target token: {before:.2f} before, {after:.2f} after {steps} steps
{retrieval}

Results:
  {run}/metrics.jsonl, {run}/held_out.jsonl    the losses at each step
  {checkpoint}    the checkpoint
  {run}/evaluation/    line retrieval: results.json, line_retrieval.png
  {exported}    the model, for transformers

Try next:
  python train.py --config {recipe}    resumes the run, or reports that it is complete
  python train.py --config {recipe} --run_dir runs/mine --data.path YOUR_SHAREGPT.json
  python train.py --config configs/sharegpt_smollm2.yaml --model.path HF_DIR \\
      --data.path YOUR_SHAREGPT.json
"""


def run(*command: str) -> None:
    """Prints and runs a Python command; exits with its status if it fails."""
    print("\n$ python " + " ".join(command), flush=True)
    status = subprocess.run([sys.executable, *command], check=False).returncode
    if status:
        sys.exit(status)


def newest_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """Returns the checkpoint of the latest step.

    Raises:
        UserError: there is no checkpoint.
    """
    steps = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not steps:
        raise UserError(f"{folder}: contains no checkpoint")
    return max(steps, key=lambda path: int(path.name))


def evaluation_command(
    config: RunConfig, checkpoint: pathlib.Path, output: pathlib.Path
) -> list[str]:
    """Returns the command that evaluates a checkpoint with its recipe's mesh and precision."""
    mesh = config.mesh
    return [
        *("-m", "eval.line_retrieval", "--checkpoint", str(checkpoint), "--output", str(output)),
        *("--cases", CASES, "--max-new-tokens", str(NEW_TOKENS)),
        *("--rows", str(ROWS), "--simulate", str(mesh.simulate)),
        *("--compute-dtype", config.model.compute_dtype),
        *("--fsdp", str(mesh.fsdp), "--tensor", str(mesh.tensor), "--sequence", str(mesh.sequence)),
    ]


def describe(row: dict) -> str:
    """Returns a score of results.json as a sentence."""
    verdict = (
        "above chance"
        if row["above_chance"]
        else row["above_chance_reason"] or "not shown to be above chance"
    )
    return (
        f"Line retrieval, {row['num_lines']} lines, held-out cases: {row['right']} of "
        f"{row['cases']} correct, {row['accuracy']:.0%} (95% interval {row['low']:.0%} to "
        f"{row['high']:.0%}); chance {row['chance']:.0%}: {verdict}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    run_dir: str | None = option("folder of the run (default: the recipe's)", None)


def work(options: Options) -> None:
    """Trains, evaluates and exports the model."""
    training = ["--config", RECIPE, *(["--run_dir", options.run_dir] if options.run_dir else [])]
    config = load(training)
    run("train.py", *training)
    checkpoint = newest_checkpoint(config.folder / "checkpoints")
    exported = config.folder / "exported"
    output = config.folder / "evaluation"
    run(*evaluation_command(config, checkpoint, output))
    if exported.exists():
        print(f"\n{exported} already exists and is not exported again")
    else:
        run("-m", "scripts.export_hf", str(checkpoint), str(exported))
    losses = [
        json.loads(line) for line in (config.folder / "held_out.jsonl").read_text().splitlines()
    ]
    results = json.loads((output / "results.json").read_text())
    print(
        SUMMARY.format(
            before=losses[0]["held_out_loss_nats_per_target"],
            after=losses[-1]["held_out_loss_nats_per_target"],
            steps=losses[-1]["step"],
            retrieval="\n".join(map(describe, results["within_trained_length"])),
            run=config.folder,
            checkpoint=checkpoint,
            exported=exported,
            recipe=RECIPE,
        )
    )


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
