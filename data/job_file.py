"""A job as a file for workers: JSON, which unlike a pickle runs no code of whoever can write to the
folder."""

import base64
import json
import tempfile
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from data.clean import CleanConfig
from data.encode import EncodingRules
from data.errors import UserError
from data.job import Job
from data.printable import printable
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from data.untrusted_files import check_within, parse_json


def job_bytes(job: Job) -> bytes:
    """Returns the content of a job's file, which contains the tokenizer's files."""
    with tempfile.TemporaryDirectory(prefix="longstripe-tokenizer-") as name:
        folder = Path(name)
        job.tokenizer.save(name)
        files = {
            path.relative_to(folder).as_posix(): base64.b64encode(path.read_bytes()).decode()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    tokenizer = {
        "files": files,
        "text_tokens": job.tokenizer.text_tokens,
        "template_date": job.tokenizer.template_date.isoformat(),
        "template_kwargs": dict(job.tokenizer.template_kwargs),
    }
    # The tokenizer is not a dataclass; its files follow.
    arguments = asdict(replace(job, tokenizer=None))  # type: ignore[arg-type]
    return json.dumps({**arguments, "tokenizer": tokenizer}).encode()


def read_job(content: bytes, path: str) -> Job:
    """Returns the job whose file has this content.

    Args:
      content: what `job_bytes` returned.
      path: the file, for messages.

    Raises:
      UserError: the file has another form.
    """
    try:
        value = parse_json(content)
        value["sources"] = _sources(value["sources"])
        value["rules"] = _rules(value["rules"])
        value["tokenizer"] = _tokenizer(value["tokenizer"])
        return Job(**value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            printable(
                f"{path}: not a job of this version ({type(error).__name__}: {error}); without "
                "its folder the same command begins anew"
            )
        ) from None


def _sources(value: dict[str, Any]) -> Sources:
    train, held_out = (
        tuple(Source(**{**source, "left_out": tuple(source["left_out"])}) for source in value[name])
        for name in ("train", "held_out")
    )
    return Sources(**{**value, "train": train, "held_out": held_out})


def _rules(value: dict[str, Any]) -> EncodingRules:
    languages = tuple(value["clean"]["languages"])
    return EncodingRules(
        **{**value, "clean": CleanConfig(**{**value["clean"], "languages": languages})}
    )


def _tokenizer(value: dict[str, Any]) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="longstripe-tokenizer-") as folder:
        for name, content in value["files"].items():
            path = Path(folder) / name
            check_within(folder, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content, validate=True))
        tokenizer = Tokenizer.load(folder, as_saved=True)
    return (
        tokenizer.with_text_tokens(value["text_tokens"])
        .with_template_date(datetime.fromisoformat(value["template_date"]))
        .with_template_kwargs(value["template_kwargs"])
    )
