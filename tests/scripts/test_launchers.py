"""The launchers for Slurm and Kubernetes, shellcheck, and the compilers' flags. test_launch_tpu.py
covers Cloud TPU."""

import json
import math
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jsonschema
import pytest
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from model.config import TransformerConfig
from planning.plan import DEFAULT_RECIPE, DoesNotFit, Job, check_fits
from planning.topology import topology_devices
from tests.conftest import REPOSITORY
from trainer import xla_flags
from trainer.host import host_bytes

SCRIPTS = sorted(
    path
    for path in [
        *(REPOSITORY / "scripts").rglob("*.sh"),
        *(REPOSITORY / "scripts").glob("*.sbatch"),
        REPOSITORY / ".ci/run",
    ]
)


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# Replaces srun: starts two ranks as srun would, and stores its own options.
SRUN = """#!/bin/bash
here=$(dirname "$0")
while [[ $1 == --* ]]; do echo "$1" >> "$here/options"; shift; done
for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done
exit ${CODE:-0}
"""


@pytest.fixture
def sbatch(tmp_path):
    """Returns a function that runs the batch script in a folder whose commands are stand-ins.

    The function returns the finished process; `told` holds the calls of scontrol, `ran` the
    programs of the tasks.
    """
    executable(tmp_path / "srun", SRUN)
    executable(tmp_path / "squeue", "#!/bin/bash\necho ${STATE:-RUNNING}\n")
    executable(tmp_path / "scontrol", f'#!/bin/bash\necho "$@" >> {tmp_path}/told\n')
    executable(
        tmp_path / "python",
        f"""#!/bin/bash
        case "$*" in
          *xla_flags*) [ -z "$NO_FLAGS" ] && echo export FLAGS=1 || {{ echo 'error: no plan' >&2;
          exit 2; }} ;; *run_status*) [ -z "$NO_STORE" ] || exit "$NO_STORE"; echo "$CHECKPOINT" ;;
          *restarts*) PYTHONPATH={REPOSITORY} exec {sys.executable} -c 'import sys, time
time.sleep = lambda seconds: print(f"slept {{seconds}}", file=sys.stderr)
from scripts import restarts
sys.exit(restarts.main(sys.argv[1:]))' "${{@:3}}" ;;
          *) echo "rank $SLURM_PROCID" "$@" "$JAX_LOCAL_DEVICE_IDS" "$FLAGS" | tee -a {tmp_path}/ran
          ;;
        esac""",
    )

    def run(*arguments, **variables):
        env = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "PYTHON": str(tmp_path / "python"),
            "SLURM_JOB_ID": "17",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_ON_NODE": "96",
            **variables,
        }
        return subprocess.run(
            [REPOSITORY / "scripts/launch_slurm.sbatch", *arguments],
            env=env,
            check=False,
            timeout=60,
            capture_output=True,
            text=True,
        )

    run.folder = tmp_path
    return run


def test_slurm_starts_one_process_per_node_with_all_its_gpus_cpus_and_memory(sbatch):
    done = sbatch("--config", "a b.yaml")
    assert done.returncode == 0, done.stderr
    assert (sbatch.folder / "options").read_text().split() == [
        "--kill-on-bad-exit=1",
        "--label",
        "--cpus-per-task=96",
    ]
    for rank in range(2):
        log = (sbatch.folder / f"longstripe-17-{rank}.log").read_text()
        assert log == f"rank {rank} train.py --config a b.yaml 0,1,2,3 1\n"
    head = (REPOSITORY / "scripts/launch_slurm.sbatch").read_text()
    assert all(
        f"#SBATCH {option}\n" in head
        for option in ("--mem=0", "--ntasks-per-node=1", "--requeue", "--exclusive")
    )


def test_slurm_refuses_several_tasks_on_a_node(sbatch):
    """As torch's users start them: each would take all of the node's GPUs."""
    done = sbatch("--config", "c", SLURM_NTASKS_PER_NODE="4")
    assert done.returncode == 2 and not (sbatch.folder / "ran").exists()
    assert done.stderr == (
        "error: --ntasks-per-node: found 4, needs 1: one task uses all GPUs of its node\n"
    )
    assert sbatch("--config", "c", SLURM_NTASKS_PER_NODE="1").returncode == 0


