"""Tests of planning/auto.py: what `mesh: auto` and `memory: auto` choose for the available
devices."""

import dataclasses
import time
import types

import pytest
import yaml

from data.errors import UserError
from model.config import TransformerConfig
from planning.auto import Machine, machine_named, machine_of, plan_on, spread
from planning.dry_run import dry_run
from planning.memory_estimate import estimate_memory
from planning.plan import Job
from trainer.config.load import dump, load
from trainer.config.schema import AttentionConfig, ModelConfig

AUTO = ("--mesh", "auto", "--memory", "auto")


@pytest.fixture
def recipe(small_recipe):
    """Returns a function that loads the small recipe with flags, and with a preset's shape if one
    is named."""

    def call(*flags, preset=None):
        config = load(["--config", str(small_recipe), *AUTO, *flags])
        if preset is None:
            return config
        model = ModelConfig(preset=preset, tokenizer=config.model.tokenizer)
        # The small recipe's kernel, the reference, holds scores of whole rows.
        return dataclasses.replace(config, model=model, attention=AttentionConfig())

    return call


def cpus(count, gib=1.0):
    return Machine(f"gpu:{count}", f"{count} x CPU", gib, 0.0)


@pytest.mark.parametrize(
    ("devices", "gib", "axes", "parts"),
    [
        (8, 1.0, {"fsdp": 4, "sequence": 2}, 1),  # first over four rows, then over the length
        (4, 1.0, {"fsdp": 4}, 1),
        (2, 1.0, {"fsdp": 2}, 1),
        # All rows at once would take 1.66 MiB per device.
        (8, 0.0016, {"fsdp": 2, "sequence": 4}, 2),
    ],
)
def test_the_batch_size_is_kept_for_any_number_of_devices(recipe, devices, gib, axes, parts):
    planned, reason = plan_on(recipe("--mesh.simulate", str(devices)), cpus(devices, gib))
    sizes = {name: getattr(planned.mesh, name) for name in ("fsdp", "tensor", "sequence")}
    assert {name: size for name, size in sizes.items() if size > 1} == axes
    assert planned.train.batch_size == 4 and planned.train.accumulation == parts
    assert planned.mesh.simulate == devices and planned.auto == ("mesh", "memory")
    assert reason.startswith(
        f"planned for {devices} x CPU: mesh {' x '.join(f'{n} {s}' for n, s in axes.items())}"
    )
    assert ("batches in 2 parts" in reason) == (parts == 2)
    # The run records the reason until the user sets axes.
    assert yaml.safe_load(dump(planned))["planned"] == reason


@pytest.mark.parametrize(
    ("machine", "length", "batch", "axes"),
    [
        ("h100:8", 131072, 8, {"fsdp": 8}),
        ("h100:8", 131072, 1, {"sequence": 8}),
        ("v5p:2x2x4", 131072, 4, {"fsdp": 4, "sequence": 4}),
    ],
)
def test_the_chosen_plan_fits_by_the_estimate(recipe, machine, length, batch, axes):
    flags = ("--data.context_length", str(length), "--train.batch_size", str(batch))
    config = recipe(*flags, preset="llama-3.1-8b")
    planned, _ = plan_on(config, machine_named(machine, None))
    mesh = planned.mesh
    assert mesh.devices == 16 if machine.startswith("v5p") else 8
    assert {n: s for n in ("fsdp", "sequence", "tensor") if (s := getattr(mesh, n)) > 1} == axes
    job = Job(planned, TransformerConfig.preset("llama-3.1-8b"), machine)
    assert estimate_memory(job).fits == "yes"


def test_thousands_of_chips_are_planned_in_seconds(recipe):
    flags = ("--data.context_length", str(1 << 20), "--train.batch_size", "16")
    config = recipe(*flags, preset="llama-3.1-70b")
    begun = time.process_time()
    planned, _ = plan_on(config, machine_named("v5p:16x16x16", None))
    assert planned.mesh.devices == 4096
    assert time.process_time() - begun < 4  # comparing all pairs of 4,096 devices took ten


def test_the_outer_axis_crosses_slices(recipe):
    flags = ("--data.context_length", "32768", "--train.batch_size", "8")
    planned, _ = plan_on(recipe(*flags, preset="llama-3.1-8b"), machine_named("2xv5e:2x4", 31.0))
    assert planned.mesh.dcn == {"fsdp": 2}


def test_a_run_that_does_not_fit_is_refused_with_plans_that_would(recipe):
    config = recipe("--data.context_length", "32768", preset="llama-3.1-8b")
    with pytest.raises(UserError) as error:
        plan_on(config, machine_named("rtx4090:1", None))
    message = str(error.value)
    assert (
        "rows of 32,768 tokens do not fit on rtx4090:1: at least" in message and "\n" not in message
    )
    assert "--adapter.rank 16 --adapter.quantize nf4 would fit" in message
    assert message.endswith("such devices would be enough")
    named = dataclasses.replace(config, adapter=config.adapter.with_rank(16, "nf4"))
    assert plan_on(named, machine_named("rtx4090:1", None))[0].mesh.devices == 1


