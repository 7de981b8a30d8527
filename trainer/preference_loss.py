"""The losses of preference tuning, from the log-likelihoods of pairs of completions; tests compare
them with TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Float

from .config.preference import PreferenceConfig


class Pairs(NamedTuple):
    """Token sums of P pairs of completions in each of B rows, the chosen completion first; float32.

    Attributes:
      log_likelihoods: the model's; references: the reference's.
      tokens: targets of each completion, 0 in slots without a pair.
    """

    log_likelihoods: Float[Array, "B P 2"]
    references: Float[Array, "B P 2"]
    tokens: Float[Array, "B P 2"]

    @property
    def means(self) -> Float[Array, "B P 2"]:
        """The mean log-likelihood of a completion's tokens; in slots without a pair, that of an
        arbitrary likelihood below 1, so that all numbers are finite."""
        tokens = jnp.maximum(self.tokens, 1.0)
        return jnp.where(self.tokens > 0, self.log_likelihoods / tokens, -1.0)


class PairLosses(NamedTuple):
    """Each pair's loss and rewards; finite but meaningless in slots without a pair."""

    loss: Float[Array, "B P"]
    rewards: Float[Array, "B P C"]


def pair_losses(pairs: Pairs, config: PreferenceConfig) -> PairLosses:
    """Returns the losses and the rewards of pairs, without `sft_weight`'s term.

    The formulas are those of TRL's DPOTrainer, ORPOTrainer and CPOTrainer (loss_type simpo);
    rewards are beta times the log-ratio to the reference, or the mean log-likelihood without one.
    """
    if not config.needs_reference:
        return PairLosses(_without_reference(pairs.means, config), config.beta * pairs.means)
    ratios = pairs.log_likelihoods - pairs.references
    if config.loss in _BY_RATIOS:
        loss = _BY_RATIOS[config.loss](ratios[..., 0], ratios[..., 1], config.beta)
        return PairLosses(loss, config.beta * ratios)
    averaged = config.loss in ("ipo", "sigmoid_norm")
    margin = _difference(ratios / jnp.maximum(pairs.tokens, 1.0) if averaged else ratios)
    return PairLosses(_by_margin(margin, config), config.beta * ratios)


def labelled_losses(
    pairs: Pairs,
    labels: Float[Array, "B P"],
    kl: Float[Array, ""],
    config: PreferenceConfig,
) -> PairLosses:
    """Returns the losses of labelled completions and their rewards [B, P, 1], by the formula of
    TRL's KTOTrainer.

    Args:
      labels: 1 if a completion, the first of a pair, is desirable.
      kl: the reference point, see `mismatched_kl`.
    """
    ratios = (pairs.log_likelihoods - pairs.references)[..., 0]
    sign = 2 * labels - 1
    weights = jnp.where(labels > 0, config.desirable_weight, config.undesirable_weight)
    loss = weights * (1 - sigmoid(sign * config.beta * (ratios - kl)))
    return PairLosses(loss, config.beta * ratios[..., None])


def mismatched_kl(total: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """Returns KTO's estimate of the divergence from the reference: the mean log-ratio of
    completions after other records' prompts, at least 0; without gradient.

    Args:
      total: sum of the log-ratios over the whole batch; count: their number.
    """
    return jax.lax.stop_gradient(jnp.maximum(total / jnp.maximum(count, 1.0), 0.0))


def _difference(x: Float[Array, "B P 2"]) -> Float[Array, "B P"]:
    """The chosen completion's minus the rejected one's."""
    return x[..., 0] - x[..., 1]


# The losses of the log-ratios of chosen (c) and rejected (r) completions, which depend on more than
# their difference.
_BY_RATIOS: dict[str, Callable[[Array, Array, float], Array]] = {
    "apo_zero": lambda c, r, beta: sigmoid(-beta * c) + sigmoid(beta * r),
    "apo_down": lambda c, r, beta: sigmoid(beta * c) + sigmoid(beta * (r - c)),
    "bco_pair": lambda c, r, beta: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
    "nca_pair": lambda c, r, beta: (
        -log_sigmoid(beta * c) - (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)) / 2
    ),
    "sppo_hard": lambda c, r, beta: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
}


def _by_margin(margin: Float[Array, "B P"], config: PreferenceConfig) -> Float[Array, "B P"]:
    """The losses of the difference of the log-ratios."""
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss == "hinge":
        return relu(1 - beta * margin)
    if config.loss == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    kept = -(1 - smoothing) * log_sigmoid(beta * margin)
    flipped = -smoothing * log_sigmoid(-beta * margin)
    if config.loss == "robust":
        return (kept - flipped) / (1 - 2 * smoothing)
    return kept + flipped


def _without_reference(
    means: Float[Array, "B P 2"], config: PreferenceConfig
) -> Float[Array, "B P"]:
    """The losses of the mean log-likelihoods of a completion's tokens."""
    if config.loss == "simpo":
        return -log_sigmoid(config.beta * _difference(means) - config.simpo_gamma)
    # The odds ratio of ORPO: odds(p) = p / (1 - p).
    return -config.beta * log_sigmoid(_difference(means - _log_of_rest(means)))


def _log_of_rest(log_p: Float[Array, "B P 2"]) -> Float[Array, "B P 2"]:
    """log(1 - p) from log(p), without cancellation at either end (Maechler, Accurately Computing
    log(1 - exp(-|a|)))."""
    near_one = log_p > -jnp.log(2.0)
    # Each branch sees only inputs it is accurate for, so that its gradient elsewhere stays finite.
    large, small = jnp.where(near_one, log_p, -0.5), jnp.where(near_one, -1.0, log_p)
    return jnp.where(near_one, jnp.log(-jnp.expm1(large)), jnp.log1p(-jnp.exp(small)))
