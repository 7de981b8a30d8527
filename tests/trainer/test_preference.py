"""Preference tuning against TRL: losses, rewards and gradients of pairs that are packed, striped
over a mesh and accumulated."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from data.errors import UserError
from data.templates import jinja_template
from data.trajectories.options import TrajectoryConfig
from tests.errors import within
from tests.small_preference import (
    LENGTH,
    ROWS,
    changed_model,
    examples,
    loss_and_gradient,
    make_config,
    open_objective,
    same_gradients,
    same_number,
    trained,
    trl_loss_and_gradient,
    trl_trainer,
    usual_model,
    words,
    write_pairs,
)
from trainer.config.checks import check
from trainer.config.data import SourceConfig
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import AdapterConfig, MeshConfig
from trainer.config.stage import StageConfig
from trainer.huggingface.folder import weights_fingerprint
from trainer.preference import preference_loss
from trainer.preference_loss import Pairs, pair_losses
from trainer.reference import _write
from trainer.source_kinds import HuggingFaceSource
from trainer.stages import stages_of
from trainer.text_checks import longest_document

PAIRS = 16
LOSSES = get_args(get_args(get_type_hints(PreferenceConfig)["loss"])[0])
TRL_LOSSES = [loss for loss in LOSSES if loss not in ("orpo", "simpo", "kto")]  # of DPOTrainer
NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    write_pairs(folder, PAIRS)
    return folder


@pytest.fixture(scope="module")
def models(folder, hf_model):
    """The folders of the reference, which training starts from, and of a policy that differs
    from it."""
    model = usual_model(hf_model, folder)
    return model, changed_model(model, folder)


@pytest.fixture(scope="module")
def params(folder, models):
    """The policy's parameters on the mesh; a loss without a reference computes none."""
    return open_objective(make_config(folder, models[1], loss="orpo")).read_params()


@pytest.fixture(scope="module")
def compiled(folder, models):
    """The model's log-likelihoods, whose passes are compiled once for all losses."""
    model = open_objective(make_config(folder, models[0], loss="orpo")).model
    return SimpleNamespace(document_sums=jax.jit(model.document_sums, static_argnums=2))


@pytest.fixture(scope="module")
def trl(folder, models):
    """Returns a function from pairs, a loss and its options to TRL's loss, metrics and gradients of
    the policy, in float64."""
    reference, policy = (
        transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
        for model in models
    )

    def compute(pairs, loss, **options):
        trainer = trl_trainer(folder, policy, reference, loss, **options)
        return trl_loss_and_gradient(trainer, pairs)

    return compute


@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_loss_metrics_and_gradients_match_trl(folder, models, params, compiled, trl, loss):
    smoothing = 0.1 if loss == "robust" else 0.0
    options = {"loss": loss, "beta": 0.3, "label_smoothing": smoothing}
    objective = open_objective(make_config(folder, models[0], **options))
    batch = objective.to_device(next(objective.batches(0)))
    pairs = examples(objective)
    assert PAIRS >= len(pairs) > ROWS, "several pairs share a row"
    value, measures, gradient = loss_and_gradient(objective, params, batch, compiled)
    expected, metrics, gradients = trl(pairs, **options)
    same_number(value, expected, "loss")
    # Rewards are differences of log-likelihoods of about 130 nats in float32.
    rounding = 4 * 130 * float(np.finfo(np.float32).eps) * options["beta"]
    expected_measures = {name: metrics[name] for name in NAMES}
    assert measures == pytest.approx(expected_measures, rel=1e-5, abs=rounding)
    same_gradients(objective.model.config, gradient, gradients)


def test_cross_entropies_of_chosen_completions_match_trl(folder, models, params, compiled, trl):
    """It is averaged over the batch's tokens, whatever the lengths of completions."""
    options = {"loss": "sigmoid", "beta": 0.3, "sft_weight": 0.7}
    objective = open_objective(make_config(folder, models[0], **options))
    batch = objective.to_device(next(objective.batches(0)))
    value, _, _ = loss_and_gradient(objective, params, batch, compiled)
    both = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}
    expected, _, _ = trl(examples(objective), "sigmoid", beta=0.3, **both)
    assert value == pytest.approx(expected, rel=1e-5)


