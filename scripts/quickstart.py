"""The whole way on one small model: train, evaluate, export; then says what was made and what to try next.

    python -m scripts.quickstart        (what `make quickstart` runs)
"""

import pathlib
import subprocess
import sys

from data.errors import UserError
from trainer.config import load

RECIPE = "configs/quickstart.yaml"
NEXT = """
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


def main() -> None:
    """Train, evaluate, export."""
    config = load(["--config", RECIPE])
    run("train.py", "--config", RECIPE)
    checkpoint = newest_checkpoint(config.folder / "checkpoints")
    exported = config.folder / "exported"
    cases = [word for file in config.evaluate.line_cases for word in ("--cases", file)]
    output = str(config.folder / "evaluation")
    run("-m", "eval.line_retrieval", "--checkpoint", str(checkpoint), *cases, "--output", output)
    if exported.exists():
        print(f"\n{exported} is there already and is left as it is")
    else:
        run("-m", "scripts.export_hf", str(checkpoint), str(exported))
    print(NEXT.format(run=config.folder, checkpoint=checkpoint, exported=exported, recipe=RECIPE))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
