"""Tests of trainer/config/load.py: recipes, overrides, and for each mistake an error that names the
field and the remedy."""

import dataclasses
import datetime
import re
import typing
from typing import Any, Literal

import docstring_parser
import pytest
import yaml

import train
from data.errors import UserError
from eval.live import TESTS
from eval.live_test import LiveTest
from trainer.config import fields, parsing
from trainer.config.data import SourceConfig
from trainer.config.load import dump, load, resolved
from trainer.config.other_trainers import MEANT, MEANT_SECTIONS, NO_FIELD, REMARKS
from trainer.config.yaml_text import parse
from trainer.stages import stages_of

RECIPE = {
    "model": {"preset": "tiny", "tokenizer": "somewhere", "overrides": {"vocab_size": 512}},
    "data": {
        "sources": [{"path": "a.json"}, {"path": "b.json", "weight": 0.5}],
        "context_length": 64,
    },
    "optimizer": {"learning_rate": "1e-3"},
}


def write(tmp_path, change=None, name="small.yaml"):
    """A recipe file: RECIPE with `change` merged into its sections."""
    recipe = {section: dict(values) for section, values in RECIPE.items()}
    for section, values in (change or {}).items():
        recipe[section] = (
            {**recipe.get(section, {}), **values} if isinstance(values, dict) else values
        )
    path = tmp_path / name
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def loaded(tmp_path, *flags, change=None):
    """The configuration of RECIPE with `change` merged into its sections, and of flags."""
    return load(["--config", write(tmp_path, change), *flags])


def again(tmp_path, config):
    """A run's configuration from the config.yaml that it writes."""
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    return load(["--config", str(path)])


def test_defaults_overrides_and_name(tmp_path):
    flags = ["--train.steps", "7", "--mesh.fsdp=1", "--model.overrides.hidden_size", "32"]
    config = loaded(tmp_path, *flags)
    assert config.train.steps == 7 and config.name == "small" and str(config.folder) == "runs/small"
    assert config.model.overrides == {"vocab_size": 512, "hidden_size": 32}
    assert config.optimizer.learning_rate == 1e-3, "YAML reads 1e-3 as text"
    assert config.data.sources[1].weight == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 8


def test_lengths_may_be_written_as_64K(tmp_path):
    change = {
        "data": {"context_length": "64K"},
        "memory": {"feed_forward_chunk": "2k", "loss_chunk": 0},
        "attention": {"window": "4K"},
        "model": {"overrides": {"max_position_embeddings": "128K"}},
    }
    config = loaded(tmp_path, change=change)
    assert config.data.context_length == 65536 and type(config.data.context_length) is int
    assert (config.memory.feed_forward_chunk, config.memory.loss_chunk) == (2048, 0)
    assert config.attention.window == 4096
    assert config.model.overrides["max_position_embeddings"] == 131072
    assert again(tmp_path, config) == config
    rope = {"max_position_embeddings": "1M"}
    stages = [{"context_length": "16K", "rope": rope}, {"context_length": 1 << 20}]
    first, last = loaded(tmp_path, change={"stages": stages}).stages
    assert (first.context_length, last.context_length) == (16384, 1 << 20)
    assert first.rope == {"max_position_embeddings": 1 << 20}
    for flag, length in (("1M", 1 << 20), ("1_024", 1024)):
        flags = ["--data.context_length", flag, "--attention.window", "null"]
        config = loaded(tmp_path, *flags)
        assert (config.data.context_length, config.attention.window) == (length, None)
    flags = ["--model.overrides.max_position_embeddings", "32k"]
    config = loaded(tmp_path, *flags)
    assert config.model.overrides["max_position_embeddings"] == 32768
    for text, needs in (("64X", "such as 4096, 64K or 1M"), ("-5", "at least 1")):
        with pytest.raises(UserError, match=f"data.context_length: found {text}, .*{needs}"):
            loaded(tmp_path, "--data.context_length", text)


def test_every_field_of_tokens_may_be_written_as_64K():
    """All fields whose documentation begins with tokens, or that count tokens under another
    name."""
    sections = [*fields.SECTIONS.values(), *fields.LISTS.values(), LiveTest, *TESTS.values()]
    named, typed = set(), set()
    for section in sections:
        hints = typing.get_type_hints(section)
        for field in docstring_parser.parse_from_object(section).params:
            name = f"{section.__name__}.{field.arg_name}"
            if "Tokens" in str(hints[field.arg_name]):
                typed.add(name)
            if re.match(
                "((Prompt t|T)okens|Lengths|First tokens|Queries|Keys) |Sliding", field.description
            ):
                named.add(name)
    assert typed == named and {"MemoryConfig.loss_chunk", "LiveTest.tokens"} <= typed


def test_resolved_round_trips_through_yaml(tmp_path):
    flags = ["--attention.schedule", '{"name": "ring", "bidirectional": true}']
    config = loaded(tmp_path, *flags, "--samples.prompts", '["Who?"]')
    assert again(tmp_path, config) == config
    assert resolved(config)["data"]["sources"][0]["path"] == "a.json"
    assert config.attention.schedule_name == "ring"


def test_data_path_replaces_sources(tmp_path):
    config = loaded(tmp_path, "--data.path", "mine.json")
    assert [source.path for source in config.data.sources] == [
        "mine.json"
    ] and config.data.path is None
    config = loaded(tmp_path, "--data.sources", '[{"path": "other.json", "template": "tokenizer"}]')
    assert [(source.path, source.template) for source in config.data.sources] == [
        ("other.json", "tokenizer")
    ]
    for flags, clean in (
        (["--data.clean", "scraped"], "scraped"),
        ([], "scraped"),
        (["--data.clean.html", "always"], {}),
    ):
        recipe = write(tmp_path, {"data": {"clean": clean if not flags else {}}})
        rules = load(["--config", recipe, "--data.path", "a.json", *flags]).data.clean
        assert (rules.html, rules.rate_limits) == (
            ("always", False) if clean == {} else ("detect", True)
        )
    source = {"path": "a.txt", "format": "text", "template": "koala", "weight": 0.5}
    config = loaded(tmp_path, "--data.path", "mine.txt", change={"data": {"sources": [source]}})
    assert resolved(config)["data"]["sources"] == [
        source | {"path": "mine.txt", "fields": {}, "add_bos": None, "control_tokens": False}
    ]


def test_steps_and_epochs_replace_each_other(tmp_path):
    recipe = write(tmp_path, {"train": {"epochs": 3}}, "epochs.yaml")
    train = load(["--config", recipe, "--train.steps", "5"]).train
    assert (train.steps, train.epochs) == (5, None)
    assert loaded(tmp_path, "--train.epochs", "2", change={"train": {"steps": 7}}).train.epochs == 2
    assert again(tmp_path, load(["--config", recipe])).train.epochs == 3, (
        "a run's own configuration has both"
    )


def test_a_recipe_with_steps_and_epochs_is_refused(tmp_path):
    """In transformers max_steps wins, here epochs would: whoever sets both expects one of them."""
    recipe = write(tmp_path, {"train": {"epochs": 3, "steps": 7}})
    with pytest.raises(
        UserError, match=r"train\.steps: found 7 with train\.epochs 3; keep one of them"
    ):
        load(["--config", recipe])
    for flags in (["--train.steps", "5"], ["--train.epochs", "2"]):
        load(["--config", recipe, *flags])


