"""What a training step takes on a pod that is not there: compiles the step that train.py runs, by the real compiler.

    python -m scripts.plan --model llama-7b --topology v4:4x4x4 --context 1048576
    python -m scripts.plan --model llama-7b --topology v5e:16x16 --context 1048576 --search --output plan
    python -m scripts.plan --config configs/sharegpt_llama7b_1m.yaml --model llama-7b --topology v4:4x4x4

With --config a recipe is planned; what stands beside it wins. With --search it doubles the context,
under the policies from the fastest to the one that keeps least, until none fits; with --best it tries meshes, schedules
and policies in the order of their estimated time, and takes the first that fits.
Memory and collectives are the compiler's own; step time, MFU, hours and money are estimates of the cost model.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

from model.memory.policies import POLICIES
from trainer.config.yaml_text import parse


def parser() -> argparse.ArgumentParser:
    """The options; what is not given is the recipe's, or as train.py has it."""
    found = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    found.add_argument("--config", help="a recipe")
    found.add_argument("--model", help="a preset such as llama-7b, or a model's folder (its config.json is enough); "
                       "the recipe's own unless given")
    found.add_argument("--topology", required=True, help="such as v4:4x4x4, 2xv5e:16x16 (2 slices), h100:8, "
                       "a100:4x8 (4 hosts of 8)")
    found.add_argument("--context", type=int, help="tokens in a row; with --search the first one tried")
    found.add_argument("--mesh", help="such as fsdp=8,sequence=8 or tensor=8,sequence_parallel=1; "
                       "all devices on sequence unless given")
    found.add_argument("--batch", type=int, help="rows (default 1)")
    found.add_argument("--schedule", type=partial(parse, where="--schedule"),
                       help="as a recipe's attention.schedule (default ring)")
    found.add_argument("--layout", choices=["contiguous", "striped", "zigzag"], help="(default striped)")
    found.add_argument("--remat", help="what layers keep for the backward (default save_attention)",
                       choices=list(POLICIES))
    found.add_argument("--every-k", type=int, help="layers between the inputs that the remats of this name keep (default 2)")
    switch = {"action": "store_const", "const": True}
    found.add_argument("--moments-on-host", help="the optimizer's moments lie in the host's memory", **switch)
    found.add_argument("--parameters-on-host", help="so do the parameters", **switch)
    found.add_argument("--attention-groups", type=int, help="groups of heads that attend one after the other "
                       "(default 1); 0: a group for each key head of a device")
    found.add_argument("--prefetch", help="the next layer's weights arrive while a layer runs", **switch)
    found.add_argument("--query-chunks", type=int, help="chunks of a device's tokens that go through a layer one "
                       "after the other (default 1)")
    found.add_argument("--host-gib", type=float, help="of the host's memory for each device; what needs more does not fit "
                       "(default: what such hosts have)")
    found.add_argument("--best", action="store_true", help="chooses mesh, schedule and policy too: of those that fit the one "
                       "that the cost model thinks fastest")
    found.add_argument("--search", action="store_true", help="the longest context that fits, and the policy (with --best also "
                       "mesh and schedule) that holds it")
    found.add_argument("--tokens", type=float, help="tokens to train on: adds hours")
    found.add_argument("--price-per-device-hour", type=float, help="adds money to the hours")
    found.add_argument("--output", help="also write the plan to this JSON file; with --search to this folder, with a picture")
    return found


