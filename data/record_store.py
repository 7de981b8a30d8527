"""Records in array_record files; the only module that uses tensorflow-datasets for text."""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from data.errors import TransientError, UserError, first_line
from data.shard_cache import ShardCache

# A shard ends with the record that reaches one of these.
RECORDS_IN_A_FILE = 1 << 20
BYTES_IN_A_FILE = 1 << 28  # of serialized records, which are stored compressed
_NAME = "longstripe"
_OPENINGS = 100  # tries for a shard that other processes keep removing

Features = Callable[[ModuleType], dict[str, Any]]
"""Returns the fields of a record, from the module tensorflow_datasets."""


class ShardSize(NamedTuple):
    """The size of one array_record file."""

    records: int
    bytes: int
    """Of the serialized records."""


def write_records(
    folder: Path,
    split: str,
    features: Features,
    records: Callable[[], Iterator[dict]],
    name: str = _NAME,
) -> None:
    """Writes records to the folder `folder`/`split`, in order, with few in memory at a time.

    Args:
      folder: a folder to work in, such as that of `data.folders.building`.
      split: name of the split, and of the new folder.
      features: the fields of a record.
      records: yields the fields of each record.
      name: the data set's name, which the files' names begin with.
    """
    (folder / split).mkdir()
    serialized = serialize(features, records())
    sizes: list[ShardSize] = []
    for first in serialized:
        shard = _one_shard(itertools.chain([first], serialized))
        del first  # may be large
        sizes.append(write_shard(folder / split / shard_name(split, len(sizes), name), shard))
    write_metadata(folder, split, features, sizes, name)


