"""The size of rows counts every value as often as it occurs, for every Arrow type."""

import collections
import itertools
import struct

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc

from data.errors import UserError
from data.paths import File
from data.report import SourceReport
from data.row_sizes import may_repeat, row_bytes
from data.tables import read_table

MIB = 1 << 20
TEXT = "a" * MIB


def repeated(values, times):
    indices = pyarrow.array([0] * times, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, values)


def in_a_list(values):
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int32()), values)


def runs(times, values):
    return pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([times], pyarrow.int32()), values)


def views(form, times):
    """Returns views of a text of 1 MiB that the array has once."""
    view = struct.pack("<i4sii", MIB, b"aaaa", 0, 0) * times
    buffers = [None, pyarrow.py_buffer(view), pyarrow.py_buffer(TEXT.encode())]
    return pyarrow.Array.from_buffers(form, times, buffers)


def unions(times):
    return pyarrow.UnionArray.from_dense(
        pyarrow.array([0] * times, pyarrow.int8()),
        pyarrow.array([0] * times, pyarrow.int32()),
        [pyarrow.array([TEXT])],
    )


def list_views(times):
    """Returns lists that all view the same million numbers."""
    starts, sizes = (pyarrow.array([number] * times, pyarrow.int32()) for number in (0, MIB))
    return pyarrow.ListViewArray.from_arrays(starts, sizes, pyarrow.nulls(MIB, pyarrow.int8()))


BOMBS = {
    "list of a dictionary": lambda: in_a_list(repeated(pyarrow.array([TEXT]), 20_000)),
    "structure of one": lambda: pyarrow.StructArray.from_arrays(
        [repeated(pyarrow.array([TEXT]), 20_000)], ["a"]
    ),
    "dictionary of lists": lambda: repeated(
        pyarrow.array([[0] * MIB], pyarrow.list_(pyarrow.int8())), 20_000
    ),
    "dictionary of a dictionary": lambda: repeated(
        in_a_list(repeated(in_a_list(repeated(pyarrow.array(["a" * 999]), 999)), 999)), 999
    ),
    "runs": lambda: runs(20_000, pyarrow.array([TEXT])),
    "list of runs": lambda: in_a_list(runs(1 << 30, pyarrow.array([TEXT]))),
    "views": lambda: views(pyarrow.string_view(), 20_000),
    "views of bytes": lambda: views(pyarrow.binary_view(), 20_000),
    "list of views": lambda: in_a_list(views(pyarrow.string_view(), 20_000)),
    "list views": lambda: list_views(20_000),
    "union": lambda: unions(20_000),
    "nothing": lambda: pyarrow.nulls(1 << 28),
    "lists of nothing": lambda: pyarrow.FixedSizeListArray.from_arrays(
        pyarrow.nulls(1 << 30), 1 << 30
    ),
    "list of empty structures": lambda: in_a_list(
        pyarrow.Array.from_buffers(pyarrow.struct([]), 1 << 30, [None])
    ),
    "list of empty bytes": lambda: in_a_list(
        pyarrow.Array.from_buffers(pyarrow.binary(0), 1 << 30, [None, pyarrow.py_buffer(b"")])
    ),
}


def write(path, column):
    batch = pyarrow.record_batch({"a": column})
    with ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


def read(path):
    return list(itertools.islice(read_table(File(str(path)), SourceReport(str(path))), 1000))


@pytest.mark.parametrize("name", BOMBS)
def test_a_value_stored_once_counts_as_often_as_it_occurs(tmp_path, name):
    write(path := tmp_path / "a.arrow", BOMBS[name]())
    with pytest.raises(UserError, match=r"a\.arrow: unpacks to more than 200 times its size"):
        read(path)


