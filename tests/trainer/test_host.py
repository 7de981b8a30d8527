"""The host's memory is that of the smallest control group that contains the process."""

import os

import pytest

from trainer.host import host_bytes

HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "1000000"}, 1000000),
        ("0::/job/step\n", {"job/step/memory.max": "500", "job/memory.max": "1000000"}, 500),
        (
            "0::/\n",
            {"memory.max": "2000000"},
            2000000,
        ),  # a container with a cgroup namespace of its own
        ("0::/../other\n", {"memory.max": "3000"}, 3000),
        (
            "5:cpu,cpuacct:/x\n4:memory:/docker/1\n",
            {"memory/docker/1/memory.limit_in_bytes": "700"},
            700,
        ),
        (
            "4:memory:/docker/1\n",
            {"memory/memory.limit_in_bytes": "900"},
            900,
        ),  # mounted as the root inside a container
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, HOST),
        ("0::/\n", {}, HOST),
        ("", {}, HOST),
    ],
)
def test_control_groups_limit_the_memory(tmp_path, cgroup, files, limit):
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(cgroup)
    assert host_bytes(tmp_path / "groups", tmp_path / "own") == limit


def test_without_control_groups_the_limit_is_the_hosts_memory(tmp_path):
    assert host_bytes(tmp_path, tmp_path / "absent") == HOST
