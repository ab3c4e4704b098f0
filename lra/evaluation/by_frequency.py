"""How well rare tokens are predicted: the score by how often a token occurs in training.

Rae et al. 2019 (arXiv:1911.05507) show WikiText-103 in these buckets.
"""

from __future__ import annotations

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

BUCKETS = (">10K", "1K-10K", "100-1K", "<100")
"""The paper's columns. A token that occurs 10,000 times is in the second, 1,000 times too, 100 times in the third."""
BOUNDS = (10_001, 1_000, 100)
"""The smallest count of each bucket but the last."""
PART_TOKENS = 1 << 22
"""Tokens that are counted at once: a split has more of them than fit in memory."""


def token_counts(tokens: np.ndarray, size: int) -> np.ndarray:
    """How often each id occurs, [V] int64, for tokens that may be memory-mapped.

    >>> token_counts(np.asarray([2, 0, 2], np.uint8), size=4)
    array([1, 0, 2, 0])
    """
    counts = np.zeros(size, np.int64)
    for begin in range(0, tokens.size, PART_TOKENS):
        counts += np.bincount(tokens[begin : begin + PART_TOKENS], minlength=size)
    return counts


class ByFrequency(Breakdown):
    """Tokens and nats by how often the target occurs in the split "train"; the buckets add up to the report's total.

    The last bucket holds what never occurs in training, too; that part of it is shown once more, as unseen.
    """

    name = "frequency"

    def begin(self, model: Decoder, corpus: Corpus, protocol: Protocol, reach: int) -> None:
        counts = token_counts(corpus.tokens("train"), corpus.vocabulary.size)
        bucket = sum((counts < bound).astype(np.int64) for bound in BOUNDS)
        self._bucket = np.where(counts == 0, len(BUCKETS), bucket)  # [V], what is unseen apart
        self._tokens, self._nats = np.zeros(len(BUCKETS) + 1, np.int64), np.zeros(len(BUCKETS) + 1)

    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Array]) -> None:
        counts = batch.weights > 0
        bucket = self._bucket[batch.targets[counts]]
        self._tokens += np.bincount(bucket, minlength=self._tokens.size)
        self._nats += np.bincount(bucket, weights=nats[counts].astype(np.float64), minlength=self._nats.size)

    def as_dict(self) -> dict[str, Any]:
        (*tokens, unseen), (*nats, unseen_nats) = self._tokens.tolist(), self._nats.tolist()
        tokens[-1], nats[-1] = tokens[-1] + unseen, nats[-1] + unseen_nats
        return {
            "unit": "occurrences in train",
            "buckets": [self._entry(*each) for each in zip(BUCKETS, tokens, nats, strict=True)],
            "unseen": self._entry("0", unseen, unseen_nats) | {"part_of": BUCKETS[-1]},
        }

    def _entry(self, occurrences: str, tokens: int, nats: float) -> dict[str, Any]:
        mean = nats / tokens if tokens else None
        return {
            "occurrences": occurrences,
            "tokens": tokens,
            "nats_total": nats,
            "nats_per_token": mean,
            "perplexity": None if mean is None else perplexity(mean),
            "share_of_tokens": tokens / int(self._tokens.sum()),
            "share_of_nats": nats / total if (total := float(self._nats.sum())) else None,
        }

    def table(self) -> Table:
        table = Table(
            "in train", "tokens", "nats per token", "perplexity", "share of tokens", "share of nats",
            title="by how often the token occurs in train", title_justify="left",
            caption="unseen: never in train, a part of <100", caption_justify="left",
        )  # fmt: skip
        for column in table.columns[1:]:
            column.justify = "right"
        shown = self.as_dict()
        for entry in (*shown["buckets"], shown["unseen"] | {"occurrences": "unseen"}):
            values = (
                (entry["nats_per_token"], ".4f"), (entry["perplexity"], ",.5g"),
                (entry["share_of_tokens"], ".2%"), (entry["share_of_nats"], ".2%"),
            )  # fmt: skip
            cells = ("-" if value is None else format(value, form) for value, form in values)
            table.add_row(entry["occurrences"], f"{entry['tokens']:,}", *cells)
        return table

    def png(self, path: Path, caption: str) -> None:
        """Bars of nats per token by bucket, with shares of tokens and of nats beside them."""
        entries = self.as_dict()["buckets"]
        figure = draw.canvas(9, 4)
        left, right = figure.subplots(1, 2)
        names = [f"{entry['occurrences']}\n{entry['tokens']:,} tokens" for entry in entries]
        places = np.arange(len(BUCKETS))
        left.bar(places, [entry["nats_per_token"] or 0 for entry in entries])
        left.set_ylabel("nats per token")
        for shift, name in ((-0.2, "tokens"), (0.2, "nats")):
            shares = [entry[f"share_of_{name}"] or 0 for entry in entries]
            right.bar(places + shift, shares, width=0.4, label=f"share of {name}")
        right.legend()
        for axis in (left, right):
            axis.set_xticks(places, names)
            axis.tick_params(labelsize=8)
        figure.suptitle(f"By frequency, {caption}", fontsize=9, wrap=True)
        figure.supxlabel("occurrences of the token in train", fontsize=8)
        draw.save(figure, path, f"By frequency, {caption}")
