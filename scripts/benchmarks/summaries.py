"""Makes the rows of results from the files that the commands write: one function per result, which
takes the folder of a measurement's files.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.commands import (
    identifier,
    read_json,
    read_lines,
    tokens_text,
    write_json,
)
from scripts.benchmarks.identity import QUESTIONS
from scripts.benchmarks.results import commit, load, row

Rows = dict[str, dict[str, str]]


# Speed of the step of 2,048 tokens relative to torch on other processors, two idle cores each, the
# slowest of the runs; see docs/notes/cpu_speed.md.
OTHER_PROCESSORS = {
    "AMD EPYC without AMX, 2026-11-24": 0.893,
    "Intel Xeon of model 207 with AMX": 0.82,
}


def step(out: Path) -> Rows:
    measured = {(entry["side"], entry["length"]): entry for entry in read_json(out / "step.json")}
    rows: Rows = {}
    for length, goal in ((2048, 1.15), (4096, 1.5)):
        ours, theirs = measured["ours", length], measured["theirs", length]
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        rows[f"speed_{length}"] = row(
            f"CPU training step, {length:,} tokens: tokens/s relative to torch",
            f"{ratio:.3f}x",
            f"{goal}x",
            ratio >= goal,
        )
        rows[f"memory_{length}"] = row(
            f"CPU training step, {length:,} tokens: peak GiB (torch {theirs['peak_gib']:.2f})",
            f"{ours['peak_gib']:.2f}",
            "at most torch's",
            ours["peak_gib"] <= theirs["peak_gib"],
        )
    ratio = measured["ours", 2048]["tokens_per_second"]
    ratio /= measured["theirs", 2048]["tokens_per_second"]
    least = min(ratio, *OTHER_PROCESSORS.values())
    others = ", ".join(f"{name}: {speed}x" for name, speed in OTHER_PROCESSORS.items())
    rows["least_2048"] = row(
        f"CPU training step, 2,048 tokens, slowest of the processors tried (this one, {others}): "
        "tokens/s relative to torch",
        f"{least:.3g}x",
        "0.9x",
        least >= 0.9,
    )
    return rows


def kernels(out: Path) -> Rows:
    measured = {
        (entry["length"], entry["pass"], entry["peer"]): entry
        for entry in read_json(out / "kernels" / "bench_kernels.json")["rows"]
        if "seconds" in entry
    }
    rows = {}
    for length in (8192, 16384):
        for name, short in (("forward", "forward"), ("forward+backward", "both")):
            ours, theirs = (measured[length, name, peer] for peer in ("ours", "torch-sdpa"))
            spelled, ratio = name.replace("+", " + "), theirs["seconds"] / ours["seconds"]
            rows[f"{short}_{length}"] = row(
                f"CPU attention kernel, {length:,} tokens, {spelled}: speed relative to torch",
                f"{ratio:.2f}x",
                "0.9x",
                ratio >= 0.9,
            )
        rows[f"memory_{length}"] = row(
            f"CPU attention kernel, {length:,} tokens, forward + backward: peak MiB (torch "
            f"{theirs['peak_mib']:.0f})",
            f"{ours['peak_mib']:.0f}",
            "at most torch's",
            ours["peak_mib"] <= theirs["peak_mib"],
        )
    return rows


# Row id -> schedule as printed, layouts, words, goal, largest allowed imbalance for P ranks.
BALANCE_GOALS: dict[str, tuple[str, tuple[str, ...], str, str, Callable[[int], float]]] = {
    "ring_contiguous": (
        "ring",
        ("contiguous",),
        "ring, contiguous",
        "2 - 1/P",
        lambda p: 2 - 1 / p,
    ),
    "ring_striped": (
        "ring",
        ("striped", "zigzag"),
        "ring, striped and zigzag",
        "1.07",
        lambda p: 1.07,
    ),
    "balanced": (
        "balanced",
        ("contiguous",),
        "balanced, contiguous",
        "P / (P - 1)",
        lambda p: p / (p - 1),
    ),
    "balanced_split": (
        str({"name": "balanced", "split": True}),
        ("contiguous",),
        "balanced, split, contiguous",
        "1.05",
        lambda p: 1.05,
    ),
}


def balance(out: Path) -> Rows:
    measured, rows = read_json(out / "balance.json"), {}
    for row_id, (schedule, layouts, words, goal, allowed) in BALANCE_GOALS.items():
        worst: dict[int, float] = {}
        for entry in measured:
            if entry["schedule"] == schedule and entry["layout"] in layouts:
                imbalance = max(entry[name]["imbalance"] for name in ("forward", "backward"))
                worst[entry["ranks"]] = max(worst.get(entry["ranks"], 0.0), imbalance)
        rows[row_id] = row(
            f"{words}: imbalance on P = {'; '.join(map(str, worst))} ranks",
            "; ".join(f"{imbalance:.4f}" for imbalance in worst.values()),
            goal,
            all(imbalance <= allowed(ranks) for ranks, imbalance in worst.items()),
        )
    return rows


def balance_time(out: Path) -> Rows:
    measured = {
        (entry["case"], entry["length"], entry["tiles"]): entry
        for file in ("time.json", "time_32.json")
        for entry in read_json(out / file)
    }

    def relative_to_bound(tiles: int) -> dict[str, str]:
        entry = measured["striped ring", 16384, tiles]
        share = entry["speedup"] / entry["bound"]
        speedup_of_bound = f"{entry['speedup']:.3f} of {entry['bound']:.3f}"
        what = (
            f"speed-up of the striped over the contiguous ring, 16K tokens, {tiles} x {tiles} "
            f"tiles per block, relative to the bound ({speedup_of_bound})"
        )
        return row(what, f"{share:.1%}", "95%", share >= 0.95)

    def speedup(case: str, tiles: int, goal: float) -> dict[str, str]:
        entry = measured[case, 16384, tiles]
        what = (
            f"speed-up of {case} over the contiguous ring, 16K tokens, {tiles} x {tiles} tiles per "
            f"block (bound {entry['bound']:.3f})"
        )
        return row(what, f"{entry['speedup']:.3f}", str(goal), entry["speedup"] >= goal)

    return {
        "striped_16384": relative_to_bound(16),
        "striped_32_tiles": relative_to_bound(32),
        "balanced_16384": speedup("balanced, split", 16, 1.3),
        "balanced_32_tiles": speedup("balanced, split", 32, 1.3),
    }


def bytes_received(out: Path) -> Rows:
    deviations: dict[str, dict[int, float]] = {}
    for entry in read_json(out / "bytes.json"):
        deviations.setdefault(entry["schedule"], {})[entry["ranks"]] = max(
            abs(entry[direction][f"{kind}_bytes"] / entry[direction][f"planned_{kind}_bytes"] - 1)
            for direction in ("forward", "backward")
            for kind in ("max", "mean")
        )
    return {
        identifier(name): row(
            f"{name} on P = {', '.join(map(str, by_ranks))} ranks: received bytes, largest "
            "deviation from the formula",
            f"{max(by_ranks.values()):.1%}",
            "2%",
            max(by_ranks.values()) <= 0.02,
        )
        for name, by_ranks in deviations.items()
    }


def overlap(out: Path) -> Rows:
    rows, measured = {}, read_json(out / "overlap.json")

    def exposed(name: str, backward: bool) -> str:
        """Returns how many of a schedule's permutes overlap with no kernel, out of how many."""
        permutes = [
            entry
            for entry in measured
            if (entry["schedule"], entry["backward"], entry["kind"])
            == (name, backward, "collective-permute")
        ]
        bare = sum(entry["times"] for entry in permutes if not entry["kernels"])
        return f"{bare:.0f} of {sum(entry['times'] for entry in permutes):.0f}"

    for name in dict.fromkeys(entry["schedule"] for entry in measured):
        counts = [exposed(name, backward) for backward in (False, True)]
        hidden = all(count.startswith("0 ") for count in counts)
        goal = ("none", hidden) if name == "balanced split" else ("", None)
        what = f"schedule {name}: permutes that no kernel hides, forward; backward"
        rows[identifier(name)] = row(what, "; ".join(counts), *goal)
    return rows


