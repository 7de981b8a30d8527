"""A kernel's tiles are read from the compiler's text, and a slower kernel fails the check."""

import pytest

from scripts.benchmarks import kernel_cycles, results
from scripts.benchmarks.kernel_cycles import Program, read_program, summarize
from scripts.benchmarks.results import Result, save, versions

# In the compiler's format: a loop (region 1) around a region without products (2) and two tiles (3
# and 5), one of which contains a region without products that is not part of the tile.
TEXT = """= control target key start
LH: loop header
= control target key end

     0   :  { %s1 = sld [smem:[#allocation0]] } /* Start region 1 */
   0x1 LB: > { %s2 = sadd.s32 1, %s1 } /* Start region 2 */
   0x2   : > { %v1 = vld [vmem:[%s3]] } /* End region 2 */
   0x3   : > { %v2 = vmatmul.bf16.gmra.mxu0 %v1 } /* Start region 3 */
   0x4   : > { %v3 = vsel %v2 } /* Start region 4 */
second_minor_factor: 1 */ } /* End region 4 */
   0x5   : > { %v4 = vmatmul.bf16.gmra.mxu1 %v3 } /* End region 3 */
   0x6 PF: > { %p1 = scmp.ne.s32.totalorder %s1, 2 } /* Start region 5 :: Start/End empty region 6 */
0x1007   : > { %v5 = vmatmul.bf16.gmra.mxu0 %v1 }
0x1008   : > { %v6 = vst %v5 } /* End region 5 */
0x1009   :  { %s9 = sphi %s2 } /* End region 1 */
"""


def test_tiles_are_the_innermost_regions_with_products():
    assert read_program(TEXT) == Program(10, [2, 3])


@pytest.mark.parametrize(("factor", "code"), [(1.02, 0), (1.04, 1), (0.5, 0)])
def test_a_slower_kernel_fails_the_check(factor, code, monkeypatch, tmp_path, capsys):
    lines = [
        [generation, "forward", kernel, 4000, part, part, 2000]
        for generation in ("v5p", "v6e")
        for kernel, part in (("ours", 1100), ("splash", None))
    ]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    columns = list(kernel_cycles.COLUMNS)
    tables = {"bundles": {"columns": columns, "rows": lines}}
    save(kernel_cycles.NAME, Result("t", tables=tables, versions=versions()))

    def measure_line(generation, direction, kernel):
        assert kernel == "ours"
        part = 1100 * (factor if generation == "v6e" else 1)
        return [generation, direction, kernel, 4000, 1100, part, 2000]

    monkeypatch.setattr(kernel_cycles, "measure_line", measure_line)
    assert kernel_cycles.main(["--check"]) == code
    assert capsys.readouterr().out.count("SLOWER") == code


def test_masked_tiles_are_compared_with_full_tiles():
    lines = [
        [generation, direction, kernel, 4000, *parts, 2000]
        for generation in ("v5p", "v6e")
        for direction in ("forward", "backward")
        for kernel, parts in (("ours", (1400, 1051)), ("splash", (None, None)))
    ]
    rows = summarize(lines)
    assert (rows["forward_v6e_diagonal"]["found"], rows["forward_v6e_diagonal"]["verdict"]) == (
        "4,200 bundles",
        "held",
    )
    assert (rows["forward_v6e_masked"]["found"], rows["forward_v6e_masked"]["verdict"]) == (
        "4,204 bundles",
        "short",
    )
