"""Machines by their usual names: 8xH100, 2x8xH100, v5p-32, v6e-8, 4xA100-40GB, RTX4090.

`topology_of` turns such a name into the topology that the rest of planning and the compilers use:
generation:shape for TPUs (v5p:2x2x4), chip:hosts x GPUs for GPUs (h100:2x8). Imports no JAX.
"""

from __future__ import annotations

import difflib
import math
import re

from trainer.devices import GPUS, TPUS, TWO_DEVICES_A_CHIP, Device

# An unlisted GPU; the user must give its memory: --gpu-memory 24.
ANY_GPU = "gpu"
BOX_GPUS = 8  # of a whole host
EXAMPLES = (
    "8xH100, 2x8xH100 (2 hosts of 8), 4xA100-40GB, RTX4090, v5p-32, v6e-8, tpu7x-128 or a topology "
    "such as v4:4x4x4"
)
# Other names of the same devices.
_ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-141gb": "h200",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "rtx-4090": "rtx4090",
    "rtx-3090": "rtx3090",
}
# For these generations names count cores, two per chip: v5p-32 has 16 chips (Cloud TPU), tpu7x-128
# has 64 (xpk and MaxText).
_COUNTED_IN_CORES = ("v3", "v4", "v5p", "tpu7x")
# Chips -> Cloud TPU's default slice shape (cloud.google.com/tpu/docs, a page per generation).
_TORUS = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    768: "8x8x12",
    1024: "8x8x16",
    2048: "8x16x16",
    4096: "16x16x16",
}
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_V3 = {
    4: "2x2",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
    512: "16x32",
    1024: "32x32",
}
_HOST_SIDE = 2  # a TPU host's chips are a square in the slice, with two on a side
_SLICES = {
    "v3": _V3,
    "v4": _TORUS,
    "v5p": _TORUS,
    "v5e": _FLAT,
    "v6e": _FLAT,
    "tpu7x": _TORUS,
}
# TPU chips per virtual machine, the most that one process drives.
_CHIPS_OF_A_HOST = {"v3": 4, "v4": 4, "v5p": 4, "v5e": 8, "v6e": 8, "tpu7x": 4}


def topology_of(name: str, any_gpu: bool = False) -> str:
    """Returns the topology of a machine's name; a topology is returned unchanged.

    Args:
      name: [hosts x] number x GPU (8xH100, 2x8xH100, RTX4090), [slices x] accelerator type of Cloud
        TPU (v5p-32, 2xv5e-256), or a topology (v4:4x4x4, 2xv5e:16x16, h100:8, a100:4x8; 2xh100:8 is
        h100:2x8). Case and spaces do not matter.
      any_gpu: whether an unlisted name means ANY_GPU, as when its memory is given: 8xMI300X is
        gpu:8.

    Raises:
      ValueError: no such machine; one line with the nearest name and the choices.
    """
    text = re.sub(r"\s+", "", name.lower()).replace("*", "x")
    if ":" in text:
        return _checked_topology(text, name, any_gpu)
    if match := re.fullmatch(r"(?:(\d+)x)?(v\d+[a-z]*|tpu7x|ironwood)-(\d+)", text):
        slices, generation, count = match.groups()
        return _slice(name, slices, _ALIASES.get(generation, generation), int(count))
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([a-z][\w-]*|[34]090)", text)
    if match is None:
        raise ValueError(f"--machine: found {name!r}; write {EXAMPLES}")
    first, second, chip = match.groups()
    known = (*GPUS, ANY_GPU, *_SLICES)
    if (
        (swapped := re.fullmatch(r"(.+)x(\d+)", chip))
        and not second
        and _ALIASES.get(swapped[1], swapped[1]) in known
    ):
        chip, second = swapped.groups()  # H100x8 is 8xH100
    chip = _known(_ALIASES.get(chip, chip), name, known, any_gpu)
    if chip in _SLICES:
        raise ValueError(
            f"--machine: found {name!r}; a slice of TPUs is written {chip}-8, as Cloud TPU names "
            f"it, or {chip}:{_SLICES[chip][4]}"
        )
    hosts, count = (
        _counts(name, first or "1", second) if second else _counts(name, "1", first or "1")
    )
    if count > 8 and count % 8 == 0:
        raise ValueError(
            f"--machine: found {name!r}, one host of {count} GPUs; "
            f"{hosts * count // 8}x8x{chip.upper()} is hosts of 8, {chip}:{hosts}x{count} hosts of "
            f"{count}"
        )
    return f"{chip}:{hosts}x{count}" if hosts > 1 else f"{chip}:{count}"


