"""In bfloat16 the error does not grow from 1 to 16 shards: partial results and accumulators are
float32."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_bfloat16_error_does_not_grow_with_the_number_of_shards(repository):
    command = [sys.executable, "-m", "tests.model.attention.sixteen"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for schedule, errors in json.loads(done.stdout).items():
        for single, sixteen in zip(errors["1"], errors["16"], strict=True):
            assert 0 < sixteen <= 1.1 * single, (schedule, errors)
