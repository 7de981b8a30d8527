"""Every command on the pages is executed here, tested by a test named here, or listed here with the
reason why not.

A new command on one of PAGES needs an entry in one of EXECUTED,
EXECUTED_SLOWLY, TESTED and NOT_RUN; an entry whose command is no longer on a page is an error too.
"""

import contextlib
import functools
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_help import module_of_command
from trainer.config.fields import FIELDS
from trainer.config.load import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "notes" / "robustness.md",
]
PROGRAMS = (
    "make ",
    "python ",
    "scripts/launch",
    "sbatch ",
    "kubectl ",
    "pip ",
    "git ",
    "mkdocs ",
    "docker ",
    "gcloud ",
    'eval "',
    "hf ",
    "uv ",
)

# Command -> flags added so that it takes seconds. Run in an empty folder next to the code.
EXECUTED = {
    "python -m scripts.plan --model llama-3.1-8b --machine 8xH100 --context 128K": "",
    "python -m scripts.plan --model qwen3-8b --machine 8xH100 --context 32K --tokens 100M": "",
    "python -m scripts.plan --model llama-3.1-8b --machine v5p-32 --context 1M --price-per-device-hour 4 --write my_recipe.yaml": "",
    "python -m scripts.plan --model llama-3.1-8b --machine v5p-32 --context 128K --write my_recipe.yaml": "",
    "python -m scripts.plan --model qwen3-8b --machine 8xH100 --context 128K --write my_recipe.yaml": "",
    "python -m scripts.plan --model qwen3-14b --machine v5p-64 --context 1M --write my_recipe.yaml": "",
    "python -m scripts.plan --config configs/adapters/llama31_8b_lora_a100.yaml --model llama-3.1-8b --machine 4xA100-40GB": "",
    "python -m scripts.plan --model llama-3.1-8b --machine RTX4090 --context 32K --qlora 16": "",
    "python -m trainer.xla_flags tpu --why": "",
}
EXECUTED_SLOWLY = {
    "python -m scripts.inspect_data configs/quickstart.yaml": "",
    "python -m scripts.draw_schedule": "",
    "python -m scripts.benchmarks.papers": "",
    "python -m scripts.launch_local --processes 4 --config configs/quickstart.yaml": "--train.steps 2 --train.evaluate_every 2 --mesh.fsdp 1 --mesh.tensor 1 --mesh.sequence 4 --mesh.simulate 4",
}

