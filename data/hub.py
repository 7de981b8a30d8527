"""Data sets and models from the Hugging Face hub, in the hub's local cache.

A data set is hf://datasets/OWNER/NAME[@REVISION][/FILE, FOLDER OR PATTERN].
"""

from __future__ import annotations

import contextlib
import glob
import http
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from data import cards
from data.compression import ENDINGS
from data.errors import UserError, causes, first_line
from data.folders import locked
from data.hub_transfers import (
    bounded_snapshot,
    cache_errors,
    check_answers,
    in_cache,
    remove_abandoned,
)
from data.printable import printable

PREFIX = "hf://datasets/"
_MOST_SAID = 200  # characters of the hub's words in a message
WOULD_WORK = f"{PREFIX}OWNER/NAME[@REVISION][/FILE] would work"
# The hub's files about a data set.
NOT_RECORDS = (cards.NAME, "dataset_infos.json", "dataset_info.json")
_OTHER_SPLIT = re.compile(
    r"(?<![a-z])(validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE
)


def on_hub(path: object) -> str:
    """Returns '; a data set on the hub is named ...', for messages about a missing file whose path
    may be meant as a name on the hub: OWNER/NAME without the ending of a file's name."""
    is_name = re.fullmatch(r"[\w-]+/[\w-]+(\.\d[\w-]*)*", str(path), re.ASCII)
    return f"; a data set on the hub is named {PREFIX}{path}" if is_name else ""


def name_of_page(path: str | Path) -> str | None:
    """Returns the name that would work instead of the address of a data set's or a model's page on
    the hub; None for other paths, such as the address of a file there."""
    page = re.fullmatch(
        r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(datasets/)?"
        r"(?!(?:datasets|spaces|buckets|api|docs|papers)/)([\w.-]+/[\w.-]+)"
        r"(?:/(?:tree|viewer|blob)/.*)?/?(?:[?#].*)?",
        str(path),
        re.ASCII,
    )
    if not page or is_hub_dataset(path):
        return None
    return f"{PREFIX}{page[2]}" if page[1] else page[2]


def refuse_page(path: str | Path, of_model: bool = False) -> None:
    """Raises UserError for the address of a data set's page on the hub, or of a model's."""
    name = name_of_page(path)
    if name and is_hub_dataset(name) != of_model and not Path(path).exists():
        raise UserError(f"{path}: a page of the Hugging Face hub; {name} would work")


def is_hub_dataset(path: str | Path) -> bool:
    """Returns whether a path names a data set on the hub."""
    return str(path).startswith(PREFIX)


def dataset_name(path: str) -> str | None:
    """Returns OWNER/NAME of a data set on the hub; None for other paths."""
    return _parts(path)[0] if is_hub_dataset(path) else None


def is_whole(path: str | Path) -> bool:
    """Returns whether a path names a whole data set on the hub, no file or folder in it."""
    return is_hub_dataset(path) and not _parts(str(path))[2]


def is_converted(path: str | Path) -> bool:
    """Returns whether a path names the whole of the hub's conversion of a data set, which has a
    folder for each configuration."""
    return is_whole(path) and is_of_conversion(path)


def is_of_conversion(path: str | Path) -> bool:
    """Returns whether a path names a part of the hub's conversion of a data set, or all of it."""
    return is_hub_dataset(path) and (_parts(str(path))[1] or "").startswith("refs/convert/")


