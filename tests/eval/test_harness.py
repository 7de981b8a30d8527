"""lm-eval's requests to our decoding give transformers' likelihoods and texts; a task made of local
files runs to its results."""

import functools
import json
import random
from types import SimpleNamespace

import pytest

from data.errors import UserError
from data.templates import Unfinished
from data.tokenizer import Tokenizer
from eval import harness, runner
from scripts import make_short_tasks
from tests import small_model
from tests.legacy_llama import legacy_llama

lm_eval = pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")


@pytest.fixture
def only_own_tasks(monkeypatch):
    """lm-eval does not read its 14,000 task files, which takes it half a minute."""
    from lm_eval.tasks import TaskManager

    manager = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)


@pytest.fixture(scope="module")
def opened(hf_model):
    return open_model(hf_model)


def open_model(folder):
    flags = f"--checkpoint {folder} --output x --tasks none --rows 2 --chunk 64"
    flags += " --fsdp 2 --sequence 4 --compute-dtype float32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.entry.keep_compiled", lambda: None)
        return runner.open_respondent(harness.parse(flags.split()))


class Request:
    task_name = "writing"

    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def theirs(hf_model):
    return in_transformers(hf_model)


def in_transformers(folder):
    """Returns transformers' ids of a text; its log-likelihood of a text's last ids, and whether
    they are greedy; its greedy answer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(text):
        return tokenizer(text)["input_ids"]

    def likelihood(whole, count):
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(whole) - count - 1 : -1]
        chosen = torch.tensor(whole[len(whole) - count :])
        value = torch.log_softmax(logits, -1).gather(1, chosen[:, None]).sum().item()
        return value, bool((logits.argmax(-1) == chosen).all())

    def answer(context, new_tokens):
        generated = model.generate(
            torch.tensor([context]), max_new_tokens=new_tokens, do_sample=False
        )[0, len(context) :]
        return tokenizer.decode(generated.tolist(), skip_special_tokens=True)

    return ids, likelihood, answer


PAIRS = [
    ("The whale swam", " round the ship"),
    ("The whale swam", " home"),
    ("", "Alone"),
    ("Spaces at the end  ", "x"),
    ("A longer question about the whale and the ship?\nAnswer:", " yes"),
]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_likelihoods_and_texts_match_transformers(opened, theirs, adds_bos, monkeypatch):
    """By lm-eval's rules: spaces at the end of a context belong to the continuation; an answer ends
    at the first of `until`; BOS begins a text if the tokenizer adds it, or if nothing else precedes
    what is scored."""
    encode, likelihood, answer = theirs
    tokenizer = opened.respondent.tokenizer
    assert not tokenizer.adds_bos
    monkeypatch.setattr(tokenizer, "adds_bos", adds_bos)

    def ids(text):
        return [tokenizer.bos_id] * adds_bos + encode(text)

    ours = harness.make_model(harness.Harness(opened, 200, 8))
    likelihoods = ours.loglikelihood([Request(*pair) for pair in PAIRS])
    for (context, continuation), (value, greedy) in zip(PAIRS, likelihoods, strict=True):
        whole, before = ids(context + continuation), ids(context.rstrip())
        if not before:
            whole, before = [tokenizer.bos_id, *whole], [tokenizer.bos_id]
        start = len(before)
        expected, is_greedy = likelihood(whole, len(whole) - start)
        assert value == pytest.approx(expected, abs=1e-3) and greedy == is_greedy
    text = answer(ids(PAIRS[0][0]), 8)
    whole, cut = ours.generate_until(
        [Request(PAIRS[0][0], {"until": []}), Request(PAIRS[0][0], {"until": [text[3]]})]
    )
    assert whole == text and cut == text.split(text[3])[0]


def test_answers_have_the_length_that_their_task_sets(opened, theirs):
    """Under any of lm-eval's names for the length; in the order of the requests, mixed with
    likelihoods."""
    ids, likelihood, answer = theirs
    context, ours = PAIRS[0][0], harness.make_model(harness.Harness(opened, 200, 8))
    options = [
        {"max_gen_toks": 20, "max_tokens": 3},
        {},
        {"max_new_tokens": 3},
        {"max_gen_toks": 20, "temperature": 0},
    ]
    answers = ours.generate_until(
        [Request(context, {"until": [], "do_sample": False, **option}) for option in options]
    )
    assert (
        answers == [answer(ids(context), number) for number in (20, 8, 3, 20)]
        and len(set(answers)) == 3
    )
    (value,) = ours.loglikelihood([Request(*PAIRS[0])])
    whole = ids("".join(PAIRS[0]))
    assert value[0] == pytest.approx(likelihood(whole, len(whole) - len(ids(context)))[0], abs=1e-3)
    assert ours.generate_until([Request(context, {"max_gen_toks": 3})]) == [answers[2]]


def test_a_text_is_embedded_by_its_own_length(tmp_path):
    """Under longrope its frequencies are those that transformers takes for as many tokens, not those
    of the longest text."""
    folder = small_model.write(tmp_path, small_model.LONGROPE)
    ids, likelihood, answer = in_transformers(folder)
    ours = harness.Harness(open_model(folder), 512, 8)
    contexts = ["The whale swam", "The ship sailed round the whale." * 20, "The ship"]
    assert [len(ids(context)) > 128 for context in contexts] == [False, True, False]
    scores = ours.likelihoods([(context, " home") for context in contexts], ["t"] * 3)
    for context, score in zip(contexts, scores, strict=True):
        whole = ids(context + " home")
        expected, is_greedy = likelihood(whole, len(whole) - len(ids(context)))
        assert score == (pytest.approx(expected, abs=1e-3), is_greedy)
    forms = [harness.AnswerForm("writing")] * len(contexts)
    assert ours.continuations(contexts, forms) == [answer(ids(text), 8) for text in contexts]


def test_one_cache_is_kept(opened):
    """The last generator's cache: there may be no memory for another."""
    ours = harness.make_model(harness.Harness(opened, 200, 8))
    ours.loglikelihood([Request(*PAIRS[0])])
    ours.generate_until([Request("a", {"max_gen_toks": 3}), Request("a", {})])
    held = {
        key
        for key, generator in opened.respondent.generators.items()
        if generator._cache is not None
    }
    assert held == {(runner.padded_length(200, 256), 8)}


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"do_sample": True}, "do_sample: true"),
        ({"do_sample": True, "temperature": 0.7}, "do_sample: true"),
        ({"temperature": 0.2}, "temperature: 0.2"),
    ],
)
def test_a_task_that_needs_sampling_is_refused(opened, options, sampling):
    ours = harness.make_model(harness.Harness(opened, 200, 8))
    with pytest.raises(UserError) as refused:
        ours.generate_until([Request("a", {}), Request("a", options)])
    assert str(refused.value).startswith(
        f"--tasks: writing asks for sampling ({sampling}); answers are greedy here, so its score "
        "would not be comparable"
    )
    assert harness.AnswerForm.of("writing", options, is_greedy=False) == harness.AnswerForm(
        "writing"
    )


