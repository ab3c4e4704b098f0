"""How layers are stored and joined: pre-norm or post-norm, in a loop or by scan, rematerialised or not."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.core import Terms
from lra.attention.layer import SELECTION
from lra.attention.pattern import Buffer, Pattern
from lra.attention.visibility import Array, Visibility
from lra.models.layer import Effects, Layer
from lra.models.traced import kept

_SELECTION = jax.checkpoint_policies.save_only_these_names(SELECTION)

REMAT: dict[str, Any] = {
    "none": None,
    "full": _SELECTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        _SELECTION, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}
"""What a layer saves for the backward pass, by name: everything, its input alone, or its projections; and what its
pattern has selected by content, which rounding could change."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackOutput:
    """What a stack of L layers returns.

    Attributes:
        x: [B, T, C], or what `Layers.output_width` says in place of C.
        memory: the memory's states after this segment: a tuple of p stacks with leading axis L/p; None without memory.
        losses: weighted auxiliary losses, summed over layers.
        metrics: [L] each; NaN for layers that don't report it.
        updates: new buffer values, a tuple of p mappings with leading axis L/p.
    """

    x: Array
    memory: tuple[Any, ...] | None
    losses: Mapping[str, Array]
    metrics: Mapping[str, Array]
    updates: tuple[Mapping[str, Array], ...]


