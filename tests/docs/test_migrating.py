"""docs/migrating.md: its names give the hints that `train.py` prints, its defaults are those of the
schema, transformers, TRL and PEFT, and its example is a recipe that does what theirs did."""

import ast
import dataclasses
import operator
import re
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainingArguments
from trl import DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig

import train
from data.errors import UserError
from tests import small_model
from trainer.config.fields import FIELDS, check_names
from trainer.config.load import load
from trainer.config.other_trainers import MEANT, NO_FIELD
from trainer.config.schema import RunConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
# A table -> classes that have its options as fields, if the trainer is installed.
INSTALLED = {
    "Trainer, PEFT, and all that build on them": (TrainingArguments, LoraConfig),
    "TRL": (SFTConfig, DPOConfig, KTOConfig, ModelConfig, ScriptArguments),
}
# Our field -> the field of TrainingArguments and SFTConfig whose default the page compares.
DEFAULTS = {
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup_steps": "warmup_steps",
    "optimizer.beta2": "adam_beta2",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.clip_norm": "max_grad_norm",
    "train.batch_size": "per_device_train_batch_size",
    "data.context_length": "max_length",
    "data.seed": "seed",
    "checkpoint.every": "save_steps",
}
GPUS = 4  # in the example


def tables() -> dict[str, list[list[str]]]:
    """Returns the page's tables: the first cell of a head -> rows of cells."""
    found = {}
    for text in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
        ]
        found[head[0]] = rows
    return found


def names() -> list[tuple[str, str, str | None]]:
    """Returns each name in the tables as (trainer, their name, our field or None)."""
    found: list[tuple[str, str, str | None]] = []
    for trainer, rows in tables().items():
        for group, cell in rows if trainer else ():
            for pair in cell.split(";"):
                theirs, _, ours = pair.partition(" → ")
                field = ours.strip("` ") or None
                assert (field is None) == (group == "none"), pair
                found += [(trainer, name, field) for name in re.findall(r"`(\w+)`", theirs)]
    return found


def message(name: str) -> str:
    """Returns the error for a recipe that has a field of this name."""
    with pytest.raises(UserError) as caught:
        check_names({name: "x"}, "recipe.yaml")
    return str(caught.value)


