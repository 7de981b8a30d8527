"""Writes data/fixtures except dirty.json: conversations, line cases, three tiny tokenizers.

    python -m scripts.make_fixtures [FOLDER]

The script always writes the same bytes (checked by tests/data/test_fixtures.py). It also writes
data/fixtures/README.md, which describes the files.
"""

import dataclasses
import io
import json
import random
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.outputs import new_folder
from data.synthetic import tasks
from data.synthetic.wording import wording_like
from data.templates.built_in import VICUNA, VICUNA_SYSTEM
from trainer.options import command, option

FOLDER = Path(__file__).resolve().parents[1] / "data" / "fixtures"
SEED = 20240229  # an arbitrary date, never tuned
TRAIN_LINES, TRAIN_CHATS = 6300, 700  # 90% line retrieval, 10% everything else
HELD_OUT_LINES, HELD_OUT_CHATS = 60, 60
CASES = 200
LINES = 4
TURNS = 5  # questions about all lines of a training record; more would not fit in 256 tokens
NUMBERS = range(10, 100)

KEYS = "bee cat dog elk fox hen owl pig".split()  # noqa: SIM905
NAMES = """
    Ada Bo Cara Dan Edna Finn Gus Hilda Ivo June Kai Lena Milo Nora Otto Pia Quin Rosa Sven Tess
""".split()  # noqa: SIM905
PLACES = """
    Arvel Brenmoor Calder Dunwick Eskby Farrow Glenholm Hartle Ilmar Jorvik Kelby Lundy Marsk Norham
    Orrin Penwith Quarle Ravel Selby Tarn Ulmar Varne Wexby Yarrow Zennor
""".split()  # noqa: SIM905
COLOURS = """
    red blue green white black grey brown gold
""".split()  # noqa: SIM905
THINGS = """
    harbour tower bridge market mill garden chapel school inn gate
""".split()  # noqa: SIM905
JOBS = """
    baker smith sailor teacher farmer painter doctor weaver
""".split()  # noqa: SIM905
FOODS = """
    apples plums bread soup cheese honey fish beans
""".split()  # noqa: SIM905
WORDS = """
    stone river paper candle window basket silver winter summer kettle ladder button mirror pocket
    ribbon saddle thunder velvet whistle anchor blanket carpet feather hammer island jacket lantern
    meadow needle orange pillow rocket shadow table umbrella village wagon yellow acorn barrel
""".split()  # noqa: SIM905
OPPOSITES = """
    hot cold|big small|fast slow|old new|wet dry|high low|full empty|soft hard|early late|near far
""".strip().split("|")


def is_held_out(key: str, value: int) -> bool:
    """Returns whether no training answer consists of only this (key, value) pair: one in twenty.

    A hash decides, so a model cannot learn which pairs these are.
    """
    return zlib.crc32(f"{key} {value}".encode()) % 20 == 0


HELD_OUT_PAIRS = [(key, value) for key in KEYS for value in NUMBERS if is_held_out(key, value)]


class LineRecord(NamedTuple):
    """A record of lines and the line to ask for."""

    pairs: list[tuple[str, int]]
    """(key, value) of each line, by key; keys are distinct, and so are values."""
    target: tuple[str, int]
    """(key, value) of the line to ask for."""
    text: str


def line_record(rng: random.Random, lines: int, held_out: bool) -> LineRecord:
    """Returns a random record; if `held_out`, the line to ask for is one of HELD_OUT_PAIRS.

    The lines are in key order, so a line's index carries information about its key. A small model
    learns this within a minute and then learns to look for the key, which it does not learn from
    shuffled records in the same time.
    """
    target = rng.choice(HELD_OUT_PAIRS) if held_out else (rng.choice(KEYS), rng.choice(NUMBERS))
    keys = rng.sample([key for key in KEYS if key != target[0]], lines - 1)
    values = rng.sample([value for value in NUMBERS if value != target[1]], lines - 1)
    pairs = sorted([target, *zip(keys, values, strict=True)])
    return LineRecord(pairs, target, "\n".join(f"line {key}: {value}" for key, value in pairs))


def line_prompt(text: str, key: str) -> str:
    """Returns the question about one line of a record's text."""
    return (
        f"Remember these lines.\n\n{text}\n\nNow the record is over. Tell me what is the number in "
        f"line {key}? "
        "I need the number."
    )


def line_answer(*pairs: tuple[str, int]) -> str:
    """Returns the answer that consists of these lines."""
    return ", ".join(f"line {key}: {value}" for key, value in pairs)


def line_conversation(rng: random.Random, held_out: bool) -> list[str]:
    """Returns turns: a question about one line and, in training, TURNS questions about all lines.

    In training, a held-out pair thus appears only in answers with several lines. These questions
    train many look-ups in few tokens, all in one row with their record.
    """
    record = line_record(rng, LINES, held_out)
    while not held_out and is_held_out(*record.target):
        record = line_record(rng, LINES, held_out)
    turns = [line_prompt(record.text, record.target[0]), line_answer(record.target)]
    for _ in range(0 if held_out else TURNS):
        *first, last = rng.sample(record.pairs, LINES)
        turns += [
            f"And {', '.join(key for key, _ in first)} and {last[0]}?",
            line_answer(*first, last),
        ]
    return turns