class Layers(nnx.Module):
    """L layers, stored as p stacks with leading axis L/p, p being the shortest period at which layers are equal.

    Storage and initial values (layer i from `fold_in(init_key, i)`) do not depend on how layers are applied, which
    subclasses say. They are final and take their own arguments, then `num_layers`, `width`, `layer` and `rngs` from the
    model.

    Args:
        norm: of the layers, "pre" or "post".
        dropout: share of what is added to the residual stream dropped in training.
        scan: whether turns of p layers are applied by `jax.lax.scan`.
        num_layers: L. layer: `layer(i, norm, dropout, rngs)` makes layer i. rngs: random streams.
    """

    output_width: int
    """Width of the output, for the head."""

    def __init__(
        self,
        *,
        norm: Literal["pre", "post"],
        dropout: float,
        scan: bool,
        num_layers: int,
        layer: Callable[..., Layer],
        rngs: nnx.Rngs,
    ) -> None:
        if not 0 <= dropout < 1:
            raise ValueError(f"{type(self).__name__}.dropout needs to be at least 0 and below 1, got {dropout}")
        self.num_layers, self.scan = num_layers, scan
        init_key = rngs.params()

        def make(i: int, key: Array) -> Layer:
            return layer(i, norm=norm, dropout=dropout, rngs=nnx.Rngs(params=key))

        period = _period([_structure(make, i, init_key) for i in range(num_layers)])
        stacks = []
        for r in range(period):
            keys = jax.vmap(lambda i: jax.random.fold_in(init_key, i))(jnp.arange(r, num_layers, period))
            state = jax.vmap(lambda key, r=r: nnx.split(make(r, key))[1])(keys)
            stacks.append(nnx.merge(_structure(make, r, init_key)[0], state))
        self.layers = nnx.List(stacks)

    @abc.abstractmethod
    def __call__(
        self,
        x: Array,
        *,
        memory: tuple[Any, ...] | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
    ) -> StackOutput:
        """[B, T, C] through all layers."""

    @abc.abstractmethod
    def layer_kept(self, run: Callable[..., Array], state: Any, inputs: Any) -> int:
        """Bytes that a layer keeps for the backward pass.

        Args:
            run: `run(state, inputs)` is the layer; inputs are [1, T, C] and a random key.
        """

    def pattern(self, i: int) -> Pattern:
        """Layer i's pattern with its own values; in a model that is shapes alone, buffers hold random numbers."""
        parts: Any = nnx.split(self.layers[i % len(self.layers)].attention.pattern, Buffer, ...)
        graph, buffers, rest = parts

        def own(x: Any) -> Any:
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            return x[i // len(self.layers)]

        def known(x: Any) -> Any:
            if not isinstance(x, jax.ShapeDtypeStruct):
                return x
            if jnp.issubdtype(x.dtype, jnp.integer):
                return jnp.zeros(x.shape, x.dtype)
            return jax.random.uniform(jax.random.key(i), x.shape, x.dtype)

        buffers, rest = jax.tree.map(own, (buffers, rest))
        pattern: Pattern = nnx.merge(graph, jax.tree.map(known, buffers), rest)
        return pattern

    @property
    def causality(self) -> Literal["strict", "selection"]:
        """The weakest promise of its layers: whether later tokens can change what an earlier one reads."""
        kept = [layer.attention.pattern.promise.causal == "strict" for layer in self.layers]
        return "strict" if all(kept) else "selection"

    def initial_memory(self, batch: int, train: bool, length: int | None = None) -> tuple[Any, ...] | None:
        """The memory's states for B rows, or None without memory; `length` replaces the tokens remembered."""
        if self.layers[0].memory is None:
            return None
        count = self.num_layers // len(self.layers)
        states = [layer.memory.initial(batch, train, length=length) for layer in self.layers]
        return tuple(jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state) for state in states)

    def reset_memory(self, memory: tuple[Any, ...], rows: Array) -> tuple[Any, ...]:
        """The states with the given rows [B] emptied."""
        return tuple(
            jax.vmap(lambda state, layer=layer: layer.memory.reset(state, rows))(state)
            for layer, state in zip(self.layers, memory, strict=True)
        )

    def write(self, updates: tuple[Mapping[str, Array], ...]) -> None:
        """Writes buffer values that the training step has accepted."""
        for layer, values in zip(self.layers, updates, strict=True):
            for path, value in values.items():
                *parents, name = path.split(".")
                owner = layer.attention.pattern
                for parent in parents:
                    owner = owner.groups[int(parent)]
                getattr(owner, name)[...] = value

    def project(self) -> None:
        """The patterns' hook after an optimizer update."""
        for layer in self.layers:
            layer.attention.pattern.project()

    def fit(self) -> bool:
        """The patterns' hook before a program is made of their values."""
        return any([layer.attention.pattern.fit() for layer in self.layers])

    def _split(self) -> tuple[list[Any], tuple[Any, ...]]:
        """The graph definitions and the states of the p stacks."""
        split = [nnx.split(layer) for layer in self.layers]
        return [graph for graph, _ in split], tuple(state for _, state in split)

    def _output(self, x: Array, results: tuple[Effects, ...]) -> StackOutput:
        """Of x and what the p stacks gave, with leading axis L/p."""
        return StackOutput(
            x=x,
            memory=None if self.layers[0].memory is None else tuple(result[0] for result in results),
            losses=_total([result[1] for result in results]),
            metrics=_by_layer([result[2] for result in results], self.num_layers),
            updates=tuple(result[3] for result in results),
        )


