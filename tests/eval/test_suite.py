"""Scores equal hand-computed ones and the published scoring, confidence intervals hold, and cases
have the requested length."""

import collections
import errno
import json
import re

import numpy as np
import pytest

from data.errors import UserError
from data.outputs import PICTURE
from data.synthetic import tasks
from eval import coreference, line_retrieval, needle, ruler, suite
from eval.journal import Answer
from eval.runner import Prompt

SCORES = [  # answer, expected texts, RULER's string_match_all and string_match_part
    ("The numbers are 12, 34 and 56.", ("12", "34", "56"), 1, 1),
    ("56, 34, 12", ("12", "34", "56"), 1, 1),  # in any order
    ("Only 34.", ("12", "34", "56"), 1 / 3, 1),  # partial
    ("12 12 12", ("12", "34"), 0.5, 1),
    ("AmBeR", ("amber", "FALCON"), 0.5, 1),  # in any case
    ("", ("amber",), 0, 0),
    ("  \x00am\x01ber ", ("amber",), 0, 0),  # a control character becomes a newline
    ("\n\tamber\x00\n", ("amber",), 1, 1),
    ("1234", ("23",), 1, 1),  # inside a longer number too
    ("paris", ("London", "Paris"), 0.5, 1),
    ("1 2 3", ("1", "1", "9"), 2 / 3, 1),
]


@pytest.mark.parametrize(("answer", "expected", "every", "some"), SCORES)
def test_scores_match_rulers(answer, expected, every, some):
    """RULER's formulas, written out from its scripts/eval."""
    cleaned = re.compile(r"[\x00-\x1f]").sub("\n", answer.strip()).strip()
    assert suite.match_all(answer, expected) == pytest.approx(every)
    hits = [1.0 if reference.lower() in cleaned.lower() else 0.0 for reference in expected]
    assert suite.match_all(answer, expected) == sum(hits) / len(expected)
    assert suite.match_any(answer, expected) == some == max(hits)


def test_similarity_needs_the_beginning():
    """As in MRCR: the ratio of matching letters, 2 M / T, after the required beginning."""
    expected = ("Xy7", "the brave owl")
    assert (
        suite.similarity("Xy7 the brave owl", expected)
        == suite.similarity("\nXy7the brave owl \n", expected)
        == 1
    )
    assert (
        suite.similarity("the brave owl", expected)
        == suite.similarity("xy7 the brave owl", expected)
        == 0
    )
    assert suite.similarity("Xy7 the brave", expected) == pytest.approx(2 * 9 / (9 + 13))
    assert suite.similarity("Xy7", expected) == 0


def test_results_are_grouped_and_have_intervals():
    def case(task, tokens, expected, depth=None):
        return suite.Case(task, Prompt("?", 10), expected, tokens, depth)

    cases = [
        case("a", 100, ("1",)),
        case("a", 100, ("1",)),
        case("a", 200, ("1", "2")),
        case("a", 200, ("1", "2")),
        case("a", 100, ("1",), 0.5),
    ]
    answers = [
        Answer("1", 80),
        Answer("no", 90),
        Answer("1 2", 190),
        Answer("1", 195),
        Answer("1", 91),
    ]
    first, second, third = suite.results_of(cases, answers, 100)
    assert (first.score, first.cases, first.prompt_tokens, first.beyond_trained_length) == (
        0.5,
        2,
        85,
        False,
    )
    assert (first.low, first.high) == pytest.approx(
        (0.0945, 0.9055), abs=1e-4
    )  # Wilson's interval for 1 of 2
    assert (second.score, second.beyond_trained_length) == (0.75, True)
    assert (second.low, second.high) == pytest.approx((0.1979, 0.9733), abs=1e-4)  # 1.5 of 2
    assert (third.depth, third.score, third.beyond_trained_length) == (0.5, 1, True)


