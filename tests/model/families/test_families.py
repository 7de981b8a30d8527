"""Each family against transformers: logits, packed documents, gradients, decoding, and its files
read and written."""

import dataclasses
import functools
import itertools
import re
import warnings
from types import MappingProxyType

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from model.config import TransformerConfig
from model.decode import Generator
from model.families import FAMILIES
from model.families.family import NEUTRAL
from model.memory.policies import POLICIES
from tests.errors import within
from tests.model.build import TILED, llama, mean_loss, packed_batch, permuted, tiny
from trainer.flops import pairs_per_layer
from trainer.huggingface.assets import copy_assets, described
from trainer.huggingface.read import read_hf
from trainer.huggingface.table import hf_layout
from trainer.huggingface.write import write_hf

MESH = {"fsdp": 2, "tensor": 2, "sequence": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 1.5, 3.0, 8.0],
}
GLM4_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
ERNIE4_5_MOE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
# Variants of each family's config.json: they set every field that it reads, with windows and original
# lengths shorter than the test sequences.
KINDS = {
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen2 with a window in no layer": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3": {},
    "qwen3 with biases": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "mistral with a window": {"sliding_window": 9},
    "olmo2 with one key head": {"num_key_value_heads": 1},
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "exaone4": {
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": YARN,
    },
    "exaone4 without a window": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "glm4": {"rope_parameters": {**YARN}, "partial_rotary_factor": 0.5},
    "glm4 without biases": {"attention_bias": False, "partial_rotary_factor": 1.0},
    "ernie4_5": {"rope_parameters": {**YARN}},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "seed_oss with other biases": {
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    "ministral3 with a window": {
        "sliding_window": 9,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0,
        },
    },
    "phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 128,
    },
    "phi3 in part": {
        "rope_parameters": {
            **LONGROPE,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.3],
            "long_factor": [1.0, 3.0],
        },
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 128,
    },
    "smollm3": {"num_hidden_layers": 3, "no_rope_layer_interval": 2},
    "smollm3 with a window": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 0.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma2": {
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 0.5,
        "rms_norm_eps": 1e-6,
    },
    "phi3 with a window": {"sliding_window": 9},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": 9},
    "olmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    },
    "gpt_oss": {
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "gpt_oss without biases of attention": {
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": False,
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "solar_open": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
    "solar_open with biases": {
        "num_hidden_layers": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "attention_bias": True,
    },
    "glm4_moe": {
        **GLM4_MOE,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN},
    },
    "glm4_moe with two dense layers": {
        **GLM4_MOE,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "partial_rotary_factor": 1.0,
        "n_shared_experts": 2,
    },
    "ernie4_5_moe": {
        **ERNIE4_5_MOE,
        "num_hidden_layers": 3,
        "rope_parameters": {**YARN},
    },
    "ernie4_5_moe with an interval": {
        **ERNIE4_5_MOE,
        "num_hidden_layers": 5,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
        "moe_num_shared_experts": 0,
        "tie_word_embeddings": False,
    },
    "qwen3_moe with dense layers": {
        "num_hidden_layers": 5,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    },
    "qwen2_moe with a dense layer": {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [2, 7],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}


@functools.cache
def saved(kind: str, folder):
    """Saves and returns a random transformers model whose biases and norms are neither 0 nor 1.
    Its padding token occurs in texts too, where torch gives the embedding no gradient."""
    torch.manual_seed(0)
    family = kind.split()[0]
    sizes = {
        name: getattr(tiny(), name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "initializer_range",
        )
    }
    config = transformers.AutoConfig.for_model(
        family, **{**sizes, "pad_token_id": 3, **KINDS[kind]}
    )
    model = (
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        .float()
        .eval()
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    for name, buffer in itertools.chain(model.named_buffers(), model.named_parameters()):
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.05 if "moe_statics" in name else 0.3)
    model.save_pretrained(folder)
    return model


ONE_PER_FAMILY = (
    "qwen2",
    "qwen3",
    "mistral with a window",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm4",
    "ernie4_5",
    "seed_oss",
    "ministral3",
    "phi3 in part",
    "smollm3",
    "gemma2",
    "gemma3_text",
    "granite",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "qwen2_moe",
    "solar_open",
    "glm4_moe",
    "ernie4_5_moe",
)

MIXTURES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "qwen2_moe",
    "solar_open",
    "glm4_moe",
    "ernie4_5_moe",
)
EXPERT_MESHES = (
    {"fsdp": 2, "expert": 2, "sequence": 2},
    {"expert": 2, "tensor": 2, "sequence": 2},
)


