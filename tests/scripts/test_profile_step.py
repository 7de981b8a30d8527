"""The profile's sums against sums by hand, for small traces of each kind of device written here."""

import json
import os
import subprocess
import sys

import pytest
from jax.profiler import ProfileData

from scripts import profile_step
from scripts.benchmarks.step_parts import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    OPTIMIZER,
    PRODUCTS,
    CompiledParts,
    is_communication,
    part_of_name,
)
from scripts.benchmarks.step_trace import Event, device_events, innermost, read_trace, summarize

# Two products of 2 x 4 numbers in a loop that runs three times, a cast, an in-place update of a
# stack, and an update of the weights.
TEXT = """HloModule jit_train

%product (a: f32[2,4], b: f32[4,4]) -> f32[2,4] {
  %a = f32[2,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%cast (x: f32[2,4]) -> bf16[2,4] {
  %x = f32[2,4]{1,0} parameter(0)
  ROOT %convert.1 = bf16[2,4]{1,0} convert(%x)
}

%stack (s: f32[3,2,4], u: f32[1,2,4], i: s32[]) -> f32[3,2,4] {
  %s = f32[3,2,4]{2,1,0} parameter(0)
  %u = f32[1,2,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[3,2,4]{2,1,0} dynamic-update-slice(%s, %u, %i, %i, %i)
}

%update (w: f32[4,4], g: f32[4,4]) -> f32[4,4] {
  %w = f32[4,4]{1,0} parameter(0)
  %g = f32[4,4]{1,0} parameter(1)
  ROOT %add.9 = f32[4,4]{1,0} add(%w, %g)
}

%body (t: (s32[], f32[2,4], f32[4,4])) -> (s32[], f32[2,4], f32[4,4]) {
  %t = (s32[], f32[2,4]{1,0}, f32[4,4]{1,0}) parameter(0)
  %x.1 = f32[2,4]{1,0} get-tuple-element(%t), index=1
  %w.1 = f32[4,4]{1,0} get-tuple-element(%t), index=2
  %i.1 = s32[] get-tuple-element(%t), index=0
  %gemm_fusion_dot.7 = f32[2,4]{1,0} fusion(%x.1, %w.1), kind=kCustom, calls=%product, metadata={op_name="jit(train)/while/body/feed_forward/dot_general"}
  ROOT %tuple.1 = (s32[], f32[2,4]{1,0}, f32[4,4]{1,0}) tuple(%i.1, %gemm_fusion_dot.7, %w.1)
}

%condition (t.2: (s32[], f32[2,4], f32[4,4])) -> pred[] {
  %t.2 = (s32[], f32[2,4]{1,0}, f32[4,4]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (p: (s32[], f32[2,4], f32[4,4])) -> f32[4,4] {
  %p = (s32[], f32[2,4]{1,0}, f32[4,4]{1,0}) parameter(0)
  %x.3 = f32[2,4]{1,0} get-tuple-element(%p), index=1
  %w.3 = f32[4,4]{1,0} get-tuple-element(%p), index=2
  %i.3 = s32[] get-tuple-element(%p), index=0
  %while.1 = (s32[], f32[2,4]{1,0}, f32[4,4]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %fusion.12 = bf16[2,4]{1,0} fusion(%x.3), kind=kLoop, calls=%cast
  %all-reduce.2 = f32[4,4]{1,0} all-reduce(%w.3), to_apply=%product
  %stacked = f32[3,2,4]{2,1,0} broadcast(%x.3), dimensions={1,2}
  %one = f32[1,2,4]{2,1,0} bitcast(%x.3)
  %fusion.13 = f32[3,2,4]{2,1,0} fusion(%stacked, %one, %i.3), kind=kLoop, calls=%stack
  %exp.1 = f32[2,4]{1,0} exponential(%x.3), metadata={op_name="jit(train)/transpose(jvp(attention))/exp"}
  ROOT %fusion.14 = f32[4,4]{1,0} fusion(%w.3, %all-reduce.2), kind=kLoop, calls=%update, metadata={op_name="jit(train)/optimizer/add"}
}
"""