def test_slurm_passes_a_container_to_pyxis(sbatch):
    sbatch("--config", "c", CONTAINER="registry#longstripe:1.0", CONTAINER_MOUNTS="/data:/data")
    assert (sbatch.folder / "options").read_text().split()[-3:] == [
        "--container-image=registry#longstripe:1.0",
        "--container-workdir=/longstripe",
        "--container-mounts=/data:/data",
    ]


def test_slurm_does_not_train_without_the_compilers_flags(sbatch):
    done = sbatch("--config", "c", NO_FLAGS="1")
    assert (
        done.returncode == 2
        and "error: no plan" in done.stderr
        and not (sbatch.folder / "ran").exists()
    )


def test_slurm_requeues_exit_codes_worth_another_start(sbatch):
    """While a job is being cancelled it is COMPLETING, and Slurm would accept `scontrol requeue`
    for it too."""
    scontrol_calls = sbatch.folder / "told"
    for code, state, requeued in (
        (0, "RUNNING", False),
        (2, "RUNNING", False),
        (130, "RUNNING", False),
        (1, "RUNNING", True),
        (75, "RUNNING", True),
        (134, "RUNNING", True),
        (135, "RUNNING", True),  # SIGBUS: a file on a vanished mount, or a full /dev/shm
        (137, "RUNNING", True),
        (143, "RUNNING", True),
        (143, "COMPLETING", False),
    ):
        scontrol_calls.unlink(missing_ok=True)
        (sbatch.folder / "longstripe-17.starts").unlink(missing_ok=True)
        assert sbatch("--config", "c", CODE=str(code), STATE=state).returncode == code
        assert scontrol_calls.exists() is requeued, code
    assert "#SBATCH --signal=TERM@" in (REPOSITORY / "scripts/launch_slurm.sbatch").read_text()


