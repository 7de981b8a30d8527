"""Every imported package is declared in a requirements file."""

import ast
import re
import sys
from importlib import metadata

from tests.conftest import REPOSITORY
from tests.test_rooms import tracked

OWN = {"data", "eval", "model", "planning", "scripts", "tests", "train", "trainer"}
# Imported if installed, with a message otherwise.
OPTIONAL = {"wandb", "ringattention", "flash-attn-interface", "liger-kernel"}


def normal(name: str) -> str:
    """Returns a package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """Returns the packages named in the requirements files, without pins that serve jax's own
    extras."""
    lines = [
        line
        for path in REPOSITORY.glob("requirements*.txt")
        if path.name != "requirements-evidence.txt"
        for line in path.read_text().splitlines()
    ]
    return {normal(re.match(r"[\w.-]+", line).group()) for line in lines if re.match(r"\w", line)}


def imported() -> dict[str, str]:
    """Returns the third-party modules that tracked files import, each with a file that does."""
    modules = {}
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules.update({name.split(".")[0]: str(path) for name in names})
    return {
        module: path
        for module, path in modules.items()
        if module not in OWN | sys.stdlib_module_names
    }


def test_every_import_is_declared():
    packages, allowed = metadata.packages_distributions(), declared() | OPTIONAL
    undeclared = {
        module: path
        for module, path in imported().items()
        if not {normal(name) for name in packages.get(module, [module])} & allowed
    }
    assert not undeclared
