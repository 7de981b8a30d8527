"""KTO against TRL: labelled completions, whose KL term is that of the whole batch however it is
computed."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import torch
import transformers

from data.errors import UserError
from data.mismatched import ALONE, CUT_COMPLETION, LONG_TWICE
from tests.small_preference import (
    LENGTH,
    ROWS,
    changed_model,
    examples,
    loss_and_gradient,
    make_config,
    open_objective,
    parts,
    same_gradients,
    same_number,
    trained,
    trl_loss_and_gradient,
    trl_trainer,
    usual_model,
    words,
)
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import MeshConfig
from trainer.step import StepBuilder

RECORDS = 13
NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "kl",
)
# Log-ratios are differences of log-likelihoods of about 130 nats in float32.
ROUNDING = 4 * 130 * float(np.finfo(np.float32).eps)
OPTIONS = {"loss": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}


def write(folder, records):
    (folder / "pairs.json").write_text(json.dumps(records), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kto")
    write(
        folder,
        [
            {
                "prompt": f"Say {number}: {words(3, number)}",
                "completion": words(2 + number % 5, 100 + number),
                "label": number % 3 != 0,
            }
            for number in range(RECORDS)
        ],
    )
    return folder


@pytest.fixture(scope="module")
def models(folder, hf_model):
    model = usual_model(hf_model, folder)
    return model, changed_model(model, folder)


@pytest.fixture(scope="module")
def trl(folder, models):
    """TRL's trainer in float64, with the policy and the reference."""
    reference, policy = (
        transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
        for model in models
    )
    return trl_trainer(folder, policy, reference, **OPTIONS)


def test_loss_metrics_and_gradients_match_trl(folder, models, trl):
    objective = open_objective(make_config(folder, models[0], **OPTIONS))
    params = open_objective(make_config(folder, models[1], loss="kto")).read_params()
    batch = objective.to_device(next(objective.batches(0)))
    pairs = examples(objective)
    assert len(pairs) > ROWS, "several records share a row"
    value, measures, gradient = loss_and_gradient(objective, params, batch)
    expected, metrics, gradients = trl_loss_and_gradient(trl, pairs)
    assert metrics["kl"] > 0
    same_number(value, expected, "loss")
    expected_measures = {name: metrics[name] for name in NAMES}
    assert measures == pytest.approx(expected_measures, rel=1e-5, abs=ROUNDING)
    same_gradients(objective.model.config, gradient, gradients)


def test_a_last_step_in_parts_of_which_most_are_empty_matches_trl(folder, models, trl):
    config = make_config(folder, models[0], MeshConfig(), **OPTIONS)
    epochs = (ROWS + 1) / len(open_objective(config).loader)
    train = dataclasses.replace(config.train, epochs=epochs, accumulation=ROWS)
    objective = open_objective(dataclasses.replace(config, train=train))
    builder = StepBuilder.of(
        objective.config,
        objective.model,
        objective.loss,
        objective.abstract_batch(),
        objective.totals,
    )
    assert objective.config.train.steps == 2
    params = open_objective(make_config(folder, models[1], MeshConfig(), loss="kto")).read_params()
    batch = objective.to_device(next(objective.batches(1)))
    assert not objective.loader.batch(2)["pairs"].any(), "read ahead, and left out"
    state = builder.init_optimizer(params)
    *_, metrics = builder.lower_train().compile()(params, {}, state, batch, np.int32(1))
    pairs = examples(objective, range(ROWS, ROWS + 1))
    assert float(metrics.weight) == len(pairs) > 1
    expected, _, gradients = trl_loss_and_gradient(trl, pairs)
    same_number(float(metrics.loss), expected, "loss")
    norm = np.linalg.norm(np.concatenate([x.ravel() for x in gradients.values()]))
    same_number(float(metrics.grad_norm), norm, "norm of the gradient")


def test_mismatched_completions_come_from_the_previous_record(folder, models):
    documents = open_objective(make_config(folder, models[0], loss="kto")).prepared.train
    records = [parts(documents[i], int(documents.chosen[i])) for i in range(RECORDS)]
    # The first record is stored last, since it takes its mismatched completion from the last
    # record.
    assert [other for *_, other in records[1:]] == [completion for _, completion, _ in records[:-1]]
    assert records[0][2] == records[-1][1]
    assert documents.labels.tolist() == [int(i % 3 != 0) for i in (*range(1, RECORDS), 0)]


