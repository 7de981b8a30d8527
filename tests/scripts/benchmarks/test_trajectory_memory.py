"""Memory of trajectories: which steps are compiled, and what is written; what was compiled is not compiled again."""

import pytest

from scripts.benchmarks import trajectory_memory
from scripts.benchmarks.results import load, save
from scripts.benchmarks.trajectory_memory import Compilations, cases

WORDS = ["--only", "v5e", "on_1", "128"]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The remat policies that were compiled; a step fits where every third layer's input is kept."""
    policies = []

    def compile_job(job):
        policies.append(job.policy)
        fits = job.policy == "every_k"
        sizes = (
            {"peak_gib": 12.345, "temporaries_gib": 5.0}
            if fits
            else {"needs_gib": 30.0, "has_gib": 15.75}
        )
        return {"fits": fits, **sizes, "compile_seconds": 1.0}

    monkeypatch.setattr(trajectory_memory, "compiled", compile_job)
    monkeypatch.setattr(
        trajectory_memory, "save", lambda name, result: save(name, result, tmp_path / "results")
    )
    return policies


def test_jobs_are_the_recipes_step():
    jobs = {
        case.name: [case.job(options) for options in case.memory_options(27)]
        for case in cases(["v5e"])
    }
    [ring] = jobs["v5e_ring_128_on_64"]
    assert ring.run == trajectory_memory.recipe()
    for name, (job, *_) in jobs.items():
        assert (
            job.run.trajectories.in_context * 4000
            == job.context
            == (128_000 if "_32_" in name else 512_000)
        )
        assert job.run.mesh.sequence == int(name.rpartition("_")[2]) and job.batch == 1
    vanilla, blockwise = jobs["v5e_vanilla_32_on_1"], jobs["v5e_blockwise_32_on_1"]
    efficient = jobs["v5e_memory_efficient_32_on_1"]
    assert [job.run.attention.kernel for (job, *_) in (vanilla, efficient, blockwise)] == [
        "reference",
        "auto",
        "auto",
    ]
    assert [job.run.memory.feed_forward_chunk for (job, *_) in (vanilla, efficient, blockwise)] == [
        0,
        0,
        2048,
    ]
    assert [job.policy for job in blockwise] == ["nothing", "every_k"] and len(vanilla) == 1


def test_what_was_compiled_is_not_compiled_again(compiled, tmp_path, capsys):
    argv = [*WORDS, "--output", str(tmp_path)]
    assert trajectory_memory.main([*argv, "--compiles", "1"]) == 0
    assert compiled == ["nothing"] and not load("trajectory_memory", tmp_path / "results").rows, (
        "half a row is none"
    )
    assert trajectory_memory.main(argv) == trajectory_memory.main(argv) == 0
    assert compiled == ["nothing", "every_k"]
    result = load("trajectory_memory", tmp_path / "results")
    assert (
        result.rows["v5e_blockwise_128_on_1"]["found"]
        == "fits: 12.35 of 15.75 GiB, every_k; paper: oom"
    )
    assert [line[4:] for line in result.tables["compilations"]["rows"]] == [
        ["nothing", "no", "30.00", "15.75", ""],
        ["every_k", "yes", "12.35", "15.75", "5.00"],
    ]
    assert (
        "v5e_blockwise_128_on_1: too large: 30.00 of 15.75 GiB, nothing (1 s)"
        in capsys.readouterr().out
    )


def test_other_code_is_compiled_anew(compiled, tmp_path, monkeypatch):
    argv = [*WORDS, "--output", str(tmp_path)]
    assert trajectory_memory.main(argv) == 0
    monkeypatch.setattr(trajectory_memory, "fingerprint", lambda pattern: "other")
    assert not Compilations(tmp_path / "compilations.json").outcomes
