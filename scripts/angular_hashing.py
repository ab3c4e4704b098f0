"""Draws angular hashing as in figure 1 of Kitaev et al. 2020 (arXiv:2001.04451): 3 rounds, 4 buckets, pairs of points.

python scripts/angular_hashing.py              writes docs/angular_hashing.png
python scripts/angular_hashing.py other.png    writes another file
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lra.attention import hashing

PICTURE = Path(__file__).parents[1] / "docs" / "angular_hashing.png"
BUCKETS, ROUNDS, SEED = 4, 3, 9
PAIRS = {"far": (15, 140), "near": (78, 92)}
"""Angles of two points in degrees."""


def buckets(degrees: np.ndarray) -> np.ndarray:
    """Of points on the unit circle, by `lra.attention.hashing`: [points, rounds]."""
    angles = np.deg2rad(degrees)
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)[None, :, None]
    turned = hashing.rotations(jax.random.key(SEED), BUCKETS, rounds=ROUNDS, heads=1, width=2)
    return np.asarray(hashing.hashes(x, turned, BUCKETS))[0, :, 0]


def main(path: Path) -> None:
    """Writes the picture; its `Description` says which bucket each point falls into."""
    colours = list(TABLEAU_COLORS)
    circle = np.arange(360.0)
    sectors = buckets(circle)
    figure = Figure(figsize=(2.2 * ROUNDS, 2.5 * len(PAIRS)), layout="constrained")
    described = []
    for row, (name, pair) in enumerate(PAIRS.items()):
        found = buckets(np.array(pair, np.float64))
        for r in range(ROUNDS):
            axis = figure.add_subplot(len(PAIRS), ROUNDS, row * ROUNDS + r + 1, projection="polar")
            filled = [colours[b] for b in sectors[:, r]]
            axis.bar(np.deg2rad(circle), 1.0, width=np.deg2rad(1.1), color=filled, linewidth=0, alpha=0.5)
            axis.plot(np.deg2rad(pair), [1, 1], "o", color="black", clip_on=False)
            axis.set(xticks=[], yticks=[], ylim=(0, 1))
            same = "the same bucket" if found[0, r] == found[1, r] else "other buckets"
            axis.set_title(f"{name}, round {r + 1}: {same}", fontsize=8)
            described.append(f"{name}, round {r + 1}: buckets {found[0, r]} and {found[1, r]}")
    figure.suptitle("Points at a small angle mostly share a bucket", fontsize=10)
    figure.savefig(path, format="png", dpi=80)
    with Image.open(path) as picture:  # a palette takes a fourth of the bytes
        about = PngInfo()
        about.add_text("Description", "\n".join(described))
        picture.convert("RGB").quantize(32).save(path, optimize=True, pnginfo=about)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
