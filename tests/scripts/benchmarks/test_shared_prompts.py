"""The output of scripts.benchmarks.shared_prompts for the two forms of a pair."""

import pytest

from scripts.benchmarks.shared_prompts import figures, flops, table


def test_a_long_prompt_saves_almost_half():
    length, layers, width = 3328, 32, 4096
    shared = flops(3072, 256, 3071)
    # It saves the cost of one prompt: its products with weights, and its visible pairs.
    alone = 6 * 3071 * (7_504_658_432 - 266_240) + 12 * layers * width * 3071 * 3072 / 2
    assert abs(flops(3072, 256, 0) - shared - alone) < 1e-3 * alone
    assert shared < 0.55 * flops(3072, 256, 0) and length == 3072 + 256


@pytest.mark.slow
def test_the_table_has_both_forms():
    lines = table(192, 32, figures(192, 32))
    assert lines[0] == "a prompt of 192 tokens and two completions of 32"
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[2:]]
    assert [line[:22].strip() for line in lines[2:]] == [
        "tokens of the row",
        "TFLOPs of a step",
        "MiB of temporaries",
        "MiB received",
    ]
    assert all(share > 10 for share in shares), lines
