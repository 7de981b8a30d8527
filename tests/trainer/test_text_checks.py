"""What a run that continues an adapter checks and says, for adapters that peft wrote."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import transformers

from data.clean import CleanConfig
from data.errors import UserError
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import AdapterConfig, RunConfig, TrainConfig
from trainer.model_source import open_adapter, open_model, with_adapter
from trainer.text_checks import (
    _adapter_warnings,
    _repetition_warning,
    _unused_warning,
    check_same,
)


def save_adapter(model, folder, **fields):
    """Saves an adapter of q_proj and v_proj; returns it as peft continues it."""
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **fields
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    peft.get_peft_model(base, lora).save_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def section_of(folder, **fields):
    return AdapterConfig(
        **{"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj"), "path": str(folder), **fields}
    )


@pytest.mark.parametrize(
    ("init", "parts"), [("mica", {"lora_A"}), ("gaussian", {"lora_A", "lora_B"})]
)
def test_only_an_adapter_that_peft_trains_in_full_is_continued(hf_model, tmp_path, init, parts):
    """Any of them is evaluated."""
    continued = save_adapter(hf_model, tmp_path, init_lora_weights=init)
    trained = {name.split(".")[-3] for name, x in continued.named_parameters() if x.requires_grad}
    assert trained == parts
    source = open_adapter(str(tmp_path))
    if parts == {"lora_A", "lora_B"}:
        check_same(section_of(tmp_path), source)
        return
    with pytest.raises(ValueError, match=r"init_lora_weights: found 'mica', whose B peft keeps"):
        check_same(section_of(tmp_path), source)


def test_a_section_that_differs_from_the_adapter_is_shown_as_in_a_recipe(hf_model, tmp_path):
    save_adapter(hf_model, tmp_path)
    for fields, message in (
        ({"train": ("norm",)}, r"train: found \[norm\]; .* has \[\]; --adapter.train '\[\]' would"),
        ({"use_dora": True}, "dora: found true; .* has false; --adapter.use_dora false would"),
        (
            {"rank": 2, "alpha": 1.0},
            "rank: found 2; .* has 4; --adapter.rank 4 --adapter.alpha 8 would",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_same(section_of(tmp_path, **fields), open_adapter(str(tmp_path)))


def test_fields_for_conversations_are_named_if_there_are_none():
    def warning(*formats, **fields):
        sources = tuple(SourceConfig(path="a", format=name) for name in formats)
        return _unused_warning(DataConfig(sources=sources, **fields))

    given = {"train_on": "last", "clean": CleanConfig(refusals=True, near_duplicates=0.8)}
    assert warning("text", "tokens", **given) == (
        "data.train_on, data.clean.refusals: without effect, since no source has conversations; "
        "found format text and tokens"
    )
    assert warning("text", template="koala").startswith("data.template: without effect")
    assert warning("text", template="koala.jinja") is None
    assert warning("text", "sharegpt", **given) is None
    assert warning("text", clean=CleanConfig(near_duplicates=0.8)) is None


def test_training_unlike_the_adapters_is_a_warning(hf_model, tmp_path):
    save_adapter(hf_model, tmp_path, lora_dropout=0.25)
    source = with_adapter(open_model(str(hf_model)), str(tmp_path))
    quantized = dataclasses.replace(source.adapter.config, quantize="nf4")
    source = dataclasses.replace(
        source, adapter=dataclasses.replace(source.adapter, config=quantized)
    )

    def warnings_of(**fields):
        run = RunConfig(
            adapter=section_of(tmp_path, **fields), preference=PreferenceConfig("sigmoid")
        )
        return list(_adapter_warnings(source, run))

    dropout, base = warnings_of()
    assert "but 0.25 in the adapter's earlier training; --adapter.dropout 0.25 keeps" in dropout
    assert "adapter.quantize: found none, but the adapter in" in base
    assert "a base in nf4; --adapter.quantize nf4 trains on the same base" in base
    assert warnings_of(dropout=0.0, quantize="nf4") == []


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (TrainConfig(epochs=1, batch_size=4), None),
        (TrainConfig(epochs=50, batch_size=4), "500 steps of 4 rows are 50 epochs"),
        (TrainConfig(epochs=10, batch_size=39), None),  # whole batches would be 10.7 epochs
        (TrainConfig(epochs=0.3, batch_size=12), None),
        (
            TrainConfig(epochs=0.3, batch_size=16),
            "train.batch_size: the batch has 16 rows, but the run has only 12, so the others are",
        ),
    ],
)
def test_repetitions_are_counted_in_the_epochs_of_the_run(train, expected):
    """Not in the default number of steps."""
    documents = SimpleNamespace(
        source_starts=np.array([0, 40]), source_weights=np.array([1.0]), equally_often=True
    )

    class Rows(list):
        pass

    loader = Rows(range(40))
    loader.batch_size, loader.documents = train.batch_size, documents
    warning = _repetition_warning(RunConfig(name="run", train=train), loader)
    assert warning is None if expected is None else warning.startswith(expected)
