"""ExoRL's archives from a local server: unpacked completely or not at all, with faults named."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
import types
import zipfile

import numpy as np
import pytest

from data.errors import UserError
from data.trajectories.archives import ALGORITHMS, download_archive, unpack_archive
from data.trajectories.builder import prepare_trajectories
from data.trajectories.episodes import episode_files
from tests.data.loopback import serving

from .made import TASK, episode


def archive_of(members, compression=zipfile.ZIP_STORED):
    """Returns the bytes of a zip archive of (name, content) pairs."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as opened:
        for name, content in members:
            opened.writestr(name, content)
    return file.getvalue()


def episodes_of(count):
    """Returns (name, content) of episodes and a video next to them, named like ExoRL's."""
    members = []
    for number in range(count):
        file = io.BytesIO()
        np.savez_compressed(file, **episode(number + 1)._asdict())
        members.append((f"buffer/20220101T{number:06}_{number}_20.npz", file.getvalue()))
    return [("buffer/", b""), *members, ("video/0.mp4", b"moving pictures")]


def unpacked(tmp_path, content):
    """Unpacks the bytes of an archive into tmp_path/cartpole/proto."""
    (tmp_path / "cartpole").mkdir(exist_ok=True)
    archive = tmp_path / "cartpole" / "proto.zip"
    archive.write_bytes(content)
    return unpack_archive(archive, tmp_path / "cartpole" / "proto", {"url": "x"})


def test_a_downloaded_archive_gives_episodes(tmp_path):
    with serving(archive_of(episodes_of(3))) as server:
        assert download_archive("cartpole", "proto", tmp_path, server.address) == 3
        assert [path for path, _ in server.requests] == ["/cartpole/proto.zip"]
        assert (
            download_archive("cartpole", "proto", tmp_path, server.address) is None
            and len(server.requests) == 1
        )
    folder = tmp_path / "cartpole" / "proto"
    assert sorted(path.name for path in folder.iterdir()) == ["buffer", "downloaded.json"]
    assert json.loads((folder / "downloaded.json").read_text())["episodes"] == 3
    assert not (folder.parent / "proto.zip").exists()
    prepared = prepare_trajectories(tmp_path, TASK.name, tmp_path / "prepared")
    assert len(prepared) == 3 and not prepared.dropped
    np.testing.assert_array_equal(prepared.episode(1).observation, episode(2).observation)


def test_compressed_archives_and_outer_folders_are_unpacked(tmp_path):
    members = [(f"exorl/cartpole/proto/{name}", content) for name, content in episodes_of(2)]
    assert unpacked(tmp_path, archive_of(members, zipfile.ZIP_DEFLATED)) == 2
    assert len(episode_files(tmp_path, TASK)) == 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_archive_is_named(tmp_path, share):
    """Even if it ends right after an episode, which is a zip file itself."""
    whole = archive_of(episodes_of(3))
    with pytest.raises(UserError, match=r"proto.zip: truncated, or not an archive .*; remove it"):
        unpacked(tmp_path, whole[: int(share * len(whole))])
    assert not (tmp_path / "cartpole" / "proto").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_episode_is_named(tmp_path, compression):
    members = [("buffer/a_0_20.npz", b"a" * 5000), ("buffer/b_1_20.npz", bytes(range(250)) * 20)]
    content = bytearray(archive_of(members, compression))
    start = content.index(b"buffer/b_1_20.npz") + len("buffer/b_1_20.npz")
    content[start + 30 : start + 40] = b"0123456789"
    with pytest.raises(UserError, match=r"proto.zip: buffer/b_1_20.npz in it is damaged"):
        unpacked(tmp_path, bytes(content))
    assert not (tmp_path / "cartpole" / "proto").exists() and not list(
        tmp_path.glob("cartpole/*/buffer")
    )


def test_an_unknown_compression_method_is_named(tmp_path):
    """Another download would have it too."""
    content = bytearray(archive_of(episodes_of(1)[1:2]))
    for place in (8, content.rindex(b"PK\x01\x02") + 10):
        content[place] = 9  # Deflate64
    with pytest.raises(UserError, match=r"proto.zip: cannot be decompressed \(That compression"):
        unpacked(tmp_path, bytes(content))


def link(name, target):
    """Returns a zip member that is a symbolic link."""
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member, target