def test_requests_that_are_too_long_are_counted(opened):
    short = harness.Harness(opened, 40, 8)
    assert len(short.likelihoods([("word " * 100, "end"), ("word", " end")], ["t"] * 2)) == 2
    assert (short.truncated, short.windowed) == (1, 0)
    whole, pieces = harness.Harness(opened, 200, 8), short.rolling(["word " * 60], ["t"])
    assert pieces[0] < 0 and whole.rolling(["word " * 60], ["t"])[0] < 0
    assert (short.truncated, short.windowed) == (1, 1), "nothing of a rolling text is lost"
    assert (whole.truncated, whole.windowed) == (0, 0)


def test_requests_beyond_the_trained_length_are_counted_by_task(opened):
    """With their answers; the last token of what is only scored is no input of the model."""
    trained = opened.respondent.trained_length
    ours = harness.Harness(opened, 2 * trained, 8)
    tokens = len(ours._encode("word " * 50)) / 50  # of a word
    lm, few, many = harness.make_model(ours), "word " * 9, "word " * int(1.2 * trained / tokens)

    class Of(Request):
        def __init__(self, task, *args):
            self.task_name, self.args = task, args

    lm.loglikelihood([Of("short", few, " end"), Of("long", few, " end"), Of("long", many, " end")])
    lm.loglikelihood_rolling([Of("rolling", many)])
    lm.generate_until([Of("written", few, {"max_gen_toks": 3})])
    prompt = len(ours._encode(few.rstrip()))
    lengths = {task: ours.lengths_of([task]) for task in ("short", "long", "rolling", "written")}
    assert lengths["short"] == {"prompt_tokens": prompt, "beyond_trained_length": False}
    assert lengths["long"]["beyond_trained_length"]
    assert lengths["long"]["prompt_tokens"] == (prompt + len(ours._encode(many.rstrip()))) / 2
    assert lengths["rolling"] == {"prompt_tokens": None, "beyond_trained_length": True}
    assert lengths["written"]["prompt_tokens"] == len(ours._encode(few))
    assert ours.lengths_of(["short", "long"])["beyond_trained_length"] and ours.beyond == 2
    ours.asked["edge"] = [harness.Asked(trained - 8, trained)]
    assert not ours.lengths_of(["edge"])["beyond_trained_length"]
    ours.asked["edge"] = [harness.Asked(trained - 8, trained + 1)]
    assert ours.lengths_of(["edge"])["beyond_trained_length"]


