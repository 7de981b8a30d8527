"""Line-retrieval cases, read from LongChat's files or generated in the same form.

A case asks for the number in one line of a long record. Every line has a key, of one of three styles:

- "adjective_noun", as in LongChat's files of up to 680 lines, whose prompts end with a space;
- "noun_noun", as in LongChat's files from 700 lines on, whose prompts do not;
- "short", for models with a tiny vocabulary: a short word and a number of two digits, with the lines in the order of their
  keys. Generated cases may occur in the training data; held-out ones for the quickstart's model are in
  data/fixtures/line_cases.jsonl.
"""

import dataclasses
import itertools
import json
import pathlib

import numpy as np

from data.errors import UserError

FORM = 'a case is one line of JSON: {"prompt": "...", "expected_number": 7, "num_lines": 20, "correct_line": "..."}'
KEY_STYLES = ("adjective_noun", "noun_noun", "short")
HEAD = (
    "Here is a record of lines to remember. Each line begins with 'line', then the name of the line, and ends with its "
    "<REGISTER_CONTENT>, a number. When it is over you will be asked for the number of one line. The record:\n\n"
)
LINE = "line {key}: REGISTER_CONTENT is <{number}>\n"
TAIL = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."
# The wording and the keys of data/fixtures, for the style "short".
SHORT_HEAD = "Remember these lines.\n\n"
SHORT_LINE = "line {key}: {number}\n"
SHORT_TAIL = "\nNow the record is over. Tell me what is the number in line {key}? I need the number."

SHORT_KEYS = "bee cat dog elk fox hen owl pig".split()  # noqa: SIM905
ADJECTIVES = """
able amber ancient bitter blue brave brief bright broad calm clean clear clever cold cool crisp curly damp dark
deep dim dry dull eager early easy faint fair fast fierce fine firm flat fresh gentle glad golden grand gray
great green happy hard harsh heavy high hollow honest huge humble icy jolly keen kind large late lazy lean light
little lively lone long loud low lucky mellow mild misty modest narrow neat new noble odd old open pale patient
plain polite proud quick quiet rapid rare raw red rich ripe rough round royal rusty sandy sharp shiny short shy
silent silver simple sleepy slim slow small smart smooth soft solid sour spare stark steady steep stern still
strong subtle sunny sweet swift tall tame tender thick thin tidy tiny tired vast vivid warm weak wet white wide
wild windy wise young
""".split()  # noqa: SIM905 - a list of quoted words is hard to read
NOUNS = """
acorn anchor apple arrow badge barn basin basket beach bell bench birch boat bottle bowl branch bread brick
bridge brook broom bucket button cabin cable candle canoe canyon card carpet castle cave cedar chair chalk chest
circle cliff clock cloud coast coin comet copper coral cotton cradle crane creek crown curtain daisy desert desk
dock door dove dragon drum eagle engine falcon feather fence fern field flame flute forest fountain fox garden
gate glacier glove goose grape hammer harbor hat hawk hedge helmet heron hill honey horn horse house island
ivory jacket jar jewel kettle key kite ladder lake lamp lantern leaf lemon letter lily lion lock magnet maple
marble market meadow melon mill mirror moon mountain needle nest oak ocean orchard otter owl paddle palace paper
path pearl pebble pencil piano pillow pine pipe planet plum pond pumpkin quilt rabbit raft rain raven ribbon
ridge ring river road robin rocket roof rope rose saddle sail salmon scarf shadow shell ship shovel spoon spring
star stone stove stream sun swan table teapot temple tent thread tower trail train tree trumpet tulip tunnel
turtle valley vase village violin wagon wall walnut water wave wheel whistle willow window wolf wood
""".split()  # noqa: SIM905 - a list of quoted words is hard to read


@dataclasses.dataclass(frozen=True)
class LineCase:
    """One question."""

    prompt: str
    expected_number: int
    num_lines: int
    correct_line: str
    """The line that contains the expected number."""
    source: str = "generated"
    """Name of the file that the case was read from."""
    key_style: str = ""
    """One of KEY_STYLES, or empty if the file does not say."""

    @property
    def family(self) -> str:
        """The kind of keys and prompt; accuracies of different families are not comparable."""
        if self.key_style:
            return self.key_style
        return "adjective-noun keys" if self.num_lines <= 680 else "other keys, from 700 lines"


