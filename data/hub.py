"""Data sets of the Hugging Face hub: hf://datasets/OWNER/NAME[@REVISION][/FILE OR FOLDER], kept in the hub's own cache."""
from __future__ import annotations

import glob
import os
import re
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from data.errors import UserError, first_line

PREFIX = "hf://datasets/"
WOULD_WORK = f"{PREFIX}OWNER/NAME[@REVISION][/FILE] would work"
NOT_RECORDS = ("README.md", "dataset_infos.json", "dataset_info.json")  # files of the hub about a data set
_OTHER_SPLIT = re.compile(r"(?<![a-z])(validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE)


def is_hub_dataset(path: str | Path) -> bool:
    """Returns whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


def local_path(path: str, suffixes: Sequence[str]) -> Path:
    """Returns where the files of a data set of the hub lie in this machine's cache, after downloading those that are not there.

    Files of the hub about a data set, NOT_RECORDS, are downloaded only if the path names them. Without a network, what an
    earlier call has downloaded is used.

    Args:
      path: begins with PREFIX; a file, a folder or a whole data set.
      suffixes: of a folder or data set, the files with one of these endings are downloaded, also with
        .gz and the like behind.

    Raises:
      UserError: the path is none, or the hub has no such data set, file or revision for this user.
    """
    repository, revision, inner = _parts(path)

    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    escaped = glob.escape(inner)
    folder = f"{escaped}/" if inner else ""
    endings = [f"{folder}*{suffix}{packed}" for suffix in suffixes for packed in ("", ".gz", ".zst", ".bz2", ".xz")]
    left_out = () if os.path.basename(inner) in NOT_RECORDS else NOT_RECORDS
    try:
        # Imported libraries know the hub's address as a constant, which HF_ENDPOINT sets.
        snapshot = Path(snapshot_download(repository, repo_type="dataset", revision=revision, endpoint=constants.ENDPOINT,
                                          allow_patterns=[escaped, *endings] if inner else endings,
                                          ignore_patterns=[*left_out, *(f"*/{name}" for name in left_out)]))
    except HFValidationError as error:
        raise UserError(f"{path}: names no data set of the hub ({first_line(error)}); {WOULD_WORK}") from None
    except RepositoryNotFoundError:
        raise UserError(f"{path}: {constants.ENDPOINT} shows no data set {repository}; another name, or `hf auth login` for "
                        "one that is private, would work") from None
    except RevisionNotFoundError:
        raise UserError(f"{path}: the data set {repository} has no revision {revision}; another one would work") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise UserError(f"{path}: cannot be downloaded from {constants.ENDPOINT}, and is not in the cache "
                        f"({first_line(error)}); a network, or a local file, would work") from None
    local = snapshot / inner
    if not local.exists():
        raise UserError(f"{path}: the data set {repository} has no {inner or ' or '.join(suffixes) + ' file'}; {WOULD_WORK}")
    return local


def _parts(path: str) -> tuple[str, str | None, str]:
    """Returns the repository that a path names, its revision, and the file or folder within, which may be empty.

    Raises:
      UserError: the path names none.
    """
    revisions = r"refs/convert/\w+|refs/pr/\d+|[^/]+"  # the hub's own have slashes in them
    match = re.fullmatch(rf"([^/@]+/[^/@]+)(?:@({revisions}))?(?:/(.*?))?/*", path.removeprefix(PREFIX))
    if not match:
        raise UserError(f"{path}: names no data set of the hub; {WOULD_WORK}")
    return match[1], match[2] and urllib.parse.unquote(match[2]), match[3] or ""


def other_splits(files: Sequence[str]) -> list[str]:
    """Returns the files of a folder that are named as another split than the one to train on, relative to their common folder.

    Args:
      files: paths of all files that are read.

    Returns:
      Those whose name or folder is `test`, `validation` or another such word; none if all are.
    """
    common = os.path.commonpath([os.path.dirname(file) for file in files])
    names = [os.path.relpath(file, common) for file in files]
    others = [name for name in names if _OTHER_SPLIT.search(name)]
    return others if len(others) < len(names) else []
