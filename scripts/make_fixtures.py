"""Writes data/fixtures/: conversations, line cases, a dirty sample and two tiny tokenizers, all of our own making.

    python -m scripts.make_fixtures [FOLDER]

The same script writes the same bytes (tests/data/test_fixtures.py compares). What is in them, and in which
proportion, is told in data/fixtures/README.md, which it writes too.
"""

import argparse
import io
import json
import random
import zlib
from pathlib import Path

from data.templates import VICUNA, VICUNA_SYSTEM

FOLDER = Path(__file__).resolve().parents[1] / "data" / "fixtures"
SEED = 20240229  # a date, chosen once; never tuned
TRAIN_LINES, TRAIN_CHATS = 6300, 700  # the stated proportion: 90% line retrieval, 10% everything else
HELD_OUT_LINES, HELD_OUT_CHATS = 60, 60
CASES = 200
LINES = 4
TURNS = 5  # questions about all lines of a training record, after the one about one line: it still fits 256 tokens
NUMBERS = range(10, 100)

KEYS = "bee cat dog elk fox hen owl pig".split()  # noqa: SIM905
NAMES = """
    Ada Bo Cara Dan Edna Finn Gus Hilda Ivo June Kai Lena Milo Nora Otto Pia Quin Rosa Sven Tess
""".split()  # noqa: SIM905
PLACES = """
    Arvel Brenmoor Calder Dunwick Eskby Farrow Glenholm Hartle Ilmar Jorvik Kelby Lundy Marsk Norham Orrin
    Penwith Quarle Ravel Selby Tarn Ulmar Varne Wexby Yarrow Zennor
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
    stone river paper candle window basket silver winter summer kettle ladder button mirror pocket ribbon saddle
    thunder velvet whistle anchor blanket carpet feather hammer island jacket lantern meadow needle orange
    pillow rocket shadow table umbrella village wagon yellow acorn barrel
""".split()  # noqa: SIM905
OPPOSITES = """
    hot cold|big small|fast slow|old new|wet dry|high low|full empty|soft hard|early late|near far
""".strip().split("|")


def kept_apart(key: str, value: int) -> bool:
    """One (key, value) pair in twenty, by no rule that could be learnt, is in training never an answer of its own."""
    return zlib.crc32(f"{key} {value}".encode()) % 20 == 0


APART = [(key, value) for key in KEYS for value in NUMBERS if kept_apart(key, value)]


def line_record(rng: random.Random, lines: int, held_out: bool) -> tuple[list[tuple[str, int]], tuple[str, int], str]:
    """(key, value) of each line, the one to ask for, and the record's text; keys differ, and so do values.

    Held out, the line asked for is one of those kept apart. The lines stand in the order of their keys: where a line
    stands then says a little about its key, which a small model learns in a minute, and from there it finds out how to
    look for the key itself. In shuffled records it does not within this time.
    """
    asked = rng.choice(APART) if held_out else (rng.choice(KEYS), rng.choice(NUMBERS))
    keys = rng.sample([key for key in KEYS if key != asked[0]], lines - 1)
    values = rng.sample([value for value in NUMBERS if value != asked[1]], lines - 1)
    pairs = sorted([asked, *zip(keys, values, strict=True)])
    return pairs, asked, "\n".join(f"line {key}: {value}" for key, value in pairs)


def line_prompt(text: str, key: str) -> str:
    return (
        f"Remember these lines.\n\n{text}\n\nNow the record is over. Tell me what is the number in line {key}? "
        "I need the number."
    )


def line_answer(*pairs: tuple[str, int]) -> str:
    return ", ".join(f"line {key}: {value}" for key, value in pairs)


def line_conversation(rng: random.Random, held_out: bool) -> list[str]:
    """Turns, human first. One question about one line; in training then TURNS about all, each time in another order.

    A line kept apart is thus asked for together with others only, so that its answer is no training answer. Many look-ups
    in few tokens: each is a chance to find out how it is done, and all of them stand in one row with their record.
    """
    pairs, asked, text = line_record(rng, LINES, held_out)
    while not held_out and kept_apart(*asked):
        pairs, asked, text = line_record(rng, LINES, held_out)
    turns = [line_prompt(text, asked[0]), line_answer(asked)]
    for _ in range(0 if held_out else TURNS):
        *first, last = rng.sample(pairs, LINES)
        turns += [f"And {', '.join(key for key, _ in first)} and {last[0]}?", line_answer(*first, last)]
    return turns