def test_trls_defaults_differ_as_the_page_says(folder, models, trl):
    from trl import DPOConfig, KTOConfig
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    assert {x.learning_rate for x in (DPOConfig, KTOConfig, CPOConfig, ORPOConfig)} == {1e-6}
    assert (CPOConfig.cpo_alpha, PreferenceConfig().sft_weight) == (1, 0)
    pairs = examples(open_objective(make_config(folder, models[0], loss="orpo")))
    assert trl(pairs, "sigmoid", label_smoothing=0.1)[0] == trl(pairs, "sigmoid")[0]


def test_ids_and_completions_match_trls_own_tokenization(folder, models):
    """For conversations under a chat template, also with a system turn."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    records = [
        {
            "prompt": [{"role": "user", "content": "Which color?"}],
            "chosen": [{"role": "assistant", "content": "Red, of course."}],
            "rejected": [{"role": "assistant", "content": "Blue."}],
        },
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How many?"},
                {"role": "assistant", "content": "Three."},
                {"role": "user", "content": "And how old?"},
            ],
            "chosen": [{"role": "assistant", "content": "Ten."}],
            "rejected": [{"role": "assistant", "content": "Nobody knows how old they are."}],
        },
    ]
    (folder / "chats.json").write_text(json.dumps(records), encoding="utf-8")
    config = make_config(folder, models[0], loss="simpo")
    source = SourceConfig(str(folder / "chats.json"), "preference", "chatml")
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data, sources=(source,), add_control_tokens=True, context_length=2 * LENGTH
        ),
        train=dataclasses.replace(config.train, batch_size=4),
    )
    objective = open_objective(config)
    tokenizer_folder = folder / "chatml"
    objective.tokenizer.save(tokenizer_folder, jinja_template("chatml", objective.tokenizer))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    trainer = DPOTrainer(
        model=transformers.LlamaForCausalLM.from_pretrained(models[0]),
        args=DPOConfig(
            output_dir=str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    theirs = {tuple(map(tuple, (row[name] for name in names))) for row in trainer.train_dataset}
    ours = {tuple(tuple(pair[name]) for name in names) for pair in examples(objective)}
    assert ours == theirs and len(ours) == 2
    objective.write_assets(folder / "assets")
    assert "<|im_start|>" in (folder / "assets" / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    "loss",
    [
        "sigmoid",
        *(
            pytest.param(loss, marks=pytest.mark.slow)
            for loss in ("sigmoid_norm", "hinge", "robust", "ipo", "orpo", "simpo")
        ),
    ],
)
def test_twenty_steps_are_the_same_on_any_mesh_and_in_parts(folder, models, loss):
    options = {"loss": loss, "sft_weight": 0.5 if loss == "sigmoid" else 0.0}
    if loss == "robust":
        options["label_smoothing"] = 0.1
    single = make_config(folder, models[0], MeshConfig(), **options)
    parts = make_config(folder, models[0], **options)
    parts = dataclasses.replace(parts, train=dataclasses.replace(parts.train, accumulation=2))
    expected = trained(single)
    assert expected[-1]["rewards/margins"] > expected[0]["rewards/margins"]
    for step, (row, other) in enumerate(zip(trained(parts), expected, strict=True)):
        if step == 0 and loss not in ("orpo", "simpo"):
            # The policy equals the reference: all rewards are 0 up to rounding.
            del row["rewards/accuracies"], other["rewards/accuracies"]
        same_number(row["loss"], other["loss"], "loss on a mesh", step)
        assert row == pytest.approx(other, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("shares", [True, False])
def test_rows_of_the_length_that_a_warning_names_hold_every_pair(folder, models, shares):
    def opened(length):
        config = make_config(folder, models[0], MeshConfig(), loss="simpo", share_prompts=shares)
        data = dataclasses.replace(config.data, context_length=length)
        return open_objective(dataclasses.replace(config, data=data))

    wide = opened(256 * LENGTH)
    (warning,) = (line for line in wide.warnings if "padding" in line)
    named = int(re.search(r"the longest pair takes ([\d,]+) tokens", warning)[1])
    assert len(opened(named).prepared.train) == len(wide.prepared.train) == PAIRS
    assert len(opened(named - 1).prepared.train) < PAIRS


def test_losses_without_a_reference_match_the_papers():
    """ORPO's odds ratio and SimPO's margin, against TRL's own functions."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 30, (3, 4, 2)).astype(np.float32)
    sums = -rng.uniform(0.05, 3, tokens.shape).astype(np.float32) * tokens
    means = torch.tensor(sums / tokens)
    trainer = SimpleNamespace(
        beta=0.4,
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        loss_type="simpo",
        simpo_gamma=0.7,
        label_smoothing=0.0,
    )
    ratio, *rewards = ORPOTrainer.odds_ratio_loss(trainer, means[..., 0], means[..., 1])[:3]
    simpo, *_ = CPOTrainer.cpo_loss(trainer, means[..., 0], means[..., 1])
    pairs = Pairs(jnp.asarray(sums), jnp.zeros_like(sums), jnp.asarray(tokens))
    orpo = pair_losses(pairs, PreferenceConfig("orpo", beta=0.4))
    np.testing.assert_allclose(orpo.loss, -ratio.numpy(), rtol=1e-5)
    np.testing.assert_allclose(orpo.rewards, np.stack(rewards, -1), rtol=1e-6)
    ours = pair_losses(pairs, PreferenceConfig("simpo", beta=0.4, simpo_gamma=0.7))
    np.testing.assert_allclose(ours.loss, simpo.numpy(), rtol=1e-5)


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_metrics_without_a_reference_match_trl(loss):
    """From the same logits, by TRL's own code: log-likelihoods are means per token."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    torch.manual_seed(0)
    ids, logits = torch.randint(1, 9, (4, 8)), torch.randn(4, 8, 9)
    labels = ids.clone()
    labels[:, :3] = -100  # the prompt
    for row, end in enumerate((8, 4, 5, 7)):  # two chosen completions, two rejected ones
        labels[row, end:] = -100
    trainer = object.__new__(ORPOTrainer if loss == "orpo" else CPOTrainer)
    trainer.__dict__.update(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        beta=0.3,
        loss_type=loss,
        simpo_gamma=0.5,
        label_smoothing=0.0,
        alpha=0.0,
        cpo_alpha=0.0,
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        pad_token_id=0,
        padding_value=0,
    )
    sides = {"chosen": slice(0, 2), "rejected": slice(2, 4)}
    arrays = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    batch = {
        f"{side}_{name}": x[rows] for side, rows in sides.items() for name, x in arrays.items()
    }
    _, expected = trainer.get_batch_loss_metrics(
        lambda *_, **__: SimpleNamespace(logits=logits), batch
    )

    trained = labels[:, 1:] != -100
    each = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * trained
    sums = [jnp.asarray(x.sum(1).reshape(2, 2).T.numpy())[None] for x in (each, trained.float())]
    model = SimpleNamespace(document_sums=lambda *_: sums)
    ours = {"pairs": jnp.ones((1, 2)), "chosen_shares": jnp.zeros((1, 2))}
    found = preference_loss(model, PreferenceConfig(loss, beta=0.3), {}, ours)
    measures = {name: float(x / found.weight) for name, x in found.measures.items()}
    assert measures == pytest.approx({name: expected[name] for name in NAMES}, rel=1e-5)


def test_an_empty_slot_gives_finite_numbers_and_no_gradient():
    zeros = jnp.zeros((1, 2, 2))
    for loss in (*TRL_LOSSES, "orpo", "simpo"):
        config = PreferenceConfig(loss)

        def total(x, config=config):
            return pair_losses(Pairs(x, zeros, zeros), config).loss.sum()

        value, gradient = jax.value_and_grad(total)(zeros)
        assert np.isfinite(value) and np.isfinite(gradient).all(), loss


def test_the_reference_is_computed_once_and_resumes_when_interrupted(
    folder, models, monkeypatch, tmp_path
):
    one_device = MeshConfig()
    config = make_config(folder, models[0], one_device, loss="sigmoid")
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, prepared=str(tmp_path))
    )
    first = open_objective(config)
    (file,) = (tmp_path / "references").iterdir()
    whole = first.loader.references
    assert np.isfinite(whole).all() and whole.shape == (PAIRS, 2) and (whole < 0).all()
    reads = []
    read = HuggingFaceSource.read
    monkeypatch.setattr(
        HuggingFaceSource, "read", lambda self, *args: reads.append(1) or read(self, *args)
    )
    assert (open_objective(config).loader.references == whole).all() and not reads
    partial = whole.copy()
    partial[first.loader.row_pairs(0)] = np.nan
    _write(file, partial)
    again = open_objective(config)
    assert (again.loader.references == whole).all() and len(reads) == 1
    content = file.read_bytes()
    for count, damaged in enumerate((b"nothing", content[:-1] + bytes([content[-1] ^ 1])), 2):
        file.write_bytes(damaged)
        assert (open_objective(config).loader.references == whole).all() and len(reads) == count
    same_weights = shutil.copytree(models[0], tmp_path / "model")
    fields = json.loads((same_weights / "config.json").read_text())
    (same_weights / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 0.5}))
    other = make_config(folder, same_weights, one_device, loss="sigmoid")
    other = dataclasses.replace(other, data=config.data)
    assert (open_objective(other).loader.references != whole).any(), "with another config.json"
    other = make_config(folder, models[1], one_device, loss="sigmoid")
    other = dataclasses.replace(other, data=config.data)
    others = open_objective(other).loader.references
    assert (others != whole).all(), "another model has different ones"
    adapted = dataclasses.replace(config, adapter=AdapterConfig(rank=4))
    switched_off = open_objective(adapted).loader.references
    np.testing.assert_allclose(switched_off, whole, rtol=1e-5)
    by_path = make_config(folder, models[0], one_device, loss="sigmoid", ref_model=str(models[1]))
    by_path = dataclasses.replace(by_path, data=config.data)
    objective = open_objective(by_path)
    assert (objective.loader.references == others).all(), "a reference named by its path"
    reference = {"fingerprint": weights_fingerprint(models[1])}
    assert objective.inputs["reference"].items() >= reference.items()
    batch = objective.to_device(next(objective.batches(0)))
    _, measures, _ = loss_and_gradient(objective, objective.read_params(), batch)
    # If the model itself were the reference, rewards would be rounding errors of about 6e-6.
    assert abs(measures["rewards/margins"]) > 1e-4, "the model is not its own reference"


def references_of(config, path):
    return open_objective(
        dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=str(path)))
    ).loader.references


def test_a_later_stage_has_the_reference_of_the_first(folder, models, tmp_path):
    """Not the result of the stage before it, from which it begins. RoPE is the stage's."""
    config = make_config(folder, models[0], MeshConfig(), loss="sigmoid")
    stages = (StageConfig(LENGTH), StageConfig(LENGTH, rope={"rope_theta": 50000.0}))
    second = stages_of(dataclasses.replace(config, stages=stages))[1]
    trained = dataclasses.replace(
        second, model=dataclasses.replace(second.model, path=str(models[1]))
    )
    initial = dataclasses.replace(
        config, model=dataclasses.replace(config.model, overrides={"rope_theta": 50000.0})
    )
    expected = references_of(initial, tmp_path)
    np.testing.assert_allclose(references_of(trained, tmp_path), expected, rtol=1e-6)
    assert (expected != references_of(config, tmp_path)).all()


