"""Settings of lm-eval's tasks: what decoding here does not do is refused, what changes nothing is not."""

import pytest

from data.errors import UserError
from eval.generation_settings import AnswerForm


@pytest.mark.parametrize(
    "options", [{"num_beams": 10}, {"repetition_penalty": 1.2}, {"max_length": 99}, {"other": 0}]
)
def test_a_task_that_needs_other_decoding_is_refused(options):
    """`max_length` counts the prompt too."""
    ((name, value),) = options.items()
    for is_greedy in (True, False):
        with pytest.raises(UserError, match=f"^--tasks: writing asks for {name}: {value}, which"):
            AnswerForm.of("writing", options | {"until": "."}, is_greedy)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1, "repetition_penalty": 1.0, "top_p": 0.95, "no_repeat_ngram_size": 0},
        {"do_sample": False, "temperature": 1.0},
        {"do_sample": True, "temperature": 0.0},
        {"temperature": 0},
        {},
    ],
)
def test_greedy_options_are_accepted(options):
    assert AnswerForm.of("writing", options | {"until": "."}) == AnswerForm("writing", (".",))
