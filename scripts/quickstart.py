"""The whole way on one small model: train, evaluate, export; then says what was made and what to try next.

    python -m scripts.quickstart        (what `make quickstart` runs)
"""

import argparse
import json
import pathlib
import subprocess
import sys

from data.errors import UserError
from trainer.config.load import load
from trainer.config.schema import RunConfig

RECIPE = "configs/quickstart.yaml"
ROWS = 20  # prompts answered together
NEXT = """
Held-out loss, nats per target token: {before:.2f} before, {after:.2f} after {steps} steps
{retrieval}

Made:
  {run}/metrics.jsonl, {run}/held_out.jsonl    the losses, step by step
  {checkpoint}    the checkpoint
  {run}/evaluation/    line retrieval: results.json, line_retrieval.png
  {exported}    the model, as transformers loads it

Try next:
  python train.py --config {recipe}    the same command goes on where it was, or says that it is done
  python train.py --config {recipe} --run_dir runs/mine --data.path YOUR_SHAREGPT.json
  python train.py --config configs/sharegpt_smollm2.yaml --model.path HF_DIR --data.path YOUR_SHAREGPT.json
"""


def run(*command: str) -> None:
    """Run one of the project's commands as a user would, showing it."""
    print("\n$ python " + " ".join(command), flush=True)
    code = subprocess.run([sys.executable, *command], check=False).returncode
    if code:
        sys.exit(code)


def newest_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """The checkpoint of the latest step."""
    steps = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if not steps:
        raise UserError(f"{folder}: no checkpoint was made")
    return max(steps, key=lambda path: int(path.name))


def evaluation(config: RunConfig, checkpoint: pathlib.Path, output: pathlib.Path) -> list[str]:
    """The command that evaluates as the recipe trains: same mesh, layout and precision."""
    mesh = config.mesh
    return [
        *("-m", "eval.line_retrieval", "--checkpoint", str(checkpoint), "--output", str(output)),
        *("--cases", *config.evaluate.line_cases, "--max-new-tokens", str(config.evaluate.max_new_tokens)),
        *("--rows", str(ROWS), "--simulate", str(mesh.simulate), "--compute-dtype", config.model.compute_dtype),
        *("--fsdp", str(mesh.fsdp), "--tensor", str(mesh.tensor), "--sequence", str(mesh.sequence)),
        *("--layout", config.attention.layout),
    ]


def in_words(row: dict) -> str:
    """One line of results.json's scores."""
    verdict = "above chance" if row["above_chance"] else "not shown to be above chance"
    return (
        f"Line retrieval, {row['num_lines']} lines, held-out cases: {row['right']} of {row['cases']} right, "
        f"{row['accuracy']:.0%} (95% interval {row['low']:.0%} to {row['high']:.0%}); chance {row['chance']:.0%}: {verdict}"
    )


def main() -> None:
    """Train, evaluate, export."""
    config = load(["--config", RECIPE])
    run("train.py", "--config", RECIPE)
    checkpoint = newest_checkpoint(config.folder / "checkpoints")
    exported = config.folder / "exported"
    output = config.folder / "evaluation"
    run(*evaluation(config, checkpoint, output))
    if exported.exists():
        print(f"\n{exported} is there already and is left as it is")
    else:
        run("-m", "scripts.export_hf", str(checkpoint), str(exported))
    losses = [json.loads(line) for line in (config.folder / "held_out.jsonl").read_text().splitlines()]
    results = json.loads((output / "results.json").read_text())
    told = {
        "before": losses[0]["held_out_loss_nats_per_target"],
        "after": losses[-1]["held_out_loss_nats_per_target"],
        "steps": losses[-1]["step"],
        "retrieval": "\n".join(map(in_words, results["within_trained_length"])),
    }
    print(NEXT.format(run=config.folder, checkpoint=checkpoint, exported=exported, recipe=RECIPE, **told))


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__.splitlines()[0]).parse_args()
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
