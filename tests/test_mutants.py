"""The mutants: each is a valid program that differs from the file in one place; the tests named for
it exist."""

import ast

import pytest

from tests.mutants.__main__ import EQUIVALENT, ROOT, TESTS, Place, sample, slips
from tests.mutants.mutations import broken, faults

PROGRAM = '''
def clipped(values, limit, *, strict=False):
    """Returns the values."""
    if strict and len(values) > limit:
        raise ValueError(f"{len(values) + 1} values")
    total = sum(values) * 2 - 1
    values.sort()
    return total if not strict else -total
'''


def test_every_kind_of_fault_is_made_and_messages_stay():
    assert {fault.what for fault in faults(PROGRAM)} == {
        "True for False",
        "Or for And",
        "GtE for Gt",
        "never true",
        "Add for Sub",
        "Div for Mult",
        "3 for 2",
        "2 for 1",
        "left out",
        "no Not",
        "no USub",
    }


def test_a_mutant_differs_in_one_line():
    original = ast.unparse(ast.parse(PROGRAM)).splitlines()
    for fault in faults(PROGRAM):
        lines = broken(PROGRAM, fault).splitlines()
        assert len(lines) == len(original)
        assert sum(a != b for a, b in zip(lines, original, strict=True)) == 1, fault.what


@pytest.mark.parametrize("file", TESTS)
def test_files_and_their_tests_exist(file):
    assert (ROOT / file).is_file()
    for test in TESTS[file]:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")
    assert 0 < len(sample(file, 5, 0)) <= 5


def test_slips_apply_to_the_current_code():
    for tests, faulty in slips():
        assert all((ROOT / test).is_file() for test in tests)
        for place, text in faulty.items():
            ast.parse(text)
            assert text != (ROOT / place.file).read_text(encoding="utf-8")


def test_listed_equivalents_are_current_mutants():
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        name, _, reason = line.partition(" # ")
        file = name.partition(":")[0]
        source = (ROOT / file).read_text(encoding="utf-8")
        places = [Place.of(file, fault.line, fault.what, source) for fault in faults(source)]
        assert reason and name in {place.lasting for place in places}, line
