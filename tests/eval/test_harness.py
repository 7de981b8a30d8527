"""lm-eval's requests to our decoding give transformers' likelihoods and texts; a task of local files runs to its results."""
import argparse
import json

import pytest

from eval import harness, runner
from scripts import make_short_tasks

lm_eval = pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")


@pytest.fixture(scope="module")
def opened(hf_model):
    parser = argparse.ArgumentParser()
    runner.add_flags(parser)
    flags = ["--checkpoint", str(hf_model), "--output", "x", "--fsdp", "2", "--sequence", "4", "--rows", "2", "--chunk", "64",
             "--compute-dtype", "float32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.entry.keep_compiled", lambda: None)
        return runner.open_respondent(runner.parse(parser, flags))


class Request:
    def __init__(self, *args):
        self.args = args


PAIRS = [("The whale swam", " round the ship"), ("The whale swam", " home"), ("", "Alone"), ("Spaces at the end  ", "x"),
         ("A longer question about the whale and the ship?\nAnswer:", " yes")]


def test_likelihoods_and_texts_are_transformers(opened, hf_model):
    """With lm-eval's rule that spaces at a context's end are the continuation's, and its end at the first of `until`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf_model)

    def ids(text):
        return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]

    ours = harness.make_model(harness.Harness(opened, 200, 8))
    found = ours.loglikelihood([Request(*pair) for pair in PAIRS])
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        whole, start = ids(context + continuation), len(ids(context.rstrip()))
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, start - 1:-1]
        chosen = torch.tensor(whole[start:])
        assert value == pytest.approx(torch.log_softmax(logits, -1).gather(1, chosen[:, None]).sum().item(), abs=1e-3)
        assert greedy == bool((logits.argmax(-1) == chosen).all())
    context = ids(PAIRS[0][0])
    generated = model.generate(torch.tensor([context]), max_new_tokens=8, do_sample=False)[0, len(context):].tolist()
    text = tokenizer.decode(generated, skip_special_tokens=True)
    whole, cut = ours.generate_until([Request(PAIRS[0][0], {"until": []}), Request(PAIRS[0][0], {"until": [text[3]]})])
    assert whole == text and cut == text.split(text[3])[0]


def test_what_is_too_long_is_told(opened):
    short = harness.Harness(opened, 40, 8)
    assert len(short.likelihoods([("word " * 100, "end"), ("word", " end")])) == 2 and short.truncated == 1
    whole, pieces = harness.Harness(opened, 200, 8), short.rolling(["word " * 60])
    assert short.truncated == 2 and pieces[0] < 0 and whole.rolling(["word " * 60])[0] < 0 and whole.truncated == 0


def test_a_task_of_local_files(hf_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    rows = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "label": i % 2} for i in range(6)]
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
    flags = ["--checkpoint", str(hf_model), "--tasks", "even", "--include-path", str(tmp_path), "--output",
             str(tmp_path / "out"), "--fsdp", "8", "--rows", "8", "--max-new-tokens", "8"]
    assert harness.main([*flags, "--chat"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    row, = results["results"]
    assert row["task"] == "even acc" and row["cases"] == 6 and row["low"] <= row["score"] <= row["high"]
    assert results["about"]["truncated_prompts"] == 0 and "even acc" in capsys.readouterr().out


def test_short_tasks_of_a_book(hf_model, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.entry.keep_compiled", lambda: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["whale", "ship", "harbour", "captain"] * 60
    (tmp_path / "book.txt").write_text(" ".join(
        f"The {word} of chapter {number} was seen again, and nobody doubted the {word}." for number, word in enumerate(words)))
    assert make_short_tasks.main([str(tmp_path / "book.txt"), "--count", "4", "--output", str(tmp_path / "short")]) == 0
    flags = ["--checkpoint", str(hf_model), "--tasks", "book_next_sentence,book_last_word", "--include-path",
             str(tmp_path / "short"), "--output", str(tmp_path / "out"), "--fsdp", "8", "--rows", "8", "--max-new-tokens", "8"]
    assert harness.main(flags) == 0
    results = {row["task"]: row["cases"] for row in json.loads((tmp_path / "out" / "results.json").read_text())["results"]}
    assert results == {"book_next_sentence acc": 4, "book_last_word acc": 4}