def without_rate(tmp_path, change=None):
    return write(tmp_path, {"optimizer": {"beta1": 0.9}, **(change or {})}, "no_rate.yaml")


def test_one_rule_gives_the_learning_rate_with_and_without_a_recipe(tmp_path, monkeypatch):
    monkeypatch.delitem(RECIPE, "optimizer")
    model = ["--model.path", "hf", "--data.path", "a.json"]
    for words in (model, ["--config", without_rate(tmp_path)]):
        for rank, rate in (("0", 1e-5), ("8", 1e-4)):
            command = [*words, "--adapter.rank", rank]
            assert load(command).optimizer.learning_rate == rate, command
            given = load([*command, "--optimizer.learning_rate", "3e-5"])
            assert given.optimizer.learning_rate == 3e-5
    recipe = without_rate(tmp_path, {"adapter": {"rank": 4}})
    assert load(["--config", recipe]).optimizer.learning_rate == 1e-4
    assert load(["--config", recipe, "--adapter.rank", "0"]).optimizer.learning_rate == 1e-5
    written = write(tmp_path, {"adapter": {"rank": 4}, "optimizer": {"learning_rate": 2e-5}})
    assert load(["--config", written]).optimizer.learning_rate == 2e-5


def test_a_run_that_began_with_the_old_default_rate_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(RECIPE, "optimizer")
    run = tmp_path / "run"
    command = ["--config", without_rate(tmp_path), "--run_dir", str(run)]
    began = load([*command, "--optimizer.learning_rate", "2e-5"])
    run.mkdir()
    (run / "config.yaml").write_text(dump(began), encoding="utf-8")
    assert load(command) == began
    assert capsys.readouterr().err == (
        f"{run}: keeps optimizer.learning_rate 2e-05, with which it began; the default is now "
        "1e-05\n"
    )
    adapted = [*command, "--adapter.rank", "8"]
    assert load(adapted).optimizer.learning_rate == 2e-5
    assert load([*command, "--optimizer.learning_rate", "1e-5"]).optimizer.learning_rate == 1e-5
    # A rate that its command gave must be given again.
    other = load([*command, "--optimizer.learning_rate", "3e-4"])
    (run / "config.yaml").write_text(dump(other), encoding="utf-8")
    assert load(command).optimizer.learning_rate == 1e-5
    # A stage's own rate is no default.
    (run / "stages/1").mkdir(parents=True)
    (run / "stages/1/config.yaml").write_text(dump(began), encoding="utf-8")
    stages = ["--stages", "[{context_length: 64, learning_rate: 2e-5}, {context_length: 128}]"]
    assert load([*command, *stages]).optimizer.learning_rate == 1e-5
    assert load([*command, "--stages", "[{context_length: 64}]"]).optimizer.learning_rate == 2e-5


def test_a_command_without_recipe_trains_for_an_epoch_or_its_stages():
    command = ["--model.path", "hf", "--data.path", "a.json"]
    stages = ["--stages", "[{context_length: 256, steps: 5}]"]
    (stage,) = stages_of(load([*command, *stages]))
    assert (stage.train.steps, stage.train.epochs) == (5, None)
    assert load([*command, "--stages", "[]"]).train.epochs == 1


def test_a_kernel_without_tiles_replaces_the_recipes_tiles(tmp_path):
    recipe = write(
        tmp_path, {"attention": {"kernel": "xla", "query_tile": 128, "key_tile": 64, "window": 9}}
    )

    def attention(*flags: str):
        config = load(["--config", recipe, *flags]).attention
        return config.kernel, config.query_tile, config.key_tile, config.window

    assert attention() == ("xla", 128, 64, 9)
    assert attention("--attention.kernel", "auto") == ("auto", 128, 64, 9)
    for kernel in ("reference", "mosaic"):
        assert attention("--attention.kernel", kernel) == (kernel, 0, 0, 9)
        with pytest.raises(
            UserError,
            match=r"attention\.kernel is .*; leave attention\.query_tile and attention\.key_tile 0",
        ):
            attention("--attention.kernel", kernel, "--attention.key_tile", "64")


def test_flags_that_every_stage_replaces_are_refused(tmp_path):
    stages = [
        {"context_length": 64, "steps": 3, "warmup_steps": 0},
        {"context_length": 128, "steps": 2, "learning_rate": 0.1},
    ]
    recipe = write(tmp_path, {"stages": stages})
    for field in ("train.steps", "data.context_length"):
        with pytest.raises(
            UserError,
            match=rf"--{field} has no effect, since each of the recipe's stages has its own",
        ):
            load(["--config", recipe, f"--{field}", "64"])
    flags = "--optimizer.learning_rate 1 --optimizer.warmup_steps 2 --train.batch_size 2"
    load(["--config", recipe, *flags.split()])
    load(["--config", recipe, "--data.context_length", "64", "--stages", "[]"])
    given = ["--stages", '[{"context_length": 128, "steps": 3}]', "--train.steps", "77"]
    with pytest.raises(
        UserError,
        match=r"--train.steps has no effect, since each of the stages of --stages has its own steps",
    ):
        load(["--config", recipe, *given])
    del stages[0]["steps"]
    config = loaded(tmp_path, "--train.steps", "9", change={"stages": stages})
    assert [stage.train.steps for stage in stages_of(config)] == [9, 2]


def test_cleaning_is_switched_on_field_by_field(tmp_path):
    clean = loaded(tmp_path, change={"data": {"clean": {"languages": ["en", "de"]}}}).data.clean
    assert (
        clean.languages == ("en", "de")
        and clean.duplicates
        and not clean.refusals
        and not clean.company_names
    )
    config = loaded(tmp_path, "--data.clean.refusals", "true", "--data.clean.languages", "[fr]")
    assert config.data.clean.refusals and config.data.clean.languages == ("fr",)
    assert again(tmp_path, config) == config


def test_model_path_replaces_the_scratch_model(tmp_path):
    model = loaded(tmp_path, "--model.path", "hf").model
    assert (model.path, model.preset, model.tokenizer, model.overrides) == ("hf", None, None, {})


