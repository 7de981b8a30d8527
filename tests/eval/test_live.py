"""Long-context tests during training: on the run's own mesh and parameters, logged to its
metrics."""

import dataclasses
import json
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml

import train
from data.errors import UserError
from eval import live, live_test, ruler, runner, suite
from model.language_model import LanguageModel
from tests import small_run
from tests.model.build import mesh_of
from trainer.config.load import dump, load
from trainer.mesh import abstract_mesh
from trainer.run.preemption import Interrupted, interruptible
from trainer.text import TextObjective

EVALUATIONS = [
    {"test": "needle", "every": 2, "tokens": [700], "depths": [0.5], "count": 2, "chunk": 128},
    {"test": "lines", "tokens": [600], "count": 2, "max_new_tokens": 4, "name": "short_lines"},
    {"test": "coreference", "tokens": [1400], "count": 2},
    {"test": "ruler", "tokens": [1200], "count": 1},
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, repository):
    """A small recipe with the contiguous layout and all four tests."""
    folder = tmp_path_factory.mktemp("live")
    path = small_run.recipe(folder, repository, conversations=20)
    written = yaml.safe_load(path.read_text())
    written["attention"] |= {"layout": "contiguous", "schedule": "balanced"}
    path.write_text(yaml.safe_dump(written | {"evaluations": EVALUATIONS}))
    return path


def test_train_passes_them_to_the_loop(recipe, monkeypatch):
    handed = []
    monkeypatch.setattr(
        "trainer.loop.train", lambda config, objective, evaluations, _: handed.extend(evaluations)
    )
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda folder: None)
    assert train.main(["--config", str(recipe)]) == 0
    assert [(evaluation.name, evaluation.every) for evaluation in handed] == [
        ("held_out", 10),
        ("needle", 2),
        ("short_lines", 0),
        ("coreference", 0),
        ("ruler", 0),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"test": "lines", "tokens": [512, "1K", 1024]}, r"\[0\]\.tokens: found 1024 twice"),
        ({"test": "needle", "depths": [0.5, 0.5]}, r"\[0\]\.depths: found 0\.5 twice"),
        ({"test": "ruler", "tasks": ["vt", "vt"]}, r"\[0\]\.tasks: found vt twice"),
    ],
)
def test_a_repeated_value_is_refused(recipe, entry, message):
    config = dataclasses.replace(load(["--config", str(recipe)]), evaluations=(entry,))
    with pytest.raises(UserError, match=f"^evaluations{message}; each value once would work$"):
        live.tests_of(config)


def test_answers_match_the_same_parameters_on_one_device(recipe, monkeypatch):
    config = load(["--config", str(recipe)])
    objective = TextObjective(config, mesh_of({"fsdp": 2, "tensor": 2, "sequence": 2}))
    params = objective.read_params()
    evaluations = live.evaluations_of(config)
    for evaluation in evaluations:
        evaluation.prepare(objective, None)
    names = [
        {
            result.task
            for result in suite.results_of(
                evaluation.cases, [runner.Answer("1", 9)] * len(evaluation.cases), 99
            )
        }
        for evaluation in evaluations
    ]
    assert names == [
        {"one needle"},
        {"lines"},
        {"2 alike", "4 alike", "8 alike"},
        {"niah_single_1", "niah_multikey_2", "vt"},
    ]
    lines = evaluations[1]
    assert lines.respondent.template == "tokenizer" and lines.respondent.rows == 2
    # Short prompts, so that it takes seconds.
    prompts = [
        dataclasses.replace(case.prompt, text=case.prompt.text[-60 * (number + 1) :])
        for number, case in enumerate(lines.cases)
    ]
    one_device = dataclasses.replace(
        lines.respondent,
        generators={},
        model=LanguageModel(
            objective.model.config,
            mesh_of({}),
            "local",
            objective.model.kernel,
            dtype=objective.model.dtype,
        ),
    )
    whole = jax.device_put(
        objective.source.read(one_device.model, config.model.seed), one_device.model.shardings
    )
    answers = lines.respondent.answer(params, prompts)
    assert answers == one_device.answer(whole, prompts) and any(
        answer.generated for answer in answers
    )
    right = [runner.Answer(f"It is {case.expected[0]}.", 500) for case in lines.cases]
    monkeypatch.setattr(runner.Respondent, "answer", lambda self, params, prompts, **_: right)
    assert lines.run(params, 3) == {"short_lines/lines/600": 1.0}


