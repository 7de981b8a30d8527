"""Where a run's figures are shown beside its files: TensorBoard, and Weights & Biases when asked for."""

import uuid
from pathlib import Path
from typing import Any

from data.errors import UserError


class TensorBoard:
    """Rows as scalars `KIND/NAME` in event files; what an earlier start logged after `start_step` is hidden."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=10)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """One row {"step", NAME: number or None}."""
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Rows as `KIND/NAME` over `step` in a run of a W&B project; the run directory's next start goes on with that run.

    `step` is a metric of ours, since W&B's own counter refuses the steps that are run again after a restore. W&B's
    variables hold: WANDB_MODE=offline keeps everything in `folder`, for `wandb sync` to send later.

    Raises:
      UserError: wandb is not installed, or cannot begin (nobody is logged in, no network).
    """

    def __init__(self, folder: Path, project: str, name: str, config: dict[str, Any]) -> None:
        wandb = import_wandb()
        place = folder / "wandb" / "run_id"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        try:
            self._run = wandb.init(project=project, name=name, config=config, dir=str(folder), id=place.read_text("utf-8"),
                                   resume="allow")
        except wandb.Error as error:
            raise UserError(f"logging.wandb: {str(error).splitlines()[0]}; WANDB_MODE=offline works without an account"
                            ) from None
        self._run.define_metric("*", step_metric="step")

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """One row {"step", NAME: number or None}."""
        self._run.log({name if name == "step" else f"{kind}/{name}": x for name, x in row.items() if x is not None})

    def close(self) -> None:
        self._run.finish()


def import_wandb():
    """The module `wandb`, which only those who ask for it need; UserError where it is missing."""
    try:
        import wandb
    except ImportError:
        raise UserError("logging.wandb: the package wandb is not installed; pip install wandb, or leave logging.wandb "
                        "out") from None
    return wandb
