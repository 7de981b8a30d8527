"""Records are written as they arrive, more than memory can hold, and read back in order."""

import tracemalloc

import numpy as np
from tensorflow_datasets.core import shuffle

from data.prepared import document_features
from data.record_store import open_records, serialize, write_records


def test_records_beyond_the_librarys_buffer_are_written_without_keeping_them_in_memory(
    tmp_path, monkeypatch
):
    """tensorflow-datasets buffers a gigabyte, and needs tensorflow to write more."""
    monkeypatch.setattr(shuffle, "MAX_MEM_BUFFER_SIZE", 1 << 18)
    count, length = 40, 1 << 14

    def records(count=count):
        for number in range(count):
            yield {
                "tokens": np.full(length, number, np.int32),
                "loss_mask": np.ones(length, np.uint8),
                "source": number,
                "record_id": f"r{number}",
            }

    (tmp_path / "warm").mkdir()
    write_records(tmp_path / "warm", "few", document_features, lambda: list(records())[:1])
    (tmp_path / "quarter").mkdir()
    peaks = []
    for folder, number in ((tmp_path / "quarter", count // 4), (tmp_path, count)):
        tracemalloc.start()
        write_records(folder, "documents", document_features, lambda number=number: records(number))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0], f"four times the records take {peaks} bytes of memory"
    stored = open_records(tmp_path, "documents")
    assert len(stored) == count
    for number in (0, 7, count - 1):
        assert stored[number]["source"] == number and (stored[number]["tokens"] == number).all()
        assert stored[number]["record_id"].decode() == f"r{number}"


def test_every_process_writes_the_same_bytes():
    """Protocol buffers order maps differently in each process unless told not to."""
    tokens, mask = np.array([1, 2], np.int32), np.array([0, 1], np.uint8)
    record = {"tokens": tokens, "loss_mask": mask, "source": 3, "record_id": "r"}
    [stored] = serialize(document_features, [record])
    names = ("loss_mask", "record_id", "source", "tokens")
    offsets = [stored.index(name.encode()) for name in names]
    assert offsets == sorted(offsets)
