"""What the types of a configuration cannot say: each mistake names the field, what was found and what would be right."""

import math
import re

from data.errors import UserError
from model.config import POSITIONS

from .schema import VERSION, MeshConfig, RunConfig


def check(config: RunConfig, where: str = "configuration") -> RunConfig:
    """`config` itself, or a UserError naming the field, what was found and what would be right. Needs no device."""

    def need(right: bool, field: str, expected: str) -> None:
        if not right:
            found = config
            for part in field.split("."):
                found = getattr(found, part)
            raise UserError(f"{where}: {field} is {found!r}; {expected}")

    need(config.config_version == VERSION, "config_version", f"this code reads {VERSION}")
    need("://" not in (config.run_dir or ""), "run_dir", "a folder is needed; one of a store can be mounted (gcsfuse, s3fs)")
    model, data, mesh, train = config.model, config.data, config.mesh, config.train
    attention, optimizer = config.attention, config.optimizer
    axes = ("data", "fsdp", "tensor", "sequence")
    for field in axes:
        need(getattr(mesh, field) >= 1, f"mesh.{field}", "at least 1 is needed")
    need(all(axis in axes and isinstance(factor, int) and factor >= 1 and getattr(mesh, axis) % factor == 0
             for axis, factor in mesh.dcn.items()), "mesh.dcn",
         f"factors of the axes are needed, such as {{data: 2}}, each a divisor of its axis in {_product(mesh)}")
    need(sorted(mesh.order) in ([], sorted(axes)), "mesh.order", f"all four axes are needed, each once: {', '.join(axes)}")
    at_least_one = ("data.context_length", "train.steps", "train.batch_size", "train.log_every", "checkpoint.keep",
                    "evaluate.max_new_tokens", "train.accumulation")
    not_negative = ("mesh.simulate", "train.evaluate_every", "checkpoint.every",
                    "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm")
    for field in at_least_one + not_negative:
        section, name = field.split(".")
        least = 1 if field in at_least_one else 0
        need(getattr(getattr(config, section), name) >= least, field, f"at least {least} is needed")
    need(0 < optimizer.learning_rate < math.inf, "optimizer.learning_rate", "a positive number is needed")
    need(0 <= optimizer.final_fraction <= 1, "optimizer.final_fraction", "a share between 0 and 1 is needed")
    need(optimizer.epsilon > 0, "optimizer.epsilon", "a positive number is needed")
    for field in ("beta1", "beta2"):
        need(0 <= getattr(optimizer, field) < 1, f"optimizer.{field}", "a number from 0 to below 1 is needed")
        # bfloat16 has 8 bits: a moment that loses less than 1/256 of itself a step would never shrink.
        need(optimizer.moment_dtype == "float32" or getattr(optimizer, field) <= 0.99, f"optimizer.{field}",
             "with optimizer.moment_dtype bfloat16 at most 0.99 is needed")
    profiled = config.logging.profile_steps
    need(not profiled or (len(profiled) == 2 and 1 <= profiled[0] <= profiled[1] <= train.steps), "logging.profile_steps",
         f"the first and the last step of a profile are needed, from 1 to train.steps = {train.steps}, or []")
    need(0 <= data.held_out_fraction < 1, "data.held_out_fraction", "a share from 0 to below 1 is needed")

    need(bool(data.sources), "data.sources", "no data: give --data.path FILE, or sources in the recipe")
    for number, source in enumerate(data.sources):
        if not source.weight > 0:
            raise UserError(f"{where}: data.sources[{number}].weight is {source.weight!r}; a positive number is needed")
    need(not (model.path and model.preset), "model.preset", "model.path is given too; keep one of them")
    need(not model.path or set(model.overrides) <= set(POSITIONS), "model.overrides",
         f"model.path fixes all but {', '.join(POSITIONS)}; leave the others out")
    need(bool(model.path or model.preset or model.overrides), "model.path",
         "no model: give --model.path HF_DIR, or for a model from scratch model.preset or model.overrides")  # fmt: skip
    need(bool(model.path or model.tokenizer), "model.tokenizer", "a model from scratch needs a tokenizer's folder")
    try:
        re.compile(model.trainable)
    except re.error as error:
        raise UserError(f"{where}: model.trainable is {model.trainable!r}, no regular expression: {error}") from error

    need(attention.schedule_name != "local" or mesh.sequence == 1, "attention.schedule",
         f"local cannot attend across mesh.sequence = {mesh.sequence} shards; use ring or all_gather")  # fmt: skip

    twice = attention.layout == "zigzag"
    shards, length = mesh.sequence * (2 if twice else 1), data.context_length
    up, down = -(-length // shards) * shards, length // shards * shards
    below = f" (or {down})" if down else ""
    need(length % shards == 0, "data.context_length",
         f"it must be a multiple of {'2 * ' if twice else ''}mesh.sequence = {shards}{' (zigzag)' if twice else ''}; "
         f"the next good length is {up}{below}")  # fmt: skip
    need(length // mesh.sequence % config.memory.query_chunks == 0, "memory.query_chunks",
         f"a divisor of a device's {length // mesh.sequence} tokens is needed")
    parts = mesh.sequence * mesh.tensor
    need(not mesh.sequence_parallel or length % parts == 0, "data.context_length",
         f"with mesh.sequence_parallel it must be a multiple of mesh.sequence * mesh.tensor = {parts}")  # fmt: skip
    rows = mesh.data * mesh.fsdp * train.accumulation
    need(train.batch_size % rows == 0, "train.batch_size",
         f"it must be a multiple of mesh.data * mesh.fsdp * train.accumulation = {rows}; the next good size is "
         f"{-(-train.batch_size // rows) * rows}")  # fmt: skip
    need(mesh.simulate in (0, mesh.devices), "mesh.simulate",
         f"the mesh takes {_product(mesh)} devices; simulate {mesh.devices}, or change the mesh")  # fmt: skip
    return config


def _product(mesh: MeshConfig) -> str:
    return f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} x sequence {mesh.sequence} = {mesh.devices}"
