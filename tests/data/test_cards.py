"""Configurations of a data set's card: which files are read, as datasets.load_dataset reads them."""

import json
import os
from pathlib import Path

import fsspec
import pytest

from data import cards
from data.encode import EncodingRules
from data.errors import UserError
from data.prepare import prepare
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

FILES = (
    "main/train-0.jsonl",
    "main/train-1.jsonl",
    "main/test-0.jsonl",
    "socratic/train-0.jsonl",
    "both/a.jsonl",
    "both/b.jsonl",
    "deep/er/train.jsonl",
    "extra.jsonl",
)
MAIN = {
    "config_name": "main",
    "data_files": [
        {"split": "test", "path": "main/test-*"},
        {"split": "train", "path": ["main/train-0.jsonl", "main/train-[1-9].jsonl"]},
    ],
}
SOCRATIC = {"config_name": "socratic", "data_dir": "socratic"}
A = {"config_name": "a", "data_files": "both/a*"}
B = {"config_name": "b", "data_files": ["both/b*"]}
DEEP = {"config_name": "deep", "data_files": "**/er/*.jsonl"}


def card(*configurations: dict) -> str:
    return f"---\n{json.dumps({'license': 'mit', 'configs': configurations})}\n---\n# A set\n"


def folder_of(path: Path, readme: str) -> Path:
    """Returns a new folder like a clone of a data set on the hub."""
    for number, name in enumerate(FILES):
        turns = [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "b"}]
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"messages": turns}) + "\n")
    (path / "README.md").write_text(readme)
    return path


def names_of(folder: str | Path) -> list[str]:
    base = Path(folder).name
    return [str(file).split(f"/{base}/", 1)[1] for file in Source(str(folder)).files()]


def theirs(folder: Path, name: str | None = None) -> list[str]:
    """Returns the files that `datasets.load_dataset` reads."""
    datasets = pytest.importorskip("datasets")
    builder = datasets.load_dataset_builder(
        str(folder), name, cache_dir=str(folder.parent / "cache")
    )
    return sorted(
        os.path.relpath(file, folder)
        for files in builder.config.data_files.values()
        for file in files
    )


@pytest.mark.parametrize("default", [MAIN, SOCRATIC, A, DEEP], ids=lambda one: one["config_name"])
def test_the_default_configuration_is_read_alone(tmp_path, default):
    listed = [one | {"default": one is default} for one in (MAIN, SOCRATIC, A, B, DEEP)]
    folder = folder_of(tmp_path / "set", card(*listed))
    assert names_of(folder) == theirs(folder)
    note = Source(str(folder)).notes(is_held_out=True)[0]
    assert note.startswith(
        f"reads its default configuration `{default['config_name']}` alone; not read: {folder}/"
    )
    assert names_of(folder / "socratic") == ["train-0.jsonl"]


@pytest.mark.parametrize(
    ("only", "others"),
    [
        (MAIN, "both/a.jsonl and 4 more"),
        (SOCRATIC, "both/a.jsonl and 6 more"),
        (DEEP | {"config_name": "default"}, "both/a.jsonl and 6 more"),
        ({"config_name": "default", "data_files": "**"}, None),
        ({"config_name": "default", "data_files": "**/*.jsonl"}, None),
    ],
    ids=["main", "folder", "deep", "all", "pattern"],
)
def test_an_only_configuration_is_read_alone(tmp_path, only, others):
    """Such as push_to_hub writes; the other files may be older."""
    folder = folder_of(tmp_path / "set", card(only))
    assert names_of(folder) == [name for name in theirs(folder) if name != "README.md"]
    note = f"reads its only configuration `{only['config_name']}`; not read: {others}"
    assert Source(str(folder)).notes(is_held_out=True) == ([note] if others else [])


def test_two_default_configurations_are_refused(tmp_path):
    folder = folder_of(tmp_path / "set", card(MAIN | {"default": True}, A | {"default": True}, B))
    with pytest.raises(UserError, match="has 3 configurations, and 2 of them are the default one"):
        names_of(folder)


def test_of_several_configurations_without_a_default_the_paths_are_named(tmp_path):
    """And each of the paths is read as that configuration."""
    pytest.importorskip("datasets")
    folder = folder_of(tmp_path / "set", card(MAIN, SOCRATIC, A, B, DEEP))
    with pytest.raises(ValueError, match="Config name is missing"):
        theirs(folder)
    with pytest.raises(UserError) as caught:
        names_of(folder)
    places = ("main", "socratic", "both/a*", "both/b*")
    named = ", ".join(f"{folder}/{place}" for place in places)
    assert str(caught.value) == (
        f"{folder}: has 5 configurations, and none of them is the default one; the path of one would "
        f"work: {named}, {folder} (the files of `deep`)"
    )
    for place, name in zip(places, ["main", "socratic", "a", "b"], strict=True):
        files = [str(file) for file in Source(f"{folder}/{place}").files()]
        assert [os.path.relpath(file, folder) for file in files] == theirs(folder, name)