def _counts(name: str, *numbers: str) -> list[int]:
    """Returns the numbers of a machine's name; raises ValueError if one of them is 0."""
    counts = [int(number) for number in numbers]
    if not all(counts):
        raise ValueError(f"--machine: found {name!r}; at least one device is needed")
    return counts


def _slice(name: str, slices: str | None, generation: str, count: int) -> str:
    """The topology of a slice named by Cloud TPU's accelerator type."""
    shapes = _SLICES[_known(generation, name, tuple(_SLICES))]
    cores = 2 if generation in _COUNTED_IN_CORES else 1
    if count % cores or count // cores not in shapes:
        sizes = ", ".join(f"{generation}-{cores * chips}" for chips in shapes)
        raise ValueError(
            f"--machine: found {name!r}; slices of {generation} are {sizes}, or a shape such as "
            f"{generation}:{shapes[16]}"
        )
    return _in_slices(f"{generation}:{shapes[count // cores]}", _counts(name, slices or "1")[0])


def _in_slices(topology: str, slices: int) -> str:
    """Returns the topology of `slices` slices of TPUs."""
    return f"{slices}x{topology}" if slices > 1 else topology


def _checked_topology(text: str, name: str, any_gpu: bool) -> str:
    """Normalizes a topology for `split_topology`: a number before GPUs becomes their hosts."""
    slices, chip, shape = split_topology(text)
    if not re.fullmatch(r"\d+(x\d+){0,2}", shape):
        raise ValueError(
            f"--machine: found {name!r}; after the colon write a shape, such as v4:4x4x4, h100:8 "
            "or a100:4x8"
        )
    counts = _counts(name, str(slices), *shape.split("x"))
    chip = _known(_ALIASES.get(chip, chip), name, (*TPUS, *GPUS, ANY_GPU), any_gpu)
    own_shape = counts if chip not in TPUS and slices > 1 else counts[1:]
    topology = f"{chip}:{'x'.join(map(str, own_shape))}"
    if chip in TPUS:
        _check_slice(chip, own_shape, name)
        return _in_slices(topology, slices)
    if len(own_shape) > 2:
        raise ValueError(
            f"--machine: found {name!r}; {chip}:8 would work, or hosts x GPUs of a host such as "
            f"{chip}:4x8"
        )
    return topology


def _check_slice(generation: str, shape: list[int], name: str) -> None:
    """Raises ValueError if no slice of TPUs has this shape: one chip, or whole hosts."""
    chips, shapes = math.prod(shape), _SLICES[generation]
    dimensions = shapes[4].count("x") + 1
    nearest = shapes[min(shapes, key=lambda number: abs(number - chips))]
    works = f"{generation}:{nearest} would work"
    if len(shape) != dimensions:
        raise ValueError(
            f"--machine: found {name!r}; slices of {generation} have {dimensions} dimensions, "
            f"{works}"
        )
    sides = sum(size % _HOST_SIDE == 0 for size in shape)
    if chips > 1 and sides < 2:
        raise ValueError(
            f"--machine: found {name!r}, {chips} chips; a slice of {generation} is of whole hosts "
            f"of {_HOST_SIDE}x{_HOST_SIDE} chips, {works}"
        )


def _known(chip: str, name: str, known: tuple[str, ...], any_gpu: bool = False) -> str:
    """Returns the chip; with `any_gpu`, ANY_GPU for one neither listed nor named like a TPU.

    Raises ValueError, which names the nearest chip and all others.
    """
    if chip in known:
        return chip
    if any_gpu and not re.fullmatch(r"(tpu|v)\d[a-z]*", chip):
        return ANY_GPU
    near = difflib.get_close_matches(chip, known, n=1, cutoff=0.5)
    meant = f" (did you mean {near[0] if near[0] in TPUS else near[0].upper()}?)" if near else ""
    raise ValueError(
        f"--machine: found {name!r}; unknown device {chip}{meant}; TPUs are "
        f"{', '.join(TPUS)}, GPUs {', '.join(chip.upper() for chip in GPUS)}, and any other with "
        "--gpu-memory GIB"
    )


