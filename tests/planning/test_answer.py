"""Advice about a job that does not fit."""

from planning import answer
from planning.plan import Job


def test_shorter_rows_are_not_tried_when_another_plan_fits(monkeypatch):
    job = Job.of("smollm2-135m", "v5e:2x2", 8192, memory={"remat": "everything"})
    contexts, choose = [], answer.choose

    def recorded(job):
        contexts.append(job.context)
        return choose(job)

    monkeypatch.setattr(answer, "choose", recorded)
    (line,) = answer.advice(job)
    assert line.startswith("fits here with mesh") and contexts == [8192]
