"""The operations of a traced function; those in a scan count once per iteration."""

import collections

import jax


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def operations(jaxpr, times=1):
    """Yields (equation, how often it runs) for everything inside: all branches of a cond, and one
    iteration of a while loop."""
    for equation in jaxpr.eqns:
        yield equation, times
        iterations = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(part):
                yield from operations(getattr(part, "jaxpr", part), times * iterations)


def counts(jaxpr):
    """Returns how often each primitive runs: {name: times}."""
    counted = collections.Counter()
    for equation, times in operations(jaxpr):
        counted[equation.primitive.name] += times
    return counted


def sent(jaxpr):
    """Returns the bytes that a rank sends by permutes, by distance in its line of ranks: {distance:
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
