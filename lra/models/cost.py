"""What a model costs: floating-point operations a token by part, and bytes by what they hold.

Nothing here knows a pattern. Scores are counted from its rule; operations and activations from the trace of the model
itself, a part being the difference that its removal makes, and attention what the core runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from lra.attention import core, dense
from lra.attention.core import Rule
from lra.attention.pattern import Attended, Buffer, Pattern
from lra.attention.promise import Promise
from lra.attention.sliding_window import WindowRule
from lra.attention.visibility import Array, Visibility
from lra.errors import UserError
from lra.models.decoder import Decoder
from lra.models.layer import Layer
from lra.models.traced import flops, kept

LONGEST = 1 << 16
"""Tokens; counting pairs takes the square of twice as many."""
SCORE = 4
"""Bytes of a stored score, float32."""
ATTENTION = "attention (scores and weighted sum)"
PROJECTIONS = "projections (q, k, v, output)"
"""Those of the attention layer, and what a pattern projects or convolves by itself."""


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One of the layers that are equal, for one row.

    Attributes:
        layers: their numbers.
        pattern: name of its class. causal: whether later keys are hidden.
        keys: floats of the keys.
        scores: pairs of a query and a key that the rule allows, over all heads.
        square: pairs that full attention holds, whatever it masks: H T S.
        growth: the exponent e of scores ~ T^e, from T to 2 T tokens.
        flops: of scores and weighted sum, as run.
        activations: bytes kept for the backward pass, as run.
    """

    layers: tuple[int, ...]
    pattern: str
    causal: bool
    keys: int
    scores: int
    square: int
    growth: float
    flops: int
    activations: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a model at a length.

    Attributes:
        length: tokens of a row (T). batch: rows that bytes are for.
        layers: by kind, for one row.
        by_rule: forward operations a token by part, counting the pairs that the rules allow.
        as_run: the same, counting what the program does.
        training: operations a token of forward and backward pass, as run.
        held: bytes of model, gradients, optimizer moments and, for `batch` rows, carried memory and activations.
    """

    length: int
    batch: int
    layers: tuple[LayerCost, ...]
    by_rule: Mapping[str, float]
    as_run: Mapping[str, float]
    training: float
    held: Mapping[str, int]

    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by what they hold: as run, and with the scores stored, by rule or as a square."""
        total = {name: sum(len(each.layers) * getattr(each, name) for each in self.layers) for name in _STORED}
        stored = {"as_run": 0} | {f"{name}_stored": self.batch * SCORE * n for name, n in total.items()}
        return {name: {**self.held, "scores": n} for name, n in stored.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "length": self.length, "batch": self.batch,
            "layers": [dataclasses.asdict(each) for each in self.layers],
            "flops_per_token": {
                "by_rule": {**self.by_rule, "forward": sum(self.by_rule.values())},
                "as_run": {**self.as_run, "forward": sum(self.as_run.values()), "forward and backward": self.training},
            },
            "bytes": {name: {**held, "total": sum(held.values())} for name, held in self.bytes().items()},
        }  # fmt: skip

    def tables(self, name: str) -> list[Table]:
        """The same for the terminal."""
        return [
            self._layer_table(f"{name}: a layer, for one row of {self.length:,} tokens"),
            self._flops_table(f"{name}: operations a token"),
            self._bytes_table(f"{name}: bytes, {self.batch} rows of {self.length:,} tokens"),
        ]

    def _layer_table(self, title: str) -> Table:
        table = Table(
            "layers", "pattern", "keys", "scores by rule", "of the square", "square", "growth", "kept as run",
            title=title, title_justify="left", caption_justify="left",
            caption="keys in floats; scores by rule: pairs that the pattern allows, over all heads; square: what full "
            "attention holds in the papers, whatever it masks; growth: of the scores by rule, to twice the tokens; "
            "kept: activations for the backward pass",
        )  # fmt: skip
        for each in self.layers:
            table.add_row(
                _numbers(each.layers), f"{each.pattern}, {'causal' if each.causal else 'bidirectional'}",
                f"{each.keys:,}", f"{each.scores:,} ({_size(SCORE * each.scores)})",
                f"{each.scores / each.square:.2%}", f"{each.square:,} ({_size(SCORE * each.square)})",
                _growth(each.growth), _size(each.activations),
            )  # fmt: skip
        return table

    def _flops_table(self, title: str) -> Table:
        table = Table(
            "part", "by rule", "multiply-adds", "as run", "multiply-adds",
            title=title, title_justify="left", caption_justify="left",
            caption="matrix products and convolutions; a multiplication and an addition are two operations, or one "
            "multiply-add; by rule: of the pairs that patterns allow; as run: masked and recomputed ones too; "
            "projections: those of patterns, and their convolutions, too",
        )  # fmt: skip
        rows: dict[str, tuple[float | None, float]] = {n: (self.by_rule[n], self.as_run[n]) for n in self.as_run}
        rows["forward"] = sum(self.by_rule.values()), sum(self.as_run.values())
        rows["forward and backward"] = None, self.training
        for part, counts in rows.items():
            cells = ["" if n is None else f"{n / by:,.0f}" for n in counts for by in (1, 2)]
            table.add_row(part, *cells, end_section=part == list(self.as_run)[-1])
        return table

    def _bytes_table(self, title: str) -> Table:
        columns = self.bytes()
        table = Table(
            "bytes", "as run", "scores stored, by rule", "scores stored, square",
            title=title, title_justify="left", caption_justify="left",
            caption="activations: what the trace keeps for the backward pass, before the compiler joins or recomputes; "
            "as run, the backward pass computes scores again, block by block; the papers store one float each",
        )  # fmt: skip
        totals = [sum(held.values()) for held in columns.values()]
        for part in columns["as_run"]:
            shares = [(held[part], total) for held, total in zip(columns.values(), totals, strict=True)]
            table.add_row(part, *(f"{_size(n)} ({n / total:.1%})" for n, total in shares))
        table.add_section()
        table.add_row("total", *map(_size, totals))
        return table


