"""Weight by distance through the evaluation core: equal weights, memory, padding; and how it is shown."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib import image
from rich.console import Console

from lra.attention import Full, Heads, MemoryCompressed
from lra.errors import UserError
from lra.evaluation import BREAKDOWNS, Block, ByDistance, Carried, Protocol, evaluate
from lra.models import Decoder

Make = Callable[..., Decoder]


def measured(model: Decoder, corpus: Any, protocol: Protocol) -> ByDistance:
    breakdown = ByDistance()
    evaluate(model, corpus, "test", protocol, breakdown=breakdown)
    return breakdown


@pytest.mark.parametrize("slots", [None, 5])
def test_equal_weights(make_model: Make, corpus: Any, slots: int | None) -> None:
    """Where all logits are 0, a query spends 1/n on each of the n nearest tokens; segments of 7 in rows of 34 or 33."""
    graph, state = nnx.split(make_model(slots))
    model = nnx.merge(graph, jax.tree.map(lambda x: 0 * x, state))
    reach, expected = 7 + (slots or 0), np.zeros(7 + (slots or 0) + 1)
    for row in (34, 34, 33):
        for t in range(row):
            remembered = min(slots or 0, t // 7 * 7)
            expected[: t % 7 + 1 + remembered] += 1 / (t % 7 + 1 + remembered) / 101
    breakdown = measured(model, corpus, Carried(streams=3, segment=7, batch_size=2))
    assert (breakdown.queries, breakdown.reach) == (101, reach)
    np.testing.assert_allclose(breakdown.weight, np.broadcast_to(expected, (2, 2, reach + 1)), atol=1e-6)
    np.testing.assert_allclose(breakdown.effective, expected @ np.arange(reach + 1), rtol=1e-6)


def test_segments_with_memory_are_one_long_window(make_model: Make, corpus: Any) -> None:
    whole = measured(make_model(), corpus, Block(segment=101, batch_size=1)).weight
    parts = measured(make_model(memory=103), corpus, Carried(streams=1, segment=7)).weight
    np.testing.assert_allclose(parts[..., :101], whole[..., :101], atol=1e-5)
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-5)
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 1e-2  # heads differ


def test_the_score_stays_as_it_is(make_model: Make, corpus: Any) -> None:
    model, protocol = make_model(), Carried(streams=3, segment=7, batch_size=2)
    plain = evaluate(model, corpus, "test", protocol)
    measured = evaluate(model, corpus, "test", protocol, breakdown=ByDistance())
    assert measured.nats_total == pytest.approx(plain.nats_total, rel=1e-6)


@pytest.fixture
def known() -> ByDistance:
    """Two layers of two heads over 4 queries: own token; half and half; all beyond; nothing at all."""
    breakdown = ByDistance()
    breakdown.patterns, breakdown.reach, breakdown.queries = ["Full", "Heads"], 5, 4
    total = np.zeros((2, 2, 6))
    total[0, 0, 0] = total[1, 0, 5] = 4
    total[0, 1, [1, 4]] = 2
    breakdown._total = total
    return breakdown


def test_as_json(known: ByDistance) -> None:
    shown = json.loads(json.dumps(known.as_dict(), allow_nan=False))
    assert shown == {
        "unit": "tokens", "queries": 4, "bins": {"first": 0, "width": 1, "count": 5, "beyond": "5 and more"},
        "layers": [
            {
                "layer": 0, "pattern": "Full", "weight": [[1, 0, 0, 0, 0], [0, 0.5, 0, 0, 0.5]], "beyond": [0, 0],
                "effective_distance": [0, 2.5], "largest_effective_distance": 2.5,
            },
            {
                "layer": 1, "pattern": "Heads", "weight": [[0] * 5] * 2, "beyond": [1, 0],
                "effective_distance": [5, None], "largest_effective_distance": 5,
            },
        ],
    }  # fmt: skip
    assert BREAKDOWNS["distance"] is ByDistance


def test_as_table(known: ByDistance) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(known.table())
    header, first, second = (
        [cell.strip() for cell in line.strip("┃│\n").replace("┃", "│").split("│")]
        for line in capture.get().splitlines()
        if line[:1] in "┃│" and line
    )
    assert header == ["layer", "effective by head", "largest", "<1", "<2", "<4", "<8"]
    assert first == ["0", "0.0 2.5", "2.5", "0.50", "0.75", "0.75", "1.00"]
    assert second == ["1", "5.0 -", "5.0", "0.00", "0.00", "0.00", "0.50"]


def test_as_png(known: ByDistance, tmp_path: Path) -> None:
    path = tmp_path / "by.png"
    known.png(path, "runs/toy at step 3")
    assert image.imread(path).shape[1] > 400
    assert b"Weight by distance, runs/toy at step 3" in path.read_bytes()
    with pytest.raises(UserError, match=r"cannot write .*No such file or directory.*--png"):
        known.png(tmp_path / "missing" / "by.png", "")


def test_a_pattern_without_distances() -> None:
    compressed = functools.partial(MemoryCompressed, rate=3)
    for pattern in ((Full, compressed), (Full, functools.partial(Heads, groups=((1, Full), (1, compressed))))):
        options = {"num_layers": 2, "width": 8, "num_heads": 2, "pattern": pattern, "vocabulary_size": 11}
        model = nnx.eval_shape(lambda options=options: Decoder(**options, rngs=nnx.Rngs(0)))
        with pytest.raises(UserError, match=r"in layer 1, MemoryCompressed reads summaries .*: --by distance needs"):
            ByDistance().begin(model, None, None, 7)
