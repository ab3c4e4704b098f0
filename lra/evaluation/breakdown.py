"""What stands beside a score: collected batch by batch in the very pass that scores."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.table import Table

from lra.attention.core import Terms
from lra.attention.visibility import Array
from lra.data import Batch, Corpus
from lra.evaluation.protocols import Protocol
from lra.models import Decoder


class Breakdown(abc.ABC):
    """Collects one evaluation, on the host: `begin`, `probes` and `add` for each batch, then a form to show it in.

    Attributes:
        name: as in `lra eval --by NAME`.
        metrics: which of the model's metrics `add` reads; others never leave the device.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def begin(self, model: Decoder, corpus: Corpus, protocol: Protocol, reach: int) -> None:
        """Called once, before the first batch.

        Args:
            model: that will score.
            corpus: whose tokens it will score.
            protocol: in which context.
            reach: tokens that a query may read, its segment's and the slots of memory before it.

        Raises:
            UserError: a model or a corpus of which this cannot be said.
        """

    def probes(self, batch: Batch) -> Terms:
        """What measures while the model scores a batch."""
        return ()

    @abc.abstractmethod
    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Array]) -> None:
        """A batch with its metrics and the nats of its targets [B, T], which mean nothing where its weights are 0."""

    @abc.abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """For JSON."""

    @abc.abstractmethod
    def table(self) -> Table:
        """To print with rich."""

    @abc.abstractmethod
    def png(self, path: Path, caption: str) -> None:
        """Writes a drawing; raises `UserError` where it cannot."""


def perplexity(nats_per_token: float) -> float | None:
    """Its exponential; None where no float holds it.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, None)
    """
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return None
