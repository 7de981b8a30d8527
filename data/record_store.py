"""Records in array_record files; the only module that uses tensorflow-datasets for text."""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from data.errors import UserError, first_line

RECORDS_IN_A_FILE = 1 << 20


def write_records(
    folder: Path,
    split: str,
    features: Callable[[ModuleType], dict[str, Any]],
    records: Callable[[], Iterator[dict]],
    name: str = "longstripe",
) -> None:
    """Writes records to the folder `folder`/`split`, in their order; few are in memory at a time.

    Args:
      folder: a folder to work in, such as that of `data.folders.building`.
      split: name of the split, and of the new folder.
      features: returns the fields of a record, from the module tensorflow_datasets.
      records: yields the fields of each record.
      name: the data set's name, which the files' names begin with.
    """
    import tensorflow_datasets as tfds  # takes seconds

    data_dir = folder / split
    data_dir.mkdir()
    identity = tfds.core.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(data_dir), module_name=""
    )
    fields = tfds.features.FeaturesDict(features(tfds))
    info = tfds.core.DatasetInfo(builder=identity, features=fields, disable_shuffling=True)
    with _without_output(tfds):
        # Not by a builder of tensorflow-datasets: that keeps a gigabyte of records in memory, and
        # needs tensorflow for more. The format is the only one that it reads without tensorflow.
        writer = tfds.core.SequentialWriter(info, RECORDS_IN_A_FILE, file_format="array_record")
        writer.initialize_splits([split])
        writer.add_examples({split: cast(list, records())})
        writer.close_all()


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
