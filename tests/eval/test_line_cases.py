"""Line cases: written cases are read back, generated ones have a unique answer, errors name the
file."""

import json
import re

import pytest

from data.errors import UserError
from data.synthetic.split import is_evaluation, is_reserved
from eval.line_cases import KEY_STYLES, LineCase, Wording, generate, read, wording_like, write
from eval.scoring import last_integer


@pytest.mark.parametrize("style", KEY_STYLES)
def test_generated_cases_have_a_unique_answer(style):
    lines = 8
    cases = generate(lines, 40, seed=3, key_style=style)
    assert (
        cases
        == generate(lines, 40, seed=3, key_style=style)
        != generate(lines, 40, seed=4, key_style=style)
    )
    indices = []
    for case in cases:
        record = re.findall(r"^line (\S+): .*?(\d+)>?$", case.prompt, re.MULTILINE)
        keys, numbers = zip(*record, strict=True)
        assert len(record) == case.num_lines == len(set(keys)) == len(set(numbers)) == lines
        key = re.search(r"in line (\S+)\?", case.prompt).group(1)
        assert dict(record)[key] == str(case.expected_number)
        assert (
            case.correct_line in case.prompt
            and last_integer(case.correct_line) == case.expected_number
        )
        indices.append(keys.index(key))
        assert case.prompt.endswith(" ") == (style == "adjective_noun")
    assert sorted(indices) == [depth for depth in range(lines) for _ in range(5)], (
        "every line equally often"
    )


def test_written_cases_are_read_back(tmp_path):
    cases = generate(5, 3, key_style="noun_noun")
    write(cases, tmp_path / "cases.jsonl")
    again = read(tmp_path / "cases.jsonl")
    assert [case.prompt for case in again] == [case.prompt for case in cases]
    assert again[0].family == cases[0].family and again[0].source == "cases.jsonl"


def test_longchat_form_and_families(tmp_path):
    record = {
        "random_idx": ["a-b", 0],
        "expected_number": 7,
        "num_lines": 680,
        "token_size": 9,
        "correct_line": "x <7>\n",
        "prompt": "line a-b: REGISTER_CONTENT is <7>\u2028",
    }
    path = tmp_path / "680_lines.jsonl"
    path.write_text(
        json.dumps(record, ensure_ascii=False)
        + "\n\n"
        + json.dumps(record | {"num_lines": 700})
        + "\n"
    )
    short, long = read(path)
    assert short.expected_number == 7 and short.prompt == record["prompt"], (
        "U+2028 does not end a line of a JSONL file"
    )
    assert short.family != long.family


def test_the_committed_fixture(repository):
    cases = read(repository / "data" / "fixtures" / "line_cases.jsonl")
    assert len(cases) >= 100
    ours = generate(cases[0].num_lines, 1, key_style="short")[0]
    skeletons = {re.sub(r"line \w+|\d+", "_", case.prompt) for case in (cases[0], ours)}
    assert len(skeletons) == 1, "the short style has the same wording as the fixtures"


STRANGE = Wording(
    "Learn {this}\u2028by heart:\n\n",
    "* {{{key}}} = {number};\n",
    "\nSay what {{{key}}} is.  ",
    "strange.jsonl",
)


@pytest.mark.parametrize("wording", [None, STRANGE], ids=["ours", "unusual"])
def test_the_wording_can_come_from_a_file(tmp_path, wording):
    """The head, lines and question match verbatim; keys and numbers differ."""
    write(generate(12, 2, seed=1, wording=wording), tmp_path / "strange.jsonl")
    wording_of_file = wording_like(tmp_path / "strange.jsonl")
    (first,) = generate(7, 1, seed=5, wording=wording)
    (again,) = generate(7, 1, seed=5, wording=wording_of_file)
    assert (again.prompt, again.correct_line) == (first.prompt, first.correct_line)
    assert again.family == "adjective_noun, worded as strange.jsonl"
    if wording:
        assert wording_of_file == STRANGE


# The text before and after the lines in LongChat's own files, such as 200_lines.jsonl.
LONGCHAT_HEAD = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' "
    "and contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each "
    "line index, memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will "
    "ask you to retrieve the corresponding <REGISTER_CONTENT> of a certain line index. Now the "
    "record start:\n\n"
)
LONGCHAT_TAIL = (
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? "
    "I need the number. "
)