def test_a_later_stage_reads_the_reference_by_the_tokenizer_of_the_first(folder, models, tmp_path):
    """Which is beside the model or, by `model.tokenizer`, elsewhere."""
    config = make_config(folder, models[0], MeshConfig(), loss="sigmoid")
    base = shutil.copytree(models[0], tmp_path / "base")
    for path in base.glob("*token*"):
        path.unlink()
    model = dataclasses.replace(config.model, path=str(base), tokenizer=str(models[0]))
    stages = (StageConfig(LENGTH), StageConfig(LENGTH))
    second = stages_of(dataclasses.replace(config, model=model, stages=stages))[1]
    trained = dataclasses.replace(
        second, model=dataclasses.replace(second.model, path=str(models[1]))
    )
    expected = references_of(config, tmp_path)
    np.testing.assert_allclose(references_of(trained, tmp_path), expected, rtol=1e-6)


def test_the_reference_is_the_model_with_its_adapter_disabled(folder, models, tmp_path):
    peft = pytest.importorskip("peft")
    model = transformers.LlamaForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    config = make_config(folder, models[0], MeshConfig(), loss="sigmoid")
    adapter = AdapterConfig(rank=4, path=str(tmp_path / "adapter"))
    continued = dataclasses.replace(config, adapter=adapter)
    disabled = dataclasses.replace(
        continued, preference=PreferenceConfig("sigmoid", ref_without_adapter=True)
    )
    base = references_of(config, tmp_path)
    np.testing.assert_allclose(references_of(disabled, tmp_path), base, rtol=1e-5)
    assert (abs(references_of(continued, tmp_path) - base) > 0.01).all()


