"""Attacks on recipes: each field of the schema gets a value of another type or size, or is misspelt
or duplicated."""

import copy
import json
import pathlib

import numpy as np
import yaml

from tests import small_run
from tests.soak.attacks import ROOT, Case, Failed, refusal
from trainer.config import load
from trainer.config.fields import FIELDS

DEEP = "[" * 200 + "]" * 200
# YAML texts that replace a field.
VALUES = (
    "null",
    "true",
    "'true'",
    "0",
    "-1",
    "1",
    "7",
    "1.5",
    "-0.0",
    ".nan",
    ".inf",
    "-.inf",
    "1e400",
    "1e-400",
    str(2**63),
    str(-(2**63) - 1),
    "9" * 400,
    "9" * 5000,
    "''",
    "' '",
    "abc",
    "'" + "a" * 100_000 + "'",
    "'é漢字🙂'",
    r'"\u0000"',
    r'"\ud800"',
    "[]",
    "[1]",
    "[null]",
    "[[1]]",
    "['a', 1, null]",
    "{}",
    "{a: 1}",
    "{1: 2}",
    "{null: null}",
    "{[1]: 2}",
    DEEP,
    "2020-01-01",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!!python/object:os.system {}",
    "0x10",
    "0o17",
    "1_000",
    "12:30:45",
    "~",
    "*undefined",
    "&a [*a]",
    "'../../..'",
    "/dev/null",
    "/proc/self/mem",
    "'$HOME'",
    "'*'",
    "'(['",
    "'%s%n{0}'",
    "!!float abc",
)
# For these, the message names the recipe's file instead of the field.
NO_VALUES = (DEEP, "&a [*a]", "*undefined", "{[1]: 2}", r'"\u0000"', r'"\ud800"')


def recipes(base: pathlib.Path) -> Case:
    """Returns the case: a small recipe with one field attacked either loads or is refused with the
    field's name."""
    good = yaml.safe_load(small_run.recipe(base, ROOT).read_text(encoding="utf-8"))
    fields = list(FIELDS)

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        field = fields[generator.integers(len(fields))]
        kind = generator.choice(
            ["value", "value", "value", "value", "typo", "twice", "section", "bytes"]
        )
        text, names = _attacked(good, field, str(kind), generator)
        path = folder / "recipe.yaml"
        path.write_bytes(text)
        with refusal(*names) as messages:
            config = load.load(["--config", str(path)])
        if messages:
            return "refused with the field's name"
        if kind in ("typo", "twice"):
            raise Failed(f"{kind} of {field} was accepted")
        # An accepted recipe is a configuration that can be written and read again, as a run does
        # with its config.yaml.
        path.write_text(load.dump(config), encoding="utf-8")
        if _same(load.resolved(load.load(["--config", str(path)]))) != _same(load.resolved(config)):
            raise Failed(f"{field}: it is another configuration after writing and reading it")
        return "loaded"

    return case


def _same(resolved: dict) -> str:
    return json.dumps(
        {key: value for key, value in resolved.items() if key != "data"}, sort_keys=True
    )


def _attacked(
    good: dict, field: str, kind: str, generator: np.random.Generator
) -> tuple[bytes, list[str]]:
    """Returns the recipe's bytes, and texts of which a refusal must contain one."""
    marker = "ATTACKED_VALUE"
    *sections, name = field.split(".")
    recipe = copy.deepcopy(good)
    section = recipe
    for part in sections:
        section = section.setdefault(part, {})
    names = [field]
    if kind == "section" and sections:
        recipe[sections[0]] = marker
        names = [sections[0]]
    elif kind == "typo":
        letters = list(name)
        position = generator.integers(len(letters))
        letters[position] = str(
            generator.choice(["", "x", letters[position] * 2, letters[position].upper()])
        )
        misspelt = "".join(letters)
        if misspelt == name:
            misspelt += "_"
        section[misspelt] = section.pop(name, 1)
        names = [f"{'.'.join([*sections, misspelt])}"]
    else:
        section[name] = marker
    text = yaml.safe_dump(recipe, sort_keys=False)
    value = str(generator.choice(np.array(VALUES, dtype=object)))
    lines = text.split("\n")
    line = next((i for i, content in enumerate(lines) if marker in content), 0)
    if kind == "twice":
        lines.insert(line, lines[line])
    text = "\n".join(lines).replace(marker, value if kind != "twice" else "1")
    content = text.encode("utf-8", "surrogatepass")
    # A value that YAML itself refuses, or that breaks a rule together with another field, is named
    # by the line or by that field.
    names += [f"line {line + 1}", name, *(f"{part}." for part in sections)]
    if (
        kind in ("bytes", "section")
        or value in NO_VALUES
        or value.startswith(("!!", "9" * 400, "20"))
    ):
        names.append("recipe.yaml")
    if kind == "bytes":
        spoilt = bytearray(content)
        for _ in range(generator.integers(1, 4)):
            spoilt[generator.integers(len(spoilt))] ^= 1 << int(generator.integers(8))
        return bytes(spoilt), names
    return content, names
