"""The launcher for TPU slices: its calls of gcloud, answered by a stand-in, and the commands that
it runs on workers, run here."""

import contextlib
import io
import json
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import threading
import types

import pytest

from scripts import launch_tpu
from scripts.restarts import FIRST_PAUSE
from scripts.tpu import gcloud, workers
from scripts.tpu.gcloud import Kind
from tests.conftest import REPOSITORY


class Answers:
    """Replaces gcloud: each call is answered by the first rule whose words all occur in it.

    A rule's answers (exit code, output, error) are given in order; the last one repeats.
    """

    def __init__(self, rules):
        self.rules, self.calls, self.lock = rules, [], threading.Lock()

    def Popen(self, command, **options):
        assert command[0] == "gcloud" and options["stdin"] == subprocess.DEVNULL
        with self.lock:
            self.calls.append(command[1:])
            rule = next(
                (
                    rule
                    for rule in self.rules
                    if all(
                        any(word in argument for argument in command[1:]) for word in rule["words"]
                    )
                ),
                None,
            )
            answer = (0, "", "") if rule is None else rule["answers"][0]
            if rule and len(rule["answers"]) > 1:
                del rule["answers"][0]
        return Finished(*answer)


class Finished(contextlib.nullcontext):
    """A process that has ended."""

    def __init__(self, code, out, error):
        super().__init__(self)
        self.returncode, self.out, self.error = code, out, error
        self.stdout, self.stderr = io.BytesIO(out.encode()), io.StringIO(error)

    def communicate(self):
        return self.out, self.error

    def wait(self):
        return self.returncode


RECIPE = "configs/quickstart.yaml"
QUEUED = ("--zone", "us-east5-a", "--type", "v5p-64", "--version", "v2")
GROUP = ("--zone", "us-east5-a", "--machine-type", "ct6e-standard-4t", "--topology", "4x4")
TRAIN = ("--", "--config", RECIPE)
RUN = ("run", "pod", *QUEUED, *TRAIN)
ABSENT = (1, "", "ERROR: (gcloud.compute) NOT_FOUND: Resource 'x' was not found")
LOST = (
    1,
    "",
    "ERROR: gcloud crashed (ConnectionError): Max retries exceeded with url: "
    "https://tpu.googleapis.com",
)
EXPIRED = (1, "", "ERROR: Reauthentication failed. Please run: gcloud auth login")


def queued(name, error=""):
    """The answer of `queued-resources describe`."""
    return (
        0,
        json.dumps(
            {
                "state": {
                    "state": name,
                    **({"failedData": {"error": {"message": error}}} if error else {}),
                }
            }
        ),
        "",
    )


def node(state="READY"):
    """The answer of `tpu-vm describe`."""
    return 0, json.dumps({"state": state}), ""


def job(*codes, identity=1):
    """The workers' answer to `JOB`."""
    return 0, "".join(f"job host{i} {identity} 7 {code}\n" for i, code in enumerate(codes)), ""


def rules(queue=(), nodes=(), jobs=(), checkpoints=("",), **more):
    """Rules of the stand-in for a queued resource."""
    special = [
        {"words": [word.replace("__", " ")], "answers": list(answers)}
        for word, answers in more.items()
    ]
    return [
        *special,
        {"words": ["queued-resources", "describe"], "answers": list(queue or [queued("ACTIVE")])},
        {"words": ["tpu-vm", "describe"], "answers": list(nodes or [node()])},
        {
            "words": ["scripts.run_status"],
            "answers": [(0, f"{step}\n", "") for step in checkpoints],
        },
        {"words": ["code=lost"], "answers": list(jobs or [job(0)])},
    ]


@pytest.fixture
def launch(monkeypatch, capfd):
    """Returns a function that runs the launcher with these rules and returns its exit code, output
    and error.

    Its attributes: `calls` of gcloud, and `pauses`, the seconds that it would have waited.
    """

    def run(*arguments, answers=None):
        stand_in = Answers(rules() if answers is None else answers)
        run.pauses, run.calls = [], stand_in.calls
        monkeypatch.setattr(workers, "write_archive", lambda path: path.touch())
        monkeypatch.setattr(gcloud, "time", types.SimpleNamespace(sleep=run.pauses.append))
        monkeypatch.setattr(
            gcloud,
            "subprocess",
            types.SimpleNamespace(
                Popen=stand_in.Popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
            ),
        )
        code = launch_tpu.main(list(arguments))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def verbs(calls):
    """The purpose of each call that changes something."""
    purposes = {"uv pip install": "install", "setsid": "start", "tail -c": "follow"}
    changes = []
    for call in calls:
        if "ssh" in call:
            changes += [
                verb
                for words, verb in purposes.items()
                if words in call[call.index("--command") + 1]
            ][:1]
        else:
            changes += [verb for verb in ("create", "delete", "scp") if verb in call]
    return changes


