"""Accuracy on the duplication task by rounds of training and of evaluation (Kitaev et al. 2020, table 2).

    lra train duplication/lsh                          # trains with 4 rounds
    lra train duplication/lsh --set "ROUNDS = 1" --workdir runs/duplication/lsh_1
    python scripts/duplication.py runs/duplication/lsh runs/duplication/lsh_1 --rounds 8 4 2 1

Each run is evaluated with full attention (all tokens in one chunk; queries and keys are still one projection, and keys
have length 1), and with so many rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from lra import config
from lra.evaluation import evaluate
from lra.training import load_model


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Accuracy on the duplication task by rounds of evaluation.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of duplication/lsh or duplication/full")
    parser.add_argument("--rounds", nargs="+", type=int, default=[8, 4, 2, 1], help="rounds at evaluation")
    parser.add_argument("--chunk", type=int, default=8, help="tokens of a chunk in these rounds")
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    table = Table("run", "full", *(f"LSH-{n}" for n in options.rounds), title=f"accuracy, {options.split}")
    for run in options.runs:
        settings = [(1, None, "released"), *((n, options.chunk, "paper") for n in options.rounds)]
        table.add_row(str(run), *(f"{accuracy(run, options.split, *setting):.2%}" for setting in settings))
    Console().print(table)


def accuracy(run: Path, split: str, rounds: int, chunk: int | None, sets: str) -> float:
    """Share of the copied tokens that a run predicts with these arguments of its `LSH`; one chunk where None."""
    first = config.build(config.load(run / "config.gin"))
    overrides = {"evaluation_rounds": rounds, "chunk": chunk or first.data.segment, "sets": repr(sets)}
    loaded = config.load(run / "config.gin", overrides=[f"LSH.{name} = {x}" for name, x in overrides.items()])
    experiment = config.build(loaded)
    model, step, _ = load_model(experiment, run)
    key = jax.random.key(experiment.seed)
    return evaluate(model, experiment.corpus, split, experiment.protocol, key=key, step=step).accuracy


if __name__ == "__main__":
    main()
