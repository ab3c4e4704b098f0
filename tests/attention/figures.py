"""Who reads whom in every example of every pattern, worked out by hand from the papers: no rule of the library is used.

A figure is a list with an entry for each head: the keys that the query at p reads of n tokens. Numbers outside
0..n-1 stand for nothing. Of a pattern that depends on content it is a function of what was selected.
"""

import functools

import numpy as np

from tests.attention.hashed import reads
from tests.attention.routed import in_one_cluster, newest

EVERY_FOURTH = [-16, -12, -8, -4, 0, 4, 8, 12, 16]
EVERY_THIRD = [-15, -12, -9, -6, -3, 0, 3, 6, 9, 12, 15]
# Ends of blocks of 5, of 7 and of 4 in a row of 17: sub-blocks are counted from the end.
LAST_TWO_OF_5 = {3, 4, 8, 9, 13, 14}
OF_7 = {5, 6, 12, 13}, {3, 4, 10, 11}, {1, 2, 8, 9, 15, 16}
LAST_OF_4 = {3, 7, 11, 15}
# Blocks of a row of 12 and of a row of 17, for 2 and for 3 of them.
HALVES = {12: [range(6), range(6, 12)], 17: [range(9), range(9, 17)]}
THIRDS = {12: [range(4), range(4, 8), range(8, 12)], 17: [range(6), range(6, 12), range(12, 17)]}


def past(p, keys):
    return {s for s in keys if s <= p}


def within(p, blocks):
    """The number of the block that holds p."""
    return next(i for i, block in enumerate(blocks) if p in block)


def same(figure, heads=3):
    return [figure] * heads


def before(p, n):
    return {*range(p + 1)}


def everything(p, n):
    return {*range(n)}


def window_3(p, n):
    return {p, p - 1, p - 2}


def steps_of_5(p, n):
    return {p, p - 5}