SAVES = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(int(sys.argv[1]), save)
print("trains", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_what_a_task_prints_after_slurms_signal_is_in_its_log(tmp_path, name):
    """Slurm signals all processes of a step, also the one that copies the lines."""
    text = (REPOSITORY / "scripts/launch_slurm.sbatch").read_text()
    [line] = re.findall(r"bash -c \\\n +'(log=.*)' bash", text)
    number = str(getattr(signal, name).value)
    task = subprocess.Popen(
        ["bash", "-c", line, "bash", str(tmp_path / "job"), sys.executable, "-c", SAVES, number],
        env={**os.environ, "SLURM_PROCID": "0"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = tmp_path / "job-0.log"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (log.exists() and "trains" in log.read_text()):
        time.sleep(0.1)
    os.killpg(task.pid, int(number))
    assert task.wait(30) == 143
    while time.monotonic() < deadline and "saved" not in log.read_text():
        time.sleep(0.1)  # tee ends last
    assert log.read_text() == "trains\nsaved\n"


def test_slurm_survives_a_temporarily_unresponsive_controller_and_store(sbatch):
    """Otherwise a moment's failure of either would end a job for good, silently."""
    executable(sbatch.folder / "sleep", "#!/bin/bash\n")
    executable(sbatch.folder / "squeue", "#!/bin/bash\nexit 1\n")
    executable(
        sbatch.folder / "scontrol",
        f"""#!/bin/bash
        echo "$@" >> {sbatch.folder}/told
        [ $(wc -l < {sbatch.folder}/told) = "$ANSWERS" ]""",
    )
    scontrol_calls = sbatch.folder / "told"
    for answers, tries, last in (("3", 3, False), ("9", 4, True)):
        scontrol_calls.unlink(missing_ok=True)
        done = sbatch("--config", "c", CODE="75", ANSWERS=answers, NO_STORE="75")
        assert done.returncode == 75 and len(scontrol_calls.read_text().splitlines()) == tries
        assert ("error: the job could not be queued again" in done.stderr) is last
    assert (sbatch.folder / "ran").read_text().count("rank 0") == 2, "it still trained"
    assert "2 starts" not in done.stderr and "start 2 since" in done.stderr, "counted"


def test_slurm_gives_up_after_several_starts_without_a_checkpoint(sbatch):
    ends = [
        sbatch("--config", "c", CODE="75", RESTARTS="2", CHECKPOINT=step)
        for step in ("", "", "40", "40", "40", "40")
    ]
    assert [done.returncode for done in ends] == [75, 75, 75, 75, 75, 2]
    assert "3 starts without one after the checkpoint of step 40" in ends[-1].stderr
    assert [done.stderr.count("slept") for done in ends] == [
        0,
        1,
        0,
        1,
        1,
        0,
    ] and "slept 30" in ends[4].stderr


def test_slurms_processes_find_all_gpus_of_their_node(tmp_path):
    """Under Slurm's variables JAX would by default give each task the GPU with its local rank: the
    first one."""
    ask = (
        "import jax; from trainer.run.cluster import join\n"
        "from trainer.config.schema import DistributedConfig\n"
        "join(DistributedConfig(), simulated=False, run='run')\n"
        "print(jax.config.values['jax_cuda_visible_devices'])"
    )
    env = {
        **os.environ,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "JAX_LOCAL_DEVICE_IDS": "0,1,2,3",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=REPOSITORY,
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "0,1,2,3"


def test_the_users_flags_come_last(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.xla_flags", "gpu"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_dump_to=/dev/null"},
        timeout=60,
    )
    line, share, pinned = done.stdout.splitlines()
    assert shlex.split(line)[1] == "XLA_FLAGS=" + " ".join(
        [*map(str, xla_flags.FLAGS["gpu"]), "--xla_dump_to=/dev/null"]
    )
    assert share == "export XLA_CLIENT_MEM_FRACTION=0.95"
    assert 0 < int(pinned.rpartition("=")[2]) < host_bytes() / 2**30


H100_PLAN = {"topology": "h100:8", "peak_gib": 74.9, "host_gib": 128.0}


@pytest.mark.parametrize(
    ("changes", "host_gib", "environment", "settings"),
    [
        # 1.1 x 128 GiB x 8 GPUs; a plan with little host memory keeps XLA's default of 64 GiB;
        # several hosts count once.
        (
            {},
            2000,
            {},
            {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1127"},
        ),
        (
            {"host_gib": 0.0},
            2000,
            {},
            {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64"},
        ),
        (
            {"topology": "h100:4x2"},
            2000,
            {},
            {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "282"},
        ),
        (
            {},
            1200,
            {},
            {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1080"},
        ),
        (
            {},
            2000,
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8"},
            {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1127"},
        ),
        ({}, 2000, {"XLA_CLIENT_MEM_FRACTION": ".8", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}, {}),
    ],
)
def test_a_plan_sets_how_much_memory_jax_may_take(changes, host_gib, environment, settings):
    assert xla_flags.gpu_memory(H100_PLAN | changes, host_gib, environment) == settings


def test_without_a_plan_jax_may_pin_nine_tenths_of_the_host():
    assert xla_flags.gpu_memory(None, 1000, {})["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "900"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_gib": 75.3}, ("75.30 GiB of each h100", "may take 75.19", "0.95")),
        ({"host_gib": 8000.0}, ("64000 GiB of pinned memory", "8 GPUs", "--host-gib")),
        ({"topology": "v5p:2x2x2"}, ("a plan for v5p:2x2x2", "h100")),
        ({"peak_gib": None}, ("found no compiled plan in",)),
    ],
)
def test_a_plan_that_needs_more_than_the_machine_has_ends_the_launcher(tmp_path, changes, words):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"longest": H100_PLAN | changes}))
    script = f'set -e; eval "$({shlex.quote(sys.executable)} -m trainer.xla_flags gpu --plan {plan})"; echo started'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in ("error: --plan: ", *words)), done.stderr


def test_a_plan_fills_no_more_of_a_gpu_than_the_launchers_allow():
    """A step of 76 GiB on an H100, which has 79.1 GiB, of which JAX takes 75.2."""
    sizes = {"peak": 76.0, "host": 0.0}
    with pytest.raises(
        DoesNotFit, match=r"needs 76.00 GiB of 75.19 of what JAX may take, 0.95 of a GPU's"
    ):
        check_fits(Job(DEFAULT_RECIPE, TransformerConfig.preset("tiny"), "h100:8"), sizes, {})
    check_fits(
        Job(DEFAULT_RECIPE, TransformerConfig.preset("tiny"), "h100:8"),
        {"peak": 75.0, "host": 0.0},
        {},
    )


@pytest.fixture(params=["jobset.yaml", "jobset_gpu.yaml"])
def jobset(request):
    return yaml.safe_load((REPOSITORY / "scripts/kubernetes" / request.param).read_text())


