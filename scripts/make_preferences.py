"""Writes train.jsonl and held_out.jsonl: pairs of answers, the short one chosen.

python -m scripts.make_preferences FOLDER

The two files ask about different things. A model that learns these preferences answers briefly. A
rejected answer is a sentence of the kind that instruction models give by default, so that training
makes their usual style unlikely, not just words they would never say.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

from data.outputs import output_files, write_texts
from trainer.options import command, option

FACTS = {
    "the capital of {}": (
        "Germany Berlin, Russia Moscow, France Paris, Japan Tokyo, Italy Rome, Egypt Cairo, "
        "Norway Oslo, Peru Lima, Kenya Nairobi, Cuba Havana, Ireland Dublin, Greece Athens, Spain "
        "Madrid, Austria Vienna, Poland Warsaw, Chile Santiago, Portugal Lisbon, Thailand "
        "Bangkok, Finland Helsinki, Hungary Budapest"
    ),
    "the chemical symbol of {}": (
        "hydrogen H, sulfur S, gold Au, silver Ag, iron Fe, oxygen O, helium He, sodium Na, "
        "carbon C, lead Pb, tin Sn, copper Cu, zinc Zn, neon Ne, nitrogen N, calcium Ca, "
        "potassium K, nickel Ni, iodine I, cobalt Co"
    ),
    "the opposite of {}": (
        "up down, left right, hot cold, big small, fast slow, early late, light dark, soft hard, "
        "young old, full empty, near far, rich poor, high low, loud quiet, wet dry, open closed, "
        "strong weak, deep shallow, wide narrow, new old"
    ),
}
"""A kind of question -> pairs of a thing and its answer."""
QUESTIONS = (
    "What is {}?",
    "Tell me {}.",
    "Can you name {}?",
    "I would like to know {}.",
    "{}, please?",
    "Quick: {}?",
)
OPENINGS = (
    "That is a great question!",
    "Thank you for asking.",
    "I am happy to help with that.",
    "Certainly!",
)
MIDDLES = (
    "Many people wonder about this, and there is a lot that one could say about it.",
    "This is something that is often taught at school, and it is easy to forget.",
    "There are several ways to think about it, and each of them leads to the same answer.",
)
ENDINGS = (
    "If you have any other questions, please do not hesitate to ask, and I will do my best to "
    "help you.",
    "I hope that this answers your question fully, and that you have a wonderful day.",
    "Let me know if you would like to hear more about this, or about anything else.",
)
HELD_OUT = 3  # things per kind of question that occur only in held_out.jsonl


def pairs(held_out: bool) -> Iterator[dict[str, str]]:
    """Yields records with `prompt`, `chosen` and `rejected`, always the same."""
    generator = np.random.default_rng((0, held_out))
    cases = [
        (question, kind.format(thing), answer)
        for kind, things in FACTS.items()
        for thing, answer in [pair.split() for pair in things.split(", ")][
            slice(-HELD_OUT, None) if held_out else slice(-HELD_OUT)
        ]
        for question in QUESTIONS
    ]
    for number in generator.permutation(len(cases)):
        question, what, answer = cases[number]
        opening, middle, ending = (
            generator.choice(texts) for texts in (OPENINGS, MIDDLES, ENDINGS)
        )
        prompt, sentence = question.format(what), f"{what[0].upper()}{what[1:]} is {answer}."
        if generator.random() < 0.5:
            sentence = f"{opening} {sentence}"
        yield {
            "prompt": prompt[0].upper() + prompt[1:],
            "chosen": f"{answer[0].upper()}{answer[1:]}.",
            "rejected": f"{sentence} {middle} {ending}",
        }


def write(folder: pathlib.Path) -> None:
    """Writes both files."""
    texts = {
        f"{name}.jsonl": "".join(json.dumps(record) + "\n" for record in pairs(held_out))
        for name, held_out in (("train", False), ("held_out", True))
    }
    # The files are always the same, so the first line identifies a file as ours.
    output_files(folder, {name: text.partition("\n")[0].encode() for name, text in texts.items()})
    write_texts(folder, texts)
    for name, text in texts.items():
        print(f"wrote {folder / name}: {text.count(chr(10))} pairs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    folder: pathlib.Path = option("folder for train.jsonl and held_out.jsonl", positional=True)


main = command(Options, lambda options: write(options.folder), output="folder")


if __name__ == "__main__":
    sys.exit(main())
