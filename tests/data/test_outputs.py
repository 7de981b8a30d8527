"""What commands may write, and where."""

import errno
import functools
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from data import outputs
from data.errors import UserError
from data.folders import building
from data.paths import local_folder

OUTPUT_FILE = functools.partial(outputs.output_file, marker=b"of this command")


@pytest.mark.parametrize("check", [outputs.output_folder, OUTPUT_FILE, outputs.new_folder])
def test_an_output_path_is_checked_before_the_work(check, tmp_path):
    """A new path is created as far as needed; a file in its way, or one that would be overwritten,
    is a one-line error."""
    path = tmp_path / "a" / "b"
    assert (
        check(path) == path
        and path.parent.is_dir()
        and path.exists() == (check is outputs.output_folder)
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"results \((Not a directory|File exists)\); name another one"
    ):
        check(tmp_path / "file" / "within")
    full = tmp_path if check is not outputs.output_folder else tmp_path / "file"
    with pytest.raises(UserError, match=str(full)):
        check(full)


def test_only_files_written_by_the_command_are_overwritten(tmp_path):
    file = tmp_path / "config.yaml"
    for content in ("", "made by us: 1"):
        file.write_text(content)
        assert outputs.output_file(file, b"made by us") == file
    file.write_text("model: {}")
    with pytest.raises(
        UserError, match=r"config\.yaml: exists, but was not written by this command"
    ):
        outputs.output_file(file, b"made by us")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"results\.json: exists, but was not written"):
        outputs.results_folder(tmp_path, "mine")


