"""Lists the project's recipes."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "configs"


def recipe_list() -> str:
    """Returns a line per recipe: its path and the first line of its header."""
    paths = sorted(FOLDER.rglob("*.yaml"))
    names = [path.relative_to(FOLDER.parent).as_posix() for path in paths]
    width = max(map(len, names), default=0)
    lines = [
        f"  {name:{width}}  {_headline(path)}" for name, path in zip(names, paths, strict=True)
    ]
    return "\n".join(
        [
            "Recipes:",
            *lines,
            "",
            "python train.py --config RECIPE [--section.field value ...]",
            "python train.py --model.path MODEL --data.path FILE     # without a recipe",
            "python train.py --help",
        ]
    )


def _headline(path: Path) -> str:
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