_STORED = ("scores", "square")


def cost(model: Decoder, *, length: int, batch: int, optimizer: Any = ()) -> Cost:
    """Counts what a model costs; computes nothing but the pairs that the rules allow.

    Args:
        model: its values may be shapes alone.
        length: tokens of a row (T).
        batch: rows that bytes are for.
        optimizer: the optimizer's state, arrays or shapes.

    Raises:
        UserError: a length below 1, or above `LONGEST` or the positions that the model has.
    """
    limit = LONGEST if model.position is None else min(LONGEST, model.position.max_length or LONGEST)
    if not 1 <= length <= limit:
        raise UserError(
            f"the length is {length}, but the cost of this model is known for 1 to {limit} tokens: change it"
        )
    program = _Program(model, length)
    total, scored = program.flops(_nothing), program.flops(_nothing, core.SCOPE)
    layers = tuple(_layer(program, r, scored) for r in range(len(model.stack.layers)))
    attention = sum(len(each.layers) * each.flops for each in layers)
    as_run = {
        ATTENTION: attention,
        PROJECTIONS: total - attention - program.flops(_no_attention),
        "feed-forward": total - program.flops(_no_feed_forward),
        "output head": total - program.flops(_no_head),
    }
    as_run["embedding and others"] = total - sum(as_run.values())
    wide = 4 * model.stack.layers[0].attention.head_dim  # two products of D, two operations each
    by_rule = as_run | {ATTENTION: wide * sum(len(each.layers) * each.scores for each in layers)}
    parameters, buffers = map(_bytes, program.state)
    return Cost(
        length=length,
        batch=batch,
        layers=layers,
        by_rule={part: n / length for part, n in by_rule.items()},
        as_run={part: n / length for part, n in as_run.items()},
        training=flops(jax.grad(program.run()), program.state[0], program.state[1], program.inputs(1)) / length,
        held={
            "model": parameters + buffers,
            "gradients": parameters,
            "optimizer moments": _bytes(optimizer),
            "carried memory": _bytes(
                jax.eval_shape(lambda *s: program.model(*s).initial_memory(batch, True), *program.state)
            ),
            "activations": kept(lambda s, inputs: program.run()(*s, inputs), program.state, program.inputs(batch)),
        },
    )


class _Program:
    """A model's forward pass in training over rows of T tokens, as a function of its values."""

    def __init__(self, model: Decoder, length: int) -> None:
        self.graph, *state = nnx.split(model, nnx.Param, Buffer)
        self.state, self.length = tuple(state), length

    def model(self, *state: Any) -> Decoder:
        """The model with these values; its layers go by scan, which traces equal ones once."""
        model: Decoder = nnx.merge(self.graph, *state)
        model.stack.scan = True
        return model

    def inputs(self, batch: int) -> tuple[Any, Any]:
        """Shapes of tokens and random key."""
        return jax.ShapeDtypeStruct((batch, self.length), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))

    def run(self, change: Callable[[Decoder], None] | None = None) -> Callable[..., Array]:
        """The function `(parameters, buffers, inputs) -> sum of nats` of the model after a change."""

        def run(parameters: Any, buffers: Any, inputs: tuple[Array, Array]) -> Array:
            model, (tokens, key) = self.model(parameters, buffers), inputs
            memory = model.initial_memory(tokens.shape[0], True)
            if change is not None:
                change(model)
            return model.score(tokens, tokens, memory=memory, key=key, train=True).nats.sum()

        return run

    def flops(self, change: Callable[[Decoder], None], scope: str | None = None) -> int:
        """Operations of one row after a change, in that scope."""
        return flops(self.run(change), *self.state, self.inputs(1), scope=scope)