def read(path: str | pathlib.Path) -> list[LineCase]:
    """Returns the cases of a JSONL file in LongChat's form.

    Raises:
        UserError: the file cannot be read, contains no case, or a line is not a case.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the line cases ({getattr(error, 'strerror', None) or error})") from error
    name = pathlib.Path(path).name
    # Not splitlines(), which would also split at U+2028.
    cases = [
        _parse(line, f"{path}:{number}", name) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not cases:
        raise UserError(f"{path}: no line cases in it")
    return cases


def _parse(line: str, location: str, source: str) -> LineCase:
    """Returns the case in one line of a file, which `location` names in messages."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: by itself not valid JSON ({error.msg}); {FORM}") from error
    if not isinstance(record, dict):
        raise UserError(f"{location}: expected an object, found {type(record).__name__}; {FORM}")
    for field, kind in (("prompt", str), ("expected_number", int), ("num_lines", int), ("correct_line", str)):
        if not isinstance(record.get(field), kind) or isinstance(record.get(field), bool):
            raise UserError(f"{location}: {field} should be {kind.__name__}, found {record.get(field)!r}; {FORM}")
    return LineCase(
        record["prompt"], record["expected_number"], record["num_lines"], record["correct_line"],
        source=source, key_style=record.get("key_style", ""),
    )


def write(cases: list[LineCase], path: str | pathlib.Path) -> None:
    """Writes the cases into a file that `read` can read."""
    fields = ("expected_number", "num_lines", "correct_line", "prompt", "key_style")
    lines = [json.dumps({field: getattr(case, field) for field in fields}) + "\n" for case in cases]
    pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


def generate(lines: int, count: int, seed: int = 0, key_style: str = "adjective_noun") -> list[LineCase]:
    """Generates cases, as a pure function of the arguments.

    Within a case all keys are distinct, and so are all numbers, so that a right answer identifies one line. Over the cases, the
    index in the record of the line in question is uniformly distributed.

    Args:
        lines: number of lines of each case.
        count: number of cases.
        seed: seed of the keys, numbers and lines in question.
        key_style: one of KEY_STYLES.

    Raises:
        UserError: the style is unknown, or has too few keys for so many lines.
    """
    if key_style not in KEY_STYLES:
        raise UserError(f"key_style {key_style!r} is not known; valid: {', '.join(KEY_STYLES)}")
    short = key_style == "short"
    keys = _keys(key_style)
    if not 1 <= lines <= len(keys):
        raise UserError(f"{lines} lines cannot be generated; {key_style} has keys for 1 to {len(keys)} lines")
    head, line, tail = (SHORT_HEAD, SHORT_LINE, SHORT_TAIL) if short else (HEAD, LINE, TAIL)
    tail += " " if key_style == "adjective_noun" else ""
    lowest, highest = (10, 100) if short else (1, 50_000)
    rng = np.random.default_rng([seed, lines, KEY_STYLES.index(key_style)])
    cases = []
    for correct in rng.permutation(np.arange(count) * lines // max(count, 1)):
        numbers_of_keys = rng.choice(len(keys), size=lines, replace=False)
        case_keys = [keys[number] for number in (sorted(numbers_of_keys) if short else numbers_of_keys)]
        numbers = rng.choice(np.arange(lowest, highest), size=lines, replace=False).tolist()
        record = [line.format(key=key, number=number) for key, number in zip(case_keys, numbers, strict=True)]
        prompt = head + "".join(record) + tail.format(key=case_keys[correct])
        cases.append(LineCase(prompt, numbers[correct], lines, record[correct], key_style=key_style))
    return cases


def _keys(key_style: str) -> list[str]:
    if key_style == "short":
        return SHORT_KEYS
    first = ADJECTIVES if key_style == "adjective_noun" else NOUNS
    return [f"{word}-{noun}" for word, noun in itertools.product(first, NOUNS) if word != noun]
