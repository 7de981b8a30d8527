"""Faults of machines and users in files: bytes lost, flipped or inserted, values of another type, a
folder in place of a file."""

import copy
import json
import pathlib
import shutil

import numpy as np

ODD = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    1.5,
    -0.5,
    2**40,
    2**70,
    10**400,
    "",
    "x",
    "0",
    "\ud800",
    "a" * 10_000,
    [],
    {},
    [None],
    [1],
    [[]],
    {"a": 1},
    {"": None},
    "../../x",
    float("nan"),
    float("inf"),
)
WAYS = ("removed", "emptied", "halved", "flipped", "folder")


def damage_bytes(content: bytes, generator: np.random.Generator) -> bytes:
    """Returns the bytes with some lost, flipped, doubled or inserted."""
    kind = generator.integers(5)
    position = int(generator.integers(len(content) + 1))
    if kind == 0:
        return content[:position]
    if kind == 1:
        return content[:position] + content[position + int(generator.integers(1, 64)) :]
    if kind == 2:
        return (
            content[:position]
            + generator.bytes(int(generator.integers(1, 64)))
            + content[position:]
        )
    if kind == 3:
        return content[:position] + content
    spoilt = bytearray(content)
    for _ in range(generator.integers(1, 9)):
        spoilt[generator.integers(len(spoilt))] ^= 1 << int(generator.integers(8))
    return bytes(spoilt)


def damage_json(value: object, generator: np.random.Generator) -> object:
    """Returns a JSON value with one value, at any depth, replaced, removed or renamed."""
    value = copy.deepcopy(value)
    containers: list = []

    def collect(part: object) -> None:
        if isinstance(part, dict | list) and part:
            containers.append(part)
            for inner in part.values() if isinstance(part, dict) else part:
                collect(inner)

    collect(value)
    if not containers or generator.random() < 0.02:
        return ODD[generator.integers(len(ODD))]
    part = containers[generator.integers(min(len(containers), 50))]
    key = (
        list(part)[generator.integers(len(part))]
        if isinstance(part, dict)
        else int(generator.integers(len(part)))
    )
    kind = generator.random()
    if kind < 0.15:
        del part[key]
    elif kind < 0.25 and isinstance(part, dict):
        part[f"{key}_"] = part.pop(key)
    elif kind < 0.35 and isinstance(part[key], int | float) and not isinstance(part[key], bool):
        part[key] = part[key] * int(generator.choice([2, 3, -1, 10**6]))
    else:
        part[key] = ODD[generator.integers(len(ODD))]
    return value


def damage_json_file(path: pathlib.Path, generator: np.random.Generator) -> None:
    """Damages a JSON file: mostly a value, sometimes its bytes."""
    if generator.random() < 0.25:
        path.write_bytes(damage_bytes(path.read_bytes(), generator))
    else:
        path.write_text(
            json.dumps(damage_json(json.loads(path.read_text(encoding="utf-8")), generator)),
            encoding="utf-8",
        )


def damage_file(
    path: pathlib.Path, generator: np.random.Generator, ways: tuple[str, ...] = WAYS
) -> str:
    """Removes, empties or halves a file, flips one of its bits, or puts a folder in its place;
    returns the way."""
    way, content = str(generator.choice(ways)), path.read_bytes()
    path.unlink()
    if way == "emptied":
        path.touch()
    elif way == "halved":
        path.write_bytes(content[: len(content) // 2])
    elif way == "flipped":
        spoilt = bytearray(content)
        if spoilt:
            spoilt[generator.integers(len(spoilt))] ^= 1 << int(generator.integers(8))
        path.write_bytes(bytes(spoilt))
    elif way == "folder":
        path.mkdir()
        (path / "something").touch()
    return way


def copied(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies a folder; returns the copy."""
    return pathlib.Path(shutil.copytree(source, target))
