"""The rates of the TPU kernels in the cost model: from the recorded bundles, and from matrix units
whose peak is the machine's."""

import json

import pytest

from planning.costs import HARDWARE
from planning.costs.kernel_rates import TABLE, MatrixUnits, kernel_rates
from scripts.benchmarks import kernel_cycles
from scripts.benchmarks.results import load

# Cycles for which a tile of 1024 x 1024 and heads of 128 keeps the matrix units busy: (forward,
# backward).
BUSY = dict.fromkeys(("v4", "v5e", "v5p"), (4096, 10240))
BUSY |= dict.fromkeys(("v6e", "tpu7x"), (2048, 5120))
CORES = {"v3": 1, "v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}  # per device


def test_the_table_matches_the_recorded_bundles():
    lines = load(kernel_cycles.NAME).tables["bundles"]["rows"]
    assert json.loads(TABLE.read_text()) == kernel_cycles.for_cost_model(lines)


@pytest.mark.parametrize("name", BUSY)
def test_a_rate_is_limited_by_bundles_or_matrix_units(name):
    hardware, bundles = HARDWARE[name], json.loads(TABLE.read_text())["bundles"][name]
    rates = kernel_rates(name, hardware.matrix_units)
    expected = [
        busy / max(busy, bundles[direction])
        for busy, direction in zip(BUSY[name], ("forward", "backward"), strict=True)
    ]
    assert rates == pytest.approx(expected) and min(rates) > 0.5
    assert (hardware.attention, hardware.attention_backward) == pytest.approx(
        [min(rate, hardware.matmul) for rate in expected]
    )
    assert "bundles" in hardware.sources["attention"]


def test_a_generation_without_bundles_uses_the_matmul_rate():
    v3 = HARDWARE["v3"]
    assert (
        kernel_rates("v3", v3.matrix_units) is None
        and v3.attention == v3.attention_backward == v3.matmul
    )


@pytest.mark.parametrize(
    ("name", "gigahertz"),
    [("v3", 0.94), ("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.2)],
)
def test_the_matrix_units_of_a_device_reach_its_peak_at_its_clock(name, gigahertz):
    """v3's and v4's clocks are published (Jouppi et al. 2023, table 4); a wrong number of units
    would give an implausible one."""
    hardware = HARDWARE[name]
    cycles = hardware.matrix_units.cycles(hardware.peak, 256) / CORES[name]
    assert cycles == pytest.approx(1e9 * gigahertz, rel=0.01)


def test_small_heads_fill_part_of_a_unit():
    units = MatrixUnits(2, 256, rows=2)
    assert units.filled(128) == 0.5 and units.filled(512) == 1.0
    assert units.cycles(1.0, 128) == 2 * units.cycles(1.0, 256)
