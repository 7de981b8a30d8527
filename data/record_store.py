"""Records in array_record files; the only module that uses tensorflow-datasets for text."""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from data.errors import UserError, first_line

RECORDS_IN_A_FILE = 1 << 20
_NAME = "longstripe"

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
    """Writes records to the folder `folder`/`split`, in their order; few are in memory at a time.

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
        shard = itertools.chain([first], itertools.islice(serialized, RECORDS_IN_A_FILE - 1))
        del first  # may be large
        sizes.append(write_shard(folder / split / shard_name(split, len(sizes), name), shard))
    write_metadata(folder, split, features, sizes, name)


def serialize(features: Features, records: Iterable[dict]) -> Iterator[bytes]:
    """Yields records as they are stored."""
    import tensorflow_datasets as tfds  # takes seconds
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    fields = tfds.features.FeaturesDict(features(tfds))
    serializer = ExampleSerializer(fields.get_serialized_info())
    for record in records:
        example = serializer.get_tf_example(fields.encode_example(record))
        # Otherwise each process has its own order of fields.
        yield example.SerializeToString(deterministic=True)


def shard_name(split: str, number: int, name: str = _NAME) -> str:
    """Returns the file name of a shard."""
    return f"{name}-{split}.array_record-{number:05d}"


def write_shard(path: Path, serialized: Iterable[bytes]) -> ShardSize:
    """Writes an array_record file; returns its size."""
    from array_record.python.array_record_module import ArrayRecordWriter

    count = size = 0
    # As tensorflow-datasets writes them: each record can be read by itself.
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
    """Writes what tensorflow-datasets needs to open the folder `folder`/`split`, beside its shards.

    Not by a builder of tensorflow-datasets: that keeps a gigabyte of records in memory, and needs
    tensorflow for more; its sink for Beam cannot write array_record. The format is the only one
    that it reads without tensorflow.
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
    """Opens what `write_records` wrote; a record is read when it is indexed."""
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(str(folder / split)).as_data_source(split=split)


@contextlib.contextmanager
def readable(folder: Path, record: str) -> Iterator[None]:
    """Turns errors of opening or reading records into UserErrors that name the prepared folder.

    Args:
      folder: the prepared folder, as a whole.
      record: what a record is, such as `a document`.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # array_record and tensorflow-datasets raise RuntimeError and other types
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
