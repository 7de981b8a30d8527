"""Shared by evaluations that ask questions: flags, the model, prompts and answers."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from data.errors import UserError
from data.progress import ProgressBar
from data.templates import NAMES
from data.tokenizer import Tokenizer
from eval import adapters, thoughts
from eval.generation_settings import not_applied
from eval.journal import JOURNAL, Answer, Journal
from eval.prompts import Prompt, check_template, check_template_kwargs, prompt_ids, stop_ids
from model.attention.names import SCHEDULES
from model.config import TransformerConfig
from trainer import arguments, entry
from trainer.host import host_bytes
from trainer.options import (
    AboveZero,
    AtLeastOne,
    AtLeastZero,
    JsonObject,
    StorePath,
    Tokens,
    add_options,
    option,
    parser_of,
)
from trainer.run.results import evaluated, foreign_run

if TYPE_CHECKING:
    from model.decode import Generator, Sampling
    from model.language_model import LanguageModel
    from trainer.inference import InferenceModel
    from trainer.source_kinds import ModelSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The options that all evaluations share."""

    checkpoint: StorePath = option("checkpoint, run folder, Hugging Face folder or org/name")
    rows: AtLeastOne = option("number of prompts in a batch", 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options shared by commands that generate answers."""

    template: str | None = option(
        "chat template of the question (default: the model's; plain text if it has none)",
        None,
        choices=NAMES,
    )
    template_kwargs: JsonObject | None = option(
        "variables for the chat template, as JSON, such as '{\"enable_thinking\": false}'",
        None,
        metavar="JSON",
    )
    fsdp: AtLeastOne = option("number of devices along fsdp", 1)
    tensor: AtLeastOne = option("number of devices along tensor", 1)
    sequence: AtLeastOne = option("number of devices along sequence", 1)
    simulate: AtLeastZero = option("simulate this many devices on the CPU; 0 uses the machine's", 0)
    compute_dtype: str | None = option(
        "dtype of the computation (default: bfloat16; on a CPU float32, which is several times "
        "faster there)",
        None,
        choices=("bfloat16", "float32"),
    )
    schedule: str = option("attention schedule of the prefill", "ring", choices=sorted(SCHEDULES))
    chunk: Tokens = option("prompt tokens computed at a time, over all devices", 4096)
    memory_gib: AboveZero | None = option("usable memory per device (default: all)", None)
    temperature: float = option(
        "0 takes the most likely token (default); above 0, tokens are sampled", 0.0
    )
    top_p: float = option("sample from the most likely tokens with this total probability", 1.0)
    sample_seed: AtLeastZero = option("seed of the sampling", 0)
    replicate: bool = option(
        "keep a copy of all weights on every device; much faster if the model fits, since decoding "
        "gathers no weights"
    )


def add_generation_options(
    parser: argparse.ArgumentParser, max_new_tokens: int | None = None
) -> None:
    """Adds the options shared by commands that generate answers.

    Args:
      max_new_tokens: default of --max-new-tokens; without it there is no such option, since the
        command sets the length of its answers.
    """
    if max_new_tokens is not None:
        parser.add_argument(
            "--max-new-tokens",
            type=arguments.tokens,
            default=max_new_tokens,
            help=f"maximum tokens per answer (default {max_new_tokens})",
        )
    add_options(parser, GenerationOptions)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line, and the whole line as `command`."""
    args = parser.parse_args(argv)
    args.command = [*parser.prog.split(), *(sys.argv[1:] if argv is None else argv)]
    return args


def parse_evaluation(
    options: type,
    argv: Sequence[str] | None = None,
    *,
    journaled: bool = True,
    max_new_tokens: int | None = None,
) -> argparse.Namespace:
    """Returns an evaluation's options: its own, and those that all evaluations share.

    Args:
      journaled: whether answers are kept in a journal; the help for --output then says so.
      max_new_tokens: see `add_generation_options`.
    """
    parser = parser_of(options)
    add_options(parser, EvaluationOptions)
    more = "; repeat the command to continue an interrupted evaluation" if journaled else ""
    parser.add_argument("--output", required=True, help=f"folder for the results{more}")
    adapters.add_options(parser, several=True)
    add_generation_options(parser, max_new_tokens)
    return parse(parser, argv)


def command(
    parse: Callable[..., argparse.Namespace], evaluate: Callable[[argparse.Namespace], object]
) -> Callable[..., int]:
    """Returns an evaluation's `main`, which takes arguments (sys.argv's by default) for its exit
    code."""

    def main(argv: Sequence[str] | None = None) -> int:
        args = parse(argv)
        return entry.run(lambda: adapters.each_adapter(evaluate, args), args.output)

    return main


def is_given(args: argparse.Namespace, flag: str) -> bool:
    """Returns whether a flag is on the command line of `parse`, such as --count."""
    return any(word.split("=")[0] == flag for word in args.command)


def check_flags(args: argparse.Namespace) -> None:
    """Raises UserError if the shared flags contradict each other, or one would have no effect."""
    for flag, is_set in (("--top-p", args.top_p != 1), ("--sample-seed", args.sample_seed != 0)):
        if is_set and not args.temperature:
            raise UserError(
                f"{flag}: is for sampled answers, and the most likely tokens are taken; with a "
                "--temperature above 0 it would work"
            )
    if args.rows % args.fsdp:
        next_multiple = -(-args.rows // args.fsdp) * args.fsdp
        raise UserError(
            f"--rows: {args.rows} is not a multiple of --fsdp {args.fsdp}; {next_multiple} would "
            "work"
        )


def padded_length(length: int, multiple: int) -> int:
    """Rounds a length up to a multiple of `multiple`, so that few lengths are compiled.

    Lengths much larger than `multiple` grow by at most an eighth.
    """
    step = max(multiple, 2 ** max(length.bit_length() - 4, 0) // multiple * multiple)
    return -(-length // step) * step


@dataclasses.dataclass(frozen=True)
class Respondent:
    """A model that answers questions.

    Attributes:
      template: the chat template; None for plain text.
      rows, chunk, sampling: see `model.decode.Generator`.
      trained_length: see `trainer.trained_length`.
      limit: usable bytes per device; None if unknown.
      generators: compiled so far, by capacity and new tokens.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    template: str | None
    stops: tuple[int, ...]
    trained_length: int
    rows: int
    chunk: int
    sampling: Sampling
    limit: int | None = None
    generators: dict[tuple[int, int], Generator] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def ids(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt."""
        return prompt_ids(prompt, self.tokenizer, self.template)

    def length(self, prompt: Prompt) -> int:
        """Returns the number of tokens of a prompt."""
        return len(self.ids(prompt))

    @functools.cached_property
    def _opens_thought(self) -> str:
        return thoughts.opens_thought(self.tokenizer, self.template)

    def without_thoughts(
        self, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> tuple[list[Answer], dict[str, int]]:
        """Returns what is scored of the answers to prompts, and `thoughts.counted` of them."""
        texts = []
        for prompt, answer in zip(prompts, answers, strict=True):
            opened = "" if prompt.prefix else self._opens_thought
            texts.append((answer.generated, thoughts.after_thought(answer.generated, opened)))
        scored = [
            dataclasses.replace(answer, generated=text or "")
            for answer, (_, text) in zip(answers, texts, strict=True)
        ]
        return scored, thoughts.counted(texts)

    def answer(
        self,
        params: dict,
        prompts: Sequence[Prompt],
        journal: Journal | None = None,
        on_answer: Callable[[int], None] = lambda count: None,
    ) -> list[Answer]:
        """Returns the answer to each prompt.

        Prompts of similar lengths are answered together; those with a common prefix follow one
        another, so that it is computed once.

        Args:
          params: the model's parameters.
          journal: existing answers; receives the others.
          on_answer: called with the number of newly answered prompts.

        Raises:
          UserError: a prompt is too long for the memory.
        """
        answers = dict(journal.answers) if journal else {}
        on_answer(sum(prompt.key in answers for prompt in prompts))
        waiting = {prompt.key: prompt for prompt in prompts if prompt.key not in answers}
        ids = {key: self.ids(prompt) for key, prompt in waiting.items()}
        repeats = collections.Counter(prompt.key for prompt in prompts)
        generator: Generator | None = None
        for capacity, new_tokens, keys in self._batches(waiting, ids):
            if generator is None or generator is not self.generators.get((capacity, new_tokens)):
                if generator is not None:
                    generator.free_cache()  # there is memory for only one cache
                generator = self.generator(
                    params, capacity, new_tokens, max(map(len, ids.values()))
                )
            generated_ids = generator(
                params, [ids[key] for key in keys], [waiting[key].draw for key in keys]
            )
            for key, generated in zip(keys, generated_ids, strict=True):
                answers[key] = Answer(thoughts.text_of(generated, self.tokenizer), len(ids[key]))
                if journal:
                    journal.add(key, answers[key])
                on_answer(repeats[key])
        if generator:
            generator.free_cache()
        return [answers[prompt.key] for prompt in prompts]

    def _batches(
        self, prompts: dict[str, Prompt], ids: dict[str, list[int]]
    ) -> Iterator[tuple[int, int, list[str]]]:
        """Yields capacity, new tokens, and the keys of at most `rows` prompts.

        Neighbours in the order of their ids share the longest prefixes; each row of the batches
        gets a run of them.
        """
        groups: dict[tuple[int, int], list[str]] = {}
        for key, prompt in prompts.items():
            groups.setdefault(
                (self.capacity(len(ids[key]) + prompt.new_tokens), prompt.new_tokens), []
            ).append(key)
        for (capacity, new_tokens), keys in sorted(groups.items()):
            keys.sort(key=ids.__getitem__)
            run = -(-len(keys) // self.rows)
            for number in range(run):
                yield capacity, new_tokens, keys[number::run]

    def capacity(self, tokens: int) -> int:
        """Rounds up the tokens of prompt and answer, so that few capacities are compiled.

        Under RoPE rules that depend on the capacity (`model.cache.CachedModel`) it is equal on
        every mesh, and not rounded up beyond the model's original length.
        """
        originals = [original for original, _ in self._original_lengths()]
        if not originals:
            return padded_length(tokens, 64 * self.model.mesh.shape["sequence"])
        return min(
            [padded_length(tokens, 64), *(original for original in originals if tokens <= original)]
        )

    def capacity_within(self, tokens: int, most: int) -> int:
        """Returns a capacity for `tokens` that embeds them as `capacity(tokens)` would.

        It is `most`, so that one generator serves all lengths, unless the RoPE rule depends on the
        capacity: then a short row in a cache for long ones would be embedded as a long one.

        Args:
          tokens: of prompt and answer; most: the largest capacity needed, at least `tokens`.
        """
        originals = self._original_lengths()
        if any(rule == "dynamic" and tokens > original for original, rule in originals):
            return self.capacity(tokens)
        return min([most, *(original for original, _ in originals if tokens <= original)])

    def _original_lengths(self) -> list[tuple[int, str]]:
        """Returns the lengths beyond which a RoPE rule depends on the capacity, with the rules."""
        ropes = (self.model.config.rope, self.model.config.local_rope)
        return [
            (cast(int, rope.original_max_position_embeddings), rope.rule)
            for rope in ropes
            if rope is not None and rope.depends_on_length
        ]

    def generator(self, params: dict, capacity: int, new_tokens: int, longest: int) -> Generator:
        """Returns the generator of this capacity, compiled once.

        Args:
          longest: tokens of the longest prompt, for the message.

        Raises:
          UserError: it needs too much memory.
        """
        from model.decode import Generator

        if (capacity, new_tokens) in self.generators:
            return self.generators[capacity, new_tokens]
        generator = Generator(
            self.model,
            rows=self.rows,
            capacity=capacity,
            new_tokens=new_tokens,
            stop_ids=self.stops,
            chunk=min(self.chunk, capacity),
            sampling=self.sampling,
        )
        needed = generator.cached.bytes_per_device + sum(
            x.addressable_shards[0].data.nbytes for x in params.values()
        )
        # Otherwise it surely fits, without compiling.
        if self.limit is not None and 2 * needed > self.limit:
            fitting = generator.longest_prompt(self.limit)
            if fitting + new_tokens < capacity:
                rows = "" if self.rows == 1 else "fewer --rows, "
                raise UserError(
                    f"prompts of up to {longest:,} tokens: {fitting:,} tokens fit in a device's "
                    f"{self.limit / 2**30:.1f} GiB, with {self.rows} rows at a time; {rows}a "
                    "smaller --chunk or more devices along --sequence make room"
                )
        self.generators[capacity, new_tokens] = generator
        return generator


def memory_limit(device: Any, devices: int, gib: float | None) -> int | None:
    """Returns a device's usable bytes: `gib`, else the runtime's, or a CPU device's share."""
    if gib is not None:
        return int(gib * 2**30)
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    if device.platform == "cpu":
        return host_bytes() // devices
    return None


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A command line's model, ready to answer, and its description for results.json.

    Attributes:
      tokenizer_path: the folder with its tokenizer's files.
    """

    respondent: Respondent
    params: dict
    about: dict[str, Any]
    tokenizer_path: Path

    def answer(self, prompts: Sequence[Prompt], output: str | Path) -> list[Answer]:
        """Returns the answers, showing progress; reuses those in the folder `output`."""
        names = (
            "model",
            "reads",
            "quantize",
            "template",
            "template_kwargs",
            "compute_dtype",
            "sampling",
        )
        journal = Journal(
            Path(output) / JOURNAL, {name: self.about[name] for name in names if name in self.about}
        )
        try:
            known = sum(prompt.key in journal.answers for prompt in prompts)
            if known:
                print(f"{known} of {len(prompts)} answers exist already")
            others = len(journal.answers.keys() - {prompt.key for prompt in prompts})
            if others:
                print(
                    f"note: {output}: results.json will be of these {len(prompts)} cases only; the "
                    f"answers to {others} others stay in {JOURNAL}; with another --output the "
                    "earlier results are kept too",
                    file=sys.stderr,
                )
            with ProgressBar("answering", len(prompts), "answers") as bar:
                return self.respondent.answer(self.params, prompts, journal, bar.advance)
        finally:
            journal.close()


def _reads(config: TransformerConfig, tokenizer: Tokenizer) -> str:
    """Returns a hash of the model's configuration, tokenizer and template, which affect answers."""
    # Without fields at their defaults: one that a later version adds must not end an evaluation.
    values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    given = {field.name: value for field, value in values if value != field.default}
    parts = (repr(given), tokenizer.fingerprint, tokenizer.chat_template or "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def open_respondent(args: argparse.Namespace) -> LoadedModel:
    """Opens the model that the options of `add_generation_options` describe, on their mesh."""
    # Imported here, so that wrong options are reported at once.
    from model.decode import Sampling
    from trainer.config.schema import MeshConfig
    from trainer.inference import open_for_inference
    from trainer.trained_length import trained_length

    sampling = Sampling(args.temperature, args.top_p, args.sample_seed)
    opened = open_for_inference(
        args.checkpoint,
        MeshConfig(fsdp=args.fsdp, tensor=args.tensor, sequence=args.sequence),
        schedule=args.schedule,
        simulated=args.simulate,
        replicate=args.replicate,
        compute_dtype=args.compute_dtype,
        adapter=args.adapter,
        quantize=args.quantize,
    )
    config, tokenizer, mesh = opened.source.config, opened.source.tokenizer(), opened.model.mesh
    if args.template:
        check_template(args.template, tokenizer)
    template = args.template or ("tokenizer" if tokenizer.chat_template else None)
    if args.template_kwargs:
        check_template_kwargs(args.template_kwargs, template, tokenizer)
        # Those that a run was trained with hold unless given.
        tokenizer = tokenizer.with_template_kwargs(
            {**tokenizer.template_kwargs, **args.template_kwargs}
        )
    respondent = Respondent(
        opened.model,
        tokenizer,
        template,
        stop_ids(config, tokenizer, template),
        trained_length(opened.source),
        args.rows,
        args.chunk,
        sampling,
        memory_limit(mesh.devices.flat[0], mesh.size, args.memory_gib),
    )
    about = _about(args, opened, respondent) | _not_applied(opened.source)
    if hasattr(args, "output") and (run := foreign_run(about, Path(args.output))):
        print(
            f"warning: --output: {args.output} is in the folder of the run {run}, of which "
            f"{evaluated(about)} is not a checkpoint; reports of that run would show these "
            "results too",
            file=sys.stderr,
        )
    return LoadedModel(respondent, opened.read(), about, Path(opened.source.tokenizer_path))


def _not_applied(source: ModelSource) -> dict[str, Any]:
    """Returns, for results.json, what a generation_config.json asks for and decoding does not do; a
    line says so."""
    from trainer.model_source import generation_settings

    settings = not_applied(generation_settings(source.tokenizer_path))
    if not settings:
        return {}
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    print(
        f"note: generation_config.json has {listed}, which is not applied: transformers' greedy "
        "answers may differ",
        file=sys.stderr,
    )
    return {"generation_config_not_applied": settings}


def _about(
    args: argparse.Namespace, opened: InferenceModel, respondent: Respondent
) -> dict[str, Any]:
    """Returns the description of the model and its settings for results.json."""
    import jax

    source, mesh = opened.source, opened.model.mesh
    about = {
        "checkpoint": str(args.checkpoint),
        "model": source.fingerprint,
        "reads": _reads(source.config, respondent.tokenizer),
        "trained_length": respondent.trained_length,
        "template": respondent.template,
        "compute_dtype": opened.compute_dtype,
        "sampling": dataclasses.asdict(respondent.sampling),
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "schedule": args.schedule,
        "versions": {"jax": jax.__version__, "device": mesh.devices.flat[0].device_kind},
        "command": args.command,
    }
    if args.template_kwargs:
        about["template_kwargs"] = args.template_kwargs
    if opened.quantize is not None:
        about |= {"adapter": args.adapter or str(args.checkpoint), "quantize": opened.quantize}
    return about