ONCE = ["scp", "install", "start"]


def test_run_creates_installs_starts_and_follows(launch):
    command = ["--config", RECIPE, "--data.sources", "[{path: a b.txt, format: text}]"]
    code, _, _ = launch(
        "run",
        "pod",
        *QUEUED,
        "--spot",
        "--project",
        "p",
        "--create-options",
        "--labels=team=x --network=n",
        "--",
        *command,
        answers=rules(
            [ABSENT, queued("WAITING_FOR_RESOURCES"), queued("PROVISIONING"), queued("ACTIVE")],
            [ABSENT, node("CREATING"), node()],
            [job("running", "running"), job(0, 0)],
        ),
    )
    assert code == 0 and verbs(launch.calls) == ["create", *ONCE, "follow", "follow"]
    create = next(call for call in launch.calls if "create" in call)
    assert " ".join(create) == (
        "compute tpus queued-resources create pod --node-id pod --accelerator-type v5p-64 "
        "--runtime-version v2 --spot --labels=team=x --network=n --zone us-east5-a --project p "
        "--quiet"
    )
    start = next(call for call in launch.calls if "setsid" in " ".join(call))
    words = shlex.split(
        start[start.index("--command") + 1].split(" job train.py ")[1].split(" < ")[0]
    )
    assert "--worker=all" in start and words == command


def test_no_call_can_ask_a_question(launch):
    launch(*RUN)
    assert launch.calls and all("--quiet" in call for call in launch.calls)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (ABSENT[2], Kind.ABSENT),
        (LOST[2], Kind.NETWORK),
        (EXPIRED[2], Kind.LOGIN),
        (
            "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].",
            Kind.NETWORK,
        ),
        (
            "ERROR: Quota limit 'TPUV5PPerProject' has been exceeded. Limit: 0 in region us-east5.",
            Kind.QUOTA,
        ),
        ('ERROR: There is no more capacity in the zone "us-east5-a"', Kind.CAPACITY),
        (
            "ERROR: PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource (or it may "
            "not exist)",
            Kind.LOGIN,
        ),
        ("ERROR: INVALID_ARGUMENT: unknown accelerator type", Kind.OTHER),
    ],
)
def test_failures_of_gcloud_are_distinguished(message, kind):
    assert gcloud.kind_of(message) is kind


@pytest.mark.parametrize(
    ("answer", "exit_code", "words"),
    [
        (EXPIRED, 2, "gcloud auth login"),
        ((1, "", "ERROR: PERMISSION_DENIED: no"), 2, "PERMISSION_DENIED"),
    ],
)
def test_delete_reports_that_gcloud_failed(launch, answer, exit_code, words):
    code, _, error = launch("delete", "pod", "--zone", "z-1-a", answers=rules([answer]))
    assert (
        code == exit_code
        and words in error
        and "delete" not in verbs(launch.calls)
        and "deleted" not in error
    )


def test_delete_without_gcloud_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.launch_tpu", "delete", "pod", "--zone", "z-1-a"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 2 and done.stderr.startswith("error: gcloud is not installed here")


def test_the_shell_command_passes_its_arguments_on_from_any_folder(tmp_path):
    """gcloud is a program here, which prints to both stdout and stderr."""
    path = tmp_path / "gcloud"
    path.write_text('#!/bin/bash\necho warning >&2; echo "$*"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        [REPOSITORY / "scripts/launch_tpu.sh", "stop", "pod", "--zone", "z-1-a"],
        cwd=tmp_path,
        check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 0 and done.stderr == "warning\nlaunch_tpu: stopped the command on pod\n"
    )
    assert done.stdout.startswith("compute tpus tpu-vm ssh pod --zone z-1-a --worker=all")