def configurations(path: str) -> list[cards.Configuration] | None:
    """Returns the configurations that the card of a whole data set lists, downloaded unless it is
    in the cache; None if it cannot be read, such as without a network.

    Raises:
      UserError: as `local_path`.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, revision, _ = _parts(path)
    with _dataset_errors(path, repository, revision):
        try:  # every data set has the second file; without any the hub's library warns
            snapshot = _download_dataset(repository, revision, [cards.NAME, ".gitattributes"])
        except LocalEntryNotFoundError:
            return None
    card = snapshot / cards.NAME
    if not card.exists():
        files = listed_files(path, snapshot)
        return None if files is None or str(card) in files else []
    with card.open("rb") as file:
        return cards.configurations(file.read(cards.MAX_BYTES + 1))


def listed_files(path: str, local: Path) -> list[str] | None:
    """Returns the places in the cache of all files that the hub lists of a data set, whether they
    are there or not; None if its list is neither in the cache nor to be had.

    Args:
      path: begins with PREFIX.
      local: what `local_path` returns for it, or its snapshot's folder.
    """
    repository = _parts(path)[0]
    end = local.parts.index(in_cache(repository, "dataset").name) + len(("snapshots", "commit")) + 1
    snapshot = Path(*local.parts[:end])
    names = list_in_cache(repository, "dataset", snapshot)
    if names is None:  # as in a cache that cannot be written
        names = list_on_hub(repository, "dataset", snapshot.name)
    return names and [str(snapshot / name) for name in names]


def list_on_hub(name: str, kind: str, revision: str | None) -> list[str] | None:
    """Returns the names of a repository's files; None if the hub cannot be asked. Unlike others,
    this request takes seconds at most and is not repeated.

    Args:
      kind: `model` or `dataset`.
    """
    from huggingface_hub import HfApi, constants

    if is_offline():
        return None
    check_answers()
    api = HfApi(endpoint=constants.ENDPOINT)
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        info = ask(name, revision=revision, timeout=constants.DEFAULT_ETAG_TIMEOUT)
    except Exception:  # of many kinds; what is in the cache must open nevertheless
        return None
    return [sibling.rfilename for sibling in info.siblings or ()]


def list_in_cache(name: str, kind: str, snapshot: Path) -> list[str] | None:
    """Returns the hub's list of a repository's files, which a download keeps in the cache; None if
    it is not there.

    Downloads of single files, as transformers', and earlier releases of the hub's library keep
    none. Without it nobody knows which files the cache lacks.

    Args:
      kind: `model` or `dataset`.
      snapshot: the folder in the cache.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listed = get_cached_repo_tree(name, repo_type=kind, revision=snapshot.name)
    except CachedRepoTreeNotFoundError:
        return None
    return [file.path for file in listed]


def converted_configurations(path: str, suffixes: Sequence[str]) -> list[cards.Configuration]:
    """Returns the configurations of the hub's conversion of a data set, a folder each, from its
    list of files; [] if this cannot be had, such as without a network.

    Raises:
      UserError: as `local_path`.
    """
    from huggingface_hub.errors import DryRunError

    repository, revision, _ = _parts(path)
    with _dataset_errors(path, repository, revision), contextlib.suppress(DryRunError):
        listed = _download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=_endings("", suffixes),
            dry_run=True,
        )
        return cards.of_folders({os.path.dirname(file.filename) for file in listed})
    return []


def local_path(path: str, suffixes: Sequence[str], patterns: Sequence[str] = ()) -> Path:
    """Downloads the files of a data set that the local cache lacks; returns their path in it.

    The hub's files about a data set, NOT_RECORDS, are downloaded only if the path names them.
    Without a network, the files of earlier downloads are used.

    Args:
      path: begins with PREFIX; a file, a folder, a pattern of these, or a whole data set.
      suffixes: endings of the files to download from a folder or data set; these may be followed by
        .gz and the like.
      patterns: only files that match one of these are needed of a whole data set.

    Returns:
      The path in the cache; if the path is a pattern and no file, a pattern in an existing folder.

    Raises:
      UserError: the path is malformed, or the hub shows this user no such data set, file or
        revision.
    """
    repository, revision, inner = _parts(path)
    escaped = glob.escape(inner)
    folder = f"{escaped}/" if inner else ""
    wanted = [escaped] if inner else []
    wanted += _endings(folder, suffixes) if not patterns else []
    parent, last = os.path.split(inner)
    ignored = [] if last in NOT_RECORDS else [*NOT_RECORDS, *(f"*/{name}" for name in NOT_RECORDS)]
    if cards.is_pattern(last):
        before = f"{glob.escape(parent)}/" if parent else ""
        patterns = [f"{before}{last}"]
        if _ends_in(last, suffixes):  # the hub's `*` stands for slashes too
            ignored.append(f"{before}*/*")
    for pattern in (each.replace("**/", "*") for each in patterns):
        wanted += [pattern] if _ends_in(pattern, suffixes) else _endings(pattern, suffixes)
    with _dataset_errors(path, repository, revision):
        snapshot = _download_dataset(repository, revision, wanted, ignored)
    local = snapshot / inner
    if not (local.exists() or (cards.is_pattern(last) and local.parent.is_dir())):
        remedy = "only the last part of a path may be a pattern" * cards.is_pattern(parent)
        raise UserError(
            f"{path}: the data set {repository} has no {inner or ' or '.join(suffixes) + ' file'}; "
            f"{remedy or WOULD_WORK}"
        )
    return local