def marked(*kinds):
    """Returns all kinds; those that are not named are marked slow."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.fixture
def model(request, tmp_path_factory):
    """Returns (transformers' model, its folder, our config)."""
    folder = tmp_path_factory.getbasetemp() / f"family {request.param}"
    truth = saved(request.param, folder)
    config = TransformerConfig.from_hf(folder)
    assert config.family == request.param.split()[0]
    return truth, folder, config


def test_every_family_is_tested():
    assert {kind.split()[0] for kind in KINDS} | {"llama"} == set(FAMILIES)


def ours(config, folder, shape, **options):
    """Returns our model on a mesh, and its parameters."""
    model = llama(config, shape, **options)
    return model, read_hf(folder, config, model.shardings, in_memory=model.in_memory)


def documents(batch):
    """Yields (row, slice) of every packed document."""
    for row, segments in enumerate(batch["segment_ids"]):
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1), len(segments)]
        yield from (
            (row, slice(*edge)) for edge in itertools.pairwise(edges) if segments[edge[0]] > 0
        )


def check_packed_documents(model, shape, layout="striped", rows=4, length=64, **options):
    """Compares loss and gradients of packed documents with those of transformers for each document
    alone at the start of a row."""
    truth, folder, config = model
    batch = packed_batch(config, rows=rows, length=length)
    our_model, params = ours(config, folder, shape, **options)
    placed, _ = permuted(batch, our_model, layout)
    (loss, _), gradients = jax.jit(jax.value_and_grad(mean_loss(our_model), has_aux=True))(
        params, placed
    )
    truth.zero_grad()
    total, gates = torch.zeros(()), []
    for row, tokens in documents(batch):
        # A document does not depend on what follows it, but longrope's factors depend on the length
        # of the whole row.
        row_tokens = np.zeros((1, length), np.int32)
        row_tokens[0, : tokens.stop - tokens.start] = batch["tokens"][row, tokens]
        output = truth(torch.tensor(row_tokens))
        expected = output.logits[0, : tokens.stop - tokens.start]
        if config.router_aux_loss:
            gates.append([gate[: tokens.stop - tokens.start] for gate in output.router_logits])
        targets = torch.tensor(batch["targets"][row, tokens]).long()
        losses = torch.nn.functional.cross_entropy(expected, targets, reduction="none")
        total = total + (losses * torch.tensor(batch["loss_weights"][row, tokens])).sum()
    total = total / float(batch["loss_weights"].sum())
    if gates:
        layer_gates = tuple(torch.cat(layer) for layer in zip(*gates, strict=True))
        sizes = config.num_experts, config.num_experts_per_tok
        balance = load_balancing_loss_func(layer_gates, *sizes)
        total = total + config.router_aux_loss * balance
    total.backward()
    within(abs(float(loss) / total.item() - 1), 1e-5, "loss of a family", config.family)
    theirs = dict(truth.named_parameters())
    for entry in hf_layout(config, stacked=bool(config.num_experts)):
        if our_model.parameters[entry.name].constant:
            assert not np.any(gradients[entry.name])
            continue
        for layer, name in enumerate(entry.hf_names()):
            gradient = np.asarray(gradients[entry.name])[() if entry.layers is None else layer]
            gradient = entry.to_hf(gradient[tuple(map(slice, entry.layer_shape))])
            expected = theirs[name].grad.numpy()
            if entry.step > 1:
                expected = expected[..., entry.first :: entry.step]
            else:
                expected = expected[:, entry.rows] if ".experts." in name else expected[entry.rows]
            error = np.abs(gradient - expected).max() / (np.abs(expected).max() or 1)
            within(error, 1e-4, "gradient of a family", name)


@pytest.mark.parametrize(
    "model",
    marked(*(kind for kind in ONE_PER_FAMILY if kind not in ("smollm3", "qwen2_moe"))),
    indirect=True,
)
def test_loss_and_gradients_of_packed_documents_match_each_alone(model):
    check_packed_documents(model, MESH)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(kind, shape, marks=[pytest.mark.slow] * (kind != "qwen3_moe" or number))
        for kind in MIXTURES
        for number, shape in enumerate(EXPERT_MESHES)
    ],
    indirect=["model"],
)
def test_loss_and_gradients_with_split_experts(model, shape):
    check_packed_documents(model, shape)


