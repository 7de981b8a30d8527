"""Answers of models that think first are scored by what follows the thought, and counted."""

import json
import shutil

import pytest
from transformers import AddedToken, AutoTokenizer

from data.errors import UserError
from data.tokenizer import Tokenizer
from eval import line_retrieval, live, prompts, runner, suite, thoughts
from eval.journal import Answer, Journal
from eval.runner import Prompt
from model.decode import Sampling
from tests.legacy_llama import legacy_llama

# The form of Qwen 3's: an empty thought unless thinking is enabled.
QWEN = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# The form of DeepSeek R1's: the prompt begins the thought.
R1 = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "opened", "after_thought"),
    [
        ("The number is 7.", "", "The number is 7."),
        ("<think>\nIs it 8?\n</think>\n\nIt is 7.", "", "\n\nIt is 7."),
        ("\n<think></think>7", "", "7"),
        ("<think>\nIs it 8 or", "", None),
        ("Is it 8?\n</think>\n\n7", "", "\n\n7"),  # trained with templates that begin it
        ("It is 7.</think>\n", "", "It is 7.</think>\n"),  # a stray mark of one that does not
        ("Is it 8?</think>\n", "<think>", "\n"),
        ("<think>8</think>", "", ""),
        ("Is it 8?\n</think>\n\n7", "<think>", "\n\n7"),
        ("Is it 8 or", "<think>", None),
        ("A tag <think>8</think> is 7", "", "A tag <think>8</think> is 7"),  # not a thought
        ("[THINK]Is it </think> or 8?[/THINK]It is 7.", "", "It is 7."),
        ("[THINK]Is it 8 or", "", None),
        ("<think>A tag [/THINK] or 8?</think>7", "", "7"),
        ("A tag [/THINK] or 8?</think>7", "<think>", "7"),
    ],
)
def test_what_follows_a_thought_is_said(text, opened, after_thought):
    assert thoughts.after_thought(text, opened) == after_thought


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_special_tokens_are_kept(tmp_path, repository, special):
    """As Mistral's are, whose reasoning models write them; other special tokens are left out."""
    theirs = AutoTokenizer.from_pretrained(repository / "data/fixtures/tiny_tokenizer")
    marks = [AddedToken(mark, special=special) for mark in ("[THINK]", "[/THINK]")]
    theirs.add_tokens(marks, special_tokens=special)
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "[THINK]Is it 8?[/THINK]It is 7."
    ids = [*theirs(text, add_special_tokens=False)["input_ids"], theirs.eos_token_id]
    answer = thoughts.text_of(ids, tokenizer)
    assert answer == theirs.decode(ids[:-1])
    assert thoughts.after_thought(answer).strip() == "It is 7."
    assert ("THINK" in tokenizer.decode(ids)) == (not special)


@pytest.mark.parametrize(("template", "opens"), [(QWEN, ""), (R1, "<think>"), (None, "")])
def test_a_template_may_begin_the_thought(tmp_path, template, opens):
    legacy_llama(tmp_path, template or R1)
    tokenizer = Tokenizer.load(tmp_path)
    assert thoughts.opens_thought(tokenizer, template and "tokenizer") == opens


def respondent(folder, template):
    legacy_llama(folder, template)
    return runner.Respondent(
        None, Tokenizer.load(folder), "tokenizer", (), 100, rows=1, chunk=64, sampling=Sampling()
    )


def test_scores_are_of_what_follows_and_counted(tmp_path):
    """Co-reference was 0 for every thought; an answer's beginning that the evaluation writes is
    no thought."""
    asked = respondent(tmp_path, R1)
    cases = [
        suite.Case("c", Prompt("?", 9), ("AbC", "the old boat"), 50, scoring="similarity"),
        suite.Case("c", Prompt("?", 9), ("AbC", "the old boat"), 50, scoring="similarity"),
        suite.Case("n", Prompt("?", 9, " The number is"), ("7",), 50),
    ]
    answers = [
        Answer("The second.\n</think>\n\nAbC the old boat", 40),
        Answer("AbC the old boat", 40),
        Answer(" 7.", 40),
    ]
    scored, counts = asked.without_thoughts([case.prompt for case in cases], answers)
    assert [suite.score_of(*pair) for pair in zip(cases, scored, strict=True)] == [1, 0, 1]
    assert counts == {"answers_after_a_thought": 1, "answers_that_end_in_a_thought": 1}
    line = thoughts.line(counts)
    assert line.startswith("warning: 1 answers end inside their thought and count as empty; ")
    assert "--template-kwargs '{\"enable_thinking\": false}'" in line
    assert thoughts.line({**counts, "answers_that_end_in_a_thought": 0}).startswith("note: 1 ans")
    assert thoughts.counted([("7", "7")]) == {} and thoughts.line({}) == ""


