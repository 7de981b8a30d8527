"""The rows and tables of `gpu` and `gpu_steps`: one NVIDIA GPU against peers and plans."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.commands import read_json, tokens_text
from scripts.benchmarks.kernel_exactness import LIMITS, RESULTS
from scripts.benchmarks.results import row, table

Rows = dict[str, dict[str, str]]
Tables = dict[str, dict[str, list]]
FORWARD, BACKWARD = 600, 480  # goals in TFLOP/s on an H200, at 32K to 128K tokens
PEERS = 0.9  # of the fastest peer's rate
PACKED = 0.9  # of a causal row's rate: packed rows within 10% of it
MFU = 0.6
SPEED = 1.1  # of transformers and Liger's, with at most their memory


def gpu(out: Path) -> tuple[Rows, Tables]:
    """Returns the rows and tables from the files in `out`."""
    rows: Rows = {}
    tables: Tables = {}
    for part in (_exactness, _parts, _kernels, _steps):
        part_rows, part_tables = part(out)
        rows |= part_rows
        tables |= part_tables
    return rows, tables


def _exactness(out: Path) -> tuple[Rows, Tables]:
    cases = [
        case
        for folder in ("exactness", "long")
        for case in read_json(out / folder / "kernel_exactness.json")["rows"]
    ]
    rows, lines = {}, []
    for kernel, dtype in dict.fromkeys((case["kernel"], case["dtype"]) for case in cases):
        group = [case for case in cases if (case["kernel"], case["dtype"]) == (kernel, dtype)]
        held = sum(case["held"] for case in group)
        worst = max(
            case[name] for case in group for name in RESULTS if name in case and name != "lse"
        )
        rows[f"exact_{kernel}_{dtype}"] = row(
            f"kernel {kernel}, {dtype}, against float64: largest error",
            f"{worst:.1e} in {held} of {len(group)} cases",
            f"{LIMITS[dtype]['other']:.0e} in all",
            held == len(group),
        )
        lines += [
            [
                kernel,
                dtype,
                str(case["head_dim"]),
                case["case"],
                *(f"{case[name]:.1e}" if name in case else "-" for name in RESULTS),
            ]
            for case in group
        ]
    return rows, {
        "exactness": table(f"kernel | operands | head size | case | {' | '.join(RESULTS)}", lines)
    }


def _parts(out: Path) -> tuple[Rows, Tables]:
    kernels = read_json(out / "parts" / "kernel_parts.json")["rows"]
    seconds = {(kernel["head_dim"], kernel["kernel"]): kernel["seconds"] for kernel in kernels}
    rates = {(kernel["head_dim"], kernel["kernel"]): kernel["tflops"] for kernel in kernels}
    # Five products backward, as others count them: the kernels for dq and for dk and dv make seven.
    backward = (
        5
        * rates[128, "forward"]
        * seconds[128, "forward"]
        / (2 * (seconds[128, "dq"] + seconds[128, "dkv"]))
    )
    length = tokens_text(kernels[0]["length"])
    rows = {
        "part_forward": row(
            f"forward kernel alone, {length}, heads of 128: TFLOP/s",
            f"{rates[128, 'forward']:.0f}",
            str(FORWARD),
            rates[128, "forward"] >= FORWARD,
        ),
        "part_backward": row(
            f"backward kernels alone, {length}, heads of 128: TFLOP/s of five products",
            f"{backward:.0f}",
            str(BACKWARD),
            backward >= BACKWARD,
        ),
    }
    lines = [
        [
            str(kernel["head_dim"]),
            kernel["kernel"],
            f"{kernel['seconds'] * 1e3:.2f}",
            f"{kernel['tflops']:.0f}",
        ]
        for kernel in kernels
    ]
    return rows, {"kernels alone": table("head size | kernel | ms | TFLOP/s", lines)}


def _kernels(out: Path) -> tuple[Rows, Tables]:
    measured = read_json(out / "kernels" / "bench_kernels.json")["rows"]
    seconds = {
        (line["length"], line["block"], line["pass"], line["peer"]): line
        for line in measured
        if "seconds" in line
    }
    rows, lines = {}, []
    for (length, block, name, peer), line in seconds.items():
        lines.append(
            [
                tokens_text(length),
                block,
                name,
                peer,
                f"{line['seconds'] * 1e3:.1f}",
                f"{line['tflops']:.0f}",
            ]
        )
        if peer != "ours":
            continue
        rates = [
            other["tflops"]
            for key, other in seconds.items()
            if key[:3] == (length, block, name) and key[3] != "ours"
        ]
        share = line["tflops"] / max(rates)
        rows[f"{block}_{name.partition('+')[2] or name}_{length}"] = row(
            f"{tokens_text(length)}, {block}, {name.replace('+', ' + ')}: TFLOP/s, of fastest peer",
            f"{line['tflops']:.0f}, {share:.0%}",
            f"{PEERS:.0%}",
            share >= PEERS,
        )
        if block == "packed":
            of_causal = line["tflops"] / seconds[length, "diagonal", name, "ours"]["tflops"]
            rows[f"packed_over_causal_{name.partition('+')[2] or name}_{length}"] = row(
                f"{tokens_text(length)}, {name.replace('+', ' + ')}: packed rows over a causal "
                "row's rate",
                f"{of_causal:.0%}",
                f"{PACKED:.0%}",
                of_causal >= PACKED,
            )
    return rows, {"kernels": table("tokens | block | pass | peer | ms | TFLOP/s", lines)}


def _steps(out: Path) -> tuple[Rows, Tables]:
    rows, lines, differences = {}, [], []
    for path in sorted(out.glob("step_*/step.json")):
        (step,) = read_json(path)
        differences.append(abs(step["planned_gib"] / step["device_gib"] - 1))
        length = tokens_text(step["length"])
        rows[path.parent.name] = row(
            f"step, {length}, {step['layers']} layers of 8B, {step['remat']}, kernel "
            f"{step['kernel']}: tokens/s, MFU",
            f"{step['tokens_per_second']:,.0f}, {step['mfu']:.0%}",
            f"{MFU:.0%}",
            step["mfu"] >= MFU,
        )
        lines.append(
            [
                length,
                str(step["layers"]),
                step["remat"],
                step["kernel"],
                f"{step['step_seconds']:.2f}",
                f"{step['tokens_per_second']:,.0f}",
                f"{step['mfu']:.1%}",
                f"{step['planned_gib']:.2f}",
                f"{step['device_gib']:.2f}",
                f"{step['loss']:.4f}",
            ]
        )
    rows["plans"] = row(
        f"memory of {len(differences)} steps: measured beside planned, the largest difference",
        f"{max(differences):.2%}",
    )
    return rows, {
        "steps": table(
            "tokens | layers | remat | kernel | seconds | tokens/s | MFU | planned GiB | "
            "measured GiB | loss",
            lines,
        )
    }


def gpu_steps(out: Path) -> tuple[Rows, Tables]:
    """Returns the rows and table of whole steps, from `*/step.json` in `out`."""
    rows, lines = {}, []
    for path in sorted(out.glob("*/step.json")):
        sides = read_json(path)
        for step in sides:
            lines.append(
                [
                    step["model"],
                    tokens_text(step["length"]),
                    str(step["documents"]),
                    _side_text(step),
                    f"{step['tokens_per_second']:,.0f}",
                    f"{step['mfu']:.1%}" if step["mfu"] else "-",
                    f"{step['device_gib']:.1f}",
                ]
            )
        ours = next(step for step in sides if step["side"] == "ours")
        peers = [step for step in sides if step["side"] == "theirs"]
        if not peers:
            rows[path.parent.name] = row(
                f"{_step_text(ours)}: tokens/s, MFU",
                f"{ours['tokens_per_second']:,.0f}, {ours['mfu']:.1%}",
                f"{MFU:.0%}",
                ours["mfu"] >= MFU,
            )
            continue
        fastest = max(peers, key=lambda step: step["tokens_per_second"])
        ratio, memory = (ours[name] / fastest[name] for name in ("tokens_per_second", "device_gib"))
        rows[path.parent.name] = row(
            f"{_step_text(ours)}: tokens/s; memory of theirs",
            f"{ours['tokens_per_second']:,.0f}, {ratio:.2f}x; {memory:.2f}x",
            f"{SPEED}x; 1x",
            ratio >= SPEED and memory <= 1,
        )
    return rows, {"steps": table("model | tokens | documents | side | tokens/s | MFU | GiB", lines)}


def _step_text(step: dict) -> str:
    documents = f", {step['documents']} documents" if step["documents"] > 1 else ""
    layers = f"{step['layers']} layers of " if step["layers"] else ""
    return f"{layers}{step['model']}, {tokens_text(step['length'])}{documents}, {step['remat']}"


def _side_text(step: dict) -> str:
    """Returns how one side ran, in a few words."""
    if step["side"] == "ours":
        return f"ours, {step['remat']}"
    words = ["transformers", *(["Liger"] if step["liger"] else []), step["attention"]]
    words += [
        *(["recomputing"] if step["recompute"] else []),
        *(["all in bfloat16"] if step["weights"] == "bfloat16" else []),
    ]
    return ", ".join(words)