def profile_of(plane, lines):
    """A profile with one plane: line -> [(event, start in nanoseconds, duration in
    nanoseconds)]."""
    names = list(dict.fromkeys(name for events in lines.values() for name, _, _ in events))
    metadata = "".join(
        f"event_metadata {{ key: {i} value {{ id: {i} name: {json.dumps(name)} }} }}\n"
        for i, name in enumerate(names, 1)
    )
    text = "".join(
        f"lines {{ id: {number} name: {json.dumps(line)} timestamp_ns: 0\n"
        + "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {begin * 1000} "
            f"duration_ps: {duration * 1000} }}\n"
            for name, begin, duration in events
        )
        + "}\n"
        for number, (line, events) in enumerate(lines.items(), 1)
    )
    return ProfileData.from_text_proto(f'planes {{ name: "{plane}"\n{text}{metadata}}}')


def rows_of(profile, text=""):
    devices = {
        name: summarize(lines, is_communication) for name, lines in device_events(profile).items()
    }
    rows = profile_step.part_rows(devices, 1, CompiledParts(text))
    return {row["part"]: round(row["ms"] * 1e6, 3) for row in rows if row["ms"]}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", PRODUCTS),
        ("gemm_fusion_dot_39", PRODUCTS),
        ("sm80_xmma_gemm_bf16bf16", PRODUCTS),
        ("splitKreduce_kernel", PRODUCTS),
        ("ynn_fusion.19", PRODUCTS),
        ("attention_dkv_mosaic_gpu_kernel", ATTENTION),
        ("new_body_mosaic_gpu_kernel", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", ATTENTION),
        ("flash_attention_forward.3", ATTENTION),
        ("loop_add_multiply_fusion", ELEMENTWISE),
        ("input_convert_reduce_fusion", ELEMENTWISE),
        ("fusion_2599", ELEMENTWISE),
        ("memcpy128", COPIES),
        ("wrapped_convert_3", COPIES),
        ("input_concatenate_fusion_7", COPIES),
        ("loop_dynamic_update_slice_fusion_18", COPIES),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", COMMUNICATION),
        ("all-gather-start.4", COMMUNICATION),
        ("collective-permute.1", COMMUNICATION),
        ("reduce-scatter.7", COMMUNICATION),
    ],
)
def test_a_kernels_name_tells_its_part(kernel, part):
    assert part_of_name(kernel) == part


def test_the_compiled_text_tells_more_than_a_name():
    parts = CompiledParts(TEXT)
    assert {kernel: parts.part(kernel) for kernel in ("fusion_12", "fusion.14", "exp.1")} == {
        "fusion_12": COPIES,
        "fusion.14": OPTIMIZER,
        "exp.1": ATTENTION,
    }
    assert parts.part("gemm_fusion_dot_7") == PRODUCTS
    assert part_of_name("fusion.14") == ELEMENTWISE


def test_bytes_are_read_from_the_compiled_text():
    """By hand: f32[2,4] has 32 bytes, f32[4,4] 64. The loop runs three times. Updating the stack
    reads 32 bytes and their index (4), and writes 32; creating the stack reads 32, writes 96."""
    assert CompiledParts(TEXT).bytes_moved() == {
        PRODUCTS: 3 * (32 + 64 + 32),
        COPIES: (32 + 16) + (32 + 96) + (32 + 4 + 32),
        COMMUNICATION: 64 + 64,
        ATTENTION: 32 + 32,
        OPTIMIZER: 64 + 64 + 64,
    }


