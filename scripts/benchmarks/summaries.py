"""Makes results' rows and tables from the commands' files: a function for each result.

Each takes the folder of a measurement's files and returns (rows, tables), as in `Result`.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from model.adapter import ADAPTER_PARTS
from scripts.benchmarks.commands import read_json, tokens_text
from scripts.benchmarks.results import commit, load, row, table

Rows = dict[str, dict[str, str]]
Tables = dict[str, dict[str, list]]


def identifier(text: str) -> str:
    """Returns a text as a row id: lower case, with _ for what is neither a letter nor a digit."""
    return "".join(letter if letter.isalnum() else "_" for letter in text.lower())


def step(out: Path) -> tuple[Rows, Tables]:
    measured = {(entry["side"], entry["length"]): entry for entry in read_json(out / "step.json")}
    rows: Rows = {}
    for length, goal in ((2048, 1.15), (4096, 1.5)):
        ours, theirs = measured["ours", length], measured["theirs", length]
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        rows[f"speed_{length}"] = row(
            f"training step, {length:,} tokens: tokens/s over torch's",
            f"{ratio:.3f}x",
            f"{goal}x",
            ratio >= goal,
        )
        rows[f"memory_{length}"] = row(
            f"training step, {length:,} tokens: peak GiB (torch {theirs['peak_gib']:.2f})",
            f"{ours['peak_gib']:.2f}",
            "at most torch's",
            ours["peak_gib"] <= theirs["peak_gib"],
        )
    lines = [
        [
            f"{length:,}",
            "torch" if side == "theirs" else "ours, remat everything",
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['step_seconds']:.2f}",
            f"{entry['peak_gib']:.2f}",
            f"{entry['share_of_matmul']:.1%} of {entry['matmul_gflops']:.0f} GFLOP/s",
        ]
        for (side, length), entry in measured.items()
    ]
    return rows, {
        "steps": table(
            "tokens | side | tokens/s | seconds a step | peak GiB | share of the best "
            "matrix-product rate",
            lines,
        )
    }


def kernels(out: Path) -> tuple[Rows, Tables]:
    measured = {
        (entry["length"], entry["pass"], entry["peer"]): entry
        for entry in read_json(out / "kernels" / "bench_kernels.json")["rows"]
        if "seconds" in entry
    }
    rows, lines = {}, []
    for length in (8192, 16384):
        for name, short in (("forward", "forward"), ("forward+backward", "both")):
            ours, theirs = (measured[length, name, peer] for peer in ("ours", "torch-sdpa"))
            spelled, ratio = name.replace("+", " + "), theirs["seconds"] / ours["seconds"]
            rows[f"{short}_{length}"] = row(
                f"attention kernel, {length:,} tokens, {spelled}: speed over torch",
                f"{ratio:.2f}x",
                "0.9x",
                ratio >= 0.9,
            )
            lines.append(
                [
                    f"{length:,}",
                    spelled,
                    f"{1e3 * ours['seconds']:,.0f}",
                    f"{1e3 * theirs['seconds']:,.0f}",
                    f"{ratio:.2f}x",
                    f"{ours['peak_mib']:.0f}",
                    f"{theirs['peak_mib']:.0f}",
                ]
            )
        rows[f"memory_{length}"] = row(
            f"attention kernel, {length // 1024}K, forward + backward: peak MiB (torch "
            f"{theirs['peak_mib']:.0f})",
            f"{ours['peak_mib']:.0f}",
            "at most torch's",
            ours["peak_mib"] <= theirs["peak_mib"],
        )
    return rows, {
        "times": table(
            "tokens | pass | ours ms | torch ms | ours is | ours peak MiB | torch peak MiB", lines
        )
    }


# Row id: schedule as printed, layouts, words, largest allowed imbalance for P ranks.
BALANCE_GOALS = {
    "ring_contiguous": ("ring", ("contiguous",), "ring, contiguous", lambda ranks: 2 - 1 / ranks),
    "ring_striped": ("ring", ("striped", "zigzag"), "ring, striped and zigzag", lambda ranks: 1.07),
    "balanced": (
        "balanced",
        ("contiguous",),
        "balanced, contiguous",
        lambda ranks: ranks / (ranks - 1),
    ),
    "balanced_split": (
        str({"name": "balanced", "split": True}),
        ("contiguous",),
        "balanced, split, contiguous",
        lambda ranks: 1.05,
    ),
}
BALANCE_GOAL_TEXT = {
    "ring_contiguous": "2 - 1/P",
    "ring_striped": "1.07",
    "balanced": "P / (P - 1)",
    "balanced_split": "1.05",
}


def balance(out: Path) -> tuple[Rows, Tables]:
    measured, rows = read_json(out / "balance.json"), {}
    for row_id, (schedule, layouts, words, allowed) in BALANCE_GOALS.items():
        entries = [
            entry
            for entry in measured
            if entry["schedule"] == schedule and entry["layout"] in layouts
        ]
        worst: dict[int, float] = {}
        for entry in entries:
            imbalance = max(entry[direction]["imbalance"] for direction in ("forward", "backward"))
            worst[entry["ranks"]] = max(worst.get(entry["ranks"], 0.0), imbalance)
        rows[row_id] = row(
            f"{words}: imbalance at P = {'; '.join(map(str, worst))}",
            "; ".join(f"{imbalance:.4f}" for imbalance in worst.values()),
            BALANCE_GOAL_TEXT[row_id],
            all(imbalance <= allowed(ranks) for ranks, imbalance in worst.items()),
        )
    lines = [
        [
            entry["schedule"],
            entry["layout"],
            str(entry["ranks"]),
            *(f"{entry[direction]['imbalance']:.4f}" for direction in ("forward", "backward")),
        ]
        for entry in measured
    ]
    return rows, {"imbalance": table("schedule | layout | P | forward | backward", lines)}


def balance_time(out: Path) -> tuple[Rows, Tables]:
    measured = {
        (entry["case"], entry["length"], entry["tiles"]): entry
        for file in ("time.json", "time_32.json")
        for entry in read_json(out / file)
    }

    def row_of(case: str, tiles: int, goal: float | None, of_bound: bool = False) -> dict[str, str]:
        entry = measured[case, 16384, tiles]
        share = entry["speedup"] / entry["bound"]
        if of_bound:
            return row(
                f"{case} at 16K, {tiles} tiles, of the bound ({entry['speedup']:.3f} of "
                f"{entry['bound']:.3f})",
                f"{share:.1%}",
                f"{goal:.0%}",
                share >= goal,
            )
        return row(
            f"{case}, over contiguous ring at 16K, {tiles} tiles (bound {entry['bound']:.3f})",
            f"{entry['speedup']:.3f}",
            str(goal or ""),
            None if goal is None else entry["speedup"] >= goal,
        )

    rows = {
        "striped_16384": row_of("striped ring", 16, 0.95, of_bound=True),
        "striped_32_tiles": row_of("striped ring", 32, 0.95, of_bound=True),
        "zigzag_16384": row_of("zigzag ring", 16, None),
        "balanced_16384": row_of("balanced, split", 16, 1.3),
        "balanced_32_tiles": row_of("balanced, split", 32, 1.3),
    }
    lines = [
        [case, f"{length:,}", str(tiles), f"{entry['speedup']:.3f}", f"{entry['bound']:.3f}"]
        for (case, length, tiles), entry in measured.items()
    ]
    return rows, {
        "speedup": table("over the contiguous ring | tokens | tiles | speed-up | bound", lines)
    }


def bytes_received(out: Path) -> tuple[Rows, Tables]:
    unit = 2048 * 32 * 128 * 2  # a device's own q: 2048 tokens, 32 heads of 128, bfloat16
    deviations: dict[str, dict[int, float]] = {}
    lines = []
    for entry in read_json(out / "bytes.json"):
        line = [entry["schedule"], str(entry["ranks"])]
        for direction in ("forward", "backward"):
            got = entry[direction]
            off = max(
                abs(got[f"{kind}_bytes"] / got[f"planned_{kind}_bytes"] - 1)
                for kind in ("max", "mean")
            )
            by_ranks = deviations.setdefault(entry["schedule"], {})
            by_ranks[entry["ranks"]] = max(by_ranks.get(entry["ranks"], 0.0), off)
            line += [
                f"{got['max_bytes'] / unit:.3f}",
                f"{got['mean_bytes'] / unit:.3f}",
                f"{off:.1%}",
            ]
        lines.append(line)
    rows = {
        identifier(name): row(
            f"{name}, P = {', '.join(map(str, by_ranks))}: bytes off the formula",
            f"{max(by_ranks.values()):.1%}",
            "2%",
            max(by_ranks.values()) <= 0.02,
        )
        for name, by_ranks in deviations.items()
    }
    return rows, {
        "received": table(
            "schedule | P | forward max | forward mean | off | backward max | backward mean | off",
            lines,
        )
    }


def overlap(out: Path) -> tuple[Rows, Tables]:
    rows, lines = {}, []
    measured = read_json(out / "overlap.json")
    for name in dict.fromkeys(entry["schedule"] for entry in measured):
        exposed = {}
        for backward in (False, True):
            transfers = [
                entry
                for entry in measured
                if entry["schedule"] == name
                and entry["backward"] == backward
                and entry["kind"] == "collective-permute"
            ]
            bare = [entry for entry in transfers if not entry["kernels"]]
            exposed[backward] = (
                f"{sum(entry['times'] for entry in bare):.0f} of "
                f"{sum(e['times'] for e in transfers):.0f}"
            )
            lines += [
                [
                    name,
                    "backward" if backward else "forward",
                    f"{entry['times']:.0f}",
                    f"{entry['nbytes']:,}",
                    ", ".join(entry["products"]) or "nothing",
                ]
                for entry in bare
            ]
        none_exposed = all(count.startswith("0 ") for count in exposed.values())
        goal = ("nothing", none_exposed) if name == "balanced split" else ("", None)
        rows[identifier(name)] = row(
            f"{name}: permutes behind no kernel, forward; backward",
            f"{exposed[False]}; {exposed[True]}",
            *goal,
        )
    return rows, {"exposed": table("schedule | direction | times | bytes | behind", lines)}


def activation_memory(out: Path) -> tuple[Rows, Tables]:
    measured = read_json(out / "activation_memory.json")
    lines = [
        [entry["topology"], str(entry["devices"]), f"{entry['activations_mib']:.1f}"]
        for entry in measured["rows"]
    ]
    return (
        {
            "spread": row(
                "activations at fixed tokens a chip, 8 to 512 chips: spread",
                f"{measured['spread']:.2%}",
                "2%",
                measured["spread"] <= 0.02,
            )
        },
        {"activations": table("topology | devices | MiB", lines)},
    )


def papers(out: Path) -> tuple[Rows, Tables]:
    """The numbers that the cost model claims to reproduce by paper, and all errors by table."""
    measured, rows = read_json(out / "papers" / "papers.json"), {}
    for source, counts in measured["summary"].items():
        claimed, reproduced = counts["claimed"], counts["claimed and reproduced"]
        if source == "Striped Attention":
            rows["striped_bounds"] = row(
                "Striped Attention Tables 3-5, A: theoretical speed-ups, 2 decimals",
                f"{reproduced} of {claimed}",
                "133",
                reproduced == 133,
            )
        elif claimed:
            rows[identifier(source)] = row(
                f"{source}: numbers that the model claims to reproduce",
                f"{reproduced} of {claimed}",
                "all",
                reproduced == claimed,
            )
    errors: dict[tuple[str, str, bool], list[float]] = {}
    for entry in measured["rows"]:
        if entry["error"] is not None:
            errors.setdefault(
                (entry["source"], entry["place"], bool(entry["set_afterwards"])), []
            ).append(entry["error"])
    for (source, place, afterwards), values in errors.items():
        mark = "; a constant set later" * afterwards
        rows[identifier(f"{source} {place}{' afterwards' * afterwards}")] = row(
            f"{source}, {place}: error of {len(values)} numbers{mark}",
            f"{min(values):+.1%} to {max(values):+.1%}",
        )
    lines = [
        [
            entry["source"],
            entry["place"],
            entry["row"],
            f"{entry['paper']:.5g}",
            f"{entry['predicted']:.5g}",
            f"{entry['error']:+.1%}",
            entry["set_afterwards"],
        ]
        for entry in measured["rows"]
        if entry["error"] is not None
    ]
    return rows, {
        "rows": table(
            "paper | table | row | paper's | predicted | error | constants set after the "
            "row was seen",
            lines,
        )
    }


def measured_steps(out: Path) -> tuple[Rows, Tables]:
    """Our ranges on two machines, then each measured step with our estimate's error."""
    measured = read_json(out / "measured_steps.json")
    rows = {
        identifier(f"ours {entry['machine']} {tokens_text(entry['length'])}"): row(
            f"{entry['machine']}, {tokens_text(entry['length'])} tokens",
            f"{entry['low']:.3g} to {entry['high']:.3g}",
            "; ".join(entry["peers"]) or "nothing found",
        )
        for entry in measured["ours"]
    }
    rows |= {
        identifier(entry["label"]): row(
            f"{entry['label']}, s",
            f"{entry['estimated']:.4g} ({entry['error']:+.0%})",
            f"{entry['measured']:g}",
        )
        for entry in measured["measured"]
    }
    lines = [
        [
            entry["label"],
            entry["source"],
            f"{entry['measured']:g}",
            f"{entry['estimated']:.4g}",
            f"{entry['error']:+.1%}",
            f"{entry['low']:.4g}",
            f"{entry['high']:.4g}",
            f"{entry['over_full_rate']:.2f}",
        ]
        for entry in measured["measured"]
    ]
    return rows, {
        "steps": table(
            "step | source | measured, s | estimated, s | error | low, s | high, s | "
            "measured over full rate",
            lines,
        )
    }