def test_a_full_disk_leaves_the_earlier_results(tmp_path):
    """Neither torn ones, which the next start would take for another program's, nor new beside
    old ones."""
    texts = {"cases.jsonl": "[1]\n" * 9000, "results.json": '{"made by us": 1}\n'}
    outputs.write_texts(tmp_path, texts)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            outputs.write_texts(tmp_path, {"results.json": "{}", "cases.jsonl": "[2]\n" * 9000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts


def test_results_are_written_through_links_and_to_a_pipe(tmp_path, capfd):
    there = tmp_path / "there.json"
    there.write_text("{}")
    (tmp_path / "link.json").symlink_to(there)
    (tmp_path / "other.json").hardlink_to(there)
    for name in ("link.json", "other.json"):
        outputs.write_text(tmp_path / name, name)
        assert there.read_text() == name and there.stat().st_nlink == 2
    assert (tmp_path / "link.json").is_symlink()
    outputs.write_text("/dev/fd/1", "[2]")
    assert capfd.readouterr().out == "[2]"


def test_written_again_a_file_keeps_its_permissions(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.json"
    path.touch(0o640)
    os.utime(path, (1, 1))
    for name in ("a.json", "~/a.json"):
        outputs.write_text(name, name)
        assert path.read_text() == name
    assert path.stat().st_mode & 0o777 == 0o640 and path.stat().st_mtime > 1

    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)  # as for a single file mounted into a container
    outputs.write_text(path, "in place")
    assert path.read_text() == "in place" and os.listdir(tmp_path) == ["a.json"]


def test_another_users_results_are_refused_before_the_work(tmp_path):
    """A running program cannot be written to either, which holds for root too."""
    program = Path(shutil.copy(shutil.which("sleep"), tmp_path / "answers.jsonl"))
    with (
        subprocess.Popen([program, "60"]) as process,
        pytest.raises(UserError, match=rf"^{program}: cannot be written to \(Text file busy\)"),
    ):
        try:
            outputs.check_own(program, b"ELF")
        finally:
            process.kill()
    program.write_text("mine")
    with pytest.raises(UserError, match=rf"^{program}: exists, but was not written by this"):
        outputs.results_folder(tmp_path, "mine")


def test_nothing_is_written_through_a_planted_link(tmp_path):
    """In a run's or an evaluation's folder, such a link could create or replace a file
    elsewhere."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere.json"
    folder.mkdir()
    (folder / "results.json").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"results\.json: leads to .*, outside of its folder"):
        outputs.results_folder(folder, "mine")
    with pytest.raises(UserError, match=r"results\.json: is a link to .*, which does not exist"):
        outputs.output_file(folder / "results.json", b'"about"')
    elsewhere.write_text('{"mine": {}}')
    with pytest.raises(UserError, match=r"results\.json: leads to .*, outside of its folder"):
        outputs.results_folder(folder, "mine")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    (folder / "results.json").unlink()
    assert outputs.results_folder(linked, "mine") == linked


def test_only_an_evaluations_own_picture_is_overwritten(tmp_path):
    from matplotlib.figure import Figure

    picture = tmp_path / "needle.png"
    Figure().savefig(picture, metadata=outputs.PICTURE_METADATA)
    assert outputs.results_folder(tmp_path, "mine", "needle.png") == tmp_path
    for write_foreign in (
        Figure().savefig,
        lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n a photograph"),
    ):
        write_foreign(picture)
        with pytest.raises(UserError, match=r"needle\.png: exists, but was not written"):
            outputs.results_folder(tmp_path, "mine", "needle.png")


@pytest.mark.parametrize(
    "check",
    [
        outputs.output_folder,
        OUTPUT_FILE,
        outputs.new_folder,
        lambda path: outputs.checkpoint_path(path, "run_dir"),
    ],
)
@pytest.mark.parametrize(
    "path", ["gs://b/out", "s3://b/x/y.json", "GS://b/out", Path("gs://b/out"), "hf://datasets/a/b"]
)
def test_an_output_in_a_store_is_refused_by_name(check, path, tmp_path, monkeypatch):
    """Even if pathlib has collapsed the two slashes; a local folder may have a colon in its
    name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^\w+:/.*(gs|s3|GS|hf):// is not supported here"):
        check(path)
    assert not list(tmp_path.iterdir())
    assert outputs.on_this_machine("run:/2").name == "2"


def test_a_link_to_an_empty_folder_is_filled_and_stays(tmp_path):
    """A command builds beside the folder and renames, which would replace the link."""
    big, link = tmp_path / "big", tmp_path / "link"
    big.mkdir()
    link.symlink_to(big)
    out = outputs.new_folder(link)
    with building(out, lambda folder: False) as scratch:
        assert scratch.parent == tmp_path
        (scratch / "file").touch()
    assert link.is_symlink() and (big / "file").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"big", "link"}
    for name, target in (("dangling", tmp_path / "none"), ("loop", tmp_path / "loop")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UserError, match=rf"{name}: is a link to .*{target.name}, which does"):
            outputs.new_folder(tmp_path / name)


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(tmp_path, monkeypatch):
    """A finished folder takes the place of an empty one."""
    with pytest.raises(UserError, match=r"^/proc: is a mount point.* such as /proc/model, would"):
        outputs.new_folder("/proc")
    monkeypatch.chdir(tmp_path)
    for path in (".", "../" + tmp_path.name, tmp_path):
        with pytest.raises(UserError, match=r"is the folder in which this command runs"):
            outputs.new_folder(path)
    assert outputs.new_folder("sub/../other") == Path("sub/../other")


@pytest.mark.parametrize(
    "folder_of", [lambda path: outputs.checkpoint_path(path, "run_dir"), local_folder]
)
def test_a_path_that_is_not_utf_8_is_refused_by_name(folder_of):
    """Orbax and array_record would refuse it after the training, or the tokenizing."""
    with pytest.raises(UserError, match=r"^/x/lat\ufffd: is not UTF-8, which"):
        folder_of(os.fsdecode(b"/x/lat\xe9"))
    assert folder_of("/x/lat\u00e9") == Path("/x/lat\u00e9")


@pytest.mark.parametrize(
    "make",
    [
        outputs.output_folder,
        OUTPUT_FILE,
        outputs.new_folder,
        lambda path: outputs.checkpoint_path(path, "run_dir"),
    ],
)
def test_outputs_go_to_a_home_folder_that_exists(make, tmp_path, monkeypatch):
    """Not to a folder named ~, as in --output=~/x, which a shell leaves as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert make("~/x/y.json") == tmp_path / "home/x/y.json"
    with pytest.raises(UserError, match=r"^~nobody-here/y.json: there is no user nobody-here here"):
        make("~nobody-here/y.json")
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []
