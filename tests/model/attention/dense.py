"""An independent truth: dense attention and its gradients in float64 numpy, from the definition."""

import numpy as np


def visible(index, segment_ids, causal=True, window=None, global_tokens=0):
    """Which key (second) each query (first) of a row sees, one pair after another: bool [B, L,
    L]."""
    seen = np.zeros((*index.shape, index.shape[1]), bool)
    for row, (places, documents) in enumerate(zip(index, segment_ids, strict=True)):
        for document in set(documents.tolist()) - {0}:
            tokens = np.flatnonzero(documents == document)
            first = places[tokens].min()
            for query in tokens:
                near = (
                    tokens
                    if window is None
                    else tokens[np.abs(places[tokens] - places[query]) < window]
                )
                seen[row, query, near] = True
                seen[
                    row,
                    query,
                    tokens[
                        (places[tokens] < first + global_tokens) & (places[tokens] <= places[query])
                    ],
                ] = True
                if causal:
                    seen[row, query, places > places[query]] = False
    return seen


def with_beginnings(seen, shared):
    """`seen` and, of each token, the beginning that its document shares: shared [B, L] names it, negative in the document."""
    seen = seen.copy()
    for row, numbers in enumerate(shared):
        for query in np.flatnonzero(numbers < 0):
            seen[row, query, numbers == -numbers[query]] = True
    return seen


def dense_attention(
    q, k, v, index, segment_ids, dout, softcap=None, sinks=None, shared=None, **mask
):
    """out, lse and the gradients of sum(out * dout); arrays like the product's, all float64.

    Args: q [B, L, Hq, D]; k, v [B, L, Hkv, D]; index, segment_ids [B, L] (in the order of q, k, v); dout
      like q; mask: as `visible`'s; shared: as `with_beginnings`'s; softcap: scores become softcap *
      tanh(scores / softcap); sinks [Hq]: one more score of each query that sees a key, whose value is 0;
      their gradient comes last.
    """
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    k_wide, v_wide = np.repeat(k, group, 2), np.repeat(v, group, 2)
    seen = visible(index, segment_ids, **mask)
    if shared is not None:
        seen = with_beginnings(seen, shared)
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("bqhd,bkhd->bhqk", q, k_wide) * scale
    slope = 1.0
    if softcap is not None:
        slope = np.cosh(scores / softcap) ** -2
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        over = np.asarray(sinks, np.float64)[:, None, None] - top
        sunk = np.exp(np.where(total > 0, over, -np.inf))
        total = total + sunk
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    out = np.einsum("bhqk,bkhd->bqhd", weights, v_wide)
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, v_wide)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * slope * scale
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, k_wide)

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, x.shape[3]).sum(3)

    dk = per_kv_head(np.einsum("bhqk,bqhd->bkhd", dscores, q))
    dv = per_kv_head(np.einsum("bhqk,bqhd->bkhd", weights, dout))
    if sinks is None:
        return out, lse, dq, dk, dv
    share = np.divide(sunk, total, out=np.zeros_like(sunk), where=total > 0)
    return out, lse, dq, dk, dv, -(share * weights * dweights).sum((0, 2, 3))
