"""Attention patterns, terms and memory. Functions take and return arrays; classes plug them into models."""

from typing import Any

from lra.attention.adaptive_span import AdaptiveSpan, adaptive_span
from lra.attention.block_local import BlockLocal, block_local
from lra.attention.blockwise import Blockwise, blockwise
from lra.attention.compressive import CompressiveMemory
from lra.attention.distance_terms import LearnedDistance, ShawRelative, XLRelative
from lra.attention.fixed import Fixed, fixed
from lra.attention.full import Full, full
from lra.attention.heads import Heads
from lra.attention.layer import Attention
from lra.attention.lsh import LSH, lsh
from lra.attention.lsh_strict import StrictLSH, lsh_strict
from lra.attention.memory import Memory, Recurrence
from lra.attention.memory_compressed import MemoryCompressed, memory_compressed
from lra.attention.pattern import EXAMPLE_HEADS, Attended, Pattern, Site
from lra.attention.promise import Promise
from lra.attention.routing import Routing, routing
from lra.attention.routing_strict import StrictRouting, routing_strict
from lra.attention.sliding_window import SlidingWindow, sliding_window
from lra.attention.strided import Strided, strided
from lra.attention.terms import ALiBi, Rotary, Term, TermModule
from lra.attention.visibility import Entry, Visibility
from lra.attention.window_global import WindowGlobal, window_global

PATTERNS: dict[str, type[Any]] = {
    "full": Full,
    "sliding_window": SlidingWindow,
    "strided": Strided,
    "fixed": Fixed,
    "block_local": BlockLocal,
    "blockwise": Blockwise,
    "window_global": WindowGlobal,
    "memory_compressed": MemoryCompressed,
    "adaptive_span": AdaptiveSpan,
    "lsh": LSH,
    "lsh_strict": StrictLSH,
    "routing": Routing,
    "routing_strict": StrictRouting,
    "heads": Heads,
}
"""The registry: the name of a pattern's function and configuration, and its class."""

__all__ = [
    "EXAMPLE_HEADS",
    "LSH",
    "PATTERNS",
    "ALiBi",
    "AdaptiveSpan",
    "Attended",
    "Attention",
    "BlockLocal",
    "Blockwise",
    "CompressiveMemory",
    "Entry",
    "Fixed",
    "Full",
    "Heads",
    "LearnedDistance",
    "Memory",
    "MemoryCompressed",
    "Pattern",
    "Promise",
    "Recurrence",
    "Rotary",
    "Routing",
    "ShawRelative",
    "Site",
    "SlidingWindow",
    "StrictLSH",
    "StrictRouting",
    "Strided",
    "Term",
    "TermModule",
    "Visibility",
    "WindowGlobal",
    "XLRelative",
    "adaptive_span",
    "block_local",
    "blockwise",
    "fixed",
    "full",
    "lsh",
    "lsh_strict",
    "memory_compressed",
    "routing",
    "routing_strict",
    "sliding_window",
    "strided",
    "window_global",
]
