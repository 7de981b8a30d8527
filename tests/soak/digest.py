"""Prints one hash of everything in a run's last checkpoint: python -m tests.soak.digest RUN."""

import hashlib
import json
import sys

import numpy as np

from trainer.checkpoint.manifest import verify
from trainer.checkpoint.readers import stored_arrays
from trainer.checkpoint.store import CheckpointStore

# A checkpoint's records of time, which no two runs share, of the logs, which are compared separately,
# and of the source, which may be edited meanwhile.
NOT_TRAINED = ("wall_seconds", "logged", "versions")


def digest(run: str) -> str:
    """Returns the step of a run's last checkpoint, and the hash of the names, shapes and bytes of
    all arrays and of the data state."""
    store = CheckpointStore(run)
    step = store.steps()[-1]
    path = store.path(step)
    verify(path)
    total = hashlib.sha256()
    for item in ("model", "optimizer"):
        for name, array in sorted(stored_arrays(path, item, verified=True).items()):
            value = np.asarray(array)
            total.update(f"{item} {name} {value.dtype} {value.shape}".encode() + value.tobytes())
    data = json.loads((path / "data" / "data.json").read_text(encoding="utf-8"))
    total.update(
        json.dumps(
            {name: value for name, value in data.items() if name not in NOT_TRAINED}, sort_keys=True
        ).encode()
    )
    return f"{step} {total.hexdigest()}"


def main(arguments: list[str]) -> int:
    """Prints the digest of a run's last checkpoint."""
    print(digest(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
