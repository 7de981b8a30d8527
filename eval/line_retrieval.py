"""Line retrieval, which measures whether a model uses its long context: asks for a number in a long record of lines.

    python -m eval.line_retrieval --checkpoint DIR_OR_HF [--cases FILE.jsonl ...] [--lines 20 50 ...] --output DIR

The test is LongChat's: the model answers greedily, and the last integer of at most 100 new tokens must be the number. Prompts
are processed by the same distributed attention as in training (model/decode.py). Writes results.json, cases.jsonl and
line_retrieval.png into --output.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import Progress

from data.conversation import Message
from data.errors import UserError
from data.paths import output_folder
from data.templates import NAMES, end_ids, render
from data.tokenizer import Tokenizer
from eval import line_cases, report, scoring
from model.attention.names import LAYOUTS
from model.config import LlamaConfig
from trainer import entry
from trainer.config.schema import AttentionConfig, MeshConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from model.llama import Llama


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.line_retrieval", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--checkpoint", required=True, help="checkpoint, run folder, Hugging Face folder or org/name")
    parser.add_argument("--cases", nargs="+", default=[], metavar="FILE.jsonl", help="case files in LongChat's form")
    parser.add_argument("--lines", nargs="+", type=int, default=[], help="generate cases with this many lines")
    parser.add_argument("--count", type=int, default=50, help="number of generated cases for each number of lines (default 50)")
    parser.add_argument("--limit", type=int, default=0, help="use only the first so many cases of each file; 0 uses all")
    parser.add_argument("--keys", default="adjective_noun", choices=line_cases.KEY_STYLES,
                        help="style of the keys of generated cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated cases")
    parser.add_argument("--template", choices=NAMES, help="chat template of the question (default: the model's own; plain text "
                        "for a model without one)")
    parser.add_argument("--output", required=True, help="folder for results.json, cases.jsonl and line_retrieval.png")
    parser.add_argument("--rows", type=int, default=1, help="number of prompts in a batch (default 1)")
    parser.add_argument("--max-new-tokens", type=entry.at_least_one, default=100,
                        help="number of tokens of the longest answer (default 100)")
    parser.add_argument("--fsdp", type=entry.at_least_one, default=1, help="number of devices along fsdp")
    parser.add_argument("--tensor", type=entry.at_least_one, default=1, help="number of devices along tensor")
    parser.add_argument("--sequence", type=entry.at_least_one, default=1, help="number of devices along sequence")
    parser.add_argument("--simulate", type=int, default=0, help="simulate this many devices on the CPU; 0 uses the machine's")
    parser.add_argument("--compute-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layout", default="striped", choices=LAYOUTS)
    parser.add_argument("--replicate", action="store_true", help="keep a copy of all weights on every device; if the model "
                        "fits, this is much faster, since decoding gathers no weights")
    return parser.parse_args(argv)


def gather_cases(args: argparse.Namespace) -> list[line_cases.LineCase]:
    """Returns the cases that the command line selects.

    Raises:
        UserError: an option is wrong, as far as can be known without the model.
    """
    if not args.cases and not args.lines:
        raise UserError("nothing to evaluate: give --cases FILE.jsonl or --lines 20 50")
    if args.rows < 1 or args.rows % args.fsdp:
        next_multiple = max(-(-args.rows // args.fsdp), 1) * args.fsdp
        raise UserError(f"--rows: {args.rows} is no multiple of --fsdp {args.fsdp}; {next_multiple} would work")
    if args.count < 1:
        raise UserError(f"--count: {args.count} cases of each length; 1 or more would work")
    cases = []
    for path in args.cases:
        file_cases = line_cases.read(path)
        cases += file_cases[:args.limit] if args.limit else file_cases
    for lines in args.lines:
        cases += line_cases.generate(lines, args.count, args.seed, args.keys)
    return cases


def prompt_ids(case: line_cases.LineCase, tokenizer: Tokenizer, template: str | None) -> list[int]:
    """Returns the ids of a prompt: a user's turn in the chat template, or plain text without a template."""
    if template:
        segments = render([Message("user", case.prompt)], template, tokenizer, add_generation_prompt=True)
        return [token for segment in segments for token in segment.ids]
    return [*([tokenizer.bos_id] if tokenizer.bos_id is not None else []), *tokenizer.encode(case.prompt)]


