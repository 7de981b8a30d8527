"""Uploads an exported folder to the hub: python -m scripts.push_to_hub FOLDER OWNER/NAME"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from data import hub
from data.errors import UserError, is_transient
from data.printable import printable
from data.tokenizer import NAMED_TEMPLATES
from data.untrusted_files import file_within
from trainer import entry
from trainer.options import FreeText, command, option

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# Weights may be split over several files.
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
_INDEX = "model.safetensors.index.json"
_CONFIGS = {"model": "config.json", "adapter_model": "adapter_config.json"}  # by the weights' name
_TEXTS = (
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
)


def export_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of an export's files, and of everything else in its folder.

    Raises:
      UserError: the folder is not a complete export, or a link in it leads outside.
    """
    names = sorted(_names(folder)) if folder.is_dir() else []
    files = [
        name for name in names if (name in _TEXTS or _is_loaded(name)) and file_within(folder, name)
    ]
    _check_complete(folder, files)
    return files, [name for name in names if name not in files]


def _is_loaded(name: str) -> bool:
    """Whether a file of this name is a part of a model or adapter, which programs load."""
    from trainer.huggingface.hub_models import SMALL_FILES

    is_small = any(fnmatchcase(name, form) for form in SMALL_FILES)
    return is_small or name == _INDEX or _WEIGHTS.fullmatch(name) is not None


def _check_complete(folder: Path, files: list[str]) -> None:
    """Raises UserError if a file of the export is missing or cut off, as after a copy that was
    interrupted."""
    from safetensors import SafetensorError, safe_open

    from trainer.huggingface.folder import read_index

    weights = [name for name in files if _WEIGHTS.fullmatch(name)]
    if not weights:
        raise UserError(
            f"{folder}: contains no exported model (no .safetensors); pass a folder written by "
            "scripts.export_hf"
        )
    needed = {_CONFIGS[re.split(r"[-.]", name)[0]] for name in weights}
    if _INDEX in files:
        needed |= {path.name for path in read_index(folder / _INDEX).values()}
    elif any("-of-" in name for name in weights):
        needed.add(_INDEX)
    if missing := sorted(needed.difference(files)):
        raise UserError(
            f"{folder}: not a complete export: {missing[0]} is missing; one copied or exported "
            "again would work"
        )
    for name in weights:
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except SafetensorError as error:
            raise UserError(
                f"{folder / name}: not a complete safetensors file ({error}); one copied or "
                "exported again would work"
            ) from None


def _names(folder: Path) -> Iterator[str]:
    """Yields the names in a folder, and those of separate chat templates in their own folder."""
    templates = PurePosixPath(NAMED_TEMPLATES).parent.name
    for path in folder.iterdir():
        if path.name == templates and path.is_dir():
            yield from (f"{templates}/{inner.name}" for inner in path.iterdir())
        else:
            yield path.name


def listing(folder: Path, repository: str) -> str:
    """Lists the files to upload, with sizes, and other names; raises like `export_files`."""
    files, others = export_files(folder)
    lines = [f"{folder}: files to upload to {repository}:"]
    lines += [f"  {name}  {(folder / name).stat().st_size:,} bytes" for name in files]
    if others:
        lines.append(f"  not uploaded, since they are not part of an export: {', '.join(others)}")
    return printable("\n".join(lines))


def check_name(repository: str) -> None:
    """Raises UserError unless this is a valid repository name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{repository}: is not a repository name ({reason}); expected OWNER/NAME"
        ) from None
    if "/" not in repository:
        raise UserError(f"{repository}: lacks its owner; expected OWNER/{repository}")


def existing(repository: str) -> ModelInfo | None:
    """Returns what the hub says about a repository; None if there is none yet.

    Raises:
      UserError: the hub refuses, or cannot be asked.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with _named_errors(repository), contextlib.suppress(RepositoryNotFoundError):
        return HfApi().model_info(repository)
    return None


def earlier_files(files: Collection[str], info: ModelInfo | None) -> list[str]:
    """Returns the files of a model that a repository has besides `files`.

    Programs would load such files of an earlier push instead of the new ones, or with them.
    """
    there = [sibling.rfilename for sibling in (info and info.siblings) or ()]
    return [name for name in there if _is_loaded(name) and name not in files]


