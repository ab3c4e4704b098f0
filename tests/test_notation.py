"""Patterns as text."""

import functools

import pytest

from lra import notation
from lra.attention import PATTERNS, Full, Heads, SlidingWindow
from lra.errors import UserError


@pytest.mark.parametrize(
    ("text", "cls", "arguments"),
    [
        ("full", Full, {}),
        (" full() ", Full, {}),
        ("sliding_window", SlidingWindow, {"window": 128}),
        ("sliding_window(dilation=3)", SlidingWindow, {"window": 128, "dilation": 3}),
        ("sliding_window(window=(5, 7,), window_right=-2)", SlidingWindow, {"window": (5, 7), "window_right": -2}),
    ],
)
def test_a_text_is_a_class_with_arguments(text, cls, arguments):
    made = notation.read(text, PATTERNS, 5)
    assert (made.func, made.keywords) == (cls, arguments)


def test_patterns_nest():
    made = notation.read("heads(groups=((3, full), (2, sliding_window(window=7))))", PATTERNS, 5)
    (three, full), (two, window) = made.keywords["groups"]
    assert (made.func, three, two) == (Heads, 3, 2)
    assert (full.func, window.func, window.keywords) == (Full, SlidingWindow, {"window": 7})


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_written_reads_as_it_was(name):
    for made in (notation.read(name, PATTERNS, 8), functools.partial(PATTERNS[name], **PATTERNS[name].examples()[0])):
        text = notation.write(made, PATTERNS)
        again = notation.read(text, PATTERNS, 8)
        assert notation.write(again, PATTERNS) == text
        assert again.func is made.func


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' cannot be read: write NAME or NAME"),
        ("full(", "'full(' cannot be read"),
        ("full(\0)", "cannot be read"),
        ("sliding_window(7)", "cannot be read: write NAME or NAME(ARGUMENT=VALUE"),
        ("sliding_window(**{'window': 7})", "cannot be read"),
        ("sliding_window(window=3 + 4)", "cannot be read"),
        ("lra.full", "cannot be read"),
        ("7", "cannot be read"),
        ("fulll", "no pattern 'fulll': did you mean full?"),
        ("heads(groups=((1, fulll),))", "no pattern 'fulll': did you mean full?"),
        ("sliding_window(windw=7)", "sliding_window has no argument 'windw': did you mean window"),
        ("full(site=3)", "full has no argument 'site': there are none"),
        ("sliding_window(window=7.0)", "sliding_window: window needs int"),
        ("sliding_window(window=full)", "sliding_window: window needs int"),
        ("heads(groups=((1, 2),))", "heads: groups needs"),
    ],
)
def test_a_text_that_is_no_pattern(text, words):
    with pytest.raises(UserError) as raised:
        notation.read(text, PATTERNS, 8)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