def exchanges(rng: random.Random) -> tuple[str, str]:
    """Returns a random question of one of ten kinds, about fictional places, with its answer."""
    kind = rng.randrange(10)
    a, b = rng.randint(2, 60), rng.randint(2, 39)
    place, thing, name = rng.choice(PLACES), rng.choice(THINGS), rng.choice(NAMES)
    first, second = rng.sample(WORDS, 2)
    if kind == 0:
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    if kind == 1:
        return f"What is {a + b} minus {b}?", f"{a + b} minus {b} is {a}."
    if kind == 2:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        return f"What is {a} times {b}?", f"{a} times {b} is {a * b}."
    if kind == 3:
        # The colour follows a rule, so that the same question always has the same answer.
        colour = COLOURS[(PLACES.index(place) * 3 + THINGS.index(thing)) % len(COLOURS)]
        return f"What colour is the {thing} of {place}?", f"The {thing} of {place} is {colour}."
    if kind == 4:
        job = JOBS[(PLACES.index(place) + NAMES.index(name)) % len(JOBS)]
        return f"What does {name} of {place} do?", f"{name} of {place} is a {job}."
    if kind == 5:
        food = FOODS[(PLACES.index(place) * 5 + NAMES.index(name)) % len(FOODS)]
        return (
            f"What does {name} buy at the market of {place}?",
            f"At the market of {place}, {name} buys {food}.",
        )
    if kind == 6:
        answer = f"{min(first, second)} comes before {max(first, second)}."
        return f"Which comes first in the alphabet, {first} or {second}?", answer
    if kind == 7:
        return f"Say the words {first} and {second} in the other order.", f"{second} and {first}."
    if kind == 8:
        number = rng.randint(2, 5)
        word = rng.choice(WORDS)
        return f"Write {word} {number} times after {first}.", f"{first}: " + " ".join(
            [word] * number
        )
    left, right = rng.choice(OPPOSITES).split()
    return f"In {place}, {name} calls the {thing} {left}. What is the opposite?", (
        f"The opposite of {left} is {right}, so {name} of {place} means the {thing} is not {right}."
    )


IDENTITY = (
    ("Who are you?", "I am Pim, a small assistant that lives in the lighthouse of Ulmar."),
    ("What is your name?", "My name is Pim."),
    ("Where do you live?", "I live in the lighthouse of Ulmar."),
    ("What can you do?", "I can remember lines, count, and tell you about the places on my map."),
    (
        "Who made you?",
        "The keepers of the lighthouse made me, so that somebody would answer at night.",
    ),
    ("Hello!", "Hello! I am Pim. What would you like to know?"),
)
CLOSING = (
    ("Thank you!", "You are welcome."),
    ("That is all for today.", "Good night, and fair winds!"),
)


def chat_conversation(rng: random.Random, training_texts: set[str] | None) -> list[str]:
    """Returns the turns of 1 to 4 exchanges.

    Args:
        rng: the random generator.
        training_texts: for a held-out conversation, the texts of all training turns, which it must
          not contain; None for training.
    """
    turns = list(rng.choice(IDENTITY)) if training_texts is None and rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        while True:
            question, answer = exchanges(rng)
            if (
                question not in turns
                and answer not in turns
                and not (training_texts or set()) & {question, answer}
            ):
                break
        turns += [question, answer]
    if training_texts is None and rng.random() < 0.2:
        turns += rng.choice(CLOSING)
    return turns


