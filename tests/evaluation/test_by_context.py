"""The score by context length: each token from exactly so many tokens, against a window made by hand for each."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib import image
from rich.console import Console

from lra.attention import LSH, Full, LearnedDistance
from lra.errors import UserError
from lra.evaluation import BREAKDOWNS, Block, ByContext, Carried, reach
from lra.models import Decoder, LearnedPositions

Make = Callable[..., Decoder]


def by_hand(model: Decoder, tokens: np.ndarray, lengths: tuple[int, ...], targets: Sequence[int]) -> np.ndarray:
    """-log P(token t | the c tokens before it), [C, targets]."""
    graph, state = nnx.split(model)

    @jax.jit
    def last(state: Any, windows: np.ndarray, targets: np.ndarray) -> jax.Array:
        return nnx.merge(graph, state).score(windows, targets).nats[:, -1]

    rows = []
    for c in lengths:
        windows = np.asarray([[int(tokens[t - n]) for n in range(c, 0, -1)] for t in targets], np.int32)
        following = np.asarray([[int(tokens[t - n]) for n in range(c - 1, -1, -1)] for t in targets], np.int32)
        rows.append(np.asarray(last(state, windows, following)))
    return np.asarray(rows)


@pytest.mark.parametrize("slots", [None, 5])
def test_each_token_from_exactly_so_many(make_model: Make, corpus: Any, slots: int | None) -> None:
    """A model with memory, too: it is empty when a window begins."""
    breakdown = ByContext([3, 6], targets=11)
    model = make_model(slots)
    report = breakdown.measure("a", model, corpus, "test", batch_tokens=13)
    expected = by_hand(make_model(), corpus.tokens("test"), (3, 6), range(6, 17))
    np.testing.assert_allclose(breakdown.losses, expected[None], rtol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    assert (report.tokens_scored, report.partial) == (17, True)
    assert report.protocol == "sliding, window 6, stride 1, batch size 2"


def test_tokens_that_are_no_targets(make_model: Make, corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read, but not scored."""
    scored = np.arange(101) % 5 < 2
    monkeypatch.setattr(corpus, "scored", lambda split: scored, raising=False)
    targets = [t for t in range(6, 101) if scored[t]][:11]
    breakdown = ByContext([3, 6], targets=11)
    breakdown.measure("a", make_model(), corpus, "test", batch_tokens=13)
    expected = by_hand(make_model(), corpus.tokens("test"), (3, 6), targets)
    np.testing.assert_allclose(breakdown.losses, expected[None], rtol=1e-5)


def test_a_split_that_is_too_short(make_model: Make, corpus: Any) -> None:
    with pytest.raises(UserError, match=r"toy test has 101 tokens, none of which is scored behind 101 others"):
        ByContext([1, 101]).measure("a", make_model(), corpus, "test", batch_tokens=1)


@pytest.mark.parametrize(
    ("lengths", "targets", "words"),
    [
        ([4], 1, "two or more"), ([], 1, "two or more"), ([0, 4], 1, r"\[0, 4\], but must be two or more, ascending"),
        ([4, 4], 1, "ascending"), ([2, 4, 8], 1, "equal steps"), ([2, 4], 0, "0 tokens are to be scored"),
    ],
)  # fmt: skip
def test_wrong_arguments(lengths: list[int], targets: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ByContext(lengths, targets)


def test_more_context_than_positions() -> None:
    options = {"num_layers": 1, "width": 8, "num_heads": 2, "pattern": Full, "vocabulary_size": 11}
    position = partial(LearnedPositions, max_length=6)
    model = nnx.eval_shape(lambda: Decoder(**options, position=position, rngs=nnx.Rngs(0)))
    words = r"runs/a cannot read 8 tokens of context, choose others \(Sliding.window is 8, .* 6 positions"
    with pytest.raises(UserError, match=words):
        ByContext([8, 16]).check("runs/a", model)


def test_contexts_that_a_pattern_or_a_term_cannot_read(make_model: Make) -> None:
    ByContext([3, 6]).check("runs/a", make_model(5))
    hashed = make_model(pattern=partial(LSH, chunk=4, buckets=2, rounds=1))
    with pytest.raises(UserError, match=r"runs/a cannot read 3 tokens of context, choose others \(LSH.chunk is 4, but"):
        ByContext([3, 6]).check("runs/a", hashed)
    short = make_model(terms=(partial(LearnedDistance, length=5),))
    with pytest.raises(UserError, match=r"runs/a cannot read 6 tokens .*the table has vectors for distances up to 4"):
        ByContext([3, 6]).check("runs/a", short)


def test_reach(make_model: Make) -> None:
    assert reach(make_model(), Block(segment=7)) == 7
    assert reach(make_model(5), Block(segment=7)) == 12
    assert reach(make_model(5), Carried(streams=2, segment=7, memory_length=3)) == 10


@pytest.fixture
def known() -> ByContext:
    """Model "a" gains up to 8 tokens, "b", which starts better, as far as is measured."""
    breakdown = ByContext([4, 8, 12])
    breakdown._losses = {"a": [np.full(10, x) for x in (3.0, 1.5, 1.5)], "b": [np.full(10, x) for x in (2.0, 1.6, 1.0)]}
    return breakdown


def test_as_json(known: ByContext) -> None:
    shown = json.loads(json.dumps(known.as_dict(), allow_nan=False))
    assert (shown["lengths"], shown["targets"], shown["threshold"]) == ([4, 8, 12], 10, 0.01)
    a, b = shown["runs"]
    assert (a["run"], a["nats_per_token"]) == ("a", [3.0, 1.5, 1.5])
    assert a["perplexity"] == pytest.approx(np.exp([3.0, 1.5, 1.5]))
    for share, ours, theirs in zip(
        (0.1, 0.5, 1.0), a["relative_effective_context_length"], b["relative_effective_context_length"], strict=True
    ):
        assert (ours["share"], ours["tokens"], ours["at_least"]) == (share, 8, False)
        assert ours["gains"] == pytest.approx([1 - np.exp(-0.5), 0])
        assert (theirs["tokens"], theirs["at_least"]) == (12, True)
        assert theirs["gains"] == pytest.approx([1 - np.exp(-0.4), 1 - np.exp(-0.5)])
    assert BREAKDOWNS["context"] is ByContext


def test_as_table_and_png(known: ByContext, tmp_path: Path) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(known.table())
    rows = [line.split("│")[1:-1] for line in capture.get().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["4", "3.0000", "2.0000"], ["8", "1.5000", "1.6000"], ["12", "1.5000", "1.0000"],
        *(["effective, r = " + r, "8", "at least 12"] for r in ("0.1", "0.5", "1.0")),
    ]  # fmt: skip
    known.png(tmp_path / "by.png", "runs/toy at step 3")
    assert image.imread(tmp_path / "by.png").shape[1] > 400
    assert b"By context, runs/toy at step 3" in (tmp_path / "by.png").read_bytes()
