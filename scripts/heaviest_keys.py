"""The share of full attention's heaviest keys that patterns by content let a query read, on a trained model.

    lra train quickstart --workdir runs/shared --set "Decoder.pattern = @LSH" --set "LSH.chunk = %SEGMENT" \
        --set "LSH.buckets = 16" --set "LSH.rounds = 1" --set 'LSH.sets = "released"' --set "SEGMENT = 1024"
    python scripts/heaviest_keys.py runs/shared

The patterns make queries and keys of one projection, so the run has to: its full attention is LSH attention whose one
chunk is the whole row (as in duplication/full), in which keys have length 1 and a query reads all keys before its own.
Hashes and clusters are of its keys before rotary positions, as the layers make them of their own; the model was not
trained to suit them. Centroids start from random directions and follow the patterns' own updates over rows of "train",
at a decay of 0.9, since a few rows stand for the many steps of a training. A query's own key counts nowhere, and
queries with no more than 64 keys before them are left out.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from lra import config
from lra.attention import LSH, Pattern, Routing, Site, SlidingWindow, StrictLSH, StrictRouting, Visibility, dense
from lra.attention.clustering import Clustered
from lra.attention.core import Terms
from lra.attention.visibility import Array
from lra.errors import UserError
from lra.models import Decoder, Stack
from lra.training import load_model

HEAVIEST = 64
DECAY = 0.9


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Share of full attention's 64 heaviest keys that patterns find.")
    parser.add_argument("run", type=Path, help="folder of a run with full attention and shared queries and keys")
    parser.add_argument("--tokens", type=int, help="T, tokens of a row; those of a training segment unless given")
    parser.add_argument("--rows", type=int, default=4, help='rows of "valid" that are measured')
    parser.add_argument("--learn", type=int, default=32, help='rows of "train" that centroids learn from')
    options = parser.parse_args()
    try:
        Console().print(measured(options.run, options.tokens, options.rows, options.learn))
    except UserError as error:
        parser.error(str(error))


def candidates(length: int) -> dict[str, Callable[..., Pattern]]:
    """What is compared, for rows of T tokens: 8 clusters of T / 8, and buckets that fit into two chunks."""
    eighth = length // 8
    lsh = functools.partial(LSH, chunk=length // 16, buckets=32)
    return {
        **{f"lsh, rounds {n}": functools.partial(lsh, rounds=n) for n in (1, 2, 4, 8)},
        "routing": functools.partial(Routing, clusters=8, window=eighth, decay=DECAY),
        "lsh_strict, rounds 2": functools.partial(StrictLSH, buckets=8, window=eighth // 2, rounds=2),
        "routing_strict": functools.partial(StrictRouting, clusters=8, window=eighth, decay=DECAY),
    }


def measured(run: Path, tokens: int | None, rows: int, learn: int) -> Table:
    """The table of a run.

    Raises:
        UserError: sizes that make no sense, or a run that has no full attention with shared queries and keys.
    """
    if not (run / "config.gin").is_file():
        raise UserError(f"there is no run {run}: train one as the first lines of this script say")
    overrides = [] if tokens is None else [f"LSH.chunk = {tokens}"]
    experiment = config.build(config.load(run / "config.gin", overrides=overrides))
    length = experiment.data.segment if tokens is None else tokens
    if length < 4 * HEAVIEST or min(rows, learn) < 1:
        raise UserError(f"--tokens needs to be at least {4 * HEAVIEST}, --rows and --learn at least 1: raise them")
    model, step, _ = load_model(experiment, run)
    first = model.stack.pattern(0)
    site = Site(num_heads=first.num_heads, head_dim=first.head_dim)
    layers = range(model.stack.num_layers)
    patterns = {name: [make(site=site, rngs=nnx.Rngs(i)) for i in layers] for name, make in candidates(length).items()}
    for row in _rows(experiment.corpus.tokens("train"), learn, length):
        for i, (q, k, _) in enumerate(attending(model, row)):
            for pattern in (made[i] for made in patterns.values() if isinstance(made[i], Clustered)):
                for name, value in pattern(q, k, q, train=True).updates.items():
                    getattr(pattern, name)[...] = value
    found: dict[str, list[list[float]]] = {name: [] for name in patterns}
    for row in _rows(experiment.corpus.tokens("valid"), rows, length):
        for i, (q, k, weigh) in enumerate(attending(model, row)):
            weights = weigh()
            for name, made in patterns.items():
                selection = made[i].select(q, k, key=jax.random.key(i))
                own = shares(weights, dense.visible(made[i], length, length, selection=selection)[0])
                window = SlidingWindow(window=1 + round(own[0]), site=site, rngs=nnx.Rngs(0))
                found[name].append([*own, *shares(weights, dense.visible(window, length, length)[0])])
    title = f"{run} at step {step:,}: means over {len(layers)} layers, {site.num_heads} heads, {rows} rows of {length}"
    return table({name: np.mean(each, axis=0) for name, each in found.items()}, title)


def attending(model: Decoder, row: np.ndarray) -> Iterator[tuple[Array, Array, Callable[[], np.ndarray]]]:
    """Each layer's q and k [1, T, H, D] on a row [T] of tokens, and what computes its weights [H, T, T].

    Raises:
        UserError: a model that is not walked through in this way, or a layer whose attention is another.
    """
    stack, length = model.stack, len(row)
    if not isinstance(stack, Stack) or stack.layers[0].memory is not None or not stack.layers[0].pre:
        raise UserError("the run's layers are not pre-norm in a Stack without memory: train one with these")
    x = model.embedding(jnp.asarray(row, jnp.int32)[None]) * (model.width**0.5 if model.embedding_scale else 1)
    x = x if model.position is None else x + model.position(jnp.arange(length)[None])
    terms = tuple(term(None) for term in model.terms)
    for i in range(stack.num_layers):
        graph, state = nnx.split(stack.layers[i % len(stack.layers)])
        layer = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i // len(stack.layers)], state))
        pattern, own = layer.attention.pattern, tuple(term.layer(i) for term in terms)
        q, k, v = layer.attention.project(layer.attention_norm(x))
        if not isinstance(pattern, LSH) or pattern.chunk < length or pattern.sets != "released":
            raise UserError(
                f"layer {i} has no full attention with queries and keys of one projection: train with LSH whose chunk "
                'is the segment, rounds 1 and sets "released"'
            )

        def weigh(pattern: Pattern = pattern, q: Array = q, k: Array = k, v: Array = v, own: Terms = own) -> np.ndarray:
            allowed = np.tri(length, k=-1, dtype=bool) | (np.arange(length) + np.arange(length)[:, None] == 0)
            prepared = pattern.prepare(q, k)
            return np.asarray(dense.attend(*prepared, v, allowed=allowed, scale=pattern.scale, terms=own)[1][0])

        yield q, k, weigh
        x, _ = layer(x, None, Visibility(), own, None, False)


def shares(weights: np.ndarray, read: np.ndarray) -> tuple[float, float, float, float]:
    """What a pattern finds of the heaviest keys of causal full attention.

    Args:
        weights: of full attention [H, T, T].
        read: which keys each query reads by the pattern [H, T, T].

    Returns:
        Means over heads and over queries with more than 64 keys before them: the number of these keys that are read,
        the share of the 64 heaviest that is, the most that so many could be, and the share of the weight.
    """
    before = np.tri(weights.shape[-1], k=-1, dtype=bool)
    weights, read = (np.where(before, x, 0)[:, HEAVIEST + 1 :] for x in (weights, read))
    heaviest = np.argpartition(weights, -HEAVIEST, axis=-1)[..., -HEAVIEST:]
    number = read.sum(-1)
    hit = np.take_along_axis(read, heaviest, axis=-1).mean(-1)
    weight = (weights * read).sum(-1) / weights.sum(-1)
    return number.mean(), hit.mean(), (np.minimum(number, HEAVIEST) / HEAVIEST).mean(), weight.mean()


def table(found: dict[str, np.ndarray], title: str) -> Table:
    """For the terminal: what `shares` gave of each pattern and of a window of as many keys."""
    shown = Table("pattern", "keys read", "of the 64", "at most", "of the weight", "window: of the 64", "of the weight",
                  title=title, caption="at most: where all keys that are read are among the heaviest")  # fmt: skip
    for name, (number, hit, most, weight, _, window_hit, _, window_weight) in found.items():
        shown.add_row(name, f"{number:.0f}", *(f"{x:.1%}" for x in (hit, most, weight, window_hit, window_weight)))
    return shown


def _rows(tokens: np.ndarray, count: int, length: int) -> Iterator[np.ndarray]:
    """Rows that lie evenly over a split.

    Raises:
        UserError: it has not so many.
    """
    if len(tokens) < count * length:
        raise UserError(f"a split has {len(tokens):,} tokens, which are no {count} rows of {length}: ask for fewer")
    for start in np.linspace(0, len(tokens) - length, count, dtype=int):
        yield tokens[start : start + length]


if __name__ == "__main__":
    main()