@pytest.mark.parametrize(("given", "rate"), [(None, 0.0), (0.1, 0.1)])
def test_an_adapters_dropout_is_not_inherited(folder, models, tmp_path, given, rate):
    """As in TRL, whose trainers switch it off; so at the first step all rewards are 0."""
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig
    from trl.trainer.utils import disable_dropout_in_model

    model = transformers.LlamaForCausalLM.from_pretrained(models[0])
    theirs = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=0.2)
    )
    theirs.save_pretrained(tmp_path / "adapter")
    assert DPOConfig.__dataclass_fields__["disable_dropout"].default is True
    if given is None:
        disable_dropout_in_model(theirs)
        assert {x.p for x in theirs.modules() if isinstance(x, torch.nn.Dropout)} == {rate}
    config = make_config(folder, models[0], MeshConfig(), loss="simpo")
    adapter = AdapterConfig(rank=4, path=str(tmp_path / "adapter"), dropout=given)
    objective = open_objective(dataclasses.replace(config, adapter=adapter))
    assert objective.model.config.adapter.dropout_rate == rate
    assert any("adapter.dropout: 0 in" in line for line in objective.warnings) == (given is None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter", r"{} is an adapter; python -m scripts.export_hf --merge of its run, or peft's"),
        ("absent", r".*{}"),
    ],
)
def test_a_reference_that_cannot_be_opened_is_named(folder, models, tmp_path, name, words):
    from peft import LoraConfig, get_peft_model

    path = tmp_path / name
    if name == "adapter":
        model = transformers.LlamaForCausalLM.from_pretrained(models[0])
        get_peft_model(model, LoraConfig(target_modules="all-linear")).save_pretrained(path)
    config = make_config(folder, models[0], MeshConfig(), loss="sigmoid", ref_model=str(path))
    with pytest.raises(
        (UserError, ValueError), match=f"^preference.ref_model: {words.format(path)}"
    ):
        open_objective(config)