def test_delete_in_the_wrong_zone_deletes_nothing_and_says_so(launch):
    code, _, error = launch("delete", "pod", "--zone", "z-1-a", answers=rules([ABSENT], [ABSENT]))
    assert (
        code == 2
        and "nothing was deleted: there is no pod in zone z-1-a of gcloud's default project"
        in error
    )


def test_delete_accepts_a_tpu_vm_without_a_queued_resource(launch):
    code, _, error = launch(
        "delete", "pod", "--zone", "z-1-a", answers=rules([ABSENT], [node(), ABSENT])
    )
    assert code == 0 and "deleted TPU VM pod" in error
    deleted = "compute tpus tpu-vm delete pod --zone z-1-a --quiet"
    assert deleted in map(" ".join, launch.calls)


def test_resources_left_after_delete_are_an_error(launch):
    code, _, error = launch("delete", "pod", "--zone", "z-1-a", answers=rules([ABSENT], [node()]))
    assert code == 2 and "pod still exists and is billed" in error


def test_a_lost_network_is_waited_for_with_growing_pauses(launch):
    code, _, error = launch(*RUN, answers=rules([LOST, LOST, LOST, queued("ACTIVE")]))
    assert code == 0 and launch.pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert "Max retries exceeded" in error


def test_an_expired_login_ends_a_run(launch):
    answers = [{"words": ["tpu-vm", "ssh", "longstripe.env"], "answers": [EXPIRED]}, *rules()]
    for stage in (rules([EXPIRED]), answers):
        code, _, error = launch(*RUN, answers=stage)
        assert code == 2 and "gcloud auth login" in error.splitlines()[-1]
        assert not any("create" in call for call in launch.calls) and sum(launch.pauses) == 0


def test_ctrl_c_leaves_the_workers_running(launch, monkeypatch):
    def interrupted(launcher):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_tpu.Launcher, "_print_log", interrupted)
    code, _, error = launch(*RUN, answers=rules(jobs=[job("running")]))
    assert code == 130 and error.endswith("stopped here; the workers continue\n")
    assert not any(workers.STOP in call for call in launch.calls)


def test_a_quota_of_zero_ends_with_the_reason(launch):
    message = "Quota limit 'TPUV5PPerProject' has been exceeded. Limit: 0"
    code, _, error = launch(*RUN, answers=rules([queued("FAILED", message)]))
    assert code == 2 and message in error and "create" not in verbs(launch.calls)
    code, _, error = launch(
        *RUN,
        answers=rules(
            [ABSENT], [ABSENT], create=[(1, "", f"ERROR: RESOURCE_EXHAUSTED: {message}")]
        ),
    )
    assert code == 2 and message in error and verbs(launch.calls) == ["create"]


def test_without_capacity_it_retries_with_growing_pauses(launch):
    none = queued("FAILED", "There is no more capacity in the zone")
    code, _, error = launch(
        "run",
        "pod",
        *QUEUED,
        "--poll",
        "10",
        *TRAIN,
        answers=rules([none] * 4 + [queued("ACTIVE")], [ABSENT] * 4 + [node()]),
    )
    assert code == 0 and error.count("no more capacity") == 2
    assert [pause for pause in launch.pauses if pause in (10, 20)] == [10, 20]


def test_a_preempted_node_under_an_active_queued_resource_is_replaced(launch):
    code, _, error = launch(
        "run",
        "pod",
        *QUEUED,
        "--spot",
        *TRAIN,
        answers=rules(
            (),
            [node(), node("PREEMPTED"), node("PREEMPTED"), ABSENT, ABSENT, node()],
            [job("running"), job(0)],
        ),
    )
    assert code == 0 and "pod is PREEMPTED" in error
    assert verbs(launch.calls) == [*ONCE, "follow", "delete", "create", *ONCE, "follow"]


def test_a_failed_installation_is_retried(launch):
    answers = rules(uv__pip=[(1, "", "ERROR: ssh exited with return code [1]"), (0, "", "")])
    code, _, error = launch(*RUN, answers=answers)
    assert (
        code == 0
        and verbs(launch.calls)[:4] == ["scp", "install"] * 2
        and "the installation failed" in error
    )


