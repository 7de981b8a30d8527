"""Tests of planning/reference_positions.py: `auto: [positions]` stretches `preference.ref_model` as
the trained model."""

import dataclasses
import json
import shutil

import peft
import pytest
import transformers

from data.errors import UserError
from model.config import TransformerConfig
from planning import positions, reference_positions
from planning.auto import Machine, _answer_of, _with_answer, planned_run
from tests import small_model
from trainer.config.load import dump, load
from trainer.mesh import abstract_mesh
from trainer.model_source import choose_model
from trainer.preference import PreferenceObjective
from trainer.run.identity import require_same
from trainer.run.opening import check_run
from trainer.stages import stages_of

TRAINED = small_model.CONFIG.max_position_embeddings  # 128
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": TRAINED}
LAPTOP = Machine("gpu:1", "1 x CPU", 1.0, 0.0)


@pytest.fixture
def words(hf_model, tmp_path):
    """Returns a function that makes the words of a command that learns from preferences."""

    def words(*flags: str, answer: int = 280, name: str = "run") -> list[str]:
        records = [
            {"prompt": f"Q{i}?", "chosen": f"x{i} " + "a " * answer, "rejected": f"no {i}"}
            for i in range(20)
        ]
        path = tmp_path / f"{answer}.json"
        path.write_text(json.dumps(records), encoding="utf-8")
        source = {"path": str(path), "format": "preference", "template": "plain"}
        return [
            *("--model.path", str(hf_model), "--run_dir", str(tmp_path / name)),
            *("--data.sources", json.dumps([source]), "--data.prepared", str(tmp_path / "data")),
            *("--data.held_out_fraction", "0", "--preference.loss", "sigmoid", *flags),
        ]

    return words


@pytest.fixture
def single(words, hf_model, tmp_path):
    """Returns a function that makes such a command with a copy of the model as its reference."""
    copy = str(shutil.copytree(hf_model, tmp_path / "copy"))
    return lambda *flags, **options: words(
        "--data.context_length", "512", "--preference.ref_model", copy, *flags, **options
    )


def planned(config):
    return planned_run(config, LAPTOP, lambda _: None)


def ropes(config):
    """The RoPE of the trained model and of its reference."""
    objective = PreferenceObjective(config, abstract_mesh(config.mesh))
    return objective.model.config.rope, objective._reference[1].config.rope


def begin(config):
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    return str(config.folder / "config.yaml")


@pytest.mark.parametrize("name", ["adapter", "absent"])
def test_a_reference_that_cannot_be_opened_is_named(words, hf_model, tmp_path, name):
    path = tmp_path / name
    if name == "adapter":
        model = transformers.LlamaForCausalLM.from_pretrained(hf_model)
        peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(
            path
        )
    config = load(words("--preference.ref_model", str(path)))
    with pytest.raises((UserError, ValueError), match=f"^preference.ref_model: {path}"):
        planned(config)


def test_a_reference_is_stretched_as_the_trained_model(single):
    config, lines = load(single()), []
    found = planned_run(config, LAPTOP, lines.append)
    assert found.preference.ref_overrides == found.model.overrides
    assert found.preference.ref_overrides["rope_scaling"] == YARN
    trained, reference = ropes(found)
    assert trained == reference and reference.factor == 3.0
    overrides = json.dumps(found.model.overrides)
    assert lines[-1].endswith(
        f"\nRoPE of the reference: stretched too, preference.ref_overrides {overrides}"
    )
    # The other processes get the same from process 0.
    assert _with_answer(config, json.loads(json.dumps(_answer_of(found)))) == found


def test_a_reference_that_reaches_the_documents_or_has_positions_is_left_alone(single):
    assert planned(load(single(answer=10))).preference.ref_overrides == {}
    given = {"rope_theta": 90000.0}
    found = planned(load(single("--preference.ref_overrides", json.dumps(given))))
    assert found.preference.ref_overrides == given and found.model.overrides


def test_another_model_is_stretched_to_the_longest_document(single, tmp_path):
    """Though the trained model reaches much farther."""
    file = tmp_path / "copy/config.json"
    changed = json.loads(file.read_text()) | {"rope_theta": 5000.0, "rope_parameters": None}
    file.write_text(json.dumps(changed), encoding="utf-8")
    yarn = {"max_position_embeddings": 512, "rope_scaling": YARN | {"factor": 4.0}}
    given = ("--model.overrides", json.dumps(yarn))
    found = planned(load(single(*given))).preference.ref_overrides
    assert TRAINED * 2 < found["max_position_embeddings"] < TRAINED * 3
    assert found["rope_scaling"] == YARN
    assert planned(load(single(*given, answer=10))).preference.ref_overrides == {}


def test_a_later_stages_reference_has_the_rope_with_which_the_stage_before_it_ended(
    words, hf_model, tmp_path
):
    stages = [{"context_length": length, "steps": 5} for length in (512, 1024)]
    flags = ("--train.epochs", "null", "--stages", json.dumps(stages))
    first, second = stages_of(load(words(*flags)))
    extended = planned(first)
    assert extended.preference.ref_model is None
    # The first stage's result.
    result = shutil.copytree(hf_model, tmp_path / "result")
    shape = choose_model(extended.model, weights=False).config.to_hf()
    written = json.loads((result / "config.json").read_text()) | shape
    (result / "config.json").write_text(json.dumps(written), encoding="utf-8")
    model = dataclasses.replace(second.model, path=str(result))
    found = planned(dataclasses.replace(second, model=model))
    assert not found.model.overrides and "RoPE: unchanged" in found.planned
    trained, reference = ropes(found)
    assert trained == reference and reference.factor == 3.0
    # Also in a stage whose documents do not need it.
    data = dataclasses.replace(second.data, context_length=TRAINED)
    short = planned(dataclasses.replace(second, model=model, data=data))
    assert short.preference.ref_overrides == found.preference.ref_overrides


def test_a_reference_that_states_more_than_it_was_trained_for_states_no_less(single, monkeypatch):
    """Qwen3 has 40,960 positions, of which 32,768 are for the prompt."""
    config = load(single("--data.context_length", "128K"))
    small = choose_model(config.model, weights=False)
    qwen = dataclasses.replace(small, config=TransformerConfig.preset("qwen3-0.6b"))
    monkeypatch.setattr(reference_positions, "choose_model", lambda *_, **__: qwen)
    for longest, expected in ((1000, None), (36000, 40960), (90000, 90000)):
        found = reference_positions.reference_positions(
            config, small.config, lambda longest=longest: longest
        )
        assert found.get("max_position_embeddings") == expected


def test_a_run_keeps_the_reference_with_which_it_began(single, monkeypatch):
    config = load(single())
    began = planned(config)
    monkeypatch.setattr(positions, "prepare_text", lambda *_: pytest.fail("data were prepared"))
    # Earlier versions left the reference as it was.
    earlier = dataclasses.replace(began.preference, ref_overrides={})
    for preference in (began.preference, earlier):
        begin(dataclasses.replace(began, preference=preference))
        found = planned(config)
        assert found.preference == preference
        require_same(check_run(found, steps_known=False), found, steps_known=False)


def test_a_runs_own_configuration_is_planned_anew(single):
    recipe = begin(planned(load(single())))
    (name, sources) = single(answer=450)[4:6]
    elsewhere = ("--run_dir", str(load(single(name="new")).folder), name, sources)
    found = planned(load(["--config", recipe, *elsewhere]))
    assert found.preference.ref_overrides["rope_scaling"]["factor"] == 4.0
