"""The table of the duplication task: a run is evaluated with other rounds, and with full attention."""

import importlib.util
from pathlib import Path

import pytest

from lra.cli import main

SCRIPT = Path(__file__).parents[1] / "scripts" / "duplication.py"


@pytest.mark.slow
def test_accuracy_of_a_run_by_rounds(tmp_path):
    run = tmp_path / "run"
    sets = ["WIDTH = 16", "HEADS = 2", "SEGMENT = 16", "CHUNK = 4", "BUCKETS = 4", "duplication.train = 64",
            "duplication.held_out = 16", "duplication.symbols = 3", "STEPS = 150", "BATCH = 16"]  # fmt: skip
    words = [word for each in sets for word in ("--set", each)]
    assert main(["train", "duplication/lsh", "--workdir", str(run), *words]) == 0
    spec = importlib.util.spec_from_file_location("duplication", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    full, one, many = (
        script.accuracy(run, "valid", *setting) for setting in ((1, None, "released"), (1, 4, "paper"), (8, 4, "paper"))
    )
    assert 0.3 < one < many <= full