@pytest.mark.parametrize(
    ("codes", "starts", "end"),
    [
        ([2], 1, 2),
        ([130], 1, 130),
        ([75, 0], 2, 0),
        ([1, 137, 134, 0], 4, 0),
        ([143] * 3 + [0], 4, 0),
        ([75] * 9, 6, 75),
    ],
)
def test_exit_codes_worth_another_start_are_restarted_until_no_checkpoint_comes(
    launch, codes, starts, end
):
    jobs = [answer for code in codes for answer in [job(code)] * 2]
    code, _, error = launch(*RUN, answers=rules(jobs=jobs))
    assert code == end and verbs(launch.calls).count("start") == starts, error
    if codes == [75] * 9:
        assert "6 starts without a checkpoint" in error and launch.pauses == [15, 30, 60, 120, 240]


def test_a_new_checkpoint_resets_the_count(launch):
    steps = ["", *(str(step) for step in range(1, 40))]
    code, _, _ = launch(*RUN, answers=rules(jobs=[job(137)] * 20 + [job(0)], checkpoints=steps))
    assert (
        code == 0 and verbs(launch.calls).count("start") == 11 and max(launch.pauses) == FIRST_PAUSE
    )


@pytest.mark.parametrize(
    ("codes", "decides"),
    [
        ((75, 2, 143), 2),
        ((75, 134, 75), 134),
        ((143, 75), 75),
        ((0, 0), 0),
        ((0, 75), 75),
        ((130, 75), 130),
    ],
)
def test_the_code_of_the_worker_that_failed_first_decides(codes, decides):
    assert launch_tpu.deciding(codes) == decides


def test_follow_shows_the_last_lines_of_the_worker_that_failed(launch):
    ends = "end host0 75|lost process 1\nend host1 2|first\nend host1 2|error: no such file\n"
    code, out, error = launch(
        "follow",
        "pod",
        "--zone",
        "z-1-a",
        answers=rules(jobs=[job(75, 2)], **{"tail -n": [(0, ends, "")]}),
    )
    assert code == 2 and "ended with 2 on host1" in error
    assert "host1: error: no such file\n" in out and "host0:" not in out


def test_follow_says_that_nothing_runs(launch):
    code, _, error = launch("follow", "pod", "--zone", "z-1-a", answers=rules(jobs=[(0, "", "")]))
    assert code == 2 and "nothing was started on pod" in error


def test_a_line_of_the_log_is_printed_once_after_a_lost_connection(launch):
    answers = [
        {"words": ['!= "55" ] || start=9\n'], "answers": [(0, "55\nthree\n", "")]},
        {"words": ['!= "55" ] || start=15\n'], "answers": [(0, "66\nanother start\n", "")]},
        {"words": ["cat job.id; tail"], "answers": [(255, "55\none\ntwo\n", ""), (0, "", "")]},
        *rules(jobs=[job("running"), job("running"), job(0)]),
    ]
    code, out, _ = launch("follow", "pod", "--zone", "z-1-a", answers=answers)
    assert code == 0 and out == "one\ntwo\nthree\nanother start\n"


def test_files_of_an_earlier_command_on_other_workers_do_not_count():
    jobs = launch_tpu.parse_jobs("job host1 10 7 0\njob host0 20 8 running\njob host2 10 7 0\n")
    assert [(job.host, job.code) for job in jobs] == [("host0", None)]


def test_status_fits_a_screen(launch):
    answers = rules(jobs=[job("running", "running")])
    run_rule = next(rule for rule in answers if rule["words"] == ["scripts.run_status"])
    run_rule["answers"] = [(0, "step         40, 8 s ago\n", "")]
    code, out, _ = launch(
        "status", "pod", "--zone", "z-1-a", "--price-per-hour", "100", *TRAIN, answers=answers
    )
    assert code == 0 and out.splitlines() == [
        "slices       pod: ready",
        "host0        running",
        "host1        running",
        "step         40, 8 s ago",
    ]
    assert any(
        f"scripts.run_status --config {RECIPE} --price-per-hour 100.0" in call[-2]
        for call in launch.calls
    )
    assert launch("status", "pod", "--zone", "z-1-a", answers=rules([ABSENT], [ABSENT]))[0] == 75


def instances(*states):
    """The answer of `list-instances`."""
    listed = [
        {"instance": f".../instances/pod-{i}", "instanceStatus": state}
        for i, state in enumerate(states)
    ]
    return 0, json.dumps(listed), ""


