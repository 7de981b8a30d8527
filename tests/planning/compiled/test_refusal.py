"""Tests of planning/compiled/refusal.py on messages of the TPU compiler (libtpu of jax 0.10.2)."""

import pytest

from planning.compiled.refusal import refused_gib
from planning.plan import DoesNotFit

# smollm2-135m under `everything`, 4M tokens on v5e:2x2.
DEVICE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (129.06G) exceeds available HBM (15.75G). HLO module: jit_train.\n"
    "See https://openxla.org/xla/errors/error_1000 for more details."
)
# The inputs of 80 layers at 8M tokens under `offload`, on 256 chips of v5e.
HOST = (
    "RESOURCE_EXHAUSTED: Allocation (size=171798691840) would exceed memory (size=137438953472) "
    ":: ..."
)
# A kernel's tables for very many tiles on a v3.
SCALARS = (
    "RESOURCE_EXHAUSTED: XLA:TPU ... Ran out of memory in memory space smem. Used 25.2K of 16.0K "
    "smem. ..."
)


def test_needed_and_available_gib_of_device_and_host_are_parsed():
    assert refused_gib(DEVICE) == (129.06, 15.75)
    assert refused_gib(HOST) == (160.0, 128.0)


def test_scalar_memory_is_printed_in_kib():
    assert str(DoesNotFit(*refused_gib(SCALARS))) == "needs 25.2 KiB of 16.0 of scalar memory"


def test_an_unknown_message_raises_an_error_that_quotes_it():
    with pytest.raises(
        RuntimeError, match="does not know this wording: RESOURCE_EXHAUSTED: No room"
    ):
        refused_gib("RESOURCE_EXHAUSTED: No room")
