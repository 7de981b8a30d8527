"""The step's benchmark runs the real step in a separate process, and its figures are consistent."""

import json

import pytest

from model.config import TransformerConfig
from scripts.benchmarks.bench_step import document_lengths, main
from scripts.benchmarks.torch_step import TorchOptions, torch_model
from trainer.flops import flops_per_step


@pytest.mark.parametrize(("length", "count"), [(128, 1), (4096, 16), (32768, 16)])
def test_documents_fill_the_row(length, count):
    lengths = document_lengths(length, count)
    assert sum(lengths) == length and len(lengths) == count
    assert min(lengths) > length / count / 8 and max(lengths) < 4 * length / count


@pytest.mark.slow
def test_both_sides_of_a_tiny_model(tmp_path, capsys):
    command = "--model tiny --lengths 128 --steps 1 --turns 1 --documents 4 --torch-recompute"
    assert main([*command.split(), "--output", str(tmp_path)]) == 0
    theirs, ours = json.loads((tmp_path / "step.json").read_text())
    stdout = capsys.readouterr().out
    assert (
        f"128 tokens: {ours['tokens_per_second'] / theirs['tokens_per_second']:.3f}x torch"
        in stdout
    )
    assert theirs["recompute"] and theirs["attention"] == "sdpa" and "torch" in theirs["versions"]
    assert ours["remat"] == "everything" and ours["documents"] == theirs["documents"] == 4
    flops = flops_per_step(
        TransformerConfig.preset("tiny"),
        128,
        sum(n * (n + 1) // 2 for n in document_lengths(128, 4)),
    )
    for row in (theirs, ours):
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(128)
        rate = max(theirs["matmul_gflops"], ours["matmul_gflops"]) * 1e9
        assert row["share_of_matmul"] == pytest.approx(flops / row["step_seconds"] / rate)


def test_a_failing_side_is_one_line(tmp_path, capsys):
    command = "--side ours --model tiny --lengths 128 --steps 1 --kernel none --output"
    assert main([*command.split(), str(tmp_path)]) == 2
    assert "--one ours" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_other_side_is_transformers_model_of_the_family(architecture):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if architecture == "Qwen3MoeForCausalLM":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = TransformerConfig.from_hf_dict({"architectures": [architecture], **shape})
    model = torch_model(config, TorchOptions(), "cpu")
    assert type(model).__name__ == architecture and model.training
    assert model.config.hidden_size == 32 and len(model.model.layers) == 1
