"""Covering sets: a few of all combinations, in which every pair or triple of values still occurs.

Nearly all faults depend on at most three values at once (Kuhn, Wallace and Gallo, Software Fault
Interactions and Implications for Software Testing, 2004).
"""

import heapq
import itertools
from collections.abc import Hashable, Iterable


def covering(cases: Iterable[tuple[Hashable, ...]], together: int) -> list[tuple[Hashable, ...]]:
    """Returns some of the cases, chosen greedily, with each combination of `together` values that
    occurs in any case."""
    cases = list(cases)
    missing = {values for case in cases for values in _values(case, together)}
    # A case can only lose missing combinations, so its last count is an upper bound.
    heap = [(-len(missing), number) for number in range(len(cases))]
    chosen = []
    while missing:
        bound, number = heapq.heappop(heap)
        new = missing.intersection(_values(cases[number], together))
        if len(new) == -bound:
            chosen.append(cases[number])
            missing -= new
        elif new:
            heapq.heappush(heap, (-len(new), number))
    return chosen


def _values(case: tuple[Hashable, ...], together: int) -> list[tuple]:
    return list(itertools.combinations(enumerate(case), together))