# Test file -> the commands that it runs with other arguments: placeholders, small models, stand-ins
# for a cloud's tools.
TESTED = {
    "tests/test_quickstart.py": ["make quickstart"],
    "tests/data/test_beam.py": [
        "python -m scripts.prepare --config RECIPE.yaml --engine beam --runner direct",
        "python -m scripts.prepare --config RECIPE.yaml --engine beam --runner dask -- --dask_client_address=tcp://HOST:8786",
    ],
    "tests/soak/test_slow_store.py": ["python -m tests.soak.slow_store"],
    "tests/soak/test_cold_start.py": ["python -m tests.soak.cold_start"],
    "tests/soak/test_attacks.py": [
        "python -m tests.soak.attacks records --cases 1000 --seed 100000"
    ],
    "tests/docs/test_attention_guide.py": ["python mine.py", "pip install ."],
    "tests/smollm2.py": ["python -m scripts.make_smollm2 DIR"],
    "tests/trainer/test_pretrained.py": [
        "python train.py --config configs/sharegpt_smollm2.yaml --model.path HuggingFaceTB/SmolLM2-135M-Instruct "
        "--data.path data/fixtures/conversations.json",
        "python train.py --config configs/qwen3_8b_128k_h100.yaml --model.path ~/models/Qwen3-8B --data.path YOUR_SHAREGPT.json",
        "python train.py --config my_recipe.yaml --model.path HF_DIR --data.path FILE.json",
        "python train.py --config RECIPE.yaml",
    ],
    "tests/docs/test_migrating.py": [
        "python train.py --config my_recipe.yaml --dry-run 4xH100",
    ],
    "tests/trainer/huggingface/test_huggingface.py": [
        "python -m scripts.export_hf runs/NAME my_model",
        "python -m scripts.import_hf HF_DIR CHECKPOINT",
    ],
    "tests/scripts/test_push_to_hub.py": [
        "python -m scripts.push_to_hub HF_DIR OWNER/NAME",
        "python -m scripts.push_to_hub my_model OWNER/NAME",
    ],
    "tests/scripts/test_inspect_data.py": [
        "python -m scripts.inspect_data CONFIG.yaml",
    ],
    "tests/scripts/test_profile_step.py": ["python -m scripts.profile_step --trace RUN/profile"],
    "tests/scripts/test_prepare.py": [
        "python -m scripts.inspect_data --model.path org/name --data.path chats.jsonl --data.context_length 32K",
        "python -m scripts.prepare --config RECIPE.yaml",
        "python -m scripts.prepare --config RECIPE.yaml --model.path HF_DIR --data.path FILE.json",
    ],
    "tests/planning/test_dry_run.py": [
        "python train.py ... --dry-run 8xH100",
        "python train.py --config my_recipe.yaml --model.path HF_DIR --data.path FILE.json --dry-run 8xH100",
        "python train.py --config my_recipe.yaml --model.path HF_DIR --data.path FILE.json --dry-run v5p-32",
    ],
    "tests/eval/test_line_retrieval.py": [
        "python -m eval.line_retrieval --checkpoint ...",
        "python -m eval.line_retrieval --checkpoint RUN_OR_HF --lines 200 400 680 --sequence 8 --output results",
    ],
    "tests/eval/test_suite.py": [
        "python -m eval.needle",
        "python -m eval.needle --checkpoint RUN_OR_HF --tokens 4096 16384 --needles 1 4 --output needles",
        "python -m eval.ruler --checkpoint RUN_OR_HF --tokens 4096 16384 --text essays.txt --output ruler",
        "python -m eval.ruler --checkpoint RUN_OR_HF --tokens 128K --sequence 8 --chunk 16K --count 5 --output ruler_128k",
        "python -m eval.coreference --checkpoint RUN_OR_HF --tokens 4096 16384 --output coreference",
    ],
    "tests/eval/test_compare.py": ["python -m eval.compare BEFORE AFTER --output difference.json"],
    "tests/trainer/reporting/test_boards.py": [
        "python train.py --config RECIPE.yaml --samples.prompts '[\"Who are you?\"]' --samples.every 100"
    ],
    "tests/eval/test_harness.py": [
        "python -m eval.harness --checkpoint RUN_OR_HF --tasks arc_easy,hellaswag --output short_tasks",
        "python -m eval.harness --checkpoint RUN_OR_HF --tasks book_next_sentence,book_last_word --include-path short "
        "--output short/out",
    ],
    "tests/scripts/test_make_short_tasks.py": [
        "python -m scripts.make_short_tasks BOOK.txt --output short"
    ],
    "tests/eval/test_report.py": [
        "python -m eval.report RUN [RUN]",
        "python -m eval.report runs/BEFORE runs/AFTER --output report.html",
        "python -m eval.report runs/smollm2_32k --output report.html",
    ],
    "tests/scripts/test_chat.py": [
        "python -m scripts.chat CHECKPOINT --document FILE",
        "python -m scripts.chat RUN_OR_HF --document book.txt --sequence 8",
    ],
    "tests/scripts/test_loss_by_position.py": [
        "python -m scripts.loss_by_position --config RECIPE.yaml --checkpoint RUN_OR_HF --output curve",
    ],
    "tests/trainer/test_adapter_run.py": [
        "python train.py --config configs/adapters/smollm2_lora.yaml --model.path HF_DIR --data.path FILE.json",
        "python train.py --model.path org/name --data.path chats.jsonl --data.context_length 32K --adapter.rank 16 --adapter.quantize nf4",
        "python -m scripts.export_hf RUN FOLDER",
        "python -m scripts.export_hf RUN FOLDER --merge",
        "python -m scripts.export_hf RUN FOLDER --average",
    ],
    "tests/trainer/test_quantized_run.py": [
        "python train.py --config configs/adapters/smollm2_qlora.yaml --model.path HF_DIR --data.path FILE.json",
        "python -m scripts.export_hf RUN FOLDER --merge --dequantize",
    ],
    "tests/trainer/huggingface/test_quantized_folders.py": [
        "python -m scripts.quantize_hf MODEL HF_DIR"
    ],
    "tests/trainer/test_stages.py": [
        "python train.py --config configs/extension/smollm2_32k.yaml --model.path HF_DIR"
    ],
    "tests/trainer/test_trajectories.py": [
        "python train.py --config configs/trajectories/walker_walk.yaml"
    ],
    "tests/eval/test_in_context.py": [
        "python -m eval.in_context --checkpoint runs/walker_walk --output runs/walker_walk/in_context",
    ],
    "tests/scripts/test_collect_trajectories.py": [
        "python -m scripts.collect_trajectories --task ...",
        "python -m scripts.collect_trajectories --task walker_walk --output trajectories/collected",
        "python -m scripts.collect_trajectories --task walker_walk --explorer rnd --episodes 1000 --output trajectories/exploration",
    ],
    "tests/data/trajectories/test_archives.py": [
        "python -m scripts.download_trajectories --domain walker --algorithm proto rnd --output trajectories/exorl"
    ],
    "tests/scripts/test_inspect_trajectories.py": [
        "python -m scripts.inspect_trajectories trajectories/exorl --task walker_walk --plot returns.png --json returns.json"
    ],
    "tests/trainer/test_processes.py": ["python -m scripts.launch_local --processes 4 ..."],
    "tests/docs/test_google_cloud.py": [
        "scripts/launch_tpu.sh run first --zone us-east5-b --machine-type ct6e-standard-8t --spot --env HF_TOKEN "
        "--create-options '--service-account=longstripe@PROJECT.iam.gserviceaccount.com --boot-disk-size=500GB' "
        "--setup 'gcloud storage cp gs://BUCKET/chats.jsonl .' -- --config my_recipe.yaml --model.path org/name "
        "--data.path ../chats.jsonl --run_dir gs://BUCKET/runs/first",
        "scripts/launch_tpu.sh status first --zone us-east5-b --api compute --price-per-hour 22 -- --config my_recipe.yaml "
        "--run_dir gs://BUCKET/runs/first",
        "scripts/launch_tpu.sh follow first --zone us-east5-b --api compute",
        "scripts/launch_tpu.sh delete first --zone us-east5-b --api compute",
    ],
    "tests/scripts/test_launchers.py": [
        'eval "$(python -m trainer.xla_flags tpu)"',
        'eval "$(python -m trainer.xla_flags gpu)"',
        "scripts/launch_tpu.sh run NAME --zone Z --type v5p-128 --version V --spot -- --config ...",
        "scripts/launch_tpu.sh run NAME --zone ZONE --type v5p-32 --version v2-alpha-tpuv5 --spot -- --config my_recipe.yaml "
        "--model.path HF_DIR --data.path FILE.json --run_dir gs://BUCKET/run --data.prepared gs://BUCKET/prepared",
        "sbatch --nodes 4 --gpus-per-node 8 scripts/launch_slurm.sbatch --config ...",
        "kubectl apply -f scripts/kubernetes/jobset.yaml",
        "scripts/launch_tpu.sh",
        "scripts/launch_slurm.sbatch",
    ],
    "tests/scripts/test_make_preferences.py": [
        "python -m scripts.make_preferences pairs",
        "python train.py --config configs/preference/smollm2_dpo.yaml --model.path HuggingFaceTB/SmolLM2-135M-Instruct "
        "--data.path pairs/train.jsonl --data.held_out_path pairs/held_out.jsonl",
    ],
    "tests/scripts/benchmarks/test_bench_kernels.py": [
        "python -m scripts.benchmarks.bench_kernels --lengths 8192 16384"
    ],
    "tests/scripts/benchmarks/test_bench_schedules.py": [
        "python -m scripts.benchmarks.bench_schedules"
    ],
    "tests/planning/test_auto.py": [
        "python train.py --model.path org/name --data.path chats.jsonl --data.context_length 32K",
        "python train.py --model.path org/name --data.path chats.jsonl --data.context_length 128K",
    ],
    "tests/scripts/benchmarks/test_bench_engines.py": [
        "python -m scripts.benchmarks.bench_engines --gigabytes 0.25 --rows processes:2 beam:2"
    ],
    "tests/scripts/benchmarks/test_bench_packing.py": [
        "python -m scripts.benchmarks.bench_packing --documents 100000000"
    ],
    "tests/scripts/benchmarks/test_checkpoint_stores.py": [
        "python -m scripts.benchmarks.checkpoint_stores DISK gs://BUCKET/FOLDER"
    ],
    "tests/scripts/benchmarks/test_evidence.py": ["python -m scripts.benchmarks.evidence --times"],
    "tests/scripts/benchmarks/test_shared_prompts.py": [
        "python -m scripts.benchmarks.shared_prompts"
    ],
    "tests/scripts/benchmarks/test_table3.py": ["python -m scripts.benchmarks.table3"],
    "tests/scripts/test_plan_answers.py": ["python -m scripts.plan"],
}

