"""Common parts of the Mosaic kernels for Hopper GPUs: a warpgroup's arithmetic, tiles loaded by
TMA, and loops over tiles.

A thread block has two compute warpgroups and one that loads. The loader copies a tile into a slot
of shared memory once both compute warpgroups have freed it, and a barrier signals its arrival: warp
specialization, as in FlashAttention-3 (section 3.1).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a product that one warpgroup's wgmma instructions compute
WARPGROUPS = 2  # compute warpgroups
# Per thread: 2 x 240 + 24 of the 512 that a core has for three warpgroups.
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The operations of a warpgroup: with layouts and wgmma on a device, as plain JAX in the
    interpreter.

    JAX 0.10's interpreter of Mosaic kernels supports neither register layouts, nor wgmma with
    operands in registers, nor TMA reductions. The rest of a kernel, its copies, barriers, loops and
    stores, is the same in both.
    """

    interpret: bool

    def zeros(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns float32 zeros for a tile, or for its rows."""
        return self._as(
            jnp.zeros(shape, jnp.float32),
            plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1),
        )

    def load(self, ref: Any, *index: Any) -> jax.Array:
        """Loads a float32 tile from device memory."""
        return self._load(ref, index, plgpu.Layout.WGMMA)

    def rows(self, ref: Any, *index: Any) -> jax.Array:
        """Loads one number per row of a tile."""
        return self._load(ref, index, plgpu.Layout.WGMMA.reduce(1))

    def columns(self, ref: Any, *index: Any) -> jax.Array:
        """Loads one number per column of a tile."""
        return self._load(ref, index, plgpu.Layout.WGMMA.reduce(0))

    def within(
        self, interval: tuple[Any, Any], *index: Any, start: jax.Array, columns: int
    ) -> jax.Array:
        """Returns whether column j of a tile, token `start` + j of the block, is in its row's
        interval; bool [rows, columns].

        The interval is loaded here, not before the loop, where it would occupy registers
        throughout.

        Args:
          interval: arrays of the first token and of one past the last; `index`: where in them the
            tile's rows are.
        """
        first, last = (self.rows(ref, *index) for ref in interval)
        shape = (len(first), columns)
        number = self._as(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA) + start
        return (number >= across(first, shape)) & (number < across(last, shape))

    def product(
        self, left: Any, right: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> jax.Array:
        """Returns left @ right.T of two tiles in shared memory, float32.

        Args:
          meanwhile: runs while the matrix units work.
        """
        if self.interpret:
            result = _plain_product(_read(left), _read(right).T)
            meanwhile()
            return result

        def multiply(accumulator):
            plgpu.wgmma(accumulator, left, plgpu.transpose_ref(right, (1, 0)))
            meanwhile()
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32))

    def two_products(
        self, first: tuple, second: tuple, use: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns use(a @ b.T) and c @ d.T for two pairs of tiles; `use` overlaps with the second
        product."""
        if self.interpret:
            return use(self.product(*first)), self.product(*second)

        def multiply(accumulators):
            for accumulator, (left, right) in zip(accumulators, (first, second), strict=True):
                plgpu.wgmma(accumulator, left, plgpu.transpose_ref(right, (1, 0)))
            used = use(plgpu.wgmma_accumulator_load(accumulators[0], wait_n=1))
            return used, accumulators[1][...]

        shapes = [(left.shape[0], right.shape[0]) for left, right in (first, second)]
        return pl.run_scoped(multiply, [plgpu.ACC(shape, jnp.float32) for shape in shapes])

    def add_products(self, *products: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, ...]:
        """Returns sums + left @ right for each (sums, left, right), with `left` in registers and
        `right` in shared memory."""
        if self.interpret:
            return tuple(
                sums + _plain_product(left.astype(right.dtype), _read(right))
                for sums, left, right in products
            )
        lefts = [left.astype(right.dtype) for _, left, right in products]

        def multiply(accumulators):
            for accumulator, left, (_, _, right) in zip(accumulators, lefts, products, strict=True):
                plgpu.wgmma(accumulator, left, right)

        return tuple(pl.run_state(multiply)([plgpu.ACC.init(sums) for sums, *_ in products]))

    def products_around(
        self,
        first: tuple[jax.Array, jax.Array, Any],
        between: tuple[Any, Any],
        last: tuple[jax.Array, jax.Array, Any],
        *,
        ready: Callable[[], None],
        use: Callable[[jax.Array], None],
    ) -> tuple[jax.Array, jax.Array]:
        """Returns sums + left @ right for `first` and `last`, as `add_products`; between them calls
        use(a.T @ b) for two tiles (a, b) in shared memory, which overlaps with the last product.

        Args:
          ready: waits until a is complete; overlaps with the first product.
        """
        if self.interpret:
            (first_sums,) = self.add_products(first)
            ready()
            left, right = between
            use(_plain_product(_read(left).T, _read(right)))
            (last_sums,) = self.add_products(last)
            return first_sums, last_sums
        lefts = [left.astype(right.dtype) for _, left, right in (first, last)]

        def multiply(accumulators):
            plgpu.wgmma(accumulators[0], lefts[0], first[2])
            ready()

            def multiply_between(accumulator):
                plgpu.wgmma(accumulator, plgpu.transpose_ref(between[0], (1, 0)), between[1])
                plgpu.wgmma(accumulators[1], lefts[1], last[2])
                use(plgpu.wgmma_accumulator_load(accumulator, wait_n=1))

            shape = between[0].shape[1], between[1].shape[1]
            pl.run_scoped(multiply_between, plgpu.ACC(shape, jnp.float32))

        return tuple(pl.run_state(multiply)([plgpu.ACC.init(sums) for sums, *_ in (first, last)]))

    def add_into(self, memory: Any, tile: Any) -> None:
        """Starts to add a tile in shared memory to a part of global memory to which other blocks
        may be adding; the tile may be overwritten after `wait_smem_to_gmem`."""
        plgpu.commit_smem()
        if self.interpret:  # which has no reductions, and runs one block after the other
            memory[...] = memory[...] + tile[...]
        else:
            plgpu.copy_smem_to_gmem(tile, memory, reduction_op="add")

    def _load(self, ref: Any, index: tuple[Any, ...], layout: Any) -> jax.Array:
        if self.interpret:
            return ref[index]
        # From JAX 0.12 on, the reference alone has the index; earlier, it is an argument too.
        empty_index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
        return plgpu.load(ref.at[index], *empty_index, layout=layout, optimized=False)

    def _as(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)


def _read(tile: Any) -> jax.Array:
    """Reads a tile of shared memory in the interpreter, in place of wgmma.

    wgmma reads, like TMA writes, through the asynchronous proxy. After a plain read, TMA may write
    there again only after a fence.
    """
    value = tile[...]
    plgpu.commit_smem()
    return value


def _plain_product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def across(rows: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts `rows` [R] to `shape` [R, C]: each row repeats its number."""
    return lax.broadcast_in_dim(rows, shape, (0,))


def down(columns: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts `columns` [C] to `shape` [R, C]: each column repeats its number."""
    return lax.broadcast_in_dim(columns, shape, (1,))


def shared_tiles(count: int, rows: int, columns: int, dtype: Any, swizzle: int = 128) -> Any:
    """Returns shared memory for `count` tiles in the layout that wgmma reads: 8 rows of `swizzle`
    bytes, swizzled."""
    width = swizzle // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((count, rows, columns), dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class Slots:
    """A circular buffer of tiles in shared memory, and its barriers.

    Attributes:
      tiles: [slots, rows, columns].
      full: a barrier per slot that completes when its tile has arrived; free: when all compute
        warpgroups have read it.
    """

    tiles: Any
    full: Any
    free: Any

    @staticmethod
    def scratch(tiles: Any) -> tuple:
        """Returns what a kernel allocates for slots: the tiles' memory and the barriers."""
        slots = tiles.shape[0]
        return (
            tiles,
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        )

    @property
    def count(self) -> int:
        """The number of slots."""
        return self.tiles.shape[0]

    def put(self, step: jax.Array, source: Any, begin: Any) -> None:
        """In the loader: starts to copy the tile of a step once its slot is free; `begin` is the
        first step."""
        slot = lax.rem(step, jnp.int32(self.count))
        pl.when(step >= begin + self.count)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        plgpu.copy_gmem_to_smem(source, self.tiles.at[slot], self.full.at[slot])

    def drain(self, begin: Any, end: jax.Array) -> None:
        """In the loader: waits until the last tiles have been read."""

        def wait(step, _):
            plgpu.barrier_wait(self.free.at[lax.rem(step, jnp.int32(self.count))])

        lax.fori_loop(jnp.maximum(end - self.count, begin), end, wait, None)

    def wait(self, step: jax.Array) -> Any:
        """Waits for the tile of a step and returns it."""
        slot = lax.rem(step, jnp.int32(self.count))
        plgpu.barrier_wait(self.full.at[slot])
        return self.tiles.at[slot]

    def release(self, step: jax.Array) -> None:
        """Signals that this warpgroup has read the tile of a step."""
        plgpu.barrier_arrive(self.free.at[lax.rem(step, jnp.int32(self.count))])


def put_all(
    slots: Sequence[Slots],
    begin: Any,
    end: jax.Array,
    tiles_of: Callable[[jax.Array], Sequence[Any]],
) -> None:
    """Copies each step's tiles into shared memory and waits until all have been read.

    This is the loader's loop; the compute warpgroups read the same steps from `slots`.

    Args:
      slots: one for each array whose tiles are loaded.
      begin, end: the steps are range(begin, end). A step is the number of its tile, which saves the
        compute warpgroups a register.
      tiles_of: maps a step to its tile of each array in global memory, in the order of `slots`.
    """

    def put(step, _):
        for slot, tile in zip(slots, tiles_of(step), strict=True):
            slot.put(step, tile, begin)

    lax.fori_loop(begin, end, put, None)
    for slot in slots:
        slot.drain(begin, end)


def visit(edge: Callable[[int], jax.Array], body: Callable, carry: Any) -> Any:
    """Runs carry = body(tile, carry, masked) over the three ranges of `tile_edges`: masked,
    unmasked, and masked again.

    Args:
      edge: loads an edge; each is loaded when it is needed, so that it occupies no register before.
    """
    for number, masked in enumerate((True, False, True)):
        carry = lax.fori_loop(
            edge(number),
            edge(number + 1),
            lambda i, carry, masked=masked: body(i, carry, masked),
            carry,
        )
    return carry