def test_only_the_positions_of_a_pretrained_model_may_be_overridden(tmp_path):
    """Overrides of positions alone do not define a model from scratch: a recipe keeps them when the
    model is named."""
    positions = {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "max_position_embeddings": 8192,
    }
    recipe = {"model": {"preset": None, "tokenizer": None, "overrides": positions}}
    assert loaded(tmp_path, "--model.path", "hf", change=recipe).model.overrides == positions
    scaling = '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'
    model = loaded(tmp_path, "--model.path", "hf", "--model.overrides", scaling).model
    assert model.overrides["rope_scaling"]["factor"] == 2.0
    with pytest.raises(
        UserError,
        match=r"hidden_size.*model\.path fixes all but rope_theta, rope_scaling, max_position_emb",
    ):
        loaded(tmp_path, "--model.path", "hf", "--model.overrides.hidden_size", "64")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mesh.seq 2", ["--mesh.seq", "did you mean --mesh.sequence?"]),
        ("--train.stps 4", ["--train.stps", "did you mean --train.steps?", "train.batch_size"]),
        ("--stesp 4", ["unknown field --stesp", "valid: name, auto", "train.*"]),
        ("--optimizer.lr 1", ["did you mean --optimizer.learning_rate?"]),
        ("--confg x.yaml", ["did you mean --config?"]),
        ("--output_dir x", ["did you mean --run_dir?"]),
        (
            "--per_device_train_batch_size 4",
            ["did you mean --train.batch_size, rows of a step over all devices and microbatches?"],
        ),
        ("--label_smoothing_factor 0.1", ["(there is no label smoothing for fine-tuning); valid"]),
        ("--train_on_inputs true", ["did you mean --data.train_on everything, if true?"]),
        ("--eval_dataset x", ["did you mean --data.held_out_path?"]),
        ("--sequence_len 8", ["did you mean --data.context_length?"]),
        ("--datasets x", ["did you mean --data.sources?"]),
        ("--seed 1", ["did you mean --model.seed or --data.seed?"]),
        ("--steps 1", ["did you mean --train.steps?"]),
        ("--model_name x", ["did you mean --model.path?"]),
        ("--chat_template_path x", ["did you mean --data.template?"]),
        ("--val_set_size 0.1", ["did you mean --data.held_out_fraction, a share?"]),
        ("--evals_per_epoch 4", ["did you mean --train.evaluate_every, a number of steps?"]),
        ("--load_in_4bit true", ["did you mean --adapter.quantize nf4, if true?"]),
        ("--sample_packing true", ["(rows are always packed with documents); valid"]),
        ("--batch_size 8", ["did you mean --train.batch_size, rows of a step over all devices"]),
        ("--model org/name", ["--model is a section (did you mean --model.path?); its fields"]),
        ("--adapters x", ["did you mean --adapter.path?"]),
        ("--attn_impl sdpa", ["did you mean --attention.kernel?"]),
        ("--attention.kernel sdpa", ["found sdpa (did you mean auto?)"]),
        ("--model.compute_dtype bf16", ["found bf16 (did you mean bfloat16?)"]),
        ("--memory.remat true", ["(did you mean save_attention, or nothing to save memory?)"]),
        ("--wandb_entity x", ["(the package wandb reads it from its environment"]),
        ("--packed true", ["(rows are always packed with documents); valid"]),
        ("--special_tokens x", ["(they are the tokenizer's"]),
        ("--label_smoothing 0.1", ["did you mean --preference.label_smoothing?"]),
        ("--dataset_split train", ["(the path names the split's file or folder)"]),
        ("--beta 0.1", ["did you mean --preference.beta?"]),
        ("--preference.cpo_alpha 1", ["did you mean --preference.sft_weight?"]),
        ("--preference.loss_weights 1", ["(preference.loss is one loss, to which preference.sft"]),
        ("--max_prompt_length 9", ["(preference.long_pairs says what happens to a pair longer"]),
        ("--ref_adapters x", ["(preference.ref_model is a whole model; scripts.export_hf --merge"]),
        ("--logging_dir x", ["did you mean --run_dir?"]),
        ("--lora_r 8", ["did you mean --adapter.rank?"]),
        ("--adam_beta2 0.9", ["did you mean --optimizer.beta2?"]),
        ("--min_lr 1e-6", ["did you mean --optimizer.final_fraction, a share of the peak?"]),
        ("--preference.rpo_alpha 1", ["did you mean --preference.sft_weight?"]),
        ("--preference.loss dpo", ["preference.loss: found dpo (did you mean sigmoid?)"]),
        ("--packing true", ["(rows are always packed with documents)"]),
        ("--model.max-seq-length 4", ["did you mean --data.context_length?"]),
        ("--mesh 4", ["--mesh is a section", "mesh.fsdp"]),
        ("--data.clean true", ["--data.clean", "'true'", "scraped"]),
        ("--data.clean.refusal true", ["did you mean --data.clean.refusals?"]),
        ("--data.clean.html yes", ["data.clean.html", "detect", "yes"]),
        ("--train.steps x", ["train.steps", "int", "x"]),
        ("--mesh.dcn 4", ["mesh.dcn: found 4", "mapping"]),
        ("--train.steps", ["--train.steps needs a value"]),
        ("stray", ["stray"]),
        ("--memory.remat all", ["memory.remat", "nothing", "save_attention", "all"]),
        ("--attention.schedule rong", ["attention.schedule", "rong", "local, ring, all_gather"]),
        ('--attention.schedule {"degree":8}', ["attention.schedule", "name"]),
        ("--attention.schedule local --mesh.sequence 2", ["attention.schedule", "use ring"]),
        ("--attention.window 0", ["attention.window is 0", "at least 1", "null"]),
        ("--attention.window wide", ["attention.window", "wide"]),
        (
            "--attention.kernel reference --attention.key_tile 64",
            ["attention.kernel is 'reference'", "attention.key_tile 0"],
        ),
        ("--attention.global_tokens -1 --attention.window 8", ["attention.global_tokens is -1"]),
        (
            "--attention.global_tokens 4 --attention.window 8 --attention.kernel tpu",
            ["attention.kernel: 'tpu'", "xla"],
        ),
        ("--data.path x --data.sources []", ["--data.path and --data.sources"]),
        ("--train.steps 4 --train.epochs 1", ["--train.steps and --train.epochs"]),
        ("--checkpoint.local /x", ["checkpoint.local_every: found 0", "at least 1"]),
        ("--checkpoint.local_every 5", ["checkpoint.local: found None", "/dev/shm"]),
        ("--checkpoint.local /x --checkpoint.local_every -1", ["checkpoint.local_every", "-1"]),
        ("--checkpoint.local x --checkpoint.local_every 5", ["checkpoint.local", "absolute"]),
        ("--checkpoint.local gs://b/x --checkpoint.local_every 5", ["checkpoint.local", "gs://"]),
        ("--data.sources.path x", ["--data.sources.path", "--data.path FILE"]),
        ("--data.sources []", ["no data", "--data.path FILE"]),
        ('--data.sources [{"pth":"x"}]', ["data.sources", "pth", "weight"]),
        (
            "--data.context_length 65 --mesh.sequence 4",
            ["data.context_length: found 65", "68", "64"],
        ),
        (
            "--data.context_length 60 --mesh.sequence 4 --attention.layout=zigzag",
            ["2 * mesh.sequence = 8 (zig", "64", "56"],
        ),
        ("--mesh.fsdp 4 --train.batch_size 6", ["train.batch_size: found 6", "= 4", "8"]),
        (
            "--train.accumulation 4 --train.batch_size 6",
            ["train.batch_size: found 6", "train.accumulation = 4", "8"],
        ),
        ("--train.accumulation 0", ["train.accumulation: found 0"]),
        ("--memory.every_k 0", ["memory.every_k: found 0, needs at least 1"]),
        (
            "--memory.query_chunks 3 --memory.remat nothing --data.context_length 64",
            ["memory.query_chunks: found 3", "64 tokens"],
        ),
        (
            "--logging.profile_steps [3]",
            ["logging.profile_steps: found (3,)", "first and the last", "[]"],
        ),
        (
            "--logging.profile_steps [4,9] --train.steps 8",
            ["logging.profile_steps: found (4, 9)", "train.steps = 8"],
        ),
        (
            "--optimizer.moment_dtype bfloat16 --optimizer.beta2 0.999",
            ["optimizer.beta2: found 0.999", "at most 0.99"],
        ),
        (
            "--optimizer.moment_dtype 8bit --optimizer.name muon",
            ["optimizer.moment_dtype: found '8bit'", "float32 or bfloat16", "muon"],
        ),
        (
            "--optimizer.moment_dtype bfloat16 --optimizer.name adafactor",
            ["optimizer.moment_dtype: found 'bfloat16', needs float32", "adafactor"],
        ),
        (
            "--optimizer.weight_dtype bfloat16 --memory.moments_on_host true",
            ["memory.moments_on_host: found True", "optimizer.weight_dtype bfloat16"],
        ),
        ("--mesh.tensor 0", ["mesh.tensor: found 0"]),
        (
            '--mesh.data 3 --mesh.dcn {"data":2} --train.batch_size 3',
            ["mesh.dcn: found {'data': 2}", "divisor", "data 3"],
        ),
        (
            '--mesh.fsdp 2 --mesh.dcn {"data":2} --train.batch_size 2',
            ["mesh.dcn: found {'data': 2}", "data 1 x fsdp 2", "{fsdp: 2} would work"],
        ),
        ('--mesh.dcn {"rows":2}', ["mesh.dcn: found {'rows': 2}", "factors of the axes"]),
        ('--mesh.order ["data","fsdp","tensor"]', ["mesh.order: found", "each once", "sequence"]),
        ("--mesh.simulate 8", ["mesh.simulate: found 8", "simulate 1"]),
        ("--model.preset null --model.overrides {}", ["no model", "--model.path"]),
        ("--model.path hf --model.preset tiny", ["model.preset", "model.path"]),
        ("--model.trainable (", ["model.trainable", "regular expression"]),
        ("--optimizer.learning_rate 0", ["optimizer.learning_rate", "positive"]),
        (
            '--evaluations [{"test":"lines","name":"train"}]',
            ["evaluations.name: found ['train']", "them train, metrics"],
        ),
        (
            "--adapter.targets [q_proj,v_proj] --adapter.train [5]",
            ["command line: adapter.train: found [5], expects list of str"],
        ),
        ("--data.train_on first", ["data.train_on: found first", "one of all, last, everything"]),
        ("--config_version 1", ["--config_version is recorded by runs"]),
        ("--planned x", ["--planned is recorded by runs"]),
        ("--data.path ", ["command line: data.path: found '', needs a path"]),
        ("--data.path=", ["command line: data.path: found '', needs a path"]),
        ("--data.path null", ["command line: data.path: found null, needs a path"]),
        ("--run_dir ", ["command line: run_dir: found '', needs a path"]),
        ("--data.held_out_path ", ["data.held_out_path: found '', needs a path"]),
        ("--data.prepared ", ["data.prepared: found '', needs a path"]),
        ("--adapter.rank 4 --adapter.path ", ["adapter.path: found '', needs a path"]),
        ("--logging.wandb ", ["logging.wandb: found '', needs the name of a project"]),
        ("--preference.loss ", ["preference.loss: found , expects one of sigmoid"]),
        ("--name ", ["command line: name: found '', needs a name"]),
        ("--name ../../etc", ["name: found '../../etc', needs the name of a folder in runs/"]),
        ("--name ..", ["name: found '..', needs the name of a folder in runs/"]),
        ("--name a/..", ["name: found 'a/..', needs the name of a folder in runs/"]),
        ("--name /tmp/x", ["name: found '/tmp/x', needs the name of a folder in runs/"]),
        ("--train.steps 010", ["command line: train.steps: found 010, expects int"]),
        ("--train.steps 1:30", ["command line: train.steps: found 1:30, expects int"]),
        ("--checkpoint.minutes 1:30", ["checkpoint.minutes: found 1:30, expects a finite number"]),
        ("--data.context_length 0400", ["data.context_length: found 0400, expects a number of"]),
        ("--optimizer.learning_rate=-1e-5", ["learning_rate: found -1e-05, needs a positive"]),
        (
            "--adapter.targets [q_proj]",
            ["adapter.rank: found 0 with adapter.targets; needs at least 1"],
        ),
        ("--adapter.alpha 32", ["adapter.rank: found 0 with adapter.alpha; needs at least 1"]),
        (
            "--preference.ref_model nonexist --preference.beta 5",
            ["preference.loss: found None with preference.beta; needs a loss, such as sigmoid"],
        ),
        ("--preference.ref_model x", ["preference.loss: found None with preference.ref_model"]),
        (
            "--preference.loss sigmoid --preference.simpo_gamma 1",
            ["preference.loss: found 'sigmoid' with preference.simpo_gamma; needs simpo"],
        ),
        (
            "--trajectories.task walker_walk",
            ["trajectories.path: found None with trajectories.task; needs a folder of episodes"],
        ),
        (
            "--trajectories.path x --trajectories.task walker_walk --data.sources [] --data.seed -1",
            ["data.seed: found -1, needs 0 or more with trajectories.path"],
        ),
        (
            "--trajectories.path x --trajectories.task walker_walk --data.sources [] "
            "--data.held_out_path y",
            ["data.held_out_path: found 'y', needs to be left out with trajectories.path, whose"],
        ),
        (
            "--trajectories.path x --trajectories.task walker_walk --data.sources [] "
            "--data.template chatml",
            ["data.template: found 'chatml', needs to be left out with trajectories.path, whose"],
        ),
        (
            "--trajectories.path x --trajectories.task walker_walk --data.sources [] "
            "--data.clean.html always",
            ["data.clean.html: found 'always', needs to be left out with trajectories.path, whose"],
        ),
        (
            "--checkpoint.best_is highest",
            ["checkpoint.best: found None with checkpoint.best_is; needs the name of a metric"],
        ),
        (
            "--optimizer.decay_fraction 0.5",
            ["optimizer.schedule: found 'cosine' with optimizer.decay_fraction; needs wsd"],
        ),
        (
            "--optimizer.schedule constant --optimizer.final_fraction 0",
            ["optimizer.schedule: found 'constant' with optimizer.final_fraction; needs cosine, "],
        ),
        (
            "--optimizer.name adafactor --optimizer.beta1 0.8",
            ["optimizer.name: found 'adafactor' with optimizer.beta1; needs adamw, lion or muon"],
        ),
        (
            "--optimizer.name adafactor --optimizer.beta2 0.99",
            ["optimizer.name: found 'adafactor' with optimizer.beta2; needs adamw, lion or muon"],
        ),
        (
            "--optimizer.name adafactor --optimizer.epsilon 1e-6",
            ["optimizer.name: found 'adafactor' with optimizer.epsilon; needs adamw or muon"],
        ),
        (
            "--optimizer.name lion --optimizer.epsilon 1e-6",
            ["optimizer.name: found 'lion' with optimizer.epsilon; needs adamw or muon"],
        ),
        (
            "--memory.every_k 3",
            ["memory.remat: found 'save_attention' with memory.every_k; needs every_k or offload"],
        ),
        (
            "--data.held_out_fraction 0 --train.evaluate_every 2",
            ["data.held_out_fraction: found 0.0 with train.evaluate_every; needs a share above 0"],
        ),
        (
            "--auto [mesh] --mesh.data 8",
            ["command line: --mesh auto and --mesh.data exclude each other"],
        ),
        ("--auto [mseh]", ["command line: auto: found [mseh], expects list of one of mesh, mem"]),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, flags, words):
    with pytest.raises(UserError) as error:
        loaded(tmp_path, *flags.split(" "))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trian": {"steps": 1}}, ["unknown field trian", "did you mean train?"]),
        (
            {"optimizer": {"lr": 1}},
            ["unknown field optimizer.lr (did you mean optimizer.learning_rate?)"],
        ),
        ({"train": {"step": 1}}, ["unknown field train.step ", "train.steps", "batch_size"]),
        (
            {"data": {"sources": [{"path": "a", "wieght": 1}]}},
            ["data.sources[0].wieght", "data.sources[0].weight"],
        ),
        ({"data": {"sources": [{"weight": 1}]}}, ["data.sources", "path"]),
        ({"data": {"path": "a"}}, ["data.path and data.sources"]),
        (
            {"data": {"clean": {"langages": ["en"]}}},
            ["data.clean.langages", "did you mean data.clean.languages?"],
        ),
        ({"data": {"clean": None}}, ["data.clean expects", "found None"]),
        (
            {"data": {"sources": [{"path": "a"}, {"path": "b", "weight": "much"}]}},
            ["sources[1].weight", "number", "much"],
        ),
        (
            {"data": {"sources": [{"path": "a"}, {"path": "b", "weight": -1}]}},
            ["sources[1].weight: found -1.0", "positive"],
        ),
        (
            {"trian": {}, "train": {"step": 1}, "adapter": "lora", "num_epochs": 3},
            [
                "unknown fields num_epochs (did you mean train.epochs?), trian (did you mean "
                "train?), train.step (did you mean train.steps?), adapter (a section, found "
                "'lora'; did you mean adapter.rank?); train.py --help all lists the valid ones"
            ],
        ),
        (
            {"data": {"sources": [{"path": "a", "wieght": 1, "max_samples": 9}]}},
            ["unknown fields data.sources[0].max_samples (a source's", ".wieght (did", "; valid: "],
        ),
        (
            {"optimizer": {"type": "x"}, "data": {"sources": [{"path": "a", "type": "x"}]}},
            ["unknown fields optimizer.type, data.sources[0].type (records are recognized;"],
        ),
        ({"data.path": "a"}, ["unknown field data.path (write data: {path: ...});"]),
        ({"adapter": "lora"}, ["adapter expects the fields", "'lora'; did you mean adapter.rank?"]),
        ({"data": {"sources": ["a"]}}, ["expects the fields path,", "{path: a} would work"]),
        (
            {"data": {"sources": None, "path": ["a", "b"]}},
            ["data.path: found", "did you mean data.sources: [{path: a}, {path: b}]?"],
        ),
        (
            {"optimizer": {"name": "adamw_bnb_8bit"}},
            ["(did you mean adamw with optimizer.moment_dtype 8bit?), expects one of adamw"],
        ),
        (
            {"optimizer": {"schedule": "constant_with_warmup"}},
            ["(did you mean constant with optimizer.warmup_steps?)"],
        ),
        ({"adapter": {"rank": 8, "quantize": "4bit"}}, ["found 4bit (did you mean nf4?)"]),
        ({"adapter": {"rank": 8, "targets": "q_proj,v_proj"}}, ["found 'q_proj,v_proj', needs"]),
        (
            {"data": {"clean": {"languages": "en,de"}}},
            ["data.clean.languages: found 'en,de'", "such as [en, de]"],
        ),
        ({"data": {"text_tokens": ""}}, ["data.text_tokens: found , expects list of str"]),
        ({"data": {"text_tokens": 5}}, ["data.text_tokens: found 5", "list of str"]),
        ({"train": 5}, ["train expects", "found 5"]),
        ({"train": {"steps": None}}, ["train.steps: found null, expects int"]),
        ({"optimizer": {"learning_rate": 10**399}}, ["optimizer.learning_rate"]),
        ({"optimizer": {"learning_rate": 10**400}}, ["line ", "a number of 401 characters"]),
        ({"train": {"steps": "many"}}, ["train.steps", "int", "many"]),
        ({"config_version": 9}, ["config_version: found 9", "needs 2"]),
        ({"run_dir": ""}, ["run_dir: found '', needs a path"]),
        ({"data": {"sources": [{"path": ""}]}}, ["data.sources[0].path: found '', needs a path"]),
        (
            {"auto": ["mesh"], "mesh": {"sequence": 2}},
            ["auto: found mesh, which replaces mesh.sequence 2; leave one of them out"],
        ),
        (
            {"auto": ["memory"], "memory": {"remat": "nothing"}},
            ["auto: found memory, which replaces memory.remat nothing; leave one of them out"],
        ),
    ],
)
def test_mistakes_in_the_recipe(tmp_path, change, words):
    path = write(tmp_path, change)
    with pytest.raises(UserError) as error:
        load(["--config", path])
    for word in [path, *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("written", ["010", "08", "1:30", "0o10"])
def test_a_number_that_yaml_versions_read_differently_is_refused(tmp_path, written):
    """YAML 1.1 reads 010 as eight and 1:30 as ninety; PyYAML writes neither."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"train: {{steps: {written}}}")
    assert yaml.safe_load(written) in (8, 90, "08", "0o10")
    with pytest.raises(UserError, match=f"train.steps: found {written}, expects int"):
        load(["--config", str(path)])


@pytest.mark.parametrize(
    "text", ["#1.json", "~", "NULL", "&x", "*x", "-foo", "1:30", "010", "a: b", "'q'", "[a", " "]
)
def test_a_text_is_taken_as_written(tmp_path, text):
    recipe = write(tmp_path)
    flags = [f"--data.held_out_path={text}", f"--run_dir={text}", f"--data.path={text}"]
    config = load(["--config", recipe, *flags])
    assert (config.data.held_out_path, config.run_dir) == (text, text)
    assert [source.path for source in config.data.sources] == [text]
    assert again(tmp_path, config) == config
    none = load(["--config", recipe, "--data.held_out_path", "null", "--run_dir", "null"])
    assert (none.data.held_out_path, none.run_dir) == (None, None)


def test_entries_of_a_nested_mapping_are_added(tmp_path):
    flags = ["--model.overrides.rope_scaling.rope_type", "linear"]
    flags += ["--model.overrides.rope_scaling.factor", "4", "--model.overrides.rms_norm_eps=1e-5"]
    overrides = loaded(tmp_path, *flags).model.overrides
    assert overrides["rope_scaling"] == {"rope_type": "linear", "factor": 4}
    assert type(overrides["rms_norm_eps"]) is float and overrides["rms_norm_eps"] == 1e-5
    texts = {"a": ".e5", "b": "e5", "c": "1e"}
    flags = ["--data.chat_template_kwargs", str(texts)]
    assert loaded(tmp_path, *flags).data.chat_template_kwargs == texts
    assert overrides["vocab_size"] == 512


def test_what_a_flag_switches_off_is_left_out(tmp_path):
    change = {
        "adapter": {"rank": 4, "alpha": 32.0, "targets": ["q_proj"]},
        "optimizer": {"schedule": "wsd", "decay_fraction": 0.5},
        "train": {"evaluate_every": 3},
    }
    recipe = write(tmp_path, change)
    flags = ["--adapter.rank", "0", "--data.held_out_fraction", "0"]
    config = load(["--config", recipe, *flags, "--optimizer.schedule", "constant"])
    assert (config.adapter.alpha, config.adapter.targets) == (16.0, ("all-linear",))
    assert (config.optimizer.decay_fraction, config.train.evaluate_every) == (0.2, 0)
    beta = write(tmp_path, {"optimizer": {"beta2": 0.99, "epsilon": 1e-6}})
    muon = load(["--config", beta, "--optimizer.name", "muon", "--optimizer.beta1", "0.8"])
    assert (muon.optimizer.beta1, muon.optimizer.beta2, muon.optimizer.epsilon) == (0.8, 0.99, 1e-6)
    lion = load(["--config", beta, "--optimizer.name", "lion"]).optimizer
    assert (lion.beta2, lion.epsilon) == (0.99, 1e-8)
    adafactor = load(["--config", beta, "--optimizer.name", "adafactor"]).optimizer
    assert (adafactor.beta2, adafactor.epsilon) == (0.95, 1e-8)
    with pytest.raises(UserError, match=r"adapter\.rank: found 0 with adapter\.alpha"):
        load(["--config", recipe, *flags, "--adapter.alpha", "8"])
    data = {"held_out_fraction": 0.0, "held_out_path": "a.json"}
    recipe = write(tmp_path, {"data": data, "train": {"evaluate_every": 3}})
    assert load(["--config", recipe]).train.evaluate_every == 3
    assert load(["--config", recipe, "--data.held_out_path", "null"]).train.evaluate_every == 0


def test_a_listed_automatic_section_is_like_one_named_auto(tmp_path):
    recipe = write(tmp_path, {"auto": ["memory"]})
    assert load(["--config", recipe]).auto == ("memory",)
    assert load(["--config", recipe, "--auto", "[mesh, positions]"]).auto == ("mesh", "positions")
    assert load(["--config", recipe, "--auto", "[mesh]", "--memory", "auto"]).auto == (
        "memory",
        "mesh",
    )
    assert load(["--config", recipe, "--auto", "[]"]).auto == ()
    chunked = write(tmp_path, {"memory": {"loss_chunk": 512, "remat": "nothing"}})
    for flags in (["--auto", "[memory]"], ["--memory", "auto"]):
        memory = load(["--config", chunked, *flags]).memory
        assert (memory.loss_chunk, memory.remat) == (1024, "save_attention")
    planned = {"auto": ["mesh"], "mesh": {"sequence": 2}, "planned": "for two devices"}
    assert loaded(tmp_path, change=planned).mesh.sequence == 2, "a run's own answer"


@pytest.mark.parametrize(
    "words",
    [
        ["--config", ""],
        ["--config="],
        ["--config"],
        ["--config", "--data.path", "x", "--model.path", "y"],
        ["--config", "--model.path=y"],
    ],
)
def test_an_empty_recipe_is_refused(words):
    with pytest.raises(UserError, match="command line: --config needs the path of a recipe"):
        load(words)


def test_hyphens_and_underscores_in_flags_are_the_same(tmp_path):
    recipe = ["--config", write(tmp_path)]
    written = "--run-dir out --data.context-length 128 --model.overrides.hidden-size=32"
    config = load([*recipe, *written.split(), "--logging.profile-steps", "2:3"])
    assert config.run_dir == "out" and config.data.context_length == 128
    assert config.model.overrides == {"vocab_size": 512, "hidden_size": 32}
    assert config.logging.profile_steps == (2, 3)
    assert load([*recipe, "--profile-steps", "4:5"]).logging.profile_steps == (4, 5)
    assert load([*recipe, "--name", "a-b_c"]).name == "a-b_c", "values stay as they are"
    with pytest.raises(UserError, match=r"unknown field --run-dirs \(did you mean --run_dir\?\)"):
        load([*recipe, "--run-dirs", "out"])


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"factor": 4}, ["rope_scaling.rope_type: missing with factor; needs one of default, lin"]),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embedding": 128},
            ["unknown field original_max_position_embedding", "original_max_position_embeddings?"],
        ),
        (
            {"rope_type": "yarn", "factor": 4, "atention_factor": 2.0},
            [
                "unknown field atention_factor (did you mean attention_factor?); rope_type yarn reads"
            ],
        ),
        ({"rop_type": "linear", "factor": 4}, ["rop_type (did you mean rope_type?)"]),
        (
            {"type": "linear", "rope_type": "yarn", "factor": 4},
            ["rope_scaling.type: found 'linear' with rope_type 'yarn'; leave type out"],
        ),
        ({"rope_type": "default", "factor": 4}, ["unknown field factor", "rope_type default"]),
        ({"rope_type": "yarnn", "factor": 4}, ["found 'yarnn' (did you mean yarn?)"]),
    ],
)
def test_every_number_of_a_scaling_is_read_or_refused(tmp_path, scaling, words):
    changes = (
        {"model": {"preset": "tiny", "overrides": {"rope_scaling": scaling}}},
        {"stages": [{"context_length": 64, "rope": {"rope_scaling": scaling}}]},
    )
    for change, field in zip(changes, ("model.overrides", "stages.rope"), strict=True):
        with pytest.raises(UserError) as error:
            loaded(tmp_path, change=change)
        for word in (f"{field}.rope_scaling", *words):
            assert word in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {},
        {"rope_theta": 5e5},
        {"type": "linear", "factor": 2},
        {"type": "yarn", "rope_type": "yarn", "factor": 2, "beta_fast": 24, "truncate": False},
        {"rope_type": "linear", "type": None, "factor": 2, "attention_factor": None},
        {"type": "su", "short_factor": [1.0], "long_factor": [2.0], "partial_rotary_factor": 1.0},
    ],
)
def test_a_scaling_that_is_read_whole_is_accepted(tmp_path, scaling):
    change = {"model": {"overrides": {"rope_scaling": scaling}}}
    assert loaded(tmp_path, change=change).model.overrides["rope_scaling"] == scaling


def test_a_run_is_named_after_its_models_folder(tmp_path, monkeypatch):
    folder = tmp_path / "My Model"
    (folder / "inside").mkdir(parents=True)
    for place, path in ((folder, "."), (folder / "inside", ".."), (tmp_path, "./My Model/")):
        monkeypatch.chdir(place)
        assert load(["--model.path", path, "--data.path", "a.json"]).name == "my model"
    for revision in ("v1", "refs/pr/1"):
        words = ["--model.path", f"org/Name@{revision}", "--data.path", "a.json"]
        assert load(words).name == "name"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dry-run --dry-run", "command line: --dry-run is given twice"),
        ("--dry-run 8xH100 --dry-run=v5p-8", "command line: --dry-run is given twice"),
        ("--dry_run 8xH100 --dry-run", "command line: --dry-run is given twice"),
        ("--no-download --no_download", "command line: --no-download is given twice"),
        ("--no_download=false", "--no-download takes no value"),
        ("--gpu_memory 40", "command line: --gpu-memory only applies to --dry-run MACHINE"),
        ("--dry-run=", "command line: --dry-run: found '', needs a value, or none at all"),
    ],
)
def test_mistakes_in_the_flags_of_train_itself(words, message, capsys):
    assert train.main(["--config", "configs/quickstart.yaml", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "int or null"),
        (Literal["a", "b"], "one of a, b"),
        (tuple[str, ...], "list of str"),
        (str | dict[str, Any], "str or mapping"),
        (
            tuple[SourceConfig, ...],
            "list of {path, format, template, weight, fields, add_bos, control_tokens}",
        ),
    ],
)
def test_types_are_described_in_words(kind, words):
    assert parsing.describe(kind) == words


@pytest.mark.parametrize("version", [1, "2", None])
def test_another_version_is_refused_in_one_line(tmp_path, version):
    path = write(tmp_path, {"config_version": version, "train": {"steps": 7}})
    with pytest.raises(UserError) as error:
        load(["--config", path])
    assert (
        str(error.value)
        == f"{path}: config_version: found {version!r}, needs 2, which is all that this code reads"
    )


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        (
            "optimizer:\n  learning_rate: 0.1\ntrain:\n  steps: 7\noptimizer:\n  beta1: 0.8\n",
            "optimizer",
            "lines 1 and 5",
        ),
        (
            "optimizer:\n  learning_rate: 0.1\n  beta1: 0.8\n  'learning_rate': 0.2\n",
            "learning_rate",
            "lines 2 and 4",
        ),
        ("data:\n  sources:\n  - path: a\n    weight: 2\n    path: b\n", "path", "lines 3 and 5"),
        ("train:\n  {steps: 7, steps: 8}\n", "steps", "line 2"),
    ],
)
def test_a_key_written_twice_is_refused(tmp_path, text, key, lines):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load(["--config", str(path)])
    assert str(error.value) == f"{path}: {key} is written twice, on {lines}; keep one of the two"


def test_a_merged_key_may_be_overridden(tmp_path):
    """YAML's `<<` fills in only what its mapping leaves out, so no key is written twice."""
    path = tmp_path / "merged.yaml"
    text = yaml.safe_dump({section: RECIPE[section] for section in ("model", "optimizer")})
    path.write_text(
        text + "data:\n  sources:\n  - &a {path: a, weight: 2}\n  - {<<: *a, path: b}\n"
    )
    assert [
        (source.path, source.weight) for source in load(["--config", str(path)]).data.sources
    ] == [("a", 2), ("b", 2)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ['--model.overrides={"vocab_size": 64, "vocab_size": 32}'],
            ["--model.overrides: vocab_size is written twice;"],
        ),
        (
            ["--data.sources", '[{"path": "a", "path": "b"}]'],
            ["--data.sources: path is written twice;"],
        ),
        (
            ["--attention.schedule", '{"name": "ring", "name": "ulysses"}'],
            ["--attention.schedule: name is written twice;"],
        ),
        (
            ["--model.overrides", "{hidden_size: 64}", "--model.overrides={num_hidden_layers: 3}"],
            ["--model.overrides is given twice", "hidden_size", "as one --model.overrides"],
        ),
        (
            ["--model.overrides.hidden_size", "64", "--model.overrides", "{num_hidden_layers: 3}"],
            ["--model.overrides", "would drop", "--model.overrides.hidden_size 64", "as one"],
        ),
        (
            ["--data.sources", "[{path: a}]", "--data.sources", "[{path: b}]"],
            ["--data.sources is given twice", "write both as one --data.sources"],
        ),
        (
            ["--data.path", "a.jsonl", "--data.path", "b.jsonl"],
            [
                "--data.path is given twice, as a.jsonl and b.jsonl; for both, --data.sources "
                '\'[{"path": "a.jsonl"}, {"path": "b.jsonl"}]\' would work'
            ],
        ),
    ],
)
def test_flags_that_would_be_dropped_are_refused(tmp_path, flags, words):
    with pytest.raises(UserError) as error:
        loaded(tmp_path, *flags)
    for word in ["command line: ", *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--train.steps=5", "--train.steps", "7"],
            "--train.steps 7 replaces 5, given before",
        ),
        (
            ["--model.overrides.hidden_size", "64", "--model.overrides.hidden-size", "32"],
            "--model.overrides.hidden_size 32 replaces 64, given before",
        ),
        (
            ["--attention.schedule", "ring", "--attention.schedule", "all_gather"],
            "--attention.schedule all_gather replaces ring, given before",
        ),
    ],
)
def test_of_a_flag_given_twice_the_last_holds_and_a_warning_names_the_first(tmp_path, flags, words):
    with pytest.warns(UserWarning, match=re.escape(words)):
        config = loaded(tmp_path, *flags)
    assert config == loaded(tmp_path, *flags[-2:])


