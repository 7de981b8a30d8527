"""A run's folder and its files.

    RUN/config.yaml           the resolved configuration, as last run
    RUN/versions.json         this project's source (a digest, and git's commit), JAX and its
                              plugins, as last run
    RUN/metrics.jsonl         a line of training metrics every train.log_every steps
    RUN/held_out.jsonl        one line per held-out loss
    RUN/NAME.jsonl            one line per result of a test in `evaluations`
    RUN/samples.jsonl         a line of answers to samples.prompts every samples.every steps
    RUN/local.json            the identifier in checkpoint.local, and the newest step there; see
                              trainer.checkpoint.local_record
    RUN/*.jsonl.unreadable    lines of these files that could not be read when the run resumed
    RUN/tensorboard/          the same metrics for TensorBoard
    RUN/wandb/                the same metrics for Weights & Biases, if logging.wandb is set
    RUN/profile/              a profile of logging.profile_steps
    RUN/assets/               the plain files copied into each checkpoint, as last written
    RUN/checkpoints/STEP/     model/ assets/ optimizer/ data/ manifest.json
    RUN/stages/NUMBER/        the run folder of each stage but the last, if the recipe has stages
    RUN/evaluation/           results of line retrieval from `make quickstart`
    RUN/lock                  names the process that trains, or trained last; locked while it trains

`step` always counts finished optimizer steps.
"""

import atexit
import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.schema import RunConfig
from trainer.run.bucket import Bucket
from trainer.run.lease import Lease
from trainer.run.logs import Written, cut_back
from trainer.run.mirror import Mirror

EARLIER_STAGES = "stages"  # the folder with the runs of earlier stages


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of a run's folder; for a run in a bucket, of a local folder with its small files
    that lasts as long as this process.

    Attributes:
      location: where the run is kept, as messages name it; empty for `folder`.
      mirror: copies the small files to and from a bucket; None for a run on disk.
      lease: the lease of a run in a bucket, if this process trains it.
    """

    folder: pathlib.Path
    location: str = ""
    mirror: Mirror | None = None
    lease: Lease | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """Returns the paths of a configuration's run."""
        if not config.in_bucket:
            return cls(config.folder)
        # In case no training follows, for example because the recipe is rejected.
        atexit.register(shutil.rmtree, config.folder, ignore_errors=True)
        mirror = Mirror(Bucket(config.location), config.folder)
        return cls(config.folder, config.location, mirror)

    def __str__(self) -> str:
        return self.location or str(self.folder)

    def before_checkpoint(self) -> None:
        """Checks that this process may add a checkpoint to the run, and brings the logs in the
        bucket up to date."""
        if self.lease is not None:
            self.lease.require()
        if self.mirror is not None:
            self.mirror.push()

    @property
    def config(self) -> pathlib.Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def versions(self) -> pathlib.Path:
        """The versions of the code that last trained here; see `trainer.run.versions`."""
        return self.folder / "versions.json"

    @property
    def metrics(self) -> pathlib.Path:
        """Training metrics, one JSON object per line."""
        return self.folder / "metrics.jsonl"

    @property
    def held_out(self) -> pathlib.Path:
        """Held-out losses, one JSON object per line."""
        return self.folder / "held_out.jsonl"

    @property
    def tensorboard(self) -> pathlib.Path:
        """TensorBoard's event files."""
        return self.folder / "tensorboard"

    @property
    def profile(self) -> pathlib.Path:
        """Profiles of logging.profile_steps."""
        return self.folder / "profile"

    def has_profile(self, session: str) -> bool:
        """Returns whether a start of the run has kept a profile in this folder of its profiles."""
        if self.mirror is not None:
            return bool(self.mirror.bucket.names(f"{self.profile.name}/{session}/"))
        return (self.profile / session).is_dir()

    def keep_profile(self, name: str, content: bytes) -> None:
        """Writes a profile file of any process, straight to the bucket if there is one."""
        if self.mirror is not None:
            self.mirror.bucket.write(f"{self.profile.name}/{name}", content)
            return
        path = self.profile / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    @property
    def assets(self) -> pathlib.Path:
        """The plain files copied into each checkpoint."""
        return self.folder / "assets"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Checkpoints, each in a folder named by its step."""
        return self.folder / "checkpoints"

    @property
    def lock(self) -> pathlib.Path:
        """The file that the training process locks."""
        return self.folder / "lock"

    def cut_back(
        self,
        step: int,
        evaluated: bool = True,
        evaluations: Sequence[str] = ("held_out",),
        logged: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Written]:
        """Removes logged lines after `step`, where training resumes; 0 removes all.

        Those steps will be repeated and must not appear twice. See `logs.cut_back`.

        Args:
          evaluated: whether all evaluations of `step` were logged; if not, their lines are removed
            too.
          evaluations: names of the evaluations, each with a file NAME.jsonl.
          logged: the checkpoint's record of each file, by name.

        Returns:
          The record of each file's remaining lines.
        """
        last_evaluated = step if evaluated else step - 1
        logs = [
            (self.metrics, step),
            *((self.folder / f"{name}.jsonl", last_evaluated) for name in evaluations),
        ]
        return {
            path.name: cut_back(path, last_step, (logged or {}).get(path.name))
            for path, last_step in logs
        }