def group_rules(listed, described=((0, "{}", ""),), **more):
    """Rules of the stand-in for a managed group."""
    return [
        {"words": ["managed", "describe"], "answers": list(described)},
        {"words": ["list-instances"], "answers": list(listed)},
        *rules(**more),
    ]


def test_compute_engine_gets_a_policy_a_template_and_a_group(launch):
    code, _, _ = launch(
        "run",
        "pod",
        *GROUP,
        "--spot",
        *TRAIN,
        answers=group_rules(
            [instances("PROVISIONING", "RUNNING"), instances(*["RUNNING"] * 4)],
            [ABSENT, (0, "{}", "")],
        ),
    )
    creations = [call for call in launch.calls if "create" in call]
    assert code == 0 and [call[:5] for call in creations] == [
        ["compute", "resource-policies", "create", "workload-policy", "pod"],
        ["compute", "instance-templates", "create", "pod", "--machine-type"],
        ["compute", "instance-groups", "managed", "create", "pod"],
    ]
    group = creations[2]
    assert (
        group[group.index("--size") + 1] == "4" and "--workload-policy" in group and "bulk" in group
    )
    assert "SPOT" in creations[1]
    # Each instance is reached separately.
    installed = [
        call[2]
        for call in launch.calls
        if "ssh" in call and "uv pip install" in call[call.index("--command") + 1]
    ]
    assert sorted(installed) == ["pod-0", "pod-1", "pod-2", "pod-3"]


def test_a_preempted_instance_is_replaced_with_its_whole_group(launch):
    code, _, error = launch(
        "run",
        "pod",
        *GROUP,
        *TRAIN,
        answers=group_rules(
            [instances(*["RUNNING"] * 4)] * 6
            + [instances("RUNNING", "STOPPED")] * 3
            + [instances(*["RUNNING"] * 4)],
            jobs=[job("running")] * 4 + [job(0)],
        ),
    )
    assert code == 0 and "pod-1 is STOPPED" in error
    deleted = "compute instance-groups managed delete pod --zone us-east5-a --quiet"
    assert deleted in map(" ".join, launch.calls)


def test_each_of_several_slices_knows_its_number(launch):
    groups = [
        {
            "words": ["list-instances", f"pod-{i}"],
            "answers": [
                (0, json.dumps([{"instance": f"x/pod-{i}-a", "instanceStatus": "RUNNING"}]), "")
            ],
        }
        for i in range(2)
    ]
    code, _, _ = launch(
        "start",
        "pod",
        "--slices",
        "2",
        "--zone",
        "us-east5-a",
        "--machine-type",
        "ct6e-standard-4t",
        *TRAIN,
        answers=[*groups, *group_rules([])],
    )
    starts = {call[2]: call[call.index("--command") + 1] for call in launch.calls if "ssh" in call}
    assert code == 0 and set(starts) == {"pod-0-a", "pod-1-a"}
    for number in range(2):
        assert f"export MEGASCALE_SLICE_ID={number}\n" in starts[f"pod-{number}-a"]
        assert "export MEGASCALE_COORDINATOR_ADDRESS=pod-0-a\n" in starts[f"pod-{number}-a"]
    code, _, _ = launch(
        "create",
        "pod",
        *QUEUED,
        "--slices",
        "2",
        answers=rules([ABSENT, queued("ACTIVE")], [ABSENT, node()]),
    )
    create = next(call for call in launch.calls if "create" in call)
    assert create[5:9] == ["--node-count", "2", "--node-prefix", "pod"]


@pytest.mark.parametrize(
    ("worker", "started"), [("1", ["pod-b"]), ("all", ["pod-a", "pod-b"]), ("7", [])]
)
def test_a_command_starts_on_the_chosen_host_of_compute_engine(launch, worker, started):
    """gcloud compute ssh has no --worker: each host is an instance."""
    instances = [{"instance": f"x/pod-{i}", "instanceStatus": "RUNNING"} for i in "ab"]
    answers = [{"words": ["list-instances"], "answers": [(0, json.dumps(instances), "")]}]
    code, _, error = launch(
        "start", "pod", *GROUP, "--worker", worker, *TRAIN, answers=[*answers, *group_rules([])]
    )
    assert [call[2] for call in launch.calls if "ssh" in call] == started
    assert code == (0 if started else 2)
    assert started or "--worker: found 7; pod has the hosts 0, 1\n" in error
    jobs = {"words": ["code=lost"], "answers": [job("running"), job(0)]}
    launch("follow", "pod", *GROUP, "--worker", worker, answers=[*answers, jobs, *group_rules([])])
    followed = [call[2] for call in launch.calls if "tail -c" in " ".join(call)]
    assert set(followed) == set(started[:1])


