"""The result of in-context reinforcement learning: saving half a table keeps the other half and its
origin."""

from scripts.benchmarks import in_context, results


def answer(last, seeds=5):
    scores = {
        name: {"mean": last, "interval": [last - 1, last + 1]} for name in ("last", "best", "mean")
    }
    return [
        {
            "scores": scores,
            "data_best": 100.0,
            "data_mean": 50.0,
            "returns": [[1.0, last]] * seeds,
            "minutes": 2.0,
        }
    ]


def test_unmeasured_tasks_keep_their_date_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (tmp_path / f"{in_context.NAME}.json").write_text('{"title": "t"}')
    monkeypatch.setattr(in_context, "commit", lambda: "first")
    in_context.save_result(
        {("walker_walk", "DT", 500): answer(40.0), ("cheetah_run", "DT", 500): answer(60.0)},
        "command",
    )
    monkeypatch.setattr(in_context, "commit", lambda: "second")
    longer = {
        ("cheetah_run", method, 2000): answer(score)
        for method, score in (("BC-10%", 70.0), ("DT", 65.0), ("AT, N = 8", 73.0))
    }
    in_context.save_result(longer, "command")
    rows = results.load(in_context.NAME).rows
    assert {task: row["commit"] for task, row in rows.items()} == {
        "walker_walk": "first",
        "cheetah_run": "second",
    }
    about = "walker_walk: return of the last of 8 episodes after 500 training steps"
    assert rows["walker_walk"]["what"] == about
    assert (
        rows["cheetah_run"]["found"] == "BC-10% 70; DT 65; AT 8 73"
        and rows["cheetah_run"]["verdict"] == "held"
    )
    lines = results.load(in_context.NAME).tables[in_context.SCORES]["rows"]
    assert [line[:3] for line in lines] == [
        ["walker_walk", "DT", "500"],
        ["cheetah_run", "DT", "500"],
        ["cheetah_run", "BC-10%", "2000"],
        ["cheetah_run", "DT", "2000"],
        ["cheetah_run", "AT, N = 8", "2000"],
    ]
