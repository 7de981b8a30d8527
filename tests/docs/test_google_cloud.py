"""The page that starts from a blank account: gcloud's commands against its recorded help,
launch_tpu's by its own parser."""

import json
import re
import shlex

import pytest

from scripts import launch_tpu
from scripts.tpu import workers
from scripts.tpu.gcloud import Gcloud
from scripts.tpu.slices import GroupSlices, Request
from tests.docs.test_commands import ROOT, commands_of

COMMANDS = commands_of((ROOT / "docs/google_cloud.md").read_text(encoding="utf-8"))
RECORDED = json.loads((ROOT / "tests/scripts/gcloud_flags.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.startswith("gcloud ")]
)
def test_gcloud_has_the_command_and_its_options(command):
    words = shlex.split(command)[1:]
    names = [name for name in RECORDED["commands"] if words[: len(name.split())] == name.split()]
    assert names, "record its help in tests/scripts/gcloud_flags.json"
    known = {*RECORDED["commands"][max(names, key=len)].split(), *RECORDED["everywhere"]}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.startswith("scripts/launch_tpu.sh ")]
)
def test_the_launcher_accepts_the_command(command):
    args, after = launch_tpu._parse(shlex.split(command)[1:])
    request = Request(
        args.name,
        args.slices,
        args.type,
        args.version,
        args.machine_type,
        args.topology,
        args.spot,
        args.flex_start,
        args.reservation,
        shlex.split(args.create_options),
    )
    assert args.api == "compute" or args.machine_type
    if args.verb == "run":
        GroupSlices(Gcloud(args.zone, None), request, []).check()
        known = RECORDED["commands"]["compute instance-templates create"].split()
        assert {option.partition("=")[0] for option in request.options} <= set(known)
    if after:
        assert workers.words_to_run(after)


def test_the_page_deletes_what_it_makes():
    assert "gcloud storage rm --recursive gs://BUCKET" in COMMANDS
    assert any(re.match(r"scripts/launch_tpu.sh delete first ", command) for command in COMMANDS)