@pytest.mark.parametrize("limit", [9, 10, 57, 1000, 123_456])
def test_the_largest_text_within_a_limit(limit):
    """The length grows unevenly; the text never exceeds the limit, and fills 99% of it or is the
    largest there is."""
    calls = []

    def length(units):
        calls.append(units)
        return 7 + 3 * units + units % 5

    units = suite.largest_within(length, limit, 10**6)
    fitting = [number for number in range(50_000) if 7 + 3 * number + number % 5 <= limit]
    assert units == 0 or 7 + 3 * units + units % 5 <= limit
    assert units == max(fitting, default=0) or 7 + 3 * units + units % 5 >= 0.99 * limit
    assert len(calls) < 40


def test_a_slope_that_misleads_costs_few_steps():
    """Longer words from some length on, as cwe has beyond its list of words: each step must be a
    large text, built and counted."""
    calls = []

    def length(units):
        calls.append(units)
        return units + 4 * max(units - 1000, 0)

    units = suite.largest_within(length, 100_000, 10**7)
    assert 0.98 * 100_000 <= length(units) <= 100_000 and len(calls) < 25


def test_a_longest_case_that_is_far_too_short_is_not_given_another_length(capsys):
    def make(units, sample=0):
        return suite.Case("t", Prompt("word " * units, 10), (), 500)

    assert [count(case.prompt) for case in suite.cases_of(make, 50, count, 1, most=45)] == [40]
    assert suite.cases_of(make, 500, count, 1, most=45) == []
    assert capsys.readouterr().err == (
        "warning: skipped: t: its longest case takes 55 tokens, found 500; 55 or less would work\n"
    )


def count(prompt):
    """For a tokenizer whose tokens are words."""
    turns = (
        [prompt.text] if isinstance(prompt.text, str) else [turn.content for turn in prompt.text]
    )
    return sum(len(turn.split()) for turn in turns) + len(prompt.prefix.split())


@pytest.mark.parametrize("name", ruler.TASKS)
def test_rulers_cases_contain_their_answers_and_have_the_length(name):
    haystack = tasks.Haystack.of_text("One two three. Four five six! Seven, eight? " * 3)
    cases = ruler.make_cases(count, [1500, 5000], [name], 3, haystack=haystack)
    assert cases == ruler.make_cases(count, [1500, 5000], [name], 3, haystack=haystack)
    assert len({case.prompt.text for case in cases}) == 6
    for case in cases:
        length = count(case.prompt) + case.prompt.new_tokens
        assert 0.9 * case.tokens <= length <= case.tokens
        assert all(item in case.prompt.text for item in case.expected)
        assert len(case.expected) == {
            "niah_multivalue": 4,
            "niah_multiquery": 4,
            "vt": 5,
            "cwe": 10,
            "fwe": 3,
        }.get(name, 1)
        assert suite.match_all(" ".join(case.expected), case.expected) == 1
        assert suite.match_all(case.prompt.prefix, case.expected) < 0.5


def test_the_words_that_fwe_asks_for_are_more_frequent_than_all_others(capsys):
    """Also in the shortest case, which the warning about shorter ones names."""
    assert not ruler.make_cases(count, [60], ["fwe"], 1)
    shortest = int(re.search(r"(\d+) or more would work", capsys.readouterr().err)[1])
    for tokens in range(shortest, shortest + 200, 3):
        (case,) = ruler.make_cases(count, [tokens], ["fwe"], 1)
        words = case.prompt.text.split("coded words. ")[1].split("\nQuestion")[0].split()
        most = collections.Counter(word for word in words if word != "...").most_common(4)
        assert {word for word, _ in most[:3]} == {*case.expected} and most[3][1] < most[2][1]


def test_the_length_of_fwe_is_found_without_far_longer_texts():
    """It took one of twenty times the length, in time that grew with its square."""
    lengths = []

    def recorded(prompt):
        lengths.append(count(prompt))
        return lengths[-1]

    (case,) = ruler.make_cases(recorded, [20_000], ["fwe"], 1)
    assert max(lengths) < 2 * 20_000 and count(case.prompt) > 0.98 * 20_000 and len(lengths) < 20


