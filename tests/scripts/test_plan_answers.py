"""`python -m scripts.plan` without a compiler: machines by name, memory by component, time, price,
suggested changes, recipes."""

import json
import re
import shutil
import time

import pytest
import yaml

import train
from planning.topology import topology_devices
from scripts import plan
from trainer.config.load import load
from trainer.mesh import make_mesh

MODEL = ["--model", "llama-3.1-8b"]


def answer(capsys, *argv) -> tuple[int, str]:
    status = plan.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize(
    ("machine", "devices"),
    [
        ("8xH100", 8),
        ("2x8xH100", 16),
        ("v5p-32", 16),
        ("v6e-8", 8),
        ("4xA100-40GB", 4),
        ("RTX4090", 1),
        ("B200", 1),
    ],
)
def test_every_machine_gets_an_answer_and_a_valid_recipe(machine, devices, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    job = ["--model", "llama-3.2-1b", "--machine", machine, "--context", "16K", "--write", recipe]
    status, output = answer(capsys, *job)
    assert status == 0 and "fits, by the estimate" in output and "seconds of a step" in output
    config = load(["--config", str(recipe), "--model.path", "any", "--data.path", "any"])
    assert config.mesh.devices == devices and config.data.context_length == 16384
    head = recipe.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    launcher = {
        "2x8xH100": "sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm.sbatch --config",
        "v5p-32": "--type v5p-32 --version v2-alpha-tpuv5 -- --config",
    }.get(machine, "python train.py --config")
    assert launcher in head


@pytest.mark.parametrize(
    ("machine", "rows", "options", "mesh"),
    [
        ("3xH100", 3, [], "fsdp 3"),
        ("8xH100", 8, ["--context", "8191"], "fsdp 8"),
        ("3xH100", 3, ["--best"], "fsdp 3"),
        ("6xH100", 6, [], "fsdp 6"),
        ("3xH100", 3, ["--remat", "save_attention"], "fsdp 3"),
        ("8xH100", 8, ["--schedule", "local"], "fsdp 8"),
        ("8xH100", 8, ["--remat", "save_attention"], "sequence 8"),  # as without --batch
    ],
)
def test_a_step_is_planned_if_any_mesh_suits_it(machine, rows, options, mesh, capsys):
    """A row of 8,192 tokens cannot be split over three devices, but each may take a whole one."""
    argv = [*MODEL, "--machine", machine, "--context", "8K", "--batch", rows, *options]
    status, output = answer(capsys, *argv)
    assert status == 0 and f"\nmesh {mesh}, " in output and "fits, by the estimate" in output


@pytest.fixture(scope="module")
def conversations(tmp_path_factory, repository):
    """Returns (tokenizer's folder, a file of a few conversations, a folder for prepared data)."""
    folder = tmp_path_factory.mktemp("data")
    talks = [
        {
            "conversations": [
                {"from": "human", "value": f"Say {n}."},
                {"from": "gpt", "value": f"{n}."},
            ]
        }
        for n in range(9)
    ]
    (folder / "talks.json").write_text(json.dumps(talks), encoding="utf-8")
    return repository / "data/fixtures/tiny_tokenizer", folder / "talks.json", folder / "prepared"


@pytest.mark.parametrize(
    "machine", [["2x8xH100"], ["v5p-32"], ["RTX4090"], ["gpu", "--gpu-memory", "24"]], ids=" ".join
)
def test_dry_run_accepts_the_written_recipe(machine, conversations, tmp_path, capsys):
    """train.py --dry-run accepts the recipe planned for each kind of machine: hosts of GPUs, a slice
    of TPUs, one GPU, and one of which only the memory is known."""
    tokenizer, talks, prepared = conversations
    recipe, start = tmp_path / "mine.yaml", time.process_time()
    job = ["--model", "llama-3.2-1b", "--machine", *machine, "--context", "8K", "--write", recipe]
    status, output = answer(capsys, *job)
    assert status == 0 and "fits, by the estimate" in output and time.process_time() - start < 5
    words = (
        f"--config {recipe} --model.path null --model.preset llama-3.2-1b --dry-run {machine[0]}"
    )
    words += f" --model.tokenizer {tokenizer} --data.path {talks} --data.prepared {prepared}"
    status = train.main([*words.split(), "--run_dir", str(tmp_path / "run")])
    output = capsys.readouterr()
    assert status == 0 and "rows: 1 of 8,192 tokens in an epoch" in output.out, output.err
    assert "disk: 1 checkpoint of" in output.out and "nothing was trained" in output.out
    assert machine[0] == "gpu" or "fits, by the estimate" in output.out
    assert not (tmp_path / "run").exists()


def test_memory_components_add_up_within_the_printed_range(capsys):
    _, output = answer(capsys, *MODEL, "--machine", "8xH100", "--context", "128K")
    listed = re.findall(
        r"^  ([a-z ]+?) +(\d+\.\d\d)(?: |$)", output.split("time:")[0], re.MULTILINE
    )
    sizes = {name.strip(): float(size) for name, size in listed}
    total, usable = sizes.pop("estimate"), sizes.pop("a program may use")
    # Parameters and two moments in float32, split over 8 devices; the layers' inputs and outputs in
    # bfloat16.
    assert sizes["parameters"] == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=0.01)
    assert sizes["moments"] == pytest.approx(2 * sizes["parameters"], abs=0.01)
    assert sizes["layer inputs"] == pytest.approx(32 * 16384 * 4096 * 2 / 2**30, abs=0.01)
    assert total == pytest.approx(sum(sizes.values()), abs=0.03) and total < usable
    low, high = map(float, re.search(r"([\d.]+) to ([\d.]+): compiled plans", output).groups())
    assert low < total < high


