"""Records in array_record files; the only module that uses tensorflow-datasets for text."""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from data.errors import UserError, first_line


def write_records(
    folder: Path,
    split: str,
    features: Callable[[ModuleType], dict[str, Any]],
    records: Callable[[], Iterator[tuple[int, dict]]],
    name: str = "longstripe",
) -> None:
    """Writes records to the folder `folder`/`split`, in their order.

    Args:
      folder: a folder to work in, such as that of `data.folders.building`.
      split: name of the split, and of the new folder.
      features: returns the fields of a record, from the module tensorflow_datasets.
      records: yields (number from 0, fields) of each record.
      name: the data set's name, which the files' names begin with.
    """
    import tensorflow_datasets as tfds  # takes seconds

    dataset_name = name

    # Not registered: a second call in this process would register the same name again.
    class Records(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        VERSION = tfds.core.Version("1.0.0")
        name = dataset_name

        def _info(self):
            fields = tfds.features.FeaturesDict(features(tfds))
            return tfds.core.DatasetInfo(builder=self, features=fields, disable_shuffling=True)

        def _split_generators(self, download_manager):
            return {split: self._generate_examples()}

        def _generate_examples(self):
            return records()

    scratch = folder / "tfds"
    with _without_output(tfds):
        # The only format that tensorflow-datasets reads and writes correctly without tensorflow.
        builder = Records(data_dir=str(scratch), file_format="array_record")
        builder.download_and_prepare()
    os.rename(builder.data_dir, folder / split)
    shutil.rmtree(scratch)


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
