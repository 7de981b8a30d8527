"""Uploads an exported folder to the Hugging Face hub: python -m scripts.push_to_hub FOLDER OWNER/NAME [--public]"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data.errors import UserError
from trainer import entry

WEIGHTS = ("*.safetensors", "adapter_config.json")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = entry.CommandParser(prog="python -m scripts.push_to_hub", allow_abbrev=False, description=(
        "Uploads a folder of scripts.export_hf to the Hugging Face hub, into a new, private repository unless --public is "
        "given, or into an existing one as it is. The token is that of `hf auth login` or of HF_TOKEN."))
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="an exported folder, with its README.md")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository, which is made unless it exists")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--message", default="Upload by Longstripe", help="the commit's message")
    return parser


def push(folder: Path, repository: str, public: bool, message: str) -> str:
    """Uploads a folder and returns the repository's address.

    Raises:
      UserError: the folder is no export, the repository's name is none, there is no token, or the hub refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise UserError(f"{folder}: holds no exported model (no .safetensors); a folder of scripts.export_hf would work")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{repository}: is no name of a repository ({reason}); OWNER/NAME would work") from None
    if "/" not in repository:
        raise UserError(f"{repository}: lacks its owner; OWNER/{repository} would work")
    if get_token() is None:
        raise UserError("no token of the Hugging Face hub was found; `hf auth login` or HF_TOKEN=... would work")
    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise UserError(f"{repository}: {api.endpoint} answered {error.response.status_code} ({reason}); a token that may "
                        "write to this owner's repositories would work") from None
    except Exception as error:  # of the library for HTTP, which differs between versions of huggingface_hub
        raise UserError(f"{repository}: not pushed to {api.endpoint} ({type(error).__name__}: {error}); a network, or the same "
                        "command again, would work") from error
    return str(address)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = make_parser().parse_args(argv)
    return entry.run(lambda: print(f"{args.folder}: pushed to {push(args.folder, args.repository, args.public, args.message)}"))


if __name__ == "__main__":
    sys.exit(main())
