"""A GPU's result is computed from the files of its commands."""

import json

from scripts.benchmarks.gpu_summary import gpu


def write(path, value):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))


def step(seconds, planned, measured):
    return {
        "length": 32768,
        "layers": 8,
        "remat": "everything",
        "kernel": "auto",
        "tokens_per_second": 32768 / seconds,
        "step_seconds": seconds,
        "mfu": 0.5,
        "planned_gib": planned,
        "device_gib": measured,
        "loss": 9.0,
    }


def attention(block, name, peer, tflops):
    return {
        "length": 32768,
        "block": block,
        "pass": name,
        "peer": peer,
        "seconds": 1 / tflops,
        "tflops": tflops,
    }


def test_rows(tmp_path):
    case = {
        "kernel": "auto",
        "dtype": "bfloat16",
        "head_dim": 64,
        "case": "causal",
        "held": True,
        **dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1e-3),
    }
    failed = {
        "kernel": "auto",
        "dtype": "bfloat16",
        "head_dim": 64,
        "case": "full",
        "held": False,
        "failed": "refused",
    }
    write(tmp_path / "exactness" / "kernel_exactness.json", {"rows": [case, failed]})
    write(tmp_path / "long" / "kernel_exactness.json", {"rows": [case | {"dq": 2e-3}]})
    # Two products per unit of work forward, three and four backward: 4 ms forward and 2 x 5 ms for
    # five products.
    write(
        tmp_path / "parts" / "kernel_parts.json",
        {
            "rows": [
                {
                    "kernel": kernel,
                    "head_dim": 128,
                    "length": 32768,
                    "seconds": seconds,
                    "tflops": rate,
                }
                for kernel, seconds, rate in (
                    ("forward", 0.004, 500.0),
                    ("dq", 0.004, 750.0),
                    ("dkv", 0.006, 666.7),
                )
            ]
        },
    )
    write(
        tmp_path / "kernels" / "bench_kernels.json",
        {
            "rows": [
                attention("diagonal", "forward", "ours", 500),
                attention("diagonal", "forward", "jax-cudnn", 520),
                attention("diagonal", "forward", "torch-sdpa", 400),
                attention("packed", "forward", "ours", 400),
                attention("packed", "forward", "jax-cudnn", 500),
                {
                    "length": 32768,
                    "block": "packed",
                    "pass": "forward",
                    "peer": "torch-sdpa",
                    "left_out": "dense",
                },
            ]
        },
    )
    write(tmp_path / "step_a" / "step.json", [step(2.0, 50, 50.5)])
    write(tmp_path / "step_b" / "step.json", [step(1.0, 40, 40)])
    outcomes = {name: (row["found"], row["verdict"]) for name, row in gpu(tmp_path).items()}
    assert outcomes == {
        "exact_auto_bfloat16": ("2.0e-03 in 2 of 3 cases", "short"),
        "part_forward": ("500", "short"),
        "part_backward": ("500", "held"),
        "diagonal_forward_32768": ("500, 96%", "held"),
        "packed_forward_32768": ("400, 80%", "short"),
        "packed_over_causal_forward_32768": ("80%", "short"),
        "step_a": ("16,384, 50%", "short"),
        "step_b": ("32,768, 50%", "short"),
        "plans": ("0.99%", "no goal"),
    }