def uneven(prompt):
    """For a tokenizer in which words of equal length differ: one token per word, vowel and
    digit."""
    turns = (
        [prompt.text] if isinstance(prompt.text, str) else [turn.content for turn in prompt.text]
    )
    return sum(
        1 + sum(letter in "aeiou0123456789" for letter in word)
        for turn in [*turns, prompt.prefix]
        for word in turn.split()
    )


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: needle.make_cases(uneven, [2000, 4096], [0, 0.5], (1, 3), 6), 0),
        (lambda: ruler.make_cases(uneven, [4096], ["niah_multikey_2", "fwe"], 6), 0.2),
        (lambda: coreference.make_cases(uneven, [4096], each=6), 0.2),
        (
            lambda: line_retrieval.LiveLines("lines", count=6, max_new_tokens=20).cases(
                uneven, [1500, 4096]
            ),
            0.2,
        ),
    ],
    ids=["needle", "ruler", "coreference", "lines"],
)
def test_every_sample_fits_with_its_answer(monkeypatch, make, share):
    """Samples that fit with the first one's units keep them. The others, at least this share, get
    fewer."""

    def length(case):
        return uneven(case.prompt) + case.prompt.new_tokens

    def with_equal_units(make, tokens, count, each, most=10**7):
        units = suite.units_to_fill(make, tokens, count, most)
        return [make(units, sample) for sample in range(each)]

    fitted = make()
    monkeypatch.setattr(suite, "cases_of", with_equal_units)
    plain = make()
    assert sum(length(case) > case.tokens for case in plain) >= share * len(plain)
    for case, before in zip(fitted, plain, strict=True):
        assert (
            case == before
            if length(before) <= case.tokens
            else 0.95 * case.tokens <= length(case) <= case.tokens
        )


def test_a_task_whose_shortest_case_is_too_long_is_skipped_by_name(capsys):
    def make(units, sample=0):
        return suite.Case("t", Prompt("word " * (units + 90 * sample), 10), (), 50)

    assert [count(case.prompt) for case in suite.cases_of(make, 50, count, 1)] == [40]
    assert [count(case.prompt) for case in suite.cases_of(make, 50, count, 2)] == [40]
    assert (
        "warning: skipped: t: its shortest case takes 101 tokens, found 50; 101 or more"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match="ruler: no task has cases of --tokens"):
        suite.run("ruler", None, [], "nowhere", {})


def test_expected_variables_are_those_of_the_chain():
    """Follows all assignments of the text, and those of another chain to another value."""
    exercise = tasks.variables(np.random.default_rng(0), 40, True, chains=3)
    values = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", exercise.text):
        values[name] = values.get(value, value)
    chain_value = re.search(r"assigned the value (\d+) in the text", exercise.text)[1]
    assert {name for name, value in values.items() if value == chain_value} == set(
        exercise.expected
    )
    assert len(values) == 15 and len(set(values.values())) == 3


@pytest.mark.parametrize("tokens", [1500, 5000])
def test_variable_tracking_follows_rulers_example(tokens):
    """As main() of RULER's variable_tracking.py makes it: names of three letters, as much noise as
    500 tokens hold, the prefix, two spaces and the names, an empty line, the question."""
    for case in ruler.make_cases(count, [tokens], ["vt"], 3):
        cut = case.prompt.text.index("Memorize", 1)
        example, asked = case.prompt.text[:cut], case.prompt.text[cut:]
        names, (value,) = re.findall(r"VAR (\w+) =", example), re.findall(r"= (\d{5})\n", example)
        question, answer = example.split("they are: ")
        assert [len(name) for name in names] == [3] * 5 and answer == f" {' '.join(names)}\n\n"
        assert question.startswith("Memorize and track the chain(s) of variable assignment hidden")
        assert question.endswith(
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
            "Answer: According to the chain(s) of variable assignment in the text above, 5 "
            f"variables are assigned the value {value}, "
        )
        length = len(question.split()) + len(["they", "are:"])
        assert length <= 500 < length + len(tasks.NOISE.split())
        assert re.findall(r"VAR (\w+) =", asked) == list(case.expected) and "Answer" not in asked
    assert tasks.variables(np.random.default_rng(0), 9, False).text.count("Memorize") == 1


