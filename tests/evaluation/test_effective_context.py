"""Relative effective context length against loops that follow the paper word for word."""

import math

import numpy as np
import pytest

from lra.evaluation.effective_context import EffectiveContext, effective_contexts, gains


def loops(losses: np.ndarray, lengths: list[int], share: float) -> list[tuple[int, bool]]:
    """The algorithm of appendix C, one token at a time."""
    models, contexts, tokens = losses.shape

    def f(i: int, c: int, longer: int) -> float:
        base = [min(losses[m][c][t] for m in range(models)) for t in range(tokens)]
        hardest = sorted(range(tokens), key=lambda t: (-base[t], t))[: max(1, round(share * tokens))]
        return sum(min(base[t], losses[i][longer][t]) for t in hardest) / len(hardest)

    found = []
    for i in range(models):
        c = 0
        while c + 1 < contexts and 1 - math.exp(f(i, c, c + 1)) / math.exp(f(i, c, c)) >= 0.01:
            c += 1
        found.append((lengths[c], c + 1 == contexts))
    return found


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_loops(rng: np.random.Generator, share: float) -> None:
    """Losses that fall by less and less, so that models stop at different lengths."""
    lengths, answers = [3, 6, 9, 12, 15, 18, 21], set()
    for _ in range(20):
        fall = rng.exponential(0.3, (3, 7, 31)) / np.arange(1, 8)[:, None] ** rng.uniform(0, 4, (3, 1, 1))
        losses = 3 + rng.exponential(2, 31) - np.cumsum(fall, axis=1)
        found = effective_contexts(losses, np.asarray(lengths), share)
        assert [(each.tokens, each.at_least) for each in found] == loops(losses, lengths, share)
        answers |= {str(each) for each in found}
    assert len(answers) > 4
    assert "at least 21" in answers


def test_equally_hard_tokens() -> None:
    """The earlier one is in the half, whatever the order of the sort."""
    losses = np.full((1, 2, 40), 2.0)
    losses[0, 1, 20:] = 0
    assert gains(losses, 0.5) == 0
    assert gains(losses[..., ::-1], 0.5) == pytest.approx(1 - math.exp(-2))


def test_the_group_sets_what_counts() -> None:
    """A bad model that improves gains nothing where a better one was there before."""
    bad, good = np.asarray([[9.0] * 5, [5.0] * 5, [4.0] * 5]), np.asarray([[4.0] * 5, [3.9] * 5, [3.9] * 5])
    lengths = np.asarray([8, 16, 24])
    assert effective_contexts(np.stack([bad]), lengths, 1.0)[0] == EffectiveContext(
        24, True, (pytest.approx(1 - math.exp(-4)), pytest.approx(1 - math.exp(-1)))
    )
    assert [str(each) for each in effective_contexts(np.stack([bad, good]), lengths, 1.0)] == ["8", "16"]


def test_one_token_is_left_of_a_small_share() -> None:
    losses = np.asarray([[[1.0, 3.0, 2.0], [1.0, 2.0, 0.0]]])
    assert gains(losses, 0.1) == pytest.approx(1 - math.exp(-1))
    assert gains(losses, 1.0) == pytest.approx(1 - math.exp(-1))


@pytest.mark.parametrize(
    ("shape", "lengths", "share", "words"),
    [
        ((2, 3), [1, 2, 3], 1.0, r"must be \[models, two lengths or more, tokens\]"),
        ((1, 1, 5), [1], 1.0, "two lengths or more"),
        ((1, 2, 0), [1, 2], 1.0, "two lengths or more"),
        ((1, 2, 5), [1, 2], 0.0, "share is 0.0, but must be above 0"),
        ((1, 2, 5), [1, 2], 1.1, "share is 1.1"),
        ((1, 3, 5), [1, 2, 4], 1.0, "must ascend at equal steps"),
        ((1, 2, 5), [2, 1], 1.0, "must ascend"),
        ((1, 2, 5), [1, 2, 3], 1.0, "the 2 lengths"),
    ],
)
def test_wrong_arguments(shape: tuple[int, ...], lengths: list[int], share: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        effective_contexts(np.zeros(shape), np.asarray(lengths), share)
