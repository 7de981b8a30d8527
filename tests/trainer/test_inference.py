"""A model read to answer questions: its dtype, its copies, and what is refused."""

import pytest

from data.errors import UserError
from trainer.config.schema import MeshConfig
from trainer.inference import open_for_inference


def test_a_model_runs_in_float32_on_a_cpu_by_default(hf_model):
    mesh = MeshConfig(fsdp=2, sequence=4)
    usual = open_for_inference(str(hf_model), mesh, schedule="ring")
    other = open_for_inference(
        str(hf_model), mesh, schedule="ring", compute_dtype="bfloat16", replicate=True
    )
    assert (usual.compute_dtype, usual.model.dtype) == ("float32", "float32")
    assert (other.compute_dtype, other.model.dtype) == ("bfloat16", "bfloat16")
    assert usual.quantize is None and dict(usual.model.mesh.shape) == {
        "data": 1,
        "fsdp": 2,
        "expert": 1,
        "tensor": 1,
        "sequence": 4,
    }
    name, weight = max(other.read().items(), key=lambda item: item[1].size)
    assert weight.addressable_shards[0].data.shape == weight.shape, "each device has a copy"
    assert usual.read()[name].addressable_shards[0].data.size < weight.size


def test_quantize_without_an_adapter_is_refused(hf_model):
    with pytest.raises(UserError) as refused:
        open_for_inference(str(hf_model), MeshConfig(), schedule="ring", quantize="nf4")
    assert str(refused.value) == (
        f"--quantize: found nf4; {hf_model} is a whole model, and only an adapter's base can be "
        "quantized; --adapter names one"
    )