def stop_ids(config: LlamaConfig, tokenizer: Tokenizer, template: str | None) -> tuple[int, ...]:
    """Returns the ids that end an answer: the model's and the tokenizer's EOS, and the template's end of a turn."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    ends = end_ids(template, tokenizer) if template else ()
    return tuple(sorted({int(i) for i in (*eos, *ends, tokenizer.eos_id) if i is not None and i >= 0}))


def batches(prompts: list[list[int]], rows: int) -> list[list[int]]:
    """Groups prompts of similar lengths into batches of at most `rows`; returns the prompts' indices."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return [order[i:i + rows] for i in range(0, len(order), rows)]


def padded_length(length: int, multiple: int) -> int:
    """Returns the length to compile for: a multiple of `multiple`, rounded up so that few lengths need to be compiled.

    For lengths that are large compared with `multiple`, at most an eighth is added.
    """
    step = max(multiple, 2 ** max(length.bit_length() - 4, 0) // multiple * multiple)
    return -(-length // step) * step


def evaluate(args: argparse.Namespace) -> list[scoring.Score]:
    """Answers all cases and returns a score for each source and number of lines.

    Writes results.json, cases.jsonl and line_retrieval.png to args.output.

    Args:
      args: the parsed flags of this command.
    """
    cases = gather_cases(args)
    output_folder(args.output)
    # Imported after the checks above, so that a wrong option is reported at once.
    from model.sharding import STORAGE_AXES
    from trainer.build import build_llama
    from trainer.mesh import make_mesh, simulate
    from trainer.model_source import open_model

    if args.simulate:
        simulate(args.simulate)
    entry.keep_compiled()
    source = open_model(args.checkpoint)
    tokenizer = source.tokenizer()
    template = args.template or ("tokenizer" if tokenizer.chat_template else None)
    prompts = [prompt_ids(case, tokenizer, template) for case in cases]
    mesh = make_mesh(MeshConfig(fsdp=args.fsdp, tensor=args.tensor, sequence=args.sequence))
    config = RunConfig(model=ModelConfig(compute_dtype=args.compute_dtype),
                       attention=AttentionConfig(window=source.mask.window, global_tokens=source.mask.global_tokens))
    model = build_llama(config, source.config, mesh, () if args.replicate else STORAGE_AXES)
    answers = generate_answers(model, source.read(model), prompts, stop_ids(source.config, tokenizer, template), args)
    trained_length = source.config.max_position_embeddings
    outcomes = [scoring.outcome(case, tokenizer.decode(ids), len(prompt), trained_length, args.max_new_tokens)
                for case, ids, prompt in zip(cases, answers, prompts, strict=True)]
    about = {"checkpoint": str(args.checkpoint), "trained_length": trained_length, "seed": args.seed,
             "template": template, "compute_dtype": args.compute_dtype, "layout": args.layout,
             "max_new_tokens": args.max_new_tokens, "mesh": {axis: int(size) for axis, size in mesh.shape.items()}}
    scores = report.write(outcomes, args.output, about)
    print(f"wrote {args.output}/results.json, cases.jsonl and line_retrieval.png")
    return scores


def generate_answers(
    model: Llama, params: dict, prompts: list[list[int]], stops: tuple[int, ...], args: argparse.Namespace
) -> list[list[int]]:
    """Returns the ids of the answer to each prompt, in the prompts' order, and shows a progress bar meanwhile.

    Args:
        model: the model.
        params: its parameters.
        prompts: the ids of each prompt.
        stops: ids that end an answer.
        args: the options of the command line.
    """
    from model.decode import Generator

    answers: list[list[int]] = [[] for _ in prompts]
    generators: dict[int, Generator] = {}
    with Progress(transient=False) as progress:
        task = progress.add_task("answering", total=len(prompts))
        for indices in batches(prompts, args.rows):
            length = padded_length(max(len(prompts[i]) for i in indices), 64 * args.sequence)
            if length not in generators:
                generators[length] = Generator(model, args.layout, args.rows, length, args.max_new_tokens, stops)
            for i, ids in zip(indices, generators[length](params, [prompts[i] for i in indices]), strict=True):
                answers[i] = ids
            progress.advance(task, len(indices))
    return answers


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: evaluate(args))


if __name__ == "__main__":
    entry.leave(main())
