"""mkdocs hooks: add the pages outside docs/ to the site, and fix their links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Page outside docs/ -> its name in the site; mkdocs would make a README the first page.
ABOVE = {"README.md": "start.md"} | {
    name: name for name in ("ARCHITECTURE.md", "BENCHMARKS.md", "CHANGELOG.md")
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
DEFINITION = re.compile(r"^(\[[^\]]+\]: )docs/", re.MULTILINE)


def on_files(files, config):
    """Returns the site's files, including the pages outside docs/."""
    for name, site_name in ABOVE.items():
        text = DEFINITION.sub(r"\1", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, site_name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Returns a page's text with links for the site.

    Links into docs/ lose that prefix, links out of docs/ to pages of the site are shortened, and
    other links out of docs/ become plain text.
    """
    source = page.file.src_uri

    def fixed(match: re.Match) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match.group()
        # Relative to the repository's root: pages of docs/ are in that folder, the others are not.
        folder = (
            "" if source in ABOVE.values() else posixpath.join("docs", posixpath.dirname(source))
        )
        repository_path = posixpath.normpath(posixpath.join(folder, path))
        site_path = ABOVE.get(repository_path, repository_path.removeprefix("docs/"))
        if site_path not in files.src_uris:
            return text.strip("![]")
        link = posixpath.relpath(site_path, posixpath.dirname(source) or ".")
        return f"{text}({link}{'#' + anchor if anchor else ''})"

    return LINK.sub(fixed, markdown)