@pytest.mark.parametrize(
    ("tokens", "counts"), [(1500, {3: 10, 1: 10}), (4095, {3: 10, 1: 10}), (4096, {10: 10, 3: 30})]
)
def test_common_words_follow_rulers_example(tokens, counts):
    """get_example(20, 3, 1, 10) below 4096 tokens, else get_example(40, 10, 3, 10)."""
    (case,) = ruler.make_cases(count, [tokens], ["cwe"], 1)
    example = case.prompt.text.partition("\nQuestion")[0]
    words = collections.Counter(re.findall(r"\d+\. ([\w-]+)", example))
    assert collections.Counter(words.values()) == counts


def test_expected_words_are_the_most_frequent():
    exercise = tasks.common_words(np.random.default_rng(0), 50, True)
    listed = re.findall(r"\d+\. ([\w-]+)", exercise.text.rpartition("Below is")[2])
    assert {word for word, _ in collections.Counter(listed).most_common(10)} == set(
        exercise.expected
    )
    exercise = tasks.frequent_words(np.random.default_rng(0), 800, True)
    coded = exercise.text.partition("coded words. ")[2].partition("\nQuestion")[0].split()
    assert [word for word, _ in collections.Counter(coded).most_common(4)] == [
        "...",
        *exercise.expected,
    ]


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_needle_is_at_its_depth(depth):
    (case,) = needle.make_cases(count, [2000], [depth], (1,), 1)
    sentence = case.prompt.text.index(f"is: {case.expected[0]}.")
    assert sentence / len(case.prompt.text) == pytest.approx(depth, abs=0.05)
    (several,) = needle.make_cases(count, [2000], [depth], (3,), 1)
    assert len(several.expected) == 3 and several.prompt.new_tokens == 3 * case.prompt.new_tokens


def test_the_depth_in_a_text_counts_letters_not_sentences():
    """As Kamradt's test: at the end of the last sentence before that share of the text."""
    sentences = ["He ran."] * 400 + [
        "It was the best of times and the worst of times, they said."
    ] * 100
    haystack = tasks.Haystack.of_text(" ".join(sentences))
    for depth in (0, 0.25, 0.5, 0.75, 1):
        exercise = tasks.needles(
            np.random.default_rng(0), 500, True, haystack=haystack, depths=[depth]
        )
        text = exercise.text.split("afterwards.\n")[1].split("\nWhat is")[0]
        before, after = re.split(r"(?:^| )One of the special .*?\.(?: |$)", text)
        whole = " ".join(sentences)
        place = depth * len(whole)
        assert whole.startswith(before) and whole.endswith(after)
        assert place - len(sentences[-1]) - 1 <= len(before) <= place


@pytest.mark.parametrize("end", "。！？")
def test_a_chinese_text_has_sentences(end):
    """They end without a space, and none is put between them; quotes end with their mark."""
    text = f"很久以前{end}「村民们{end}」他们唱歌{end}" * 100
    haystack = tasks.Haystack.of_text(text)
    assert haystack.sentences[:4] == (
        f"很久以前{end}",
        f"「村民们{end}」",
        f"他们唱歌{end}",
        f"很久以前{end}",
    )
    exercise = tasks.needles(np.random.default_rng(0), 300, True, haystack=haystack, depths=[0.5])
    before, after = re.split(r"One of the special .*?\. ", exercise.text.split("\n")[1])
    assert before + after == text and 0.45 < len(before) / len(text) <= 0.5


def test_sentences_of_english_are_cut_as_before():
    text = 'One.  Two?\nThree! . . . "Four." He e.g. said.No\n\nTHE END'
    flat = re.sub(r"\s+", " ", text).strip()
    sentences = tasks.Haystack.of_text(text).sentences
    assert sentences == tuple(re.split(r"(?<=[.!?])\s+", flat))
    assert tasks.Haystack.of_text(text).join(sentences) == flat


