"""What a training step takes on a pod that is not there: compiles the step that train.py runs, by the real compiler.

    python -m scripts.plan --model llama-7b --topology v4:4x4x4 --context 1048576
    python -m scripts.plan --model llama-7b --topology v5e:16x16 --context 1048576 --search --output plan
    python -m scripts.plan --config configs/sharegpt_llama7b_1m.yaml --model llama-7b --topology v4:4x4x4

With --config a recipe's context, mesh and memory are planned; what stands beside it wins. With --search it doubles the context,
under the remat policies from the fastest to the one that keeps least, until none fits; with --best it tries meshes, schedules
and policies in the order of their estimated time, and takes the first that fits.
Memory and collectives are the compiler's own; step time, MFU, hours and money are estimates of the cost model.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def parse(argv):
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", help="a recipe: its context, mesh, batch, schedule, layout and remat are planned")
    parser.add_argument("--model", required=True, help="a preset, such as llama-7b")
    parser.add_argument("--topology", required=True, help="such as v4:4x4x4, 2xv5e:16x16 (2 slices), h100:8, "
                        "a100:4x8 (4 hosts of 8)")
    parser.add_argument("--context", type=int, required=True, help="tokens in a row; with --search the first one tried")
    parser.add_argument("--mesh", default="", help="such as fsdp=8,sequence=8 or tensor=8,sequence_parallel=1; "
                        "all devices on sequence unless given")
    parser.add_argument("--batch", type=int, default=1, help="rows (default 1)")
    parser.add_argument("--schedule", default="ring", help="see model.attention (default ring)")
    parser.add_argument("--layout", default="striped", help="for the estimates (default striped)")
    parser.add_argument("--remat", default="save_attention", help="what layers keep for the backward (default save_attention)",
                        choices=["nothing", "save_attention", "offload", "every_k", "offload_every_k", "everything"])
    parser.add_argument("--every-k", type=int, default=2, help="layers between the inputs that the remats of this name keep")
    parser.add_argument("--moments-on-host", action="store_true", help="the optimizer's moments lie in the host's memory")
    parser.add_argument("--parameters-on-host", action="store_true", help="so do the parameters")
    parser.add_argument("--attention-groups", type=int, default=1, help="groups of heads that attend one after the other "
                        "(default 1); 0: a group for each key head of a device")
    parser.add_argument("--prefetch", action="store_true", help="the next layer's weights arrive while a layer runs")
    parser.add_argument("--query-chunks", type=int, default=1, help="chunks of a device's tokens that go through a layer one "
                        "after the other (default 1)")
    parser.add_argument("--best", action="store_true", help="chooses mesh, schedule and policy too: of those that fit the one "
                        "that the cost model thinks fastest")
    parser.add_argument("--search", action="store_true", help="the longest context that fits, and the policy (with --best also "
                        "mesh and schedule) that holds it")
    parser.add_argument("--tokens", type=float, help="tokens to train on: adds hours")
    parser.add_argument("--price-per-device-hour", type=float, help="adds money to the hours")
    parser.add_argument("--output", help="also write the plan to this JSON file; with --search to this folder, with a picture")
    argv = sys.argv[1:] if argv is None else list(argv)
    recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe.add_argument("--config")
    return parser.parse_args([*of_recipe(recipe.parse_known_args(argv)[0].config), *argv])


def of_recipe(path: str | None) -> list[str]:
    """The arguments that a recipe stands for. Raises UserError for one that is wrong, or that no plan can be made of."""
    if path is None:
        return []
    from data.errors import UserError
    from model.llama import Chunks
    from trainer.config import load

    # What a plan does not ask for, and a recipe may leave to the command line.
    config = load(["--config", path, "--model.path", "any", "--data.path", "any"])
    mesh, memory, attention = config.mesh, config.memory, config.attention
    chunks = Chunks(memory.projection_chunk, memory.feed_forward_chunk, memory.loss_chunk)
    if chunks != Chunks() or not isinstance(attention.schedule, str):
        raise UserError(f"{path}: planned are {Chunks()} and schedules without options, not {chunks}, {attention.schedule}")
    axes = {**{axis: getattr(mesh, axis) for axis in ("data", "fsdp", "tensor", "sequence")},
            **{f"dcn.{axis}": factor for axis, factor in mesh.dcn.items()}, "sequence_parallel": int(mesh.sequence_parallel)}
    return ["--context", str(config.data.context_length), "--batch", str(config.train.batch_size),
            "--mesh", ",".join(f"{axis}={size}" for axis, size in axes.items()), "--schedule", attention.schedule,
            "--layout", attention.layout, "--remat", memory.remat, "--every-k", str(memory.every_k),
            "--attention-groups", str(memory.attention_groups), "--query-chunks", str(memory.query_chunks),
            *(["--prefetch"] if memory.prefetch else []),
            *(["--moments-on-host"] if memory.moments_on_host else []),
            *(["--parameters-on-host"] if memory.parameters_on_host else [])]


def mesh_of(text: str):
    """fsdp=8,sequence=8 -> MeshConfig; dcn.data=2 is a factor of mesh.dcn; None for nothing."""
    from trainer.schema import MeshConfig

    axes = dict(part.split("=") for part in text.split(",") if part)
    try:
        dcn = {axis.removeprefix("dcn."): int(axes.pop(axis)) for axis in list(axes) if axis.startswith("dcn.")}
        return MeshConfig(**{axis: int(size) for axis, size in axes.items()}, dcn=dcn) if axes else None
    except (TypeError, ValueError):
        raise ValueError(f"--mesh: found {text!r}; write axis=size,... with data, fsdp, tensor, sequence") from None


def estimates(plan: dict, job, args) -> dict:
    """What the cost model says of a planned job; nothing where it does not know the hardware."""
    found = job.estimate(args.layout)
    if found is None:
        return {}
    told = {"estimated_step_seconds": found.seconds, "estimated_mfu": found.mfu,
            "estimated_exposed_seconds": found.step.exposed, "estimated_tokens_per_second": found.tokens_per_second}
    if args.tokens:
        told["estimated_hours"] = args.tokens / found.tokens_per_second / 3600
        if args.price_per_device_hour:
            told["estimated_cost"] = told["estimated_hours"] * plan["devices"] * args.price_per_device_hour
    return told


def show(plan: dict) -> None:
    """A plan as a table."""
    plan = dict(plan)
    for kind, figures in (plan.pop("communication") or {}).items():
        print(f"{kind:28} {figures['times']:,.0f} times, {figures['received_gib']:.3f} GiB received, "
              f"{figures['hidden']:.1%} of it beside compute")
    for name, value in plan.items():
        print(f"{name:28} {value:,.3f}" if isinstance(value, float) else f"{name:28} {value}")


def draw(tries: list[dict], plan: dict, path: Path) -> None:
    """Memory against context, one line a policy; what did not fit is hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for remat in dict.fromkeys(row["remat"] for row in tries):
        rows = [row for row in tries if row["remat"] == remat and row["gib"] == row["gib"]]
        line, = axes.plot([row["context"] for row in rows], [row["gib"] for row in rows], label=remat)
        for row in rows:
            axes.plot(row["context"], row["gib"], "o", color=line.get_color(), fillstyle="full" if row["fits"] else "none")
    if plan["device_gib"]:
        axes.axhline(plan["device_gib"], color="black", linestyle="--", linewidth=1, label="a device has")
    axes.set_xscale("log", base=2)
    contexts = sorted({row["context"] for row in tries})
    axes.set_xticks(contexts, [f"{x >> 20}M" if x >= 1 << 20 else f"{x >> 10}K" for x in contexts], minor=False)
    axes.set(xlabel="tokens in a row", ylabel="GiB a device", ylim=(0, None), title=f"{plan['model']} on {plan['topology']} "
             "(hollow: does not fit)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def run(args) -> int:
    """One plan, or a search for the best or the longest."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from trainer.plan import DoesNotFit, Job, plan

    job = Job(args.model, args.topology, args.context, args.batch, mesh_of(args.mesh), args.schedule, args.remat, args.every_k,
              args.moments_on_host, args.attention_groups, args.parameters_on_host, args.query_chunks, args.prefetch)
    try:
        job, found, rest = searched(job, args) if args.search or args.best else (job, plan(job), {})
    except DoesNotFit as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return 1
    found |= estimates(found, job, args)
    show(found)
    if args.output and args.search:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps({"longest": found, **rest}, indent=2) + "\n", encoding="utf-8")
        draw(rest["tries"], found, folder / "plan.png")
    elif args.output:
        Path(args.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def searched(job, args):
    """The longest job (or with --best alone the best of its context), its plan, and what else was found on the way."""
    from trainer.plan import DoesNotFit
    from trainer.plan_search import policies, search, ways

    tries = []

    def on_try(job, result):
        fits = not isinstance(result, DoesNotFit)
        tries.append({"context": job.context, "mesh": job.axes, "schedule": str(job.schedule), "remat": job.policy,
                      "fits": fits, "gib": result["peak_gib"] if fits else result.needs_gib})
        print(f"{job.context:12,} tokens  {job.axes}  {job.schedule}  {job.policy:17} "
              f"{'fits' if fits else 'does not fit'}: {tries[-1]['gib']:.2f} GiB", flush=True)

    most = {} if args.search else {"most": job.context}
    longest, best, refusal = search(job, ways if args.best else policies, on_try, **most)
    if longest is None:
        raise refusal or ValueError("--best: no mesh of these devices suits this length")
    print()
    return longest, best, {"next": None if refusal is None else str(refusal), "tries": tries}


def main(argv=None) -> int:
    """Prints the plan as a table; 1 where it does not fit, 2 where it cannot be asked."""
    from data.errors import UserError

    try:
        return run(parse(argv))
    except (ValueError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
