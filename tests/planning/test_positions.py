"""Tests of planning/positions.py: `auto: [positions]` stretches RoPE to the longest document, and
leaves it alone if no document needs that."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import train
from data.errors import UserError
from model.config import TransformerConfig
from planning import positions
from planning.auto import Machine, _answer_of, _with_answer, planned_run
from planning.positions import with_extended_positions
from scripts import inspect_data
from tests import small_model
from trainer.config.load import dump, load
from trainer.mesh import abstract_mesh
from trainer.run.identity import require_same
from trainer.run.opening import check_run
from trainer.text import TextObjective

TRAINED = small_model.CONFIG.max_position_embeddings  # 128
ROWS = 512
LAPTOP = Machine("gpu:1", "1 x CPU", 1.0, 0.0)


def chats(path: pathlib.Path, *words: int) -> str:
    """Writes a conversation with an answer of each number of words, about a token each."""
    records = [
        [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": " ".join([f"a{number}"] * count)},
        ]
        for number, count in enumerate(words)
    ]
    lines = (json.dumps({"messages": messages}) for messages in records)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def words(hf_model, tmp_path):
    """Returns a function that makes the words of a command without a recipe."""

    def words(*flags: str, answers: tuple[int, ...] = (10,) * 40) -> list[str]:
        return [
            *("--model.path", str(hf_model), "--run_dir", str(tmp_path / "run")),
            *("--data.path", chats(tmp_path / "chats.jsonl", *answers)),
            *("--data.context_length", str(ROWS), "--data.prepared", str(tmp_path / "prepared")),
            *("--data.held_out_fraction", "0", *flags),
        ]

    return words


@pytest.fixture
def without_data(monkeypatch):
    """Fails if data are prepared."""
    monkeypatch.setattr(positions, "prepare_text", lambda *_: pytest.fail("data were prepared"))


def opened(config) -> TextObjective:
    """Returns the run's objective, without devices."""
    return TextObjective(config, abstract_mesh(config.mesh))


def exported_config(objective: TextObjective, folder) -> transformers.PretrainedConfig:
    """Returns the configuration that the run's exports have, as transformers reads it."""
    objective.write_assets(folder)
    return transformers.AutoConfig.from_pretrained(folder)


def rope(config: transformers.PretrainedConfig) -> tuple[np.ndarray, float]:
    """Returns transformers' frequencies and scale of the attention."""
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.numpy(), embedding.attention_scaling


def test_short_documents_in_long_rows_leave_rope_alone(words, hf_model, tmp_path):
    config, lines = load(words()), []
    planned = planned_run(config, LAPTOP, lines.append)
    assert planned.model.overrides == {} and planned.data.context_length == ROWS > 2 * TRAINED
    objective = opened(planned)
    longest = max(objective.prepared.train.lengths)
    assert len(lines) == 2 and planned.planned == "\n".join(lines)
    assert lines[1] == (
        f"RoPE: unchanged; the longest document has {longest} tokens, the model is trained for 128"
    )
    base = transformers.AutoConfig.from_pretrained(hf_model)
    exported = exported_config(objective, tmp_path / "assets")
    assert exported.max_position_embeddings == base.max_position_embeddings == TRAINED
    assert exported.rope_parameters == base.rope_parameters
    np.testing.assert_array_equal(rope(exported)[0], rope(base)[0])
    assert rope(exported)[1] == 1.0


def test_a_long_document_stretches_rope_to_it(words, hf_model, tmp_path):
    config = load(words(answers=(10, 120, 10)))
    planned, line = with_extended_positions(config)
    objective = opened(planned)
    longest = max(len(objective.prepared.train[i].tokens) for i in range(3))
    assert 2 * TRAINED < longest <= 3 * TRAINED
    assert line.startswith(
        f"RoPE: stretched to the longest document, {longest} tokens, since the model is trained for "
        f"128: model.overrides {{"
    )
    exported = exported_config(objective, tmp_path / "assets")
    assert exported.max_position_embeddings == longest
    expected = transformers.LlamaConfig.from_pretrained(
        hf_model,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": TRAINED,
            "rope_theta": 10000.0,
        },
    )
    np.testing.assert_array_equal(rope(exported)[0], rope(expected)[0])
    assert rope(exported)[1] == rope(expected)[1] > 1
    assert not any("trained for" in warning for warning in objective.warnings)
    # The other processes get the same from process 0.
    answer = json.loads(json.dumps(_answer_of(planned)))
    assert _with_answer(config, answer) == planned