def papers(out: Path) -> Rows:
    """For each paper, the numbers that the cost model claims to reproduce, and its errors for all
    printed numbers; the note on papers explains the misses."""
    measured, rows = read_json(out / "papers" / "papers.json"), {}
    set_later = {entry["source"] for entry in measured["rows"] if entry["set_afterwards"]}
    for source, counts in measured["summary"].items():
        claimed, right = counts["claimed"], counts["claimed and reproduced"]
        printed = counts["with a printed number"]
        near = ", ".join(f"{counts[f'within {limit}%']} within {limit}%" for limit in (1, 10, 50))
        mark = " (some constants set after seeing them)" if source in set_later else ""
        rows[identifier(source)] = row(
            f"{source}: numbers the cost model claims to reproduce; errors of all {printed} "
            f"printed numbers{mark}",
            f"{claimed} claimed: {right} right, {claimed - right} wrong; {near}",
            "no claim wrong",
            right == claimed if claimed else None,
        )
    return rows


def measured_steps(out: Path) -> Rows:
    """Our ranges on two machines, then each measured step with the error of our estimate."""
    measured = read_json(out / "measured_steps.json")
    rows = {
        identifier(f"ours {entry['machine']} {tokens_text(entry['length'])}"): row(
            f"{entry['machine']}, {tokens_text(entry['length'])} tokens",
            f"{entry['low']:.3g} to {entry['high']:.3g}",
            "; ".join(entry["peers"]) or "none found",
        )
        for entry in measured["ours"]
    }
    rows |= {
        identifier(f"held out {entry['system']}"): row(
            f"{entry['system']}: measured steps inside ranges set by other systems; slowest step "
            "relative to its range's upper end",
            f"{entry['within']} of {entry['steps']}; {entry['largest_over_high_end']:.2f}x",
            "all",
            entry["within"] == entry["steps"],
        )
        for entry in measured["held_out"]
    }
    rows |= {
        identifier(entry["label"]): row(
            f"{entry['label']}: estimated seconds (error); the goal is the measured step",
            f"{entry['estimated']:.4g} ({entry['error']:+.0%})",
            f"{entry['measured']:g}",
        )
        for entry in measured["measured"]
    }
    return rows