def test_price_and_hours_follow_from_the_time(capsys):
    job = "--machine 8xH100 --context 128K --tokens 100M --price-per-device-hour 2"
    _, output = answer(capsys, *MODEL, *job.split())
    ends = {
        name: tuple(float(end.replace(",", "")) for end in pair)
        for name, *pair in re.findall(
            r"^  (seconds of a step|hours|price) +([\d.,]+) to ([\d.,]+)$", output, re.MULTILINE
        )
    }
    for end in (0, 1):
        assert ends["hours"][end] == pytest.approx(
            ends["seconds of a step"][end] * 800 / 3600, rel=0.01
        )
        assert ends["price"][end] == pytest.approx(ends["hours"][end] * 8 * 2, rel=0.01)


def test_a_job_that_does_not_fit_gets_suggestions(capsys):
    job = [*MODEL, "--machine", "8xH100", "--context", "1M"]
    status, output = answer(capsys, *job, "--mesh", "sequence=8", "--remat", "everything")
    assert status == 1 and "does not fit, by the estimate" in output
    flags = re.search(r"fits here with .*?: (--mesh .*)$", output, re.MULTILINE)[1].split()
    assert answer(capsys, *job, *flags)[0] == 0
    status, output = answer(capsys, *MODEL, "--machine", "RTX4090", "--context", "32K")
    count = re.search(r"a row of this length fits on (\d+) of these devices", output)[1]
    assert (
        status == 1
        and answer(capsys, *MODEL, "--machine", f"{count}xRTX4090", "--context", "32K")[0] == 0
    )


def test_a_gpu_with_only_known_memory(capsys):
    job = "--model llama-3.2-1b --machine gpu --gpu-memory 24 --context 8K"
    status, output = answer(capsys, *job.split())
    assert (
        status == 0
        and "a program may use        22.80" in output
        and "time: not estimated" in output
    )


