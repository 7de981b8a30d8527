"""The evaluation runner: answers survive an interruption, contexts are prefilled once, and prompts
that do not fit are refused."""

import collections
import dataclasses
import json
import types

import jax
import pytest

from data.errors import TransientError, UserError
from eval import line_cases, line_report, line_retrieval, runner, scoring
from eval.journal import Answer, Journal
from model.decode import Sampling
from model.rope_config import RopeConfig
from tests.model.build import TILED, llama, tiny


class Letters:
    """A tokenizer whose ids are the letters' code points."""

    bos_id = chat_template = None

    def encode(self, text):
        return [ord(letter) % 128 for letter in text]

    def decode(self, ids, keep=()):
        return "".join(map(chr, ids))


def make_respondent(**options):
    model = llama(tiny(), kernel=TILED)  # the reference's scores would take most of the memory
    fields = {"rows": 2, "chunk": 64, "sampling": Sampling(), **options}
    return runner.Respondent(model, Letters(), None, (), 4096, **fields), model.init(0)


ABOUT = {"model": "abc", "sampling": {"temperature": 0.0}}


def test_each_row_is_asked_about_one_context_after_another():
    """Of 3 contexts with 4 questions each, the first is split among the rows; a repeated prompt is
    asked once."""
    respondent, params = make_respondent()
    contexts = [letter * 300 for letter in "abc"]
    prompts = [runner.Prompt(context + question, 4) for question in "wxyz" for context in contexts]
    batches = [
        keys
        for _, _, keys in respondent._batches(
            {prompt.key: prompt for prompt in prompts},
            {prompt.key: respondent.ids(prompt) for prompt in prompts},
        )
    ]
    text = {prompt.key: prompt.text for prompt in prompts}
    assert [[text[key][0] + text[key][-1] for key in keys] for keys in batches] == [
        ["aw", "by"],
        ["ax", "bz"],
        ["ay", "cw"],
        ["az", "cx"],
        ["bw", "cy"],
        ["bx", "cz"],
    ]
    counts = []
    answers = respondent.answer(params, [*prompts[:3], prompts[0]], on_answer=counts.append)
    assert answers[0] == answers[3] and sum(counts) == 4 and answers[0].prompt_tokens == 301


def test_an_interrupted_evaluation_resumes_and_counts_nothing_twice(tmp_path, monkeypatch):
    respondent, params = make_respondent(rows=1)
    prompts = [runner.Prompt(f"question {number}?", 3) for number in range(5)]
    path = tmp_path / "answers.jsonl"
    expected = respondent.answer(params, prompts)

    class Stop(Exception):
        pass

    def stop(count, seen=collections.Counter()):  # noqa: B006 - counts over calls
        seen["answers"] += count
        if seen["answers"] == 3:
            raise Stop

    journal = Journal(path, ABOUT)
    with pytest.raises(Stop):
        respondent.answer(params, prompts, journal, stop)
    journal.close()
    whole = path.read_bytes()
    assert whole.count(b"\n") == 4
    path.write_bytes(whole[:-7])  # the crash came while the third answer was written
    journal, counts = Journal(path, ABOUT), []
    assert len(journal.answers) == 2
    assert respondent.answer(params, prompts, journal, counts.append) == expected
    journal.close()
    assert counts == [2, 1, 1, 1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6 and len({line["key"] for line in lines[1:]}) == 5
    again = Journal(path, ABOUT)
    monkeypatch.setattr(runner.Respondent, "generator", lambda *_: pytest.fail("asked again"))
    assert respondent.answer(params, prompts, again) == expected
    again.close()
    with pytest.raises(
        UserError, match="has answers with model = 'abc', now it is 'def'; another --output"
    ):
        Journal(path, {**ABOUT, "model": "def"})


def test_two_evaluations_at_once_do_not_mix_their_answers(tmp_path):
    """Each wrote at its own place over the other's answers."""
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, ABOUT)
    journal.add("first", Answer("a" * 50, 1))
    with pytest.raises(TransientError, match=f"^{tmp_path}: another process evaluates into it"):
        Journal(path, ABOUT)
    journal.add("second", Answer("b", 1))
    journal.close()
    again = Journal(path, ABOUT)
    assert again.answers == {"first": Answer("a" * 50, 1), "second": Answer("b", 1)}
    again.close()


def test_a_sampled_answer_does_not_depend_on_earlier_questions():
    """A resumed evaluation must give the answers of an uninterrupted one."""
    respondent, params = make_respondent(rows=1, sampling=Sampling(temperature=1.0, seed=3))
    prompts = [
        runner.Prompt(f"question {number}?", new_tokens)
        for number in range(2)
        for new_tokens in (8, 9)
    ]
    expected = respondent.answer(params, prompts)
    respondent.generators.clear()
    assert respondent.answer(params, prompts[::-3]) == expected[::-3]
    assert respondent.answer(params, prompts) == expected
    assert len({answer.generated[:8] for answer in expected}) == 4


def test_answers_with_a_length_dependent_rope_do_not_depend_on_the_mesh():
    """On 8 devices the compiled length was 512 tokens, and the base of the dynamic RoPE rule grew
    with it."""
    config = tiny(rope=RopeConfig("dynamic", factor=4.0), max_position_embeddings=16)
    prompts = [runner.Prompt(letter * 20, 8) for letter in "abcd"]
    alone, spread = (
        runner.Respondent(
            llama(config, shape), Letters(), None, (), 16, rows=2, chunk=64, sampling=Sampling()
        )
        for shape in ({}, {"sequence": 8})
    )
    params = alone.model.init(0)
    answers = alone.answer(params, prompts)
    assert spread.answer(jax.device_put(params, spread.model.shardings), prompts) == answers
    assert [alone.capacity(tokens) for tokens in (9, 16, 17, 64)] == [16, 16, 64, 64]


