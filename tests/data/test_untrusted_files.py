"""Files of a folder are read only if they are inside it, also through links."""

import os
import random
from pathlib import Path

import pytest

from data.errors import UserError
from data.source_files import find
from data.untrusted_files import MAX_JSON_DEPTH, check_within, check_writable, file_within


def snapshot(root: Path, name: str = "models--org--name") -> Path:
    """Returns a snapshot folder of the Hugging Face cache whose one file links to a blob."""
    folder, blobs = root / name / "snapshots" / "0123", root / name / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abcd").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/abcd")
    return folder


def test_plain_files_and_links_inside_are_read(tmp_path):
    (tmp_path / "model/inner").mkdir(parents=True)
    (tmp_path / "model/inner/real").write_text("x")
    (tmp_path / "model/linked").symlink_to("inner/real")
    (tmp_path / "by_link").symlink_to("model")
    for folder in (tmp_path / "model", tmp_path / "by_link"):
        assert file_within(folder, "linked").read_text() == "x"
        assert file_within(folder, "inner/real").read_text() == "x"
        assert file_within(folder, "missing") is None
        assert file_within(folder, "inner") is None, "a folder is returned as a file"


def test_a_snapshot_may_link_only_to_its_own_blobs(tmp_path):
    folder = snapshot(tmp_path)
    assert file_within(folder, "config.json").read_text() == "{}"
    (tmp_path / "models--org--name/refs").write_text("secret")
    (folder / "merges.txt").symlink_to("../../refs")
    with pytest.raises(UserError, match=r"merges\.txt: leads to .*refs, outside of its folder"):
        file_within(folder, "merges.txt")
    other = snapshot(tmp_path, "models--org--other")
    (other / "merges.txt").symlink_to(folder.parents[1] / "blobs/abcd")
    with pytest.raises(UserError, match="outside of its folder"):
        file_within(other, "merges.txt")


def test_blobs_that_are_a_link_lead_outside(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/id_rsa").write_text("secret")
    folder = tmp_path / "models--a--b/snapshots/0"
    folder.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").symlink_to(tmp_path / "secrets")
    (folder / "merges.txt").symlink_to("../../blobs/id_rsa")
    with pytest.raises(UserError, match="outside of its folder"):
        file_within(folder, "merges.txt")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "tokenizer.json", "config.json"])
def test_what_git_lfs_has_not_fetched_is_not_read(tmp_path, name):
    """A clone without `git lfs` has such files; as texts they would be trained on."""
    (tmp_path / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    )
    readers = [lambda: file_within(tmp_path, name)]
    if name.startswith("a."):
        readers = [lambda: find(tmp_path, (".jsonl", ".txt", ".parquet"))]
        readers.append(lambda: find(tmp_path / name, (".jsonl",)))
    for reader in readers:
        with pytest.raises(UserError, match=rf"{name}: only Git LFS's pointer to the file; `git "):
            reader()


def test_special_files_are_refused_with_printable_names(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is neither a file nor a folder"):
        file_within(tmp_path, "pipe")
    (tmp_path / "evil\x1b[2J").symlink_to("/etc/passwd")
    with pytest.raises(UserError) as error:
        file_within(tmp_path, "evil\x1b[2J")
    assert "\x1b" not in str(error.value)


def test_links_out_of_a_data_folder_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("{}")
    assert len(find(tmp_path / "data", (".jsonl",)).files) == 1
    (tmp_path / "secret.jsonl").write_text("{}")
    (tmp_path / "data/b.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(
        UserError, match=r"b\.jsonl: leads to .*secret\.jsonl, outside of its folder"
    ):
        find(tmp_path / "data", (".jsonl",))
    assert len(find(tmp_path / "data/b.jsonl", (".jsonl",)).files) == 1, (
        "a link that the user names is refused"
    )


def test_random_chains_of_links_are_judged_by_their_end(tmp_path):
    """500 folders with random links: only those that end inside are read, judged independently of
    the code."""
    draw = random.Random(0)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    for number in range(500):
        folder = tmp_path / f"{number}"
        (folder / "sub").mkdir(parents=True)
        (folder / "real").write_text("ours")
        # The end of a chain decides.
        ends = {
            "real": True,
            "../outside/secret": False,
            f"../{number}/real": True,
            str(tmp_path / "outside/secret"): False,
            "sub/../real": True,
            "sub/../../outside/secret": False,
            f"../{(number + 1) % 500}x": False,
            "nowhere": True,
        }
        target, inside = draw.choice(list(ends.items()))
        for hop in range(draw.randrange(4)):
            (folder / f"hop{hop}").symlink_to(target)
            target = f"hop{hop}"
        (folder / "merges.txt").symlink_to(target)
        if inside:
            found = file_within(folder, "merges.txt")
            assert found is None or found.read_text() == "ours"
        else:
            with pytest.raises(UserError, match="outside of its folder"):
                file_within(folder, "merges.txt")
        check_within(folder, folder / "real")


def _nested(depth):
    return [_nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [{"b": "x\ud800"}]}, "a.0.b holds half of a surrogate pair"),
        ({"a": {"\udfff": 1}}, r"'\\udfff' is no field's name"),
        ({"a": _nested(MAX_JSON_DEPTH)}, "a.0.0 is nested more than 100 deep"),
        ({"a": _nested(MAX_JSON_DEPTH - 1), "b": ["\U0001f600", None, True, 1.5]}, None),
    ],
)
def test_json_that_could_not_be_written_again_is_refused(value, problem):
    if problem is None:
        check_writable(value, "file")
    else:
        with pytest.raises(UserError, match=f"^file: {problem}"):
            check_writable(value, "file")