def _one_shard(serialized: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the records of the next shard."""
    count = size = 0
    while count < RECORDS_IN_A_FILE and size < BYTES_IN_A_FILE:
        record = next(serialized, None)
        if record is None:
            return
        count, size = count + 1, size + len(record)
        yield record


def shard_ends(sizes: Int64[np.ndarray, " N"]) -> list[int]:
    """Returns the ends of shards, as in `write_records`, for records of these sizes."""
    ends, before = [0], 0
    total = np.cumsum(sizes)
    while ends[-1] < len(sizes):
        by_size = int(np.searchsorted(total, before + BYTES_IN_A_FILE)) + 1
        ends.append(min(by_size, ends[-1] + RECORDS_IN_A_FILE, len(sizes)))
        before = int(total[ends[-1] - 1])
    return ends[1:]


def serialize(features: Features, records: Iterable[dict]) -> Iterator[bytes]:
    """Yields records as they are stored."""
    import tensorflow_datasets as tfds  # takes seconds
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    fields = tfds.features.FeaturesDict(features(tfds))
    serializer = ExampleSerializer(fields.get_serialized_info())
    for record in records:
        example = serializer.get_tf_example(fields.encode_example(record))
        # Otherwise the order of fields differs between processes.
        yield example.SerializeToString(deterministic=True)


def shard_name(split: str, number: int, name: str = _NAME) -> str:
    """Returns the file name of a shard."""
    return f"{name}-{split}.array_record-{number:05d}"


def write_shard(path: Path, serialized: Iterable[bytes]) -> ShardSize:
    """Writes an array_record file; returns its size."""
    from array_record.python.array_record_module import ArrayRecordWriter

    count = size = 0
    # As tensorflow-datasets writes them: each record can be read separately.
    writer = ArrayRecordWriter(str(path), "group_size:1")
    try:
        for record in serialized:
            writer.write(record)
            count, size = count + 1, size + len(record)
    finally:
        writer.close()
    return ShardSize(count, size)


def read_shard(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yields some of the serialized records of an array_record file, in their order."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path))
    try:
        for first in range(start, stop, 1 << 8):
            yield from reader.read(list(range(first, min(stop, first + (1 << 8)))))
    finally:
        reader.close()


def write_metadata(
    folder: Path, split: str, features: Features, shards: Sequence[ShardSize], name: str = _NAME
) -> None:
    """Writes the files tensorflow-datasets needs to open the shards in `folder`/`split`.

    A tensorflow-datasets builder would keep a gigabyte of records in memory, and needs tensorflow
    for more; its Beam sink cannot write array_record, the only format that it reads without
    tensorflow.
    """
    import tensorflow_datasets as tfds

    data_dir = folder / split
    data_dir.mkdir(exist_ok=True)
    identity = tfds.core.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(data_dir), module_name=""
    )
    fields = tfds.features.FeaturesDict(features(tfds))
    info = tfds.core.DatasetInfo(builder=identity, features=fields, disable_shuffling=True)
    template = tfds.core.ShardedFileTemplate(
        data_dir=data_dir,
        template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}",
        dataset_name=name,
        split=split,
        filetype_suffix="array_record",
    )
    with _without_output(tfds):
        info.set_file_format("array_record")
        info.set_splits(
            tfds.core.SplitDict(
                [
                    tfds.core.SplitInfo(
                        name=split,
                        shard_lengths=[shard.records for shard in shards],
                        num_bytes=sum(shard.bytes for shard in shards),
                        filename_template=template,
                    )
                ]
            )
        )
        info.write_to_directory(data_dir)


def open_records(folder: Path, split: str) -> Sequence[dict]:
    """Opens what `write_records` wrote; records are read when indexed."""
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(str(folder / split)).as_data_source(split=split)


class StoreRecords(Sequence[dict]):
    """Records written by `write_records` and kept in a store; shards are copied here when
    needed."""

    def __init__(self, folder: Path, split: str, cache: ShardCache):
        """Opens them.

        Args:
          folder: the local copy of everything except shards.
          split: name of the split.
          cache: the shards.
        """
        import tensorflow_datasets as tfds

        info = tfds.builder_from_directory(str(folder / split)).info
        lengths = info.splits[split].shard_lengths
        self._features, self._cache = info.features, cache
        self._ends = np.cumsum(lengths)
        self._names = [f"{split}/{shard_name(split, number)}" for number in range(len(lengths))]
        self._readers: dict[str, tuple[int, Any]] = {}  # with the file's number, which may change

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> dict:  # type: ignore[override]  # no slices
        shard = int(np.searchsorted(self._ends, number, "right"))
        first = int(self._ends[shard - 1]) if shard else 0
        [serialized] = self._reader(self._names[shard]).read([number - first])
        return self._features.deserialize_example_np(serialized)

    def prefetch(self, numbers: Int64[np.ndarray, " n"]) -> None:
        """Copies the shards of some records in the background."""
        shards = np.unique(np.searchsorted(self._ends, numbers, "right"))
        self._cache.prefetch(self._names[shard] for shard in shards.tolist())

    def _reader(self, name: str) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        for _ in range(_OPENINGS):
            try:
                path = self._cache.local(name)
                found = path.stat().st_ino
                inode, reader = self._readers.get(name, (None, None))
                if inode == found:
                    return reader
                reader = ArrayRecordReader(str(path))
                opened = reader.num_records()  # opens the file; 0 if it is not there
            except FileNotFoundError:
                continue  # just removed by another thread or process
            if not opened and not path.exists():
                continue
            for other in [*self._readers]:  # evicted ones leave the disk
                if not (self._cache.folder / other).exists():
                    self._readers.pop(other, None)
            self._readers[name] = (found, reader)
            return reader
        raise TransientError(
            f"{self._cache.folder}: shards are removed before they can be read; a larger "
            "data.cache_gib would work"
        )


@contextlib.contextmanager
def readable(folder: Path, record: str) -> Iterator[None]:
    """Turns errors of opening or reading records into UserErrors that name the prepared folder.

    Args:
      folder: the prepared folder, as a whole.
      record: what a record is, such as `a document`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # array_record's and tensorflow-datasets' have many types
        raise UserError(
            f"{folder}: {record} cannot be read ({first_line(error)}); if this folder is deleted, "
            "the same command makes it again"
        ) from error


@contextlib.contextmanager
def _without_output(tfds: ModuleType) -> Iterator[None]:
    """Turns off the progress bars and messages of tensorflow-datasets within the context."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