def _layer(program: _Program, r: int, scored: int) -> LayerCost:
    """The cost of a layer of stack r; `scored` are the whole model's operations of scores and weighted sums."""

    def first(state: Any) -> tuple[Layer, Any]:
        model = program.model(*state)
        graph, values = nnx.split(model.stack.layers[r])
        memory = model.initial_memory(1, True)
        take = lambda tree: jax.tree.map(lambda a: a[0], tree)  # noqa: E731
        return nnx.merge(graph, take(values)), None if memory is None else take(memory[r])

    def run(state: Any, inputs: tuple[Array, Array]) -> Array:
        (layer, memory), (x, key) = first(state), inputs
        terms = tuple(term().layer(r) for term in program.model(*state).terms)
        return layer(x, memory, None, terms, key, True)[0]

    def remembered(state: Any) -> Array:
        layer, memory = first(state)
        return jnp.zeros((1, 0)) if layer.memory is None else layer.memory.read(memory).filled

    model = program.model(*program.state)
    attention, length = model.stack.layers[r].attention, program.length
    pattern, slots = model.stack.pattern(r), jax.eval_shape(remembered, program.state).shape[1]

    def entries(part: Pattern, own: Any) -> int:
        known: Any = part.entries(length, length + slots, Visibility(), own)[1]
        return int(known.position.shape[1])

    drawn = [dense.drawn(pattern, n, n + slots, jax.random.key(0)) for n in (length, 2 * length)]
    scores, of_twice = (
        dense.pairs(pattern, n, n + slots, own) for n, own in zip((length, 2 * length), drawn, strict=True)
    )
    parts = zip(pattern.parts, pattern.selections(drawn[0]), strict=True)
    layers = tuple(range(r, model.stack.num_layers, len(model.stack.layers)))
    x = jax.ShapeDtypeStruct((1, length, model.width), jnp.float32)
    return LayerCost(
        layers=layers,
        pattern=type(pattern).__name__,
        causal=pattern.causal,
        keys=attention.head_dim * sum(part.num_heads * entries(part, own) for part, own in parts),
        scores=scores,
        square=attention.num_heads * length * (length + slots),
        growth=math.log2(of_twice / scores) if scores else 0.0,
        flops=(scored - program.flops(lambda model: _no_pattern(model, r), core.SCOPE)) // len(layers),
        activations=model.stack.layer_kept(run, program.state, (x, program.inputs(1)[1])),
    )


class _OwnValue(Pattern):
    """Stands where a pattern stood: every query reads its own value."""

    def __init__(self, stood: Pattern) -> None:
        self.stood, self.causal, self.num_heads = stood.promise, stood.causal, stood.num_heads
        self.bound = stood.reach

    @property
    def promise(self) -> Promise:
        return self.stood

    @property
    def reach(self) -> int | None:
        return self.bound

    @property
    def rule(self) -> Rule:
        return WindowRule(1, 0, 1)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return ()

    def __call__(self, q: Array, k: Array, v: Array, **_: Any) -> Attended:
        return Attended(v[:, v.shape[1] - q.shape[1] :])


class _NoAttention(nnx.Module):
    """Stands where an attention layer stood."""

    reach: int | None = None

    def __call__(self, inputs: Array, length: int, **_: Any) -> Attended:
        return Attended(inputs[:, inputs.shape[1] - length :])


class _NoFeedForward(nnx.Module):
    """Stands where a feed-forward layer stood."""

    def __call__(self, x: Array, **_: Any) -> Array:
        return x


class _NoHead(nnx.Module):
    """Stands where an output head stood."""

    def score(self, x: Array, embedding: Any, targets: Array, scored: Any = None) -> tuple[Array, Array]:
        return x[..., 0], targets == 0


def _nothing(model: Decoder) -> None:
    """No change."""


def _no_pattern(model: Decoder, r: int) -> None:
    attention: Any = model.stack.layers[r].attention
    attention.pattern = _OwnValue(attention.pattern)


def _no_attention(model: Any) -> None:
    """What memory computes beside its slots' keys and values goes with the projections."""
    for layer in model.stack.layers:
        layer.attention, layer.memory = _NoAttention(), None


def _no_feed_forward(model: Any) -> None:
    for layer in model.stack.layers:
        layer.feed_forward = _NoFeedForward()


def _no_head(model: Any) -> None:
    model.head = _NoHead()


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(count: float) -> str:
    """A number of bytes in the largest unit that it fills."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _growth(exponent: float) -> str:
    """An exponent, with its name where it is close to having one."""
    names = {"constant": 0, "linear": 1, "quadratic": 2}
    near = [f"{name}, " for name, n in names.items() if abs(exponent - n) < 0.05]
    return f"{''.join(near)}T^{exponent:.2f}"


def _numbers(layers: tuple[int, ...]) -> str:
    """Numbers of layers, briefly."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    every = f", every {step}" if step > 1 else ""
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}{every}"