def test_a_flag_repeated_and_a_field_after_its_mapping_are_read(tmp_path):
    flags = ["--train.steps", "4", "--train.steps=4", "--model.overrides.hidden_size", "64"]
    config = loaded(tmp_path, "--model.overrides", "{num_hidden_layers: 3}", *flags)
    assert config.train.steps == 4
    assert config.model.overrides == {"num_hidden_layers": 3, "hidden_size": 64}


@pytest.mark.parametrize("text", ["train: [", "name: 2024-13-45", "[" * 3000])
def test_unparsable_yaml_names_the_recipe(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml: not valid YAML: "):
        load(["--config", str(tmp_path / "bad.yaml")])


def test_other_trainers_names_map_to_existing_fields_and_have_one_meaning():
    ours = {name.rsplit(".", 1)[-1] for name in fields.FIELDS}
    assert {*MEANT.values(), *MEANT_SECTIONS.values()} <= set(fields.FIELDS)
    assert set(MEANT_SECTIONS) <= set(fields.SECTIONS)
    assert not set(MEANT) & ours and not set(MEANT) & set(NO_FIELD)
    assert not set(NO_FIELD) & {*ours, *fields.SECTIONS} - {"split"}
    assert set(REMARKS) <= {*MEANT, "batch_size"}


def test_one_text_is_a_list_of_texts_with_one(tmp_path):
    flags = ["--adapter.rank", "8", "--adapter.targets", "all-linear"]
    flags += ["--samples.prompts", "Is it so? Say: yes", "--data.clean.languages", "no"]
    config = loaded(tmp_path, *flags)
    assert config.adapter.targets == ("all-linear",)
    assert config.samples.prompts == ("Is it so? Say: yes",)
    assert config.data.clean.languages == ("no",), "not YAML's false"


def test_train_alone_lists_the_recipes(repository, capsys):
    assert train.main([]) == 0
    printed = capsys.readouterr().out
    for recipe in (repository / "configs").rglob("*.yaml"):
        line = next(
            line
            for line in printed.splitlines()
            if recipe.relative_to(repository).as_posix() in line
        )
        assert recipe.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ") in line


def test_every_recipe_loads_and_opens_with_its_command(repository):
    recipes = sorted((repository / "configs").rglob("*.yaml"))
    assert recipes
    for recipe in recipes:
        fields = yaml.safe_load(recipe.read_text())
        is_text = "trajectories" not in fields
        has_model = fields["model"].get("path") or fields["model"].get("tokenizer")
        model = ["--model.path", "hf"] if is_text and not has_model else []
        data = (
            ["--data.path", "conversations.json"]
            if is_text and not fields["data"].get("sources")
            else []
        )
        config = load(["--config", str(recipe), *model, *data])
        assert config.name == recipe.stem
        head = recipe.read_text().split("\n\n")[0]
        assert recipe.relative_to(repository).as_posix() in head
        for word in ("Command", "Hardware", "Time", "Result"):
            assert f"# {word}" in head, f"{recipe.name} does not state its {word}"


NINE = [f"  x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  overrides: &a {x: *a}", "an alias within its own anchor"),
        ("&a [*a]", "an alias within its own anchor"),
        ("\n".join(["model:", "  x0: &a0 [a]", *NINE]), "aliases that stand for "),
        ("model: " + "[" * 1000 + "]" * 1000, "nested too deeply"),
        ("model: " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
    ids=["recursive", "recursive list", "bomb", "deep", "very deep"],
)
def test_exponential_aliases_and_endless_nesting_are_refused(tmp_path, text, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(["--config", str(path)])
    assert (
        str(caught.value).startswith(f"{path}: ")
        and words in str(caught.value)
        and len(str(caught.value)) < 500
    )


def test_an_alias_resolves_to_its_value():
    assert parse("a: &a [1, 2]\nb: *a\nc: {<<: &m {x: 1}, y: 2}\nd: *m", "x") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"x": 1, "y": 2},
        "d": {"x": 1},
    }
    assert parse("", "x") is None


