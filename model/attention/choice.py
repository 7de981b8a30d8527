"""Which kernel serves a call, and why others do not: each kernel's limits, and the order in which
`auto` tries them. Imports no JAX, so recipes are checked against the same table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

# repeatable: sums in a fixed order, the same bits each time.
BACKWARDS = ("repeatable", "any_order")
# Devices of compute capability 9.0, the only one with wgmma.
HOPPER = (
    "H100",
    "H200",
    "H800",
    "H20",
)


class Request(NamedTuple):
    """A call's requirements of a kernel. A field left out requires nothing.

    Attributes:
      platform: the target of lowering: "tpu", "cuda", or "default" for any other.
      device: JAX's name of the kind of device.
      dtype: of the operands.
      head_dim: size of a head.
      softcap: the bound of the scores.
      window, global_tokens: the mask's.
      tiled: whether tile sizes are given.
      jax: JAX's version, since some versions' compilers make a kernel slow.
    """

    platform: str = "default"
    device: str = ""
    dtype: str = ""
    head_dim: int = 0
    softcap: float | None = None
    window: int | None = None
    global_tokens: int = 0
    tiled: bool = False
    jax: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel does not serve; by default it serves everything.

    Attributes:
      softcap, window, global_tokens: whether it serves them.
      head_dim: the largest head size.
      dtypes: of the operands.
      devices: parts of their names.
      devices_name: their common name.
      own_tiles: why options cannot set its tiles.
      any_order: the largest head size for which its backward pass makes fewer products if the
        order of its sums may vary; 0: it has one order in any case.
      slow: the version of JAX whose compiler makes it slower than the next kernel, and why.
    """

    softcap: bool = True
    window: bool = True
    global_tokens: bool = True
    head_dim: int | None = None
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    devices_name: str = ""
    own_tiles: str = ""
    any_order: int = 0
    slow: tuple[tuple[int, ...], str] | None = None

    def refusal(self, request: Request) -> str:
        """Returns the part of a request that the kernel does not serve; "" if it serves it all."""
        if request.global_tokens and not self.global_tokens:
            return f"global_tokens = {request.global_tokens}"
        if request.window is not None and not self.window:
            return f"a window ({request.window})"
        if request.softcap is not None and not self.softcap:
            return f"a soft-cap of scores ({request.softcap})"
        if self.head_dim and request.head_dim > self.head_dim:
            return f"heads of {request.head_dim} ({self.head_dim} at most)"
        if self.dtypes and request.dtype and request.dtype not in self.dtypes:
            return f"{request.dtype} operands"
        if (
            self.devices
            and request.device
            and not any(name in request.device for name in self.devices)
        ):
            return f"devices other than {self.devices_name} ({request.device})"
        if self.own_tiles and request.tiled:
            return f"tiles of a given size ({self.own_tiles})"
        if self.slow and request.jax >= self.slow[0]:
            return f"JAX {'.'.join(map(str, request.jax))} as fast as others ({self.slow[1]})"
        return ""

    def order_kept(self, head_dim: int) -> str:
        """Returns why the backward pass has one order although any would do; "" if it has not."""
        if not self.any_order:
            return "one order"
        if head_dim > self.any_order:
            return f"one order for heads of {head_dim} (any for {self.any_order} at most)"
        return ""


LIMITS: Mapping[str, Limits] = {
    "tpu": Limits(global_tokens=False, head_dim=256),
    "gpu": Limits(softcap=False, global_tokens=False, head_dim=256),
    # nvJitLink, which compiles Mosaic kernels from JAX 0.12 on, ignores register exchange between
    # warpgroups: accumulators spill, and products wait for each other (docs/notes/kernels.md).
    "mosaic": Limits(
        softcap=False,
        global_tokens=False,
        head_dim=256,
        dtypes=("bfloat16", "float16"),
        devices=HOPPER,
        devices_name="Hopper GPUs",
        own_tiles="its tiles follow from the head size",
        any_order=128,
        slow=(
            (0, 12),
            "its compiler makes products wait for each other; jax[cuda13]<0.12 would be faster",
        ),
    ),
    # Not in any order of `auto`: it has not run on a GPU yet.
    "cudnn": Limits(
        softcap=False,
        window=False,
        global_tokens=False,
        head_dim=128,
        dtypes=("bfloat16",),
        devices=("NVIDIA",),
        devices_name="NVIDIA GPUs",
        own_tiles="its tiles are cuDNN's",
    ),
    "xla": Limits(),
    "reference": Limits(own_tiles="it has no tiles"),
}
KERNELS = ("auto", *LIMITS)


class Order(NamedTuple):
    """The kernels that `auto` tries, fastest first, on a platform (or on some of its devices, if
    named)."""

    kernels: tuple[str, ...]
    platform: str
    devices: tuple[str, ...] = ("",)

    def covers(self, request: Request) -> bool:
        """Whether the order applies to a request."""
        return self.platform == request.platform and any(
            name in request.device for name in self.devices
        )


# The first row that covers a request applies. Each ends with `xla`, which serves everything.
AUTO = (
    Order(("tpu", "xla"), "tpu"),
    Order(("mosaic", "gpu", "xla"), "cuda", HOPPER),
    Order(("gpu", "xla"), "cuda"),
    Order(("xla",), "default"),
)


class Choice(NamedTuple):
    """The kernel that serves a request, and by name what the kernels tried before it do not
    serve."""

    name: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        reasons = (f"{name!r} does not serve {reason}" for name, reason in self.refusals.items())
        return f"{'; '.join(reasons)}; {self.name!r} does"


def select(kernel: str, request: Request) -> Choice:
    """Returns the kernel that serves a request: `kernel` itself, or the first in `auto`'s order
    that does."""
    order = next(row.kernels for row in AUTO if row.covers(request))
    refusals: dict[str, str] = {}
    for name in order if kernel == "auto" else (kernel, *order):
        refusals[name] = LIMITS[name].refusal(request)
        if not refusals[name]:
            return Choice(name, {tried: reason for tried, reason in refusals.items() if reason})
    raise AssertionError(f"no kernel serves {request}")


def require(kernel: str, request: Request, field: str = "kernel") -> None:
    """Raises ValueError, naming the `field` and kernels that would work, unless `kernel` serves a
    request."""
    if kernel != "auto" and (reason := LIMITS[kernel].refusal(request)):
        others = [
            repr(name) for name in KERNELS if name == "auto" or not LIMITS[name].refusal(request)
        ]
        raise ValueError(
            f"{field}: {kernel!r} does not serve {reason}; {', '.join(others[:-1])} and "
            f"{others[-1]} do"
        )


def require_order(kernel: str, backward: str, field: str = "backward") -> None:
    """Raises ValueError, naming the field that says `backward` and kernels that would do, if it is
    `any_order` and the named kernel has one order in any case."""
    free = [name for name, limits in LIMITS.items() if limits.any_order]
    if backward == "any_order" and kernel not in ("auto", *free):
        raise ValueError(
            f"{field} is 'any_order', but the kernel {kernel!r} has one order; leave "
            f"'repeatable', or take the kernel auto or {' or '.join(free)}"
        )
