import jax
import pytest

from model.config import TransformerConfig
from planning.compiled.communication import communication
from planning.compiled.dump import NEEDED, dump_flags, dumped_text
from planning.topology import topology_devices
from tests.compiled_text import compile_step

SMALL = TransformerConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=2,
)


@pytest.mark.skipif(not NEEDED, reason="this jaxlib reads what libtpu compiles")
@pytest.mark.parametrize("topology", ["v5p:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_the_compilers_dump_has_the_communication_of_a_step(tmp_path, topology):
    compiled = compile_step(
        SMALL, topology_devices(topology), 2048, remat="nothing", flags=dump_flags(tmp_path)
    )
    sent = communication(dumped_text(tmp_path), 4)
    assert sent["collective-permute"]["received_gib"] > 0 and sent["all-gather"]["times"] > 0
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # the reason for reading the dump
        assert topology.startswith("v5p")
    else:
        assert sent == communication(text, 4)


def test_an_empty_folder_has_no_text(tmp_path):
    assert dumped_text(tmp_path) is None
