"""A kernel's figures are read from the compiler's text, and a worse kernel fails the check."""

import dataclasses

import pytest

from data.errors import UserError
from scripts.benchmarks import kernel_registers, results
from scripts.benchmarks.kernel_registers import COMPILERS, Case, Figures, read_figures
from scripts.benchmarks.results import Result, load, save, versions

PTXAS = """ptxas info    : Function properties for attention_dkv_mosaic_gpu_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 8 bytes cumulative stack size, 1 bytes smem
"""
SERIALIZED = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
PTX = ".visible .entry kernel(\n)\n.reqntid 384\n{ wgmma.mma_async.sync a; cp.async.bulk.tensor.5d b; wgmma.mma_async.sync c; }"
LAUNCH = "gpu.launch async [%0] blocks(%a) in (%b = %c1) dynamic_shared_memory_size %c197744_i32 {"
FIGURES = Figures(168, 4, False, 197744, 2, 1, 1)


def test_figures_are_read_from_the_compilers_text():
    assert read_figures(PTXAS, PTX, LAUNCH) == FIGURES
    assert read_figures(PTXAS + SERIALIZED, PTX, LAUNCH).serialized
    assert (
        read_figures(PTXAS.replace("168", "80"), PTX, LAUNCH.replace("197744", "90000")).blocks == 2
    )


@pytest.mark.parametrize("missing", range(3))
def test_a_text_without_figures_is_an_error(missing):
    texts = [PTXAS, PTX, LAUNCH]
    texts[missing] = ""
    with pytest.raises(UserError, match="the compiler's text has no"):
        read_figures(*texts)


def test_figures_of_a_triton_kernel_are_read_from_xlas_text():
    ptx = ".reqntid 128, 1, 1\n{ tcgen05.mma.cta_group::1.kind::f16 a; cp.async.cg.shared.global b; cp.async.commit_group; }"
    launch = (
        "006: kCustomKernel attention_dkv grid: [32, 1, 4] threads: [128, 1, 1]  shared_memory: "
        "49664 bytes"
    )
    assert read_figures(PTXAS, ptx, launch) == Figures(168, 4, False, 49664, 1, 1, 3)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"registers": 172}, 0),
        ({"registers": 176}, 1),
        ({"spilled": 0}, 0),
        ({"spilled": 8}, 1),
        ({"products": 0}, 1),
        ({"copies": 0}, 1),
        ({"shared": 220000}, 1),
        ({"serialized": True}, 1),
        ({"blocks": 0}, 1),
    ],
    ids=str,
)
def test_a_worse_kernel_fails_the_check(change, code, monkeypatch, tmp_path, capsys):
    case = Case("mosaic", "h100", "dkv", 128)
    rows = [[*dataclasses.astuple(case), *dataclasses.astuple(FIGURES)]]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    tables = {"figures": {"columns": [], "rows": rows}}
    save(kernel_registers.NAME, Result("t", tables=tables, versions=versions()))
    monkeypatch.setattr(
        kernel_registers, "measure", lambda: {case: dataclasses.replace(FIGURES, **change)}
    )
    assert kernel_registers.main(["--check"]) == code
    out = capsys.readouterr().out
    assert out.startswith("mosaic h100 dkv 128: ") and out.count("WORSE") == code


def has_cuda_compiler() -> bool:
    """Whether the versions that the stored figures belong to are installed."""
    installed = versions()
    return all(
        installed.get(package) == version
        for package, version in load(kernel_registers.NAME).versions.items()
        if package in COMPILERS
    )


@pytest.mark.slow
def test_no_kernel_has_become_worse():
    if not has_cuda_compiler():
        pytest.skip("the pinned CUDA compiler is not installed; make evidence installs it")
    assert kernel_registers.main(["--check"]) == 0