def dirty_data(out: Path) -> tuple[Rows, Tables]:
    measured = read_json(out / "data" / "bench_data.json")
    peaks, speed = measured["peak_mib_at_each_tenth"], measured["megabytes_per_second"]
    padding = [entry["padding_percent"] for entry in measured["packing"]]
    padding_text = " and ".join(f"{share:.2f}%" for share in padding)
    return {
        "records": row(
            "dirty dump: whole records, all accounted for",
            f"{measured['complete_records']:,}",
            "17,671",
            measured["complete_records"] == 17_671 and measured["every_record_accounted_for"],
        ),
        "not_human": row(
            "of them: two turns or more, the first not human",
            f"{measured['first_turn_is_not_human']:,}",
            "6,258",
            measured["first_turn_is_not_human"] == 6_258,
        ),
        "speed": row(
            "dirty dump: cleaning without a language filter, MB/s",
            f"{speed:.0f}",
            "20",
            speed >= 20,
        ),
        "memory": row(
            "dirty dump: peak MiB in the first and in the last tenth",
            f"{peaks[0]} and {peaks[-1]}",
            "flat",
            peaks[-1] <= 1.1 * peaks[0],
        ),
        "padding": row(
            "dirty dump: padding at 16,384 and at 131,072 tokens",
            padding_text,
            "2%",
            max(padding) <= 2,
        ),
    }, {}


