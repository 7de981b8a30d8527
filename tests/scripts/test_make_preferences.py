"""The pairs that scripts.make_preferences writes; the recipe of preference tuning learns from
them."""

import pytest

import train
from scripts import inspect_data, make_preferences
from tests import small_run

PAIRS = 8


def test_pairs_prefer_short_answers_and_held_out_questions_have_other_subjects(tmp_path):
    make_preferences.main([str(tmp_path)])
    trained, held_out = (
        small_run.rows(tmp_path / f"{name}.jsonl") for name in ("train", "held_out")
    )
    assert len(trained) == 306 and len(held_out) == 54
    prompts = [{record["prompt"] for record in split} for split in (trained, held_out)]
    assert prompts[0].isdisjoint(prompts[1]) and any("nickel" in prompt for prompt in prompts[1])
    for record in trained + held_out:
        assert 10 * len(record["chosen"]) < len(record["rejected"])
        answer = record["chosen"].rstrip(".")
        assert answer.lower() in record["rejected"].lower()


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.slow), "4"])
def test_the_recipe_trains_and_evaluates(tmp_path, hf_model, repository, rank):
    make_preferences.main([str(tmp_path)])
    for name in ("train", "held_out"):
        lines = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:PAIRS]), encoding="utf-8")
    command = [
        f"--config={repository}/configs/preference/smollm2_dpo.yaml",
        f"--model.path={hf_model}",
        f"--data.path={tmp_path}/train.jsonl",
        f"--data.held_out_path={tmp_path}/held_out.jsonl",
        f"--data.prepared={tmp_path}/prepared",
        f"--run_dir={tmp_path}/run",
        f"--adapter.rank={rank}",
        "--preference.sft_weight=0",
        "--mesh.sequence=4",
        "--mesh.fsdp=2",
        "--mesh.simulate=8",
        "--data.context_length=256",
        "--attention.kernel=reference",
        "--checkpoint.every=2",
        "--train.evaluate_every=2",
        '--samples.prompts=["What is the capital of France?"]',
        "--samples.new_tokens=4",
        "--logging.console=false",
    ]
    assert train.main([*command, "--train.steps=4"]) == 0
    metrics = small_run.rows(tmp_path / "run" / "metrics.jsonl")
    held_out = small_run.rows(tmp_path / "run" / "held_out.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert metrics[0]["preference_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert [row["step"] for row in held_out] == [0, 2, 4]
    assert held_out[0]["held_out_pairs"] == PAIRS
    samples = small_run.rows(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in samples] == [0, 4], "evaluated before and after training"
    assert held_out[-1]["held_out_rewards/margins"] > held_out[0]["held_out_rewards/margins"]


def test_the_inspector_shows_both_completions_as_documents(tmp_path, hf_model, repository, capsys):
    make_preferences.main([str(tmp_path)])
    command = [
        f"{repository}/configs/preference/smollm2_dpo.yaml",
        f"--model.path={hf_model}",
        f"--data.path={tmp_path}/train.jsonl",
        f"--data.prepared={tmp_path}/prepared",
        "--rows=1",
    ]
    capsys.readouterr()
    assert inspect_data.main(command) == 0
    shown = capsys.readouterr().out
    first, second = shown.split("── document ")[1:3]
    assert first.startswith("1 ──") and second.startswith("2 ──")
    answer = first.partition("⟦")[2].partition("⟧")[0]
    assert answer and answer.strip(" .").split(".")[0].lower() in second.lower()
    assert len(second.partition("⟦")[2]) > 10 * len(answer.strip())
