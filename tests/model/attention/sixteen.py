"""Run by test_sixteen.py in a separate process with 16 devices: prints bfloat16 errors on 1 and on
16 shards as JSON."""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

import jax
import jax.numpy as jnp
import numpy as np

from model.attention import TokenCoords
from model.attention.layout import permutation

from .cases import SCHEDULES, documents, inputs, out_and_gradients
from .dense import dense_attention

LENGTH = 240
NAMES = (
    "ring",
    "ring bidirectional",
    "all_gather",
    "balanced",
    "ulysses",
    "usp ring",
    "attention2d",
    "attention2d overlap",
    "ring_self_attention",
)


def main():
    """Prints {schedule: {shards: mean errors of out, dq, dk, dv}}."""
    jax.config.update("jax_num_cpu_devices", 16)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs("8/2", LENGTH)]
    expected = dense_attention(*arrays[:3], *documents("one", LENGTH), arrays[3])

    def errors(schedule, size):
        order = permutation(LENGTH, size, "striped")
        coords = TokenCoords(*(x[:, order] for x in documents("one", LENGTH)))
        got = out_and_gradients(SCHEDULES[schedule], size)(*(x[:, order] for x in arrays), coords)
        return [
            float(np.abs(np.asarray(got[i], np.float64) - expected[i][:, order]).mean())
            for i in (0, 2, 3, 4)
        ]

    alone = errors("ring", 1)
    print(json.dumps({name: {1: alone, 16: errors(name, 16)} for name in NAMES}))


if __name__ == "__main__":
    main()
