"""Exercises in a long text, made from random numbers: retrieval, tracking, counting, copying.

Several are tasks of RULER (Hsieh et al. 2024, table 2 and appendix B), in its wording but with our
own words. Keys and values belong to training or to evaluation, as requested, never to both
(`split`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import string
import textwrap
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.synthetic import words
from data.synthetic.split import draw_keys, draw_values, is_evaluation, most_keys
from data.synthetic.wording import Wording

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST_PIECE = 1000  # characters
WITHOUT_SPACE = "[。！？]+[」』”’）]*"  # the end of a Chinese or Japanese sentence
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
LINE_NUMBERS = (1, 50_000)  # lowest, and one above the highest
MOST_TRAINING_LINES = most_keys(*LINE_NUMBERS, evaluation=False)
OWN_LINES = Wording(
    "Here is a record of lines to remember. Each line begins with 'line', then the name of the "
    "line, and ends with its "
    "<REGISTER_CONTENT>, a number. When it is over you will be asked for the number of one line. "
    "The record:\n\n",
    "line {key}: REGISTER_CONTENT is <{number}>\n",
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the "
    "number.",
)


class Exercise(NamedTuple):
    """A text with a question.

    Attributes:
      text: both.
      prefix: the answer's beginning, which an evaluation writes itself, as RULER does.
      expected: texts that the answer must contain.
      rest: what follows `prefix` in the answer to train on.
      further: another question about the same text and its answer, for training; both empty unless
        requested.
    """

    text: str
    prefix: str
    expected: tuple[str, ...]
    rest: str
    further: tuple[str, str] = ("", "")


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text."""
    flat = re.sub(r"\s+", " ", text).strip()
    found = re.findall(rf".*?(?:{WITHOUT_SPACE}|[.!?](?= )|$)", flat)
    return [sentence for sentence in map(str.strip, found) if sentence]


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Text that needles are hidden in.

    Attributes:
      name: "noise" repeats five sentences, "needles" consists of unasked needles, "text" takes
        `sentences`.
      sentences: of a book or essay, repeated from the start at its end.
    """

    name: str = "noise"
    sentences: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Haystack:
        """Returns the haystack of a text, cut into sentences; one as long as a table of contents is
        cut between words."""
        pieces = (
            textwrap.wrap(sentence, LONGEST_PIECE, break_long_words=False, break_on_hyphens=False)
            if len(sentence) > LONGEST_PIECE
            else [sentence]
            for sentence in sentences_of(text)
        )
        return cls("text", tuple(itertools.chain.from_iterable(pieces)))

    def spaced(self, sentence: str) -> str:
        """Returns a sentence with what separates it from the next: nothing in Chinese, Japanese."""
        if self.name != "text":
            return f"{sentence}\n"
        return sentence if re.search(rf"{WITHOUT_SPACE}$", sentence) else f"{sentence} "

    def join(self, sentences: Sequence[str]) -> str:
        """Returns the text of sentences."""
        return "".join(map(self.spaced, sentences)).rstrip()

    def take(self, units: int) -> list[str]:
        """Returns `units` sentences; none for the haystack "needles", which needs keys."""
        if self.name == "noise":
            return [NOISE] * units
        if self.name == "needles":
            return []
        return [self.sentences[i % len(self.sentences)] for i in range(units)]


def _names(rng: np.random.Generator, count: int, kind: str, evaluation: bool) -> list[str]:
    """Returns `count` distinct keys, pairs of words or uuids; training gets no reserved words."""
    if kind == "uuids":
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    if not evaluation:
        return draw_keys(rng, "adjective_noun", count, reserved=False)
    pairs = words.keys("adjective_noun", count)
    return [pairs[i] for i in rng.choice(len(pairs), count, replace=False)]


def _values(rng: np.random.Generator, keys: list[str], kind: str, evaluation: bool) -> list[str]:
    """Returns a value for each key, of 7 digits or a uuid."""
    if kind == "numbers":
        return [str(value) for value in draw_values(rng, keys, 10**6, 10**7, evaluation)]
    values = []
    for key in keys:
        while (
            is_evaluation(key, value := str(uuid.UUID(bytes=rng.bytes(16), version=4)))
            != evaluation
        ):
            pass
        values.append(value)
    return values


def needles(
    rng: np.random.Generator,
    units: int,
    evaluation: bool,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    haystack: Haystack = Haystack(),
    key_kind: str = "words",
    value_kind: str = "numbers",
    depths: Sequence[float] = (),
) -> Exercise:
    """Hides sentences about keys in a haystack and asks for the values of some (RULER's niah).

    Args:
      units: sentences of the haystack (of the noise, groups of five).
      keys: number of keys with needles; values: needles per key; queries: keys to ask for.
      depths: where the needles are, as shares of the haystack's characters, moved back to the end
        of a sentence; drawn unless given.
    """
    keys = max(keys, queries)
    count = keys * values
    distractors = units if haystack.name == "needles" else 0
    names = _names(rng, keys + distractors, key_kind, evaluation)
    repeated = [name for name in names[:keys] for _ in range(values)]
    drawn = _values(rng, [*repeated, *names[keys:]], value_kind, evaluation)
    sentences = [
        NEEDLE.format(kind=value_kind, key=key, value=value)
        for key, value in zip([*repeated, *names[keys:]], drawn, strict=True)
    ]
    text = haystack.take(units) + sentences[count:]
    places = sorted(
        _places([*map(haystack.spaced, text)], depths)
        if depths
        else rng.integers(0, len(text) + 1, count).tolist()
    )
    for place, number in sorted(
        zip(places, rng.permutation(count).tolist(), strict=True), reverse=True
    ):
        text.insert(place, sentences[number])
    targets = sorted(rng.choice(keys, queries, replace=False).tolist())
    query = (
        ", ".join(names[i] for i in targets[:-1]) + ", and " * (queries > 1) + names[targets[-1]]
    )
    expected = tuple(value for i in targets for value in drawn[i * values : (i + 1) * values])
    single = queries * values == 1
    article, kind, verb = ("A", value_kind[:-1], "is") if single else ("Some", value_kind, "are")
    return Exercise(
        f"{article} special magic {kind} {verb} hidden within the following text. Make sure to "
        "memorize it. I will quiz you "
        f"about the {kind} afterwards.\n{haystack.join(text)}\nWhat "
        f"{verb}{'' if single else ' all'} the special magic {kind} for {query} mentioned in the "
        "provided text?",
        f" The special magic {kind} for {query} mentioned in the provided text {verb}",
        expected,
        f" {', '.join(expected)}.",
    )


def _places(sentences: Sequence[str], depths: Sequence[float]) -> list[int]:
    """Returns how many sentences end at or before each depth, a share of their characters."""
    ends = np.cumsum([len(sentence) for sentence in sentences])
    # In units of a mean sentence, so that the places are exact where all are equally long.
    ends = ends * len(sentences) / ends[-1]
    places = np.searchsorted(ends, [len(sentences) * depth for depth in depths], side="right")
    return [int(place) for place in places]


def variables(
    rng: np.random.Generator,
    units: int,
    evaluation: bool,
    *,
    hops: int = 4,
    chains: int = 1,
    letters: int = 5,
    example_units: int = 0,
) -> Exercise:
    """Hides chains of assignments in noise and asks for the variables of the first (RULER).

    Args:
      letters: of a variable's name.
      example_units: units of a solved example before the text, whose names have three letters, as
        RULER has it; 0 for none.
    """
    example = ""
    if example_units:
        solved = variables(rng, example_units, evaluation, hops=hops, chains=chains, letters=3)
        example = f"{solved.text}{solved.prefix} {solved.rest}\n\n"
    names: list[str] = []
    while len(names) < (hops + 1) * chains:
        name = "".join(rng.choice(list(string.ascii_uppercase), letters))
        if name not in names:
            names.append(name)
    value, *others = draw_values(rng, names[:: hops + 1], 10_000, 99_999, evaluation)
    text = [NOISE] * max(units, hops + 1)
    for number, start in enumerate([value, *others]):
        chain = names[number * (hops + 1) : (number + 1) * (hops + 1)]
        sentences = [
            f"VAR {chain[0]} = {start}",
            *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(chain)),
        ]
        for later, place in enumerate(
            sorted(rng.choice(len(text), len(chain), replace=False).tolist())
        ):
            text.insert(place + later, sentences[later])
    context = "\n".join(text).replace(". \n", ".\n")
    expected = tuple(names[: hops + 1])
    return Exercise(
        f"{example}Memorize and track the chain(s) of variable assignment hidden in the following "
        f"text.\n\n{context}\nQuestion: Find "
        f"all variables that are assigned the value {value} in the text above.",
        f" Answer: According to the chain(s) of variable assignment in the text above, {hops + 1} "
        f"variables are assigned the value {value}, they are: ",
        expected,
        " ".join(expected),
    )


def common_words(
    rng: np.random.Generator,
    units: int,
    evaluation: bool,
    *,
    common: int = 10,
    often: int = 30,
    seldom: int = 3,
    example_units: int = 30,
    example_often: int = 10,
    example_seldom: int = 3,
) -> Exercise:
    """Asks for the 10 words of a list that occur more often than others, after an example (RULER).

    Args:
      units, example_units: words that occur seldom, in the list and in the example's.
      often, seldom, example_often, example_seldom: how often.
    """
    example, example_words = _word_list(rng, example_units, common, example_often, example_seldom)
    listed, chosen = _word_list(rng, units, common, often, seldom)
    question = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that "
        "appear most often.\n{}\nQuestion: What are the 10 most common words in the above list?"
    )
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    text = (
        f"{question.format(example)}{prefix} {_numbered(example_words)}\n{question.format(listed)}"
    )
    return Exercise(text, prefix, tuple(chosen), f" {_numbered(chosen)}")


def _word_list(
    rng: np.random.Generator, units: int, common: int, often: int, seldom: int
) -> tuple[str, list[str]]:
    """Returns a shuffled, numbered list, and the words that are often in it."""
    pool = [*words.ADJECTIVES, *(noun for noun in words.NOUNS if noun not in words.ADJECTIVES)]
    if units + common > len(pool):
        pool += words.keys("noun_noun", units + common - len(pool))
    chosen = [pool[i] for i in rng.choice(len(pool), units + common, replace=False)]
    listed = chosen[:common] * often + chosen[common:] * seldom
    return _numbered([listed[i] for i in rng.permutation(len(listed))]), chosen[:common]


def _numbered(items: Sequence[str]) -> str:
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def frequent_words(
    rng: np.random.Generator, units: int, evaluation: bool, *, vocabulary: int = 0
) -> Exercise:
    """Writes coded words whose counts fall with the square of their rank, and asks for the three
    most frequent except the first, which is dots (RULER's fwe).

    Args:
      units: words of the text.
      vocabulary: different words; unless given, a twenty-fifth of `units`.
    """
    size = max(vocabulary or units // 25, 8)
    different: dict[str, None] = {}  # in the order they were drawn
    while len(different) < size:
        different["".join(rng.choice(list(string.ascii_lowercase), 6))] = None
    coded = list(different)
    coded[0] = "..."
    listed = [
        word
        for rank, word in enumerate(coded, 1)
        for _ in range(int(units * rank**-2.0 / (math.pi**2 / 6)))
    ]
    context = " ".join(listed[i] for i in rng.permutation(len(listed)))
    return Exercise(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared "
        f"coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(coded[1:4]),
        f" {', '.join(coded[1:4])}.",
    )


def lines(
    rng: np.random.Generator,
    units: int,
    evaluation: bool,
    *,
    wording: Wording | None = None,
    share: float = 0.0,
) -> Exercise:
    """Lists lines with a key and a number, and asks for one number (LongChat's line retrieval).

    Args:
      wording: of the head, the lines and the question; ours unless given.
      share: of the lines that another question asks for, whose answer repeats each. One text thus
        teaches many look-ups.
    """
    names = _names(rng, units, "words", evaluation)
    numbers = draw_values(rng, names, *LINE_NUMBERS, evaluation)
    target, *more = rng.permutation(units)[: 1 + round(share * units)].tolist()
    wording = wording or OWN_LINES
    record = [
        wording.line.format(key=key, number=number)
        for key, number in zip(names, numbers, strict=True)
    ]
    text = wording.head + "".join(record) + wording.tail.format(key=names[target])
    further = ("", "")
    if more:
        further = (
            f"And {', '.join(names[i] for i in more)}?",
            ", ".join(record[i].strip() for i in more),
        )
    answer = wording.answer.format(key=names[target], number=numbers[target])
    prefix, space, rest = answer.rpartition(" ")
    return Exercise(text.rstrip(), prefix, (str(numbers[target]),), space + rest, further)


def key_values(rng: np.random.Generator, units: int, evaluation: bool) -> Exercise:
    """Asks for a key's value in a JSON object (Liu et al. 2023, "Lost in the Middle", 3)."""
    names = _names(rng, units, "uuids", evaluation)
    values = _values(rng, names, "uuids", evaluation)
    target = int(rng.integers(units))
    text = json.dumps(dict(zip(names, values, strict=True)), indent=0)
    return Exercise(
        "Extract the value of the given key from the JSON object below.\n\n"
        f'{text}\n\nKey: "{names[target]}"',
        "The value is",
        (values[target],),
        f' "{values[target]}".',
    )


def copying(rng: np.random.Generator, units: int, evaluation: bool) -> Exercise:
    """Writes numbered paragraphs of random words and asks to repeat one verbatim."""
    numbers = draw_values(
        rng, [f"paragraph {i + 1}" for i in range(units)], 10**6, 10**7, evaluation
    )
    paragraphs = [f"{' '.join(rng.choice(words.NOUNS, 12))} {number}" for number in numbers]
    target = int(rng.integers(units))
    text = "\n".join(f"Paragraph {i}: {paragraph}." for i, paragraph in enumerate(paragraphs, 1))
    return Exercise(
        f"Read these paragraphs.\n\n{text}\n\nRepeat paragraph {target + 1} to the letter.",
        f"Paragraph {target + 1}:",
        (paragraphs[target],),
        f" {paragraphs[target]}.",
    )