def test_a_reference_that_overflows_is_named_and_nothing_is_kept(folder, models, tmp_path):
    """Its weights are finite, but every loss of its pairs would not be."""
    other = shutil.copytree(models[0], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    config = make_config(folder, models[0], loss="sigmoid", ref_model=str(other))
    data = dataclasses.replace(config.data, prepared=str(tmp_path))
    with pytest.raises(UserError, match=r"preference\.ref_model: .* a non-finite log-likelihood"):
        open_objective(dataclasses.replace(config, data=data))
    assert not (tmp_path / "references").exists()


def test_a_reference_with_another_tokenizer_is_named(folder, models, tmp_path):
    other = shutil.copytree(models[0], tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = make_config(folder, models[0], loss="sigmoid", ref_model=str(other))
    with pytest.raises(UserError, match=r"preference\.ref_model: .* a tokenizer other than"):
        open_objective(config)


@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("kto", marks=pytest.mark.slow)])
def test_shared_prompts_equal_unshared_ones(folder, models, params, loss):
    """Losses, rewards and gradients; a pair's prompt is in its row once, followed by both
    completions."""
    results = {}
    for shares in (True, False):
        config = make_config(folder, models[0], loss=loss, share_prompts=shares)
        # The two forms are packed differently, but a batch that holds all pairs has the same ones
        # in both.
        file = str(folder / "pairs.json")
        data = dataclasses.replace(config.data, context_length=512, held_out_path=file)
        objective = open_objective(dataclasses.replace(config, data=data))
        (batch,) = (objective.to_device(x) for x in objective.held_out())
        results[shares] = (objective, *loss_and_gradient(objective, params, batch))
    (sharing, *shared), (_, *unshared) = results[True], results[False]
    same_number(shared[0], unshared[0], "loss with shared prompts")
    # Rewards are differences of log-likelihoods of about 130 nats in float32.
    assert shared[1] == pytest.approx(unshared[1], rel=1e-5, abs=6e-5)
    for x, y in zip(jax.tree.leaves(shared[2]), jax.tree.leaves(unshared[2]), strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        within(error, 1e-5, "gradients with shared prompts")
    lengths, before = sharing.lengths(0), sharing.shared_lengths(0)
    documents = sharing.prepared.train
    pairs = np.concatenate([sharing.loader.row_pairs(row) for row in range(ROWS)])
    whole = np.stack([documents.chosen, documents.lengths - documents.chosen], 1)[pairs]
    assert (lengths + before == whole.ravel()).all() and (before[1::2] > 5).all()
    row = sharing.loader.row(0)
    pair, is_second = int(sharing.loader.row_pairs(0)[0]), row["segment_ids"] == 2
    document, count = sharing.prepared.train[pair], int(sharing.prepared.train.shared[pair])
    second = document.tokens[int(sharing.prepared.train.chosen[pair]) :]
    assert row["tokens"][is_second].tolist() == second[count:].tolist()
    assert row["positions"][is_second].tolist() == list(range(count, len(second)))
    assert (row["shared"] == 1).sum() == count and (row["shared"] == -1).sum() == is_second.sum()
    assert row["targets"][is_second][0] == second[count + 1] and document.loss_mask[count + 1]


@pytest.mark.parametrize("long_pairs", ["drop", "cut_prompt"])
def test_pairs_longer_than_a_row(models, tmp_path, long_pairs):
    long = {"prompt": words(150, 1), "chosen": words(5, 2), "rejected": words(6, 3)}
    short = {"prompt": "Say:", "chosen": "red", "rejected": "blue"}
    (tmp_path / "pairs.json").write_text(json.dumps([long, short]), encoding="utf-8")
    config = make_config(tmp_path, models[0], loss="simpo", long_pairs=long_pairs)
    prepared = open_objective(config).prepared
    (report,) = prepared.report.sources
    if long_pairs == "drop":
        assert report.dropped == {"a pair longer than context_length": 1}
        return
    assert report.repaired == {"longer than context_length, cut at the prompt's beginning": 1}
    cut = max(range(2), key=lambda number: prepared.train.lengths[number])
    assert prepared.train.row_lengths[cut] == LENGTH, "the whole row is used"
    document, chosen = prepared.train[cut], int(prepared.train.chosen[cut])
    prompts = [
        document.tokens[part][: document.loss_mask[part].argmax()].tolist()
        for part in (slice(chosen), slice(chosen, None))
    ]
    assert prompts[0] == prompts[1] and len(prompts[0]) > 20
    longer = max(chosen, int(prepared.train.lengths[cut]) - chosen)
    assert longest_document(prepared) == longer, "the length that an export may claim"


@pytest.mark.parametrize("words_held_out", [1, 16])
def test_every_held_out_pair_counts_however_many_fit_a_row(models, tmp_path, words_held_out):
    def write(name, count):
        records = [
            {
                "prompt": f"{number} {words(count, number)}",
                "chosen": f"old {words(count, 20 + number)}",
                "rejected": words(count, 40 + number),
            }
            for number in range(12)
        ]
        (tmp_path / name).write_text(json.dumps(records), encoding="utf-8")

    write("pairs.json", 17 - words_held_out)
    write("held_out.json", words_held_out)
    config = make_config(tmp_path, models[0], loss="simpo")
    data = dataclasses.replace(
        config.data, held_out_path=str(tmp_path / "held_out.json"), held_out_fraction=0.0
    )
    objective = open_objective(dataclasses.replace(config, data=data))
    assert len(objective.prepared.held_out) == 12
    batches = list(objective.held_out())
    assert sum(batch["pairs"].sum() for batch in batches) == 12
    assert {batch["pairs"].shape for batch in batches} == {
        objective.abstract_batch()["pairs"].shape
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "preference.loss: found None, needs a loss, such as sigmoid"),
        (
            {"loss": "hinge", "label_smoothing": 0.1},
            "preference.label_smoothing: found 0.1, needs 0",
        ),
        ({"loss": "sigmoid", "beta": 0.0}, "preference.beta: found 0.0, needs a number above 0"),
        ({"loss": "orpo", "sft_weight": 1.0}, "preference.sft_weight: found 1.0"),
        (
            {"loss": "sigmoid", "ref_overrides": {"rope_theta": 5.0}},
            "preference.ref_overrides: found {'rope_theta': 5.0}, needs only fields of",
        ),
        (
            {"loss": "sigmoid", "ref_tokenizer": "t"},
            "preference.ref_tokenizer: found 't', needs to be left out without preference.ref_model",
        ),
        (
            {"loss": "sigmoid", "ref_model": "x", "ref_without_adapter": True},
            "preference.ref_without_adapter: found True, needs false with preference.ref_model",
        ),
        (
            {"loss": "sigmoid", "ref_without_adapter": True},
            "preference.ref_without_adapter: found True, needs an adapter",
        ),
        (
            {"loss": "simpo", "ref_model": "x"},
            "preference.ref_model: found x, needs to be left out with preference.loss simpo",
        ),
    ],
)
def test_incompatible_options_are_named(folder, models, change, message):
    with pytest.raises((ValueError, UserError), match=re.escape(message)):
        check(make_config(folder, models[0], **change))


