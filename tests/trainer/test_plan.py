"""The TPU compiler's plan of the real step: LLaMA-7B at a million tokens fits, and nothing of length x length is kept."""
import pytest

from model.config import LlamaConfig
from scripts.plan import compile_step, main, topology_devices
from trainer.compiled import arrays_with, collectives, memory

CONTEXT = 1_048_576


@pytest.fixture(scope="module")
def compiled():
    """One minute of the compiler's time, shared."""
    return compile_step(LlamaConfig.preset("llama-7b"), topology_devices("v4:4x4x4"), CONTEXT, remat="nothing")


def test_llama_7b_at_a_million_tokens_fits_in_14_gib(compiled):
    plan = memory(compiled)
    assert plan["peak"] <= 14.0
    assert plan["host"] == 0.0


def test_nothing_of_length_times_length_is_kept(compiled):
    """c = 16384 tokens a device. Tiles are 1024 x 1024: no array has two axes of 4096 or more but weights and activations,
    of which the largest other axis is the hidden size 4096, the FFN width or the vocabulary."""
    tokens = CONTEXT // 64
    assert not arrays_with(compiled.as_text(), tokens)


def test_the_ring_is_the_only_permute_and_no_activation_is_gathered(compiled):
    text = compiled.as_text()
    assert collectives(text)["collective-permute"] > 0
    assert collectives(text)["all-to-all"] == 0


def test_offload_keeps_the_layers_inputs_in_the_hosts_memory():
    """Layers x tokens a device x hidden size in bfloat16, to the byte: 8 x 4096 x 512 x 2."""
    config = LlamaConfig(vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
                         num_attention_heads=4, num_key_value_heads=2)
    plan = memory(compile_step(config, topology_devices("v5e:2x2"), 4 * 4096, remat="offload"))
    assert plan["host"] * 2**30 == 8 * 4096 * 512 * 2


def test_an_unknown_topology_is_one_line(capsys):
    assert main(["--model", "llama-7b", "--topology", "v9:1x1", "--context", "1024"]) == 2
    assert "write generation:shape" in capsys.readouterr().err
