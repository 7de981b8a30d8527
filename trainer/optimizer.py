"""The optimizer, learning rate, clipping, and the choice of trained parameters."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from data.errors import UserError
from model.sharding import Parameter, mesh_axes_of

from . import rounding
from .config.schema import OptimizerConfig
from .streaming import in_host_memory


def learning_rate(config: OptimizerConfig, steps: int, step: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of step `step` (from 0) of `steps`: a linear warm-up that does not
    begin at 0, then the schedule's decay.
    """
    rising = config.first_steps(steps)
    warmup = jnp.minimum((step + 1) / max(rising, 1), 1.0)
    first = steps - config.decay_steps(steps) if config.schedule == "wsd" else rising
    progress = jnp.clip((step + 1 - first) / max(steps - first, 1), 0.0, 1.0)
    if config.schedule == "constant":
        remaining = jnp.ones_like(progress)
    else:
        remaining = (
            (1 + jnp.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
        )
    return (
        config.learning_rate
        * warmup
        * (config.final_fraction + (1 - config.final_fraction) * remaining)
    )


def clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns clipping by the global norm: stateless, and not elementwise."""
    return optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    parameters: Mapping[str, Parameter],
    unpadded_shapes: Mapping[str, tuple[int, ...]],
) -> optax.GradientTransformation:
    """Returns clipping, then the optimizer, then an optional average of the weights.

    Weight decay applies to matrices, not to vectors such as norms, biases, attention sinks and
    DoRA's magnitudes.

    Args:
      parameters: all that may be trained, by name.
      unpadded_shapes: their shapes without the padding that a mesh may add in memory, which must
        not change a step.
    """
    model = _Declared(parameters, unpadded_shapes)
    optimizer = _optimizer(config, lambda step: learning_rate(config, steps, step), model)
    if config.moment_dtype == "8bit":
        optimizer = _with_moments_in_8_bits(optimizer, parameters)
    elif config.moment_dtype != "float32":
        optimizer = _with_moments_in(jnp.dtype(config.moment_dtype), optimizer)
    return optax.chain(
        clipping(config),
        optimizer if config.weight_dtype == "float32" else _in_float32(optimizer),
        *([_averaging(config.average_decay)] if config.average_decay else []),
    )


class WeightAverage(NamedTuple):
    """State of `_averaging`."""

    steps: Int[Array, ""]
    """Number of averaged steps."""
    average: Any
    """The moving average of the parameters, in float32."""


def _averaging(decay: float) -> optax.GradientTransformation:
    """Keeps a moving average of the updated parameters, and leaves the updates unchanged.

    The decay after n steps is at most (1 + n) / (10 + n), as in TensorFlow's
    ExponentialMovingAverage: otherwise the first parameters would count for thousands of steps.
    """

    def init(params):
        # Copies, since the training step donates both parameters and state.
        return WeightAverage(
            jnp.zeros((), jnp.int32),
            jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params),
        )

    def update(updates, state, params=None):
        steps = state.steps + 1
        share = 1 - jnp.minimum(decay, (1 + steps) / (10 + steps))
        updated = jax.tree.map(lambda x, update: x.astype(jnp.float32) + update, params, updates)
        average = optax.incremental_update(updated, state.average, share)
        return updates, WeightAverage(steps, average)

    return optax.GradientTransformation(init, update)


class _Declared(NamedTuple):
    """What an optimizer needs to know about parameters; see `make_optimizer`."""

    parameters: Mapping[str, Parameter]
    unpadded_shapes: Mapping[str, tuple[int, ...]]

    def matrices(self, params: Iterable[str]) -> dict[str, bool]:
        """Returns which parameters are matrices, or stacks of them."""
        return {name: self.parameters[name].is_matrix for name in params}

    def sizes(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of inputs and outputs of a matrix, without padding."""
        return _matrix_shape(self.parameters[name], self.unpadded_shapes[name])[-2:]


def _optimizer(
    config: OptimizerConfig, rate: optax.Schedule, model: _Declared
) -> optax.GradientTransformation:
    if config.name == "lion":
        return optax.lion(
            rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=model.matrices
        )
    if config.name == "adafactor":
        return _adafactor(config, rate, model)
    if config.name == "muon":
        return _muon(config, rate, model)
    return optax.adamw(
        rate,
        config.beta1,
        config.beta2,
        config.epsilon,
        weight_decay=config.weight_decay,
        mask=model.matrices,
    )


def _adafactor(
    config: OptimizerConfig, rate: optax.Schedule, model: _Declared
) -> optax.GradientTransformation:
    """Returns Adafactor (Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost): each layer's weight, and each expert's, has its own factors and clipping."""

    def matrices(tree):
        """Returns matrices as [..., inputs, outputs], below the axes of layers and experts."""
        return {
            name: x.reshape(_matrix_shape(model.parameters[name], x.shape))
            if model.parameters[name].is_matrix
            else x
            for name, x in tree.items()
        }

    def clipped(updates, _):
        """Clips the root mean square of each layer's weight to 1 (section 6 of the paper)."""

        def clip(name, x):
            stacked = model.parameters[name].stacked
            size = math.prod(model.unpadded_shapes[name][stacked:])
            squares = jnp.sum(jnp.square(x), tuple(range(stacked, x.ndim)), keepdims=True)
            return x / jnp.maximum(1.0, jnp.sqrt(squares / size))

        return {name: clip(name, x) for name, x in updates.items()}

    optimizer = optax.chain(
        _scale_by_factored_rms(model),
        optax.stateless(clipped),
        optax.add_decayed_weights(config.weight_decay, mask=model.matrices),
        optax.scale_by_learning_rate(rate),
    )

    def update(gradient, state, params=None):
        updates, state = optimizer.update(matrices(gradient), state, matrices(params))
        return {name: x.reshape(gradient[name].shape) for name, x in updates.items()}, state

    return optax.GradientTransformation(lambda params: optimizer.init(matrices(params)), update)


def _scale_by_factored_rms(model: _Declared) -> optax.GradientTransformation:
    """Divides gradients by the root of Adafactor's second moment.

    Takes matrices as [..., inputs, outputs]. State and numbers are `optax.scale_by_factored_rms`'s,
    which however factors an array's two largest axes, whatever they are: 128 experts would share
    the factors of a matrix of rank 16. Here each matrix has a row and a column of its own, or its
    whole second moment if it is small; vectors have theirs.
    """

    def means_over(name, x) -> tuple[int, int] | None:
        """Returns the axes over which a matrix's row and column are means, the longer one first."""
        if not _is_factored(model.parameters[name], model.unpadded_shapes[name]):
            return None
        return (-2, -1) if x.shape[-2] > x.shape[-1] else (-1, -2)

    def state_of(count, moments: dict[str, tuple[jax.Array, ...]]) -> optax.FactoredState:
        row, column, whole = ({name: x[i] for name, x in moments.items()} for i in range(3))
        return optax.FactoredState(count, row, column, whole)

    def zeros(name, x) -> tuple[jax.Array, ...]:
        none, axes = jnp.zeros((1,), x.dtype), means_over(name, x)
        if axes is None:
            return none, none, jnp.zeros_like(x)
        return *(jnp.zeros_like(x.sum(axis)) for axis in axes), none

    def scaled(name, gradient, row, column, whole, decay) -> tuple[jax.Array, ...]:
        """Returns the update, and the new row, column and whole moment."""
        square, axes = jnp.square(gradient) + 1e-30, means_over(name, gradient)
        if axes is None:
            whole = decay * whole + (1 - decay) * square
            return gradient * whole**-0.5, row, column, whole
        longer, shorter = axes
        row = decay * row + (1 - decay) * square.mean(longer)
        column = decay * column + (1 - decay) * square.mean(shorter)
        by_row = (row / row.mean(-1, keepdims=True)) ** -0.5
        update = gradient * jnp.expand_dims(by_row, longer)
        return update * jnp.expand_dims(column**-0.5, shorter), row, column, whole

    def init(params):
        moments = {name: zeros(name, x) for name, x in params.items()}
        return state_of(jnp.zeros((), jnp.int32), moments)

    def update(gradient, state, params=None):
        decay = 1 - jnp.float32(state.count + 1) ** -0.8
        results = {
            name: scaled(name, x, state.v_row[name], state.v_col[name], state.v[name], decay)
            for name, x in gradient.items()
        }
        state = state_of(
            optax.safe_increment(state.count), {name: x[1:] for name, x in results.items()}
        )
        return {name: x[0] for name, x in results.items()}, state

    return optax.GradientTransformation(init, update)


def _is_factored(parameter: Parameter, shape: tuple[int, ...]) -> bool:
    """Whether Adafactor's second moment is a row and a column, as for matrices that are large
    enough in optax."""
    return parameter.is_matrix and min(_matrix_shape(parameter, shape)[-2:]) >= 128


def _matrix_shape(parameter: Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a matrix's shape, or a stack's, with one axis of inputs and one of outputs.

    The rows of a table, which has no inputs, are taken for them.
    """
    first = parameter.stacked + (parameter.inputs or 1)
    inputs, outputs = shape[parameter.stacked : first], shape[first:]
    return (*shape[: parameter.stacked], math.prod(inputs), math.prod(outputs))


def _muon(
    config: OptimizerConfig, rate: optax.Schedule, model: _Declared
) -> optax.GradientTransformation:
    """Returns `optax.contrib.muon` for layer weights, with updates as large as AdamW's (Liu et al.,
    Muon is Scalable for LLM Training, section 2.2), and AdamW without decay for the others.

    Composed here, since optax takes the sizes that scale an update from the padded arrays.
    """

    def labels(params):
        return {
            name: "muon" if _is_layers_matrix(model.parameters[name]) else "adam" for name in params
        }

    def of_matrices(tree, of: Callable[[str, Any], Any]):
        """Maps a tree in which the other parameters are masked."""
        return {
            name: x if isinstance(x, optax.MaskedNode) else of(name, x) for name, x in tree.items()
        }

    def axes(name, x):
        parameter = model.parameters[name]
        first = parameter.stacked + parameter.inputs
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(parameter.stacked, first)), tuple(range(first, x.ndim))
        )

    muon = optax.chain(
        optax.contrib.scale_by_muon(
            eps=config.epsilon, weight_dimension_numbers=lambda params: of_matrices(params, axes)
        ),
        optax.stateless(
            lambda updates, _: of_matrices(
                updates, lambda name, x: 0.2 * math.sqrt(max(model.sizes(name))) * x
            )
        ),
        # Every parameter here is a matrix: the mask keeps the state as `optax.contrib.muon` has it.
        optax.add_decayed_weights(config.weight_decay, mask=model.matrices),
        optax.scale_by_learning_rate(rate),
    )
    adam = optax.adamw(
        rate, config.beta1, config.beta2, config.epsilon, weight_decay=0.0, nesterov=True
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


def apply_updates(
    params: dict[str, jax.Array], updates: dict[str, jax.Array], step: Int[Array, ""]
) -> dict[str, jax.Array]:
    """Returns the updated parameters in their dtypes; bfloat16 is rounded stochastically.

    Args:
      step: number of finished steps; the random bits depend on it.
    """

    def updated(name, x):
        if x.dtype != jnp.bfloat16:
            return optax.apply_updates(x, updates[name])
        random = rounding.random_bits(x.shape, step, f"{name} weight")
        return rounding.to_bfloat16(x.astype(jnp.float32) + updates[name], random)

    return {name: updated(name, x) for name, x in params.items()}


def moment_bits(config: OptimizerConfig, parameter: Parameter) -> float:
    """Returns the bits of each number of a parameter's moments, their scales included."""
    size = parameter.shape[-1]
    if config.moment_dtype == "8bit" and _takes_8_bits(parameter, parameter.shape):
        return 8 + 32 * -(-size // rounding.BLOCK) / size
    return 16 if config.moment_dtype == "bfloat16" else 32


def _takes_8_bits(parameter: Parameter, shape: tuple[int, ...]) -> bool:
    """Whether moments of this shape may be in 8 bits; the others are few, and have short blocks."""
    return parameter.is_matrix and shape[-1] >= rounding.BLOCK // 2


def moment_count(config: OptimizerConfig, parameter: Parameter) -> int:
    """Returns how many moments have this parameter's size; Adafactor's factors do not.

    Args:
      parameter: its shape is that without padding, as for `_scale_by_factored_rms`.
    """
    if config.name == "muon":
        return 1 if _is_layers_matrix(parameter) else 2
    if config.name == "adafactor":
        return 0 if _is_factored(parameter, parameter.shape) else 1
    return {"adamw": 2, "lion": 1}[config.name]


def _is_layers_matrix(parameter: Parameter) -> bool:
    return parameter.is_matrix and "layers" in parameter.axes


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Passes gradients and weights in float32 to the optimizer; optax's moments take their
    dtype."""

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(gradient, state, params=None):
        return optimizer.update(cast(gradient), state, cast(params))

    return optax.GradientTransformation(lambda params: optimizer.init(cast(params)), update)


def _with_moments_in(
    dtype: jnp.dtype, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Stores the optimizer's moments in `dtype` between steps and computes with them in float32.

    Optax's `mu_dtype` does so only for the first moment.
    """

    def cast(state, dtype):
        # The state also has counters, and Muon's coefficients, which rounding would change.
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.astype(dtype) if _is_moment(path, x) else x, state
        )

    def init(params):
        return cast(optimizer.init(params), dtype)

    def update(gradient, state, params=None):
        updates, state = optimizer.update(gradient, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _is_moment(path: tuple[Any, ...], x: jax.Array) -> bool:
    """Whether an array of a state belongs to a parameter, whose name then ends its path."""
    return isinstance(path[-1], jax.tree_util.DictKey) and jnp.issubdtype(x.dtype, jnp.floating)


class EightBitMoments(NamedTuple):
    """State of `_with_moments_in_8_bits`."""

    steps: Int[Array, ""]
    """Number of updates; the random bits of rounding depend on it."""
    moments: Any
    """The optimizer's state, with codes for the large moments."""
    scales: dict[str, dict[str, Float[Array, ...]]]
    """The codes' scales: key in the state -> parameter -> array."""


def _with_moments_in_8_bits(
    optimizer: optax.GradientTransformation, parameters: Mapping[str, Parameter]
) -> optax.GradientTransformation:
    """Stores the matrices' moments in 8 bits between steps and computes with them in float32."""

    def state_key(path) -> tuple[str, str]:
        """Returns a moment's key in the state, and its parameter's name."""
        return jax.tree_util.keystr(path[:-1], simple=True, separator="."), path[-1].key

    def is_signed(path) -> bool:
        return not any(getattr(key, "name", "") == "nu" for key in path)

    def encoded(state, steps):
        scales = collections.defaultdict(dict)

        def encode(path, x):
            if not (_is_moment(path, x) and _takes_8_bits(parameters[path[-1].key], x.shape)):
                return x
            key, name = state_key(path)
            random = rounding.random_bits(x.shape, steps, f"{name} {key}")
            codes, scales[key][name] = rounding.encode(x, random, is_signed(path))
            return codes

        moments = jax.tree_util.tree_map_with_path(encode, state)
        return EightBitMoments(steps, moments, dict(scales))

    def decode(state, path, x):
        if x.dtype != jnp.uint8:
            return x
        key, name = state_key(path)
        return rounding.decode(x, state.scales[key][name], is_signed(path))

    def init(params):
        # Moments begin at zero, hence codes and scales too; computing them would make the compiler
        # fold constants.
        begin = jnp.zeros((), jnp.int32)
        state = jax.eval_shape(lambda params: encoded(optimizer.init(params), begin), params)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)

    def update(gradient, state, params=None):
        moments = jax.tree_util.tree_map_with_path(functools.partial(decode, state), state.moments)
        updates, moments = optimizer.update(gradient, moments, params)
        return updates, encoded(moments, state.steps + 1)

    return optax.GradientTransformation(init, update)


def trainable_names(names: Sequence[str], pattern: str) -> list[str]:
    """Returns the names that `model.trainable`, a regular expression, fully matches.

    Raises:
      UserError: it matches none.
    """
    trainable = [name for name in names if re.fullmatch(pattern, name)]
    if not trainable:
        raise UserError(
            f"model.trainable: {pattern!r} matches no parameter; there are {', '.join(names)}"
        )
    return trainable


def abstract_state(
    optimizer: optax.GradientTransformation,
    params: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    on_host: bool = False,
) -> Any:
    """Returns shapes and shardings of the optimizer's state.

    Moments are sharded like their parameters; the rest is replicated.

    Args:
      params: the trained parameters, with shardings.
      on_host: places the moments in the host's pinned memory.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def abstract(path, x):
        names = [
            key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in params
        ]
        parameter = params[names[-1]] if names else None
        # A counter; a row or a column of Adafactor's.
        if parameter is None or parameter.shape[:-1] != x.shape[:-1]:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        sharding = _fitting(parameter.sharding, x.shape)
        sharding = in_host_memory(sharding) if on_host else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(abstract, jax.eval_shape(optimizer.init, params))


def _fitting(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of a parameter's moments, or of their scales, whose shorter last axis
    stays whole if the mesh does not divide it."""
    spec = tuple(sharding.spec)
    last = spec[-1] if len(spec) == len(shape) else None
    if last is None:
        return sharding
    parts = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes_of(last))
    return sharding if shape[-1] % parts == 0 else sharding.update(spec=(*spec[:-1], None))
