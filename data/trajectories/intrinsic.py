"""Intrinsic rewards: an explorer's rewards in place of a task's.

RND: Burda et al., Exploration by Random Network Distillation. ICM-APT: Liu and Abbeel, Behavior
From the Void, in the features of Pathak et al., Curiosity-driven Exploration. Proto: Yarats et al.,
Reinforcement Learning with Prototypical Representations. All three as the unsupervised RL benchmark
has them for states, with smaller networks.
"""

from __future__ import annotations

import abc
import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 128
FEATURES = 64


class Transitions(NamedTuple):
    """A batch of B decisions: the states [B, O] before and after, and the actions [B, A]."""

    state: Tensor
    action: Tensor
    next_state: Tensor


class IntrinsicReward(nn.Module, abc.ABC):
    """A reward learned from the transitions that it rewards."""

    @abc.abstractmethod
    def loss(self, batch: Transitions) -> Tensor:
        """Returns the scalar to minimize."""

    @abc.abstractmethod
    def reward(self, batch: Transitions) -> Tensor:
        """Returns the rewards [B, 1] of the transitions; may update running statistics."""

    def after_step(self) -> None:
        """Runs after an optimizer step on `loss`."""


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, outputs),
    )


class RandomNetworkDistillation(IntrinsicReward):
    """The error in predicting a random network's features of the next state, over its deviation."""

    moments: Tensor

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.normalize = nn.BatchNorm1d(states, affine=False)
        self.predictor, self.random = network(states, FEATURES), network(states, FEATURES)
        self.random.requires_grad_(False)
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))  # n, sum, squares

    def _errors(self, batch: Transitions) -> Tensor:
        state = self.normalize(batch.next_state).clamp(-5, 5)
        return (self.predictor(state) - self.random(state)).square().mean(1, keepdim=True)

    def loss(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        return self._errors(batch).mean()

    def reward(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        errors = self._errors(batch)
        wide = errors.double()
        self.moments += torch.stack([torch.tensor(len(wide)), wide.sum(), wide.square().sum()])
        count, total, squares = self.moments
        variance = squares / count - (total / count) ** 2
        return errors / (variance.clamp_min(0).sqrt().float() + 1e-8)


class CuriousParticles(IntrinsicReward):
    """Distance from the nearest other next states, in action-predicting features (ICM)."""

    NEIGHBOURS = 12

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(states, FEATURES), nn.LayerNorm(FEATURES), nn.Tanh()
        )
        self.forward_model = network(FEATURES + actions, FEATURES)
        self.backward_model = network(2 * FEATURES, actions)

    def loss(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        before, after = self.features(batch.state), self.features(batch.next_state)
        predicted = self.forward_model(torch.cat([before, batch.action], 1))
        action = self.backward_model(torch.cat([before, after], 1)).tanh()
        errors = torch.linalg.vector_norm(after - predicted, dim=1)
        return (errors + torch.linalg.vector_norm(batch.action - action, dim=1)).mean()

    def reward(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        features = self.features(batch.next_state)
        return particle_entropy(features, self.NEIGHBOURS)


def particle_entropy(features: Tensor, neighbours: int) -> Tensor:
    """Returns log(1 + mean distance) of each row [B, F] from its nearest rows, itself included."""
    distances = torch.cdist(features, features)
    nearest = distances.topk(min(neighbours, len(features)), largest=False).values
    return torch.log1p(nearest.mean(1, keepdim=True))


class Prototypes(IntrinsicReward):
    """Distance from recent candidates, in a projection that assigns states to prototypes evenly."""

    PROTOTYPES = 128
    QUEUE = 1024
    NEIGHBOUR = 3
    TEMPERATURE = 0.1
    MOMENTUM = 0.05
    queue: Tensor
    added: Tensor

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.project = nn.Linear(states, FEATURES)
        self.head = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)
        )
        self.prototypes = nn.Linear(FEATURES, self.PROTOTYPES, bias=False)
        self.target = copy.deepcopy(self.project).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(self.QUEUE, FEATURES))
        self.register_buffer("added", torch.zeros((), dtype=torch.int64))
        self.after_step()

    def loss(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        online = functional.normalize(self.head(self.project(batch.state)), dim=1)
        with torch.no_grad():
            target = functional.normalize(self.target(batch.next_state), dim=1)
            wanted = even_assignment(self.prototypes(target) / self.TEMPERATURE)
        scores = functional.log_softmax(self.prototypes(online) / self.TEMPERATURE, dim=1)
        return -(wanted * scores).sum(1).mean()

    def after_step(self) -> None:
        """Normalizes the prototypes, and moves the target a little towards the projection."""
        with torch.no_grad():
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))
            for target, online in zip(
                self.target.parameters(), self.project.parameters(), strict=True
            ):
                target.lerp_(online, self.MOMENTUM)

    def reward(self, batch: Transitions) -> Tensor:
        """See `IntrinsicReward`."""
        states = functional.normalize(self.project(batch.next_state), dim=1)
        chances = self.prototypes(states).T.softmax(1)
        candidates = states[torch.multinomial(chances, 1)[:, 0]]
        places = (self.added + torch.arange(self.PROTOTYPES)) % self.QUEUE
        self.queue[places] = candidates
        self.added += self.PROTOTYPES
        filled = self.queue[: min(int(self.added), self.QUEUE)]
        distances = torch.cdist(states, filled)
        return distances.topk(self.NEIGHBOUR, largest=False).values[:, -1:]


def even_assignment(scores: Tensor, iterations: int = 3) -> Tensor:
    """Returns Sinkhorn's assignment [B, P] of rows to prototypes: rows sum to 1, and prototypes get
    about equally much."""
    share = torch.exp(scores - scores.max())
    for _ in range(iterations):
        share = share / (share.sum(0, keepdim=True) * share.shape[1])
        share = share / (share.sum(1, keepdim=True) * share.shape[0])
    return share / share.sum(1, keepdim=True)


REWARDS: dict[str, type[Any]] = {
    "rnd": RandomNetworkDistillation,
    "icm_apt": CuriousParticles,
    "proto": Prototypes,
}