def test_the_longest_context_without_a_compiler(tmp_path, capsys):
    file = tmp_path / "answer.json"
    status, output = answer(
        capsys, *MODEL, "--machine", "8xH100", "--search", "--context", "64K", "--output", file
    )
    longest = json.loads(file.read_text(encoding="utf-8"))
    assert (
        status == 0
        and longest["fits"] == "yes"
        and longest["context"] > 65536
        and f"{longest['context']:,}" in output
    )
    twice = answer(capsys, *MODEL, "--machine", "8xH100", "--context", 2 * longest["context"])
    assert "\nfits, by the estimate" not in twice[1]


def test_every_stage_of_a_recipe_is_planned(repository, capsys):
    recipe = repository / "configs/extension/smollm2_32k.yaml"
    stages = yaml.safe_load(recipe.read_text(encoding="utf-8"))["stages"]
    _, output = answer(capsys, "--config", recipe, "--model", "smollm2-135m", "--machine", "v5e-1")
    for number, stage in enumerate(stages, 1):
        assert (
            f"stage {number} of {len(stages)}" in output
            and f"{stage['context_length']:,} tokens" in output
        )


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--machine", "8xH10", "--context", "64K"], "did you mean H100?"),
        (["--machine", "v5p-33", "--context", "64K"], "v5p-32"),
        (["--machine", "8xH100", "--context", "64X"], "such as 4096, 64K or 1M"),
        (["--machine", "8xH100", "--contxt", "64K"], "did you mean --context?"),
        (["--machine", "8xH100", "--seq_len", "64K"], "not an option of this command"),
        (
            ["--machine", "8xH100", "--context", "64K", "--layout", "stripped"],
            "did you mean striped?",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--template", "chatml"],
            "--template: is for the recipe of --write",
        ),
        (["--context", "64K"], "--machine: missing"),
        (["--machine", "8xH100"], "--context: missing, such as --context 128K"),
        (["--machine", "16xH100", "--context", "64K"], "2x8xH100 is hosts of 8"),
        (
            ["--machine", "8xH100", "--context", "64K", "--gpu-memory", "0"],
            "the GiB per GPU, such as 24, would work",
        ),
        *(
            (
                ["--machine", "8xH100", "--context", "64K", "--price-per-device-hour", price],
                f"--price-per-device-hour: found {price}; a number above 0 is needed",
            )
            for price in ("-3", "0", "nan", "inf")
        ),
        *(
            (
                ["--machine", "8xH100", "--context", "64K", "--host-gib", gib],
                f"--host-gib: found {gib}; a number, at least 0, is needed",
            )
            for gib in ("-1", "nan")
        ),
        (
            ["--machine", "3xH100", "--context", "8K"],
            "data.context_length: found 8192, which no mesh of h100:3 divides; a multiple of 6 "
            "would work",
        ),
        (
            ["--machine", "8xH100", "--context", "8K", "--batch", "4", "--query-chunks", "7"],
            "memory.query_chunks: found 7, needs a divisor of a device's 8192 tokens",
        ),
        (
            ["--machine", "v5p-32", "--context", "64K", "--gpu-memory", "40"],
            "--gpu-memory: v5p:2x2x4 has TPUs",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--compare", "--schedule", "{name: ring}"],
            "found {'name': 'ring'}; expected one of local, ring, ",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--mesh", "sequence=4"],
            "= 4 devices, but h100:8 has 8",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--model", "llama-3.1-8"],
            "did you mean llama-3.1-8b?",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--model", "meta/none"],
            "hf download meta/none",
        ),
        (
            ["--machine", "8xH100", "--context", "64K", "--attention-groups", "3"],
            "memory.attention_groups: 3 does not divide the 8 key/value heads",
        ),
        (
            [
                *("--machine", "h100:3", "--context", "64K", "--model", "olmoe-1b-7b"),
                *("--batch", "3", "--mesh", "expert=3"),
            ],
            "mesh.expert: found 3, which does not divide the model's 64 experts",
        ),
    ],
)
def test_a_typo_is_one_line_before_anything_compiles(argv, fix, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        status = plan.main([*MODEL, *argv])
    except SystemExit as exit:
        status = exit.code
    stderr = capsys.readouterr().err
    assert (
        status == 2 and fix in stderr and stderr.count("\n") == 1 and stderr.startswith("error: ")
    )


def test_a_base_model_asks_for_a_template_in_one_line(hf_model, tmp_path, capsys):
    """A model with a template, a chosen template and a folder without a tokenizer need no
    choice."""
    base, recipe = tmp_path / "base", tmp_path / "recipe.yaml"
    shutil.copytree(hf_model, base)
    job = ["--machine", "h100", "--context", 128, "--write", recipe, "--model"]
    assert answer(capsys, *job, base)[0] == 0, "its template is in its files"
    recipe.unlink()
    for path in base.glob("chat_template*"):
        path.unlink()
    settings = base / "tokenizer_config.json"
    fields = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": None}
    settings.write_text(json.dumps(fields), encoding="utf-8")
    status, output = answer(capsys, *job, base)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2 and "choose one, such as --template vicuna_v1.1" in error
    assert not recipe.exists()
    assert answer(capsys, *job, base, "--template", "chatml")[0] == 0
    assert yaml.safe_load(recipe.read_text(encoding="utf-8"))["data"]["template"] == "chatml"
    (shape := tmp_path / "shape").mkdir()
    shutil.copy(base / "config.json", shape)
    assert answer(capsys, *job, shape)[0] == 0
    assert "docs/templates.md" in recipe.read_text(encoding="utf-8")


def test_a_plan_on_two_slices_can_be_trained_there(tmp_path, capsys):
    """Its recipe says which axis crosses them; without that, training refuses the mesh, and so does
    the plan."""
    recipe = tmp_path / "mine.yaml"
    words = ["--model", "smollm2-135m", "--context", "4096", "--batch", "2", "--machine"]
    assert answer(capsys, *words, "2xv5e-16", "--write", recipe)[0] == 0
    config = load(["--config", str(recipe), "--model.path", "any", "--data.path", "any"])
    assert make_mesh(config.mesh, topology_devices("2xv5e:4x4")).size == 32
    for mesh, machine, message in (
        ("fsdp=2,sequence=16", "2xv5e-16", "found nothing for devices of 2 slices; {fsdp: 2} w"),
        ("fsdp=2,sequence=8,dcn.fsdp=2", "v5e-16", "for devices of 1 slice; leave it out"),
        ("fsdp=2,dcn.fsdp=2", "2xH100", "for devices of 1 host; leave it out"),
    ):
        status, output = answer(capsys, *words, machine, "--mesh", mesh)
        assert status == 2 and output.startswith("error: mesh.dcn: found") and message in output


def test_dry_run_refuses_factors_that_do_not_match_the_machine(small_recipe, capsys):
    words = ["--config", str(small_recipe), "--mesh.simulate", "0", "--dry-run"]
    mesh = load(words[:-1]).mesh
    for dcn, machine, message in (
        ("{fsdp: 2}", f"v5e-{mesh.devices}", "for devices of 1 slice; leave it out"),
        ("{}", f"2xv5e-{mesh.devices // 2}", "for devices of 2 slices; {fsdp: 2} would work"),
    ):
        assert train.main([*words, machine, "--mesh.dcn", dcn]) == 2
        assert message in capsys.readouterr().err


def test_a_picture_names_contexts_that_are_no_powers_of_two(tmp_path, saved_figures):
    tries = [
        {"remat": "nothing", "context": context, "gib": 9.0, "fits": True}
        for context in (65536, 100_000, 1_600_000)
    ]
    machine = {"device_gib": 80.0, "model": "tiny", "topology": "h100:8"}
    plan.draw(tries, machine, tmp_path / "plan.png")
    labels = [label.get_text() for label in saved_figures[0].axes[0].get_xticklabels()]
    assert labels == ["64K", "97.66K", "1.526M"]
