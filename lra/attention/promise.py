"""What a pattern can do; what it does not promise raises when the model is built."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Promise:
    """What an instance of a pattern can do. What is not promised raises when the model is built.

    Attributes:
        causal: "strict": later tokens change nothing; "selection": values never leak, but membership of content-based
            sets can depend on later tokens; None: no causal form.
        bidirectional: has a bidirectional form.
        memory: S > T keys.
        gaps: positions may leave gaps, as those of compressed slots do.
        padding: rows with invalid tokens.
        packing: "equal": packed documents give what they give alone; "masked": they don't mix, but block borders follow
            the row; None: no segments.
        decode: "exact": one token at a time equals the full pass; "rule": by a rule of its own; None: no decoding.
        distances: terms by distance are exact.
        globals: global positions.
        dropout: dropout of attention weights.
        sorts: entries are sorted by content, so that equality is up to rounding.
    """

    causal: Literal["strict", "selection"] | None = None
    bidirectional: bool = False
    memory: bool = False
    gaps: bool = False
    padding: bool = False
    packing: Literal["equal", "masked"] | None = None
    decode: Literal["exact", "rule"] | None = None
    distances: bool = False
    globals: bool = False
    dropout: bool = False
    sorts: bool = False

    def weakest(self, other: Promise) -> Promise:
        """What holds where both are used side by side."""
        order: dict[str, tuple[Any, ...]] = {
            "causal": (None, "selection", "strict"),
            "packing": (None, "masked", "equal"),
            "decode": (None, "rule", "exact"),
        }
        values = {}
        for field in dataclasses.fields(self):
            ranks = order.get(field.name, (False, True))
            least = min(ranks.index(getattr(promise, field.name)) for promise in (self, other))
            values[field.name] = ranks[least]
        values["sorts"] = self.sorts or other.sorts
        return Promise(**values)


EVERYTHING = Promise(
    causal="strict", bidirectional=True, memory=True, padding=True, packing="equal", decode="exact", distances=True,
    dropout=True,
)  # fmt: skip
"""What patterns promise whose rule is one of distances alone."""
BORDERED = dataclasses.replace(EVERYTHING, packing="masked")
"""What patterns promise whose rule has borders in the row."""


def require(promise: Promise, name: str, **options: bool) -> None:
    """Raises for the first option that is wanted and not promised."""
    for option, wanted in options.items():
        if wanted and not getattr(promise, option):
            raise ValueError(
                f"{name} does not promise {option}, which this model needs: choose one that does (`lra attention list`)"
            )