def test_a_run_that_began_with_another_default_template_resumes_with_it(tmp_path, capsys):
    recipe, run = write(tmp_path), tmp_path / "run"
    first = load(["--config", recipe, "--run_dir", str(run), "--data.template", "vicuna_v1.1"])
    fresh = load(["--config", recipe, "--run_dir", str(run)])
    assert fresh.data.template == "tokenizer" and not capsys.readouterr().err
    run.mkdir()
    (run / "config.yaml").write_text(dump(first), encoding="utf-8")
    assert load(["--config", recipe, "--run_dir", str(run)]) == first
    assert (
        "keeps data.template vicuna_v1.1, with which it began; the default is now tokenizer"
        in capsys.readouterr().err
    )
    # A template that the recipe names is not replaced, neither here nor in the recipe, so the
    # folder refuses the run as another one.
    assert (
        load(
            ["--config", recipe, "--run_dir", str(run), "--data.template", "tokenizer"]
        ).data.template
        == "tokenizer"
    )
    explicit = write(tmp_path, {"data": {"template": "koala"}}, "koala.yaml")
    assert load(["--config", explicit, "--run_dir", str(run)]).data.template == "koala"
    assert load(["--config", str(run / "config.yaml")]).data.template == "vicuna_v1.1"
    (run / "config.yaml").write_text(
        "data: {clean: {html: detect, rate_limits: true}}", encoding="utf-8"
    )
    cleaned = load(
        ["--config", recipe, "--run_dir", str(run), "--data.clean.rate_limits", "false"]
    ).data.clean
    assert (cleaned.html, cleaned.rate_limits) == ("detect", False), "the flag is obeyed"
    (run / "config.yaml").write_text("{", encoding="utf-8")
    assert loaded(tmp_path, "--run_dir", str(run)).data.template == "tokenizer"


