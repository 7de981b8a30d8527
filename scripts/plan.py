"""What a training step takes on a TPU pod that is not there: compiles the step that train.py runs, by the real compiler.

    python -m scripts.plan --model llama-7b --topology v4:4x4x4 --context 1048576
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time


def topology_devices(name: str):
    """Devices of a TPU topology such as v4:4x4x4 (v4 as megacore: one device a chip). ValueError for an unknown one."""
    from jax.experimental import topologies

    # Several processes may hold the compiler at once, and none of them has a TPU to ask about itself.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:
        raise ValueError(f"topology: {name!r} is not known to the TPU compiler ({str(error).splitlines()[0]}); "
                         "write generation:shape, such as v4:4x4x4 or v5e:16x16; the compiler comes with `libtpu`") from None


def compile_step(model_config, devices, context: int, *, remat="save_attention", every_k=2, batch=1, mesh=None,
                 kernel=None):
    """The compiled training step for these devices; all on the sequence axis unless `mesh` says otherwise.

    kernel: None takes the one for TPUs.
    """
    from model.attention.kernels import get_kernel
    from model.llama import Llama
    from trainer.config import MeshConfig, OptimizerConfig
    from trainer.mesh import make_mesh
    from trainer.step import StepBuilder, text_batch

    mesh = make_mesh(mesh or MeshConfig(sequence=len(devices)), devices)
    model = Llama(model_config, mesh, remat=remat, every_k=every_k, kernel=kernel or get_kernel(), schedule="ring")
    builder = StepBuilder(model, model.loss, tuple(model.parameters), text_batch(batch, context, mesh),
                          OptimizerConfig(), 1000)
    return builder.lower_train().compile()


def main(argv=None) -> int:
    """Prints the plan as a table, and with --output as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset, such as llama-7b")
    parser.add_argument("--topology", required=True, help="generation:shape, such as v4:4x4x4 or v5e:16x16")
    parser.add_argument("--context", type=int, required=True, help="tokens in a row")
    parser.add_argument("--mesh", default="", help="such as fsdp=8,sequence=8; all devices on sequence unless given")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--remat", default="save_attention", help="what layers keep for the backward (default save_attention)",
                        choices=["nothing", "save_attention", "offload", "every_k", "everything"])
    parser.add_argument("--every-k", type=int, default=2, help="layers between the inputs that remat every_k keeps")
    parser.add_argument("--output", help="also write the plan to this JSON file")
    args = parser.parse_args(argv)
    try:
        plan = make_plan(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in plan.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(plan, file, indent=2)
    return 0


def make_plan(args) -> dict:
    """The plan as a flat dictionary; sizes in GiB a device."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from data.errors import UserError
    from model.config import LlamaConfig
    from trainer.compiled import collectives, memory
    from trainer.config import MeshConfig

    devices = topology_devices(args.topology)
    axes = dict(part.split("=") for part in args.mesh.split(",") if part)
    try:
        mesh = MeshConfig(**{axis: int(size) for axis, size in axes.items()}) if axes else None
    except (TypeError, ValueError):
        raise ValueError(f"--mesh: found {args.mesh!r}; write axis=size,... with data, fsdp, tensor, sequence") from None
    start = time.perf_counter()
    try:
        compiled = compile_step(LlamaConfig.preset(args.model), devices, args.context, remat=args.remat,
                                every_k=args.every_k, batch=args.batch, mesh=mesh)
    except UserError as error:
        raise ValueError(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError("does not fit: " + str(error).splitlines()[0]) from None
    plan = {"model": args.model, "topology": args.topology, "devices": len(devices), "context": args.context,
            "tokens_per_device": args.context * args.batch // len(devices), "remat": args.remat,
            "compile_seconds": time.perf_counter() - start}
    plan |= {f"{name}_gib": size for name, size in memory(compiled).items()}
    plan["collectives"] = dict(collectives(compiled.as_text()))
    return plan


if __name__ == "__main__":
    sys.exit(main())