def exchanges(rng: random.Random) -> tuple[str, str]:
    """One question and its answer, of one of ten kinds. Facts are about places that exist nowhere."""
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
        # A rule, not chance, gives the colour, so that the same question never has two answers.
        colour = COLOURS[(PLACES.index(place) * 3 + THINGS.index(thing)) % len(COLOURS)]
        return f"What colour is the {thing} of {place}?", f"The {thing} of {place} is {colour}."
    if kind == 4:
        job = JOBS[(PLACES.index(place) + NAMES.index(name)) % len(JOBS)]
        return f"What does {name} of {place} do?", f"{name} of {place} is a {job}."
    if kind == 5:
        food = FOODS[(PLACES.index(place) * 5 + NAMES.index(name)) % len(FOODS)]
        return f"What does {name} buy at the market of {place}?", f"At the market of {place}, {name} buys {food}."
    if kind == 6:
        answer = f"{min(first, second)} comes before {max(first, second)}."
        return f"Which comes first in the alphabet, {first} or {second}?", answer
    if kind == 7:
        return f"Say the words {first} and {second} in the other order.", f"{second} and {first}."
    if kind == 8:
        number = rng.randint(2, 5)
        word = rng.choice(WORDS)
        return f"Write {word} {number} times after {first}.", f"{first}: " + " ".join([word] * number)
    left, right = rng.choice(OPPOSITES).split()
    return f"In {place}, {name} calls the {thing} {left}. What is the opposite?", (
        f"The opposite of {left} is {right}, so {name} of {place} means the {thing} is not {right}."
    )


IDENTITY = (
    ("Who are you?", "I am Pim, a small assistant that lives in the lighthouse of Ulmar."),
    ("What is your name?", "My name is Pim."),
    ("Where do you live?", "I live in the lighthouse of Ulmar."),
    ("What can you do?", "I can remember lines, count, and tell you about the places on my map."),
    ("Who made you?", "The keepers of the lighthouse made me, so that somebody would answer at night."),
    ("Hello!", "Hello! I am Pim. What would you like to know?"),
)
CLOSING = (("Thank you!", "You are welcome."), ("That is all for today.", "Good night, and fair winds!"))


def chat_conversation(rng: random.Random, taken: set[str] | None) -> list[str]:
    """1 to 4 exchanges. taken: training's texts, none of which a held-out conversation may use (None: training)."""
    turns = list(rng.choice(IDENTITY)) if taken is None and rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        while True:
            question, answer = exchanges(rng)
            if question not in turns and answer not in turns and not (taken or set()) & {question, answer}:
                break
        turns += [question, answer]
    if taken is None and rng.random() < 0.2:
        turns += rng.choice(CLOSING)
    return turns


def record(identity: str, turns: list[str]) -> dict:
    return {
        "id": identity,
        "conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)],
    }


def conversations() -> tuple[list[dict], list[dict]]:
    """Training and held-out records; no question and no answer is in both."""
    rng = random.Random(SEED)
    train = [record(f"lines_{i}", line_conversation(rng, False)) for i in range(TRAIN_LINES)]
    train += [record(f"chat_{i}", chat_conversation(rng, None)) for i in range(TRAIN_CHATS)]
    rng.shuffle(train)
    taken = {turn["value"] for entry in train for turn in entry["conversations"]}
    rng = random.Random(SEED + 1)
    held_out = [record(f"held_lines_{i}", line_conversation(rng, True)) for i in range(HELD_OUT_LINES)]
    held_out += [record(f"held_chat_{i}", chat_conversation(rng, taken)) for i in range(HELD_OUT_CHATS)]
    return train, held_out


def line_cases() -> list[dict]:
    """Cases for eval.line_retrieval, as in LongEval's files; neither question nor answer is in training."""
    rng = random.Random(SEED + 2)
    cases = []
    for _ in range(CASES):
        pairs, (key, value), text = line_record(rng, LINES, True)
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


BUSY = "Too many requests in 1 hour. Try again later."
PAGE = (
    '<div class="markdown prose w-full break-words dark:prose-invert"><p>Use <strong>this</strong> &amp; snake_case:</p>'
    '<pre><div class="bg-black"><div><span>python</span><button>Copy code</button></div><div><code class="hljs '
    'language-python"><span class="hljs-keyword">if</span> a_b &lt; 3:\n\n\n    print(a_b)\n</code></div></div></pre>'
    "<ul><li>one</li><li>two</li></ul></div>"
)