def test_a_run_on_trajectories_keeps_earlier_defaults_that_it_does_not_read(tmp_path):
    run = tmp_path / "run"
    words = ["--trajectories.path", "x", "--trajectories.task", "walker_walk"]
    words += ["--data.sources", "[]", "--run_dir", str(run)]
    recipe = ["--config", write(tmp_path), *words]
    fresh = load(recipe)
    run.mkdir()
    (run / "config.yaml").write_text(
        "data: {template: vicuna_v1.1, clean: {html: detect, rate_limits: true}}", encoding="utf-8"
    )
    kept = load(recipe)
    assert kept.data.template == "vicuna_v1.1" and kept.data.clean.rate_limits
    assert dataclasses.replace(kept, data=fresh.data) == fresh


def test_a_run_of_today_keeps_the_day_of_its_first_start(tmp_path, capsys):
    recipe = write(tmp_path, {"data": {"template_date": "today"}}, "dated.yaml")
    run, today = tmp_path / "run", datetime.date.today().isoformat()
    command = ["--config", recipe, "--run_dir", str(run)]
    first = load(command)
    assert first.data.template_date == today and not capsys.readouterr().err
    run.mkdir()
    began = dump(first).replace(today, "2025-12-31")
    (run / "config.yaml").write_text(began, encoding="utf-8")
    assert load(command).data.template_date == "2025-12-31"
    assert capsys.readouterr().err == (
        f"{run}: keeps data.template_date 2025-12-31, with which it began; today is {today}\n"
    )
    second = ["--distributed.coordinator", "a:1", "--distributed.process_id", "1"]
    second += ["--distributed.num_processes", "2"]
    assert load([*command, *second]).data.template_date == "2025-12-31"
    assert not capsys.readouterr().err, "the first process says so"
    plain = ["--config", write(tmp_path), "--run_dir", str(run)]
    flag = ["--data.template_date", "today"]
    assert load([*plain, *flag]).data.template_date == "2025-12-31"
    # Another date that is given is not replaced, so the folder refuses the run as another one.
    assert load([*command, "--data.template_date", "2026-01-05"]).data.template_date == "2026-01-05"
    assert load(plain).data.template_date == "2025-01-01"
    # Stages keep the day of the first one.
    (run / "stages/1").mkdir(parents=True)
    (run / "stages/1/config.yaml").write_text(began.replace("2025-12-31", "2025-12-30"))
    assert load(command).data.template_date == "2025-12-30"
    for content in ("{", "data: {template_date: 7}", "data: {template_date: yesterday}"):
        (run / "stages/1/config.yaml").write_text(content, encoding="utf-8")
        (run / "config.yaml").write_text(content, encoding="utf-8")
        assert load(command).data.template_date == today, "opening the run reports the reason"


def test_a_missing_recipe_names_those_beside_it(tmp_path):
    """Not another tool's hidden settings."""
    with pytest.raises(UserError, match="--config"):
        load([])
    for name in ("mine.yaml", ".pre-commit-config.yaml"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=rf"recipes next to it: {tmp_path}/mine\.yaml$"):
        load(["--config", str(tmp_path / "other.yaml")])