@pytest.mark.parametrize(
    "model", [pytest.param("phi3", marks=pytest.mark.slow), "phi3 in part"], indirect=True
)
def test_packed_documents_beyond_longropes_original_length(model):
    check_packed_documents(model, MESH, rows=2, length=128)


REMATS = tuple(POLICIES)
COVERING = [
    ("gemma2", "ulysses", "zigzag", "save_attention"),
    ("gemma3_text", "all_gather", "striped", "everything"),
    ("mistral with a window", "ring", "zigzag", "nothing"),
    ("granitemoe", "all_gather", "zigzag", "offload_attention"),
]


def covering():
    """Returns six combinations per family, so that every schedule and layout occurs, and every
    policy of `POLICIES` over two families."""
    chosen = []
    for number, family in enumerate(ONE_PER_FAMILY):
        for index, (schedule, layout) in enumerate(
            itertools.product(("ring", "ulysses", "all_gather"), ("striped", "zigzag"))
        ):
            chosen.append((family, schedule, layout, REMATS[(index + 6 * number) % len(REMATS)]))
    return chosen


@pytest.mark.parametrize(
    ("model", "schedule", "layout", "remat"),
    [
        case if case in COVERING else pytest.param(*case, marks=pytest.mark.slow)
        for case in dict.fromkeys((*COVERING, *covering()))
    ],
    indirect=["model"],
)
def test_schedules_layouts_and_policies_are_exact_for_every_family(model, schedule, layout, remat):
    period = len(model[2].layer_kinds)
    every_k = {"every_k": period if period > 1 else 2} if POLICIES[remat].every_k else {}
    if every_k and model[2].num_hidden_layers % every_k["every_k"]:
        remat, every_k = "nothing", {}  # every_k must divide the layers
    check_packed_documents(
        model,
        {"sequence": 2},
        layout,
        rows=2,
        kernel=TILED,
        schedule=schedule,
        remat=remat,
        **every_k,
    )


@pytest.mark.parametrize(
    "shape", [{}, pytest.param(MESH, marks=pytest.mark.slow)], ids=["one device", "mesh"]
)
# The loss and gradients of the other families are compared above.
@pytest.mark.parametrize("model", marked("smollm3", "qwen2_moe"), indirect=True)
def test_logits_match_transformers(model, shape):
    """On one device, and on a mesh with a striped ring."""
    check_logits(model, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", EXPERT_MESHES)
@pytest.mark.parametrize("model", MIXTURES, indirect=True)
def test_logits_with_split_experts_match_transformers(model, shape):
    check_logits(model, shape)


def check_logits(model, shape):
    truth, folder, config = model
    length = 96  # exceeds the original length of every RoPE rule
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, length), np.int32)
    index = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    our_model, params = ours(config, folder, shape)
    batch, order = permuted(
        {"tokens": tokens, "index": index, "positions": index, "segment_ids": np.ones_like(tokens)},
        our_model,
    )
    logits = np.asarray(jax.jit(our_model.logits)(params, batch))
    with torch.no_grad():
        expected = truth(torch.tensor(tokens)).logits.numpy()[:, order]
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    within(error, 1e-4, "logits of a family", config.family)


@pytest.mark.parametrize("model", marked("mistral with a window", "gpt_oss"), indirect=True)
def test_greedy_decoding_matches_transformers(model):
    check_greedy_decoding(model, (5, 30))


@pytest.mark.parametrize(
    "model", [pytest.param("phi3", marks=pytest.mark.slow), "phi3 in part"], indirect=True
)
def test_greedy_decoding_beyond_longropes_original_length(model):
    check_greedy_decoding(model, (70, 90))


@pytest.mark.slow
@pytest.mark.parametrize("shape", EXPERT_MESHES)
@pytest.mark.parametrize("model", MIXTURES, indirect=True)
def test_greedy_decoding_with_split_experts_matches_transformers(model, shape):
    check_greedy_decoding(model, (5, 30), shape)