def test_template_kwargs_give_transformers_prompt(tmp_path):
    theirs = legacy_llama(tmp_path, QWEN)
    tokenizer = Tokenizer.load(tmp_path)
    turns = [{"role": "user", "content": "Which letter?"}]
    seen = []
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": True}, {}):
        prompts.check_template_kwargs(kwargs, "tokenizer", tokenizer)
        text = theirs.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, **kwargs
        )
        ours = tokenizer.with_template_kwargs(kwargs)
        seen.append(prompts.prompt_ids(Prompt("Which letter?", 4), ours, "tokenizer"))
        assert seen[-1] == theirs(text, add_special_tokens=False)["input_ids"]
    assert seen[0] != seen[1] == seen[2]


@pytest.mark.parametrize(
    ("kwargs", "template", "message"),
    [
        (
            {"enable_thinkin": False},
            "tokenizer",
            "found enable_thinkin, which is not a variable that the chat template reads; did you "
            "mean enable_thinking? without it the prompts would be the same",
        ),
        ({"messages": []}, "tokenizer", "found messages, which is not a variable"),
        ({"enable_thinking": False}, None, "the model's tokenizer has no chat template; with"),
    ],
)
def test_variables_that_a_template_does_not_read_are_refused(tmp_path, kwargs, template, message):
    legacy_llama(tmp_path, QWEN)
    with pytest.raises(UserError) as refused:
        prompts.check_template_kwargs(kwargs, template, Tokenizer.load(tmp_path))
    assert str(refused.value).startswith(f"--template-kwargs: {message}")


def test_template_kwargs_are_a_json_object(capsys):
    given = ["--checkpoint", "x", "--output", "y", "--lines", "5", "--template-kwargs"]
    args = line_retrieval.parse([*given, '{"enable_thinking": false, "depth": [1]}'])
    assert args.template_kwargs == {"enable_thinking": False, "depth": [1]}
    for wrong in ("enable_thinking=false", "[1]", "{"):
        with pytest.raises(SystemExit, match="2"):
            line_retrieval.parse([*given, wrong])
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            f"error: argument --template-kwargs: found {wrong}; a JSON object such as "
            "'{\"enable_thinking\": false}' is needed"
        )


@pytest.mark.parametrize("given", [None, {"enable_thinking": False}])
def test_answers_with_other_template_kwargs_are_not_reused(tmp_path, given):
    """Also those of a journal from before or after the flag was given."""
    path, headers = tmp_path / "answers.jsonl", [{"model": "m"}, {"model": "m"}]
    headers[0 if given else 1]["template_kwargs"] = {"enable_thinking": False}
    journal = Journal(path, headers[0])
    journal.add("k", Answer("7", 3))
    journal.close()
    with pytest.raises(UserError, match="has answers with template_kwargs = "):
        Journal(path, headers[1])
    assert Journal(path, headers[0]).answers == {"k": Answer("7", 3)}


def test_an_evaluation_takes_template_kwargs(hf_model, tmp_path, monkeypatch, capsys):
    """The prompts change with them; journal and results record them, and a run without them starts
    anew."""
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    tokens = []
    monkeypatch.setattr(
        runner.Respondent,
        "answer",
        lambda self, params, asked, journal, on_answer: [
            tokens.append(self.length(prompt)) or Answer("<think>x</think> 8", 9)
            for prompt in asked
        ],
    )
    folder = shutil.copytree(hf_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(QWEN)
    given = ["--checkpoint", str(folder), "--lines", "2", "--keys", "short", "--count", "1"]
    given += ["--fsdp", "8", "--rows", "8"]
    kwargs = ["--template-kwargs", '{"enable_thinking": false}']
    for name, more in (("a", kwargs), ("b", [])):
        assert line_retrieval.main([*given, "--output", str(tmp_path / name), *more]) == 0
    assert tokens[0] > tokens[1]
    about = json.loads((tmp_path / "a" / "results.json").read_text())["about"]
    assert about["template_kwargs"] == {"enable_thinking": False}
    assert about["answers_after_a_thought"] == 1
    assert "note: 1 answers begin with a thought" in capsys.readouterr().err
    (case,) = map(json.loads, (tmp_path / "a" / "cases.jsonl").read_text().splitlines())
    assert case["answer"] == 8 and case["generated"] == "<think>x</think> 8"
    header = json.loads((tmp_path / "a" / "answers.jsonl").read_text().splitlines()[0])
    assert header["template_kwargs"] == {"enable_thinking": False}
    assert line_retrieval.main([*given, "--output", str(tmp_path / "a")]) == 2
    assert "has answers with template_kwargs = {'enable_thinking': False}, now it is None" in (
        capsys.readouterr().err
    )


def test_a_run_says_once_that_its_answers_are_thoughts(capsys):
    evaluation = live.LiveEvaluation.__new__(live.LiveEvaluation)
    evaluation.noted = False
    for line in ("", "warning: 1 answers end", "warning: 2 answers end"):
        evaluation._note(line)
    assert capsys.readouterr().err == "warning: 1 answers end\n"