def summaries_of_two(p, n):
    """Slots of tokens 0-2, 2-4, 4-6, ..., each once its last token is past, and token 0 for all."""
    return {0} if p < 2 else {*range(p // 2 * 2 + 1)}


def hashed(causal, chunk, sets, selection, queries):
    """Who reads whom of tokens in these buckets [1, S, H, rounds]."""
    return reads(np.asarray(selection), chunk, sets, causal, queries)[0] > 0


def routed(causal, selection, queries):
    """Who reads whom in clusters of these members."""
    return in_one_cluster(selection, causal, queries)


def newest_of_label(window, selection, queries):
    """Who reads whom of tokens with these labels [1, S, H, rounds]."""
    return newest(np.asarray(selection), window, queries)[0]


FIGURES = {
    ("full", 0, "causal"): same(before),
    ("full", 0, "bidirectional"): same(everything),
    ("sliding_window", 0, "causal"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4}),
    ("sliding_window", 0, "bidirectional"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4}),
    ("sliding_window", 1, "causal"): same(lambda p, n: {p, p - 3, p - 6}),
    ("sliding_window", 1, "bidirectional"): same(lambda p, n: {p, p - 3, p - 6}),
    ("sliding_window", 2, "bidirectional"): same(lambda p, n: {p - 3, p - 2, p - 1, p, p + 1, p + 2}),
    ("strided", 0, "causal"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4, p - 8, p - 12, p - 16}),
    ("strided", 0, "bidirectional"): same(
        lambda p, n: {p - 3, p - 2, p - 1, p + 1, p + 2, p + 3} | {p + d for d in EVERY_FOURTH}
    ),
    ("strided", 1, "causal"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4}),
    ("strided", 1, "bidirectional"): same(lambda p, n: {*range(p - 4, p + 5)}),
    ("strided", 2, "causal"): same(lambda p, n: past(p, {p + d for d in EVERY_THIRD})),
    ("strided", 2, "bidirectional"): same(lambda p, n: {p + d for d in EVERY_THIRD}),
    ("fixed", 0, "causal"): same(lambda p, n: past(p, {*range(p // 5 * 5, p + 1)} | LAST_TWO_OF_5)),
    ("fixed", 0, "bidirectional"): same(lambda p, n: {*range(p // 5 * 5, p // 5 * 5 + 5)} | LAST_TWO_OF_5),
    ("fixed", 1, "causal"): [lambda p, n, ends=ends: past(p, {*range(p // 7 * 7, p + 1)} | ends) for ends in OF_7],
    ("fixed", 1, "bidirectional"): [
        lambda p, n, ends=ends: {*range(p // 7 * 7, p // 7 * 7 + 7)} | ends for ends in OF_7
    ],
    ("fixed", 2, "causal"): same(lambda p, n: past(p, LAST_OF_4)),
    ("fixed", 2, "bidirectional"): same(lambda p, n: LAST_OF_4),
    ("block_local", 0, "causal"): same(lambda p, n: {*range(p - p % 5, p + 1)}),
    ("block_local", 0, "bidirectional"): same(lambda p, n: {*range(p - p % 5, p - p % 5 + 5)}),
    ("block_local", 1, "causal"): same(lambda p, n: {*range(p - p % 3 - 6, p + 1)}),
    ("block_local", 1, "bidirectional"): same(lambda p, n: {*range(p - p % 3 - 6, p - p % 3 + 9)}),
    ("blockwise", 0, "bidirectional"): [
        lambda p, n, shift=shift: {*HALVES[n][(within(p, HALVES[n]) + shift) % 2]} for shift in (0, 0, 1)
    ],
    ("blockwise", 1, "bidirectional"): [
        lambda p, n, shift=shift: {*THIRDS[n][(within(p, THIRDS[n]) + shift) % 3]} for shift in (1, 0, 2)
    ],
    ("window_global", 0, "causal"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4, 0}),
    ("window_global", 0, "bidirectional"): same(lambda p, n: {p, p - 1, p - 2, p - 3, p - 4, 0} if p else {*range(n)}),
    ("window_global", 1, "bidirectional"): same(lambda p, n: {p - 4, p - 2, p, p + 2, p + 4, 0} if p else {*range(n)}),
    ("window_global", 2, "causal"): same(lambda p, n: {p, p - 1, p - 2, p - 3}),  # nothing is marked
    ("window_global", 2, "bidirectional"): same(lambda p, n: {p, p - 1, p - 2, p - 3}),
    ("memory_compressed", 0, "causal"): same(lambda p, n: {*range((p + 1) // 3 * 3)}),
    ("memory_compressed", 0, "bidirectional"): same(lambda p, n: {*range(n // 3 * 3)}),
    ("memory_compressed", 1, "causal"): same(summaries_of_two),
    ("memory_compressed", 1, "bidirectional"): same(lambda p, n: {12: {*range(11)}, 17: {*range(17)}}[n]),
    ("lsh", 0, "causal"): functools.partial(hashed, True, 4, "paper"),
    ("lsh", 0, "bidirectional"): functools.partial(hashed, False, 4, "paper"),
    ("lsh", 1, "causal"): functools.partial(hashed, True, 3, "released"),
    ("lsh", 1, "bidirectional"): functools.partial(hashed, False, 3, "released"),
    ("routing", 0, "causal"): functools.partial(routed, True),
    ("routing", 0, "bidirectional"): functools.partial(routed, False),
    ("routing", 1, "causal"): functools.partial(routed, True),
    ("routing", 1, "bidirectional"): functools.partial(routed, False),
    ("routing_strict", 0, "causal"): functools.partial(newest_of_label, 4),
    ("lsh_strict", 0, "causal"): functools.partial(newest_of_label, 3),
    ("lsh_strict", 1, "causal"): functools.partial(newest_of_label, 5),
    # Spans of 1.17, 0 and 7.47 tokens and a ramp of 4 reach 6, 4 and 9 keys (at most 9), the own one excluded.
    ("adaptive_span", 0, "causal"): [lambda p, n, r=r: {p - 1 - d for d in range(r)} for r in (6, 4, 9)],
    ("adaptive_span", 0, "bidirectional"): [
        lambda p, n, r=r: {p - 1 - d for d in range(r)} | {p + 1 + d for d in range(r)} for r in (6, 4, 9)
    ],
    ("heads", 0, "causal"): [window_3, steps_of_5, steps_of_5],
    ("heads", 0, "bidirectional"): [window_3, steps_of_5, steps_of_5],
    ("heads", 1, "causal"): [before, before, window_3],
    ("heads", 1, "bidirectional"): [everything, everything, window_3],
}
"""By a pattern's name, the number of its example, and its form."""


def grids(figure, queries, keys, selection=None):
    """The figure of the last `queries` of `keys` tokens: rows of booleans for each head."""
    if callable(figure):
        return figure(selection, queries).tolist()
    return [[[s in head(p, keys) for s in range(keys)] for p in range(keys - queries, keys)] for head in figure]