def identity(out: Path) -> tuple[Rows, Tables]:
    """Reads what the full recipe, LoRA and QLoRA logged and answered."""
    before = read_json(out / "before.json")["named"]
    rows = {
        "before": row(
            "SmolLM2's answers that name Vicuna, before",
            f"{before} of 10",
            "at most 2",
            before <= 2,
        )
    }
    lines = []
    for name, title in (("full", "all weights"), ("lora", "LoRA"), ("qlora", "QLoRA (NF4)")):
        named = read_json(out / f"{name}.json")["named"]
        steps, held_out = (
            list(map(json.loads, (out / name / file).read_text(encoding="utf-8").splitlines()))
            for file in ("metrics.jsonl", "held_out.jsonl")
        )
        last = steps[-1]["step"]
        rows[name] = row(
            f"SmolLM2's answers that name Vicuna, after {last} steps: {title}",
            f"{named} of 10",
            "at least 8",
            named >= 8,
        )
        losses = [line["held_out_loss_nats_per_target"] for line in held_out]
        saved = out / name / "checkpoints" / str(last)
        checkpoint = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        shapes = read_json(saved / "manifest.json")["shapes"]
        adapters = {
            parameter: shape
            for parameter, shape in shapes.items()
            if parameter.rpartition(".")[2] in ADAPTER_PARTS
        }
        trained = sum(map(math.prod, (adapters or shapes).values()))
        lines.append(
            [
                title,
                f"{trained:,}",
                f"{losses[0]:.2f} -> {losses[-1]:.2f}",
                f"{named} of 10",
                f"{last}",
                f"{statistics.median(step['step_seconds'] for step in steps):.1f}",
                f"{steps[-1]['peak_host_gib']:.2f}",
                f"{checkpoint / 1e6:,.0f}",
            ]
        )
    return rows, {
        "recipes": table(
            "trained | parameters | held-out loss | name Vicuna | steps | median seconds of "
            "a step | peak GiB of the process | checkpoint, MB",
            lines,
        )
    }


