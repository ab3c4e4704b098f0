"""The table of the duplication task: a run is evaluated with other rounds, and with full attention."""

import runpy
import types
from pathlib import Path

import pytest

from lra.cli import main

SCRIPT = Path(__file__).parents[1] / "scripts" / "duplication.py"


@pytest.mark.slow
def test_a_run_is_evaluated_with_other_arguments(tmp_path):
    run, seen = tmp_path / "run", []
    sets = [
        "WIDTH = 8", "HEADS = 2", "SEGMENT = 16", "CHUNK = 4", "BUCKETS = 4", "STEPS = 2", "WARMUP = 1", "BATCH = 2",
        "duplication.train = 64", "duplication.held_out = 16",
    ]  # fmt: skip
    assert (
        main(["train", "duplication/lsh", "--workdir", str(run), *(w for each in sets for w in ("--set", each))]) == 0
    )
    accuracy = runpy.run_path(str(SCRIPT))["accuracy"]

    def evaluate(model, corpus, split, protocol, **options):
        pattern = model.stack.layers[0].attention.pattern
        seen.append((split, pattern.chunk, pattern.evaluation_rounds, pattern.sets, options["step"]))
        return types.SimpleNamespace(accuracy=0.5)

    accuracy.__globals__["evaluate"] = evaluate
    assert accuracy(run, "valid", 1, None, "released") == accuracy(run, "test", 8, 4, "paper") == 0.5
    assert seen == [("valid", 16, 1, "released", 2), ("test", 4, 8, "paper", 2)]
