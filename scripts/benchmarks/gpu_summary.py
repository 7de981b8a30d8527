"""The rows of `gpu` and `gpu_steps`: one NVIDIA GPU compared with peers and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.benchmarks.bench_kernels.block import DOCUMENTS
from scripts.benchmarks.commands import read_json, tokens_text
from scripts.benchmarks.kernel_exactness import LIMITS, RESULTS
from scripts.benchmarks.results import row
from scripts.benchmarks.summaries import Rows

FORWARD, BACKWARD = 600, 480  # goals in TFLOP/s on an H200, at 32K to 128K tokens
PEERS = 0.9  # of the fastest peer's rate
PACKED = 0.9  # of a causal row's rate: packed rows within 10% of it
MFU = 0.6
SPEED = 1.1  # relative to transformers with Liger, with at most its memory
# bench_kernels' kinds of blocks, in the words of the page.
BLOCKS = {"diagonal": "causal", "full": "unmasked", "packed": f"{DOCUMENTS} packed documents"}


def gpu(out: Path) -> Rows:
    """Returns the rows from the files in `out`."""
    return _exactness(out) | _parts(out) | _kernels(out) | _steps(out)


def _exactness(out: Path) -> Rows:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for folder in ("exactness", "long"):
        for case in read_json(out / folder / "kernel_exactness.json")["rows"]:
            groups.setdefault((case["kernel"], case["dtype"]), []).append(case)
    rows = {}
    for (kernel, dtype), cases in groups.items():
        held = sum(case["held"] for case in cases)
        compared = [name for name in RESULTS if name != "lse"]
        worst = max(case[name] for case in cases for name in compared if name in case)
        rows[f"exact_{kernel}_{dtype}"] = row(
            f"kernel {kernel}, {dtype}: largest error relative to float64",
            f"{worst:.1e} in {held} of {len(cases)} cases",
            f"{LIMITS[dtype]['other']:.0e} in all",
            held == len(cases),
        )
    return rows


def _parts(out: Path) -> Rows:
    kernels = read_json(out / "parts" / "kernel_parts.json")["rows"]
    of_128 = {kernel["kernel"]: kernel for kernel in kernels if kernel["head_dim"] == 128}
    forward = of_128["forward"]
    seconds = of_128["dq"]["seconds"] + of_128["dkv"]["seconds"]
    # Five products backward, as others count; our kernels for dq and for dk and dv compute seven.
    backward = 5 / 2 * forward["tflops"] * forward["seconds"] / seconds
    length = tokens_text(forward["length"])
    return {
        "part_forward": row(
            f"forward kernel alone, {length} tokens, heads of 128: TFLOP/s",
            f"{forward['tflops']:.0f}",
            str(FORWARD),
            forward["tflops"] >= FORWARD,
        ),
        "part_backward": row(
            f"backward kernels alone, {length} tokens, heads of 128: TFLOP/s, counting five "
            "products",
            f"{backward:.0f}",
            str(BACKWARD),
            backward >= BACKWARD,
        ),
    }


def _kernels(out: Path) -> Rows:
    rates = {
        (line["length"], line["block"], line["pass"], line["peer"]): line["tflops"]
        for line in read_json(out / "kernels" / "bench_kernels.json")["rows"]
        if "seconds" in line
    }
    rows = {}
    for (length, block, direction, peer), ours in rates.items():
        if peer != "ours":
            continue
        case = length, block, direction
        share = ours / max(rates[key] for key in rates if key[:3] == case and key[3] != "ours")
        short, words = direction.partition("+")[2] or direction, direction.replace("+", " + ")
        rows[f"{block}_{short}_{length}"] = row(
            f"attention, {tokens_text(length)} tokens, {BLOCKS[block]}, {words}: TFLOP/s, share of "
            "the fastest peer's",
            f"{ours:.0f}, {share:.0%}",
            f"{PEERS:.0%}",
            share >= PEERS,
        )
        if block == "packed":
            relative = ours / rates[length, "diagonal", direction, "ours"]
            rows[f"packed_over_causal_{short}_{length}"] = row(
                f"attention, {tokens_text(length)} tokens, {words}: rate on packed rows relative "
                "to a causal row",
                f"{relative:.0%}",
                f"{PACKED:.0%}",
                relative >= PACKED,
            )
    return rows


def _steps(out: Path) -> Rows:
    rows, differences = {}, []
    for path in sorted(out.glob("step_*/step.json")):
        (step,) = read_json(path)
        differences.append(abs(step["planned_gib"] / step["device_gib"] - 1))
        rows[path.parent.name] = row(
            f"training step, {tokens_text(step['length'])} tokens, {step['layers']} layers of "
            f"LLaMA-3.1-8B, remat {step['remat']}, kernel {step['kernel']}: tokens/s, MFU",
            f"{step['tokens_per_second']:,.0f}, {step['mfu']:.0%}",
            f"{MFU:.0%}",
            step["mfu"] >= MFU,
        )
    rows["plans"] = row(
        f"memory of {len(differences)} steps: largest difference between measured and planned",
        f"{max(differences):.2%}",
    )
    return rows


def gpu_steps(out: Path) -> Rows:
    """Returns the rows of whole steps, from `*/step.json` in `out`."""
    rows = {}
    for path in sorted(out.glob("*/step.json")):
        sides = read_json(path)
        ours = next(step for step in sides if step["side"] == "ours")
        peers = [step for step in sides if step["side"] == "theirs"]
        speed = f"{ours['tokens_per_second']:,.0f}"
        if not peers:
            what, figure = f"{_step_text(ours)}: tokens/s, MFU", f"{speed}, {ours['mfu']:.1%}"
            rows[path.parent.name] = row(what, figure, f"{MFU:.0%}", ours["mfu"] >= MFU)
            continue
        fastest = max(peers, key=lambda step: step["tokens_per_second"])
        ratio, memory = (ours[name] / fastest[name] for name in ("tokens_per_second", "device_gib"))
        rows[path.parent.name] = row(
            f"{_step_text(ours)}: tokens/s, relative to transformers + Liger; memory relative to "
            "theirs",
            f"{speed}, {ratio:.2f}x; {memory:.2f}x",
            f"{SPEED}x; 1x",
            ratio >= SPEED and memory <= 1,
        )
    return rows


def _step_text(step: dict) -> str:
    documents = f", {step['documents']} documents" if step["documents"] > 1 else ""
    layers = f"{step['layers']} layers of " if step["layers"] else ""
    tokens = f"{tokens_text(step['length'])} tokens{documents}"
    return f"training step, {layers}{step['model']}, {tokens}, remat {step['remat']}"
