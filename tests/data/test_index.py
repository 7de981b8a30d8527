"""The index of a prepared folder; numpy is the truth."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import index
from data.errors import UserError
from data.index import IndexEntry, NewIndex, StoredIndex, check_count

NAMES = ["length", "trained", "source", "held_out", "chosen", "chosen_trained", "label", "shared"]
ROW = st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * len(NAMES))


@settings(max_examples=30, deadline=None)
@given(st.lists(ROW, max_size=9), st.lists(ROW, max_size=9), st.integers(1, 4))
def test_an_index_is_the_file_that_numpy_writes(rows, more, block):
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_ROWS_AT_A_TIME", block)
        folder = Path(scratch)
        part, whole = NewIndex(folder), NewIndex(folder)
        for row in more:
            part.add(IndexEntry(*row))
        part.write(folder / "part.npz")
        for row in rows:
            whole.add(IndexEntry(*row))
        whole.extend(folder / "part.npz")
        whole.write(folder / "whole.npz", '{"a file": 1}')
        table = np.array(rows + more, np.int32).reshape(-1, len(NAMES))
        columns = {name: table[:, number].copy() for number, name in enumerate(NAMES)}
        np.savez(folder / "numpy.npz", **columns, files=np.array('{"a file": 1}'))
        assert (folder / "whole.npz").read_bytes() == (folder / "numpy.npz").read_bytes()
        assert len(whole) == len(rows + more)
        assert whole.all_held_out == columns["held_out"].all()
        stored = StoredIndex(folder / "whole.npz")
        assert stored.files == '{"a file": 1}'
        for name, column in columns.items():
            np.testing.assert_array_equal(stored[name], column)


def test_the_most_documents_are_the_largest_int32():
    assert np.iinfo(np.int32).max == index.MOST_DOCUMENTS
    check_count(2_147_483_647)
    with pytest.raises(UserError, match=r"found 2,147,483,648 documents, .*; several recipes"):
        check_count(2_147_483_648)