def test_gcloud_accepts_every_option(launch):
    """As recorded from gcloud's own help; see the head of the file."""
    recorded = json.loads((REPOSITORY / "tests/scripts/gcloud_flags.json").read_text())
    calls = []
    for options in (["--spot"], ["--slices", "2"], ["--create-options", "--reserved"]):
        launch(
            "create",
            "pod",
            *QUEUED,
            *options,
            answers=rules([ABSENT, queued("ACTIVE")], [ABSENT, node()]),
        )
        calls += launch.calls
    for options in (
        (*GROUP, "--spot"),
        (*GROUP, "--flex-start", "4h"),
        (*GROUP, "--reservation", "r"),
    ):
        launch(
            "run",
            "pod",
            *options,
            *TRAIN,
            answers=group_rules([instances(*["RUNNING"] * 4)], [ABSENT, (0, "{}", "")]),
        )
        calls += launch.calls
    launch(*RUN)
    calls += launch.calls
    for api in ("queued", "compute"):
        launch(
            "delete",
            "pod",
            "--zone",
            "us-east5-a",
            "--api",
            api,
            answers=group_rules([instances()], nodes=[node(), ABSENT]),
        )
        calls += launch.calls
    for call in calls:
        name = max(
            (name for name in recorded["commands"] if call[: len(name.split())] == name.split()),
            key=len,
        )
        known = {*recorded["commands"][name].split(), *recorded["everywhere"]}
        passed = [
            word.partition("=")[0]
            for word, before in zip(call, ["", *call], strict=False)
            if word.startswith("--") and before != "--command"
        ]
        assert not set(passed) - known, (name, set(passed) - known)
    assert len({tuple(call[:4]) for call in calls}) > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "required: NAME"),
        (["run", "pod"], "--zone is missing"),
        (["fly", "pod", "--zone", "z"], "unknown verb fly"),
        (["create", "pod", "--zone", "z"], "--type and --version"),
        (["run", "pod", "--zone", "z", "--config", "c"], "option --config"),
        (["start", "pod", "--zone", "z"], "no command was given"),
        (["run", "pod", "--zone"], "--zone: expected one argument"),
        (["start", "pod", "--zone", "z", "--", "make", "test"], "no command was given"),
        (
            ["create", "pod", *GROUP, "--spot", "--flex-start", "4h"],
            "--spot and --flex-start exclude each other",
        ),
        (
            ["create", "pod", *QUEUED, "--flex-start", "4h"],
            "--flex-start only applies to Compute Engine",
        ),
        (["create", "pod", *QUEUED, "--topology", "4x4"], "--topology only applies to Compute"),
        (["create", "pod", *GROUP, "--version", "v2"], "--version only applies to the Cloud TPU"),
        (
            ["create", "pod", *GROUP, "--api", "queued"],
            "--api queued is the Cloud TPU API; pass",
        ),
        (
            ["create", "pod", "--zone", "z", "--machine-type", "n2-standard-4"],
            "found n2-standard-4",
        ),
        (
            ["create", "pod", "--zone", "z", "--type", "tpu7x-16", "--version", "v"],
            "--machine-type tpu7x-standard-4t",
        ),
        (
            ["start", "pod", *QUEUED, "--env", "A=b", *TRAIN],
            "--env: has no effect with start; it is for install, run",
        ),
        (
            ["stop", "pod", *QUEUED, "--worker", "1"],
            "--worker: has no effect with stop; it is for start, follow, run",
        ),
        (
            ["start", "pod", *QUEUED, "--worker", "last", *TRAIN],
            "--worker: found last; expected all, or a host's number",
        ),
        (
            ["run", "pod", *QUEUED, "--env", "NOT_SET_ANYWHERE", *TRAIN],
            "--env: NOT_SET_ANYWHERE is not set here",
        ),
        (
            ["run", "pod", *QUEUED, "--", "--config", "configs/quickstat.yaml"],
            "--config: there is no configs/quickstat.yaml in /",
        ),
        (
            ["run", "pod", *QUEUED, "--", "--run_dir", "r", "--config=configs/quickstat.yaml"],
            "there is no configs/quickstat.yaml",
        ),
    ],
)
def test_mistakes_are_one_line_errors_and_create_nothing(launch, arguments, words):
    code, _, error = launch(*arguments, answers=rules([ABSENT, queued("ACTIVE")]))
    assert code == 2 and words in error and error.count("\n") == 1
    assert "create" not in verbs(launch.calls)