def test_a_dry_run_decides_as_training(words, capsys):
    for answers, found in (
        ((10, 20), "RoPE: unchanged; the"),
        ((10, 120), "RoPE: stretched to"),
    ):
        arguments = words("--dry-run", "gpu", "--gpu-memory", "24", answers=answers)
        assert train.main(arguments) == 0
        output = capsys.readouterr()
        assert found in output.out and "trained for 128: set" not in output.out + output.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--data.context_length", "128"), "unchanged; rows have 128 tokens, the model is"),
        (("--model.overrides", "{rope_theta: 90000.0}"), "by model.overrides, whose rope_theta"),
        (
            ("--model.overrides", "{rope_scaling: {rope_type: dynamic, factor: 2.0}}"),
            "unchanged; its rule dynamic adapts",
        ),
        (
            (
                "--model.overrides",
                f"{{rope_scaling: {{rope_type: longrope, short_factor: {[1.0] * 4}, "
                f"long_factor: {[2.0] * 4}}}}}",
            ),
            "unchanged; the model is trained for 128, and the factors of its rule longrope fit one",
        ),
    ],
)
def test_data_are_not_read_if_they_cannot_matter(words, without_data, flags, reason):
    config = load(words(*flags))
    planned, line = with_extended_positions(config)
    assert planned.model.overrides == config.model.overrides and line.startswith(f"RoPE: {reason}")


def test_a_model_that_states_more_than_it_was_trained_for_states_no_less(words, monkeypatch):
    """Qwen3 has 40,960 positions, of which 32,768 are for the prompt."""
    qwen = TransformerConfig.preset("qwen3-0.6b")
    source = dataclasses.replace(
        positions.choose_model(load(words()).model, weights=False), config=qwen
    )
    monkeypatch.setattr(positions, "choose_model", lambda *_, **__: source)
    config = load(words("--data.context_length", "128K"))
    for longest, expected in ((32768, None), (36000, (40960, 2.0)), (90000, (90000, 3.0))):
        monkeypatch.setattr(positions, "_longest", lambda *_, longest=longest: longest)
        found = with_extended_positions(config)[0].model.overrides
        assert expected == (
            (found["max_position_embeddings"], found["rope_scaling"]["factor"]) if found else None
        )


def begin(config) -> pathlib.Path:
    """Writes a configuration as that of the run in its folder."""
    config.folder.mkdir(parents=True, exist_ok=True)
    path = config.folder / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    return path


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
STRETCHED = {"max_position_embeddings": ROWS, "rope_scaling": YARN}


def stretched(config):
    """The configuration with the positions that earlier versions gave it."""
    model = dataclasses.replace(config.model, overrides=STRETCHED)
    return dataclasses.replace(config, model=model)


def test_a_run_keeps_the_positions_with_which_it_began(words, without_data):
    """Earlier versions stretched to the length of the rows."""
    config = load(words())
    path = begin(stretched(config))
    planned, line = with_extended_positions(config)
    assert planned.model.overrides == STRETCHED and "run began, model.overrides {" in line
    require_same(check_run(planned, steps_known=False), planned, steps_known=False)
    # One that had no need for it stays as it is, whatever is in its data now.
    path.write_text(dump(config), encoding="utf-8")
    planned, line = with_extended_positions(config)
    assert planned.model.overrides == {} and line.endswith("run began, unchanged")
    # A difference that is not the planner's is still refused.
    path.write_text(dump(stretched(config)), encoding="utf-8")
    changed = load(words("--model.overrides", "{rope_theta: 90000.0}"))
    with pytest.raises(UserError, match=r"another run is in this folder: model\.overrides\.rope_"):
        check_run(with_extended_positions(changed)[0], steps_known=False)


