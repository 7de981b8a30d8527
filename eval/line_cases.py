"""Line-retrieval cases: read from LongChat's files, or generated in the same form.

A case asks for the number that one line of a long record gives. Keys are "adjective_noun", as LongChat's files of up to
680 lines have them (their prompts end with a space), "noun_noun", as from 700 lines on (no space), or "short", one
short word and a number of two digits, lines in the order of their keys, for models with a tiny vocabulary: these know
nothing of what a model was trained on; held-out cases for the quickstart's model are in data/fixtures/line_cases.jsonl.
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
# For "short": the wording and the keys of data/fixtures.
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
    """One question: the prompt, the number expected, and where it came from."""

    prompt: str
    expected_number: int
    num_lines: int
    correct_line: str
    source: str = "generated"
    key_style: str = ""

    @property
    def family(self) -> str:
        """Cases of different families are not points of one curve: other keys, another end of the prompt."""
        if self.key_style:
            return self.key_style
        return "adjective-noun keys" if self.num_lines <= 680 else "other keys, from 700 lines"


def read(path: str | pathlib.Path) -> list[LineCase]:
    """The cases of a JSONL file in LongChat's form; UserError names the file, the line and what is wrong."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the line cases ({getattr(error, 'strerror', None) or error})") from error
    cases = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: by itself not valid JSON ({error.msg}); {FORM}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: expected an object, found {type(record).__name__}; {FORM}")
        for field, kind in (("prompt", str), ("expected_number", int), ("num_lines", int), ("correct_line", str)):
            if not isinstance(record.get(field), kind) or isinstance(record.get(field), bool):
                raise UserError(f"{path}:{number}: {field} should be {kind.__name__}, found {record.get(field)!r}; {FORM}")
        cases.append(
            LineCase(record["prompt"], record["expected_number"], record["num_lines"], record["correct_line"],
                     pathlib.Path(path).name, record.get("key_style", ""))
        )  # fmt: skip
    if not cases:
        raise UserError(f"{path}: no line cases in it")
    return cases


def write(cases: list[LineCase], path: str | pathlib.Path) -> None:
    """The cases as a file that `read` reads."""
    fields = ("expected_number", "num_lines", "correct_line", "prompt", "key_style")
    lines = [json.dumps({field: getattr(case, field) for field in fields}) + "\n" for case in cases]
    pathlib.Path(path).write_text("".join(lines), encoding="utf-8")


def generate(lines: int, count: int, seed: int = 0, key_style: str = "adjective_noun") -> list[LineCase]:
    """`count` cases of `lines` lines each, a pure function of the arguments.

    Keys are distinct within a case, and so are numbers: a right answer names one line. The line asked for is spread
    evenly over the depths of the record.
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
    depths = rng.permutation(np.arange(count) * lines // max(count, 1))
    cases = []
    for depth in depths:
        places = rng.choice(len(keys), size=lines, replace=False)
        chosen = [keys[place] for place in (sorted(places) if short else places)]
        numbers = rng.choice(np.arange(lowest, highest), size=lines, replace=False).tolist()
        record = [line.format(key=key, number=number) for key, number in zip(chosen, numbers, strict=True)]
        cases.append(
            LineCase(head + "".join(record) + tail.format(key=chosen[depth]), numbers[depth], lines, record[depth],
                     key_style=key_style)
        )  # fmt: skip
    return cases


def _keys(key_style: str) -> list[str]:
    if key_style == "short":
        return SHORT_KEYS
    first = ADJECTIVES if key_style == "adjective_noun" else NOUNS
    return [f"{one}-{two}" for one, two in itertools.product(first, NOUNS) if one != two]
