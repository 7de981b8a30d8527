"""ExoRL's public archives, one per domain and exploration algorithm; episodes are in `buffer`.

Yarats et al., Don't Change the Algorithm, Change the Data: Exploratory Data for Offline
Reinforcement Learning. Their own script, download.sh in github.com/denisyarats/exorl, names the
address and the algorithms.
"""

import json
import os
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from data.compression import MOST_TIMES, most_unpacked
from data.download import download_file
from data.errors import UserError
from data.folders import exclusive, named_errors, sync, sync_tree

from .episodes import UNPACKING
from .tasks import TASKS

ADDRESS = "https://dl.fbaipublicfiles.com/exorl"
ALGORITHMS = ("aps", "diayn", "disagreement", "icm", "icm_apt", "proto", "random", "rnd", "smm")
DOMAINS = tuple(dict.fromkeys(task.domain for task in TASKS.values()))
RECORD = "downloaded.json"
"""File next to the buffer that gives the episodes' origin."""


def archive_folder(root: Path, domain: str, algorithm: str) -> Path:
    """Returns the folder that an archive is unpacked into: {root}/{domain}/{algorithm}.

    Raises:
      UserError: there is no archive of this domain or algorithm.
    """
    if domain not in DOMAINS:
        raise UserError(f"--domain: found {domain!r}, needs one of {', '.join(DOMAINS)}")
    if algorithm not in ALGORITHMS:
        raise UserError(f"--algorithm: found {algorithm!r}, needs some of {', '.join(ALGORITHMS)}")
    return root / domain / algorithm


def download_archive(
    domain: str, algorithm: str, root: Path, address: str = ADDRESS, **options: Any
) -> int | None:
    """Downloads episodes into {root}/{domain}/{algorithm}/buffer, unless they are there.

    Interrupted at any moment, it resumes: the download after the received bytes, unpacking from the
    beginning. The folder appears complete; then the archive is removed.

    Args:
      address: the prefix of {domain}/{algorithm}.zip.
      options: of `data.download.download_file`.

    Returns:
      The number of episodes; None if the folder existed.

    Raises:
      UserError: no such archive, no connection, no room, or a damaged archive.
    """
    folder = archive_folder(root, domain, algorithm)
    folder.parent.mkdir(parents=True, exist_ok=True)
    archive = folder.with_name(f"{algorithm}.zip")
    with exclusive(folder.with_name(f".{algorithm}.lock"), f"downloads {algorithm} into it"):
        if folder.exists():
            if not (folder / RECORD).exists():
                raise UserError(
                    f"{folder}: exists, and was not made by this command; move it away, or use it "
                    "as it is"
                )
            return None
        url = f"{address.rstrip('/')}/{domain}/{algorithm}.zip"
        if not archive.exists():
            download_file(url, archive, **options)
        count = unpack_archive(archive, folder, {"url": url, "bytes": archive.stat().st_size})
        archive.unlink()
        return count


def unpack_archive(archive: Path, folder: Path, about: dict[str, object]) -> int:
    """Unpacks an archive's episodes, not its videos, into `folder`/buffer; returns their number.

    Args:
      folder: appears complete, or not at all.
      about: written to `folder`/downloaded.json, with the number of episodes.

    Raises:
      UserError: the archive is damaged, has no episodes or a path that leads out of it, or the disk
        is too small.
    """
    # A level deeper than the buffers `episode_files` looks for, so that no partial folder is read.
    scratch = folder.with_name(f"{folder.name}{UNPACKING}")
    shutil.rmtree(scratch, ignore_errors=True)
    inner = scratch / "whole"
    with named_errors(folder.parent):
        (inner / "buffer").mkdir(parents=True)
        try:
            with zipfile.ZipFile(archive) as opened:
                members = _episodes(archive, opened)
                needed = sum(member.file_size for member in members.values())
                _check_size(archive, folder.parent, needed)
                for name, member in members.items():
                    _unpack_member(archive, opened, member, inner / "buffer" / name)
        except zipfile.BadZipFile as error:
            raise UserError(
                f"{archive}: truncated, or not an archive ({error}); remove it, and the same "
                "command downloads it again"
            ) from None
        except NotImplementedError as error:  # a method or a version that zipfile does not know
            raise UserError(f"{archive}: cannot be decompressed ({error})") from None
        (inner / RECORD).write_text(
            json.dumps(about | {"episodes": len(members)}, indent=2) + "\n", encoding="utf-8"
        )
        sync_tree(inner)
        os.rename(inner, folder)
        sync(folder.parent)
    shutil.rmtree(scratch, ignore_errors=True)
    return len(members)


def _episodes(archive: Path, opened: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Returns the archive's episodes by file name.

    Raises:
      UserError: there are none, two have one name, or a path leads out of the archive.
      zipfile.BadZipFile: the end of the archive is missing.
    """
    # Episodes are zip files too: in half an archive zipfile finds the directory of the last
    # complete one.
    if min((member.header_offset for member in opened.infolist()), default=0) > 0:
        raise zipfile.BadZipFile("its directory is missing")
    members: dict[str, zipfile.ZipInfo] = {}
    for member in opened.infolist():
        path = PurePosixPath(member.filename)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\\" in member.filename
            or stat.S_ISLNK(member.external_attr >> 16)
        ):
            raise UserError(
                f"{archive}: has {member.filename!r} in it, a link or a path that leads out of the "
                "folder; nothing was unpacked"
            )
        if member.is_dir() or path.parent.name != "buffer" or path.suffix != ".npz":
            continue
        if path.name in members:
            raise UserError(f"{archive}: has two episodes called {path.name}; nothing was unpacked")
        members[path.name] = member
    if not members:
        raise UserError(
            f"{archive}: has no episodes (buffer/*.npz) among its {len(opened.namelist())} files"
        )
    return members


def _check_size(archive: Path, folder: Path, needed: int) -> None:
    """Raises UserError if episodes of this size are out of proportion, or the disk is too small."""
    if needed > most_unpacked(archive.stat().st_size):
        raise UserError(
            f"{archive}: unpacks to more than {MOST_TIMES} times its size, which no episodes do; "
            "nothing was unpacked"
        )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{archive}: its episodes need {needed:,} bytes, and the disk of {folder} has {free:,} "
            "left; with more room there, the same command resumes"
        )


def _unpack_member(
    archive: Path, opened: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path
) -> None:
    try:
        with opened.open(member) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except NotImplementedError:  # which is a RuntimeError
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError is of an encrypted member.
        raise UserError(
            f"{archive}: {member.filename} in it is damaged "
            f"({str(error) or type(error).__name__}); remove the archive, and the same command "
            "downloads it again"
        ) from None
