"""Intrinsic rewards: their values on small batches, against numpy, and that novelty is rewarded."""

import numpy as np
import pytest
import torch

from data.trajectories.intrinsic import (
    REWARDS,
    Prototypes,
    Transitions,
    even_assignment,
    particle_entropy,
)


def test_particle_entropy_is_the_log_of_the_nearest_distances():
    points = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    distances = np.sort(np.linalg.norm(points[:, None] - points[None], axis=-1), axis=1)
    expected = np.log(1 + distances[:, :4].mean(1))
    np.testing.assert_allclose(
        particle_entropy(torch.from_numpy(points), 4)[:, 0], expected, rtol=1e-3
    )


def test_assignments_are_even():
    """Each row is assigned completely, and all prototypes get equal shares."""
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 4)))
    assigned = even_assignment(scores, iterations=50)
    torch.testing.assert_close(assigned.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(assigned.sum(0), torch.full((4,), 3.0, dtype=torch.float64))
    assert (assigned.argmax(1) == scores.argmax(1)).float().mean() > 0.5


def batch(generator, middle):
    state, after = (torch.randn(64, 3, generator=generator) * 0.1 + middle for _ in range(2))
    return Transitions(state, torch.rand(64, 2, generator=generator) * 2 - 1, after)


@pytest.mark.parametrize("name", REWARDS)
def test_unseen_states_are_rewarded_more(name):
    """An eighth of the last batch is where no state was before."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    intrinsic = REWARDS[name](3, 2)
    learned = [weight for weight in intrinsic.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(learned, 1e-3)
    losses = []
    for _ in range(200):
        seen = batch(generator, 0.0)
        optimizer.zero_grad()
        loss = intrinsic.loss(seen)
        loss.backward()
        optimizer.step()
        intrinsic.after_step()
        losses.append(loss.item())
        with torch.no_grad():
            reward = intrinsic.reward(seen)
    assert reward.shape == (64, 1) and reward.isfinite().all()
    if name != "proto":  # its loss also rises as the predicted assignments become sharper
        assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    mixed = batch(generator, 0.0)
    mixed.next_state[:8] = torch.randn(8, 3, generator=generator) * 2 + 2
    with torch.no_grad():
        reward = intrinsic.reward(mixed)[:, 0]
    assert reward[:8].mean() > 1.5 * reward[8:].mean()


def test_prototypes_are_normalized_and_random_networks_frozen():
    """Prototypes have length 1; the predicted network is not trained."""
    prototypes = Prototypes(3, 2)
    prototypes.after_step()
    torch.testing.assert_close(prototypes.prototypes.weight.norm(dim=1), torch.ones(128))
    frozen = REWARDS["rnd"](3, 2).random.parameters()
    assert not any(weight.requires_grad for weight in frozen)