def _endings(before: str, suffixes: Sequence[str]) -> list[str]:
    """Returns patterns of files that begin in one way and have one of the suffixes.

    The beginning may be a pattern that reaches into the suffix, such as `data/*.json*`.
    """
    endings = [f"{suffix}{packed}" for suffix in suffixes for packed in ("", *ENDINGS)]
    dots = [match.start() for match in re.finditer(r"\.", before)]
    reached = [(dot, ending) for dot in dots for ending in endings]
    return [
        *(f"{before}*{ending}" for ending in endings),
        *(before[:dot] + ending for dot, ending in reached if fnmatchcase(ending, before[dot:])),
    ]


def _ends_in(name: str, suffixes: Sequence[str]) -> bool:
    packed = next((ending for ending in ENDINGS if name.endswith(ending)), "")
    return name.removesuffix(packed).endswith(tuple(suffixes))


def _download_dataset(
    repository: str, revision: str | None, wanted: Sequence[str], ignored: Sequence[str] = ()
) -> Path:
    """Downloads the files of a data set that match a pattern of `wanted` and none of `ignored`;
    returns the snapshot's folder."""
    return Path(
        _download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(ignored),
        )
    )


@contextlib.contextmanager
def _dataset_errors(path: str, repository: str, revision: str | None) -> Iterator[None]:
    """Translates errors from downloading a data set into UserErrors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise UserError(
            f"{path}: names no data set on the hub ({first_line(error)}); {WOULD_WORK}"
        ) from None
    except GatedRepoError as error:  # a RepositoryNotFoundError too
        raise _gated(path, f"{constants.ENDPOINT}/datasets/{repository}", error) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{path}: {constants.ENDPOINT} shows no data set {repository}; another name, or `hf "
            "auth login` for one that is private, would work"
        ) from None
    except RevisionNotFoundError:
        slash = ", and a slash in its name is written %2F" if _parts(path)[2] else ""
        raise UserError(
            f"{path}: the data set {repository} has no revision {revision}; another one "
            f"would work{slash}"
        ) from None
    except UserError:
        raise
    except Exception as error:  # a malformed answer raises many kinds in the hub's library
        raise _refused(path, error) or UserError(
            printable(
                f"{path}: cannot be downloaded from {constants.ENDPOINT}, and is not in the cache "
                f"({first_line(error)}); a network, or a local file, would work"
            )
        ) from None


def _parts(path: str) -> tuple[str, str | None, str]:
    """Returns the repository, the revision, and the file or folder (may be empty) of a path.

    Raises:
      UserError: the path names no data set.
    """
    revisions = r"refs/convert/\w+|refs/pr/\d+|[^/]+"  # only the hub's own contain slashes
    match = re.fullmatch(
        rf"([^/@]+/[^/@]+)(?:@({revisions}))?(?:/(.*?))?/*", path.removeprefix(PREFIX)
    )
    if not match:
        raise UserError(f"{path}: names no data set on the hub; {WOULD_WORK}")
    return match[1], match[2] and urllib.parse.unquote(match[2]), match[3] or ""


def other_splits(files: Sequence[str]) -> list[str]:
    """Returns files named like a split other than the training split.

    Args:
      files: paths of all files to be read.

    Returns:
      The files, relative to the common folder, whose name or folder contains a word such as `test`
      or `validation`; none if all do.
    """
    common = os.path.commonpath([os.path.dirname(file) for file in files])
    names = [os.path.relpath(file, common) for file in files]
    others = [name for name in names if _OTHER_SPLIT.search(name)]
    return others if len(others) < len(names) else []


def no_downloads() -> None:
    """Makes this process use only the hub's local cache, as HF_HUB_OFFLINE=1 does."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub.constants" in sys.modules:  # it has already read the environment
        vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True


def is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    )


