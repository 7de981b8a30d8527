"""The rooms: imports point down only, every folder of code is a package, and tests mirror the
tree."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> the other rooms that it may import. `model.attention` is a room of its own inside `model`.
MAY_IMPORT = {
    "model.attention": set(),
    "model": {"model.attention"},
    "data": set(),
    "trainer": {"data", "model", "model.attention"},
    "planning": {"trainer", "data", "model", "model.attention"},
    "eval": {"planning", "trainer", "data", "model", "model.attention"},
    "scripts": {"eval", "planning", "trainer", "data", "model", "model.attention"},
    "train": {"eval", "planning", "trainer", "data", "model", "model.attention"},
}
# The floors of the room `model`, the lowest first: a module imports from its own floor and from
# those below.
FLOORS = (
    ("checks", "adapter", "rope_config", "families"),
    ("config", "config_checks", "lengths"),
    (
        "codecs",
        "dropout",
        "frozen",
        "grouped",
        "linear",
        "loss",
        "quantized_weights",
        "rope",
        "sharding",
    ),
    (
        "memory.chunked",
        "memory.options",
        "memory.period",
        "memory.policies",
    ),  # needed to run a layer in pieces
    (
        "feedforward",
        "experts",
        "modules",
        "declarations",
        "padding",
        "weights",
        "embed_and_head",
        "parameters",
    ),
    ("layer",),
    ("memory",),  # the runners
    ("transformer",),
    ("agentic", "cache", "language_model"),
    ("decode",),
)
# Module of another project -> the files of ours that import it, so that its changes touch one
# place.
ONE_HOME = {
    "tensorflow_datasets": {"data/record_store.py"},
    "orbax": {"trainer/checkpoint/items.py", "trainer/checkpoint/saving.py"},
    "jax.experimental.topologies": {"planning/topology.py"},
}


def tracked(pattern: str) -> list[Path]:
    """Returns the repository's files that match a git pattern, tracked or new, without deleted
    ones."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        pattern,
    ]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).exists()]


def code_files() -> list[Path]:
    """Returns the Python files of the rooms and train.py."""
    return [path for path in tracked("*.py") if room_of(module_of(path)) is not None]


def module_of(path: Path) -> str:
    """Returns the dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """Returns the room that a module is in, the narrowest one; None for other packages."""
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imported_modules(path: Path) -> set[str]:
    """Returns the dotted names that a file imports, at any depth of its code; relative names are
    resolved."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join(base + (node.module.split(".") if node.module else []))
            # `from model import attention` imports the module model.attention.
            modules |= {f"{origin}.{alias.name}" for alias in node.names}
    return modules


def upward_imports(path: Path) -> list[str]:
    """Returns the modules that a file imports from rooms that its own room may not import."""
    own = room_of(module_of(path))
    allowed = MAY_IMPORT[own] | {own, None}
    return sorted(module for module in imported_modules(path) if room_of(module) not in allowed)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_down_only(room):
    files = [path for path in code_files() if room_of(module_of(path)) == room]
    assert files
    upward = {
        str(path.relative_to(ROOT)): modules for path in files if (modules := upward_imports(path))
    }
    assert upward == {}


@pytest.mark.parametrize("module", ONE_HOME)
def test_libraries_that_change_often_have_one_home(module):
    files = {
        str(path.relative_to(ROOT))
        for path in code_files()
        if any(f"{name}.".startswith(f"{module}.") for name in imported_modules(path))
    }
    assert files == ONE_HOME[module]


def floor_of(module: str) -> int:
    """Returns the floor of the room `model` that a module or a name in it is on, by the longest
    entry of FLOORS."""
    entries = [
        (len(entry), number)
        for number, floor in enumerate(FLOORS)
        for entry in floor
        if f"{module}.".startswith(f"model.{entry}.")
    ]
    assert entries, f"{module} is on no floor"
    return max(entries)[1]


def test_imports_inside_the_model_point_down_only():
    upward = {}
    for path in [
        path
        for path in tracked("model/*.py")
        if room_of(module_of(path)) == "model" and module_of(path) != "model"
    ]:
        imported = [
            module
            for module in imported_modules(path)
            if room_of(module) == "model" and module != "model"
        ]
        if above := sorted(
            module for module in imported if floor_of(module) > floor_of(module_of(path))
        ):
            upward[str(path.relative_to(ROOT))] = above
    assert upward == {}


def test_every_folder_of_code_is_a_package():
    folders = {path.parent for path in tracked("*.py") if path.parent != ROOT}
    assert [
        str(folder.relative_to(ROOT))
        for folder in sorted(folders)
        if not (folder / "__init__.py").exists()
    ] == []


def test_tests_mirror_the_tree():
    of_all = {Path("soak"), Path("mutants"), Path("fixtures")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in tracked("tests/*.py")} - of_all
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
