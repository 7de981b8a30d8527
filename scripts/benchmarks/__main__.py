"""Measures what BENCHMARKS.md claims and `make test` is too short for: prints each command, its time, and its result.

    python -m scripts.benchmarks [--conversations FILE.json] [--output DIR]        (what `make bench` runs)

Without a file of identity conversations the fine-tuning of the real model is left out, and said to be.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

IDENTITY = Path("../shared/data/conversations/fastchat_dummy.json")


def run(results: list[dict], *command: str) -> None:
    """One command of the project, timed; its failure ends the bench."""
    print("\n$ python " + " ".join(command), flush=True)
    start = time.perf_counter()
    code = subprocess.run([sys.executable, *command], check=False).returncode
    results.append({"command": " ".join(command), "seconds": round(time.perf_counter() - start, 1), "code": code})
    if code:
        sys.exit(code)


def main(argv=None) -> None:
    """Runs everything, and writes OUTPUT/bench.json."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--conversations", type=Path, default=IDENTITY, help=f"identity conversations (default {IDENTITY})")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for results (default runs/bench)")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    results: list[dict] = []
    for remat in ("nothing", "save_attention"):
        run(results, "-m", "scripts.plan", "--model", "llama-7b", "--topology", "v4:4x4x4", "--context", "1048576",
            "--remat", remat, "--output", str(args.output / f"llama_7b_1m_{remat}.json"))
    run(results, "-m", "scripts.benchmarks.bench_step", "--output", str(args.output))
    run(results, "-m", "scripts.benchmarks.bench_kernels", "--lengths", "8192", "16384", "--blocks", "diagonal", "--output",
        str(args.output / "kernels"))
    run(results, "-m", "scripts.benchmarks.bench_memory", "--output", str(args.output / "memory"))
    for table in ("balance", "overlap", "time", "bytes", "distflashattn"):
        run(results, "-m", "scripts.benchmarks.bench_schedules", table, "--output", str(args.output / f"{table}.json"))
    run(results, "-m", "scripts.benchmarks.papers", "--output", str(args.output / "papers"))
    run(results, "-m", "scripts.benchmarks.activation_memory", "--output", str(args.output / "activation_memory.json"))
    model, trained, exported = (str(args.output / name) for name in ("smollm2", "identity", "identity_hf"))
    run(results, "-m", "scripts.make_smollm2", model)
    run(results, "-m", "scripts.benchmarks.bench_data", "--tokenizer", model, "--output", str(args.output / "data"))
    if args.conversations.exists():
        file = str(args.conversations)
        run(results, "-m", "scripts.benchmarks.identity", model, "--unseen", file, "--output", str(args.output / "before.json"))
        run(results, "train.py", "--config", "configs/sharegpt_smollm2.yaml", "--model.path", model, "--data.path", file,
            "--run_dir", trained)
        if not Path(exported).exists():
            run(results, "-m", "scripts.export_hf", trained, exported)
        run(results, "-m", "scripts.benchmarks.identity", exported, "--unseen", file, "--output",
            str(args.output / "after.json"))
    else:
        print(f"\n{args.conversations}: not there; fine-tuning on identity conversations is left out")
    (args.output / "bench.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for row in results:
        print(f"{row['seconds']:8.1f} s  {row['command']}")


if __name__ == "__main__":
    main()