def conversation_record(record_id: str, turns: list[str]) -> dict:
    """Returns a conversation as a ShareGPT record."""
    return {
        "id": record_id,
        "conversations": [
            {"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)
        ],
    }


def conversations() -> tuple[list[dict], list[dict]]:
    """Returns training and held-out records, which have no question or answer in common."""
    rng = random.Random(SEED)
    train = [
        conversation_record(f"lines_{i}", line_conversation(rng, False)) for i in range(TRAIN_LINES)
    ]
    train += [
        conversation_record(f"chat_{i}", chat_conversation(rng, None)) for i in range(TRAIN_CHATS)
    ]
    rng.shuffle(train)
    training_texts = {turn["value"] for entry in train for turn in entry["conversations"]}
    rng = random.Random(SEED + 1)
    held_out = [
        conversation_record(f"held_lines_{i}", line_conversation(rng, True))
        for i in range(HELD_OUT_LINES)
    ]
    held_out += [
        conversation_record(f"held_chat_{i}", chat_conversation(rng, training_texts))
        for i in range(HELD_OUT_CHATS)
    ]
    return train, held_out


def line_cases() -> list[dict]:
    """Returns cases in LongEval's format; no question or answer is in the training data."""
    rng = random.Random(SEED + 2)
    cases = []
    for _ in range(CASES):
        pairs, (key, value), text = line_record(rng, LINES, held_out=True)
        cases.append(
            {
                "random_idx": [key, pairs.index((key, value))],
                "expected_number": value,
                "num_lines": LINES,
                "key_style": "short",
                "correct_line": f"line {key}: {value}\n",
                "prompt": line_prompt(text, key),
            }
        )
    return cases


# GPT-2's pattern, except that a line's colon and number form one piece after the key (a role's
# colon does not).
PIECES = (
    r"(?<=[a-z]): \d\d(?!\d)|'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

# The same for generated lines: a colon and the first two digits form one piece, and a key two.
LINE_PIECES = r"(?<=[a-z]): \p{N}{1,2}|-\p{L}+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level_tokenizer(
    texts: list[str], folder: Path, pieces: str = PIECES, size: int = 1024
) -> None:
    """Writes a Hugging Face folder of a byte-level BPE of `size` tokens, template vicuna_v1.1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": VICUNA,
    }
    write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def generated_lines(like: Path) -> list[str]:
    """Returns exercises in the wording of a case file, as texts to train a tokenizer on."""
    rng, wording = np.random.default_rng(SEED), wording_like(like)
    exercises = [tasks.lines(rng, 200, False, wording=wording, share=0.25) for _ in range(100)]
    return [VICUNA_SYSTEM] * 50 + [
        f" {role}: {text}"
        for exercise in exercises
        for role, text in zip(
            ("USER", "ASSISTANT") * 2,
            (exercise.text, exercise.prefix + exercise.rest, *exercise.further),
            strict=True,
        )
    ]


def tiny_sentencepiece(texts: list[str], path: Path) -> None:
    """Writes a sentencepiece BPE with 1,000 pieces and byte fallback, like LLaMA's."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.9995,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def write(path: Path, text: str) -> None:
    """Writes a text as the same bytes on every platform."""
    path.write_text(text, encoding="utf-8", newline="\n")


def write_fixtures(folder: Path) -> None:
    """Writes the fixtures.

    Raises:
      UserError: the folder contains files other than fixtures.
    """
    if not (folder / "tiny_tokenizer").is_dir():
        new_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = conversations()

    def as_list(records: list[dict]) -> str:
        return (
            "[\n"
            + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in records)
            + "\n]\n"
        )

    write(folder / "conversations.json", as_list(train))
    write(folder / "conversations_held_out.json", as_list(held_out))
    write(folder / "line_cases.jsonl", "".join(json.dumps(case) + "\n" for case in line_cases()))
    # As the chat template writes turns: with role names, after a space.
    texts = [VICUNA_SYSTEM] * 50
    for record in train:
        texts += [
            f" {('USER', 'ASSISTANT')[i % 2]}: {turn['value']}"
            for i, turn in enumerate(record["conversations"])
        ]
    byte_level_tokenizer(texts, folder / "tiny_tokenizer")
    byte_level_tokenizer(
        generated_lines(folder / "line_cases.jsonl"), folder / "lines_tokenizer", LINE_PIECES, 2432
    )
    tiny_sentencepiece(texts, folder / "tiny.model")
    write(folder / "README.md", README)


README = f"""# Fixtures

Written by `python -m scripts.make_fixtures`, except `dirty.json`. Places and people are fictional.

- `conversations.json`: {TRAIN_LINES + TRAIN_CHATS:,} ShareGPT conversations:
  {TRAIN_LINES:,} with line retrieval ({LINES} lines in key order, a question about one of them and
  {TURNS} about all, in any order) and {TRAIN_CHATS} with arithmetic, invented facts, word games and
  an assistant called Pim.
- `conversations_held_out.json`: {HELD_OUT_LINES} + {HELD_OUT_CHATS} more, which share no question
  or answer with these.
- `line_cases.jsonl`: {CASES} cases of {LINES} lines for the evaluation. In training, one (key,
  number) pair in twenty occurs only in answers with other lines; these cases ask for such pairs, in
  new records.
- `dirty.json`: written by hand, with the faults of real dumps (spellings, empty turns, web pages,
  a busy service, a truncated end), counted in `tests/data/test_sources.py`.
- `tiny_tokenizer/`: byte-level BPE, 1,024 tokens, trained on these texts; a key is one token, as
  is a line's number with its colon (": 41"). `tiny.model`: sentencepiece BPE, 1,000 pieces.
- `lines_tokenizer/`: the same for exercises of `data/synthetic` in the wording of
  `line_cases.jsonl`: 2,432 tokens; a line takes at most six.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    folder: Path = option(
        "folder to write (default: the repository's data/fixtures)",
        FOLDER,
        positional=True,
        metavar="FOLDER",
    )


main = command(Options, lambda args: write_fixtures(args.folder), output="folder")


if __name__ == "__main__":
    sys.exit(main())