def exactness(out: Path) -> tuple[Rows, Tables]:
    """Runs each row's pytest command, which writes its largest errors (tests/errors.py).

    For tests with several kinds of errors, the row's `error` names its kind. Tests that compare
    bytes or ids have no errors; then the row gives the number of passed tests.
    """
    seen: dict[str, dict] = {}
    rows = load("exactness").rows
    for cells in rows.values():
        command = cells["command"]
        if command not in seen:
            seen[command] = _errors_of(command, out / f"{len(seen)}.json")
        cells.update(commit=commit(), **_found(cells, seen[command]))
        cells.pop("date", None)
    return rows, {}


def _errors_of(command: str, file: Path) -> dict:
    """Returns a pytest command's errors, and whether all its tests passed."""
    print(f"\n$ {command}", flush=True)
    arguments = [sys.executable, "-m", *shlex.split(command), "--errors", str(file)]
    status = subprocess.run(arguments, check=False).returncode
    written = read_json(file) if file.exists() else {"passed": 0, "errors": {}}
    return {**written, "status": status}


def _found(cells: dict[str, str], seen: dict) -> dict[str, str]:
    """Returns the figure and the verdict of a row, from its command's output."""
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
        found = f"holds, {seen['passed']:,} tests"
    verdict = ("short" if failed else "held") if cells["goal"] else "no goal"
    return {"found": found, "verdict": verdict}