def test_scoring_takes_the_whole_length(opened, theirs):
    """As in lm-eval, one more than it, because the last token is no input; independent of
    --max-new-tokens. A text that is longer is truncated."""
    ids, likelihood, _ = theirs
    whole = ids("The whale swam round the ship, and nobody doubted the whale.")
    context, continuation = "The whale swam round the ship, and nobody", " doubted the whale."
    count = len(whole) - len(ids(context))
    for length in (len(whole) - 1, len(whole) - 2):
        scored = harness.Harness(opened, length, 256)
        ((value, _),) = scored.likelihoods([(context, continuation)], ["t"])
        assert value == pytest.approx(likelihood(whole[-length - 1 :], count)[0], abs=1e-3)
        assert scored.truncated == len(whole) - 1 - length


@pytest.mark.parametrize("length", [8, 256, 1000])
def test_a_rolling_text_is_scored_in_the_windows_of_lm_eval(opened, theirs, length):
    """Each scores up to `length` tokens, and the last is filled with earlier ones. 256 is also the
    number of tokens for which the cache has room."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids, likelihood, _ = theirs
    text = "The whale swam round the ship, and nobody doubted the whale. " * (
        2 if length < 9 else 24
    )
    bos, tokens = opened.respondent.tokenizer.bos_id, ids(text)
    pairs = list(map(make_disjoint_window, get_rolling_token_windows(tokens, bos, length, 1)))
    assert [token for _, scored in pairs for token in scored] == tokens
    assert (len(pairs) > 1) == (length < 1000) and max(len(scored) for _, scored in pairs) == min(
        length, len(tokens)
    )
    scored = harness.Harness(opened, length, 256)
    total, nothing = scored.rolling([text, ""], ["t", "t"])
    expected = sum(likelihood(before + scored, len(scored))[0] for before, scored in pairs)
    assert total == pytest.approx(expected, rel=1e-5)
    assert nothing == 0 and scored.windowed == (len(pairs) > 1) and scored.truncated == 0


def test_a_length_without_room_for_a_question_is_refused(opened):
    short = harness.make_model(harness.Harness(opened, 40, 40))
    for options, named in (
        ({}, "--max-new-tokens 40"),
        ({"max_gen_toks": 64}, "its max_gen_toks 64"),
    ):
        with pytest.raises(
            UserError,
            match=f"--length: found 40, which leaves no room for a question of writing .*{named}",
        ):
            short.generate_until([Request("a", options)])
    assert len(short.generate_until([Request("word " * 60, {"max_gen_toks": 39})])) == 1
    with pytest.raises(UserError, match="--length: found 1; 2 or more would work"):
        harness.Harness(opened, 1, 8)


def test_the_longest_chat_that_a_text_begins_with_is_used(opened):
    """Against a search through all chats, with texts that begin with several of them."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(300)]
    ours = harness.Harness(opened, 40, 8)
    for number, text in enumerate(dict.fromkeys(texts[:40])):
        ours.add_chat(Unfinished(text, (number,), "", False))
    for text in texts:
        longest = max((chat for chat in ours.chats if text.startswith(chat)), key=len, default=None)
        assert ours._chat_before(text) == longest
        assert longest != text or ours._encode(text) == [*ours.chats[text].ids]


CHATS = {
    "vicuna": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}"
    "{% else %} ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}",
    "marks": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "headings": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("template", CHATS.values(), ids=list(CHATS))