def split_topology(topology: str) -> tuple[int, str, str]:
    """2xv5e:16x16 -> (2, "v5e", "16x16"): slices, generation, shape."""
    generation, _, shape = topology.partition(":")
    slices, separator, name = generation.partition("x")
    return (int(slices), name, shape) if separator and slices.isdigit() else (1, generation, shape)


def is_gpu(topology: str) -> bool:
    """Whether a topology's devices are GPUs, known or not."""
    return split_topology(topology)[1] in (*GPUS, ANY_GPU)


def device_count(topology: str) -> int:
    """The devices of a topology; a chip of some TPUs is two."""
    slices, generation, shape = split_topology(topology)
    of_a_chip = 2 if generation in TWO_DEVICES_A_CHIP else 1
    return slices * math.prod(map(int, shape.split("x"))) * of_a_chip


def several_of(topology: str, times: int) -> str:
    """Returns the topology of `times` such machines: slices of TPUs, hosts of GPUs; GPUs of less
    than a host join one host if they fit there."""
    slices, chip, shape = split_topology(topology)
    if not is_gpu(topology):
        return _in_slices(f"{chip}:{shape}", slices * times)
    gpus, per_host = device_count(topology) * times, gpus_per_host(topology)
    if "x" not in shape and gpus <= BOX_GPUS:
        return f"{chip}:{gpus}"
    return f"{chip}:{gpus // per_host}x{per_host}"


def device_of(topology: str) -> Device | None:
    """The facts of a topology's devices; None if the table does not list them."""
    generation = split_topology(topology)[1]
    return TPUS.get(generation) or GPUS.get(generation)


def host_gib(topology: str) -> float | None:
    """Each device's share of host memory in GiB; None for devices that the table does not list.

    Fewer than BOX_GPUS GPUs are assumed to be rented, with only their share of a server.
    """
    device = device_of(topology)
    if device is not None and device.box_host_gib is not None:
        return device.box_host_gib / max(BOX_GPUS, gpus_per_host(topology))
    return None if device is None else device.host_gib


def host_note(topology: str) -> str:
    """Returns what `host_gib` assumes of a GPU's host; "" if its figure is the machine's."""
    if not is_gpu(topology):
        return ""
    if host_gib(topology) is None:
        return "not checked: this host's memory is unknown; --host-gib of scripts.plan gives it"
    if gpus_per_host(topology) >= BOX_GPUS:
        return ""
    return (
        f"assumed: each GPU has its share of a host with {BOX_GPUS}; --host-gib of scripts.plan "
        "gives yours"
    )


def memory_gib(topology: str) -> float | None:
    """The device memory that a program may use, in GiB; None for unlisted devices."""
    device = device_of(topology)
    return None if device is None else device.usable_gib


def gpu_gib(text: str) -> float:
    """Returns the GPU memory that a user gave, in GiB.

    Raises:
      ValueError: not a positive number.
    """
    try:
        gib = float(text)
    except ValueError:
        gib = 0
    if not 0 < gib < math.inf:
        raise ValueError(f"--gpu-memory: found {text!r}; the GiB per GPU, such as 24, would work")
    return gib


def gpus_per_host(topology: str) -> int:
    """The GPUs of one host, driven by one process: 8 of h100:8 and of a100:4x8."""
    return int(split_topology(topology)[2].rpartition("x")[2])


def hosts(topology: str) -> int:
    """The hosts of a topology; for TPUs, Cloud TPU's virtual machines of a slice."""
    slices, generation, shape = split_topology(topology)
    if generation not in TPUS:
        return math.prod(map(int, shape.split("x"))) // gpus_per_host(topology)
    chips = math.prod(map(int, shape.split("x")))
    # A slice of more than 8 v5e or v6e chips has virtual machines of 4.
    of_a_host = _CHIPS_OF_A_HOST[generation] if chips <= 8 else 4
    return slices * max(1, chips // of_a_host)


def accelerator_type(topology: str) -> str | None:
    """Cloud TPU's name of a slice (v5p-32 for v5p:2x2x4); None if there is none."""
    _, generation, shape = split_topology(topology)
    if generation not in _SLICES:
        return None
    chips = math.prod(map(int, shape.split("x")))
    named = _SLICES[generation].get(chips)
    if named is None or sorted(named.split("x")) != sorted(shape.split("x")):
        return None
    name = "v5litepod" if generation == "v5e" else generation
    return f"{name}-{chips * (2 if generation in _COUNTED_IN_CORES else 1)}"
