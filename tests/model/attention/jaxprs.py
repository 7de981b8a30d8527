"""A traced function's operations, those in a scan once per iteration."""

import collections

import jax


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def operations(jaxpr, times=1):
    """(equation, how often it runs) of everything inside; of a branch all sides, of a while loop
    one turn."""
    for equation in jaxpr.eqns:
        yield equation, times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(part):
                yield from operations(getattr(part, "jaxpr", part), times * turns)


def counts(jaxpr):
    """How often each primitive runs: {name: times}."""
    counted = collections.Counter()
    for equation, times in operations(jaxpr):
        counted[equation.primitive.name] += times
    return counted


def sent(jaxpr):
    """What a rank sends by permutes, in bytes, by how many places onwards in its line: {places:
    bytes}."""
    nbytes = collections.Counter()
    for equation, times in operations(jaxpr):
        if equation.primitive.name == "ppermute":
            (source, target), *_ = equation.params["perm"]
            size = len(equation.params["perm"])
            nbytes[(target - source) % size] += times * sum(
                x.aval.size * x.aval.dtype.itemsize for x in equation.invars
            )
    return nbytes
