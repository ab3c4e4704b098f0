"""Draws an example of every registered pattern into one picture, `docs/patterns.png` of the README.

python scripts/pictures.py              writes docs/patterns.png
python scripts/pictures.py other.png    writes another file
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from flax import nnx
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lra import notation
from lra.attention import EXAMPLE_HEADS, PATTERNS, Pattern, Site, draw

PICTURE = Path(__file__).parents[1] / "docs" / "patterns.png"
LENGTH = 16


def drawings() -> list[draw.Drawing]:
    """Every example: its causal form, or the bidirectional one where there is no other."""
    drawn = []
    for registered in PATTERNS.values():
        cls: Callable[..., Pattern] = registered
        for arguments in registered.examples():
            make = functools.partial(cls, **arguments)
            site = Site(num_heads=EXAMPLE_HEADS)
            try:
                pattern = make(site=site, rngs=nnx.Rngs(0))
            except ValueError:
                pattern = make(site=dataclasses.replace(site, causal=False), rngs=nnx.Rngs(0))
            name = f"{notation.write(make, PATTERNS)}, {'causal' if pattern.causal else 'bidirectional'}"
            drawn.append(dataclasses.replace(draw.once(pattern, LENGTH), name=name))
    return drawn


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    draw.png(drawings(), path, "Who reads whom: a row a query, a column a key", columns=7, inches=2.0)
    with Image.open(path) as picture:  # a palette takes a third of the bytes
        about = PngInfo()
        about.add_text("Description", picture.info["Description"])
        picture.convert("RGB").quantize(32).save(path, optimize=True, pnginfo=about)
    print(f"picture written to {path}")
