"""JAX's settings, such as JAX_DEFAULT_PRNG_IMPL in the environment, that change results."""

from __future__ import annotations

import warnings
from typing import Any

import jax

# With others the same seed would draw other weights and samples, and with `partitionable` off they
# would depend on the mesh.
FIXED = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}
# They are the user's to choose, equally in all processes; runs record those other than the default.
CHOSEN = {
    "jax_default_matmul_precision": None,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
}


def fix_random_numbers() -> None:
    """Makes seeds draw the same numbers under all settings; warns of those that it replaces."""
    for name, value in FIXED.items():
        if (found := getattr(jax.config, name)) != value:
            warnings.warn(
                f"{name.upper()} is {found} and is not used: with {value}, a seed draws the same "
                "weights and samples in every run",
                RuntimeWarning,  # of several processes, this one alone may have the variable
                stacklevel=2,
            )
            jax.config.update(name, value)


def chosen_settings() -> dict[str, Any]:
    """Returns name -> value of the settings of CHOSEN, None for the default."""
    values = {name: getattr(jax.config, name) for name in CHOSEN}
    return {name: value if value != CHOSEN[name] else None for name, value in values.items()}
