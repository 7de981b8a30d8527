"""Settings of transformers' `generate`, in models' files and lm-eval's tasks: those that are read,
and those that our decoding does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.errors import UserError

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Tasks' names for the most tokens of an answer; lm-eval takes the first one given."""
READ = ("until", "do_sample", "temperature", *LENGTHS)
"""The generation_kwargs of tasks that are read."""
# What changes a greedy answer -> the values that do not.
_CHANGING: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "dola_layers": (),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": (),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
# What changes only sampled answers, or beams, or nothing.
_WITHOUT_EFFECT = (
    "diversity_penalty",
    "early_stopping",
    "epsilon_cutoff",
    "eta_cutoff",
    "length_penalty",
    "min_p",
    "num_beam_groups",
    "num_return_sequences",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
)


def not_applied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a generation_config.json that would change a greedy answer."""
    return {
        name: settings[name]
        for name, neutral in _CHANGING.items()
        if settings.get(name) is not None and settings[name] not in neutral
    }


def _not_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a task that may change an answer and are not read.

    Among them are those that `generate` does not know either.
    """
    known = {*READ, *_WITHOUT_EFFECT, *_CHANGING}
    others = {name: value for name, value in settings.items() if name not in known}
    return not_applied(settings) | {
        name: value for name, value in others.items() if value is not None
    }


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """A task's requirements for a generated answer.

    Attributes:
      ends: texts that end it; new_tokens: its most tokens, None if the task does not say.
    """

    task: str
    ends: tuple[str, ...] = ()
    new_tokens: int | None = None

    @classmethod
    def of(cls, task: str, options: Mapping[str, Any], is_greedy: bool = True) -> AnswerForm:
        """Reads the options of a request (a task's generation_kwargs).

        Args:
          options: lm-eval's; `until`, a text or several, gives `ends`, one of LENGTHS `new_tokens`.
          is_greedy: whether answers take the most likely tokens.

        Raises:
          UserError: they do, but the task asks for sampling; or for anything else that our decoding
            does not do, such as beams.
        """
        do_sample, temperature = options.get("do_sample"), options.get("temperature")
        is_sampled = temperature != 0 if do_sample else do_sample is None and (temperature or 0) > 0
        if is_sampled and is_greedy:
            sampling = "do_sample: true" if do_sample else f"temperature: {temperature}"
            raise UserError(
                f"--tasks: {task} asks for sampling ({sampling}); answers are greedy here, so its "
                "score would not be comparable; a --temperature above 0, which applies to all "
                "tasks, would work"
            )
        for name, value in _not_read(options).items():
            raise UserError(
                f"--tasks: {task} asks for {name}: {value}, which decoding here does not do, so "
                "its score would not be comparable; a copy of the task without it, below "
                "--include-path, would work"
            )
        ends = options.get("until") or ()
        most = next((int(options[name]) for name in LENGTHS if options.get(name) is not None), None)
        return cls(task, (ends,) if isinstance(ends, str) else tuple(ends), most)

    def cut(self, text: str) -> str:
        """Returns a text up to the first of its ends."""
        for end in self.ends:
            text = text.split(end)[0] if end else text
        return text
