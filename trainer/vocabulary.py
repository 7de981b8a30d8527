"""Draws new rows of a grown vocabulary."""

from __future__ import annotations

import jax

from model.language_model import LanguageModel
from model.padding import vocabulary_axes


def draw_rows(
    params: dict[str, jax.Array], model: LanguageModel, stored_rows: int, seed: int
) -> dict[str, jax.Array]:
    """Returns the parameters with new vocabulary rows after `stored_rows`.

    A new row is the mean of the stored ones plus initialization noise; noise alone would be far
    from every embedding the other layers were trained on.
    """
    config = model.config

    def draw(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        drawn = {}
        for name, axis in vocabulary_axes().items():
            if name not in params:
                continue
            old = jax.lax.slice_in_dim(params[name], 0, stored_rows, axis=axis)
            shape = (config.vocab_size - stored_rows, config.hidden_size)
            noise = config.initializer_range * jax.random.normal(
                jax.random.fold_in(jax.random.key(seed), axis), shape
            )
            noise = jax.numpy.pad(noise, ((0, 0), (0, old.shape[1 - axis] - config.hidden_size)))
            rows = old.mean(axis, keepdims=True) + (noise.T if axis else noise)
            rows = rows.astype(params[name].dtype)
            drawn[name] = jax.lax.dynamic_update_slice_in_dim(params[name], rows, stored_rows, axis)
        return drawn

    shared = {name: params[name] for name in vocabulary_axes() if name in params}
    shardings = {name: model.shardings[name] for name in shared}
    return {**params, **jax.jit(draw, out_shardings=shardings, donate_argnums=0)(shared)}
