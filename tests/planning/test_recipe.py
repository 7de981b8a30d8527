"""The header of a planned recipe has the command that trains on its machine."""

import pathlib

import pytest
import yaml

from model.config import TransformerConfig
from model.families import FAMILIES
from model.lengths import supported_length
from planning.plan import Job
from planning.recipe import recipe_of, recipe_text
from trainer.config.load import load
from trainer.config.schema import MeshConfig

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("topology", "command"),
    [
        ("v5e:2x4", ["# Command   eval"]),
        ("v5p:2x2x4", ["# Command   scripts/launch_tpu.sh run"]),
        ("2xv5e:4x4", ["# Command   # on each of 8 hosts:", "#           eval"]),
        ("v5p:4x4x1", ["# Command   # on each of 4 hosts:", "#           eval"]),
        ("h100:2x8", ["# Command   sbatch --nodes 2"]),
        ("tpu7x:2x2x2", ["# Command   scripts/launch_tpu.sh run NAME --zone ZONE --machine-type"]),
    ],
)
def test_the_header_has_the_command_for_the_machine(topology, command):
    job = Job.of("llama-3.1-8b", topology, 8192)
    recipe = recipe_of(job, {}, None)
    text = recipe_text(job, recipe, "recipe.yaml", None)
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("# Command"))
    for line, beginning in zip(lines[start:], [*command, "# Check "], strict=False):
        assert line.startswith(beginning), line
    assert yaml.safe_load(text) == recipe


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5e:4x4", "2xv5e:4x4", "tpu7x:2x2x2", "h100:2x8"])
def test_hosts_without_a_common_disk_get_a_run_folder_and_prepared_data_in_a_bucket(topology):
    # docs/tpu_vm.md: all workers must share both; Slurm's nodes share a file system
    job = Job.of("llama-3.1-8b", topology, 8192)
    header = recipe_text(job, recipe_of(job, {}, None), "recipe.yaml", None).partition("# Check")[0]
    shared = "--run_dir gs://BUCKET/run --data.prepared gs://BUCKET/prepared"
    assert (shared in header) == (topology not in ("v5e:2x4", "h100:2x8"))
    own = {"run_dir": "gs://mine/run", "data": {"prepared": "gs://mine/prepared"}}
    assert "BUCKET" not in recipe_text(job, recipe_of(job, own, None), "recipe.yaml", None)


def test_a_mesh_is_written_with_its_axis_order():
    mesh = MeshConfig(fsdp=2, sequence=4, order=("sequence", "data", "fsdp", "tensor"))
    recipe = recipe_of(Job.of("llama-3.1-8b", "h100:8", 8192, mesh=mesh), {}, None)
    written = yaml.safe_load(yaml.safe_dump(recipe))["mesh"]
    assert written == {"fsdp": 2, "sequence": 4, "order": list(mesh.order)}


@pytest.mark.parametrize(
    ("shipped", "model"),
    [
        ("qwen3_8b_128k_h100", "qwen3-8b"),
        ("mistral_7b_128k_v5p", "mistral-7b-v0.3"),
        ("gemma3_12b_1m_v5p", "gemma-3-12b"),
        ("smollm2_16k", "smollm2-135m"),
        ("llama31_70b_128k_v5p", "llama-3.1-70b"),
    ],
)
def test_a_plan_beyond_the_trained_length_rescales_rope_like_the_shipped_recipe(shipped, model):
    expected = yaml.safe_load((CONFIGS / f"{shipped}.yaml").read_text(encoding="utf-8"))
    job = Job.of(model, "h100:8", expected["data"]["context_length"])
    written = recipe_of(job, {}, None)
    assert written.get("model", {}).get("overrides") == expected["model"].get("overrides")
    assert recipe_of(job, written, None) == written, "planning a recipe again changes it"


def test_a_planned_recipe_has_defaults_for_template_rate_warmup_and_steps(tmp_path):
    job = Job.of("qwen3-8b", "h100:8", 131072)
    recipe = recipe_of(job, {}, None)
    path = tmp_path / "planned.yaml"
    text = recipe_text(job, recipe, str(path), "qwen3-8b")
    path.write_text(text, encoding="utf-8")
    assert (
        "--model.path HF_DIR --data.path FILE.json" in text
        and "# Template  the model's own" in text
    )
    config = load(["--config", str(path), "--model.path", "x", "--data.path", "y"])
    assert (config.data.template, config.optimizer.learning_rate) == ("tokenizer", 1e-5)
    assert config.train.for_epochs(200).steps == 200 and config.optimizer.first_steps(200) == 6
    assert recipe_of(job, {}, None, "chatml")["data"]["template"] == "chatml"
    own_values = {
        "data": {"template": "koala"},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 9},
        "train": {"steps": 50},
    }
    kept = recipe_of(job, own_values, None)
    assert (
        kept["data"]["template"] == "koala"
        and kept["optimizer"] == own_values["optimizer"]
        and kept["train"]["steps"] == 50
    )
    recorded = recipe_of(job, {"train": {"steps": 50, "epochs": 2}, "planned": ""}, None)
    assert recorded["train"]["epochs"] == 2 and "steps" not in recorded["train"]


def test_a_recipes_own_rope_settings_are_kept():
    overrides = {"rope_theta": 5e6}
    written = recipe_of(
        Job.of("qwen3-8b", "h100:8", 131072), {"model": {"overrides": overrides}}, None
    )
    assert written["model"]["overrides"] == overrides


def test_the_header_says_when_a_planned_length_is_not_needed():
    """The planner does not know the documents, which may be much shorter than rows."""
    for model, context, line in (
        ("qwen3-8b", 131072, "to 131,072 tokens; leave it out if no document is longer than 32,"),
        ("phi-3-mini-4k", 16384, "to 16,384 tokens; leave it out if no document is longer than 4,"),
        ("qwen3-8b", 32768, None),
    ):
        job = Job.of(model, "h100:8", context)
        text = recipe_text(job, recipe_of(job, {}, None), "recipe.yaml", None)
        assert ("# Length " in text) == (line is not None)
        assert line is None or f"# Length    model.overrides stretches RoPE {line}" in text


def test_every_preset_accepts_its_planned_positions():
    """At four times its trained length; Phi-3's config cannot express YaRN, so its base grows
    instead."""
    for family in FAMILIES.values():
        for name in family.presets:
            model = TransformerConfig.preset(name)
            if not supported_length(model):
                continue
            job = Job.of(name, "h100:8", 4 * supported_length(model))
            overrides = recipe_of(job, {}, "org/name")["model"]["overrides"]
            assert model.with_positions(**overrides).max_position_embeddings == job.context, name
    overrides = recipe_of(Job.of("phi-3-mini-4k", "h100:8", 16384), {}, "org/name")["model"][
        "overrides"
    ]
    # NTK-aware: 10,000 * 4^(96 / 94)
    assert overrides == {"max_position_embeddings": 16384, "rope_theta": 41197.0}


def test_longrope_beyond_its_fitted_length_is_reported():
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
    }
    phi = TransformerConfig.preset("phi-3-mini-4k").with_positions(
        rope_scaling=scaling, max_position_embeddings=131072
    )
    for context, reported in ((131072, False), (262144, True)):
        job = Job.of(phi, "h100:8", context)
        recipe = recipe_of(job, {}, "org/name")
        text = recipe_text(job, recipe, "recipe.yaml", None)
        assert ("longrope are fitted to 131,072 tokens" in text) == reported
        assert "overrides" not in recipe["model"]