def example(language: str, beginning: str = "") -> str:
    """Returns the page's code in a language that begins so."""
    (text,) = re.findall(
        rf"^```{language}\n({re.escape(beginning)}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    return text


def first(cell: str) -> float | str:
    """Returns the number or word with which a cell begins."""
    word = re.match(r"[^\s;,]+", cell)[0]
    return float(word) if word[0].isdigit() else word


def test_a_name_on_the_page_gives_the_same_hint():
    assert len(tables()) == 7 and len(names()) > 200
    for trainer, theirs, ours in names():
        if ours is None:
            assert f"{theirs} ({NO_FIELD[theirs]})" in message(theirs), trainer
        else:
            assert ours in FIELDS, trainer
            hint = rf"did you mean {re.escape(ours)}(?![\w.])"
            assert re.search(hint, message(theirs)), (trainer, theirs)


@pytest.mark.parametrize("trainer", INSTALLED)
def test_names_are_fields_of_the_installed_trainers(trainer):
    fields = {name for cls in INSTALLED[trainer] for name in cls.__dataclass_fields__}
    assert {theirs for of, theirs, _ in names() if of == trainer} - fields == set()


def test_the_page_has_all_hints_for_the_installed_trainers():
    fields = {
        name
        for classes in INSTALLED.values()
        for cls in classes
        for name in cls.__dataclass_fields__
    }
    assert fields & {*MEANT, *NO_FIELD} - {theirs for _, theirs, _ in names()} == set()


@pytest.mark.parametrize("trainer", [DPOConfig, KTOConfig, CPOConfig, ORPOConfig])
def test_every_option_of_a_preference_trainer_has_a_hint(trainer):
    """Also those of trainers that the page does not list."""
    options = trainer.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
    assert {name for name in options if f"{name} (" not in message(name)} == set()


def test_defaults_are_those_of_the_schema_and_of_the_installed_trainers():
    rows = {re.sub("`(.*?)`.*", r"\1", name): cells for name, *cells in tables()[""]}
    for field, name in DEFAULTS.items():
        here, base, trl, *_ = rows[field]
        assert first(here) == operator.attrgetter(field)(RunConfig()), field
        assert first(trl) == getattr(SFTConfig, name), field
        assert first(base) == getattr(TrainingArguments, name, "none"), field
    adapter, lora, command_line = RunConfig().adapter, LoraConfig(), ModelConfig
    assert rows["adapter.rank"][:3] == [
        f"{adapter.rank}, {adapter.alpha:g}, {adapter.dropout or 0}",
        f"{lora.r}, {lora.lora_alpha}, {lora.lora_dropout:g} (PEFT)",
        f"{command_line.lora_r}, {command_line.lora_alpha}, {command_line.lora_dropout} (its command line)",
    ]
    assert float(rows["data.held_out_fraction"][0]) == RunConfig().data.held_out_fraction
    assert first(rows["train.epochs"][1]) == TrainingArguments.num_train_epochs
    assert f"in a recipe {RunConfig().train.steps} steps" in rows["train.epochs"][0]
    assert rows["packed"][2] == "no" and not SFTConfig.packing and not SFTConfig.assistant_only_loss


@pytest.fixture
def recipe(tmp_path):
    """Returns the path of the page's recipe."""
    path = tmp_path / "my_recipe.yaml"
    path.write_text(example("yaml", "model: "))
    return str(path)


def test_the_recipe_says_what_the_axolotl_file_says(recipe, tmp_path):
    theirs, ours = yaml.safe_load(example("yaml", "# axolotl")), load(["--config", recipe])
    assert (ours.model.path, ours.data.sources[0].path) == (
        theirs["base_model"],
        theirs["datasets"][0]["path"],
    )
    assert ours.data.context_length == theirs["sequence_len"]
    assert ours.data.held_out_fraction == theirs["val_set_size"]
    assert (ours.adapter.rank, ours.adapter.alpha) == (theirs["lora_r"], theirs["lora_alpha"])
    assert ours.adapter.quantize == "nf4" and theirs["load_in_4bit"]
    assert ours.adapter.targets == ("all-linear",) and theirs["lora_target_linear"]
    rows = theirs["micro_batch_size"] * theirs["gradient_accumulation_steps"] * GPUS
    assert (ours.train.batch_size, ours.train.epochs) == (rows, theirs["num_epochs"])
    assert ours.optimizer.learning_rate == theirs["learning_rate"]
    assert ours.optimizer.schedule == theirs["lr_scheduler"]
    assert ours.optimizer.warmup_fraction == theirs["warmup_ratio"]
    assert ours.train.evaluate_every == theirs["eval_steps"]
    assert (ours.checkpoint.every, ours.run_dir) == (theirs["save_steps"], theirs["output_dir"])


def test_the_recipe_says_what_the_trl_call_says(recipe):
    ours = load(["--config", recipe])
    calls = {
        call.func.id: call
        for call in ast.walk(ast.parse(example("python")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    given = {word.arg: word.value for word in calls["SFTConfig"].keywords}
    given.pop("model_init_kwargs")
    config = SFTConfig(
        use_cpu=True, **{name: ast.literal_eval(value) for name, value in given.items()}
    )
    lora = LoraConfig(
        **{word.arg: ast.literal_eval(word.value) for word in calls["LoraConfig"].keywords}
    )
    quantized = BitsAndBytesConfig(
        **{word.arg: ast.literal_eval(word.value) for word in calls["BitsAndBytesConfig"].keywords}
    )
    assert (ours.adapter.rank, ours.adapter.alpha) == (lora.r, lora.lora_alpha)
    assert ours.adapter.targets == (lora.target_modules,)
    assert (ours.adapter.dropout or 0) == lora.lora_dropout
    assert ours.adapter.quantize == quantized.bnb_4bit_quant_type
    assert quantized.load_in_4bit and quantized.bnb_4bit_use_double_quant
    assert config.packing and config.assistant_only_loss and ours.data.train_on == "all"
    assert ours.data.context_length == config.max_length
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * GPUS
    assert (ours.train.batch_size, ours.train.epochs) == (rows, config.num_train_epochs)
    optimizer = ours.optimizer
    assert optimizer.learning_rate == config.learning_rate
    assert optimizer.schedule == config.lr_scheduler_type and optimizer.final_fraction == 0
    assert optimizer.warmup_fraction == config.warmup_steps
    assert (optimizer.beta1, optimizer.beta2) == (config.adam_beta1, config.adam_beta2)
    assert optimizer.epsilon == config.adam_epsilon
    assert (optimizer.weight_decay, optimizer.clip_norm) == (
        config.weight_decay,
        config.max_grad_norm,
    )
    assert (ours.train.evaluate_every, ours.checkpoint.every, ours.run_dir) == (
        config.eval_steps,
        config.save_steps,
        config.output_dir,
    )


def test_the_axolotl_file_itself_is_refused_with_a_hint_for_every_name(tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text(example("yaml", "# axolotl"))
    with pytest.raises(UserError) as caught:
        load(["--config", str(path)])
    for name in yaml.safe_load(path.read_text()):
        assert re.search(rf"\b{name} \(", str(caught.value)), name


def test_the_recipe_plans(recipe, repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wide = dataclasses.replace(
        small_model.CONFIG, hidden_size=64, head_dim=64, num_key_value_heads=1
    )  # NF4 needs sizes that are multiples of 64
    model = str(small_model.write(tmp_path, wide))
    data = str(repository / "data" / "fixtures" / "conversations.json")
    flags = ["--model.path", model, "--data.path", data, "--dry-run", "4xH100"]
    status = train.main(["--config", recipe, *flags])
    output = "".join(capsys.readouterr())
    assert status == 0, output
    assert "of 32 rows" in output and "of 8,192 tokens in an epoch" in output