# The tasks of `bench_data --baseline`, and the largest allowed ratio of CPU times.
AGAINST_BASELINE = {
    "dump": ("preparing the first 4 MiB of a ShareGPT dump", 1.5),
    "fixtures": ("preparing the quickstart's data", 1.05),
    "import": ("python -c 'import train'", 1.05),
    "help": ("train.py --help", 1.05),
}


def preparation(out: Path) -> Rows:
    measured = read_json(out / "baseline.json")
    rows: Rows = {}
    for name, (what, goal) in AGAINST_BASELINE.items():
        pairs = measured["seconds"][name]
        ratios = [pair["this"] / pair["baseline"] for pair in pairs]
        ratio, seconds = statistics.median(ratios), statistics.median(p["this"] for p in pairs)
        rows[name] = row(
            f"{what}: CPU time relative to commit {measured['baseline']}, median of {len(pairs)} "
            "pairs",
            f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), {seconds:.2f} s",
            f"{goal}x",
            ratio <= goal,
        )
    return rows


def dirty_data(out: Path) -> Rows:
    measured = read_json(out / "data" / "bench_data.json")
    peaks, speed = measured["peak_mib_at_each_tenth"], measured["megabytes_per_cpu_second"]
    padding = [entry["padding_percent"] for entry in measured["packing"]]
    records, not_human = measured["complete_records"], measured["first_turn_is_not_human"]
    return {
        "records": row(
            "ShareGPT dump: complete records, all accounted for",
            f"{records:,}",
            "17,671",
            records == 17_671 and measured["every_record_accounted_for"],
        ),
        "not_human": row(
            "ShareGPT dump: records of two or more turns whose first is not human",
            f"{not_human:,}",
            "6,258",
            not_human == 6_258,
        ),
        "speed": row(
            "ShareGPT dump: cleaning without a language filter, MB per CPU second",
            f"{speed:.0f}",
            "20",
            speed >= 20,
        ),
        "memory": row(
            "ShareGPT dump: peak MiB while reading the first and the last tenth",
            f"{peaks[0]} and {peaks[-1]}",
            "flat",
            peaks[-1] <= 1.1 * peaks[0],
        ),
        "padding": row(
            "ShareGPT dump: padding in rows of 16,384 and of 131,072 tokens",
            " and ".join(f"{share:.2f}%" for share in padding),
            "2%",
            max(padding) <= 2,
        ),
    }


