"""Where attention goes: mean weight by layer, head and distance, as papers on long context argue with.

Sukhbaatar et al. 2019 (arXiv:1905.07799, figures 2 and 4) and Rae et al. 2019 (arXiv:1911.05507, figure 2) show such
means. The weights are those of the scoring pass itself (`lra.attention.probe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lra.attention import draw
from lra.attention.core import Terms
from lra.attention.probe import WEIGHT_BY_DISTANCE, Probe, refusal
from lra.attention.visibility import Array
from lra.data import Batch, Corpus
from lra.errors import UserError
from lra.evaluation.breakdown import Breakdown
from lra.evaluation.protocols import Protocol
from lra.models import Decoder

SHARES = 8
"""At most this many columns of shares."""
DECIMALS = 9
"""Of weights in JSON."""


class ByDistance(Breakdown):
    """Mean weight by layer, head and distance in tokens, over all scored queries.

    Distance is a query's position minus a key's: 0 for its own token, and slots of memory stand before the segment.
    What lies further than the segment and its slots (slots that stand for more than one token) counts as beyond.
    """

    name = "distance"
    metrics = (WEIGHT_BY_DISTANCE,)

    def begin(self, model: Decoder, corpus: Corpus, protocol: Protocol, reach: int) -> None:
        layers = [layer.attention for layer in model.stack.layers]
        for number, attention in enumerate(layers):
            if reason := refusal(attention.pattern):
                raise UserError(
                    f"in layer {number}, {reason}: --by distance needs patterns that read tokens and promise distances "
                    "(`lra attention list`)"
                )
        names = [type(attention.pattern).__name__ for attention in layers]
        self.patterns = [names[i % len(names)] for i in range(model.stack.num_layers)]
        self.reach, self.queries, self._total = reach, 0, np.zeros(())
        self._table = np.zeros((layers[0].num_heads, reach + 1), np.float32)

    def probes(self, batch: Batch) -> Terms:
        return (Probe(self._table, (batch.weights > 0).astype(np.float32)),)

    def add(self, batch: Batch, nats: np.ndarray, metrics: Mapping[str, Array]) -> None:
        self._total = self._total + np.asarray(metrics[WEIGHT_BY_DISTANCE], np.float64)
        self.queries += int((batch.weights > 0).sum())

    @property
    def weight(self) -> np.ndarray:
        """Mean weight [L, H, reach + 1] at distance 0 to reach - 1 and beyond; adds up to 1 where all queries read."""
        return self._total / self.queries

    @property
    def effective(self) -> np.ndarray:
        """The mean distance by weight [L, H], in tokens; NaN for heads that read nothing, what is beyond at `reach`."""
        read = self._total.sum(-1)
        moment = self._total @ np.arange(self.reach + 1)
        return np.divide(moment, read, out=np.full(read.shape, np.nan), where=read > 0)

    def as_dict(self) -> dict[str, Any]:
        layers = []
        for number, (pattern, weight, effective) in enumerate(
            zip(self.patterns, self.weight, self.effective, strict=True)
        ):
            known = [None if np.isnan(tokens) else float(tokens) for tokens in effective]
            layers.append(
                {
                    "layer": number,
                    "pattern": pattern,
                    "weight": np.round(weight[:, : self.reach], DECIMALS).tolist(),
                    "beyond": np.round(weight[:, self.reach], DECIMALS).tolist(),
                    "effective_distance": known,
                    "largest_effective_distance": max((tokens for tokens in known if tokens is not None), default=None),
                }
            )
        bins = {"first": 0, "width": 1, "count": self.reach, "beyond": f"{self.reach} and more"}
        return {"unit": "tokens", "queries": self.queries, "bins": bins, "layers": layers}

    def table(self) -> Table:
        table = Table(
            title=f"where attention goes: mean over {self.queries:,} queries",
            caption="effective: mean distance by weight of each head, in tokens; <n: share of weight nearer than n, "
            "mean of heads",
            title_justify="left",
            caption_justify="left",
        )
        bounds = self._bounds()
        bounds = bounds[1 :: -(-len(bounds) // SHARES)]
        for name in ("layer", "effective by head", "largest", *(f"<{n}" for n in bounds)):
            table.add_column(name, justify="left" if "head" in name else "right")
        for number, (weight, effective) in enumerate(zip(self.weight.mean(1), self.effective, strict=True)):
            shares = [f"{weight[:n].sum():.2f}" for n in bounds]
            largest = "-" if np.isnan(effective).all() else f"{np.nanmax(effective):.1f}"
            heads = " ".join("-" if np.isnan(tokens) else f"{tokens:.1f}" for tokens in effective)
            table.add_row(str(number), heads, largest, *shares)
        return table

    def _bounds(self) -> list[int]:
        """0, 1, 2, 4, ... up to the first power of two that is no smaller than the reach."""
        return [0, *(1 << n for n in range((self.reach - 1).bit_length() + 1))]

    def png(self, path: Path, caption: str) -> None:
        """Panels by layer: heads by distance in octaves, the share of weight as colour, effective distances marked."""
        bounds, weight = self._bounds(), self.weight
        octaves = np.stack(
            [weight[..., a:b].sum(-1) for a, b in zip(bounds, [*bounds[1:-1], None], strict=False)], axis=-1
        )  # [L, H, octaves], the last one with what is beyond
        layers, heads = octaves.shape[:2]
        columns = min(4, layers)
        rows = -(-layers // columns)
        size = max(2.4, 0.3 * octaves.shape[2]) * columns + 1.5, max(1.2, 0.16 * heads + 0.6) * rows + 1.2
        figure = draw.canvas(*size)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axis in axes[layers:]:
            axis.set_axis_off()
        for number, axis in enumerate(axes[:layers]):
            image = axis.imshow(
                octaves[number], aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=octaves.max(),
                extent=(0, octaves.shape[2], heads - 0.5, -0.5),
            )  # fmt: skip
            effective = self.effective[number]
            axis.plot(_place(effective), np.arange(heads), "o", markersize=4, color="white", markeredgecolor="black")
            axis.set_title(f"layer {number}, {self.patterns[number]}", fontsize=9)
            axis.set_xticks(range(len(bounds)), [str(n) for n in bounds], rotation=90, fontsize=7)
            axis.tick_params(axis="y", labelsize=7)
            axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes.tolist(), label="share of weight")
        figure.suptitle(f"Weight by distance, {caption}", fontsize=9, wrap=True)
        figure.supxlabel("distance in tokens, in octaves; o: effective distance, the mean by weight", fontsize=8)
        figure.supylabel("head", fontsize=8)
        draw.save(figure, path, f"Weight by distance, {caption}")


def _place(distance: np.ndarray) -> np.ndarray:
    """Where a distance stands on an axis whose ticks are 0, 1, 2, 4, ..."""
    return np.where(distance < 1, distance, 1 + np.log2(np.maximum(distance, 1)))
