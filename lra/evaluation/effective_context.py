"""Relative effective context length (Dai et al. 2019, arXiv:1901.02860, appendix C): how far back a model gains.

A model that predicts badly gains easily from more context, so what counts is the gain over the best model of a group on
the same tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np

THRESHOLD = 0.01
"""Relative gain in perplexity below which more context counts for nothing, as in the paper."""
SHARES = (0.1, 0.5, 1.0)
"""r: shares of the tokens that are hardest for the group; those of the paper."""


@dataclasses.dataclass(frozen=True)
class EffectiveContext:
    """How far back one model gains, within its group.

    Attributes:
        tokens: the context length.
        at_least: whether the lengths ran out while the model still gained, so that the true length may be longer.
        gains: [C - 1] relative gains in perplexity, from each length to the next.
    """

    tokens: int
    at_least: bool
    gains: tuple[float, ...]

    def __str__(self) -> str:
        return f"{'at least ' * self.at_least}{self.tokens}"


def gains(losses: np.ndarray, share: float) -> np.ndarray:
    """Relative gains of each model from each context length to the next, [N, C - 1].

    With b(c, t) = min_i l_i(c, t), the group's loss, and T the `share` of tokens with the largest b(c, t),

        f_i(c, c') = mean over T of min(b(c, t), l_i(c', t)),    g_i = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

    where f_i(c, c), the mean of b, is the same for all models. Of tokens that are equally hard the earlier ones are
    in T, which has round(share * tokens) of them and at least one.

    Args:
        losses: l_i(c, t) in nats [N, C, T]: models, context lengths, tokens.
        share: r, above 0 and at most 1.

    Raises:
        ValueError: shapes or share are not as above.
    """
    if losses.ndim != 3 or losses.shape[1] < 2 or not losses.size:
        raise ValueError(f"losses must be [models, two lengths or more, tokens], but have shape {losses.shape}")
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}, but must be above 0 and at most 1")
    losses = losses.astype(np.float64)
    number = max(1, round(share * losses.shape[2]))
    found = np.empty((losses.shape[0], losses.shape[1] - 1))
    for c, base in enumerate(losses.min(axis=0)[:-1]):
        hardest = np.argsort(-base, kind="stable")[:number]
        longer = np.minimum(base, losses[:, c + 1])[:, hardest].mean(axis=1)
        found[:, c] = -np.expm1(longer - base[hardest].mean())
    return found


def effective_contexts(losses: np.ndarray, lengths: np.ndarray, share: float) -> list[EffectiveContext]:
    """The first context length of each model from which the next one gains less than `THRESHOLD`.

    Args:
        losses: as in `gains`.
        lengths: the context lengths in tokens [C], at equal steps.
        share: as in `gains`.

    Raises:
        ValueError: as `gains`, or the lengths don't ascend at equal steps.

    >>> gaining, idle = [[2.0], [1.0], [1.0]], [[3.0], [3.0], [3.0]]
    >>> first, second = effective_contexts(np.asarray([gaining, idle]), np.asarray([8, 16, 24]), share=1.0)
    >>> str(first), str(second)
    ('16', '8')
    """
    steps = np.diff(lengths)
    if len(lengths) != losses.shape[1] or (steps < 1).any() or (steps != steps[:1]).any():
        raise ValueError(f"the {losses.shape[1]} lengths must ascend at equal steps, but are {lengths}")
    found = []
    for gained in gains(losses, share):
        enough = np.flatnonzero(gained < THRESHOLD)
        last = len(gained) if not enough.size else int(enough[0])
        found.append(EffectiveContext(int(lengths[last]), not enough.size, tuple(gained.tolist())))
    return found