def test_a_table_of_contents_is_cut_between_words():
    """Its lines end without a full stop; a needle may be between any two pieces."""
    contents = " ".join(f"CHAPTER {number}" for number in range(361))
    haystack = tasks.Haystack.of_text(f"{contents} Well, Prince. He bowed.")
    lengths = [len(sentence) for sentence in haystack.sentences]
    assert len(lengths) == 6 and max(lengths) <= 1000 and lengths[0] > 980
    assert haystack.join(haystack.sentences) == f"{contents} Well, Prince. He bowed."


def test_a_text_with_too_long_sentences_is_refused_by_name():
    """In the part that the cases hold; needles are hidden between sentences."""
    haystack = tasks.Haystack("text", ("Short one here.",) * 2000 + ("word " * 600 + "end.",))
    needle.check_sentences("book.txt", haystack, [400, 1000], count)
    with pytest.raises(UserError) as refused:
        needle.check_sentences("book.txt", haystack, [400, 10_000], count)
    message = str(refused.value)
    assert message.startswith("--text: book.txt has a sentence of 600 tokens, 'word word ")
    assert "and --tokens of 400; 1200 or more, or a text whose sentences end with" in message


def test_the_requested_reply_is_the_ith_of_its_kind():
    cases = coreference.make_cases(count, [1500], [4], 8)
    for number, case in enumerate(cases):
        *turns, question = case.prompt.text
        subject = question.content.partition(" of this")[0].split()
        form, topic = subject[subject.index("the") + 2], subject[-1]
        replies = [
            reply.content
            for request, reply in zip(turns[::2], turns[1::2], strict=True)
            if request.content == f"Write a {form} about a {topic}."
        ]
        beginning, expected = case.expected
        assert (
            len(replies) == 4 and replies[number % 4] == expected and beginning in question.content
        )
        assert suite.score_of(case, Answer(f" {beginning} {expected}", 0)) == 1