def check_greedy_decoding(model, lengths, shape=MappingProxyType({"sequence": 2})):
    """Compares the answers to two prompts of these lengths with transformers' logits of prompt and
    answer."""
    truth, folder, config = model
    prompts = [
        np.random.default_rng(length).integers(3, 128, length).tolist() for length in lengths
    ]
    our_model, params = ours(config, folder, shape)
    capacity = max(lengths) + 10
    answers = Generator(our_model, rows=4, capacity=capacity, new_tokens=8, stop_ids=(), chunk=16)(
        params, prompts
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = truth(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert best.max() <= 1e-3, "a token is not within 1e-3 of the best one"


@pytest.mark.parametrize(
    "model",
    marked(
        *ONE_PER_FAMILY,
        "qwen2 with a window in no layer",
        "gpt_oss without biases of attention",
        "solar_open with biases",
    ),
    indirect=True,
)
def test_exporting_an_imported_model_gives_the_same_tensors(model, tmp_path):
    """As one file, and as several with an index; if embeddings are tied, neither has a head."""
    truth, folder, config = model
    truth.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    _, params = ours(config, tmp_path / "sharded", {})
    copy_assets(folder, tmp_path / "assets")
    theirs = safetensors.torch.load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in theirs) == (not config.tie_word_embeddings)
    for name, most in (("whole", 10**9), ("in parts", 100_000)):
        write_hf(params, config, tmp_path / "assets", tmp_path / name, max_shard_bytes=most)
        assert TransformerConfig.from_hf(tmp_path / name) == config
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert (
            (len(files) > 1)
            == (tmp_path / name / "model.safetensors.index.json").exists()
            == (name == "in parts")
        )
        exported = {
            tensor: value
            for file in files
            for tensor, value in safetensors.torch.load_file(file).items()
        }
        assert theirs.keys() == exported.keys()
        assert all(
            theirs[tensor].dtype == value.dtype and torch.equal(theirs[tensor], value)
            for tensor, value in exported.items()
        )
        read_again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert read_again.config.architectures == [FAMILIES[config.family].architecture]
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "model",
    [
        kind if kind == "qwen3_moe" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
        if kind.split()[0] in MIXTURES
    ],
    indirect=True,
)
def test_stacked_experts_are_read_and_written_like_separate_ones(model, tmp_path):
    """Transformers 5 stacks them in memory; published models have them separately."""
    truth, folder, config = model
    truth.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = safetensors.torch.load_file(tmp_path / "stacked/model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    for shape in ({}, {"fsdp": 4, "tensor": 2}):
        own, params = ours(config, folder, shape)
        stacked = read_hf(tmp_path / "stacked", config, own.shardings, in_memory=own.in_memory)
        assert params.keys() == stacked.keys()
        for name, array in params.items():
            assert np.array_equal(array, stacked[name]), name
    copy_assets(folder, tmp_path / "assets")
    write_hf(params, config, tmp_path / "assets", tmp_path / "fused", stacked=True)
    theirs, exported = (
        safetensors.torch.load_file(tmp_path / kind / "model.safetensors")
        for kind in ("stacked", "fused")
    )
    assert theirs.keys() == exported.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == exported[name].dtype and torch.equal(tensor, exported[name]), name


MEMORY = {
    "prefetch": {"prefetch": True},
    "prefetch, attention kept": {"prefetch": True, "remat": "save_attention"},
    "everything": {"remat": "everything"},
    "groups": {"attention_groups": 2},
    "query chunks": {"query_chunks": 2, "remat": "nothing"},
    "query chunks and groups": {"query_chunks": 2, "attention_groups": 2, "remat": "nothing"},
    "offloaded": {"parameters_on_host": True, "remat": "offload"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "memory"),
    [
        (kind, memory)
        for kind in (
            "smollm3",
            "gemma3_text",
            "olmo3",
            "ministral3",
            "qwen3_moe",
            "granitemoe",
            "gpt_oss",
            "glm4_moe with two dense layers",
        )
        for memory in MEMORY
        if kind != "olmo3" or "groups" not in memory
    ],
    indirect=["model"],
)
def test_results_do_not_depend_on_how_layers_run(model, memory):
    """The loss and the gradients of 3 layers in a period of 2, of scaled queries, of a mixture, or
    of a mixture with dense layers, against the plain scan."""
    _, folder, config = model
    batch = packed_batch(config, rows=2, length=64)

    def run(**options):
        own = llama(config, {"sequence": 2}, kernel=TILED, **options)
        params = read_hf(folder, config, own.shardings)
        return jax.jit(jax.value_and_grad(mean_loss(own), has_aux=True))(
            params, permuted(batch, own)[0]
        )

    (expected, _), expected_gradients = run()
    (loss, _), gradients = run(**MEMORY[memory])
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in gradients.items():
        difference = np.abs(np.asarray(gradient) - np.asarray(expected_gradients[name])).max()
        assert difference <= 1e-5 * np.abs(np.asarray(expected_gradients[name])).max(), name


@pytest.mark.slow
def test_every_k_with_layers_of_two_kinds_gives_the_same_gradients():
    config = tiny(family="smollm3", num_hidden_layers=4, no_rope_layers=(1, 0, 1, 0))

    def run(**options):
        own = llama(config, **options)
        gradients = jax.jit(jax.grad(mean_loss(own), has_aux=True))(
            own.init(0), packed_batch(config, rows=1, length=64)
        )[0]
        return {name: np.asarray(gradient) for name, gradient in gradients.items()}

    expected, gradients = run(), run(remat="every_k", every_k=2)
    for name, gradient in gradients.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-5 * np.abs(expected[name]).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["every_k", "offload_every_k"])
