"""The unpacked size of tables is known before they are unpacked, whatever their metadata claim."""

import collections
import contextlib
import io
import struct

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc, parquet

from data import tables
from data.errors import UserError
from data.packed_tables import arrow_unpacked, parquet_chunks
from data.paths import File
from data.report import SourceReport
from data.tables import read_table

BIG = 1 << 25  # bytes of a text that compresses to a few KB


def read(path):
    collections.deque(read_table(File(str(path)), SourceReport(str(path))), maxlen=0)


@contextlib.contextmanager
def counting_pool():
    """Yields a pool that counts Arrow's allocations within the context."""
    default = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(default))
    try:
        yield pool
    finally:
        pyarrow.set_memory_pool(default)


def varint(value, length):
    """Returns Thrift's encoding of a number in `length` bytes."""
    value *= 2
    return bytes(
        (value >> 7 * number & 127) | (128 if number < length - 1 else 0)
        for number in range(length)
    )


def with_claimed_sizes(path, claimed):
    """Rewrites all uncompressed sizes in a Parquet file's footer to `claimed`."""
    metadata, content = parquet.read_metadata(path), path.read_bytes()
    (length,) = struct.unpack("<i", content[-8:-4])
    pages, footer = content[: -8 - length], content[-8 - length : -8]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    sizes = [group.total_byte_size for group in groups]
    for size in {*sizes, *(column.total_uncompressed_size for column in columns)}:
        count = (size * 2).bit_length() // 7 + bool((size * 2).bit_length() % 7)
        assert varint(size, count) in footer
        footer = footer.replace(varint(size, count), varint(claimed, count))
    path.write_bytes(pages + footer + content[-8:])


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_pages_larger_than_their_metadata_claim_are_not_unpacked(tmp_path, compression):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": pyarrow.array(["a" * BIG])})
    parquet.write_table(
        table, path, compression=compression, use_dictionary=False, write_statistics=False
    )
    with_claimed_sizes(path, 100)
    assert parquet.read_metadata(path).row_group(0).total_byte_size == 100
    with counting_pool() as pool:
        with pytest.raises(UserError, match=r"a\.parquet: unpacks to more than 200 times its size"):
            read(path)
        assert pool.max_memory() < BIG // 2


@pytest.mark.parametrize("opened_as", [ipc.new_file, ipc.new_stream])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", ["text", "dictionary"])
def test_a_batch_that_unpacks_to_over_200_times_its_size_is_refused(
    tmp_path, opened_as, compression, kind
):
    path, text = tmp_path / "a.arrow", pyarrow.array(["a" * BIG])
    if kind == "dictionary":
        text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0], pyarrow.int32()), text)
    table = pyarrow.table({"text": text})
    options = ipc.IpcWriteOptions(compression=compression)
    with opened_as(path, table.schema, options=options) as file:
        file.write_table(table)
    with counting_pool() as pool:
        with pytest.raises(UserError, match=r"a\.arrow: unpacks to more than 200 times its size"):
            read(path)
        assert pool.max_memory() < BIG // 2


def a_table():
    random = np.random.default_rng(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": random.bytes(30).hex()}
                for _ in range(random.integers(4))
            ],
            "number": number,
            "none": None,
            "flag": number % 2 == 0,
            "tokens": [1] * int(random.integers(9)),
        }
        for number in range(500)
    ]
    return pyarrow.Table.from_pylist(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none"},
        {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True},
        {"use_dictionary": False, "compression": "gzip", "write_page_checksum": True},
        {"data_page_size": 200, "row_group_size": 100, "write_statistics": False},
    ],
)
def test_page_sizes_of_valid_files_match_their_metadata(tmp_path, options):
    """Arrow's writer counts page headers of 15 to 100 bytes in the sizes of pages."""
    path = tmp_path / "a.parquet"
    parquet.write_table(a_table(), path, **options)
    metadata = parquet.read_metadata(path)
    with path.open("rb") as opened:
        groups = parquet_chunks(opened, metadata)
    assert len(groups) == metadata.num_row_groups
    for number, chunks in enumerate(groups):
        for column_number, chunk in enumerate(chunks):
            column = metadata.row_group(number).column(column_number)
            assert chunk.values == column.num_values
            headers = column.total_uncompressed_size - chunk.unpacked
            assert 0 < headers < 200 + chunk.unpacked // 4
            assert chunk.in_lists == ("list" in chunk.path)


@pytest.mark.parametrize("opened_as", [ipc.new_file, ipc.new_stream])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_unpacked_sizes_of_batches_match_uncompressed_ones(opened_as, compression):
    table = a_table()
    table = table.append_column("of", pyarrow.array(["a", "b"] * 250).dictionary_encode())

    def unpacked(options):
        with opened_as(sink := io.BytesIO(), table.schema, options=options) as file:
            file.write_table(table, max_chunksize=200)
        return list(arrow_unpacked(sink))

    packed = unpacked(ipc.IpcWriteOptions(compression=compression))
    plain = unpacked(ipc.IpcWriteOptions())
    assert len(packed) >= 4  # a dictionary and three batches
    # Uncompressed buffers are padded to 8 or 64 bytes.
    assert all(0 <= after - before < 64 * 30 for before, after in zip(packed, plain, strict=True))
    assert sum(packed) > sum(plain) / 2


def test_a_damaged_page_header_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["ab", "cd"]}), path, compression="none")
    content = bytearray(path.read_bytes())
    content[5] = 0xFF  # the number of the first field of the first page's header
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet"):
        read(path)


def test_a_text_repeated_by_a_list_is_counted_before_it_is_copied(tmp_path):
    """A row of 4 GiB from a text of 1 MiB that the file has once."""
    path, times = tmp_path / "a.parquet", 1 << 12
    text = pyarrow.array(["ab" * (1 << 19)])
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), text)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, times], pyarrow.int32()), texts)
    parquet.write_table(pyarrow.table({"texts": lists}), path, dictionary_pagesize_limit=1 << 22)
    with counting_pool() as pool:
        with pytest.raises(UserError, match=r"a\.parquet: unpacks to more than 200 times its size"):
            read(path)
        assert pool.max_memory() < 1 << 26


def test_delta_encoded_texts_are_refused_in_lists_that_are_too_large(tmp_path, monkeypatch):
    """How often a row repeats them is known only after reading it."""
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"texts": [["ab" * (1 << 10)] * 4096]})
    parquet.write_table(
        table,
        path,
        use_dictionary=False,
        column_encoding={"texts.list.element": "DELTA_BYTE_ARRAY"},
    )
    read(path)
    monkeypatch.setattr(tables, "_BYTES", 1 << 22)
    with pytest.raises(UserError, match=r"the column texts.list.element is encoded as DELTA"):
        read(path)


def test_lists_of_dictionaries_are_read_unchanged(tmp_path, monkeypatch):
    """Even if their texts are counted before they are copied, in several batches."""
    path, table = tmp_path / "a.parquet", a_table()
    parquet.write_table(table, path)
    monkeypatch.setattr(tables, "_BYTES", 1 << 10)
    monkeypatch.setattr(tables, "_DICTIONARY_BYTES", 1 << 13)
    rows = list(read_table(File(str(path)), SourceReport(str(path))))
    assert rows == table.to_pylist()
