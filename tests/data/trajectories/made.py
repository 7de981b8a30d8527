"""Episodes of easily distinguished numbers, in ExoRL's form, without a simulator."""

import json

import numpy as np

from data.trajectories.episodes import Episode, write_episode
from data.trajectories.tasks import get_task

TASK = get_task("cartpole_swingup")


def episode(number, steps=20, task=TASK):
    """Returns an episode whose rewards are all number / 10, with actions and states drawn from the
    seed `number`."""
    generator = np.random.default_rng(number)
    rows = steps + 1
    return Episode(
        generator.normal(size=(rows, task.observation_size)).astype(np.float32),
        generator.uniform(-1, 1, (rows, task.action_size)).astype(np.float32),
        np.full(rows, number / 10, np.float32),
        np.ones(rows, np.float32),
        generator.normal(size=(rows, 4)),
    )


def folder_of(root, count=6, steps=20, task=TASK):
    """Writes episodes 1 to `count` as collected for the task; returns their buffer."""
    buffer = root / task.domain / "made" / "buffer"
    buffer.mkdir(parents=True)
    (buffer.parent / "collected.json").write_text(json.dumps({"task": task.name}))
    for number in range(1, count + 1):
        write_episode(buffer, "made", number, episode(number, steps, task))
    return buffer