def test_every_k_need_not_divide_the_layers_of_a_mixture_with_dense_layers(remat):
    """One dense layer, and groups of three layers and of one with experts."""
    config = tiny(
        family="ernie4_5_moe",
        num_hidden_layers=5,
        mlp_only_layers=(0,),
        num_experts=4,
        num_experts_per_tok=2,
        **FAMILIES["ernie4_5_moe"].computes,
    )
    batch = packed_batch(config, rows=1, length=64)

    def run(**options):
        own = llama(config, **options)
        gradients = jax.jit(jax.grad(mean_loss(own), has_aux=True))(own.init(0), batch)[0]
        return {name: np.asarray(gradient) for name, gradient in gradients.items()}

    expected, gradients = run(), run(remat=remat, every_k=3)
    for name, gradient in gradients.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-5 * np.abs(expected[name]).max(), name


def test_every_k_must_be_a_multiple_of_the_layers_period():
    config = tiny(family="smollm3", num_hidden_layers=6, no_rope_layers=(1, 1, 0, 1, 1, 0))
    with pytest.raises(
        ValueError, match=r"memory\.every_k: found 2; .* period of 3, so it needs a multiple of 3"
    ):
        llama(config, remat="every_k", every_k=2)


def test_attention_groups_are_refused_if_all_heads_are_normalized_together():
    config = tiny(family="olmo2", qk_norm="all", norms="after")
    with pytest.raises(ValueError, match=r"memory\.attention_groups: found 2.* needs 1"):
        llama(config, attention_groups=2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_presets_match_transformers_configs(family):
    for name in FAMILIES[family].presets:
        config = TransformerConfig.preset(name)
        written = config.to_hf()
        assert TransformerConfig.from_hf_dict(written) == config
        theirs = transformers.AutoConfig.for_model(**written)
        assert type(theirs).model_type == family
        for field in (
            "vocab_size",
            "hidden_size",
            "num_key_value_heads",
            "rms_norm_eps",
            "tie_word_embeddings",
        ):
            assert getattr(theirs, field) == getattr(config, field)
        ropes = theirs.rope_parameters
        assert ropes.get("full_attention", ropes)["rope_theta"] == config.rope.theta
        assert (ropes["sliding_attention"]["rope_theta"] if config.local_rope else None) == (
            config.local_rope and config.local_rope.theta
        )


# What published files of config.json say of the model, beyond what other families' say.
PUBLISHED = {
    "olmo3-32b": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 16,
        "vocab_size": 100278,
    },
    "exaone-4.0-32b": {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "ernie-4.5-300b-a47b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 54,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "vocab_size": 103424,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "use_bias": False,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 3,
        "moe_layer_end_index": 53,
        "moe_layer_interval": 1,
        "moe_intermediate_size": 3584,
        "moe_k": 8,
    },
    "seed-oss-36b": {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "attention_out_bias": False,
        "residual_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "vocab_size": 155136,
    },
    "ministral-3-3b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {
            "model_type": "ministral3",
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "max_position_embeddings": 262144,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 131072,
        },
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_describes_the_preset(preset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = TransformerConfig.from_hf_dict(PUBLISHED[preset])
    assert read == TransformerConfig.preset(preset)


@pytest.mark.parametrize(
    ("dropout", "said"),
    [
        ({"attention_dropout": 0.1, "residual_dropout": 0.1}, "attention_dropout 0.1 and residual"),
        ({"attention_dropout": 0.0, "residual_dropout": 0.2}, "residual_dropout 0.2: the model"),
        ({}, "attention_dropout 0.1 and residual_dropout 0.1: the model is trained without"),
    ],
)
def test_dropout_of_seed_oss_is_left_out_with_a_warning(dropout, said):
    """Transformers' is 0.1 if config.json does not say."""
    source = {
        name: value
        for name, value in PUBLISHED["seed-oss-36b"].items()
        if name not in ("attention_dropout", "residual_dropout")
    }
    theirs = transformers.AutoConfig.for_model(**source, **dropout)
    assert theirs.residual_dropout == dropout.get("residual_dropout", 0.1)
    with pytest.warns(UserWarning, match=f"^config.json: {said}"):
        config = TransformerConfig.from_hf_dict({**source, **dropout})
    assert config == TransformerConfig.preset("seed-oss-36b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written, left_out = described(config, {**source, **dropout})
    assert written.items() >= dropout.items() and left_out == [], "an export keeps them"


GLM = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 4, "head_dim": 64}
ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 4}
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({**GLM, "first_k_dense_replace": 0}, ()),
        ({**GLM, "first_k_dense_replace": 3}, (0, 1, 2)),
        (ERNIE, (0,)),
        ({**ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 2}, (3,)),
        ({**ERNIE, "moe_layer_interval": 2}, (0, 2)),
        ({**QWEN, "mlp_only_layers": None}, ()),
        ({**QWEN, "mlp_only_layers": [3, 9], "decoder_sparse_step": 2}, (0, 2, 3)),
    ],
)
def test_layers_without_experts_are_those_of_transformers(config, dense):
    read = TransformerConfig.from_hf_dict(config)
    assert read.mlp_only_layers == dense
    assert TransformerConfig.from_hf_dict(read.to_hf()) == read
    fields = {"moe_num_experts": 4, "n_routed_experts": 4, "num_experts": 4, "hidden_size": 64}
    theirs = transformers.AutoConfig.for_model(read.family, **{**config, **fields})
    with torch.device("meta"):
        layers = transformers.AutoModel.from_config(theirs).layers
    assert tuple(i for i, layer in enumerate(layers) if not hasattr(layer.mlp, "experts")) == dense


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GLM, "first_k_dense_replace": 4}, ["first_k_dense_replace", "4 of 4 layers"]),
        ({**GLM, "first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
        ({**GLM, "n_group": 8}, ["n_group", "8", "Glm4MoeForCausalLM"]),
        ({**GLM, "use_qk_norm": 1}, ["use_qk_norm", "1"]),
        ({**ERNIE, "moe_layer_start_index": 4}, ["moe_layer_start_index", "4 of 4 layers"]),
        ({**ERNIE, "moe_layer_interval": 0}, ["moe_layer_interval", "0"]),
        ({**ERNIE, "moe_norm_min": 0.1}, ["moe_norm_min", "0.1", "1e-12"]),
        ({**ERNIE, "use_bias": True}, ["use_bias", "True"]),
        ({**ERNIE, "output_router_logits": True}, ["output_router_logits", "True"]),
        ({**QWEN, "decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        ({**QWEN, "mlp_only_layers": ["1"]}, ["mlp_only_layers", "'1'", "numbers"]),
    ],
)
def test_unsupported_layers_of_mixtures_are_refused_by_name(config, words):
    with pytest.raises(ValueError) as caught:
        TransformerConfig.from_hf_dict(config)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("family", "dense", "words"),
    [
        ("glm4_moe", (1,), [r"mlp_only_layers: found \[1\]; Glm4MoeForCausalLM has them first"]),
        ("ernie4_5_moe", (2,), [r"mlp_only_layers: found \[2\]; .* a constant interval"]),
        ("qwen3_moe", (4,), ["mlp_only_layers: found 4; num_hidden_layers 4 needs numbers"]),
        ("llama", (1,), ["mlp_only_layers: found 1 of 4 layers, and num_experts 0"]),
    ],
)
def test_dense_layers_that_a_config_cannot_name_are_refused(family, dense, words):
    sizes = {"num_hidden_layers": 4, "mlp_only_layers": dense}
    if family != "llama":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sizes |= FAMILIES[family].computes
    with pytest.raises(ValueError, match=words[0]):
        tiny(family=family, **sizes).to_hf()


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("glm4_moe", "model.layers.46.eh_proj.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(kind, tensor, tmp_path):
    """Transformers too leaves them out; an export says that it has none."""
    saved(kind, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, tensor: torch.ones(3)}, path, {"format": "pt"})
    config = TransformerConfig.from_hf(tmp_path / "model")
    with pytest.warns(UserWarning, match=f"left out 1 tensors such as {tensor}: as transformers"):
        _, params = ours(config, tmp_path / "model", {})
    assert len(params) == len(hf_layout(config))
    if kind == "glm4_moe":
        source = {**config.to_hf(), "num_nextn_predict_layers": 1}
        written, left_out = described(config, source)
        assert written["num_nextn_predict_layers"] == 0
        assert left_out == ["num_nextn_predict_layers"]
        assert described(config, config.to_hf())[1] == []
    safetensors.torch.save_file({**tensors, "model.layers.45.x": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r"model\.layers\.45\.x does not belong to the model"):
        ours(config, tmp_path / "model", {})


def test_a_published_model_in_fp8_is_refused_by_name():
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False}
    with pytest.raises(
        ValueError, match=r"^quantization_config: quant_method: found 'fp8', .* use"
    ):
        TransformerConfig.from_hf_dict({**PUBLISHED["ministral-3-3b"], "quantization_config": fp8})


# Fields of transformers' configs that do not affect a model's computation, and those that a family
# reads under other names.
NO_COMPUTATION = {
    "use_cache",
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "num_nextn_predict_layers",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
}
READ = {
    "max_window_layers",
    "rope_parameters",
    "original_max_position_embeddings",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_norm_min",
    "moe_num_shared_experts",
}


def test_the_page_states_the_length_of_family_files(repository):
    files = {path.stem: path for path in (repository / "model/families").glob("*.py")}
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in files.items()
        if name not in ("__init__", "family")
    }
    page = (repository / "docs/models.md").read_text(encoding="utf-8")
    assert (
        f"({min(lines.values())} to {max(lines.values())} lines; dense Qwen3 has {lines['qwen3']})"
        in page
    )
    assert lines["qwen3"] < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_configs_is_read_or_refused(family):
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields |= set(FAMILIES[family].config_names.values())
    theirs = set(transformers.AutoConfig.for_model(family).to_dict())
    assert theirs <= fields | set(NEUTRAL) | NO_COMPUTATION | READ