def test_prompts_beyond_memory_are_refused_naming_the_longest_that_fits():
    respondent, params = make_respondent(rows=1)
    prompt = runner.Prompt("a" * 3000, 4)
    weights = sum(x.addressable_shards[0].data.nbytes for x in params.values())
    tight = dataclasses.replace(respondent, limit=weights + 500_000)
    with pytest.raises(UserError, match="prompts of up to 3,000 tokens: ") as refused:
        tight.answer(params, [prompt])
    fitting = int(str(refused.value).split(" tokens: ")[1].split(" tokens")[0].replace(",", ""))
    assert 500 < fitting < 3000  # the generator's tests check that exactly this length fits


def test_the_limit_comes_from_the_flag_or_the_machine(monkeypatch):
    device = jax.devices()[0]
    assert runner.memory_limit(device, 8, 0.5) == 2**29
    assert 2**28 < runner.memory_limit(device, 8, None) == runner.memory_limit(device, 1, None) // 8


def arguments(hf_model, output, *flags):
    command = f"--checkpoint {hf_model} --output {output} --keys short --lines 3 --count 4 --rows 2"
    command += " --max-new-tokens 3 --compute-dtype float32 --fsdp 2 --sequence 4"
    return [*command.split(), *flags]


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.0}, {}),
        (
            {"repetition_penalty": 1.05, "suppress_tokens": [5], "num_beams": 1},
            {"repetition_penalty": 1.05, "suppress_tokens": [5]},
        ),
    ],
)
def test_generation_settings_that_are_not_applied_are_said(tmp_path, capsys, settings, ignored):
    """Those that change transformers' greedy answers."""
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    about = runner._not_applied(types.SimpleNamespace(tokenizer_path=tmp_path))
    assert about == ({"generation_config_not_applied": ignored} if ignored else {})
    assert capsys.readouterr().err == (
        "note: generation_config.json has repetition_penalty 1.05, suppress_tokens [5], which is "
        "not applied: transformers' greedy answers may differ\n"
        if ignored
        else ""
    )


def test_line_retrieval_end_to_end(hf_model, tmp_path, monkeypatch, capsys):
    """With a file's cases, generated cases, cases that fill a number of tokens, and another
    evaluation in the plot."""
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    cases = tmp_path / "cases.jsonl"
    line_cases.write(line_cases.generate(2, 2, key_style="short"), cases)
    assert line_retrieval.main(arguments(hf_model, tmp_path / "a")) == 0
    more = f"--cases {cases} --tokens 100 --questions 2 --beside {tmp_path / 'a'}".split()
    assert line_retrieval.main(arguments(hf_model, tmp_path / "b", *more)) == 0
    results = json.loads((tmp_path / "b" / "results.json").read_text())
    rows = results["within_trained_length"] + results["beyond_trained_length"]
    assert {(row["source"], row["num_lines"]) for row in rows} >= {
        ("cases.jsonl", 2),
        ("generated", 3),
    }
    filled = max(rows, key=lambda row: row["num_lines"])
    assert filled["num_lines"] == 8 and 90 <= filled["mean_prompt_tokens"] + 3 <= 100
    assert (
        sum(row["cases"] for row in rows) == sum(row["cases"] for row in results["by_depth"]) == 10
    )
    assert results["about"]["schedule"] == "ring" and results["about"]["command"][-1] == str(
        tmp_path / "a"
    )
    assert (tmp_path / "b" / "line_depth.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert line_retrieval.main(arguments(hf_model, tmp_path / "a")) == 0
    assert "4 of 4 answers exist already" in capsys.readouterr().out
    assert line_retrieval.main(arguments(hf_model, tmp_path / "a", "--temperature", "1")) == 2
    assert "has answers with sampling" in capsys.readouterr().err


def test_every_case_fits_into_the_requested_tokens():
    """A case with this many lines is longer than the first one if its keys are; a token per letter
    shows it."""
    make_respondent = types.SimpleNamespace(length=lambda prompt: len(prompt.text))
    for tokens in (900, 1000, 1700):
        args = line_retrieval.parse(
            ["--checkpoint", "c", "--output", "o", "--tokens", str(tokens), "--count", "20"]
        )
        lengths = [
            len(case.prompt) + args.max_new_tokens
            for case in line_retrieval.cases_that_fill(tokens, args, make_respondent)
        ]
        assert len(lengths) == 20 and 0.9 * tokens < max(lengths) <= tokens
    with pytest.raises(UserError, match="--tokens: a case of one line takes"):
        line_retrieval.cases_that_fill(200, args, make_respondent)


@pytest.mark.parametrize("changes", [None, {"accuracy": "0.5"}, {"high": 7}, {"num_lines": 0}])
def test_beside_needs_results(tmp_path, changes):
    row = dataclasses.asdict(scoring.Score("a", "b", 4, False, 2, 1, 0.5, 0.1, 0.9, 60.0))
    results = {"within_trained_length": [row], "beyond_trained_length": []}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert line_report.read(tmp_path)[0].accuracy == 0.5
    row |= changes or {}
    (tmp_path / "results.json").write_text(json.dumps(results if changes else []))
    with pytest.raises(UserError, match="not line-retrieval results"):
        line_report.read(tmp_path)