def test_overlapping_gpu_streams_split_the_time_and_communication_yields():
    """A product of 100 ns; a concurrent copy from 60 to 140; a transfer from 0 to 200."""
    lines = {
        "Stream #1(Compute)": [("nvjet_sm90_tst", 0, 100), ("loop_exp_fusion", 150, 30)],
        "Stream #2(MemcpyD2D)": [("memcpy128", 60, 80)],
        "Stream #3": [("ncclDevKernel_AllGather", 0, 200)],
        "XLA Modules": [("jit_train", 0, 500)],
    }
    assert rows_of(profile_of("/device:GPU:0", lines)) == {
        PRODUCTS: 60 + 20,
        COPIES: 20 + 40,
        ELEMENTWISE: 30,
        COMMUNICATION: 10 + 20,
    }


def test_a_tpus_operations_are_named_by_their_text():
    """The loop contains its operations and is no kernel itself; 40 ns pass between two of them."""
    lines = {
        "XLA Ops": [
            ("%while.1 = (s32[]) while(%p)", 0, 300),
            ("%gemm_fusion_dot.7 = f32[2,4] fusion(%x.1, %w.1)", 0, 100),
            ("%fusion.12 = bf16[2,4] fusion(%x.3)", 140, 60),
            ("%fusion.14 = f32[4,4] fusion(%w.3)", 200, 100),
        ],
        "Async XLA Ops": [("%all-reduce.2 = f32[4,4] all-reduce(%w.3)", 120, 50)],
        "XLA TraceMe": [("step", 0, 900)],
    }
    assert rows_of(profile_of("/device:TPU:0", lines), TEXT) == {
        PRODUCTS: 100,
        COPIES: 60,
        OPTIMIZER: 100,
        COMMUNICATION: 20,
        "idle": 20,
    }


def test_nested_events_count_once():
    line = [
        Event("outer", 0, 10),
        Event("inner", 2, 5),
        Event("inner", 5, 6),
        Event("next", 10, 12),
    ]
    assert innermost(line) == [
        Event("outer", 0, 2),
        Event("inner", 2, 5),
        Event("inner", 5, 6),
        Event("outer", 6, 10),
        Event("next", 10, 12),
    ]


# In a separate process: jax.profiler ends one that has loaded libtpu without a TPU, as tests of
# compiled programs do.
TRACED = """
import pathlib, sys
import jax, jax.numpy as jnp

def step(x):
    for _ in range(10):
        x = jnp.tanh(x @ x)
    return x

folder = pathlib.Path(sys.argv[1])
compiled = jax.jit(step).lower(jnp.ones((512, 512))).compile()
compiled(jnp.ones((512, 512))).block_until_ready()
with jax.profiler.trace(str(folder / "trace")):
    compiled(jnp.ones((512, 512))).block_until_ready()
(folder / "compiled.txt").write_text(compiled.as_text())
"""


def test_a_cpus_trace_is_read_and_its_products_found(tmp_path, capsys):
    """A real trace: ten products of 512 x 512 and their sum take most of the time."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRACED, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    (device,) = read_trace(tmp_path / "trace", is_communication).values()
    assert sum(device.runs.values()) >= 10 and 0 <= device.idle < device.span
    assert profile_step.main(["--trace", str(tmp_path / "trace"), "--steps", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(PRODUCTS) and float(lines[1].split()[1]) > 0
    assert lines[-1].startswith("step")


def test_a_folder_without_a_trace_is_a_one_line_error(tmp_path, capsys):
    assert profile_step.main(["--trace", str(tmp_path)]) == 2
    assert "no *.xplane.pb" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_models_step(tmp_path):
    words = "-m scripts.profile_step --model tiny --length 128 --steps 2 --loss-chunk 64 --picture"
    done = subprocess.run(
        [sys.executable, *words.split(), "--output", str(tmp_path)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    result = json.loads((tmp_path / "profile.json").read_text())
    rows = {row["part"]: row for row in result["parts"]}
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows[PRODUCTS]["ms"] > 0 and rows[ATTENTION]["ms"] > 0 and rows[OPTIMIZER]["ms"] > 0
    assert rows[OPTIMIZER]["floor_ms"] > 0 and (tmp_path / "profile.png").stat().st_size
    assert len(done.stdout.splitlines()) == 10