def test_no_family_is_named_outside_its_module(repository):
    """No other module compares a family or has its model type in quotes; Llama's is the default. A
    socket's family is unrelated, and so are the model types by which transformers chooses a class
    of tokenizers."""
    named = re.compile(
        rf"""\bfamily (?:==|!=) (?!socket\.)|["'](?:{"|".join(set(FAMILIES) - {"llama"})})["']"""
    )
    for path in (
        path
        for room in ("model", "trainer", "planning", "data")
        for path in (repository / room).rglob("*.py")
    ):
        if path.parent.name != "families" and path.name != "rebuilt_tokenizer.py":
            assert not named.findall(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_norm": "head"}, ["qk_norm", "'head'", "llama"]),
        ({"family": "qwen3"}, ["qk_norm", "'none'", "qwen3"]),
        ({"norm_offset": 1.0}, ["norm_offset", "1.0", "llama"]),
        ({"residual_multiplier": 0.5}, ["residual_multiplier", "0.5", "llama"]),
        ({"sliding_window": 5}, ["sliding_window", "5", "llama"]),
        ({"family": "bert"}, ["family", "bert", "qwen3"]),
        ({"no_rope_layers": (1, 0)}, ["no_rope_layers", "llama"]),
        ({"family": "smollm3", "no_rope_layers": (1,)}, ["no_rope_layers", "1 entries", "needs 2"]),
        ({"family": "smollm3", "no_rope_layers": (1, 2)}, ["no_rope_layers", "2", "0, 1"]),
    ],
)
def test_a_value_that_the_family_does_not_support_is_refused(change, words):
    with pytest.raises(ValueError) as caught:
        tiny(**change)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 27},
            ["sliding_window", "128"],
        ),
        ({"use_sliding_window": True, "max_window_layers": 27}, ["use_sliding_window", "True"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"mlp_bias": True}, ["mlp_bias", "True", "Qwen3ForCausalLM"]),
        ({"is_causal": False}, ["is_causal", "False", "only True"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder", "True", "only False"]),
        ({"add_cross_attention": True}, ["add_cross_attention", "True", "only False"]),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, ["per_layer_config", "only None"]),
        ({"pruned_heads": {"0": [1]}}, ["pruned_heads", "{'0': [1]}"]),
        ({"use_sliding_window": True, "max_window_layers": "2"}, ["max_window_layers", "'2'"]),
    ],
)
def test_unsupported_fields_are_refused_by_name(change, words):
    with pytest.raises(ValueError) as caught:
        TransformerConfig.from_hf_dict({**TransformerConfig.preset("qwen3-0.6b").to_hf(), **change})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0", "Gemma3ForCausalLM"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        ({"hidden_activation": "relu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        (
            {"layer_types": ["chunked_attention"] * 18},
            ["layer_types", "chunked_attention", "sliding_attention"],
        ),
        ({"sliding_window": None}, ["sliding_window", "null", "layer_types"]),
    ],
)
def test_unsupported_fields_of_gemma_are_refused_by_name(change, words):
    with pytest.raises(ValueError) as caught:
        TransformerConfig.from_hf_dict(
            {**TransformerConfig.preset("gemma-3-270m").to_hf(), **change}
        )
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("family", "field"),
    [(name, field) for name, family in FAMILIES.items() for field in family.ignores],
)
def test_fields_that_transformers_does_not_read_are_ignored(family, field):
    sizes = {name: getattr(tiny(), name) for name in ("hidden_size", "num_attention_heads")}
    fields = {**sizes, "vocab_size": 99, "num_hidden_layers": 1, "sliding_window": 3}
    fields |= {"pad_token_id": None, "num_key_value_heads": 2, "intermediate_size": 64}
    if "num_experts" in FAMILIES[family].configurable:
        fields[FAMILIES[family].config_names.get("num_experts", "num_experts")] = 4
    models, logits = [], []
    for value in (False, True):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **fields, **{field: value})
        models.append(transformers.AutoModelForCausalLM.from_config(config).eval())
        logits.append(models[-1](torch.arange(8)[None]).logits)
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    assert torch.equal(*logits)
    read = [
        TransformerConfig.from_hf_dict({"model_type": family, **fields, field: value})
        for value in (False, True)
    ]
    assert read[0] == read[1]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_the_activation_of_gemma_is_that_of_its_newer_field(family):
    config = TransformerConfig.from_hf_dict({"model_type": family})
    fields = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}
    model = transformers.AutoConfig.for_model(family, **fields, num_hidden_layers=1)
    with torch.device("meta"):
        text = repr(transformers.AutoModel.from_config(model))
    assert "GELUTanh" in text and "GELUActivation" not in text
    assert TransformerConfig.from_hf_dict({"model_type": family, **fields}) == config
    with pytest.raises(ValueError, match=r"^hidden_act: found 'gelu'; only"):
        TransformerConfig.from_hf_dict({"model_type": family, "hidden_act": "gelu"})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "window",
    [
        {"max_window_layers": 2, "sliding_window": 9},
        {"max_window_layers": 0, "sliding_window": None},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 9},
    ],
)
def test_a_window_that_no_layer_has_is_full_attention(family, window):
    config = TransformerConfig.from_hf_dict({"model_type": family, "num_hidden_layers": 2})
    source = {**config.to_hf(), **window, "use_sliding_window": True}
    assert transformers.AutoConfig.for_model(**source).layer_types == ["full_attention"] * 2
    assert TransformerConfig.from_hf_dict(source) == config


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": False, "sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
def test_windows_that_smollm3_turns_off_for_some_layers_are_refused(window):
    types = ["sliding_attention", "full_attention"]
    config = {"model_type": "smollm3", "num_hidden_layers": 2, "layer_types": types, **window}
    assert transformers.AutoConfig.for_model(**config).layer_types == types
    with pytest.raises(ValueError, match=r"^layer_types: found 'sliding_attention' without"):
        TransformerConfig.from_hf_dict(config)


def test_swish_is_silu():
    config = TransformerConfig.preset("tiny")
    assert TransformerConfig.from_hf_dict({**config.to_hf(), "hidden_act": "swish"}) == config
    numbers = torch.linspace(-8, 8, 99)
    swish, silu = (transformers.activations.ACT2FN[name](numbers) for name in ("swish", "silu"))
    assert torch.equal(swish, silu)


def test_gemma_3_configs_of_transformers_4_are_read():
    config = TransformerConfig.preset("gemma-3-12b")
    written = {
        name: value
        for name, value in config.to_hf().items()
        if name not in ("rope_parameters", "layer_types")
    }
    assert written["rope_theta"] == 1e6 and written["rope_local_base_freq"] == 1e4
    assert TransformerConfig.from_hf_dict({**written, "sliding_window_pattern": 6}) == config
    assert len(config.layer_kinds) == 6
    assert [kind.window for kind in config.layer_kinds] == [1024] * 5 + [None]


def test_pairs_are_counted_per_kind_of_layer():
    config = tiny(
        family="gemma3_text",
        num_hidden_layers=3,
        sliding_window=2,
        **FAMILIES["gemma3_text"].computes,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    )
    assert pairs_per_layer(config, np.array([4])) == (7 + 10 + 7) / 3