@pytest.mark.parametrize(
    ("files", "configurations", "note"),
    [
        (["main/train-0.jsonl"], [MAIN, SOCRATIC], None),
        (["main/train-0.jsonl"], [MAIN, SOCRATIC | {"default": True}], None),
        (["mine.jsonl"], [MAIN, SOCRATIC], None),
        (["both/a.jsonl", "both/b.jsonl"], [A | {"default": True}, B, MAIN], "{}/both/b*"),
        (
            ["both/a.jsonl", "both/b.jsonl", "mine.jsonl"],
            [A | {"default": True}, B],
            "{}/both/b*, nor mine.jsonl of no configuration",
        ),
    ],
)
def test_configurations_without_files_do_not_count(tmp_path, files, configurations, note):
    """As in a copy of one of them, `hf download --include 'main/*'`."""
    folder = tmp_path / "set"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    (folder / "README.md").write_text(card(*configurations))
    assert names_of(folder) == (["both/a.jsonl"] if note else files)
    start = "reads its default configuration `a` alone; not read: "
    expected = [start + note.format(folder)] if note else []
    assert Source(str(folder)).notes(is_held_out=True) == expected


@pytest.mark.parametrize("target", ["../README.md", "gone.md"])
def test_a_card_that_is_a_link_to_elsewhere_is_not_read(tmp_path, target):
    folder = folder_of(tmp_path / "set", "")
    (tmp_path / "README.md").write_text(card(MAIN, SOCRATIC))
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(target)
    assert names_of(folder) == sorted(FILES)
    assert Source(str(folder)).notes(is_held_out=True) == [cards.UNKNOWN]


def test_a_store_has_the_same_configurations(tmp_path):
    store = fsspec.filesystem("memory")
    folder = folder_of(tmp_path / "set", card(MAIN | {"default": True}, SOCRATIC))
    store.put(str(folder), "memory://cards", recursive=True)
    assert names_of("memory://cards") == names_of(folder)
    store.pipe("memory://cards/README.md", card(MAIN, SOCRATIC).encode())
    with pytest.raises(UserError, match="would work: memory://cards/main, memory://cards/soc"):
        names_of("memory://cards")
    assert names_of("memory://cards/main") == names_of(folder / "main")
    store.rm("/cards", recursive=True)


@pytest.mark.parametrize(
    ("readme", "is_known"),
    [
        ("# A set\n", True),
        ("---\nlicense: mit\n---\n", True),
        ("---\n---\n", True),
        (card({"config_name": "x", "data_files": 3}, MAIN), False),
        (card({"data_files": "a*"}, MAIN), False),
        (card({"config_name": "x", "data_files": "https://a.org/both/a.jsonl"}), False),
        ("---\nconfigs: [x, y]\n---\n", False),
        ("---\nconfigs: {\n---\n", False),
        ("---\n[1]\n---\n", False),
        (f"---\nconfigs: {'[' * 5000}\n---\n", False),
        (f"---\na: &a [1]\nb: {'*a' * 9}\n---\n", False),
        ("---\n" + "a: b\n" * 900_000, False),
    ],
)
def test_without_configurations_all_files_are_read(tmp_path, readme, is_known):
    folder = folder_of(tmp_path / "set", readme)
    assert names_of(folder) == sorted(FILES)
    notes = Source(str(folder)).notes(is_held_out=True)
    assert notes == ([] if is_known else [cards.UNKNOWN])


@pytest.mark.parametrize(
    "pattern",
    [
        "**",
        "*",
        "**/*",
        "deep/**",
        "**/train*",
        "*/*-?.jsonl",
        "**/er/**/*",
        "main/t[!r]*",
        "extra*",
    ],
)
def test_patterns_are_those_of_datasets(tmp_path, pattern):
    datasets = pytest.importorskip("datasets")
    folder = folder_of(tmp_path / "set", "")
    found = datasets.data_files.resolve_pattern(pattern, str(folder))
    expected = {os.path.relpath(file, folder) for file in found} - {"README.md"}
    assert {name for name in FILES if cards.matches(name, pattern)} == expected


def test_notes_about_a_path_are_those_of_this_path(tmp_path):
    """The same files prepared before from another path have the same prepared folder."""
    folder = folder_of(tmp_path / "set", card(MAIN | {"default": True}, SOCRATIC))
    copy = folder_of(tmp_path / "copy", "")
    tokenizer = Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer")

    def prepared(path: Path):
        sources = Sources((Source(str(path), template="vicuna_v1.1"),))
        return prepare(sources, tokenizer, EncodingRules(64), tmp_path / "prepared", progress=False)

    first, second, again = prepared(copy / "main"), prepared(folder), prepared(copy / "main")
    assert first.folder == second.folder == again.folder
    assert [len(each.report.notes) for each in (first, second, again)] == [1, 2, 1]
    assert second.report.notes[0].startswith("reads its default configuration")
    assert all("also reads test-0.jsonl" in each.report.notes[-1] for each in (first, second))
    (written,) = json.loads((first.folder / "report.json").read_text())
    assert written["path"] == str(copy / "main") and written["path_notes"] == first.report.notes