def test_chats_are_encoded_and_split_as_by_lm_eval(tmp_path, template, generation):
    """It scores the tokens after a context without the spaces at its end, and its model of
    transformers continues a task's gen_prefix, which is an answer's beginning."""
    from lm_eval.api.model import TemplateLM

    theirs = legacy_llama(tmp_path, template, ("<|user|>", "<|assistant|>"))
    turns = [{"role": "user", "content": "Which letter?"}]
    turns += [] if generation else [{"role": "assistant", "content": "The answer is "}]
    context = theirs.apply_chat_template(
        turns,
        tokenize=False,
        add_generation_prompt=generation,
        continue_final_message=not generation,
    )
    reference = SimpleNamespace(
        backend="causal",
        tok_encode=lambda text: theirs(text, add_special_tokens=False)["input_ids"],
    )
    ours = harness.Harness.__new__(harness.Harness)
    respondent = SimpleNamespace(template="tokenizer", tokenizer=Tokenizer.load(tmp_path))
    ours.opened = SimpleNamespace(respondent=respondent)
    ours.length, ours.chats, ours.chats_sorted, ours.asked, scored = 900, {}, [], {}, []
    ours._score = lambda texts, starts: scored.extend(zip(texts, starts, strict=True)) or []
    assert ours.chat_prompt(turns, generation) == context
    pairs = [(context, " A"), (context, "The B")]
    ours.likelihoods(pairs, ["t", "t"])
    for pair, (ids, start) in zip(pairs, scored, strict=True):
        assert (ids[:start], ids[start:]) == TemplateLM._encode_pair(reference, *pair)
    assert ours._encode(context) == reference.tok_encode(context)