def quickstart(out: Path) -> Rows:
    """Reads the run's losses and evaluation, and the command's duration."""
    run = out / "run"
    lines = read_lines(run / "held_out.jsonl")
    before, after = (lines[i]["held_out_loss_nats_per_target"] for i in (0, -1))
    seconds = sum(read_json(out / "progress.json")["seconds"])
    (score,) = read_json(run / "evaluation" / "results.json")["within_trained_length"]
    return {
        "time": row(
            "quickstart after the install: train, evaluate, export",
            f"{seconds // 60:.0f} min {seconds % 60:.0f} s",
            "6 min",
            seconds <= 360,
        ),
        "loss": row(
            "quickstart: held-out loss, nats per target token",
            f"{before:.2f} -> {after:.2f}",
            "falls",
            after < before,
        ),
        "retrieval": row(
            f"quickstart: line retrieval, {score['num_lines']} lines, {score['cases']} unseen "
            "cases",
            f"{score['right']} of {score['cases']} ({score['low']:.0%} to {score['high']:.0%})",
            f"95% interval above {score['chance']:.0%}",
            score["low"] > score["chance"],
        ),
    }


def shared_prompts(out: Path) -> Rows:
    """Reads the figures of a pair with its prompt computed twice, and once."""
    ids = {
        "tokens of the row": "tokens",
        "TFLOPs of a step": "flops",
        "MiB of temporaries": "memory",
        "MiB received": "received",
    }
    return {
        ids[name]: row(
            f"a prompt of 3,072 tokens, two completions of 256: {name}, prompt computed twice -> "
            "once",
            f"{twice:,.1f} -> {once:,.1f}, {1 - once / twice:.1%} less",
            "fewer",
            once < twice,
        )
        for name, (twice, once) in read_json(out / "figures.json").items()
    }


def identity(out: Path) -> Rows:
    """Reads the logs and answers of the full recipe, LoRA and QLoRA."""

    def named(name: str) -> int:
        return read_json(out / f"{name}.json")["named"]

    asked = len(QUESTIONS)
    what, before = "SmolLM2's answers that name Vicuna", named("before")
    rows = {
        "before": row(f"{what}, before training", f"{before} of {asked}", "at most 8", before <= 8)
    }
    for name, title in (("full", "all weights"), ("lora", "LoRA"), ("qlora", "QLoRA (NF4)")):
        steps = read_lines(out / name / "metrics.jsonl")[-1]["step"]
        rows[name] = row(
            f"{what}, after {steps} steps with {title}",
            f"{named(name)} of {asked}",
            "at least 32",
            named(name) >= 32,
        )
    return rows


def exactness(out: Path) -> Rows:
    """Runs each row's pytest command, which writes its largest errors (tests/errors.py).

    If a test reports several kinds of errors, the row's `error` names one. Tests that compare bytes
    or ids report no errors; their row gives the number of passed tests.
    """
    seen: dict[str, dict] = {}
    rows = load("exactness").rows
    for cells in rows.values():
        command = cells["command"]
        if command not in seen:
            seen[command] = _errors_of(command, out / f"{len(seen)}.json")
        cells.update(commit=commit(), **_found(cells, seen[command]))
        cells.pop("date", None)
    return rows


def _errors_of(command: str, file: Path) -> dict:
    """Returns a pytest command's errors, and whether all its tests passed.

    Reuses those written by an interrupted measurement.
    """
    if file.exists():
        return read_json(file)
    print(f"\n$ {command}", flush=True)
    errors = file.with_suffix(".errors")
    arguments = [sys.executable, "-m", *shlex.split(command), "--errors", str(errors)]
    status = subprocess.run(arguments, check=False).returncode
    written = read_json(errors) if errors.exists() else {"passed": 0, "errors": {}}
    write_json(file, {**written, "status": status})
    return read_json(file)


def _found(cells: dict[str, str], seen: dict) -> dict[str, str]:
    """Returns a row's figure and verdict from its command's output."""
    kinds = [cells["error"]] if "error" in cells else list(seen["errors"])
    errors = [seen["errors"][kind] for kind in kinds]
    failed = bool(seen["status"]) or not seen["passed"]
    if failed:
        found = "fails"
    elif errors:
        largest, cases = max(x["largest"] for x in errors), sum(x["cases"] for x in errors)
        digits, _, exponent = f"{largest:.1e}".partition("e")
        found = f"{digits}e{int(exponent)}" if largest else "0"
        found += f", {cases:,} comparisons"
    else:
        found = f"holds, {seen['passed']:,} test{'s' * (seen['passed'] > 1)}"
    verdict = ("short" if failed else "held") if cells["goal"] else "no goal"
    return {"found": found, "verdict": verdict}
