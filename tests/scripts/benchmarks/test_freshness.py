"""What makes a result stale: a changed program does; renamed locals, comments, formatting and moved
code do not."""

import pytest

from scripts.benchmarks.freshness import digest

PROGRAM = b'''
"""A module."""
import jax.numpy as jnp

SCALE = 2

def weighted(values, weights):
    """Returns the sum."""
    if not len(values):
        raise ValueError(f"no values, {weights} alone")
    return SCALE * jnp.exp(values - weights).sum()

class Loss:
    name: str = "mean"

    def __call__(self, x):
        values, weights = x, self.name
        return weighted(values, weights)
'''
SAME = {
    "comments and format": PROGRAM.replace(
        b"    return SCALE", b"    # why\n    return (SCALE"
    ).replace(b".sum()", b".sum())"),
    "docstrings": PROGRAM.replace(b"Returns the sum.", b"The sum of all."),
    "names": PROGRAM.replace(b"weighted", b"f")
    .replace(b"values", b"x_1")
    .replace(b"SCALE", b"FACTOR"),
    "annotations": PROGRAM.replace(
        b"def weighted(values, weights)", b"def weighted(values: int, weights: int) -> int"
    ),
    "messages": PROGRAM.replace(b"no values, {weights} alone", b"not one value"),
    "two assignments": PROGRAM.replace(
        b"values, weights = x, self.name", b"values = x\n        weights = self.name"
    ),
    "imports": PROGRAM.replace(b"import jax.numpy as jnp", b"from jax import numpy as jnp"),
}
CHANGED = {
    "a library's function": (b"jnp.exp", b"jnp.log"),
    "an operator": (b"values - weights", b"values + weights"),
    "the order of arguments": (b"values - weights", b"weights - values"),
    "a number": (b"SCALE = 2", b"SCALE = 3"),
    "a keyword": (b'"mean"', b'"total"'),
    "assigned values": (b"weights = x, self.name", b"weights = self.name, x"),
    "a condition": (b"if not len", b"if len"),
}


def program_hash(program: bytes) -> str:
    return digest((("a.py", program),))


@pytest.mark.parametrize("program", SAME.values(), ids=SAME)
def test_equivalent_code_keeps_results_fresh(program):
    assert program != PROGRAM and program_hash(program) == program_hash(PROGRAM)


@pytest.mark.parametrize(("old", "new"), CHANGED.values(), ids=CHANGED)
def test_a_changed_program_makes_a_result_stale(old, new):
    assert program_hash(PROGRAM.replace(old, new)) != program_hash(PROGRAM)


def test_an_exchange_is_not_two_assignments():
    exchange, assignments = b"a, b = b, a", b"a = b\nb = a"
    assert program_hash(exchange) != program_hash(assignments)


def test_functions_may_move_between_files():
    first, second = PROGRAM.split(b"class Loss")
    assert digest((("a.py", b"class Loss" + second), ("b.py", first))) == program_hash(PROGRAM)


@pytest.mark.parametrize(
    ("name", "before", "same", "other"),
    [
        ("a.yaml", b"x: 1 # one\ny: [2]", b"# Two values.\ny:\n- 2\nx: 1", b"x: 1\ny: [3]"),
        ("a.yaml", b"x: 'a # b'", b'x: "a # b"', b"x: 'a # c'"),
        ("a.txt", b"# needs\njax==1  # why\n", b"jax==1\n\n", b"jax==1\nflax"),
        ("a.txt", b"-r b.txt#egg", b"-r b.txt#egg # more", b"-r b.txt#other"),
    ],
)
def test_comments_in_recipes_and_requirements_keep_results_fresh(name, before, same, other):
    assert digest(((name, before),)) == digest(((name, same),))
    assert digest(((name, before),)) != digest(((name, other),))


def test_other_files_are_compared_by_bytes():
    assert digest((("a.json", b"1"),)) != digest((("a.json", b" 1"),))
