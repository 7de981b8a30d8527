"""Small runs on preferences, and comparisons that tests share."""

import json
import pathlib
import shutil

import jax
import numpy as np
import torch
import transformers
from jax.sharding import Mesh

from tests import small_model
from tests.errors import within
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import (
    AttentionConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from trainer.huggingface.table import hf_layout
from trainer.mesh import make_mesh
from trainer.preference import PreferenceObjective, preference_loss
from trainer.step import StepBuilder

LENGTH, ROWS = 128, 4
WIDE = MeshConfig(fsdp=2, tensor=2, sequence=2, simulate=8)


def words(count: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(["red", "blue", "old", "big", "cat"], count))


def write_pairs(folder, count: int) -> None:
    """Writes pairs whose prompts and completions have different lengths."""
    records = [
        {
            "prompt": f"Say {number}: {words(3, number)}",
            "chosen": words(2 + number % 5, 100 + number),
            "rejected": words(3 + number % 3, 200 + number),
        }
        for number in range(count)
    ]
    (folder / "pairs.json").write_text(json.dumps(records), encoding="utf-8")


def usual_model(hf_model, folder) -> pathlib.Path:
    """A model with weights of typical size. With those of `hf_model`, which are large, the
    gradients of a pair's completions nearly cancel, and TRL in float32 differs by more than 1e-5
    from TRL in float64."""
    usual = pathlib.Path(shutil.copytree(hf_model, folder / "usual"))
    model = transformers.LlamaForCausalLM.from_pretrained(usual, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.mul_(0.25)
    model.save_pretrained(usual)
    return usual


def changed_model(hf_model, folder) -> pathlib.Path:
    """The folder of a policy that differs from the initial model."""
    model = transformers.LlamaForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    policy = pathlib.Path(shutil.copytree(hf_model, folder / "policy"))
    model.save_pretrained(policy)
    return policy


def make_config(folder, model, mesh=WIDE, **preference) -> RunConfig:
    return RunConfig(
        name="preference",
        run_dir=str(folder / "run"),
        model=ModelConfig(path=str(model), compute_dtype="float32"),
        data=DataConfig(
            sources=(SourceConfig(str(folder / "pairs.json"), "preference", "plain"),),
            context_length=LENGTH,
            prepared=str(folder / "prepared"),
            held_out_fraction=0.0,
        ),
        preference=PreferenceConfig(**preference),
        mesh=mesh,
        attention=AttentionConfig(kernel="reference"),  # compiles fastest
        train=TrainConfig(steps=20, batch_size=ROWS),
        logging=LoggingConfig(console=False, tensorboard=False),
    )


def open_objective(config: RunConfig) -> PreferenceObjective:
    devices = jax.devices()[: config.mesh.devices]
    mesh: Mesh = make_mesh(config.mesh, devices)
    return PreferenceObjective(config, mesh)


def parts(document, chosen):
    """The prompt, the first and the second completion of a prepared document."""
    tokens, mask = document.tokens.tolist(), document.loss_mask
    first, second = int(mask[:chosen].argmax()), chosen + int(mask[chosen:].argmax())
    assert tokens[:first] == tokens[chosen:second]
    assert mask[first:chosen].all() and mask[second:].all()
    return tokens[:first], tokens[first:chosen], tokens[second:]


def examples(objective, rows=range(ROWS)) -> list[dict]:
    """The documents of these rows in TRL's form, in the batch's order."""
    documents, found = objective.prepared.train, []
    labelled = objective.config.preference.loss == "kto"
    for number in (int(number) for row in rows for number in objective.loader.row_pairs(row)):
        prompt, first, second = parts(documents[number], int(documents.chosen[number]))
        example = {"prompt_ids": prompt, "chosen_ids": first, "rejected_ids": second}
        if labelled:
            example = {"prompt_ids": prompt, "completion_ids": first, "KL_completion_ids": second}
            example["label"] = bool(documents.labels[number])
        found.append(example)
    return found


def trl_trainer(folder, model, reference, loss, **options):
    """TRL's trainer for a loss with a reference, which computes the loss of prepared ids."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    if loss == "kto":
        trainer, config = KTOTrainer, KTOConfig
        rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    else:
        trainer, config, options = DPOTrainer, DPOConfig, {"loss_type": [loss], **options}
        rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    return trainer(
        model=model,
        ref_model=reference,
        args=config(
            output_dir=str(folder / "trl"),
            report_to=[],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(small_model.TOKENIZER),
    )


def trl_loss_and_gradient(trainer, batch):
    """TRL's loss, metrics and gradients."""
    trainer.model.zero_grad()
    value = trainer._compute_loss(trainer.model, trainer.data_collator(batch), False)
    value.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    named = trainer.model.named_parameters()
    return value.item(), metrics, {name: parameter.grad.numpy().copy() for name, parameter in named}


def loss_and_gradient(objective, params, batch, model=None):
    """The loss, its measures and the gradient.

    Args:
      model: has compiled log-likelihoods, which tests of several losses share; by default the
        objective's model, compiled with the loss.
    """

    def total(params):
        sums = preference_loss(model or objective.model, objective.config.preference, params, batch)
        return sums.total / sums.weight, sums

    compute = jax.value_and_grad(total, has_aux=True)
    (value, sums), gradient = (compute if model else jax.jit(compute))(params)
    measures = {name: float(x / sums.weight) for name, x in sums.measures.items()}
    return float(value), measures, gradient


def same_number(value, expected, what, where="") -> None:
    """Compares two numbers within a relative 1e-5; `what` names the comparison for --errors."""
    within(abs(value - expected) / abs(expected), 1e-5, what, where)


def same_gradients(config, gradient, expected):
    """Compares a gradient, tensor by tensor, with one under Hugging Face's names: within 1e-5 by
    norm."""
    compared = 0
    for entry in hf_layout(config):
        for layer, name in enumerate(entry.hf_names()):
            ours = np.asarray(gradient[entry.name])[() if entry.layers is None else layer]
            ours = entry.to_hf(ours[tuple(map(slice, entry.layer_shape))])
            error = np.linalg.norm(ours - expected[name]) / np.linalg.norm(expected[name])
            within(error, 1e-5, "gradients", name)
            compared += 1
    assert compared == len(expected)


def trained(config) -> list[dict]:
    """Trains twenty steps; returns the loss and the measures of each."""
    objective = open_objective(config)
    builder = StepBuilder.of(
        config, objective.model, objective.loss, objective.abstract_batch(), objective.totals
    )
    step = builder.lower_train().compile()
    params = objective.read_params()
    trainable = {name: params[name] for name in builder.trainable}
    state, rows = builder.init_optimizer(trainable), []
    batches = objective.batches(0)
    for number in range(config.train.steps):
        batch = objective.to_device(next(batches))
        trainable, state, metrics = step(trainable, {}, state, batch, np.int32(number))
        rows.append(
            {
                "loss": float(metrics.loss),
                "learning_rate": float(metrics.learning_rate),
                **{n: float(x) for n, x in metrics.measures.items()},
            }
        )
    return rows