def test_the_wording_of_longchats_files(tmp_path):
    numbers = {
        "grotesque-classmate": 42527,
        "imperfect-bull": 3119,
        "torpid-kid": 2416,
        "oval-underpants": 33851,
    }
    lines = [f"line {key}: REGISTER_CONTENT is <{number}>\n" for key, number in numbers.items()]
    prompt = LONGCHAT_HEAD + "".join(lines) + LONGCHAT_TAIL.format(key="torpid-kid")
    record = {
        "random_idx": ["torpid-kid", 2],
        "expected_number": 2416,
        "num_lines": 4,
        "token_size": 230,
        "correct_line": lines[2],
        "prompt": prompt,
    }
    path = tmp_path / "4_lines.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    wording = wording_like(path)
    assert wording.line == "line {key}: REGISTER_CONTENT is <{number}>\n"
    assert (wording.head, wording.tail) == (LONGCHAT_HEAD, LONGCHAT_TAIL)


def test_a_file_that_does_not_show_its_wording_is_refused(tmp_path):
    path = tmp_path / "odd.jsonl"
    write(
        [LineCase("Remember.\nline a: 7\nline b: 8\nline c: 9\nWhich?", 8, 3, "line b: 8\n")], path
    )
    with pytest.raises(UserError, match="does not name the key 'b' after the lines"):
        wording_like(path)
    write([LineCase("line a: 7\nline a?", 7, 1, "line a: 7\n")], path)
    with pytest.raises(UserError, match="cases of at least 3 lines"):
        wording_like(path)


def test_several_questions_share_the_same_lines():
    cases = generate(20, 10, questions=4)
    heads = [case.prompt[: case.prompt.index("\nNow")] for case in cases]
    assert heads == [heads[0]] * 4 + [heads[4]] * 4 + [heads[8]] * 2 and len(set(heads)) == 3
    assert len({case.correct_line for case in cases[:4]}) == 4
    with pytest.raises(UserError, match="--questions: 21 about 20 lines"):
        generate(20, 1, questions=21)


def test_a_million_tokens():
    """At about 24 tokens per line; no pair of key and number occurs in the training data."""
    (case,) = generate(42_000, 1)
    record = re.findall(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", case.prompt, re.MULTILINE)
    assert (
        len(record)
        == len({key for key, _ in record})
        == len({number for _, number in record})
        == 42_000
    )
    assert all(is_evaluation(*pair) for pair in record[::100])
    assert case.depth == case.prompt.index(case.correct_line) / len(case.prompt)


def test_unseen_lines_have_keys_and_numbers_that_no_training_text_has():
    (case,) = generate(2_000, 1, reserved=True)
    record = re.findall(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", case.prompt, re.MULTILINE)
    assert len(set(record)) == 2_000 and all(is_reserved(text) for pair in record for text in pair)
    with pytest.raises(
        UserError, match="--unseen: 9000 keys that no training text has cannot be drawn"
    ):
        generate(9_000, 1, reserved=True)
    with pytest.raises(UserError, match="--unseen: keys of the style short"):
        generate(4, 1, key_style="short", reserved=True)


FIELDS = '{"prompt": "p", "expected_number": 7, "num_lines": %s'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line cases"),
        ("{}\n", ":1: prompt should be str, found None"),
        (
            '{"prompt": "p", "expected_number": "7", "num_lines": 1, "correct_line": ""}',
            "expected_number should be",
        ),
        ("[1]", "expected an object"),
        ('[\n  {"conversations": []}\n]', 'a case is one line of JSON: {"prompt"'),
        ('{"conversations": []}\n', 'a case is one line of JSON: {"prompt"'),
        ("\n{", ":2: not valid JSON"),
        (
            FIELDS % '0, "correct_line": ""}',
            ":1: num_lines: found 0; 1 to 1,000,000,000 would work",
        ),
        (FIELDS % (10**300) + ', "correct_line": ""}', "(301 characters); 1 to"),
        (FIELDS % "9" * 5000, "not valid JSON"),
        (FIELDS % '1, "correct_line": "", "key_style": [1]}', "key_style should be str, found [1]"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(path) in str(error.value) and words in str(error.value)


def test_impossible_cases_are_errors():
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        read("gone.jsonl")
    with pytest.raises(UserError, match="short has keys for 1 to"):
        generate(5000, 1, key_style="short")
    with pytest.raises(UserError, match="adjective_noun has keys for 1 to 44999"):
        generate(45_000, 1)
    with pytest.raises(UserError, match="valid: adjective_noun"):
        generate(5, 1, key_style="verb")
    assert LineCase("", 1, 200, "").family == LineCase("", 1, 680, "").family