PARSED = "is gcloud's; tests/docs/test_google_cloud.py compares its options with gcloud's help"
CLOUD = "makes machines that cost money, of an account that no test has"
DOCKER = "needs Docker and a GPU, which no test has; the Dockerfile is linted"
HOURS = "takes minutes to hours of a compiler; tests/planning compiles smaller steps"
INSTALLS = "installs from PyPI, as CI and every `make test` do for the CPU"
NOT_RUN = {
    "python -m tests.soak.hour": "trains for an hour",
    "python -m tests.soak.large_array": "prepares 1.6 GB in minutes",
    "python -m tests.soak.faults": "trains for a quarter of an hour",
    "python -m tests.soak.buckets": "trains in three places for minutes",
    "python -m tests.soak.beam_kills": "kills workers of a cluster for ten minutes",
    "make test": "is what runs the tests",
    "make check": "runs a part of them",
    "make soak": "takes hours",
    "make mutants": "takes hours",
    "make lint": "is run by CI",
    "make bench": "measures for hours",
    "make evidence": HOURS,
    "make evidence ONLY='h100 1m'": HOURS,
    "make install PLATFORM=cuda": INSTALLS,
    "make install PLATFORM=tpu PYTHON=$(~/.local/bin/uv python find 3.12)": INSTALLS,
    "make install EXTRAS=eval": INSTALLS,
    "make install EXTRAS=rl": INSTALLS,
    "make install EXTRAS=beam": INSTALLS,
    "scripts/launch_tpu.sh delete NAME --zone Z": CLOUD,
    "pip install wandb": INSTALLS,
    "hf auth login": "is the hub's own, for an account that no test has",
    "pip install gcsfs": INSTALLS,
    "pip install '.[cuda]'": INSTALLS,
    "python -m scripts.plan --model llama-7b --machine v4:4x4x4 --context 1M --compile": HOURS,
    "python -m scripts.plan --config configs/llama31_8b_1m_h100.yaml --model llama-3.1-8b --machine 8xH100 --compile": HOURS,
    "python -m scripts.plan --model llama-7b --machine v5e-256 --context 1M --search --compile --output plan": HOURS,
    "python -c 'import jax; print(jax.devices())'": "is JAX's own, for a machine with accelerators",
    "python -m scripts.benchmarks.bench_kernels --dtype bfloat16": "is for a GPU or TPU, which no test has",
    "python train.py --config configs/trajectories/walker_walk.yaml --trajectories.in_context 128 --trajectories.action_repeat 1 "
    "--data.context_length 512000 --stages '[]' --train.batch_size 1 --mesh.sequence 64 --attention.layout striped": "needs 64 devices",
    "docker build -f scripts/kubernetes/Dockerfile --build-arg PLATFORM=cuda -t longstripe:0.1.0 .": DOCKER,
    'docker run --rm --gpus all --ipc host -v "$PWD/runs:/longstripe/runs" -v "$PWD/prepared:/longstripe/prepared" '
    '-v "$HOME/.cache/longstripe:/home/longstripe/.cache/longstripe" -v "$HOME/models:/models" longstripe:0.1.0 --config '
    "configs/qwen3_8b_128k_h100.yaml --model.path /models/Qwen3-8B --data.path /models/chats.json": DOCKER,
    "gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v6e-8 --version v2-alpha-tpuv6e": CLOUD,
    "git clone YOUR_COPY longstripe && cd longstripe": "is git's own, of an address that only the user has",
    "gcloud compute tpus tpu-vm ssh NAME --zone ZONE": CLOUD,
    "gcloud auth login": PARSED,
    "gcloud config set project PROJECT": PARSED,
    "gcloud services enable compute.googleapis.com tpu.googleapis.com storage.googleapis.com": PARSED,
    "gcloud storage buckets create gs://BUCKET --location us-east5 --uniform-bucket-level-access": PARSED,
    "gcloud iam service-accounts create longstripe": PARSED,
    "gcloud storage buckets add-iam-policy-binding gs://BUCKET --member "
    "serviceAccount:longstripe@PROJECT.iam.gserviceaccount.com --role roles/storage.objectAdmin": PARSED,
    "gcloud projects add-iam-policy-binding PROJECT --member serviceAccount:longstripe@PROJECT.iam.gserviceaccount.com "
    "--role roles/logging.logWriter": PARSED,
    "gcloud storage cp chats.jsonl gs://BUCKET/chats.jsonl": PARSED,
    "gcloud compute instances list --filter name:first": PARSED,
    "gcloud compute ssh INSTANCE --zone us-east5-b --command 'gcloud storage cp -r longstripe/my_model gs://BUCKET/'": PARSED,
    "gcloud storage cp --recursive gs://BUCKET/my_model .": PARSED,
    "gcloud storage cp --recursive gs://BUCKET/runs/first/profile .": PARSED,
    "gcloud storage rm --recursive gs://BUCKET": PARSED,
    "scripts/launch_tpu.sh start first --zone us-east5-b --api compute -- python -m scripts.export_hf gs://BUCKET/runs/first my_model": "makes nothing without a machine; tests/docs/test_google_cloud.py parses it",
    "python -m scripts.make_gemma3 DIR": "downloads 240 MB; what makes the folder is scripts.make_smollm2's, which tests run",
}


