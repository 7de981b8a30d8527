"""The benchmark of identity answers: transformers' answers, and how answers are counted."""

import json

from scripts.benchmarks import identity


def test_answers_that_name_vicuna_are_counted(monkeypatch, tmp_path, capsys):
    answers = ["I am Vicuna.", "My name is Vicuna, a model."] + ["I am SmolLM."] * 38
    monkeypatch.setattr(identity, "ask", lambda folder: answers)
    assert identity.main(["folder", "--output", str(tmp_path / "answers.json")]) == 0
    assert "2 of 40 answers name Vicuna" in capsys.readouterr().out
    written = json.loads((tmp_path / "answers.json").read_text())
    assert written["named"] == 2 and len(written["answers"]) == 40


def test_a_question_of_the_training_file_is_refused(tmp_path, capsys):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"value": "May I know your name? Please."}]))
    assert identity.verbatim_questions(path) == ["May I know your name?"]
    assert identity.main(["folder", "--unseen", str(path)]) == 2
    assert "word for word" in capsys.readouterr().err