def test_questions_about_documents(tmp_path):
    path = tmp_path / "qa.jsonl"
    rows = [
        {
            "question": f"Who is {i}?",
            "answers": [f"Name{i}", f"N. {i}"],
            "documents": [f"{i} is Name{i}. " + "word " * 20],
        }
        for i in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    cases = ruler.qa_cases(str(path), count, [300], 4, 0)
    for i, case in enumerate(cases):
        assert f"{i} is Name{i}." in case.prompt.text and 250 < count(case.prompt) + 32 <= 300
        assert suite.score_of(case, Answer(f"it is n. {i}", 1)) == 1
    path.write_text(
        json.dumps(rows[0]) + "\n" + json.dumps({"question": "?", "answers": "x"}) + "\n"
    )
    with pytest.raises(UserError, match=r"qa.jsonl:2: not a question"):
        ruler.qa_cases(str(path), count, [300], 4, 0)


def test_a_question_keeps_all_its_documents(tmp_path, capsys):
    """A length at which only one of two documents fits is skipped; at more, both are shown."""
    path, documents = tmp_path / "qa.jsonl", ["Ann met Bob. ", "Bob met Cy. "]
    row = {"question": "Who met Cy?", "answers": ["Bob"], "documents": documents}
    path.write_text(json.dumps(row))
    assert not ruler.qa_cases(str(path), count, [60], 1, 0)
    error = capsys.readouterr().err
    needed = int(re.search(r"qa.jsonl:1: qa: its shortest case takes (\d+) tokens", error)[1])
    assert f"warning: skipped: {path}:1: qa: " in error
    (case,) = ruler.qa_cases(str(path), count, [needed], 1, 0)
    assert all(case.prompt.text.count(document) == 1 for document in documents)
    assert count(case.prompt) + ruler.QA_TOKENS == needed and not capsys.readouterr().err


def test_a_long_question_leaves_the_others(tmp_path, capsys):
    """The next one takes its place; a line names the first."""
    path = tmp_path / "qa.jsonl"
    rows = [
        {
            "question": f"Who is {i}?",
            "answers": ["x"],
            "documents": ["word " * (900 * (i == 1) + 9)],
        }
        for i in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    cases = ruler.qa_cases(str(path), count, [300, 4000], 3, 0)
    asked = [(case.tokens, int(case.prompt.text[-2])) for case in cases]
    assert asked == [(300, 0), (300, 2), (300, 3), (4000, 0), (4000, 1), (4000, 2)]
    warning, *notes = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: skipped: {path}:2: qa: its shortest case takes ")
    assert [note for note in notes if "are repeated, as in RULER" not in note] == []


def test_no_question_is_asked_twice_and_documents_are_repeated(tmp_path, capsys):
    """As in RULER's qa.py: another question for each case, and (DOCS * repeats)[:num_docs]."""
    path = tmp_path / "qa.jsonl"
    texts = [f"Number {i} is {i}." for i in range(4)]
    rows = [
        {"question": f"What is number {i}?", "answers": [str(i)], "documents": [text]}
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    cases = ruler.qa_cases(str(path), count, [2000], 20, 0)
    assert len({case.prompt.key for case in cases}) == len(cases) == 4
    for case in cases:
        shown = collections.Counter(re.findall(r"\nNumber \d is \d\.", case.prompt.text))
        assert max(shown.values()) - min(shown.values()) <= 1 and len(shown) == 4
        assert 0.98 * 2000 <= count(case.prompt) + ruler.QA_TOKENS <= 2000
    assert capsys.readouterr().err.splitlines() == [
        f"note: --qa: cases of 2,000 tokens: 4, not 20, since {path} has no more questions",
        f"note: --qa: all documents of {path} take fewer than 2,000 tokens; they are repeated, as "
        "in RULER",
    ]


def test_questions_about_documents_need_lists(tmp_path):
    """A text in place of a list would be read as a list of its letters."""
    good = {"question": "Which city?", "answers": ["Paris"], "documents": ["The city is Paris."]}
    for name, text in (("answers", "Paris"), ("documents", "The city is Paris.")):
        (tmp_path / "qa.jsonl").write_text(json.dumps(good | {name: text}))
        with pytest.raises(UserError, match=r"qa\.jsonl:1: not a question"):
            ruler.qa_cases(str(tmp_path / "qa.jsonl"), count, [700], 1, 0)


def test_unusable_texts_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        needle.read_haystack(str(tmp_path / "gone.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="has no sentence"):
        needle.read_haystack(str(tmp_path / "empty.txt"))
    assert needle.make_cases(count, [20], [0.5]) == []


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (needle, "--tokens 400 --depths 0 1 --count 2"),
        (ruler, "--tokens 1100 --tasks niah_single_1 vt --count 2"),
        (coreference, "--tokens 900 --alike 2 --count 2"),
    ],
    ids=["needle", "ruler", "coreference"],
)
def test_commands_write_results_and_resume(hf_model, tmp_path, monkeypatch, capsys, command, flags):
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    flags = f"--checkpoint {hf_model} --output {tmp_path} --fsdp 8 --rows 8 {flags}".split()
    assert command.main(flags) == 0
    name = command.__name__.split(".")[-1]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["evaluation"] == name and sum(
        row["cases"] for row in results["results"]
    ) == 4 - 2 * (name == "coreference")
    assert PICTURE in (tmp_path / f"{name}.png").read_bytes()[:1000]
    rows = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows)  # by which eval.compare pairs them
    assert all(row["score"] == 0 for row in rows) and len(rows) == sum(
        row["cases"] for row in results["results"]
    )
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert command.main(flags) == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    said = capsys.readouterr()
    assert "exist already" in said.out and "others" not in said.err
    if command is needle:
        _a_full_disk_leaves_the_results(tmp_path, [*flags[:-1], "1"], monkeypatch)
        assert command.main([*flags[:-1], "1", "--seed", "1"]) == 0
        note = f"results.json will be of these 2 cases only; the answers to {len(rows)} others"
        assert note in capsys.readouterr().err
        assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == 2


def _a_full_disk_leaves_the_results(folder, flags, monkeypatch):

    def files():
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = files()
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert needle.main(flags) == 75
    assert files() == before
