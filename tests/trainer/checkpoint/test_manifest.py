"""The manifest of a small folder: its content, and the damage that `verify` names."""

import errno
import hashlib
import json

import pytest

from data.errors import UserError
from trainer.checkpoint import manifest as module
from trainer.checkpoint.commit import Files
from trainer.checkpoint.manifest import (
    MANIFEST,
    DamagedError,
    ForeignError,
    fingerprint,
    manifest,
    read_manifest,
    seal,
    verify,
)

CONTENTS = {"model/a": b"12", "model/deep/b": b"345", "optimizer/a": b"", "z": b"z"}


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    records = seal(tmp_path, list(CONTENTS))
    (tmp_path / MANIFEST).write_bytes(manifest(["optimizer", "model"], records, {"w": (2, 3)}))
    return tmp_path


def test_it_lists_every_file_with_size_and_digest(folder):
    content = verify(folder)
    assert content == read_manifest(folder) and content["items"] == ["model", "optimizer"]
    assert content["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in CONTENTS.items()
    }
    assert list(content["files"]) == sorted(CONTENTS) and content["shapes"] == {"w": [2, 3]}
    assert "shapes" not in json.loads(manifest([], {}))
    (folder / "a note").write_text("beside the checkpoint")
    verify(folder)


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path_factory):
    (folder / "elsewhere").symlink_to(tmp_path_factory.mktemp("other"))
    with pytest.raises(UserError, match="elsewhere"):
        verify(folder)


def test_a_file_missing_in_a_bucket_is_named_without_reading_any(s3, monkeypatch):
    folder = "s3://bucket/checkpoint"
    files, records = Files(folder), {name: {"size": 2, "sha256": ""} for name in CONTENTS}
    for name, content in CONTENTS.items():
        files.write(name, content)
    files.write(MANIFEST, manifest(["model"], records))
    monkeypatch.setattr(Files, "record", None)
    assert len(verify(folder, digests=False)["files"]) == len(CONTENTS)
    files.write(MANIFEST, manifest(["model"], {**records, "model/c": records["z"]}))
    with pytest.raises(DamagedError, match="model/c is missing"):
        verify(folder, digests=False)


def test_fingerprints_distinguish_contents(folder):
    first = fingerprint(folder)
    assert len(first) == 32 and first == fingerprint(folder)
    (folder / "z").write_bytes(b"y")
    (folder / MANIFEST).write_bytes(
        manifest(["optimizer", "model"], seal(folder, list(CONTENTS)), {"w": (2, 3)})
    )
    assert fingerprint(folder) != first


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name, data in CONTENTS.items()
        for damage in ("longer", "shorter", "other bytes", "missing")
        if data or damage in ("longer", "missing")
    ],
)
def test_damage_is_named_when_the_file_is_read(folder, name, damage):
    data = CONTENTS[name]
    if damage == "missing":
        (folder / name).unlink()
    else:
        changed = {"longer": data + b"1", "shorter": data[:-1], "other bytes": b"?" + data[1:]}
        (folder / name).write_bytes(changed[damage])
    with pytest.raises(DamagedError, match=f"{name} is "):
        verify(folder)
    raised = []
    for share in range(3):
        try:
            verify(folder, share=(share, 3))
        except DamagedError:
            raised.append(share)
    assert raised == [sorted(CONTENTS).index(name) % 3], "each file belongs to one process"
    item = name.split("/")[0]
    with pytest.raises(DamagedError):
        verify(folder, items=[item])
    verify(folder, items={"model", "optimizer", "z"} - {item})


def test_the_first_of_several_damaged_files_is_named(folder):
    for name in ("z", "model/deep/b"):
        (folder / name).unlink()
    with pytest.raises(DamagedError, match="model/deep/b is missing"):
        verify(folder)


def resigned(content):
    """A manifest with arbitrary content and a matching checksum."""
    return module._serialize({key: value for key, value in content.items() if key != "sha256"})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda text: text[:-2], DamagedError, "not JSON"),
        (lambda text: text.replace(b"\n ", b"\n  ", 1), DamagedError, "own checksum differs"),
        (lambda text: text.replace(b'"size": 2', b'"size": 3'), DamagedError, "own checksum"),
        (lambda _: b"[1]", ForeignError, "another kind of"),
        (lambda _: b'{"format": "x"}', ForeignError, "another kind of"),
        (lambda text: resigned(json.loads(text) | {"format": "x"}), ForeignError, "format 'x'"),
        (lambda text: resigned(json.loads(text) | {"version": 0}), ForeignError, "version 0;"),
    ],
)
def test_unusable_manifests_raise_distinct_errors(folder, change, error, words):
    (folder / MANIFEST).write_bytes(change((folder / MANIFEST).read_bytes()))
    with pytest.raises(error, match=words):
        read_manifest(folder)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(folder):
    (folder / MANIFEST).unlink()
    with pytest.raises(ForeignError, match="not a checkpoint of this project"):
        verify(folder)
    (folder / MANIFEST).mkdir()
    with pytest.raises(DamagedError, match="cannot be read"):
        verify(folder)


@pytest.mark.parametrize("method", ["read", "record"])
def test_a_failing_mount_is_not_reported_as_damage(folder, monkeypatch, method):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Files, method, fails)
    with pytest.raises(OSError, match="Input/output error"):
        verify(folder)