@pytest.mark.parametrize(
    ("form", "offsets"),
    [
        (pyarrow.string(), [0, -5, 9, 3, 9]),
        (pyarrow.string(), [0, 1 << 30, 2, 3, 9]),
        (pyarrow.binary(), [5, 4, 3, 2, 9]),
        (pyarrow.list_(pyarrow.int8()), [0, 9, 2, 7, 9]),
    ],
)
def test_invalid_offsets_are_refused(tmp_path, form, offsets):
    """Arrow accepts them, and its own readers crash the process."""
    content = pyarrow.py_buffer(b"123456789")
    starts = pyarrow.array(offsets, pyarrow.int32()).buffers()[1]
    if pyarrow.types.is_list(form):
        values = pyarrow.Array.from_buffers(pyarrow.int8(), 9, [None, content])
        column = pyarrow.Array.from_buffers(form, 4, [None, starts], children=[values])
    else:
        column = pyarrow.Array.from_buffers(form, 4, [None, starts, content])
    write(path := tmp_path / "a.arrow", column)
    with pytest.raises(UserError, match=r"a\.arrow: cannot be read as Arrow"):
        read(path)


def in_python(value):
    """Returns the size of a value in bytes, counted recursively."""
    if isinstance(value, dict):
        return sum(map(in_python, value.values()))
    if isinstance(value, list):
        return sum(map(in_python, value))
    if isinstance(value, tuple):
        return sum(map(in_python, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1


FORMS = {
    "numbers": ([1, None, 3], pyarrow.int16()),
    "texts": (["a" * 99, None, "b"], pyarrow.string()),
    "large texts": (["a" * 99, None, "b"], pyarrow.large_string()),
    "views": (["a" * 99, None, "b"], pyarrow.string_view()),
    "bytes": ([b"1234", None, b"5678"], pyarrow.binary(4)),
    "lists": ([["a" * 99, "b"], None, []], pyarrow.list_(pyarrow.string())),
    "large lists": ([["a" * 99, "b"], None, []], pyarrow.large_list(pyarrow.string())),
    "fixed lists": ([["a" * 9, "b"], ["c", "d"]], pyarrow.list_(pyarrow.string(), 2)),
    "list views": ([["a" * 99, "b"], None, []], pyarrow.list_view(pyarrow.string())),
    "maps": ([[("a" * 99, ["b" * 9])], None, []], "map"),
    "structures": ([{"a": "a" * 99, "b": [1, 2]}, None, {"a": None, "b": []}], None),
    "dictionary": (["a" * 99, None, "b"], pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    "decimals": ([1, None], pyarrow.decimal256(9)),
    "nothing": ([None, None], pyarrow.null()),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("start", [0, 1])
def test_row_sizes_are_at_most_slightly_above_those_in_python(name, start):
    values, form = FORMS[name]
    if form == "map":
        form = pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.string()))
    column = pyarrow.array(values * 50, form).slice(start)
    sizes = row_bytes(pyarrow.record_batch({"a": column}))
    exact = np.array([in_python(value) for value in column.to_pylist()])
    assert sizes.shape == exact.shape
    assert (sizes >= exact).all()
    assert (sizes <= exact + 60).all()


def test_plain_columns_are_not_counted_row_by_row():
    plain = pyarrow.schema({"a": pyarrow.list_(pyarrow.struct([("b", pyarrow.string())]))})
    assert not may_repeat(plain)
    assert all(may_repeat(pyarrow.record_batch({"a": make()}).schema) for make in BOMBS.values())


def test_text_that_is_not_utf8_is_omitted_only_from_its_row(tmp_path):
    column = pyarrow.array([[b"ok"], [b"\xff\xfe"]], pyarrow.list_(pyarrow.binary()))
    write(path := tmp_path / "a.arrow", column.view(pyarrow.list_(pyarrow.string())))
    report = SourceReport(str(path))
    assert list(read_table(File(str(path)), report)) == [{"a": ["ok"]}, {}]
    assert len(report.notes) == 1


def test_rows_are_read_in_parts_that_fit(tmp_path, monkeypatch):
    """A dictionary's text occurs in many rows, which are converted as many at a time as fit."""
    texts = ["a" * 1000, "b" * 10]
    indices = pyarrow.array([0, 1] * 300, pyarrow.int32())
    write(tmp_path / "a.arrow", pyarrow.DictionaryArray.from_arrays(indices, texts))
    monkeypatch.setattr("data.tables._BYTES", 5000)
    parts = collections.Counter()
    monkeypatch.setattr("data.tables._rows", lambda part, _: parts.update([part.num_rows]) or [])
    read(tmp_path / "a.arrow")
    assert sum(rows * count for rows, count in parts.items()) == 600
    assert max(parts) * (1000 + 10) / 2 <= 5000 < (max(parts) + 3) * (1000 + 10) / 2