def test_jobsets_have_only_the_fields_of_their_release(jobset):
    jsonschema.validate(
        jobset, json.loads((REPOSITORY / "tests/scripts/jobset_0.12.0.json").read_text())
    )


def test_the_jobsets_are_complete_and_their_recipes_exist(jobset):
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container, hosts = pod["containers"][0], job["parallelism"]
    args, devices = container["args"], container["resources"]["limits"]
    mesh = yaml.safe_load((REPOSITORY / args[args.index("--config") + 1]).read_text())["mesh"]
    assert hosts == job["completions"]
    if "google.com/tpu" in devices:
        chips = math.prod(
            map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
        )
        assert hosts == chips // devices["google.com/tpu"] and mesh["sequence"] == chips
    else:
        assert args[args.index("--distributed.num_processes") + 1] == str(hosts)
        name = f"{jobset['metadata']['name']}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.{jobset['metadata']['name']}:"
        assert args[args.index("--distributed.coordinator") + 1].startswith(name)
        assert any(
            volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"]
        )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert not container["image"].endswith(":latest") and ":" in container["image"]


def test_only_exit_code_2_fails_a_jobset_for_good_and_maintenance_does_not_count(jobset):
    """The messages are the Job controller's (Kubernetes 1.33)."""
    rules = jobset["spec"]["failurePolicy"]["rules"]
    conditions = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"][
        "rules"
    ]
    assert conditions == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]

    def action(reason, message):
        return next(
            (
                rule["action"]
                for rule in rules
                if reason in rule["onJobFailureReasons"]
                and any(
                    re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
                )
            ),
            "RestartJobSet",
        )

    pod = "pod default/longstripe-slice-0-3-abcde"
    exit_2 = (
        f"Container longstripe for {pod} failed with exit code 2 matching FailJob rule at index 0"
    )
    assert action("PodFailurePolicy", exit_2) == "FailJobSet"
    moved = f"{pod.capitalize()} has condition DisruptionTarget matching FailJob rule at index 1"
    assert action("PodFailurePolicy", moved) == "RestartJobSetAndIgnoreMaxRestarts"
    assert (
        action("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        == "RestartJobSet"
    )  # 75, 137, ...


def test_the_container_counts_its_starts_and_needs_the_compilers_flags(tmp_path):
    executable(
        tmp_path / "python",
        """#!/bin/bash
        echo "$FLAGS" "$@" >> "$(dirname "$0")/ran"
        case "$*" in *xla_flags*) [ -z "$NO_FLAGS" ] || exit 2; echo export FLAGS=1 ;; *run_status*)
        [ -z "$NO_STORE" ] || exit 75; echo 40 ;; *restarts*) exit "${TOO_MANY:-0}" ;; esac""",
    )

    def run(*arguments, **variables):
        (tmp_path / "ran").unlink(missing_ok=True)
        env = {**os.environ, "PYTHON": str(tmp_path / "python"), "PLATFORM": "cuda", **variables}
        done = subprocess.run(
            [REPOSITORY / "scripts/kubernetes/entrypoint.sh", *arguments],
            env=env,
            check=False,
            timeout=60,
        )
        return done.returncode, (tmp_path / "ran").read_text().splitlines()

    flags, train = " -m trainer.xla_flags gpu", "1 train.py --config a b"
    counted = [
        "1 -m scripts.run_status --checkpoint --config a b",
        "1 -m scripts.restarts gs://b/starts --checkpoint 40 --longest-pause 120",
    ]
    assert run("--config", "a b") == (0, [flags, train])
    assert run("--config", "a b", STARTS="gs://b/starts", JOB_COMPLETION_INDEX="0") == (
        0,
        [flags, *counted, train],
    )
    assert run("--config", "a b", STARTS="gs://b/starts", JOB_COMPLETION_INDEX="3") == (
        0,
        [flags, train],
    )
    assert run("--config", "a b", STARTS="gs://b/starts", SLICE="1") == (0, [flags, train])
    assert run("--config", "a b", STARTS="gs://b/starts", TOO_MANY="2") == (2, [flags, *counted])
    unknown = [words.replace("--checkpoint 40", "--checkpoint ") for words in counted]
    assert run("--config", "a b", STARTS="gs://b/starts", NO_STORE="1") == (
        0,
        [flags, *unknown, train],
    )
    assert run("--config", "a b", NO_FLAGS="1") == (2, [flags])
    assert run("python", "-m", "scripts.export_hf", "r", "o") == (
        0,
        [flags, "1 -m scripts.export_hf r o"],
    )


def test_the_image_is_small_pinned_and_not_run_as_root():
    docker = (REPOSITORY / "scripts/kubernetes/Dockerfile").read_text()
    assert (
        "USER 1000\n" in docker
        and "--no-cache-dir" in docker
        and '"tini"' in docker
        and ":latest" not in docker
    )
    assert os.access(REPOSITORY / "scripts/kubernetes/entrypoint.sh", os.X_OK)
    tools = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        ["hadolint", REPOSITORY / "scripts/kubernetes/Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": tools},
    )
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_lock_holds_every_requirement_in_its_range(platform):
    """`make lock` updates it."""
    lock = dict(
        line.split("==")
        for line in (REPOSITORY / f"requirements-{platform}.lock").read_text().split("\n")
        if line and not line.startswith("#")
    )
    lock = {canonicalize_name(name): version.split(" ")[0] for name, version in lock.items()}
    names = [f"requirements-{platform}.txt", "requirements.txt"]
    for line in "\n".join((REPOSITORY / name).read_text() for name in names).splitlines():
        text = line.partition("#")[0].strip()
        if text and not text.startswith("-r"):
            requirement = Requirement(text)
            assert requirement.specifier.contains(
                lock.get(canonicalize_name(requirement.name), "0")
            ), f"{text}: make lock"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_reports_nothing(script):
    done = subprocess.run(
        ["shellcheck", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("platform", xla_flags.FLAGS)
def test_the_compilers_accept_every_flag(platform):
    """An unknown flag ends the process; every flag has a reason."""
    # The CPU's jaxlib also parses the GPU's flags; libtpu parses its own when the compiler is
    # loaded.
    ask = (
        "import jax; jax.devices()"
        if platform != "tpu"
        else (
            "from jax.experimental import topologies; "
            "topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2')"
        )
    )
    joined = " ".join(map(str, xla_flags.FLAGS[platform]))
    for flags, known in ((joined, True), ("--xla_no_such_flag=1", False)):
        env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", xla_flags.VARIABLES[platform]: flags}
        process = subprocess.run(
            [sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=False
        )
        assert (process.returncode == 0) == known, process.stderr[-500:]
    assert all(flag.why and flag.name.startswith("xla_") for flag in xla_flags.FLAGS[platform])


@pytest.mark.parametrize(
    "slice_", ["v3:4x4", "v4:2x2x2", "v5e:4x4", "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x2"]
)
def test_each_generations_compiler_accepts_its_flags(slice_):
    """libtpu accepts more names than each compiler: a v5e default makes every compilation for v5p
    fail."""
    devices = topology_devices(slice_)
    x = jax.ShapeDtypeStruct(
        (256, 256), jnp.bfloat16, sharding=NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    )
    gathered = NamedSharding(Mesh(devices, "x"), PartitionSpec())
    lowered = jax.jit(lambda x: x @ x, out_shardings=gathered).lower(x)
    lowered.compile(
        compiler_options={
            flag.name: flag.value for flag in xla_flags.flags("tpu", slice_.split(":")[0])
        }
    )
    for flag in xla_flags.FLAGS["tpu"]:
        assert not flag.only or set(flag.only) <= set(xla_flags.TPUS)


def test_a_host_reports_its_chips(tmp_path):
    assert xla_flags.generation(tmp_path) is None
    for place, vendor, device in (
        ("0000:00:01.0", "0x8086", "0x0062"),
        ("0000:00:05.0", "0x1ae0", "0x0062"),
    ):
        (tmp_path / place).mkdir()
        (tmp_path / place / "vendor").write_text(vendor + "\n")
        (tmp_path / place / "device").write_text(device + "\n")
        assert xla_flags.generation(tmp_path) == ("v5p" if vendor == "0x1ae0" else None)
    line = xla_flags.shell_line("tpu", "--mine=1", "v5p")
    assert (
        "sparse_core" in line
        and "xla_enable_async_all_gather" not in line
        and line.endswith("--mine=1'")
    )
    assert "only" not in line and len(xla_flags.flags("tpu")) < len(xla_flags.flags("tpu", "v4"))
