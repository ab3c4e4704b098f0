"""Units from known sums and counts; what a report refuses."""

import json
import math
from typing import Any

import pytest
from rich.console import Console

from lra.evaluation import Report


def report(**values: Any) -> Report:
    known: dict[str, Any] = {
        "corpus": "toy", "corpus_description": "toy, digest 0123", "split": "test", "tokenisation": "bytes (256 ids)",
        "protocol": "block, segment 7, batch size 16", "context": "windows of 7 tokens", "tokens_scored": 40,
        "tokens_expected": 40, "tokens_right": 10, "bytes": 120, "characters": 80, "nats_total": 100.0,
        "partial": False, "seconds": 8.0, "step": 19,
    }  # fmt: skip
    return Report(**{**known, **values})


def test_known_units() -> None:
    known = report()
    assert known.nats_per_token == 2.5
    assert known.bits_per_byte == pytest.approx(1.2022, abs=5e-5)
    assert known.perplexity == pytest.approx(12.182, abs=5e-4)
    assert known.tokens_per_second == 5
    assert known.perplexity_per_word is None
    assert report(words=25).perplexity_per_word == pytest.approx(54.598, abs=5e-4)
    assert known.accuracy == 0.25
    assert known.bits_per_character == pytest.approx(1.8034, abs=5e-5)
    assert known.bits_per_word is None
    assert report(words=25).bits_per_word == pytest.approx(5.7708, abs=5e-5)


def test_a_bit_a_token() -> None:
    """Of a text of single characters, in all units (U60)."""
    one = report(nats_total=40 * math.log(2), bytes=40, characters=40, words=8)
    for unit in (one.bits_per_byte, one.bits_per_character, one.bits_per_word / 5, one.perplexity / 2):
        assert unit == pytest.approx(1.0, rel=1e-12)
    assert one.perplexity_per_word == pytest.approx(32)


def test_a_part_in_which_no_character_begins() -> None:
    part = report(tokens_expected=400, partial=True, characters=0)
    assert part.bits_per_character == math.inf
    assert part.as_dict()["bits_per_character"] is None


def test_partial_units_use_what_was_scored() -> None:
    part = report(tokens_expected=400, partial=True)
    assert part.bits_per_byte == report().bits_per_byte
    assert part.nats_per_token == 2.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens_expected": 41}, "40 of the 41 tokens of toy test"),
        ({"tokens_expected": 39}, "40 of the 39"),
        ({"tokens_expected": 39, "partial": True}, "40 of the 39"),
        ({"partial": True}, "partial=True"),
        ({"tokens_scored": 0, "tokens_expected": 0}, "0 tokens and 120 bytes"),
        ({"bytes": 0}, "40 tokens and 0 bytes"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report(**values)


def test_as_dict_is_json() -> None:
    values = json.loads(json.dumps(report().as_dict(), allow_nan=False))
    assert values == {
        "corpus": "toy", "corpus_description": "toy, digest 0123", "split": "test", "tokenisation": "bytes (256 ids)",
        "protocol": "block, segment 7, batch size 16", "context": "windows of 7 tokens", "tokens_scored": 40,
        "tokens_expected": 40, "tokens_right": 10, "bytes": 120, "characters": 80, "nats_total": 100.0,
        "partial": False, "seconds": 8.0, "step": 19, "bits_per_character": 100 / math.log(2) / 80,
        "bits_per_word": None, "accuracy": 0.25, "nats_per_token": 2.5, "bits_per_byte": 100 / math.log(2) / 120,
        "perplexity": math.exp(2.5), "tokens_per_second": 5.0, "weights": "last", "causality": "strict",
        "words": None, "perplexity_per_word": None,
    }  # fmt: skip


@pytest.mark.parametrize("causality", ["strict", "selection"])
def test_a_selection_that_looks_at_later_tokens_is_marked(causality: str) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report(causality=causality).table())
    assert ("depends on later tokens" in capture.get()) == (causality == "selection")


def test_a_perplexity_beyond_floats() -> None:
    hopeless = report(nats_total=40_000.0)
    assert hopeless.perplexity == math.inf
    assert hopeless.as_dict()["perplexity"] is None
    json.dumps(hopeless.as_dict(), allow_nan=False)


@pytest.mark.parametrize("partial", [False, True])
def test_the_table_shows_the_protocol_and_the_counts(partial: bool) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report(tokens_expected=4_000 if partial else 40, partial=partial, words=25).table())
    text = capture.get()
    assert "54.5982" in text
    for shown in (
        "1.2022",
        "1.8034",
        "5.7708",
        "2.5000",
        "12.1825",
        "25.00%",
        "block, segment 7",
        "windows of 7",
        "bytes (256 ids)",
        "digest 0123",
    ):
        assert shown in text
    assert ("40 of 4,000 (partial)" if partial else "40 of 40") in text
    assert ("partial" in text) == partial
