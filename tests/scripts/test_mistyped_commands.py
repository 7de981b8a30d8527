"""Mistyped or incomplete commands: one line names the correction before anything runs."""

import importlib

import pytest

import train

TRAIN = ["--config", "configs/quickstart.yaml"]
PLAN = ["--model", "llama-3.1-8b"]
LINES = ["--checkpoint", "runs/none"]
CASES = [
    # train.py: flags that are misspelt, or that other trainers have.
    ("train", ["--confg", "configs/quickstart.yaml"], "did you mean --config?"),
    ("train", ["configs/quickstart.yaml"], "--config configs/quickstart.yaml"),
    ("train", [*TRAIN, "--config"], "--config needs the path of a recipe"),
    ("train", ["--config", "--model.path", "m"], "--config needs the path of a recipe"),
    ("train", ["--config", "configs/quikstart.yaml"], "configs/quickstart.yaml"),
    ("train", [*TRAIN, "--optimizer.lr", "1e-4"], "did you mean --optimizer.learning_rate?"),
    ("train", [*TRAIN, "--lr", "1e-4"], "did you mean --optimizer.learning_rate?"),
    ("train", [*TRAIN, "--learning_rate", "1e-4"], "did you mean --optimizer.learning_rate?"),
    ("train", [*TRAIN, "--train.step", "4"], "did you mean --train.steps?"),
    ("train", [*TRAIN, "--num_train_epochs", "3"], "did you mean --train.epochs?"),
    (
        "train",
        [*TRAIN, "--per-device-train-batch-size", "3"],
        "did you mean --train.batch_size, rows",
    ),
    ("train", [*TRAIN, "--max_seq_length", "4096"], "did you mean --data.context_length?"),
    ("train", [*TRAIN, "--context_length", "4096"], "did you mean --data.context_length?"),
    ("train", [*TRAIN, "--output_dir", "here"], "did you mean --run_dir?"),
    (
        "train",
        [*TRAIN, "--mesh", "fsdp=8"],
        "--mesh is a section, found 'fsdp=8'; auto would work, or its fields mesh.data",
    ),
    ("train", [*TRAIN, "--mesh.sequnce", "8"], "did you mean --mesh.sequence?"),
    ("train", [*TRAIN, "--train.steps", "many"], "train.steps: found many, expects int"),
    ("train", [*TRAIN, "--train.steps"], "--train.steps needs a value"),
    ("train", [*TRAIN, "--memory.remat", "offlod"], "offload"),
    ("train", [*TRAIN, "--dryrun"], "did you mean --dry-run?"),
    ("train", [*TRAIN, "--dry_run", "8xH10"], "did you mean H100?"),
    ("train", [*TRAIN, "--dry-run", "8xH10"], "--dry-run: found '8xH10'"),
    # Lists as other programs take them, and a pattern that the shell has expanded.
    (
        "train",
        [*TRAIN, "--adapter.rank", "8", "--adapter.targets", "q_proj", "v_proj"],
        "'v_proj' belongs to no flag; write --adapter.targets '[q_proj, v_proj]'",
    ),
    (
        "train",
        [*TRAIN, "--data.path", "a.jsonl", "b.jsonl"],
        "--data.sources '[{path: a.jsonl}, {path: b.jsonl}]', or put a pattern in quotes",
    ),
    (
        "train",
        [*TRAIN, "--adapter.rank", "8", "--adapter.targets", "q_proj,v_proj"],
        "such as [q_proj, v_proj]",
    ),
    (
        "train",
        [*TRAIN, "--data.sources", "[{path:", "a.jsonl,", "format:", "text}]"],
        "put the value of --data.sources in quotes",
    ),
    # Shell variables that are not set.
    ("train", [*TRAIN, "--dry-run", "--train.epochs="], "--train.epochs: found '', needs a value"),
    ("train", [*TRAIN, "--optimizer.warmup_steps", ""], "warmup_steps: found '', needs a value"),
    ("train", [*TRAIN, "--model.overrides.rope_theta="], "rope_theta: found '', needs a value"),
    ("train", [*TRAIN, "--adapter.targets="], "--adapter.targets: found '', needs a value"),
    # Values of other trainers.
    (
        "train",
        [*TRAIN, "--optimizer.warmup_steps", "0.05"],
        "did you mean optimizer.warmup_fraction?",
    ),
    ("train", [*TRAIN, "--logging.wandb", "None"], "the name of a project"),
    ("train", [*TRAIN, "--logging.wandb", "tensorboard"], "the name of a project"),
    ("train", ["--help", "optimiser"], "did you mean optimizer?"),
    # The other commands.
    ("scripts.plan", [*PLAN, "--machine", "8xH100", "--contxt", "64K"], "did you mean --context?"),
    ("scripts.plan", [*PLAN, "--machine", "v5p32", "--context", "64K"], "v5p"),
    (
        "scripts.plan",
        [*PLAN, "--machine", "8xH100", "--context", "64 thousand"],
        "such as 4096, 64K or 1M",
    ),
    (
        "scripts.plan",
        ["--model", "lama-7b", "--machine", "8xH100", "--context", "64K"],
        "did you mean llama-7b?",
    ),
    (
        "scripts.plan",
        [*PLAN, "--machine", "8xH100", "--context", "64K", "--remat", "noting"],
        "did you mean nothing?",
    ),
    ("scripts.run_status", ["--price-per-hour", "-2", "runs/none"], "a number above 0"),
    ("scripts.launch_local", ["--processes", "2", "--restarts", "-1"], "at least 0, is needed"),
    ("scripts.restarts", ["record", "--limit", "-1"], "at least 0, is needed"),
    ("scripts.inspect_data", [*TRAIN, "--rows", "0"], "at least 1, is needed"),
    ("eval.needle", [*LINES, "--sample-seed", "-1"], "at least 0, is needed"),
    ("eval.in_context", [*LINES, "--first-seed", "-1"], "at least 0, is needed"),
    (
        "scripts.export_hf",
        ["runs/none", "model", "--dtyp", "float16"],
        "is not an option of this command",
    ),
    ("scripts.chat", ["runs/none", "--documnt", "book.txt"], "did you mean --document?"),
    ("eval.line_retrieval", [*LINES, "--case", "cases.jsonl"], "did you mean --cases?"),
    ("eval.needle", [*LINES, "--cases", "4"], "did you mean --count?"),
    ("eval.report", ["runs/none", "--outptu", "report.html"], "did you mean --output?"),
]


@pytest.mark.parametrize(("command", "argv", "fix"), CASES)
def test_one_line_names_the_correction(command, argv, fix, repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    main = train.main if command == "train" else importlib.import_module(command).main
    try:
        status = main(argv)
    except SystemExit as exit:
        status = exit.code
    stderr = capsys.readouterr().err
    assert status == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert fix in stderr