def job_of(args):
    """The job that the options describe. Raises UserError, ValueError for what is wrong in them."""
    from data.errors import UserError
    from planning.plan import MEMORY, PLAIN, Job
    from planning.topology import host_gib
    from trainer.config.load import load
    from trainer.model_source import choose_model, open_model

    # What a plan does not ask for, and a recipe may leave to the command line.
    if args.config:
        flags = ["--data.path", "any", *(["--model.path", "any"] if args.model else [])]
        try:
            recipe = load(["--config", args.config, *flags])
        except UserError as error:
            raise UserError(str(error).replace("--model.path HF_DIR", "--model with a preset or a model's folder")) from None
    else:
        recipe = PLAIN
        for option in ("model", "context"):
            if getattr(args, option) is None:
                raise UserError(f"--{option}: missing; only a recipe (--config) goes without")
    config = None
    if args.model is None:
        config = choose_model(recipe.model).config
    elif Path(args.model).expanduser().is_dir():
        config = open_model(args.model).config
    layout = args.layout or recipe.attention.layout
    recipe = dataclasses.replace(recipe, attention=dataclasses.replace(recipe.attention, layout=layout))

    def told(name, otherwise):
        given = getattr(args, name)
        return otherwise if given is None else given

    own_mesh = dataclasses.replace(recipe.mesh, simulate=0) if args.config else None
    return Job(args.model or recipe.model.path or recipe.model.preset or recipe.name, args.topology,
               told("context", recipe.data.context_length), told("batch", recipe.train.batch_size),
               mesh_of(args.mesh) or own_mesh, told("schedule", recipe.attention.schedule), kernel=recipe.attention.kernel,
               recipe=recipe, config=config, host_gib=told("host_gib", host_gib(args.topology)),
               **{name: told(name, getattr(recipe.memory, name)) for name in MEMORY})


def mesh_of(text: str | None):
    """fsdp=8,sequence=8 -> MeshConfig; dcn.data=2 is a factor of mesh.dcn; None for nothing."""
    from trainer.config.schema import MeshConfig

    try:
        axes = dict(part.split("=") for part in (text or "").split(",") if part)
        dcn = {axis.removeprefix("dcn."): int(axes.pop(axis)) for axis in list(axes) if axis.startswith("dcn.")}
        return MeshConfig(**{axis: int(size) for axis, size in axes.items()}, dcn=dcn) if axes else None
    except (TypeError, ValueError):
        raise ValueError(f"--mesh: found {text!r}; write axis=size,... with data, fsdp, tensor, sequence") from None


def estimates(plan: dict, job, args) -> dict:
    """What the cost model says of a planned job; nothing where it does not know the hardware."""
    found = job.estimate()
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
    """A plan as a table: whether it fits, what it is made of, what is sent."""
    device = f" of {plan['device_gib']:.2f}" if plan["device_gib"] else ""
    print(f"fits: {plan['peak_gib']:.2f}{device} GiB of each device, {plan['host_gib']:.2f} GiB of its host")
    mesh = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size and size != 1) or "one device"
    sent = {kind: f"{figures['times']:,.0f} times, {figures['received_gib']:.3f} GiB received, "
                  f"{figures['hidden']:.1%} of it beside compute" for kind, figures in (plan["communication"] or {}).items()}
    for name, value in {**plan, "mesh": mesh, **sent}.items():
        if name != "communication" and not (name.startswith("of_it") and not value):
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
    from planning.plan import DoesNotFit, plan

    job = job_of(args)
    if args.output:  # refused now, not after the compiler's minutes
        (Path(args.output) if args.search else Path(args.output).parent).mkdir(parents=True, exist_ok=True)
    print(f"compiling {job.model}, {job.context:,} tokens, {job.axes} of {job.topology} (minutes for a pod)", file=sys.stderr)
    try:
        job, found, rest = searched(job, args) if args.search or args.best else (job, plan(job), {})
    except DoesNotFit as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return 1
    found |= estimates(found, job, args)
    show(found)
    if args.output and args.search:
        folder = Path(args.output)
        (folder / "plan.json").write_text(json.dumps({"longest": found, **rest}, indent=2) + "\n", encoding="utf-8")
        draw(rest["tries"], found, folder / "plan.png")
    elif args.output:
        Path(args.output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def searched(job, args):
    """The longest job (or with --best alone the best of its context), its plan, and what else was found on the way."""
    from planning.plan import DoesNotFit
    from planning.search import policies, search, ways

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
        return run(parser().parse_args(argv))
    except (ValueError, OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
