"""What `lra attention spans` shows: how far the heads of a run have learned to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from lra.attention import AdaptiveSpan, draw
from lra.errors import UserError
from lra.models import Layers


@dataclasses.dataclass(frozen=True)
class LayerSpans:
    """The learned spans of a layer, in keys.

    Attributes:
        layer: its number.
        max_span: the longest that they may be.
        heads: of each head. largest: of them. average: of the mean z, as the paper reports it.
        window: keys that are computed, for all layers stored with this one.
    """

    layer: int
    max_span: int
    heads: list[int]
    largest: int
    average: int
    window: int


def learned(stack: Layers, name: str) -> list[LayerSpans]:
    """Those of a trained stack, layer by layer.

    Raises:
        UserError: no head of it has a learned span, or spans depend on the text.
    """
    found, period = [], len(stack.layers)
    for i in range(stack.num_layers):
        for part in stack.layers[i % period].attention.pattern.parts:
            if not isinstance(part, AdaptiveSpan):
                continue
            if part.dynamic:
                raise UserError(f"spans of {name} differ by query: see layer/span in its metrics.jsonl")
            part.fit()
            z = part.spans[...][i // period]
            heads = [int(n) for n in part.tokens(z)]
            average = int(part.tokens(z.mean()))
            found.append(LayerSpans(i, part.max_span, heads, max(heads), average, part.window))
    if not found:
        raise UserError(f"no layer of {name} has learned spans: name a run with AdaptiveSpan")
    return found


def table(spans: Sequence[LayerSpans], title: str) -> Table:
    """For the terminal."""
    shown = Table(
        "layer", "average", "largest", "window", "heads", title=title, title_justify="left", caption_justify="left",
        caption="keys that are read: ceil(z S) + ramp, at most S; average: of the mean z; window: keys computed",
    )  # fmt: skip
    for each in spans:
        numbers = map(str, (each.layer, each.average, each.largest, each.window))
        shown.add_row(*numbers, " ".join(map(str, each.heads)))
    return shown


def png(spans: Sequence[LayerSpans], path: Path, title: str) -> None:
    """Draws the spans of heads by layer as PNG; the numbers are the picture's `Description`.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    figure = draw.canvas(6.0, 4.0)
    axis = figure.subplots()
    for n, each in enumerate(spans):
        place = [each.layer] * len(each.heads)
        axis.scatter(place, each.heads, s=24, color="tab:blue", alpha=0.6, label=None if n else "heads")
    layers = [each.layer for each in spans]
    axis.plot(layers, [each.largest for each in spans], color="0.6", linestyle=":", label="largest")
    axis.plot(layers, [each.average for each in spans], color="tab:orange", label="average")
    axis.axhline(max(each.max_span for each in spans), color="0.3", linewidth=0.8, label="maximum")
    axis.set(xlabel="layer", ylabel="keys that are read", ylim=(0, None), title=title)
    axis.locator_params(axis="x", integer=True)
    axis.legend(fontsize="small")
    about = "\n".join(f"layer {each.layer}: average {each.average}, heads {each.heads}" for each in spans)
    draw.save(figure, path, about)