def test_the_only_completion_of_a_split_is_dropped(models, tmp_path):
    """Its mismatched completion would be its own, which TRL refuses too."""
    record = {"prompt": "Say:", "completion": "red", "label": True}
    write(tmp_path, [record | {"prompt": f"Say {number}:"} for number in range(3)])
    (tmp_path / "held_out.json").write_text(json.dumps([record]), encoding="utf-8")
    config = make_config(tmp_path, models[0], loss="kto")
    data = dataclasses.replace(config.data, held_out_path=str(tmp_path / "held_out.json"))
    with pytest.raises(
        UserError,
        match=re.escape(f"held_out.json: its only record is not a usable preference (1 x {ALONE}"),
    ):
        open_objective(dataclasses.replace(config, data=data))


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_any_mesh_and_in_parts(folder, models):
    single = make_config(folder, models[0], MeshConfig(), **OPTIONS)
    wide = make_config(folder, models[0], **OPTIONS)
    wide = dataclasses.replace(wide, train=dataclasses.replace(wide.train, accumulation=2))
    expected = trained(single)
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert max(row["kl"] for row in expected) > 0.01, "the KL term is not zero"
    for row, other in zip(trained(wide), expected, strict=True):
        same_number(row["loss"], other["loss"], "loss on a mesh")
        assert row == pytest.approx(other, rel=1e-5, abs=ROUNDING)


def test_a_mean_over_no_records_is_nan(tmp_path, models):
    write(tmp_path, [{"prompt": "Say:", "completion": x, "label": True} for x in ("red", "blue")])
    objective = open_objective(make_config(tmp_path, models[0], loss="kto"))
    batch = objective.to_device(next(objective.batches(0)))
    value, measures, gradient = loss_and_gradient(objective, objective.read_params(), batch)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    missing = {name for name, x in measures.items() if np.isnan(x)}
    assert missing == {"rewards/rejected", "rewards/margins", "logps/rejected"}


def test_pairs_are_two_labelled_completions_as_in_trl(tmp_path, models):
    pairs = [{"prompt": f"Say {x}:", "chosen": f"{x} red", "rejected": f"{x} blue"} for x in "xyz"]
    write(tmp_path, pairs)
    objective = open_objective(make_config(tmp_path, models[0], loss="kto"))
    documents = objective.prepared.train
    assert documents.labels.tolist() == [1, 0] * 3
    for i in range(6):
        prompt, completion, other = (
            objective.tokenizer.decode(ids) for ids in parts(documents[i], int(documents.chosen[i]))
        )
        word = prompt.split("Say ")[1][0]
        assert word in completion and word not in other, (
            "the mismatched completion belongs to another prompt"
        )
        assert ("red" in completion) == ("red" in other) == bool(documents.labels[i])


@pytest.mark.parametrize("long_pairs", ["drop", "cut_prompt"])
@pytest.mark.parametrize(("share_prompts", "count"), [(False, 60), (True, 77)])
def test_records_that_do_not_fit_twice_into_a_row(
    tmp_path, models, long_pairs, share_prompts, count
):
    records = [
        {"prompt": words(count, 1), "completion": "red", "label": True},
        {"prompt": "Say:", "completion": words(70, 2), "label": False},
        {"prompt": words(20, 3), "completion": words(10, 4), "label": False},
    ]
    write(tmp_path, records)
    options = {"loss": "kto", "long_pairs": long_pairs, "share_prompts": share_prompts}
    prepared = open_objective(make_config(tmp_path, models[0], **options)).prepared
    (report,) = prepared.report.sources
    assert (prepared.train.row_lengths <= LENGTH).all()
    assert CUT_COMPLETION in report.repaired
    assert report.dropped == ({LONG_TWICE: 1} if long_pairs == "drop" else {})


def test_a_labelled_record_needs_kto_and_a_pair_does_not(tmp_path, models):
    write(
        tmp_path,
        [
            {"prompt": "Say:", "completion": "red", "label": True},
            {"prompt": "Say:", "chosen": "red", "rejected": "blue"},
        ],
    )
    prepared = open_objective(make_config(tmp_path, models[0], loss="simpo")).prepared
    (report,) = prepared.report.sources
    assert report.dropped == {
        "a completion with a `label`, which only preference.loss kto learns from": 1
    }


@pytest.mark.parametrize("change", [{"sft_weight": 0.5}, {"desirable_weight": -1.0}])
def test_options_that_kto_does_not_support(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        PreferenceConfig("kto", **change)
    with pytest.raises(ValueError, match=r"preference\.undesirable_weight: found 2\.0, needs 1"):
        PreferenceConfig("sigmoid", undesirable_weight=2.0)
