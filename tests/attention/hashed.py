"""Who reads whom by LSH attention, by loops over its definition."""

import numpy as np


def reads(buckets, chunk, sets, causal, queries, valid=None, segment=None):
    """How often each query reads each key, by loops over the definition: integers [B, H, T, S]."""
    batch, size, heads, rounds = buckets.shape
    valid = np.ones((batch, size), bool) if valid is None else valid
    segment = np.zeros((batch, size), int) if segment is None else segment
    times = np.zeros((batch, heads, size, size), int)
    for b, h in np.ndindex(batch, heads):
        for r in range(rounds):
            bucket = buckets[b, :, h, r]
            ranked = sorted(np.flatnonzero(valid[b]), key=lambda t: (segment[b, t], bucket[t], t))
            chunks = [ranked[n : n + chunk] for n in range(0, len(ranked), chunk)]
            for n, mine in enumerate(chunks):
                for i in mine:
                    for j in mine + (chunks[n - 1] if n else []):
                        seen = segment[b, i] == segment[b, j] and (j < i if causal else j != i)
                        if seen and (sets == "released" or bucket[i] == bucket[j]):
                            times[b, h, i, j] += 1
    if sets == "paper":
        times = np.minimum(times, 1)
    alone = (times.sum(-1) == 0) & valid[:, None]
    b, h, i = np.nonzero(alone)
    times[b, h, i, i] = 1
    return times[:, :, size - queries :]
