"""Twenty steps with each preference loss, against twenty of TRL's in float64 on the same
batches."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from tests.small_preference import (
    ROWS,
    examples,
    make_config,
    open_objective,
    same_number,
    trained,
    trl_trainer,
    usual_model,
    write_pairs,
)
from trainer.config.schema import MeshConfig

BETA, MARGIN = 0.3, 0.5
BY_RATIOS = ("apo_zero", "apo_down", "bco_pair", "nca_pair", "sppo_hard")
SLOW = ("sigmoid_norm", "hinge", "robust", "ipo", *BY_RATIOS, "orpo", "simpo", "kto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    write_pairs(folder, 9)
    return folder


@pytest.fixture(scope="module")
def model_folder(hf_model, tmp_path_factory):
    return usual_model(hf_model, tmp_path_factory.mktemp("usual"))


def without_reference(loss, model, examples):
    """The losses of TRL's ORPOTrainer and CPOTrainer, from log-likelihoods that their own function
    computes from logits.

    ORPO's cross-entropy covers the chosen completions only, as in its paper.
    """
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    def likelihoods(side, average):
        ids = [torch.tensor(e["prompt_ids"] + e[f"{side}_ids"]) for e in examples]
        labels = [torch.tensor([-100] * len(e["prompt_ids"]) + e[f"{side}_ids"]) for e in examples]
        batch = pad_sequence(ids, batch_first=True)
        padded = pad_sequence(labels, batch_first=True, padding_value=-100)
        return ORPOTrainer.get_batch_logps(model(input_ids=batch).logits, padded, average)

    chosen, rejected = (likelihoods(side, True) for side in ("chosen", "rejected"))
    trainer = SimpleNamespace(
        beta=BETA,
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=MARGIN,
        label_smoothing=0.0,
    )
    if loss == "simpo":
        return CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()
    tokens = sum(len(example["chosen_ids"]) for example in examples)
    cross_entropy = -likelihoods("chosen", False).sum() / tokens
    return cross_entropy - ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()


@pytest.mark.parametrize(
    "loss",
    [
        "sigmoid",
        *(pytest.param(loss, marks=pytest.mark.slow) for loss in SLOW),
    ],
)
def test_twenty_steps_match_trl(folder, model_folder, loss):
    """The losses of all steps are within 1e-5; ours are float32 on one device."""
    options = {"loss": loss, "beta": BETA}
    if loss == "robust":
        options["label_smoothing"] = 0.1
    config = make_config(folder, model_folder, MeshConfig(), **options)
    ours = trained(config)
    objective = open_objective(config)
    model, reference = (
        transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
        for _ in range(2)
    )
    trainer = None
    if loss not in ("orpo", "simpo"):
        trainer = trl_trainer(folder, model, reference, **options)
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
    )
    for step, row in enumerate(ours):
        batch = examples(objective, range(step * ROWS, (step + 1) * ROWS))
        if trainer is None:
            value = without_reference(loss, model, batch)
        else:
            value = trainer._compute_loss(trainer.model, trainer.data_collator(batch), False)
        same_number(row["loss"], value.item(), "loss of a step", step)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = row["learning_rate"]
        optimizer.step()
    assert abs(ours[-1]["loss"] - ours[0]["loss"]) > 0.01, "the model has learned"
