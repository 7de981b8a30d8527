"""A kernel chosen for each call by the table in `choice`: `auto`, or a named kernel with
fallbacks."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..choice import LIMITS, Choice, Request, select
from ..coords import Mask
from ..partial import AttentionPartial
from .cudnn import CudnnKernel
from .device import device_kind, mesh_device_kind
from .gpu import GpuKernel
from .kernel import Kernel
from .mosaic import MosaicKernel
from .reference import ReferenceKernel
from .tpu import TpuKernel
from .xla import XlaKernel

KINDS: dict[str, Callable[..., Kernel]] = {
    "tpu": TpuKernel,
    "gpu": GpuKernel,
    "mosaic": MosaicKernel,
    "cudnn": CudnnKernel,
    "xla": XlaKernel,
    "reference": ReferenceKernel,
}
PLATFORMS = ("tpu", "cuda", "default")


@dataclasses.dataclass(frozen=True)
class ChosenKernel(Kernel):
    """The kernel that `choice.select` names for each call.

    Under a mesh of devices, such as inside `shard_map`, only the kernel for their platform is
    traced. Otherwise the kernels for all platforms are traced, and lowering chooses among them,
    because only then is the platform known: a CPU host may compile for a described TPU.

    Attributes:
      name: `auto`, or a kernel that is tried before those of `auto`.
      tiles: the tile sizes that were set, by name.
      any_order: whether a backward pass may sum in an order that changes from run to run.
      shards, rows_in_order: as in `over_shards` and `with_rows_in_order`.
    """

    name: str
    tiles: tuple[tuple[str, int], ...] = ()
    any_order: bool = False
    shards: tuple[int, int] = (1, 1)
    rows_in_order: bool = False

    def over_shards(self, queries: int, keys: int) -> ChosenKernel:
        return dataclasses.replace(self, shards=(self.shards[0] * queries, self.shards[1] * keys))

    def with_rows_in_order(self, promised: bool) -> ChosenKernel:
        return dataclasses.replace(self, rows_in_order=promised)

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self._call("forward", queries.q, queries, keys, mask=mask, scale=scale)

    def rounded_forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self._call("rounded_forward", queries.q, queries, keys, mask=mask, scale=scale)

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        return self._call("backward", queries.q, queries, keys, saved, mask=mask, scale=scale)

    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        return self._call("extend", queries.q, so_far, queries, keys, mask=mask, scale=scale)

    def gradients(
        self,
        so_far,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ):
        return self._call(
            "gradients", queries.q, so_far, queries, keys, saved, mask=mask, scale=scale
        )

    def on(self, platform: str, q: jax.Array, mask: Mask) -> Kernel:
        """Returns the kernel for queries like these when the program is lowered for `platform`, one
        of PLATFORMS."""
        device = device_kind()
        request = Request(
            platform,
            device,
            q.dtype.name,
            head_dim=q.shape[3],
            softcap=self.softcap,
            window=mask.window,
            global_tokens=mask.global_tokens,
            tiled=bool(self.tiles),
            jax=jax.__version_info__ if self.name == "auto" else (),
        )
        choice = select(self.name, request)
        if platform == _platform(device):
            self._warn(choice, request.head_dim)
        kernel = self._create(choice.name, request)
        return kernel.over_shards(*self.shards).with_rows_in_order(self.rows_in_order)

    def _create(self, name: str, request: Request) -> Kernel:
        """Creates the kernel of this name; cuDNN's falls back to the kernel that `auto` chooses."""
        kernel = KINDS[name](**dict(self.tiles), softcap=self.softcap)
        if isinstance(kernel, MosaicKernel) and self.any_order:
            fixed_order = LIMITS[name].order_kept(request.head_dim)
            return dataclasses.replace(kernel, any_order=not fixed_order)
        if isinstance(kernel, CudnnKernel):
            fallback = select("auto", request._replace(jax=jax.__version_info__)).name
            return dataclasses.replace(kernel, others=self._create(fallback, request))
        return kernel

    def _warn(self, choice: Choice, head_dim: int) -> None:
        """Warns if a named kernel does not support the call, if `auto` uses none of an
        accelerator's kernels, or if `any_order` has no effect."""
        fell_back = choice.name == "xla" and jax.default_backend() in ("tpu", "gpu")
        slow_jax = any(reason.startswith("JAX") for reason in choice.refusals.values())
        if choice.refusals and (self.name != "auto" or fell_back or slow_jax):
            warnings.warn(f"attention kernel: {choice}", stacklevel=5)
        if self.any_order and (fixed_order := LIMITS[choice.name].order_kept(head_dim)):
            warnings.warn(
                f"attention backward: 'any_order' changes nothing here; the kernel {choice.name!r} "
                f"has {fixed_order}",
                stacklevel=5,
            )

    def _call(self, method: str, q: jax.Array, *blocks: Any, mask: Mask, scale: float) -> Any:
        device = mesh_device_kind()
        methods = {
            platform: _traced_once(self.on(platform, q, mask), method, mask, scale)
            for platform in (PLATFORMS if device is None else (_platform(device),))
        }
        if len(set(methods.values())) == 1:
            return next(iter(methods.values()))(*blocks)
        return lax.platform_dependent(*blocks, **methods)


def _platform(device: str) -> str:
    """Returns the one of PLATFORMS to which a device kind belongs."""
    return "tpu" if "TPU" in device else "cuda" if "NVIDIA" in device else "default"


@functools.cache
def _traced_once(kernel: Kernel, method: str, mask: Mask, scale: float) -> Callable[..., Any]:
    """Returns a kernel's method, jitted so that it is traced once per shape: a ring pass calls it
    up to three times in each direction, and it takes most of the time to trace a small step."""
    return jax.jit(functools.partial(getattr(kernel, method), mask=mask, scale=scale), inline=True)
