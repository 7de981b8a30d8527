"""The search for the longest row that fits on a GPU, with compilations replaced by a formula."""

from scripts.benchmarks.adapter_contexts import CASES, STEP, longest


def sizes(topology, policy, tokens):
    """4 GiB plus 1 GiB per 8K tokens; half of the latter with the inputs on the host, which take as
    much there."""
    on_host = policy["remat"].startswith("offload")
    each = 0.5 if on_host else 1.0
    return {
        "peak_gib": 4 + each * tokens / STEP,
        "host_gib": each * tokens / STEP if on_host else 0.0,
    }


def test_the_longest_row_fits_and_the_next_one_does_not():
    """A 4090 has 22.344 GiB for a program: 18 steps of 1 GiB on the device alone, and 36 of half a
    GiB with the host."""
    cases = {case.name: case for case in CASES}
    tokens, policy = longest(cases["gb_24_without_host"], sizes)
    assert (tokens, policy["remat"]) == (18 * STEP, "nothing")
    tokens, policy = longest(cases["gb_24_with_host"], sizes)
    assert (tokens, policy["remat"]) == (36 * STEP, "offload")


def test_a_full_host_also_bounds_the_row():
    """The system keeps 8 of 128 GiB: 240 steps of half a GiB, although 141 GB hold more."""
    (case,) = (case for case in CASES if case.name == "gb_141_with_host")
    assert longest(case, sizes)[0] == 240 * STEP


def test_the_search_continues_where_memory_is_not_linear():
    """The compiler's memory jumps at 100K tokens, below the length predicted by the line through
    the probes."""

    def jumping(topology, policy, tokens):
        memory = sizes(topology, policy, tokens)
        jump = topology != "h100:1" and tokens > 100_000
        return {**memory, "peak_gib": memory["peak_gib"] + 20 * jump}

    (case,) = (case for case in CASES if case.name == "gb_24_without_host")
    assert longest(case, jumping)[0] == 12 * STEP