def test_a_command_that_trains_nothing_uses_all_devices_whether_or_not_training_fits(recipe):
    config = recipe("--data.context_length", "32768", preset="llama-3.1-8b")
    found = spread(config, 8)
    assert (found.mesh.fsdp, found.mesh.sequence, found.mesh.devices) == (4, 2, 8)  # of four rows
    assert (found.memory, found.train) == (config.memory, config.train)
    given = dataclasses.replace(found, auto=("memory",))
    assert spread(given, 2) is given
    with pytest.raises(UserError, match="which no mesh of 8 devices divides"):
        spread(recipe("--data.context_length", "100", "--train.batch_size", "1"), 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--adapter.rank", "4", "--adapter.train", "[router]"), "adapter.train: found 'router'"),
        (("--attention.global_tokens", "4"), "attention.global_tokens is 4; the model has no win"),
    ],
)
def test_what_training_refuses_on_every_mesh_is_named(recipe, flags, message):
    config = recipe(*flags)
    for plan in (lambda: plan_on(config, cpus(8)), lambda: spread(config, 8)):
        with pytest.raises(UserError, match=f"^{message}"):
            plan()


def test_a_given_mesh_that_is_not_the_machines_is_named(small_recipe):
    words = ["--config", str(small_recipe), "--memory", "auto", "--mesh.fsdp", "4"]
    words += ["--mesh.sequence", "1", "--mesh.tensor", "1", "--mesh.simulate", "0"]
    config = load(words)
    with pytest.raises(UserError, match=r"mesh: data 1 x fsdp 4 .* is 4 devices, found 8"):
        plan_on(config, machine_named("h100:8", None))
    with pytest.raises(
        UserError, match=r"--dry-run: 8xH100 has 8 devices, the mesh has data 1 x f"
    ):
        dry_run(config, "8xH100")
    with pytest.raises(UserError, match=r"rows of .* tokens do not fit on 4 x CPU: at least"):
        plan_on(config, cpus(4, 1e-6))


def test_another_plan_leaves_out_the_last_ones_interval(recipe):
    config = recipe()
    memory = dataclasses.replace(config.memory, remat="offload_every_k", every_k=4)
    config = dataclasses.replace(config, memory=memory, planned="for a smaller machine")
    planned, _ = plan_on(config, cpus(8))
    assert (planned.memory.remat, planned.memory.every_k) == ("everything", 2)


def device(**facts):
    return types.SimpleNamespace(
        process_index=0, memory_stats=lambda: {"bytes_limit": 16 << 30}, **facts
    )


def test_machines_are_named_by_their_devices():
    tpus = [
        device(platform="tpu", device_kind="TPU v5p", coords=(x, y, z), slice_index=0)
        for x in range(2)
        for y in range(2)
        for z in range(4)
    ]
    assert machine_of(tpus).topology == "v5p:2x2x4" and machine_of(tpus).device_gib == 16
    flat = [
        device(platform="tpu", device_kind="TPU v5 lite", coords=(x, y, 0), slice_index=s)
        for s in range(2)
        for x in range(2)
        for y in range(4)
    ]
    assert machine_of(flat).topology == "2xv5e:2x4"
    gpus = [device(platform="gpu", device_kind="NVIDIA H100 80GB HBM3") for _ in range(8)]
    for number, gpu in enumerate(gpus):
        gpu.process_index = number // 4
    assert machine_of(gpus).topology == "h100:2x4"
    assert machine_of(gpus[:1]).topology == "h100:1" and machine_of(gpus).host_gib <= 16
    assert machine_of([device(platform="gpu", device_kind="Other")] * 2).topology == "gpu:2"
    machine = machine_of([device(platform="cpu", device_kind="cpu")] * 2)
    assert (machine.topology, machine.host_gib) == ("gpu:2", 0.0)


def test_auto_replaces_a_section_until_a_field_is_set(small_recipe, tmp_path):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump({**fields, "mesh": "auto", "memory": "auto"}))
    assert load(["--config", str(written), "--mesh.simulate", "3"]).auto == ("mesh", "memory")
    assert load(["--config", str(small_recipe), *AUTO]).auto == ("mesh", "memory")
    own = load(["--config", str(small_recipe), "--memory", "auto", "--mesh.simulate", "8"])
    assert own.auto == ("memory",) and own.mesh.fsdp == 2
    written.write_text(dump(load(["--config", str(small_recipe), *AUTO])))
    # Naming an axis brings the section back.
    again = load(["--config", str(written), "--mesh.fsdp", "2", "--mesh.simulate", "2"])
    assert again.auto == ("memory",) and again.mesh.fsdp == 2
    written.write_text(dump(dataclasses.replace(again, planned="for another machine")))
    assert load(["--config", str(written)]).planned == "for another machine"
    assert load(["--config", str(written), "--memory.remat", "nothing"]).planned == ""
    for flags, words in (
        (["--mesh", "fsdp"], "is a section, found 'fsdp'; auto would work, or its fields"),
        (["--mesh", "auto", "--mesh.fsdp", "2"], "--mesh auto and --mesh.fsdp exclude each other"),
    ):
        with pytest.raises(UserError, match=words):
            load(["--config", str(small_recipe), *flags])


def test_a_model_and_data_suffice_as_a_command(hf_model, small_recipe):
    data = str(small_recipe.parent / "conversations.json")
    words = ["--model.path", str(hf_model), "--data.path", data, "--data.context_length", "1024"]
    config = load(words)
    assert config.auto == ("mesh", "memory", "positions") and config.train.epochs == 1
    assert config.name == hf_model.name.lower()
    planned, reason = plan_on(config, cpus(4))
    assert planned.mesh.sequence == 4  # batches have one row
    assert planned.model.overrides == {} and "overrides" not in reason  # see test_positions.py
    with pytest.raises(UserError, match=r"--model\.path and --data\.path suffice without one"):
        load(words[:2])
