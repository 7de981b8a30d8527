"""The kernel that is chosen for each call, by the table in `choice`: `auto`, and a kernel that
others stand in for."""

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

    Under a mesh of devices, such as inside `shard_map`, only the kernel of their platform is
    traced. Elsewhere the kernels of all platforms are traced, and the choice between them is made
    when the program is lowered, because only then is the platform known: a CPU host may compile for
    a described TPU.

    Attributes:
      name: `auto`, or a kernel that is tried before those of `auto`.
      tiles: sizes of tiles by name, where they are given.
      any_order: whether a backward pass may add in an order that changes from run to run.
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
        """Returns the kernel that serves queries like these where the program is lowered for one of
        PLATFORMS."""
        device = device_kind()
        request = Request(
            platform,
            device,
            q.dtype.name,
            head_dim=q.shape[3],
            tokens=q.shape[1],
            softcap=self.softcap,
            window=mask.window,
            global_tokens=mask.global_tokens,
            tiled=bool(self.tiles),
            jax=jax.__version_info__ if self.name == "auto" else (),
        )
        choice = select(self.name, request)
        if platform == _platform(device):
            self._warn(choice, request.head_dim)
        kernel = self._made(choice.name, request)
        return kernel.over_shards(*self.shards).with_rows_in_order(self.rows_in_order)

    def _made(self, name: str, request: Request) -> Kernel:
        """Returns the kernel of this name; cuDNN's has that of `auto` for what it leaves."""
        kernel = KINDS[name](**dict(self.tiles), softcap=self.softcap)
        if isinstance(kernel, MosaicKernel) and self.any_order:
            kept = LIMITS[name].order_kept(request.head_dim)
            return dataclasses.replace(kernel, any_order=not kept)
        if isinstance(kernel, CudnnKernel):
            others = select("auto", request._replace(jax=jax.__version_info__)).name
            return dataclasses.replace(kernel, others=self._made(others, request))
        return kernel

    def _warn(self, choice: Choice, head_dim: int) -> None:
        """Warns where a kernel that was named does not serve, `auto` leaves an accelerator's
        kernels, or a backward pass keeps its order although it need not."""
        left = choice.name == "xla" and jax.default_backend() in ("tpu", "gpu")
        slow = any(reason.startswith("JAX") for reason in choice.refusals.values())
        if choice.refusals and (self.name != "auto" or left or slow):
            warnings.warn(f"attention kernel: {choice}", stacklevel=5)
        if self.any_order and (kept := LIMITS[choice.name].order_kept(head_dim)):
            warnings.warn(
                f"attention backward: 'any_order' changes nothing here; the kernel {choice.name!r} "
                f"has {kept}",
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
    """Returns which of PLATFORMS a kind of device belongs to."""
    return "tpu" if "TPU" in device else "cuda" if "NVIDIA" in device else "default"


@functools.cache
def _traced_once(kernel: Kernel, method: str, mask: Mask, scale: float) -> Callable[..., Any]:
    """A kernel's method that is traced once for each shape: a ring pass calls it up to three times
    in each direction, and tracing it is most of what tracing a small training step takes."""
    return jax.jit(functools.partial(getattr(kernel, method), mask=mask, scale=scale), inline=True)
