"""Uploads an exported folder to the hub: python -m scripts.push_to_hub FOLDER OWNER/NAME"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from data.errors import UserError
from data.printable import printable
from data.tokenizer import NAMED_TEMPLATES, template_files
from data.within import file_within
from trainer import entry
from trainer.options import FreeText, command, option

# Weights may be split over several files.
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
_OTHERS = (
    "README.md",
    "model.safetensors.index.json",
    "adapter_config.json",
    "trained_config.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
)


def export_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of an export's files, and of everything else in its folder.

    Raises:
      UserError: the folder is not an export, or a link in it leads outside.
    """
    from trainer.huggingface.assets import ASSET_FILES

    names = sorted(_names(folder)) if folder.is_dir() else []
    known = {*ASSET_FILES, *_OTHERS, *template_files(folder)}
    files = [
        name
        for name in names
        if (name in known or _WEIGHTS.fullmatch(name)) and file_within(folder, name)
    ]
    if not any(map(_WEIGHTS.fullmatch, files)):
        raise UserError(
            f"{folder}: contains no exported model (no .safetensors); pass a folder written by "
            "scripts.export_hf"
        )
    return files, [name for name in names if name not in files]


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


def push(folder: Path, repository: str, public: bool, message: str) -> str:
    """Uploads the files of an export and returns the repository's address.

    Raises:
      UserError: as for `export_files`; or there is no token, or the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    files, _ = export_files(folder)
    if (token := get_token()) is None:
        raise UserError("no Hugging Face hub token was found; run `hf auth login` or set HF_TOKEN")
    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        # File by file: upload_folder sends everything in the folder.
        api.create_commit(
            repository,
            [CommitOperationAdd(name, folder / name) for name in files],
            commit_message=message,
        )
    except HfHubHTTPError as error:
        # The hub's message may repeat the token.
        reason = printable(error.server_message or str(error).splitlines()[0]).replace(
            token, "hf_..."
        )
        raise UserError(
            f"{repository}: {api.endpoint} answered {error.response.status_code} ({reason}); "
            "use a token that may write to this owner's repositories"
        ) from None
    # The HTTP library's exceptions differ between versions of huggingface_hub.
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}").replace(token, "hf_...")
        raise UserError(
            f"{repository}: not pushed to {api.endpoint} ({reason}); check the network and repeat "
            "the command"
        ) from error
    return str(address)


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
    dry_run: bool = option("only list the files to upload; needs no token")
    message: FreeText = option("commit message", "Upload by Longstripe")


def work(arguments: Options) -> None:
    """See Options."""
    check_name(arguments.repository)
    print(listing(arguments.folder, arguments.repository), flush=True)
    if not arguments.dry_run:
        address = push(arguments.folder, arguments.repository, arguments.public, arguments.message)
        print(f"{arguments.folder}: pushed to {printable(address)}")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