def dirty() -> str:
    """A small dump with what real ones have, cut off in its last record. The test knows what becomes of each record."""

    def turns(*pairs, **more):
        return {**more, "conversations": [{"from": who, "value": text} for who, text in pairs]}

    records = [
        turns(("human", "Hi"), ("gpt", "Hello."), id="good"),
        turns(("user", "Hi you"), ("chatgpt", "Hello."), id="spelling_1"),
        turns(("Human ", "Hi"), ("bing", "Hello."), ("human", "And you?"), ("bard", "Fine."), id="spelling_2"),
        {"id": "openai", "messages": [{"role": "user", "content": "Hey"}, {"role": "assistant", "content": "Hello."}]},
        {
            "id": "parts",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Yes."},
            ],
        },
        turns(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), id="system"),
        turns(("gpt", "Earlier answer."), ("human", "Hi there"), ("gpt", "Hello."), id="leading_answer"),
        turns(("human", "Hi again"), ("gpt", "Hello."), ("human", "Are you there?"), id="unanswered"),
        turns(("human", "Print </s> and <|im_end|>"), ("gpt", "</s> and <|im_end|>"), id="control_text"),
        turns(("human", "A half pair \ud83d here"), ("gpt", "Seen."), id="surrogate"),
        turns(("human", "No id"), ("gpt", "No matter.")),
        turns(
            ("human", "A sum?"),
            ("function_call", '{"add": [1, 2]}'),
            ("observation", "3"),
            ("gpt", "Three."),
            id="tool",
        ),
        turns(("human", "Write it"), ("gpt", PAGE), id="page"),
        turns(("human", "Any HTML?"), ("gpt", "<div class='box'>\n  <p>Code &amp; more</p>\n</div>"), id="about_html"),
        turns(("human", "One"), ("gpt", "Two."), ("human", "Three"), ("gpt", BUSY), ("human", "?"), ("gpt", "!"), id="busy"),
        turns(("human", "Hi"), ("gpt", BUSY), id="only_busy"),
        turns(("gpt", "Another beginning."), ("human", "Hi there"), ("gpt", "Hello."), id="said_before"),
        turns(id="empty_list"),
        turns(("gpt", "Only me."), id="no_human"),
        turns(("human", "Only me."), id="no_answer"),
        turns(("human", "Hi"), ("human", "Hi again"), ("gpt", "Hello."), id="twice_human"),
        turns(("human", "Hi"), ("gpt", "One."), ("gpt", "Two."), id="twice_gpt"),
        turns(("human", ""), ("gpt", "Hello."), id="empty_human"),
        turns(("human", "Hi"), ("gpt", "  \n"), id="empty_gpt"),
        turns(("human", "Hi"), ("narrator", "He waits."), id="unknown_role"),
        turns(("human", "Hi"), ("gpt", None), id="null_text"),
        turns(("human", "Hi"), ("system", "Be brief."), ("gpt", "Hello."), id="late_system"),
        {"id": "no_field", "text": "Hi"},
        "a string",
    ]
    # ASCII escapes keep the half pair; UTF-8 could not.
    whole = json.dumps(records, indent=1)
    cut = json.dumps(turns(("human", "This one"), ("gpt", "is cut in the mid"), id="cut"), indent=1)
    return whole[: whole.rindex("]")].rstrip() + ",\n " + cut[: cut.index("mid") + 3]


# GPT-2's pieces, but a line's number goes with its colon (not a role's colon), so that it follows its key directly.
PIECES = (
    r"(?<=[a-z]): \d\d(?!\d)|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def tiny_tokenizer(texts: list[str], folder: Path) -> None:
    """A byte-level BPE of 1,024 tokens as a Hugging Face folder: BOS, EOS, padding and vicuna_v1.1's template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
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


def tiny_sentencepiece(texts: list[str], path: Path) -> None:
    """A sentencepiece BPE of 1,000 pieces, made like LLaMA's: byte fallback, no normalisation, dummy prefix."""
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
    path.write_text(text, encoding="utf-8", newline="\n")


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = conversations()

    def as_list(records):
        return "[\n" + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in records) + "\n]\n"

    write(folder / "conversations.json", as_list(train))
    write(folder / "conversations_held_out.json", as_list(held_out))
    write(folder / "line_cases.jsonl", "".join(json.dumps(case) + "\n" for case in line_cases()))
    write(folder / "dirty.json", dirty())
    # In the form in which they are seen, behind a space or a line's start, with the roles' words among them.
    texts = [VICUNA_SYSTEM] * 50
    for entry in train:
        texts += [f" {('USER', 'ASSISTANT')[i % 2]}: {turn['value']}" for i, turn in enumerate(entry["conversations"])]
    tiny_tokenizer(texts, folder / "tiny_tokenizer")
    tiny_sentencepiece(texts, folder / "tiny.model")
    write(folder / "README.md", README)


README = f"""# Fixtures

Written for this project by `python -m scripts.make_fixtures`, from nothing but that script; the places and the people
exist nowhere.

- `conversations.json`: {TRAIN_LINES + TRAIN_CHATS:,} ShareGPT conversations: {TRAIN_LINES:,} of line retrieval
  ({LINES} lines in the order of their keys, a question about one of them and {TURNS} about all, in any order) and
  {TRAIN_CHATS} of arithmetic, invented facts, word games and an assistant called Pim.
- `conversations_held_out.json`: {HELD_OUT_LINES} + {HELD_OUT_CHATS} more, with no question and no answer of the above.
- `line_cases.jsonl`: {CASES} cases of {LINES} lines for the evaluator. One (key, number) pair in twenty is in training only
  answered together with other lines; the line asked for here is one of those, and the records are new.
- `dirty.json`: what real dumps have (spellings, empty turns, web pages, a busy service, a cut end), counted in
  `tests/data/test_sources.py`.
- `tiny_tokenizer/`: byte-level BPE, 1,024 tokens, trained on the above; a key is one token, and so is a line's number with
  its colon (": 41"). `tiny.model`: sentencepiece BPE, 1,000 pieces.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.make_fixtures", description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER,
                        help="folder to write (default data/fixtures, the repository's own)")  # fmt: skip
    main(parser.parse_args().folder)