def commands_of(text: str) -> list[str]:
    """Returns the commands of a page: those of indented lines and shell fences, and those in code
    font.

    A line that ends in a backslash continues; text after two spaces and # is a comment;
    .venv/bin/python becomes python.
    """
    text = re.sub(r"<!--.*?-->", "", text)
    lines, fence, command = [], None, ""
    for line in text.splitlines():
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
        elif fence in ("bash", "sh", "console") or (fence is None and line.startswith("    ")):
            command += line.strip()
            if command.endswith("\\"):
                command = command[:-1]
            else:
                lines.append(re.sub(r"\s+# .*", "", command))
                command = ""
    if not any(line.startswith("```") for line in text.splitlines()):
        lines += re.findall(r"`([^`\n]+)`", text)
    else:
        lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    lines = [
        re.sub(r"\s+", " ", line.replace(".venv/bin/python", "python")).strip() for line in lines
    ]
    return [line for line in lines if f"{line} ".startswith(PROGRAMS)]


ON_PAGES = {
    command: page.name
    for page in PAGES
    for command in commands_of(page.read_text(encoding="utf-8"))
}
REGISTERED = [
    *EXECUTED,
    *EXECUTED_SLOWLY,
    *(command for commands in TESTED.values() for command in commands),
    *NOT_RUN,
]