def in_turns(
    turn: Callable[..., Any], carry: Any, slices: Any, *, count: int, scan: bool, reverse: bool = False
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `turn(carry, n, slice) -> (carry, result)`; without `scan` a loop, in which n is an int."""
    if scan:
        numbered = jnp.arange(count), slices
        return jax.lax.scan(lambda carry, each: turn(carry, *each), carry, numbered, reverse=reverse)
    results = []
    for n in reversed(range(count)) if reverse else range(count):
        carry, result = turn(carry, n, jax.tree.map(lambda a, n=n: a[n], slices))
        results.append(result)
    return carry, jax.tree.map(lambda *a: jnp.stack(a), *(results[::-1] if reverse else results))


def scope_of(n: Array | int, r: int, period: int) -> Any:
    """The name scope of layer r of turn n."""
    return jax.named_scope(f"layer{n * period + r}" if isinstance(n, int) else "layers")


class Stack(Layers):
    """One residual stream: layers one after the other.

    Args:
        norm: "pre" (Child et al. 2019, arXiv:1904.10509) or "post" (Vaswani et al. 2017, arXiv:1706.03762).
        dropout: share of what is added to the residual stream dropped in training.
        scan: apply by `jax.lax.scan`, for compile time, instead of a loop.
        remat: what a layer saves for the backward pass: a name of `REMAT`. On CPUs it needs `scan`: XLA (jax 0.10.2)
            merges what is recomputed outside a loop with the first computation.
        num_layers: L. width: C. layer: `layer(i, norm, dropout, rngs)` makes layer i. rngs: random streams.
    """

    def __init__(
        self,
        *,
        norm: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
        scan: bool = False,
        remat: str = "none",
        num_layers: int,
        width: int,
        layer: Callable[..., Layer],
        rngs: nnx.Rngs,
    ) -> None:
        if norm not in ("pre", "post"):
            raise ValueError(f"Stack.norm needs to be 'pre' or 'post', got {norm!r}")
        if remat not in REMAT:
            raise ValueError(f"Stack.remat needs to be one of {', '.join(map(repr, REMAT))}, got {remat!r}")
        super().__init__(norm=norm, dropout=dropout, scan=scan, num_layers=num_layers, layer=layer, rngs=rngs)
        self.remat, self.output_width = remat, width
        self.final_norm = nnx.LayerNorm(width, rngs=rngs) if norm == "pre" else None

    def layer_kept(self, run: Callable[..., Array], state: Any, inputs: Any) -> int:
        return kept(run if self.remat == "none" else jax.checkpoint(run, policy=REMAT[self.remat]), state, inputs)

    def __call__(
        self,
        x: Array,
        *,
        memory: tuple[Any, ...] | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
    ) -> StackOutput:
        period = len(self.layers)
        graphs, states = self._split()
        memory = memory if memory is not None else (None,) * period

        def one(r: int, state: Any, x: Array, remembered: Any, i: Array | int, terms: Terms) -> Any:
            layer_key = None if key is None else jax.random.fold_in(key, i)
            terms = tuple(term.layer(i) for term in terms)
            return nnx.merge(graphs[r], state)(x, remembered, visibility, terms, layer_key, train)

        if self.remat != "none":
            one = jax.checkpoint(one, policy=REMAT[self.remat], static_argnums=(0,))

        def turn(x: Array, n: Array | int, slices: Any) -> tuple[Array, tuple[Any, ...]]:
            states, memory = slices
            results = []
            for r in range(period):
                with scope_of(n, r, period):
                    x, result = one(r, states[r], x, memory[r], n * period + r, terms)
                results.append(result)
            return x, tuple(results)

        count = self.num_layers // period
        x, results = in_turns(turn, x, (states, memory), count=count, scan=self.scan)
        return self._output(x if self.final_norm is None else self.final_norm(x), results)


def _structure(make: Callable[..., Layer], i: int, key: Array) -> tuple[Any, Any]:
    """The graph definition and the shapes of layer i, without computing anything."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(i, key)))
    return graph, jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)


def _period(structures: list[Any]) -> int:
    """The shortest p that divides L with layer i equal to layer i + p for all i."""
    length = len(structures)
    for period in range(1, length):
        if length % period == 0 and all(structures[i] == structures[i + period] for i in range(length - period)):
            return period
    return length


def _total(losses: list[Mapping[str, Array]]) -> dict[str, Array]:
    """Sums over layers by name."""
    total: dict[str, Array] = {}
    for values in losses:
        for name, value in values.items():
            total[name] = total.get(name, jnp.zeros(())) + value.sum()
    return total


def _by_layer(metrics: list[Mapping[str, Array]], num_layers: int) -> dict[str, Array]:
    """[L] by name, from p mappings with leading axis L/p."""
    rows: dict[str, Array] = {}
    for r, values in enumerate(metrics):
        for name, value in values.items():
            row = rows.get(name, jnp.full((num_layers, *value.shape[1:]), jnp.nan))
            rows[name] = row.at[r :: len(metrics)].set(value)
    return rows
