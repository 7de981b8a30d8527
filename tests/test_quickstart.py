"""A few steps of the quickstart's recipe; the exported model generates the same tokens in
transformers."""

import json
import os
import subprocess
import sys

import pytest

NEW_TOKENS, ROWS = 12, 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory, repository):
    """Returns the run folder and the exported folder, made by the commands."""
    folder = tmp_path_factory.mktemp("quickstart")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def run(*command):
        finished = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=repository,
            env=environment,
            text=True,
            capture_output=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr

    run(
        "train.py",
        "--config",
        "configs/quickstart.yaml",
        "--run_dir",
        folder / "run",
        "--data.prepared",
        folder / "prepared",
        "--train.steps",
        12,
        "--optimizer.warmup_steps",
        2,
        "--train.evaluate_every",
        0,
        "--checkpoint.every",
        0,
        "--logging.console",
        "false",
        "--logging.tensorboard",
        "false",
    )
    run("-m", "scripts.export_hf", folder / "run", folder / "exported")
    return folder / "run", folder / "exported"


def test_the_quickstarts_commands_exist_with_their_flags(tmp_path):
    """Each is parsed by its own command; the recipe is the one named in the summary."""
    from eval import line_retrieval
    from scripts import export_hf, quickstart
    from trainer.config.load import load
    from trainer.options import parse

    config = load(["--config", quickstart.RECIPE])
    _, module, *flags = quickstart.evaluation_command(
        config, tmp_path / "1", tmp_path / "evaluation"
    )
    assert module == "eval.line_retrieval"
    args = line_retrieval.parse(flags)
    assert args.checkpoint == str(tmp_path / "1") and args.cases == [
        "data/fixtures/line_cases.jsonl"
    ]
    assert args.max_new_tokens == 16
    assert (args.fsdp, args.tensor, args.sequence, args.simulate) == (
        config.mesh.fsdp,
        config.mesh.tensor,
        config.mesh.sequence,
        config.mesh.simulate,
    )
    assert (
        parse(export_hf.Options, [str(tmp_path / "1"), str(tmp_path / "exported")]).hf_dir
        == tmp_path / "exported"
    )


def test_held_out_loss_falls(trained):
    rows = [json.loads(line) for line in (trained[0] / "held_out.jsonl").read_text().splitlines()]
    before, after = (row["held_out_loss_nats_per_target"] for row in (rows[0], rows[-1]))
    assert [rows[0]["step"], rows[-1]["step"]] == [0, 12] and after < before - 0.5


def test_transformers_generates_the_same_tokens(trained, repository):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from eval.line_cases import read
    from eval.runner import Prompt, prompt_ids, stop_ids
    from model.decode import Generator
    from trainer.build import build_language_model
    from trainer.config.schema import MeshConfig, ModelConfig, RunConfig
    from trainer.mesh import make_mesh
    from trainer.model_source import open_model

    run, exported = trained
    source = open_model(str(run))
    tokenizer = source.tokenizer()
    cases = read(repository / "data/fixtures/line_cases.jsonl")[: ROWS - 1]
    prompts = [
        prompt_ids(Prompt(case.prompt, NEW_TOKENS), tokenizer, "tokenizer") for case in cases
    ]
    prompts.append(tokenizer.encode("Who are you?"))  # shorter, so that this row ends in padding
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, sequence=2))
    model = build_language_model(
        RunConfig(model=ModelConfig(compute_dtype="float32")), source.config, mesh
    )
    stops = stop_ids(source.config, tokenizer, "tokenizer")
    generator = Generator(
        model,
        rows=ROWS,
        capacity=max(map(len, prompts)) + NEW_TOKENS,
        new_tokens=NEW_TOKENS,
        stop_ids=stops,
        chunk=128,
    )
    ours = generator(source.read(model), prompts)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for prompt, expected in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            generated = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
        generated = generated[0, len(prompt) :].tolist()
        ends = [index for index, token in enumerate(generated) if token in stops]
        assert generated[: ends[0] if ends else None] == expected
    assert any(ours), "some answer is not empty"