def push(folder: Path, repository: str, public: bool, message: str, replace: bool) -> str:
    """Uploads the files of an export; returns the repository's address, with what a user may not
    expect of an earlier repository.

    Args:
      replace: whether to remove the repository's `earlier_files`, in the same commit.

    Raises:
      UserError: as for `export_files`; or there is no token, the hub refuses, or the repository has
        such files and they are not to be removed, or is private and should be public.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    files, _ = export_files(folder)
    if hub.is_offline():
        raise UserError("HF_HUB_OFFLINE is set, which forbids uploads; unset it")
    if get_token() is None:
        raise UserError("no Hugging Face hub token was found; run `hf auth login` or set HF_TOKEN")
    info = existing(repository)
    removed = earlier_files(files, info)
    if removed and not replace:
        raise UserError(
            f"{repository}: has files of an earlier model, which would be loaded with this export "
            f"or instead of it: {printable(', '.join(removed))}; --replace removes them in the "
            "same commit, or use another repository"
        )
    if public and info and info.private:
        raise UserError(
            f"{repository}: is a private repository, and --public makes only a new one public; "
            "without --public it stays private, and its settings on the hub would make it public"
        )
    api = HfApi()
    with _named_errors(repository):
        address = api.create_repo(repository, private=not public, exist_ok=True)
        # File by file: upload_folder sends everything in the folder.
        api.create_commit(
            repository,
            [
                *(CommitOperationAdd(name, folder / name) for name in files),
                *map(CommitOperationDelete, removed),
            ],
            commit_message=message,
            # Refused if another push has added files meanwhile.
            parent_commit=info.sha if info else None,
        )
    return f"{address}{_about(info, files)}"


def _about(info: ModelInfo | None, files: Collection[str]) -> str:
    """Returns what a user may not expect of a push into an earlier repository, for a message."""
    if info is None:
        return ""
    named = {sibling.rfilename for sibling in info.siblings or ()}
    facts = ["a public repository"] if info.private is False else []
    if "README.md" in named.intersection(files):
        facts.append("the earlier README.md is in its history")
    return f" ({'; '.join(facts)})" if facts else ""


@contextlib.contextmanager
def _named_errors(repository: str) -> Iterator[None]:
    """Makes an error of the hub one line, with what would work and without the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        words = error.server_message or str(error).splitlines()[0]
        reason = hub.without_token(printable(words))
        remedy = ""
        if is_transient(error):
            remedy = "; repeat the command later"
        elif status in (401, 403, 404):
            remedy = "; use a token that may write to this owner's repositories"
        raise UserError(
            f"{repository}: {constants.ENDPOINT} answered {status} ({reason}){remedy}"
        ) from None
    # The HTTP library's exceptions differ between versions of huggingface_hub.
    except Exception as error:
        raise UserError(
            f"{repository}: not pushed to {constants.ENDPOINT} "
            f"({hub.without_token(printable(f'{type(error).__name__}: {error}'))}); check the "
            "network and repeat the command"
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Uploads a folder written by scripts.export_hf to the Hugging Face hub.

    The repository is created if it does not exist, privately unless --public is set. Only an
    export's files are uploaded, with LICENSE and NOTICE, after they have been listed. The token
    comes from `hf auth login` or HF_TOKEN.
    """

    folder: Path = option(
        "an exported folder, with its README.md", positional=True, metavar="FOLDER"
    )
    repository: str = option(
        "the repository; created if it does not exist", positional=True, metavar="OWNER/NAME"
    )
    public: bool = option("make a new repository public")
    replace: bool = option(
        "remove an earlier model's files that this export lacks, in the same commit"
    )
    dry_run: bool = option("only list the files to upload; needs no token")
    message: FreeText = option("commit message", "Upload by Longstripe")


def work(arguments: Options) -> None:
    """See Options."""
    folder, repository = arguments.folder, arguments.repository
    check_name(repository)
    print(listing(folder, repository), flush=True)
    if not arguments.dry_run:
        address = push(folder, repository, arguments.public, arguments.message, arguments.replace)
        print(f"{folder}: pushed to {printable(address)}")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