def test_a_source_of_another_format_is_named(folder, models):
    config = make_config(folder, models[0], loss="sigmoid")
    source = dataclasses.replace(config.data.sources[0], format="sharegpt")
    for sources in ((source,), (*config.data.sources, source)):  # also mixed with conversations
        data = dataclasses.replace(config.data, sources=sources)
        with pytest.raises(UserError, match="needs format: preference in every source") as error:
            check(dataclasses.replace(config, data=data))
        assert "--data.sources '[{path: pairs.jsonl, format: preference}]'" in str(error.value)


def test_options_that_a_loss_would_ignore_are_refused(folder, models):
    config = make_config(folder, models[0], loss="sigmoid")
    whole = dataclasses.replace(config.data, train_on="everything")
    with pytest.raises(UserError, match=r"train_on: found 'everything', needs all with preference"):
        check(dataclasses.replace(config, data=whole))
    last = dataclasses.replace(config.data, train_on="last")
    with pytest.raises(UserError, match=r"data\.train_on: found 'last', needs all with preference"):
        check(dataclasses.replace(config, data=last))
    episodes = TrajectoryConfig(path=str(folder), task="walker_walk")
    nothing = dataclasses.replace(config.data, sources=())
    with pytest.raises(UserError, match=r"preference\.loss: found 'sigmoid', needs to be left out"):
        check(dataclasses.replace(config, data=nothing, trajectories=episodes))