@pytest.fixture
def even_task(tmp_path, monkeypatch, only_own_tasks):
    """Writes the task `even`, six questions in a local file, into a folder; returns the folder."""
    rows = [
        {"question": f"Is {i} even?", "choices": ["yes", "no"], "label": i % 2} for i in range(6)
    ]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "even.yaml").write_text(f"""
task: even
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
""")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_task_of_local_files(hf_model, even_task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    flags = f"--checkpoint {hf_model} --tasks even --include-path {tmp_path} --fsdp 8 --rows 8"
    flags += f" --output {tmp_path / 'out'} --max-new-tokens 8 --chat"
    assert harness.main(flags.split()) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (row,) = results["results"]
    assert (
        row["task"] == "even acc"
        and row["cases"] == 6
        and row["low"] <= row["score"] <= row["high"]
    )
    assert results["about"]["template"] == "tokenizer"
    assert results["about"]["truncated_prompts"] == 0 and "even acc" in capsys.readouterr().out


@pytest.mark.parametrize("ours", ["make_model", "Harness.chat_prompt"])
def test_an_error_in_our_own_code_is_not_the_tasks(opened, even_task, monkeypatch, ours):
    def bug(*_):
        raise KeyError("bug")

    monkeypatch.setattr(f"eval.harness.{ours}", bug)
    args = SimpleNamespace(
        tasks="even", few_shot=None, limit=None, chat=True, system_instruction=None
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(even_task))
    with pytest.raises(KeyError, match="bug"):
        harness._evaluate_tasks(args, ["even"], manager, harness.Harness(opened, 200, 8))


def test_short_tasks_of_a_book(hf_model, tmp_path, monkeypatch, only_own_tasks):
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["whale", "ship", "harbour", "captain"] * 60
    (tmp_path / "book.txt").write_text(
        " ".join(
            f"The {word} of chapter {number} was seen again, and nobody doubted the {word}."
            for number, word in enumerate(words)
        )
    )
    assert (
        make_short_tasks.main(
            [str(tmp_path / "book.txt"), "--count", "4", "--output", str(tmp_path / "short")]
        )
        == 0
    )
    flags = f"--checkpoint {hf_model} --tasks book_next_sentence,book_last_word --fsdp 8 --rows 8"
    flags += f" --include-path {tmp_path / 'short'} --output {tmp_path / 'out'} --max-new-tokens 8"
    assert harness.main(flags.split()) == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    results = {row["task"]: row["cases"] for row in written["results"]}
    assert written["about"]["template"] is None and results == {
        "book_next_sentence acc": 4,
        "book_last_word acc": 4,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tasks", "hellaswag,arc_esay"],
            "error: --tasks: lm-eval has no task 'arc_esay' (did you mean arc_easy?); ",
        ),
        (
            ["--tasks", "arc_easy", "--include-path", "nowhere"],
            "error: --include-path: nowhere is not a folder",
        ),
    ],
)
def test_an_unknown_task_is_a_one_line_error(hf_model, tmp_path, capsys, flags, message):
    """The model is not read."""
    assert (
        harness.main(["--checkpoint", str(hf_model), "--output", str(tmp_path / "out"), *flags])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_lengths_that_rulers_tasks_were_not_asked_for_have_no_row():
    """lm-eval's are -1."""
    metrics = {"4096,none": 0.5, "4096_stderr,none": "N/A", "8192,none": -1}
    (row,) = harness.rows_of({"results": {"vt": metrics}}, lambda tasks: {})
    assert (row["task"], row["score"]) == ("vt 4096", 0.5)


@pytest.mark.parametrize(
    ("code", "names"), [({}, True), ({"auto_map": {"AutoTokenizer": 1}}, False)]
)
def test_tasks_are_told_of_the_tokenizer(tmp_path, code, names):
    """Unless transformers would run code of its folder: lm-eval allows that."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    assert harness.tokenizer_of(tmp_path) == (str(tmp_path) if names else "")


def test_a_task_that_makes_its_own_data(hf_model, tmp_path, monkeypatch, capsys, only_own_tasks):
    """As lm-eval's RULER does, with the model's tokenizer and --metadata; one that cannot be loaded
    is a one-line error."""
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made.py").write_text("""
def data(max_seq_lengths=None, tokenizer=None, **others):
    import json
    from datasets import load_dataset
    from transformers import AutoTokenizer

    if max_seq_lengths is None:
        raise ImportError("Please install `wonderwords`\\nto run this script")
    ids = AutoTokenizer.from_pretrained(tokenizer)("a b c")["input_ids"]
    rows = [{"q": f"{length} {len(ids)}"} for length in max_seq_lengths]
    path = __file__ + ".json"
    with open(path, "w") as file:
        file.write("".join(json.dumps(row) + "\\n" for row in rows))
    return load_dataset("json", data_files={"test": path})
""")
    (tmp_path / "made.yaml").write_text("""
task: made
custom_dataset: !function made.data
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{q}}"
generation_kwargs: {until: [], max_gen_toks: 3}
metric_list: [{metric: exact_match}]
metadata: {version: 1.0}
""")
    asked = []
    continuations = harness.Harness.continuations

    def recorded(self, contexts, answers):
        asked.extend(contexts)
        return continuations(self, contexts, answers)

    monkeypatch.setattr(harness.Harness, "continuations", recorded)
    flags = ["--checkpoint", str(hf_model), "--tasks", "made", "--include-path", str(tmp_path)]
    flags += ["--output", str(tmp_path / "out"), "--fsdp", "8", "--rows", "8"]
    assert harness.main(flags) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert error == (
        "error: --tasks: made: cannot be loaded (ImportError: Please install `wonderwords`)"
    )
    more = ["--metadata", '{"max_seq_lengths": [40, 80]}', "--system-instruction", "Be brief."]
    assert harness.main([*flags, *more]) == 0
    ids = Tokenizer.load(hf_model).encode("a b c")
    assert asked == [f"Be brief.{length} {len(ids)}" for length in (40, 80)]
    about = json.loads((tmp_path / "out" / "results.json").read_text())["about"]
    assert about["metadata"] == {"max_seq_lengths": [40, 80]}
    assert about["system_instruction"] == "Be brief."
    assert about["requests_beyond_trained_length"] == 0


def test_metrics_without_a_standard_error_have_no_interval():
    """Perplexities, and any metric of one question; lm-eval writes "N/A". A group has the cases of
    its tasks."""
    metrics = {
        "alias": "wikitext",
        "sample_len": 62,
        "word_perplexity,none": 12.5,
        "word_perplexity_stderr,none": "N/A",
        "acc,strict": 0.5,
        "acc_stderr,strict": 0.1,
    }

    def lengths_of(tasks):
        return {"prompt_tokens": len(tasks), "beyond_trained_length": "law" in tasks}

    rows = harness.rows_of(
        {"results": {"wikitext": metrics}, "n-samples": {"wikitext": {"effective": 62}}}, lengths_of
    )
    grouped = {"results": {"mmlu": {"acc,none": 0.25}}}
    grouped["group_subtasks"] = {"mmlu": ["law", "sciences"], "sciences": ["chemistry", "physics"]}
    grouped["n-samples"] = {
        name: {"original": 99, "effective": 7} for name in ("law", "chemistry", "physics")
    }
    (group,) = harness.rows_of(grouped, lengths_of)
    assert (group["cases"], group["prompt_tokens"], group["beyond_trained_length"]) == (21, 3, True)
    found = {row["task"]: (row["score"], row["low"], row["high"], row["cases"]) for row in rows}
    assert found == {
        "wikitext word_perplexity": (12.5, None, None, 62),
        "wikitext acc (strict)": (
            0.5,
            pytest.approx(0.304, abs=1e-3),
            pytest.approx(0.696, abs=1e-3),
            62,
        ),
    }
