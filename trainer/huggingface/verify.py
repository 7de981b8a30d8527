"""Compares an export with transformers: configuration, ids, logits."""

from __future__ import annotations

import contextlib
import io
import itertools
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.conversation import Message
from data.converted_tokenizer import READS_ALL
from data.errors import UserError, first_line
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer
from model.config import TransformerConfig

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  def f(x):\n\treturn x ** 2  # 1,024\n",
    "Grüße aus Köln, 東京から。 Ωμέγα 🙂",
)
TALK = (
    Message("user", "What is 12 + 30?"),
    Message("assistant", "42."),
    Message("user", "And in words?\nOne line."),
    Message("assistant", "Forty-two."),
)
# The sizes in config.json that transformers must read as written.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
LOGIT_TOLERANCE = 1e-3  # of the largest logit, both in float32
LOGIT_TOKENS = 64


def check_config(folder: Path, config: TransformerConfig) -> None:
    """Opens an export's config.json with transformers; needs no torch.

    Raises:
      UserError: transformers refuses it, or reads another size.
    """
    from transformers import AutoConfig

    theirs = _opened(folder, "config.json", AutoConfig)
    written = config.to_hf()
    for name in SIZES:
        if name in written and getattr(theirs, name, written[name]) != written[name]:
            raise UserError(
                f"{folder}/config.json: {name}: transformers reads {getattr(theirs, name)}, the "
                f"model has {written[name]}; another version of transformers may read it"
            )


def check_tokenizer(folder: Path, trained: bool = True) -> None:
    """Compares the ids of sample texts and a conversation; needs no torch.

    Folders without a tokenizer pass, as do templates that refuse the conversation.

    Args:
      trained: whether the tokenizer is a training run's, as `Tokenizer.save` wrote it, and not a
        copy of an imported one.

    Raises:
      UserError: transformers refuses the tokenizer or the template, or its ids differ from ours.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return
    from transformers import AutoTokenizer

    ours = Tokenizer.load(folder, as_saved=trained).with_template_date(datetime.now())
    theirs = _opened(folder, "tokenizer", AutoTokenizer)
    for text in TEXTS:
        found = theirs(text, add_special_tokens=False)["input_ids"]
        _check_ids(folder, f"the text {text!r}", found, ours.encode(text))
    if ours.chat_template is None:
        return
    try:
        segments = render(TALK, "tokenizer", ours)
    except TemplateError:
        return
    turns = [{"role": message.role, "content": message.content} for message in TALK]
    try:
        found = theirs.apply_chat_template(turns, return_dict=False)
    except Exception as error:  # whatever a template raises
        raise UserError(
            f"{folder}: transformers cannot render the chat template ({first_line(error)}); "
            "another data.template would work"
        ) from None
    ids = [token for segment in segments for token in segment.ids]
    _check_ids(folder, "a sample conversation", found, ids)


def compare_logits(folder: Path) -> float:
    """Returns the largest difference from transformers' logits, over the largest logit.

    Both compute sample tokens with the folder's weights in float32 on one device.

    Raises:
      UserError: torch is not installed, or they differ by more than LOGIT_TOLERANCE.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError(
            "--verify: comparing with transformers' model needs torch; pip install torch"
        ) from None
    ours = our_logits(folder)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, trust_remote_code=False
    ).eval()
    tokens = _sample_tokens(model.config.vocab_size)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not difference <= LOGIT_TOLERANCE:
        raise UserError(
            f"{folder}: transformers' logits differ from ours by {difference:.1e} of the largest; "
            f"at most {LOGIT_TOLERANCE:.0e} is expected; the checkpoint is unchanged"
        )
    return difference


def our_logits(folder: Path) -> np.ndarray:
    """Returns our float32 logits [1, LOGIT_TOKENS, V] of a folder's model for sample tokens."""
    from trainer.build import build_language_model
    from trainer.config.schema import MeshConfig, ModelConfig, RunConfig
    from trainer.mesh import make_mesh
    from trainer.model_source import open_model

    source = open_model(str(folder))
    run = RunConfig(model=ModelConfig(compute_dtype="float32"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = build_language_model(run, source.config, mesh)
    tokens = _sample_tokens(source.config.vocab_size)
    index = np.arange(LOGIT_TOKENS, dtype=np.int32)[None]
    batch: dict[str, Any] = {
        "tokens": tokens,
        "index": index,
        "positions": index,
        "segment_ids": np.ones_like(index),
    }
    logits = jax.jit(model.logits)(source.read(model), batch)
    return np.asarray(logits)[..., : source.config.vocab_size]


def _sample_tokens(vocabulary: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(0, vocabulary, (1, LOGIT_TOKENS), dtype=np.int32)


def _opened(folder: Path, what: str, kind: Any) -> Any:
    """Calls transformers silently; raises a UserError with the first line of its error."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise any kind of error
        raise UserError(
            f"{folder}: transformers cannot open the {what} ({first_line(error)}); another version "
            "of transformers may"
        ) from None


def _check_ids(folder: Path, what: str, found: list[int], expected: list[int]) -> None:
    found = list(found)
    if found != expected:
        pairs = zip(found, expected, strict=False)
        start = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        part = slice(start, start + 12)
        raise UserError(
            f"{folder}: transformers' tokenizer gives {what} other ids from number {start + 1} on: "
            f"{found[part]}, and ours {expected[part]}; another version of transformers, or "
            f"tokenizer_class {READS_ALL} in tokenizer_config.json, may agree"
        )