def test_every_command_has_a_test_or_a_reason():
    assert len(ON_PAGES) > 80
    assert {command: page for command, page in ON_PAGES.items() if command not in REGISTERED} == {}
    assert [command for command in REGISTERED if command not in ON_PAGES] == []
    assert len(set(REGISTERED)) == len(REGISTERED)


def test_a_new_command_is_found():
    page = "# A\n\n    python -m eval.new --flag \\\n        value      # a remark\n\nor `make new`.\n\n```bash\nscripts/launch_new.sh\n```\n"
    assert commands_of(page) == [
        "python -m eval.new --flag value",
        "scripts/launch_new.sh",
        "make new",
    ]


def program_of(command: str) -> str:
    """Returns the name by which a test refers to a command's program: the last part of its module
    or file."""
    module = re.search(r"python -m ([\w.]+)", command)
    file = re.search(r"([\w-]+)\.(?:py|sh|sbatch|yaml)\b", command)
    return module[1].split(".")[-1] if module else file[1] if file else command.split()[-1]


@pytest.mark.parametrize(
    ("file", "command"),
    [(file, command) for file, commands in TESTED.items() for command in commands],
)
def test_the_named_test_runs_the_program(file, command):
    assert re.search(
        rf"(?<![a-z]){program_of(command)}(?![a-z])", (ROOT / file).read_text(encoding="utf-8")
    )