def test_a_runs_own_configuration_is_not_stretched_twice(words, tmp_path, monkeypatch):
    planned = planned_run(load(words(answers=(10, 120, 10))), LAPTOP, lambda _: None)
    assert planned.model.overrides["rope_scaling"]["factor"] == 3.0
    recipe = ("--config", str(begin(planned)))
    resumed = planned_run(load(recipe), LAPTOP, lambda _: None)
    assert resumed.model.overrides == planned.model.overrides
    began = f"RoPE: as {tmp_path / 'run'} began, model.overrides {{"
    assert resumed.planned.splitlines()[-1].startswith(began)
    kept = planned_run(load([*recipe, "--auto", "[mesh]"]), LAPTOP, lambda _: None)
    assert kept.model.overrides == planned.model.overrides, "nothing replaces them"
    begin_again = ("--run_dir", str(tmp_path / "run2"), "--data.path")
    longer = chats(tmp_path / "longer.jsonl", 10, 180)
    for record in (planned, resumed):
        (tmp_path / "run" / "config.yaml").write_text(dump(record), encoding="utf-8")
        lines = []
        found = planned_run(load([*recipe, *begin_again, longer]), LAPTOP, lines.append)
        # As from the model itself, in one step.
        with_longer = [
            longer if word.endswith("chats.jsonl") else word for word in words("--run_dir", "other")
        ]
        expected = with_extended_positions(load(with_longer))[0]
        assert found.model.overrides == expected.model.overrides
        assert found.model.overrides["rope_scaling"]["factor"] == 4.0
        assert found.planned.splitlines() == "\n".join(lines).splitlines()  # without earlier lines


def test_a_runs_own_configuration_keeps_the_users_positions(words, tmp_path, without_data):
    """Even if the planner had chosen the same."""
    config = load(words("--model.overrides", json.dumps(STRETCHED)))
    planned = planned_run(config, LAPTOP, lambda _: None)
    for _ in range(2):  # a new run, and one that continues
        recipe = ("--config", str(begin(planned)))
        planned = planned_run(load(recipe), LAPTOP, lambda _: None)
        assert planned.planned.endswith("began, by model.overrides")
        elsewhere = load([*recipe, "--run_dir", str(tmp_path / "run2")])
        assert planned_run(elsewhere, LAPTOP, lambda _: None).model.overrides == STRETCHED


def test_a_dry_run_on_a_given_mesh_needs_no_machine(words, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("config_version: 2\nauto: [positions]\n", encoding="utf-8")
    arguments = ["--config", str(recipe), *words("--train.steps", "5", answers=(10, 120))]
    assert train.main([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "RoPE: stretched to" in output and "planned for" not in output
    assert train.main([*arguments, "--memory", "auto", "--dry-run"]) == 2
    assert "--dry-run: memory: auto needs a machine, found none" in capsys.readouterr().err


def test_a_run_on_trajectories_has_no_documents(words):
    config = load(words())
    on_trajectories = dataclasses.replace(
        config,
        trajectories=dataclasses.replace(
            config.trajectories, path="episodes.npz", task="walker_walk"
        ),
    )
    with pytest.raises(UserError, match="auto: found positions in a run on trajectories"):
        with_extended_positions(on_trajectories)


def test_a_run_in_a_bucket_keeps_its_positions(words, without_data, store_and_url):
    _, url = store_and_url
    config = load(words("--run_dir", f"{url}/run"))
    begun = stretched(config)
    positions.RunDirectory.of(begun).mirror.bucket.write("config.yaml", dump(begun).encode())
    planned, line = with_extended_positions(config)
    assert planned.model.overrides == STRETCHED and f"RoPE: as {url}/run began" in line


def test_a_folder_that_cannot_be_used_is_refused_before_data_are_prepared(
    words, without_data, tmp_path
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="holds files but no config"):
        with_extended_positions(load(words()))


def test_held_out_documents_do_not_stretch_rope_but_are_reported(words, tmp_path):
    held_out = chats(tmp_path / "held_out.jsonl", 10, 120)
    planned, line = with_extended_positions(load(words("--data.held_out_path", held_out)))
    assert planned.model.overrides == {} and line.startswith("RoPE: unchanged; the longest")
    objective = opened(planned)
    longest = max(objective.prepared.held_out.lengths)
    assert longest > TRAINED > max(objective.prepared.train.lengths)
    (warning,) = (warning for warning in objective.warnings if "held-out" in warning)
    assert warning.startswith(f"held-out documents up to {longest} tokens, but trained for 128")
    # The warning's own example helps.
    overrides = warning.partition("--model.overrides '")[2].partition("' would avoid that")[0]
    assert json.loads(overrides)["max_position_embeddings"] == longest
    helped = opened(load(words("--data.held_out_path", held_out, "--model.overrides", overrides)))
    assert not any("held-out" in warning for warning in helped.warnings)


def test_the_inspector_does_not_warn_of_what_will_be_stretched(words, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("config_version: 2\nauto: [positions]\n", encoding="utf-8")
    for auto, warned in (("[positions]", False), ("[]", True)):
        arguments = [str(recipe), *words("--auto", auto, answers=(10, 120))]
        assert inspect_data.main(arguments) == 0
        assert ("trained for 128: set rope_scaling" in capsys.readouterr().out) == warned