def download_model(
    name: str, revision: str | None, files: Sequence[str], needed: tuple[str, ...] = ()
) -> Path:
    """Downloads the missing files of a model after printing their size; returns its folder in the
    cache.

    If several processes on a machine need it, one downloads and the others wait. Complete files are
    not downloaded again.

    Args:
      files: patterns of the files' names.
      needed: endings, one of which the name of at least one file must have.

    Raises:
      UserError: the hub shows this user no such model, or cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import DryRunError

    def fetch(**options: Any) -> Any:
        try:
            return _download(name, revision=revision, allow_patterns=list(files), **options)
        except DryRunError as error:
            raise error.__cause__ or error from None  # the hub's answer

    lock = Path(constants.HF_HUB_CACHE) / f".longstripe-{name.replace('/', '--')}.lock"
    with _model_errors(name, revision), cache_errors(), locked(lock):
        remove_abandoned(in_cache(name, "model") / "blobs")
        listed = fetch(dry_run=True)
        if needed and not any(file.filename.endswith(needed) for file in listed):
            raise only_pickled(name)
        _announce(name, [file for file in listed if file.will_download])
        return Path(fetch())


def only_pickled(name: str) -> UserError:
    """Returns the error for a model on the hub without safetensors."""
    return UserError(
        f"{name}: has no safetensors on the hub; pickled weights can run code when they are loaded "
        "and are refused, another name would work"
    )


def _announce(name: str, missing: Sequence[Any]) -> None:
    """Prints the size of the files to be downloaded, if any."""
    from huggingface_hub import constants

    if not missing:
        return
    size = sum(file.file_size or 0 for file in missing)
    # Some hubs do not know the size of files stored elsewhere.
    unknown = any(file.file_size is None for file in missing)
    print(
        printable(
            f"{name}: downloading {'at least ' if unknown else ''}{size:,} bytes "
            f"in {len(missing)} file{'s' if len(missing) > 1 else ''} from {constants.ENDPOINT} to "
            f"{Path(constants.HF_HUB_CACHE)}"
        ),
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def _model_errors(name: str, revision: str | None) -> Iterator[None]:
    """Translates errors from downloading a model into UserErrors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise _gated(name, f"{hub}/{name}", error) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a folder nor a model that {hub} shows; another name, or for a "
            f"private model `hf auth login`, then `hf download {name}`, would work"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"{name}: has no revision {revision} at {hub}; another one would work"
        ) from None
    except UserError:
        raise
    except Exception as error:  # disk errors, and those of the hub's HTTP library
        raise _refused(name, error) or UserError(
            printable(
                f"{name}: neither a folder nor in the local Hugging Face cache, and not downloaded "
                f"from {hub} ({first_line(error)}); complete files are kept, and the same "
                f"command or `hf download {name}` gets the rest"
            )
        ) from None


def _gated(name: str, page: str, error: Exception) -> UserError:
    said = _said(error)  # such as that a token may not read gated repositories
    return UserError(
        printable(
            f"{name}: its owner must grant you access: request it at {page}, then `hf auth login`"
            + (f" (the hub says: {said})" if said else "")
        )
    )


def _refused(name: str, error: Exception) -> UserError | None:
    """Returns the error for an answer that refuses this token, or everyone; None for others."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    for link in causes(error):
        status = link.response.status_code if isinstance(link, HfHubHTTPError) else None
        if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            is_invalid = status == http.HTTPStatus.UNAUTHORIZED
            kind, other = ("a valid", "none") if is_invalid else ("another", "another name")
            said = f" ({words})" if (words := _said(link)) else ""
            return UserError(
                printable(
                    f"{name}: {constants.ENDPOINT} answered {status}{said}; {kind} token (`hf "
                    f"auth login` or HF_TOKEN), or {other}, would work"
                )
            )
    return None


def _said(error: BaseException) -> str:
    """Returns the hub's own words in an error of its library, in one line; "" if it has none."""
    words = " ".join((getattr(error, "server_message", None) or "").split())
    return without_token(words)[:_MOST_SAID]


def without_token(text: str) -> str:
    """Returns a text without the user's token, which the hub's messages may repeat."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "hf_...") if token else text


def _download(name: str, **options: Any) -> Any:
    """Calls `bounded_snapshot`, which writes nothing offline or in a dry run."""
    return bounded_snapshot(name, writes=not (options.get("dry_run") or is_offline()), **options)


def cached_model(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Returns the folder of a model in the cache, as the hub's library finds it.

    Damaged files from killed downloads are removed first.

    Raises:
      huggingface_hub.errors.LocalEntryNotFoundError, HFValidationError: the cache does not have it.
    """
    from huggingface_hub import snapshot_download

    from data.download_checks import remove_damaged

    remove_damaged(in_cache(name, "model"))
    return Path(
        snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=list(files)
        )
    )