def repository(folder):
    """Makes a git working tree with one committed module."""

    def git(*words):
        subprocess.run(
            ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
        )

    folder.mkdir()
    git("init", "--quiet")
    (folder / "old.py").write_text("")
    (folder / "kept.py").write_text("1")
    (folder / ".gitignore").write_text("ignored.py\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    return folder


def test_install_sends_new_modules_and_removes_deleted_ones(tmp_path):
    root, home = repository(tmp_path / "tree"), tmp_path / "home"
    (home / ".local/bin").mkdir(parents=True)
    uv = home / ".local/bin/uv"
    uv.write_text(
        '#!/bin/bash\n[ "$1" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit 0\n'
    )
    uv.chmod(0o755)

    def install():
        workers.write_archive(home / "longstripe.tar.gz", root)
        subprocess.run(
            ["bash", "-c", workers.INSTALL],
            cwd=home,
            check=True,
            timeout=20,
            env={**os.environ, "HOME": str(home)},
        )
        return {path.name for path in (home / "longstripe").glob("*.py")}

    assert install() == {"old.py", "kept.py"}
    (root / "old.py").unlink()
    (root / "new.py").write_text("")
    (root / "ignored.py").write_text("")
    (home / "longstripe/runs").mkdir()
    assert install() == {"new.py", "kept.py"} and (home / "longstripe/runs").exists(), (
        "a run's files stay"
    )


def test_install_refuses_untracked_data(tmp_path):
    root = repository(tmp_path / "tree")
    with open(root / "chats.jsonl", "wb") as file:
        file.truncate(11 * 2**20)
    with pytest.raises(
        gcloud.Refused, match=r"chats.jsonl \(11 MiB\) would be sent to every worker"
    ):
        workers.files_to_send(root)


def test_a_recipe_that_git_ignores_is_refused(tmp_path):
    root = repository(tmp_path / "tree")
    (root / "ignored.py").write_text("")
    with pytest.raises(gcloud.Refused, match=r"ignored.py is ignored by git"):
        workers.check_recipe(["--config", "ignored.py"], root)
    workers.check_recipe(["--config", "/mnt/shared/mine.yaml"], root)
    workers.check_recipe(["--config=kept.py"], root)


def test_secrets_travel_in_a_file_that_only_their_owner_may_read(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret it's")
    launch("install", "pod", *QUEUED, "--env", "HF_TOKEN", "--env", "A=b c")
    assert all("hf_secret" not in " ".join(call) for call in launch.calls)
    assert any("pod:longstripe.env" in call for call in launch.calls)
    launch("install", "pod", *QUEUED)  # of newer code: the variables stay
    assert not any("longstripe.env" in " ".join(call) for call in launch.calls)
    (tmp_path / "env").write_text(
        workers.environment_file(workers.read_variables(["HF_TOKEN", "A=b c"]))
    )
    shown = subprocess.run(
        ["bash", "-c", f'. {tmp_path}/env; echo "$HF_TOKEN|$A"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "hf_secret it's|b c\n"


@pytest.mark.parametrize(
    ("command", "words", "everywhere"),
    [
        (["--config", "c"], ["train.py", "--config", "c"], True),
        (["python", "train.py", "--config", "c"], ["train.py", "--config", "c"], True),
        (
            ["python", "-m", "scripts.export_hf", "r", "o"],
            ["-m", "scripts.export_hf", "r", "o"],
            False,
        ),
        ([".venv/bin/python", "-m", "eval.needle", "r"], ["-m", "eval.needle", "r"], True),
    ],
)
def test_any_command_of_the_project_is_accepted(command, words, everywhere):
    assert workers.words_to_run(command) == words and workers.on_all_workers(words) is everywhere


@pytest.fixture
def home(tmp_path):
    """A worker's home with a stand-in for Python, which a test writes."""
    folder = tmp_path / "home"
    (folder / "longstripe/.venv/bin").mkdir(parents=True)
    (folder / "longstripe.env").write_text("export SECRET=s\n")

    def python(text):
        path = folder / "longstripe/.venv/bin/python"
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)

    def shell(command):
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            check=False,
            timeout=20,
            capture_output=True,
            text=True,
            env={**os.environ, "HOME": str(folder)},
        )

    return types.SimpleNamespace(folder=folder / "longstripe", python=python, shell=shell)


def wait_for(job_file):
    subprocess.run(
        ["bash", "-c", f"until [ -s '{job_file}' ]; do sleep 0.05; done"], timeout=20, check=True
    )


def test_a_job_outlives_its_shell_and_stores_its_code(home):
    home.python("""if [ "$2" = trainer.xla_flags ]; then echo export FLAGS=1
        else printf '%s|' "$FLAGS" "$SECRET" "$OWN" "$@"; sleep 0.2; exit 7; fi""")
    start = workers.start_command(["train.py", "a b", "$c"], {"OWN": "o"})
    assert home.shell(start).returncode == 0
    wait_for(home.folder / "job.code")
    assert (home.folder / "job.code").read_text() == "7\n"
    assert (home.folder / "job.log").read_text() == "1|s|o|train.py|a b|$c|"
    assert [job.code for job in launch_tpu.parse_jobs(home.shell(workers.JOB).stdout)] == [7]
    assert "7|1|s|o|" in home.shell(workers.ENDS).stdout
    identity = (home.folder / "job.id").read_text()
    whole = "1|s|o|train.py|a b|$c|"
    for known_id, shown in (("", whole), (identity.strip(), whole[2:]), ("9", whole)):
        assert home.shell(workers.log_command(known_id, 2)).stdout == identity + shown


def test_a_job_without_the_compilers_flags_does_not_start(home):
    home.python("[ \"$2\" = trainer.xla_flags ] && { echo 'error: no' >&2; exit 2; }; exit 0")
    done = home.shell(workers.start_command(["train.py"], {}))
    assert (
        done.returncode == 2
        and "error: no" in done.stderr
        and not (home.folder / "job.pid").exists()
    )


def test_a_running_job_is_not_started_twice_and_stop_waits_until_it_has_saved(home):
    home.python("""trap 'sleep 0.5; touch saved; exit 143' TERM
        [ "$1" = -m ] || { echo ready > ready; while true; do sleep 0.1; done; }""")
    start = workers.start_command(["train.py", "a"], {})
    home.shell(start)
    wait_for(home.folder / "ready")  # before that, the stand-in has no trap
    first = (home.folder / "job.pid").read_text()
    assert home.shell(start).returncode == 0 and (home.folder / "job.pid").read_text() == first
    other = home.shell(workers.start_command(["train.py", "b"], {}))
    assert other.returncode == 3 and "another command is running there: train.py a" in other.stderr
    assert [job.code for job in launch_tpu.parse_jobs(home.shell(workers.JOB).stdout)] == [None]
    home.shell(workers.STOP)
    assert (home.folder / "job.code").read_text() == "130\n" and (home.folder / "saved").exists()


def test_workers_install_with_uvs_python_and_no_tool_of_their_image(tmp_path):
    """Cloud TPU's images contain Python 3.10, which JAX no longer supports."""
    home = tmp_path / "home"
    (home / ".local/bin").mkdir(parents=True)
    with tarfile.open(home / "longstripe.tar.gz", "w:gz") as archive:
        archive.add(REPOSITORY / "requirements-tpu.txt", "requirements-tpu.txt")
    (home / ".local/bin/uv").write_text("""#!/bin/bash
        echo "$@" >> ~/called
        if [ "$1" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; else [ -e "${!#}" ]; fi""")
    (home / ".local/bin/uv").chmod(0o755)
    for tool in ("python3", "make", "curl"):
        (tmp_path / tool).write_text("#!/bin/bash\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    for _ in range(2):  # again after a preemption of training alone
        subprocess.run(
            ["bash", "-c", workers.INSTALL],
            cwd=home,
            check=True,
            timeout=20,
            env={"HOME": str(home), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )
    install = "pip install --quiet -r requirements-tpu.txt"
    assert (home / "called").read_text().splitlines() == ["venv --python 3.12", install, install]
