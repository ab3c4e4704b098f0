"""The score by position in the segment: what the first tokens of a segment pay for the context that they lack."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lra.attention import draw
from lra.attention.visibility import Array
from lra.data import Batch, Corpus
from lra.evaluation.breakdown import Breakdown, perplexity
from lra.evaluation.protocols import Protocol
from lra.models import Decoder


class ByPosition(Breakdown):
    """Tokens and nats at each position 0..T-1 of the protocol's segments, over all that are scored there."""

    name = "position"

    def begin(self, model: Decoder, corpus: Corpus, protocol: Protocol, reach: int) -> None:
        self._tokens, self._nats = np.zeros(protocol.segment, np.int64), np.zeros(protocol.segment)

    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Array]) -> None:
        counts = batch.weights > 0
        self._tokens += counts.sum(0)
        self._nats += np.where(counts, nats, 0).sum(0, dtype=np.float64)

    @property
    def nats_per_token(self) -> np.ndarray:
        """The mean at each position [T]; NaN where nothing is scored."""
        return np.divide(self._nats, self._tokens, out=np.full(self._nats.shape, np.nan), where=self._tokens > 0)

    def as_dict(self) -> dict[str, Any]:
        means = [None if np.isnan(mean) else mean for mean in self.nats_per_token.tolist()]
        return {"unit": "position in the segment", "tokens": self._tokens.tolist(), "nats_per_token": means}

    def table(self) -> Table:
        """Octaves of positions: 0, 1, 2-3, 4-7 and so on."""
        table = Table(
            "position", "tokens", "nats per token", "perplexity",
            title="by position in the segment", title_justify="left",
        )  # fmt: skip
        for column in table.columns:
            column.justify = "right"
        size = self._tokens.size
        bounds = [0, *(1 << n for n in range((size - 1).bit_length())), size]
        for begin, end in itertools.pairwise(bounds):
            tokens, nats = int(self._tokens[begin:end].sum()), float(self._nats[begin:end].sum())
            places = str(begin) if end == begin + 1 else f"{begin}-{end - 1}"
            above = perplexity(nats / tokens) if tokens else None
            mean = f"{nats / tokens:.4f}" if tokens else "-"
            table.add_row(places, f"{tokens:,}", mean, "-" if above is None else f"{above:,.2f}")
        return table

    def png(self, path: Path, caption: str) -> None:
        """A curve through every position."""
        figure = draw.canvas(8, 4)
        axis = figure.subplots()
        axis.plot(np.arange(self._tokens.size), self.nats_per_token, marker=".", linewidth=1)
        axis.set_xlabel("position in the segment")
        axis.set_ylabel("nats per token")
        figure.suptitle(f"By position, {caption}", fontsize=9, wrap=True)
        draw.save(figure, path, f"By position, {caption}")
