"""An independent reference: dense attention and its gradients in float64 numpy, from the
definition."""

import numpy as np


def visible(index, segment_ids, causal=True, window=None, global_tokens=0):
    """Returns whether each query (first axis) sees each key (second), pair by pair: bool [B, L,
    L]."""
    seen = np.zeros((*index.shape, index.shape[1]), bool)
    for row, (indices, documents) in enumerate(zip(index, segment_ids, strict=True)):
        for document in set(documents.tolist()) - {0}:
            tokens = np.flatnonzero(documents == document)
            first = indices[tokens].min()
            for query in tokens:
                in_window = (
                    tokens
                    if window is None
                    else tokens[np.abs(indices[tokens] - indices[query]) < window]
                )
                seen[row, query, in_window] = True
                seen[
                    row,
                    query,
                    tokens[
                        (indices[tokens] < first + global_tokens)
                        & (indices[tokens] <= indices[query])
                    ],
                ] = True
                if causal:
                    seen[row, query, indices > indices[query]] = False
    return seen


def with_beginnings(seen, shared):
    """Returns `seen`, with each token also seeing the beginning that its document shares: shared
    [B, L] numbers the beginnings, negative in the documents that share them."""
    seen = seen.copy()
    for row, numbers in enumerate(shared):
        for query in np.flatnonzero(numbers < 0):
            seen[row, query, numbers == -numbers[query]] = True
    return seen


def dense_attention(
    q, k, v, index, segment_ids, dout, softcap=None, sinks=None, shared=None, **mask
):
    """Returns out, lse and the gradients of sum(out * dout), shaped as `attention` returns them, in float64.

    Args: q [B, L, Hq, D]; k, v [B, L, Hkv, D]; index, segment_ids [B, L] (in the order of q, k, v); dout
      like q; mask: as in `visible`; shared: as in `with_beginnings`; softcap: scores become softcap *
      tanh(scores / softcap); sinks [Hq]: an extra score with value 0 for each query that sees a key;
      their gradient comes last.
    """
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    k_repeated, v_repeated = np.repeat(k, group, 2), np.repeat(v, group, 2)
    seen = visible(index, segment_ids, **mask)
    if shared is not None:
        seen = with_beginnings(seen, shared)
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("bqhd,bkhd->bhqk", q, k_repeated) * scale
    slope = 1.0
    if softcap is not None:
        capped = np.tanh(scores / softcap)
        slope, scores = 1 - capped**2, softcap * capped
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e30)
    if sinks is not None:
        sink_scores = np.where(top > -1e30, np.asarray(sinks, np.float64)[:, None, None], -np.inf)
        top = np.maximum(top, sink_scores)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        sink_weights = np.exp(sink_scores - top)
        total = total + sink_weights
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    out = np.einsum("bhqk,bkhd->bqhd", weights, v_repeated)
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, v_repeated)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * slope * scale
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, k_repeated)

    def per_kv_head(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, x.shape[3]).sum(3)

    dk = per_kv_head(np.einsum("bhqk,bqhd->bkhd", dscores, q))
    dv = per_kv_head(np.einsum("bhqk,bqhd->bkhd", weights, dout))
    if sinks is None:
        return out, lse, dq, dk, dv
    sink_shares = np.divide(sink_weights, total, out=np.zeros_like(sink_weights), where=total > 0)
    return out, lse, dq, dk, dv, -(sink_shares * weights * dweights).sum((0, 2, 3))
