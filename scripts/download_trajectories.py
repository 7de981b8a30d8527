"""Downloads ExoRL's public archives of episodes; continues after an interruption.

    python -m scripts.download_trajectories --domain walker --algorithm proto --output FOLDER

Writes FOLDER/{domain}/{algorithm}/buffer/*.npz, the layout that a recipe's `trajectories.path`
takes. An archive has several GB and is removed after unpacking.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from data.outputs import output_folder
from data.printable import console
from data.trajectories.archives import (
    ADDRESS,
    ALGORITHMS,
    DOMAINS,
    archive_folder,
    download_archive,
)
from trainer import entry
from trainer.options import FreeText, command, option


def run(args: Options) -> None:
    """Downloads and unpacks what is missing."""
    root = Path(args.output)
    for algorithm in args.algorithm:
        # Refuses an unknown name before the first download.
        archive_folder(root, args.domain, algorithm)
    output_folder(root)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), transient=False) as progress:
        for algorithm in args.algorithm:
            name = f"{args.domain}/{algorithm}"
            bar = progress.add_task(name, total=None)
            count = download_archive(
                args.domain,
                algorithm,
                root,
                args.address,
                on_progress=lambda done, size, bar=bar: progress.update(
                    bar, completed=done, total=size
                ),
                on_failure=lambda message, name=name: progress.console.print(
                    f"{name}: {message}", highlight=False
                ),
            )
            outcome = (
                "already exists"
                if count is None
                else f"{count:,} episodes in {root / name / 'buffer'}"
            )
            progress.update(bar, completed=1, total=1, visible=False)
            progress.console.print(f"{name}: {outcome}", highlight=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    domain: str = option(f"one of {', '.join(DOMAINS)}")
    algorithm: tuple[str, ...] = option(f"some of {', '.join(ALGORITHMS)}")
    output: str = option("folder for {domain}/{algorithm}/buffer/*.npz")
    address: FreeText = option(
        "address of the archives or of a mirror; {domain}/{algorithm}.zip is appended", ADDRESS
    )


main = command(Options, run)


if __name__ == "__main__":
    entry.leave(main())