@pytest.mark.parametrize(
    "member",
    [
        ("../../buffer/evil_0_20.npz", b""),
        ("/buffer/evil_0_20.npz", b""),
        ("buffer/..\\evil_0_20.npz", b""),
        link("buffer/evil_0_20.npz", "/etc/passwd"),
    ],
    ids=["upwards", "absolute", "backslash", "link"],
)
def test_nothing_is_written_outside_of_the_folder(tmp_path, member):
    with pytest.raises(UserError, match=r"evil_0_20.npz' in it, a link or a path that leads out"):
        unpacked(tmp_path, archive_of([*episodes_of(1), member]))
    assert not list(tmp_path.rglob("evil*")) and not list(tmp_path.rglob("*_20.npz"))


def test_an_archive_without_episodes_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no episodes \(buffer/\*.npz\) among its 1 files"):
        unpacked(tmp_path, archive_of([("readme.txt", b"x")]))
    with pytest.raises(UserError, match="has two episodes called a_0_20"):
        unpacked(
            tmp_path, archive_of([("x/buffer/a_0_20.npz", b"x"), ("y/buffer/a_0_20.npz", b"x")])
        )


def test_too_little_disk_space_is_reported_before_unpacking(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(UserError, match=r"need [\d,]+ bytes, and the disk of .* has 100 left"):
        unpacked(tmp_path, archive_of(episodes_of(2)))


def test_an_archive_out_of_proportion_is_not_unpacked(tmp_path):
    content = archive_of([("x/buffer/a_0_20.npz", bytes(1 << 25))], zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="unpacks to more than 200 times its size"):
        unpacked(tmp_path, content)
    assert not (tmp_path / "cartpole" / "proto").exists()


def test_leftovers_of_interrupted_unpacking_are_not_data(tmp_path):
    left = tmp_path / "cartpole" / "proto.unpacking" / "whole" / "buffer"
    left.mkdir(parents=True)
    (left / "a_9_20.npz").write_bytes(b"half")
    with pytest.raises(UserError, match="found no episodes"):
        episode_files(tmp_path, TASK)
    assert unpacked(tmp_path, archive_of(episodes_of(2))) == 2
    assert not left.exists() and len(episode_files(tmp_path, TASK)) == 2


def test_a_users_folder_is_left_alone(tmp_path):
    (tmp_path / "cartpole" / "proto" / "buffer").mkdir(parents=True)
    with pytest.raises(UserError, match="proto: exists, and was not made by this command"):
        download_archive("cartpole", "proto", tmp_path)


@pytest.mark.parametrize(
    ("domain", "algorithm", "message"),
    [
        (
            "quadruped",
            "proto",
            "--domain: found 'quadruped', needs one of walker, cheetah, cartpole, jaco",
        ),
        ("walker", "ppo", f"--algorithm: found 'ppo', needs some of {', '.join(ALGORITHMS)}"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(tmp_path, domain, algorithm, message):
    with pytest.raises(UserError, match=message):
        download_archive(domain, algorithm, tmp_path)


def command(tmp_path, server, *algorithms):
    return [
        sys.executable,
        "-m",
        "scripts.download_trajectories",
        "--domain",
        "cartpole",
        "--algorithm",
        *algorithms,
        "--output",
        str(tmp_path),
        "--address",
        server.address,
    ]


def test_a_killed_download_command_resumes(tmp_path, repository):
    """The server holds the first connection open after half of the file, until the process is
    killed."""
    content = archive_of(episodes_of(40))
    with serving(content) as server:
        server.stalls = [len(content) // 2]
        process = subprocess.Popen(command(tmp_path, server, "proto"), cwd=repository)
        part = tmp_path / "cartpole" / "proto.zip.part"
        for _ in range(600):
            if part.exists() and part.stat().st_size == len(content) // 2:
                break
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        server.stalled.set()
        finished = subprocess.run(
            command(tmp_path, server, "proto"), cwd=repository, capture_output=True, text=True
        )
        assert server.ranges == [None, f"bytes={len(content) // 2}-"]
        assert "cartpole/proto: 40 episodes in" in finished.stdout
        missing = subprocess.run(
            command(tmp_path, server, "ppo"), cwd=repository, capture_output=True, text=True
        )
    assert missing.returncode == 2 and missing.stderr.startswith(
        "error: --algorithm: found 'ppo', needs some of aps"
    )
    assert len(episode_files(tmp_path, TASK)) == 40
