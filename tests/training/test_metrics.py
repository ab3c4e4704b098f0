import io
import json

import numpy as np
import pytest
from rich.console import Console

from lra.errors import UserError
from lra.training.metrics import MetricsFile
from lra.training.progress import Progress


def test_lines_are_on_disk_at_once_as_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        metrics.write({"step": 1, "loss": np.float32(0.5), "layer/x": np.array([1.0, np.nan]), "rate": None})
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "layer/x": [1.0, None], "rate": None}


def test_lines_after_the_restored_step_are_dropped_and_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    with MetricsFile(path, 2) as metrics:
        metrics.write({"step": 3, "again": True})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3, "again": True},
    ]  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("line", [b"notes", b"[1]", b'{"loss": 1}', b'{"step": "x"}', b'{"st\xffp": 1}'])
def test_a_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 of"):
        MetricsFile(path, 2)


def test_progress_is_plain_lines_without_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=20), 100, 0) as progress:
        progress.report(10, 2.5, 12_345.6, 61.2)
        progress.advance(11)
        progress.report(20, 2.25, None, None)
    assert out.getvalue().splitlines() == [
        "step 10/100  2.5000 bits per byte  12,346 tokens/s  0:01:01 left",
        "step 20/100  2.2500 bits per byte",
    ]


def test_progress_moves_on_a_terminal():
    out = io.StringIO()
    with Progress(Console(file=out, width=120, force_terminal=True), 100, 0) as progress:
        progress.report(10, 2.5, None, None)
        progress.say("[valid]")
        progress.advance(100)
    assert "100/100" in out.getvalue()
    assert "2.5000 bits per byte" in out.getvalue()
    assert "[valid]" in out.getvalue()
