"""The pages: links resolve, commands, flags, files and names exist, and no page grows too long."""

import dataclasses
import importlib
import importlib.util
import re
import shlex
import typing
from pathlib import Path

import pytest

from trainer.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "notes" / "robustness.md"]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
OWN_PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *GUIDES]
MOST_LINES = {"README.md": 120} | {path.relative_to(ROOT).as_posix(): 150 for path in GUIDES}
ARCHITECTURE_WORDS = 1500
TENSORS = ("model.layers", "model.embed_tokens", "model.norm")  # Hugging Face's names, not ours

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
COMMAND = re.compile(r"python -m ([\w.]+)")
FLAG = re.compile(r"--([a-z_]+(?:\.[a-z_]+)+)")
FILE = re.compile(
    r"(?<![\w/.])((?:configs|data|docs|eval|model|planning|scripts|tests|trainer)/[\w./-]*\w)(?![\w*{<(])"
)
TESTS = re.compile(r"`pytest ([^`]+)`")
NAME = re.compile(
    r"`((?:data|eval|model|planning|scripts|trainer|mesh|attention|memory|optimizer|train|checkpoint|logging|"
    r"evaluate|distributed)(?:\.\w+)+)"
)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """Returns a page without the comments that name results."""
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"))


def is_field(name: str) -> bool:
    """Returns whether `section.field`, or a field of a field, is in a recipe's schema."""
    section = RunConfig
    for part in name.split("."):
        fields = typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        if part not in fields:
            return False
        section = fields[part]
        # For a tuple of sections, such as data.sources, the fields are those of its items.
        if typing.get_origin(section) is tuple:
            section = typing.get_args(section)[0]
    return True


def is_module(name: str) -> bool:
    """Returns whether a module of this dotted name can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_code(name: str) -> bool:
    """Returns whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    count = max(
        (count for count in range(1, len(parts) + 1) if is_module(".".join(parts[:count]))),
        default=0,
    )
    if not count:
        return False
    value = importlib.import_module(".".join(parts[:count])) if count < len(parts) else None
    for part in parts[count:]:
        fields = getattr(value, "__dataclass_fields__", {})
        if not (hasattr(value, part) or part in fields):
            return False
        value = getattr(value, part, None)
    return True


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_relative_links_resolve(path):
    links = [
        link.partition("#")[0]
        for pair in LINK.findall(path.read_text(encoding="utf-8"))
        for link in pair
        if link
    ]
    assert [
        link for link in links if link and "://" not in link and not (path.parent / link).exists()
    ] == []


@pytest.mark.parametrize("path", OWN_PAGES, ids=page_id)
def test_commands_exist(path):
    assert [name for name in COMMAND.findall(text_of(path)) if not is_module(name)] == []


@pytest.mark.parametrize("path", OWN_PAGES, ids=page_id)
def test_flags_exist(path):
    assert [flag for flag in FLAG.findall(text_of(path)) if not is_field(flag)] == []


@pytest.mark.parametrize("path", OWN_PAGES, ids=page_id)
def test_named_files_exist(path):
    assert [name for name in FILE.findall(text_of(path)) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "path", [path for path in OWN_PAGES if path.name != "CHANGELOG.md"], ids=page_id
)
def test_names_in_code_font_exist(path):
    """Names such as `memory.remat` or `model.attention.attend` are fields of a recipe or names in
    the code."""
    names = [
        name
        for name in NAME.findall(text_of(path))
        if not ((ROOT / name).exists() or name.startswith(TENSORS))
    ]
    assert [name for name in names if not (is_field(name) or is_code(name))] == []


def missing_tests(text: str) -> list[str]:
    """Returns a text's pytest commands whose file, or whose words after -k, name no test."""
    missing = []
    for command in TESTS.findall(text):
        words = shlex.split(command)
        paths = [ROOT / word for word in words if word.startswith("tests/")]
        files = [file for path in paths for file in (path, *path.rglob("test_*.py"))]
        code = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        names = re.findall(r"^def (test_\w+)", code, re.MULTILINE)
        chosen = words[words.index("-k") + 1].split(" or ") if "-k" in words else ["test"]
        if not all(any(word in name for name in names) for word in chosen):
            missing.append(command)
    return missing


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_tests_exist(path):
    assert missing_tests(text_of(path)) == []


def test_a_name_that_no_test_has_is_found():
    assert missing_tests(
        "`pytest tests/docs/test_pages.py -k 'stays_short or forever'`, `pytest tests/docs -k site`"
        " and `pytest tests/docs/test_page.py`"
    ) == ["tests/docs/test_pages.py -k 'stays_short or forever'", "tests/docs/test_page.py"]


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_page_stays_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


def test_the_architecture_stays_short():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= ARCHITECTURE_WORDS


def test_the_contracts_are_where_the_architecture_lists_them():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+)` \|", text_of(ROOT / "ARCHITECTURE.md"), re.MULTILINE
    )
    assert len(rows) >= 10
    contracts = [f"{module}.{name}" for names, module in rows for name in re.findall(r"\w+", names)]
    assert [contract for contract in contracts if not is_code(contract)] == []