def flags_of(command: str) -> tuple[str, list[str]]:
    """Returns the program of a Python command, as `python` takes it, and the flags passed to it."""
    words = shlex.split(command)[1:]
    program = words[1] if words[0] == "-m" else words[0]
    arguments = words[: words.index("--")] if "--" in words else words
    return program, [word.split("=")[0] for word in arguments if word.startswith("--")]


@functools.cache
def help_of(program: str) -> str:
    """Returns what --help of one of our programs prints."""
    module = module_of_command(program.removesuffix(".py").replace("/", "."))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module.main(["--help"])
    return printed.getvalue()


def unknown_flags(command: str) -> list[str]:
    """Returns the flags of a Python command that neither its program's --help nor a recipe
    knows."""
    program, flags = flags_of(command)
    known = set(re.findall(r"--[\w-]+", help_of(program)))
    return [flag for flag in flags if flag not in known and flag[2:] not in FIELDS]


PYTHON = [
    command
    for command in ON_PAGES
    if re.match(r"python (-m (scripts|eval|trainer)\.|train\.py)", command)
]


def test_the_flags_of_every_command_exist(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert len(PYTHON) > 50
    assert {command: unknown for command in PYTHON if (unknown := unknown_flags(command))} == {}


def test_a_flag_that_does_not_exist_is_found():
    command = "python -m scripts.export_hf RUN DIR --merge --mergee --data.path F --data.paht F"
    assert unknown_flags(command) == ["--mergee", "--data.paht"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in which commands find the code and the recipes."""
    for name in ("configs", "data", "eval", "model", "planning", "scripts", "trainer", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in PYTHON
        if re.match(r"python train\.py --(config configs/|model\.path )", command)
    ],
)
def test_the_flags_of_a_training_fit_its_recipe(command, folder):
    config = load(shlex.split(command)[2:])
    assert config.data.sources or config.trajectories.path


@pytest.mark.parametrize("command", EXECUTED)
def test_a_command_runs(command, folder, capfd):
    _, _, module, *arguments = shlex.split(f"{command} {EXECUTED[command]}")
    # The planner's status says whether a step fits; 2 means that the request itself is invalid.
    assert module_of_command(module).main(arguments) in (
        (0, 1) if module == "scripts.plan" else (0,)
    )
    out, err = capfd.readouterr()
    assert out and "error" not in err
    if "--write" in arguments:
        assert (folder / arguments[arguments.index("--write") + 1]).stat().st_size > 100


@pytest.mark.slow
@pytest.mark.parametrize("command", EXECUTED_SLOWLY)
def test_a_longer_command_runs(command, folder):
    words = shlex.split(f"{command} {EXECUTED_SLOWLY[command]}")
    words[0] = sys.executable if words[0] == "python" else words[0]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
