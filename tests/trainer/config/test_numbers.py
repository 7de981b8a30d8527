"""Every number of a recipe is checked in the precision in which it is used; a bad one is a one-line
error that names the field."""

import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import UserError
from trainer.config.fields import FIELDS
from trainer.config.load import load
from trainer.config.numbers import refusal

BEGIN = ["--config", "configs/sharegpt_smollm2.yaml", "--model.path", "x", "--data.path", "y"]
NUMERIC = {
    field: float if float in (kind, *typing.get_args(kind)) else int
    for field, kind in FIELDS.items()
    if {int, float} & {kind, *typing.get_args(kind)}
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.learning_rate 1e39",
            "optimizer.learning_rate: found 1e+39, needs a number of at most 3.40282e+38",
        ),
        (
            "--optimizer.learning_rate 1e-50",
            "optimizer.learning_rate: found 1e-50, needs 0, or a number of at least 1.17549e-38",
        ),
        (
            "--optimizer.epsilon 1e-46",
            "optimizer.epsilon: found 1e-46, needs 0, or a number of at least",
        ),
        (
            "--optimizer.beta2 0.99999999999",
            "optimizer.beta2: found 0.99999999999, needs a number below 1 in float32",
        ),
        ("--optimizer.clip_norm inf", "optimizer.clip_norm: found inf, expects a finite number"),
        (
            "--optimizer.clip_norm .inf",
            "optimizer.clip_norm: found inf, needs a number of at most 3.40282e+38",
        ),
        (
            "--preference.loss robust --preference.label_smoothing 0.49999999999",
            "preference.label_smoothing: found 0.49999999999, needs a number below 0.5 in float32",
        ),
        (
            "--adapter.rank 4 --adapter.targets [q_proj] --adapter.dropout 0.99999999999",
            "adapter.dropout: found 0.99999999999, needs a number below 1 in float32",
        ),
        (
            "--preference.loss ipo --preference.beta 1e-30",
            "preference.beta: found 1e-30, needs at least 1e-19 with preference.loss ipo",
        ),
        (
            "--train.steps 3000000000",
            "train.steps: found 3000000000, needs a whole number of at most 2,147,483,647",
        ),
        (
            "--adapter.rank 4 --adapter.targets [q_proj] --adapter.alpha 1e300",
            "adapter.alpha: found 1e+300, needs a number of at",
        ),
    ],
)
def test_numbers_beyond_float32_or_int32_are_a_one_line_error(words, message):
    with pytest.raises(UserError) as error:
        load([*BEGIN, *words.split()])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_fields_of_all_sections_are_covered():
    assert len(NUMERIC) > 50 and {
        "optimizer.weight_decay",
        "train.batch_size",
        "checkpoint.keep",
    } <= set(NUMERIC)


@settings(max_examples=25, deadline=None)
@given(
    field=st.sampled_from(sorted(NUMERIC)),
    number=st.one_of(
        st.floats(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([0.0, -1.0, 1e39, 1e-46, math.inf, math.nan, 2**31, -(2**63)]),
    ),
)
def test_any_number_in_any_field_is_accepted_or_refused_in_one_line(field, number):
    """An accepted number is the same (up to rounding) in the devices' precision, and is 0 there
    only if it was 0."""
    number = int(number) if NUMERIC[field] is int and math.isfinite(number) else number
    try:
        config = load([*BEGIN, f"--{field}", repr(number)])
    except UserError as error:
        assert "\n" not in str(error) and field.split(".")[-1].split("[")[0] in str(error)
        return
    assert refusal(config) is None
    value = config
    for part in field.split("."):
        value = getattr(value, part)
    if isinstance(value, float):
        assert math.isfinite(np.float32(value)) and (value == 0) == (np.float32(value) == 0)