def test_a_notice_ends_them_between_answers():
    answered = []

    def answer(params, prompts, on_answer):
        for prompt in prompts:
            answered.append(prompt)
            on_answer(1)

    respondent = SimpleNamespace(model=SimpleNamespace(shardings={}), answer=answer)
    notice = lambda: signal.SIGTERM if len(answered) == 2 else None  # noqa: E731
    with interruptible(notice), pytest.raises(Interrupted):
        live._answers(respondent, {}, ["a", "b", "c"])
    assert answered == ["a", "b"]


@pytest.mark.slow
def test_samples_are_the_most_likely_tokens_on_one_device(recipe):
    """Against a loop over `logits` without a cache, on one device; the run's mesh is split over
    fsdp, tensor and sequence."""
    prompts = ("Who are you?", "What is a ring?", "Tell me of stripes.")
    flags = ["--samples.prompts", json.dumps(prompts), "--samples.new_tokens", "5"]
    config = load(["--config", str(recipe), *flags, "--evaluations", "[]"])
    objective = TextObjective(config, mesh_of({"fsdp": 2, "tensor": 2, "sequence": 2}))
    [samples] = live.evaluations_of(config)
    samples.prepare(objective, None)
    answers = samples.run(objective.read_params(), 7)
    model = LanguageModel(
        objective.model.config,
        mesh_of({}),
        "local",
        kernel=objective.model.kernel,
        dtype=objective.model.dtype,
    )
    params = jax.device_put(objective.source.read(model, config.model.seed), model.shardings)
    logits = jax.jit(model.logits)
    respondent, length = samples.respondent, 64
    expected = {}
    for prompt in prompts:
        ids = runner.prompt_ids(runner.Prompt(prompt, 5), objective.tokenizer, "vicuna_v1.1")
        generated = []
        for _ in range(5):
            tokens = np.zeros((1, length), np.int32)
            tokens[0, : len(ids) + len(generated)] = ids + generated
            indices = np.arange(length, dtype=np.int32)[None]
            batch = {
                "tokens": tokens,
                "segment_ids": np.ones_like(tokens),
                "index": indices,
                "positions": indices,
            }
            generated.append(
                int(np.argmax(np.asarray(logits(params, batch))[0, len(ids) + len(generated) - 1]))
            )
            if generated[-1] in respondent.stops:
                generated.pop()
                break
        expected[prompt] = objective.tokenizer.decode(generated)
    assert answers == expected and any(answers.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--samples.every", "5"],
            "samples.prompts: found [], needs at least one prompt with samples.every",
        ),
        (
            ["--samples.prompts", '["a", "a"]'],
            "samples.prompts: found ['a', 'a'], needs different texts",
        ),
        (
            ["--samples.prompts", '["a"]', "--samples.new_tokens", "0"],
            "samples.new_tokens: found 0",
        ),
        (["--samples.prompt", '["a"]'], "--samples.prompt (did you mean --samples.prompts?)"),
    ],
)
def test_wrong_samples_are_refused(recipe, capsys, flags, words):
    assert train.main(["--config", str(recipe), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"every": 2}, "evaluations[0].test: missing"),
        (
            {"test": "niah"},
            "evaluations[0].test: found niah, expects one of lines, needle, ruler, coreference",
        ),
        ({"test": "needle", "like": "x"}, "unknown field evaluations[0].like"),
        ({"test": "needle", "count": "many"}, "evaluations[0].count: found many, expects int"),
        ({"test": "needle", "count": None}, "evaluations[0].count: found null, expects int"),
        ({"test": "needle", "count": 0}, "evaluations.count: found 0, needs at least 1"),
        (
            {"test": "needle", "evry": 2},
            "unknown field evaluations[0].evry (did you mean evaluations[0].every?)",
        ),
        ({"test": "needle", "depths": [2]}, "evaluations.depths: found"),
        (
            {"test": "needle", "name": "metrics"},
            "evaluations.name: found ['metrics'], needs different names",
        ),
        (
            {"test": "ruler", "tasks": ["niah"]},
            "evaluations.tasks: found 'niah'; RULER's tasks are " + ", ".join(ruler.TASKS),
        ),
    ],
)
def test_wrong_entries_are_refused(recipe, tmp_path, capsys, monkeypatch, entry, words):
    monkeypatch.setattr("trainer.loop.train", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda folder: None)
    written = yaml.safe_load(recipe.read_text()) | {"evaluations": [entry]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    assert train.main(["--config", str(tmp_path / "recipe.yaml")]) == 2
    assert words in capsys.readouterr().err


def test_a_test_is_declared_only_by_its_section(recipe, tmp_path, monkeypatch):
    """One entry in the table of tests adds one, whose fields are read, checked and recorded like
    those of the others."""

    @dataclasses.dataclass(frozen=True)
    class Echo(live_test.LiveTest):
        words: tuple[str, ...] = ("a",)

        def cases(self, count, lengths):
            return [
                suite.Case("echo", runner.Prompt(word, 4), (word,), length)
                for word in self.words
                for length in lengths
            ]

    monkeypatch.setitem(live.TESTS, "echo", Echo)
    entries = '[{"test": "echo", "words": ["x", "y"]}, {"test": "needle"}]'
    config = load(["--config", str(recipe), "--evaluations", entries])
    (path := tmp_path / "config.yaml").write_text(dump(live.with_tests(config)))
    echo, needle = load(["--config", str(path)]).evaluations
    assert echo == {
        "test": "echo",
        "every": 0,
        "tokens": [],
        "count": 20,
        "rows": 0,
        "chunk": 4096,
        "name": "",
        "words": ["x", "y"],
    }
    assert set(needle) - set(echo) == {"depths"}, "no field of another test"
    [first, _] = live.evaluations_of(load(["--config", str(path)]))
    assert [case.expected for case in first.test.cases(len, [7])] == [("x",), ("y",)]


@pytest.mark.parametrize(
    ("rows", "flags", "words", "expected", "lines"),
    [
        ("512", (), 10, [128, 64, 256], ["evaluations: echo", "warning: evaluations: long"]),
        ("512", (), 300, [None, 64, 256], ["evaluations: echo has"]),
        ("512", ("--model.overrides", "{rope_theta: 90000.0}"), 10, [512, 64, 256], []),
        ("128", (), 10, [128, 64, 256], ["warning: evaluations: long has"]),
    ],
)
def test_lengths_for_which_the_model_has_no_positions(
    hf_model, tmp_path, monkeypatch, capsys, rows, flags, words, expected, lines
):
    """The model is trained for 128 tokens; rows of 512 hold several documents. None: as many tokens
    as the longest document."""

    @dataclasses.dataclass(frozen=True)
    class Echo(live_test.LiveTest):
        def cases(self, count, lengths):
            return [suite.Case("echo", runner.Prompt("x", 4), ("x",), length) for length in lengths]

    monkeypatch.setitem(live.TESTS, "echo", Echo)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "a " * words}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join([json.dumps({"messages": turns})] * 4), encoding="utf-8")
    entries = [{"test": "echo"}, {"test": "echo", "name": "long", "tokens": [64, 256]}]
    config = load(
        [
            *("--model.path", str(hf_model), "--data.path", str(chats)),
            *("--data.prepared", str(tmp_path / "prepared"), "--data.held_out_fraction", "0"),
            *("--data.context_length", rows, "--evaluations", json.dumps(entries), *flags),
        ]
    )
    objective = TextObjective(config, abstract_mesh(config.mesh))
    capsys.readouterr()
    measured = live.measured_names(config, objective, None)
    assert set(measured.values()) == {0}
    longest = max(map(int, objective.prepared.train.lengths))
    assert [int(name.rpartition("/")[2]) for name in measured] == [
        tokens or longest for tokens in expected
    ]
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(lines)
    assert all(line.startswith(start) for line, start in zip(printed, lines, strict=True))


def test_the_page_names_every_field_of_every_test(repository):
    page = (repository / "docs/evaluation.md").read_text()
    shared = {field.name for field in dataclasses.fields(live_test.LiveTest)}
    for name, section in live.TESTS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert (
            set(row.split("`")[3::2])
            == {field.name for field in dataclasses.fields(section)} - shared
        )
    assert all(f"`{name}`" in page for name in shared)


@pytest.mark.slow
def test_a_run_writes_their_metrics(recipe, repository, tmp_path):
    run = tmp_path / "run"
    flags = ["--train.steps", "3", "--optimizer.warmup_steps", "1"]
    flags += ["--evaluations", json.dumps(EVALUATIONS[:1])]
    small_run.finish(small_run.start(repository, recipe, run, *flags), run)
    rows = small_run.rows(run / "needle.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 3] and all(
        0 <= row["needle/one needle/700/0.5"] <= 1 for row in rows
    )
