"""The picture of all patterns: the script makes it, and the one in the documentation is what it makes."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lra.attention import PATTERNS

ROOT = Path(__file__).parents[1]


def test_the_picture_has_every_pattern_and_is_up_to_date(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "patterns.png"
    command = [sys.executable, str(ROOT / "scripts" / "pictures.py"), str(path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    with image.open(path) as made, image.open(ROOT / "docs" / "patterns.png") as shown:
        panels = made.text["Description"].splitlines()
        drawn = [panel.partition("(")[0].partition(",")[0] for panel in panels]
        examples = [name for name, cls in PATTERNS.items() for _ in cls.examples()]
        assert list(dict.fromkeys(drawn)) == list(PATTERNS)
        assert len(panels) > len(examples)  # heads that differ have panels of their own
        assert shown.text["Description"].splitlines() == panels, "the picture is out of date: make pictures"
        assert shown.size == made.size
    assert 20_000 < path.stat().st_size < 150_000
    assert (ROOT / "docs" / "patterns.png").stat().st_size < 150_000
    assert "docs/patterns.png" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_angular_hashing_is_up_to_date(tmp_path):
    """Three rounds of two pairs, of which the near one shares every bucket."""
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "hashing.png"
    runpy.run_path(str(ROOT / "scripts" / "angular_hashing.py"))["main"](path)
    with image.open(path) as made, image.open(ROOT / "docs" / "angular_hashing.png") as shown:
        assert made.text["Description"] == shown.text["Description"], "the picture is out of date: make pictures"
        found = [line.partition(": buckets ")[::2] for line in made.text["Description"].splitlines()]
    assert [pair.partition(",")[0] for pair, _ in found] == ["far"] * 3 + ["near"] * 3
    shares = [len({*both.split(" and ")}) == 1 for _, both in found]
    assert sum(shares[:3]) < sum(shares[3:]) == 3
