"""Line retrieval: is a long context *used*? Greedy answers to "what is the number in line ...", scored and plotted.

    python -m eval.line_retrieval --checkpoint DIR_OR_HF [--cases FILE.jsonl ...] [--lines 20 50 ...] --output DIR

The test of LongChat (the last integer of at most 100 new tokens must be the number). The prompt goes through the same
distributed attention as in training; see model/decode.py. Writes results.json, cases.jsonl and line_retrieval.png to --output.
"""
from __future__ import annotations

import argparse

from rich.progress import Progress

from data.conversation import Message
from data.errors import UserError
from data.paths import output_folder
from data.templates import NAMES, end_ids, render
from data.tokenizer import Tokenizer
from eval import line_cases, report, scoring
from model.config import LlamaConfig
from trainer import entry
from trainer.config.schema import AttentionConfig, MeshConfig, ModelConfig, RunConfig


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.line_retrieval", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--checkpoint", required=True, help="checkpoint, run folder, Hugging Face folder or org/name")
    parser.add_argument("--cases", nargs="+", default=[], metavar="FILE.jsonl", help="case files in LongChat's form")
    parser.add_argument("--lines", nargs="+", type=int, default=[], help="generate cases of so many lines")
    parser.add_argument("--count", type=int, default=50, help="generated cases of each length (default 50)")
    parser.add_argument("--limit", type=int, default=0, help="use only the first so many cases of each file; 0 uses all")
    parser.add_argument("--keys", default="adjective_noun", choices=line_cases.KEY_STYLES, help="keys of generated cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of generated cases")
    parser.add_argument("--template", choices=NAMES, help="chat template of the question (default: the model's own; plain text "
                        "for a model without one)")
    parser.add_argument("--output", required=True, help="folder for results.json, cases.jsonl and line_retrieval.png")
    parser.add_argument("--rows", type=int, default=1, help="prompts answered together (default 1)")
    parser.add_argument("--max-new-tokens", type=entry.at_least_one, default=100,
                        help="length of an answer at most (default 100)")
    parser.add_argument("--fsdp", type=entry.at_least_one, default=1, help="devices along fsdp")
    parser.add_argument("--tensor", type=entry.at_least_one, default=1, help="devices along tensor")
    parser.add_argument("--sequence", type=entry.at_least_one, default=1, help="devices along sequence")
    parser.add_argument("--simulate", type=int, default=0, help="simulate so many devices on the CPU; 0 uses the machine's")
    parser.add_argument("--compute-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layout", default="striped", choices=["striped", "contiguous", "zigzag"])
    parser.add_argument("--replicate", action="store_true", help="a whole copy of the weights on every device: much faster "
                        "for a model that fits, since decoding gathers no weights then")
    return parser.parse_args(argv)


def gather_cases(args) -> list[line_cases.LineCase]:
    """The cases that the command line asks for; UserError for what can be told to be wrong without the model."""
    if not args.cases and not args.lines:
        raise UserError("nothing to evaluate: give --cases FILE.jsonl or --lines 20 50")
    if args.rows < 1 or args.rows % args.fsdp:
        good = max(-(-args.rows // args.fsdp), 1) * args.fsdp
        raise UserError(f"--rows: {args.rows} is no multiple of --fsdp {args.fsdp}; {good} would work")
    if args.count < 1:
        raise UserError(f"--count: {args.count} cases of each length; 1 or more would work")
    cases = []
    for path in args.cases:
        found = line_cases.read(path)
        cases += found[:args.limit] if args.limit else found
    for lines in args.lines:
        cases += line_cases.generate(lines, args.count, args.seed, args.keys)
    return cases


def prompt_ids(case: line_cases.LineCase, tokenizer: Tokenizer, template: str | None) -> list[int]:
    """The prompt as a user's turn in a chat template; plain text without one."""
    if template:
        segments = render([Message("user", case.prompt)], template, tokenizer, add_generation_prompt=True)
        return [token for segment in segments for token in segment.ids]
    return [*([tokenizer.bos_id] if tokenizer.bos_id is not None else []), *tokenizer.encode(case.prompt)]


def stop_ids(config: LlamaConfig, tokenizer: Tokenizer, template: str | None) -> tuple[int, ...]:
    """Ids that end an answer: the model's and the tokenizer's end of sequence, and the template's end of a turn."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    ends = end_ids(template, tokenizer) if template else ()
    return tuple(sorted({int(i) for i in (*eos, *ends, tokenizer.eos_id) if i is not None and i >= 0}))


def batches(prompts: list[list[int]], rows: int) -> list[list[int]]:
    """Numbers of prompts that are answered together: neighbours in length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    return [order[i:i + rows] for i in range(0, len(order), rows)]


def rounded(length: int, multiple: int) -> int:
    """A compiled length: at most an eighth longer than needed, so that few lengths are compiled."""
    step = max(multiple, 2 ** max(length.bit_length() - 4, 0) // multiple * multiple)
    return -(-length // step) * step


def evaluate(args) -> list[scoring.Score]:
    """Answers all cases and writes the report."""
    cases = gather_cases(args)
    output_folder(args.output)
    from model.decode import Generator
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
    prompts, stops = [prompt_ids(case, tokenizer, template) for case in cases], stop_ids(source.config, tokenizer, template)
    mesh = make_mesh(MeshConfig(fsdp=args.fsdp, tensor=args.tensor, sequence=args.sequence))
    config = RunConfig(model=ModelConfig(compute_dtype=args.compute_dtype),
                       attention=AttentionConfig(window=source.mask.window, global_tokens=source.mask.global_tokens))
    model = build_llama(config, source.config, mesh, () if args.replicate else STORAGE_AXES)
    params = source.read(model)
    generators, outcomes = {}, {}
    with Progress(transient=False) as progress:
        task = progress.add_task("answering", total=len(cases))
        for numbers in batches(prompts, args.rows):
            length = rounded(max(len(prompts[i]) for i in numbers), 64 * args.sequence)
            if length not in generators:
                generators[length] = Generator(model, args.layout, args.rows, length, args.max_new_tokens, stops)
            answers = generators[length](params, [prompts[i] for i in numbers])
            for i, ids in zip(numbers, answers, strict=True):
                outcomes[i] = scoring.outcome(cases[i], tokenizer.decode(ids), len(prompts[i]),
                                              source.config.max_position_embeddings, args.max_new_tokens)
            progress.advance(task, len(numbers))
    about = {"checkpoint": str(args.checkpoint), "trained_length": source.config.max_position_embeddings, "seed": args.seed,
             "template": template, "compute_dtype": args.compute_dtype, "layout": args.layout,
             "max_new_tokens": args.max_new_tokens, "mesh": {axis: int(size) for axis, size in mesh.shape.items()}}
    scores = report.write([outcomes[i] for i in range(len(cases))], args.output, about)
    print(f"wrote {args.output}/results.json, cases and a plot")
    return scores


def main(argv=None) -> int:
    """Entry point."""
    args = parse(argv)
    return entry.run(lambda: evaluate(args))


if __name__ == "__main__":
    entry.leave(main())
