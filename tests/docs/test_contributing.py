"""The examples of CONTRIBUTING.md run as printed: a schedule and a kernel are exact, a family reads
its config.json, an evaluation is a section of recipes."""

import json
import re
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eval import live, suite
from eval.journal import Answer
from model import families
from model.attention import TokenCoords, attention
from model.attention.layout import inverse, permutation
from model.config import TransformerConfig
from tests.model.attention.dense import dense_attention
from tests.model.build import mesh_of
from trainer.config.load import load

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
RANKS, LENGTH = 4, 512


def example(file: str) -> ModuleType:
    """Returns the page's module of this name."""
    (code,) = re.findall(
        rf"^```python\n# {re.escape(file)}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    module = ModuleType(file)
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def errors(**options) -> dict[str, float]:
    """Returns the errors of out and the gradients, relative to the largest value, for a packed row
    over four ranks."""
    mesh, order = mesh_of({"sequence": RANKS}), permutation(LENGTH, RANKS, "striped")
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((1, LENGTH, heads, 32)).astype(np.float32) for heads in (4, 2, 2, 4)
    )
    index = np.arange(LENGTH, dtype=np.int32)[None]
    segment_ids = np.where(index < 300, 1, 2).astype(np.int32)
    q_, k_, v_, dout_, *coords = (
        jax.device_put(x[:, order], sharding) for x in (q, k, v, dout, index, segment_ids)
    )

    def loss(q, k, v):
        out = attention(q, k, v, TokenCoords(*coords), mesh=mesh, layout="striped", **options)
        return (out * dout_).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q_, k_, v_)
    expected = dense_attention(q, k, v, index, segment_ids, dout)
    results = zip(
        ("out", "dq", "dk", "dv"), (out, *gradients), (expected[0], *expected[2:]), strict=True
    )
    return {
        name: np.abs(np.asarray(x)[:, inverse(order)] - truth).max() / np.abs(truth).max()
        for name, x, truth in results
    }


def test_the_schedule_is_exact_and_its_plan_covers_every_block_once():
    module = example("model/attention/schedules/in_parts.py")
    assert max(errors(schedule=module.InParts()).values()) < 1e-5
    from model.attention.schedules.plan import Block

    for rounds in module.InParts().plan(RANKS, Block(1, 128, 4, 2, 32)):
        tasks = [task for round_ in rounds for task in round_.tasks]
        shares = sum(1 / task.key_part[1] * len(task.keys) for task in tasks)
        assert shares == RANKS**2


def test_the_kernel_is_exact():
    module = example("model/attention/kernels/by_slices.py")
    assert max(errors(kernel=module.BySlices(), schedule="ring").values()) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_the_family_reads_and_writes_its_config(monkeypatch, bias):
    family = example("model/families/example.py").EXAMPLE
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "example": family})
    config = {
        **TransformerConfig.preset("tiny").to_hf(),
        "architectures": ["ExampleForCausalLM"],
        "model_type": "example",
        "attention_bias": bias,
    }
    assert families.family_of(config) is family
    assert (
        family.read(config)["qk_norm"] == "head" and family.read(config)["attention_bias"] is bias
    )
    with pytest.raises(ValueError, match="sliding_window"):
        family.read({**config, "sliding_window": 4})


def test_the_evaluation_is_a_section_of_recipes(monkeypatch):
    monkeypatch.setitem(live.TESTS, "first_word", example("eval/first_word.py").LiveFirstWord)
    entry = {"test": "first_word", "words": ["gnu", "yak"], "tokens": [90, 400], "count": 3}
    config = load(["--config", "configs/quickstart.yaml", "--evaluations", json.dumps([entry])])
    [evaluation] = live.evaluations_of(live.with_tests(config))
    cases = evaluation.test.cases(lambda prompt: len(prompt.text), evaluation.test.tokens)
    assert [case.tokens for case in cases] == [90] * 3 + [400] * 3
    assert all(0.8 * case.tokens < len(case.prompt.text) + 4 <= case.tokens for case in cases)
    answers = [Answer(case.prompt.text.split()[0], 9) for case in cases]
    assert [(result.task, result.score) for result in suite.results_of(cases, answers, 512)] == [
        ("first word", 1.0)
    ] * 2
