"""Attention patterns, terms and memory. Functions take and return arrays; classes plug them into models."""

from typing import Any

from lra.attention.full import Full, full
from lra.attention.heads import Heads
from lra.attention.layer import Attention
from lra.attention.memory import Memory, Recurrence
from lra.attention.pattern import EXAMPLE_HEADS, Attended, Pattern, Promise, Site
from lra.attention.sliding_window import SlidingWindow, sliding_window
from lra.attention.terms import ALiBi, Rotary, Term, TermModule
from lra.attention.visibility import Entry, Visibility

PATTERNS: dict[str, type[Any]] = {
    "full": Full,
    "sliding_window": SlidingWindow,
    "heads": Heads,
}
"""The registry: the name of a pattern's function and configuration, and its class."""

__all__ = [
    "EXAMPLE_HEADS",
    "PATTERNS",
    "ALiBi",
    "Attended",
    "Attention",
    "Entry",
    "Full",
    "Heads",
    "Memory",
    "Pattern",
    "Promise",
    "Recurrence",
    "Rotary",
    "Site",
    "SlidingWindow",
    "Term",
    "TermModule",
    "Visibility",
    "full",
    "sliding_window",
]
