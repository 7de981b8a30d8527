"""The launchers' calls of gcloud and srun, recorded by substitutes of these; shellcheck; the compilers' flags."""

import json
import os
import shlex
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import LlamaConfig
from planning.plan import DEFAULT_RECIPE, DoesNotFit, Job, check_fits
from planning.topology import topology_devices
from tests.conftest import REPOSITORY
from trainer import xla_flags

SCRIPTS = sorted(path for path in [*(REPOSITORY / "scripts").rglob("*.sh"), *(REPOSITORY / "scripts").glob("*.sbatch"),
                                   REPOSITORY / ".ci/run"])

# Records its arguments. States of the slice and exit statuses of training are read from files, one line for each call; the last
# line is not removed.
GCLOUD = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")

def next_line(name):
    lines = (here / name).read_text().splitlines()
    if len(lines) > 1:
        (here / name).write_text("\\n".join(lines[1:]))
    return lines[0]

if "describe" in sys.argv:
    state = next_line("states")
    sys.exit(1) if state == "ABSENT" else print(state)
elif "ssh" in sys.argv and "train.code" in sys.argv[-1] and "cat longstripe" in sys.argv[-1]:
    print(next_line("codes"))
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def launch(tmp_path):
    """Returns a function that runs launch_tpu.sh with these states of the slice and exit statuses of training.

    It returns the finished process and the calls of gcloud.
    """
    executable(tmp_path / "gcloud", GCLOUD)

    def run(*arguments, states, codes=("0",)):
        (tmp_path / "states").write_text("\n".join(states))
        (tmp_path / "codes").write_text("\n".join(codes))
        (tmp_path / "calls").write_text("")
        done = subprocess.run([REPOSITORY / "scripts/launch_tpu.sh", *arguments], capture_output=True, text=True, check=False,
                              timeout=60, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
        return done, [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


RECIPE = "configs/quickstart.yaml"
SLICE = ("--zone", "z", "--type", "v5p-64", "--version", "v2", "--poll", "0")


def verbs(calls):
    """Returns the purpose of each call that changes something: create, delete, scp, install, start or follow."""
    purposes = {"uv pip install": "install", "setsid": "start", "tail": "follow"}
    verbs = []
    for call in calls:
        if "ssh" in call:
            verbs += [verb for words, verb in purposes.items() if words in call[-1]][:1]
        else:
            verbs += [verb for verb in ("create", "delete", "scp") if verb in call]
    return verbs


def test_run_creates_installs_starts_and_follows(launch):
    recipe = ["--config", "configs/books.yaml", "--data.sources", "[{path: a b.txt, format: text}]"]
    done, calls = launch("run", "pod", *SLICE, "--spot", "--project", "p", "--", *recipe,
                         states=["ABSENT", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    assert done.returncode == 0, done.stderr
    assert verbs(calls) == ["create", "scp", "install", "start", "follow"]
    create = next(call for call in calls if "create" in call)
    assert create == ["compute", "tpus", "queued-resources", "create", "pod", "--node-id", "pod", "--accelerator-type",
                      "v5p-64", "--runtime-version", "v2", "--spot", "--zone", "z", "--project", "p"]
    assert all(call[call.index("--zone") + 1] == "z" for call in calls)
    start = next(call for call in calls if "setsid" in call[-1])
    assert "--worker=all" in start and "trainer.xla_flags tpu" in start[-1]
    # The worker's shell gives train.py the options after --.
    words = shlex.split(start[-1].split("train.code' ")[1].split(" < ")[0])
    assert words == ["train.py", *recipe]


def test_an_existing_slice_is_used_and_a_failure_of_training_ends_the_command(launch):
    done, calls = launch("run", "pod", *SLICE, "--", "--config", RECIPE, states=["ACTIVE"], codes=["2"])
    assert done.returncode == 2 and verbs(calls) == ["scp", "install", "start", "follow"]


def test_it_restarts_after_a_preemption(launch):
    # Preempted twice during training: noticed by the slice's state, then by the exit status.
    done, calls = launch("run", "pod", *SLICE, "--spot", "--", "--config", RECIPE,
                         states=["ACTIVE", "ACTIVE", "SUSPENDED", "SUSPENDED", "SUSPENDED", "ABSENT", "ACTIVE", "ACTIVE",
                                 "ACTIVE", "ACTIVE"],
                         codes=["", "143", "0"])
    assert done.returncode == 0, done.stderr
    once = ["scp", "install", "start", "follow"]
    assert verbs(calls) == [*once, "delete", "create", *once, *once]
    assert next(call for call in calls if "delete" in call)[3:7] == ["delete", "pod", "--force", "--quiet"]


def test_training_that_is_killed_three_times_is_not_restarted(launch):
    done, calls = launch("run", "pod", *SLICE, "--", "--config", RECIPE, states=["ACTIVE"], codes=["137"])
    assert done.returncode == 137 and verbs(calls).count("start") == 3


def test_training_that_saves_on_every_preemption_is_restarted(launch):
    done, calls = launch("run", "pod", *SLICE, "--", "--config", RECIPE, states=["ACTIVE"], codes=["143"] * 4 + ["0"])
    assert done.returncode == 0 and verbs(calls).count("start") == 5


@pytest.mark.parametrize(("arguments", "words"), [
    (["run"], "needs a verb"), (["run", "pod"], "--zone is missing"), (["fly", "pod", "--zone", "z"], "unknown verb fly"),
    (["create", "pod", "--zone", "z"], "--type and --version"), (["run", "pod", "--config", "c"], "unknown option --config"),
    (["start", "pod", "--zone", "z"], "nothing to start"), (["run", "pod", "--zone"], "--zone needs a value"),
])
def test_mistakes_are_one_line(launch, arguments, words):
    done, calls = launch(*arguments, states=["ACTIVE"])
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert not [call for call in calls if "create" in call]


def test_a_recipe_that_git_does_not_track_is_refused_before_a_slice_is_created(launch, tmp_path):
    recipe = REPOSITORY / f"{tmp_path.name}.yaml"
    recipe.write_text("name: new\n")
    try:
        done, calls = launch("run", "s", *SLICE, "--", "--config", recipe.name, states=["ABSENT", "ACTIVE"])
    finally:
        recipe.unlink()
    assert done.returncode == 2 and not verbs(calls)
    assert f"{recipe.name} is not tracked by git and would not reach the workers: git add {recipe.name}" in done.stderr


@pytest.mark.parametrize("words", [("--config", "configs/quickstat.yaml"),
                                   ("--run_dir", "r", "--config=configs/quickstat.yaml")])
def test_a_recipe_that_is_not_there_creates_no_slice(launch, words):
    done, calls = launch("run", "s", *SLICE, "--", *words, states=["ABSENT", "ACTIVE"])
    assert done.returncode == 2 and not verbs(calls) and "--config: there is no configs/quickstat.yaml in /" in done.stderr


def test_a_recipe_on_a_mounted_file_system_is_the_workers_own(launch):
    done, calls = launch("run", "s", *SLICE, "--", "--config", "/mnt/shared/mine.yaml", states=["ABSENT", "ACTIVE"])
    assert done.returncode == 0 and "create" in verbs(calls)


def test_the_workers_commands_train_stop_and_store_the_exit_status(launch, tmp_path):
    """Runs the commands: one training outlives the shell that started it, another one is stopped."""
    _, calls = launch("start", "pod", "--zone", "z", "--", "a b", "$c", states=["ACTIVE"])
    _, stopping = launch("stop", "pod", "--zone", "z", states=["ACTIVE"])
    home = tmp_path / "home"
    (home / "longstripe/.venv/bin").mkdir(parents=True)
    executable(home / "longstripe/.venv/bin/python", """#!/bin/bash
        if [ "$1" = -m ]; then echo export FLAGS=1; else printf '%s|' "$FLAGS" "$@"; sleep 0.2; exit 7; fi""")
    command = ["bash", "-c", calls[-1][-1]]
    subprocess.run(command, cwd=home, check=True, timeout=20)
    code, pid = home / "longstripe/train.code", home / "longstripe/train.pid"
    subprocess.run(["tail", f"--pid={pid.read_text().strip()}", "-f", "/dev/null"], timeout=20, check=True)
    assert code.read_text() == "7\n"
    assert (home / "longstripe/train.log").read_text() == "1|train.py|a b|$c|"
    executable(home / "longstripe/.venv/bin/python", """#!/bin/bash
        trap 'sleep 0.5; touch saved; exit 143' TERM
        [ "$1" = -m ] || { touch ready; while true; do sleep 0.1; done; }""")
    subprocess.run(command, cwd=home, check=True, timeout=20)
    second = pid.read_text().strip()
    subprocess.run(command, cwd=home, check=True, timeout=20)
    assert pid.read_text().strip() == second, "it is running already"
    ready = home / "longstripe/ready"  # before that, the stand-in has no trap
    subprocess.run(["bash", "-c", f"until [ -e '{ready}' ]; do sleep 0.05; done"], timeout=20, check=True)
    subprocess.run(["bash", "-c", stopping[-1][-1]], cwd=home, check=True, timeout=20)
    subprocess.run(["tail", f"--pid={second}", "-f", "/dev/null"], timeout=20, check=True)
    assert code.read_text() == "130\n" and not pid.exists() and (home / "longstripe/saved").exists(), "stop waits"


def test_workers_install_with_uvs_python_and_use_no_tool_of_their_image(launch, tmp_path):
    """Cloud TPU's images contain Python 3.10, which JAX no longer supports."""
    _, calls = launch("install", "pod", "--zone", "z", states=["ACTIVE"])
    home, archive = tmp_path / "home", tmp_path / "home/longstripe.tar.gz"
    (home / ".local/bin").mkdir(parents=True)
    subprocess.run(["tar", "-czf", archive, "-C", REPOSITORY, "requirements.txt", "requirements-tpu.txt"], check=True)
    executable(home / ".local/bin/uv", """#!/bin/bash
        echo "$@" >> ~/told
        if [ "$1" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; else [ -e "${!#}" ]; fi""")
    for tool in ("python3", "make", "curl"):
        executable(tmp_path / tool, "#!/bin/bash\nexit 1\n")
    for _ in range(2):  # again after a preemption of training alone
        subprocess.run(["bash", "-c", calls[-1][-1]], cwd=home, check=True, timeout=20,
                       env={"HOME": str(home), "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    install = "pip install --quiet -r requirements-tpu.txt"
    assert (home / "told").read_text().splitlines() == ["venv --python 3.12", install, install]


def test_slurm_starts_one_process_a_node_with_all_its_gpus_under_their_flags(tmp_path):
    """JAX, asked under Slurm's variables, would give each task the GPU of its number in the node: the first one."""
    ask = ("import jax; from trainer.run.cluster import join; from trainer.config.schema import DistributedConfig\n"
           "join(DistributedConfig(), False); print(jax.config.values['jax_cuda_visible_devices'])")
    executable(tmp_path / "srun", f"#!/bin/bash\nprintf '%s\\n' \"$XLA_FLAGS\" \"$@\" > {tmp_path}/told\n"
               f"echo $XLA_CLIENT_MEM_FRACTION $XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB > {tmp_path}/memory\n"
               f"JAX_PLATFORMS=cpu \"$PYTHON\" -c {shlex.quote(ask)} > {tmp_path}/found\n")
    script = REPOSITORY / "scripts/launch_slurm.sbatch"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(REPOSITORY),
           "PYTHON": sys.executable, "XLA_FLAGS": "--xla_dump_to=/dev/null", "SLURM_GPUS_ON_NODE": "4",
           "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
           "SLURM_LOCALID": "0"}
    subprocess.run([script, "--config", "a b.yaml"], env=env, check=True, timeout=60)
    flags, *command = (tmp_path / "told").read_text().splitlines()
    assert command == ["--kill-on-bad-exit=1", sys.executable, "train.py", "--config", "a b.yaml"]
    assert flags.split() == [*map(str, xla_flags.FLAGS["gpu"]), "--xla_dump_to=/dev/null"], "the user's flags come last"
    assert (tmp_path / "found").read_text() == "0,1,2,3\n"
    share, host_gib = (tmp_path / "memory").read_text().split()
    assert share == "0.95" and 0 < int(host_gib) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert "#SBATCH --ntasks-per-node=1" in script.read_text() and "#SBATCH --requeue" in script.read_text()


H100_PLAN = {"topology": "h100:8", "peak_gib": 74.9, "host_gib": 128.0}


@pytest.mark.parametrize(("changes", "host_gib", "environment", "settings"), [
    # 1.1 x 128 GiB x 8 GPUs; a plan of little host memory keeps XLA's own 64 GiB; several hosts count once.
    ({}, 2000, {}, {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1127"}),
    ({"host_gib": 0.0}, 2000, {}, {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64"}),
    ({"topology": "h100:4x2"}, 2000, {}, {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "282"}),
    ({}, 1200, {}, {"XLA_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1080"}),
    ({}, 2000, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8"}, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1127"}),
    ({}, 2000, {"XLA_CLIENT_MEM_FRACTION": ".8", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}, {}),
])
def test_a_plan_sets_how_much_memory_jax_may_take(changes, host_gib, environment, settings):
    assert xla_flags.gpu_memory(H100_PLAN | changes, host_gib, environment) == settings


def test_without_a_plan_jax_may_pin_nine_tenths_of_the_host():
    assert xla_flags.gpu_memory(None, 1000, {})["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "900"


@pytest.mark.parametrize(("changes", "words"), [
    ({"peak_gib": 75.3}, ("75.30 GiB of each h100", "may take 75.19", "0.95")),
    ({"host_gib": 8000.0}, ("64000 GiB of pinned memory", "8 GPUs", "--host-gib")),
    ({"topology": "v5p:2x2x2"}, ("a plan for v5p:2x2x2", "h100")),
    ({"peak_gib": None}, ("found no compiled plan in",)),
])
def test_a_plan_that_needs_more_than_there_is_ends_the_launcher(tmp_path, changes, words):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"longest": H100_PLAN | changes}))
    script = f'set -e; eval "$({shlex.quote(sys.executable)} -m trainer.xla_flags gpu --plan {plan})"; echo started'
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in ("error: --plan: ", *words)), done.stderr


def test_a_plan_fills_no_more_of_a_gpu_than_the_launchers_allow():
    """A step of 76 GiB on an H100, which has 79.1 GiB, of which JAX takes 75.2."""
    sizes = {"peak": 76.0, "host": 0.0}
    with pytest.raises(DoesNotFit, match=r"needs 76.00 GiB of 75.19 of what JAX may take, 0.95 of a GPU's"):
        check_fits(Job(DEFAULT_RECIPE, LlamaConfig.preset("tiny"), "h100:8"), sizes, {})
    check_fits(Job(DEFAULT_RECIPE, LlamaConfig.preset("tiny"), "h100:8"), {"peak": 75.0, "host": 0.0}, {})


def test_slurm_requeues_only_a_job_that_saved_on_sigterm(tmp_path):
    """While a job is cancelled it is COMPLETING, and Slurm would accept `scontrol requeue` for it too."""
    executable(tmp_path / "srun", "#!/bin/bash\nexit $CODE\n")
    executable(tmp_path / "squeue", "#!/bin/bash\necho $STATE\n")
    executable(tmp_path / "scontrol", f"#!/bin/bash\necho \"$@\" >> {tmp_path}/told\n")
    script = REPOSITORY / "scripts/launch_slurm.sbatch"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(REPOSITORY),
           "PYTHON": sys.executable, "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "8"}
    for code, state in ((0, "RUNNING"), (2, "RUNNING"), (137, "RUNNING"), (143, "COMPLETING"), (143, "RUNNING")):
        ends = {**env, "CODE": str(code), "STATE": state}
        done = subprocess.run([script, "--config", "c"], env=ends, check=False, timeout=60)
        assert done.returncode == code
    assert (tmp_path / "told").read_text() == "requeue 17\n"
    assert "#SBATCH --signal=TERM@" in script.read_text()


def test_the_jobset_is_complete_and_its_recipe_exists():
    jobset = yaml.safe_load((REPOSITORY / "scripts/kubernetes/jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    selector, container = pod["nodeSelector"], pod["containers"][0]
    chips = 1
    for side in selector["cloud.google.com/gke-tpu-topology"].split("x"):
        chips *= int(side)
    assert job["parallelism"] == job["completions"] == chips // container["resources"]["limits"]["google.com/tpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    args = container["args"]
    assert (REPOSITORY / args[args.index("--config") + 1]).exists()
    # Exit status 2 of train.py fails the JobSet, any other restarts it.
    assert job["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]
    assert jobset["spec"]["failurePolicy"]["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    mesh = yaml.safe_load((REPOSITORY / args[args.index("--config") + 1]).read_text())["mesh"]
    assert mesh["sequence"] == chips
    docker = (REPOSITORY / "scripts/kubernetes/Dockerfile").read_text()
    assert "scripts/kubernetes/entrypoint.sh" in docker and os.access(REPOSITORY / "scripts/kubernetes/entrypoint.sh", os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_reports_nothing(script):
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False,
                          env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("platform", xla_flags.FLAGS)
def test_the_compilers_know_every_flag(platform):
    """An unknown flag ends the process; every flag has a reason."""
    # The CPU's jaxlib also parses the GPU's flags; libtpu parses its own when the compiler is loaded.
    ask = "import jax; jax.devices()" if platform != "tpu" else (
        "from jax.experimental import topologies; topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2')")
    given = " ".join(map(str, xla_flags.FLAGS[platform]))
    for flags, known in ((given, True), ("--xla_no_such_flag=1", False)):
        env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", xla_flags.VARIABLES[platform]: flags}
        process = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=False)
        assert (process.returncode == 0) == known, process.stderr[-500:]
    assert all(flag.why and flag.name.startswith("xla_") for flag in xla_flags.FLAGS[platform])


@pytest.mark.parametrize("slice_", ["v3:4x4", "v4:2x2x2", "v5e:4x4", "v5p:2x2x2", "v6e:4x4"])
def test_each_generations_compiler_takes_its_flags(slice_):
    """libtpu knows more names than each compiler accepts: a default of v5e's makes every compilation for v5p fail."""
    devices = topology_devices(slice_)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(Mesh(devices, "x"), PartitionSpec("x")))
    gathered = NamedSharding(Mesh(devices, "x"), PartitionSpec())
    lowered = jax.jit(lambda x: x @ x, out_shardings=gathered).lower(x)
    lowered.compile(compiler_options={flag.name: flag.value for flag in xla_flags.flags("tpu", slice_.split(":")[0])})
    for flag in xla_flags.FLAGS["tpu"]:
        assert not flag.only or set(flag.only) <= set(xla_flags.TPUS)


def test_a_host_says_which_chips_it_has(tmp_path):
    assert xla_flags.generation(tmp_path) is None
    for place, vendor, device in (("0000:00:01.0", "0x8086", "0x0062"), ("0000:00:05.0", "0x1ae0", "0x0062")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "vendor").write_text(vendor + "\n")
        (tmp_path / place / "device").write_text(device + "\n")
        assert xla_flags.generation(tmp_path) == ("v5p" if vendor == "0x1ae0" else None)
    line = xla_flags.shell_line("tpu", "--mine=1", "v5p")
    assert "sparse_core" in line and "xla_enable_async_all_gather" not in line and line.endswith("--mine=1'")
    assert "only" not in line and len(xla_flags.flags("tpu")) < len(xla_flags.flags("tpu", "v4"))
