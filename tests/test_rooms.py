"""The layers of packages: imports point down only, every folder of code is a package, and tests
mirror the tree."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Package -> the other packages that it may import. `model.attention` counts as a package of its own
# inside `model`.
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
# The internal layers of the package `model`, lowest first: a module imports from its own layer and
# those below. They are the rows of ARCHITECTURE.md's table of modules.
LAYERS = [
    re.findall(r"`(\w+)`", row)
    for row in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| [^`|]+ \|$",
        (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]
# Third-party module -> the only files of ours that import it, so that its changes affect one place.
ONE_HOME = {
    "tensorflow_datasets": {"data/record_store.py"},
    "orbax": {"trainer/checkpoint/items.py", "trainer/checkpoint/saving.py"},
    "jax.experimental.topologies": {"planning/topology.py"},
}


@functools.cache
def tracked(pattern: str) -> list[Path]:
    """Returns the repository's files that match a git pattern, tracked or new, without deleted
    ones."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    command += ["--", pattern]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).exists()]


def code_files() -> list[Path]:
    """Returns the Python files of the packages and train.py."""
    return [path for path in tracked("*.py") if package_of(module_of(path)) is not None]


def module_of(path: Path) -> str:
    """Returns the dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str | None:
    """Returns the innermost package that a module is in; None outside of them."""
    packages = [
        package for package in MAY_IMPORT if module == package or module.startswith(f"{package}.")
    ]
    return max(packages, key=len, default=None)


@functools.cache
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
    """Returns the modules that a file imports from packages that its own package may not import."""
    own = package_of(module_of(path))
    allowed = MAY_IMPORT[own] | {own, None}
    return sorted(module for module in imported_modules(path) if package_of(module) not in allowed)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down_only(package):
    files = [path for path in code_files() if package_of(module_of(path)) == package]
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


def layer_of(module: str) -> int:
    """Returns the layer of the package `model` that a module, or a name in it, belongs to."""
    layers = [number for number, layer in enumerate(LAYERS) if module.split(".")[1] in layer]
    assert len(layers) == 1, f"ARCHITECTURE.md lists {module} in the layers {layers}"
    return layers[0]


def test_every_module_of_the_model_is_in_a_layer():
    modules = {
        module.split(".")[1]
        for path in tracked("model/*.py")
        if (module := module_of(path)) != "model" and package_of(module) == "model"
    }
    assert sorted(name for layer in LAYERS for name in layer) == sorted(modules)


def test_imports_inside_the_model_point_down_only():
    upward = {}
    for path in [
        path
        for path in tracked("model/*.py")
        if package_of(module_of(path)) == "model" and module_of(path) != "model"
    ]:
        imported = [
            module
            for module in imported_modules(path)
            if package_of(module) == "model" and module != "model"
        ]
        if above := sorted(
            module for module in imported if layer_of(module) > layer_of(module_of(path))
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
    spanning = {Path("soak"), Path("mutants"), Path("fixtures")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in tracked("tests/*.py")} - spanning
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
