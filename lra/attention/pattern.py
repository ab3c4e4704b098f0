"""The contract of a pattern: where it stands (`Site`), what it promises (`Promise`), what it returns (`Attended`)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx

from lra.attention import terms as terms_lib
from lra.attention.arrange import Entries, Labels
from lra.attention.core import Rule, Terms
from lra.attention.promise import Promise
from lra.attention.visibility import Array, Visibility

EXAMPLE_HEADS = 3
"""Heads of the layers that `Pattern.examples` are made for."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a pattern stands in its model.

    Attributes:
        layer: its layer, from 0; `num_layers` in all.
        num_heads: heads that it serves (H).
        head_dim: width of a head's queries and keys (D).
        width: width of the model (C).
        value_dim: width of a head's values (E); None for D.
        causal: whether queries may read later keys.
        dropout: share of attention weights dropped in training.
        compute_dtype: of projections; None for the parameters' own.
    """

    layer: int = 0
    num_layers: int = 1
    num_heads: int = 1
    head_dim: int = 64
    width: int = 64
    value_dim: int | None = None
    causal: bool = True
    dropout: float = 0.0
    compute_dtype: str | None = None

    def pick(self, name: str, value: int | tuple[int, ...]) -> int:
        """This layer's entry of an integer argument that may be a tuple with one entry a layer."""
        if not isinstance(value, tuple):
            return value
        if len(value) != self.num_layers:
            raise ValueError(f"{name} needs one entry for each of {self.num_layers} layers, got {len(value)}: {value}")
        return value[self.layer]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What `Attention` made q, k and v of, for patterns that make more of it.

    Attributes:
        queries: normalised layer inputs of the queries [B, T, C].
        keys: of the keys [B, S, C].
        project: the layer's own projections, [B, L, C] to q, k and v [B, L, H, D].
    """

    queries: Array
    keys: Array
    project: Callable[[Array], tuple[Array, Array, Array]]


@dataclasses.dataclass(frozen=True)
class Projection:
    """Values of a projection: kernel [C, H, D] and bias [H, D] or None."""

    kernel: Array
    bias: Array | None

    def heads(self, first: int, last: int) -> Projection:
        """The same for heads first..last-1."""
        return Projection(self.kernel[:, first:last], None if self.bias is None else self.bias[first:last])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attended:
    """What a pattern returns.

    Attributes:
        out: [B, T, H, E].
        losses: auxiliary losses by name, weighted scalars.
        metrics: numbers to report by name.
        updates: new values of the pattern's buffers by attribute name; the training step writes them.
        selection: what `Pattern.select` chose, set by `Attention`, to be given again where a pass is recomputed.
    """

    out: Array
    losses: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    updates: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    selection: Any = None


class Buffer(nnx.Variable):
    """State of a pattern that is no parameter: written by the training step from `Attended.updates`, never in place."""


class Pattern(nnx.Module):
    """Which keys a query may read. Subclasses are final: own arguments, then `site` and `rngs` from `Attention`."""

    projections: Literal["qkv", "shared_qk"] = "qkv"
    """What is projected: "qkv", or "shared_qk", where the key of a token is its query."""
    combination: Literal["union", "rounds", "mean"] = "union"
    """How a query's sets of keys are joined (see `rules`): one softmax over their union; one over all of them, in which
    a key counts once for each set that holds it; or the mean of a softmax for each set that is not empty."""

    def __init__(self, site: Site) -> None:
        self.causal = site.causal
        self.num_heads, self.head_dim = site.num_heads, site.head_dim
        self.dropout = site.dropout
        promise = self.promise
        name = type(self).__name__
        if site.causal and promise.causal is None:
            raise ValueError(f"{name} has no causal form: choose a pattern that `lra attention list` marks causal")
        if not site.causal and not promise.bidirectional:
            raise ValueError(f"{name} has no bidirectional form: use a decoder, or a pattern marked bidirectional")
        if site.dropout and not promise.dropout:
            raise ValueError(f"{name} does not promise dropout of attention weights: set Attention.dropout = 0")

    @property
    @abc.abstractmethod
    def promise(self) -> Promise:
        """What this instance can do."""

    @property
    @abc.abstractmethod
    def rule(self) -> Rule:
        """`rule(q: Entry, k: Entry) -> bool`: the definition of the pattern, for oracle, drawings and decoding."""

    def limited(self, keys: int) -> Pattern:
        """This pattern where a query reads the last `keys` keys alone, its own included, for evaluation.

        Raises:
            ValueError: it has no such form.
        """
        raise ValueError(
            f"{type(self).__name__} cannot be limited to the last {keys} keys: leave out attention_length, or use full "
            "or sliding_window"
        )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """A rule for each set of keys, where there are several (rounds, clusters); `rule` is their union."""
        return (self.rule,)

    @property
    def scale(self) -> float | None:
        """What multiplies the products of queries and keys; None for 1/sqrt(D)."""
        return None

    @property
    def reach(self) -> int | None:
        """No key further back than this many tokens is read; None for no bound."""
        return None

    @classmethod
    @abc.abstractmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        """Small argument sets for the contract suite and the drawings, at `EXAMPLE_HEADS` heads."""

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        """Arguments of the size that papers use, for the benchmark, at H heads; the first example unless overridden."""
        return cls.examples()[0]

    @abc.abstractmethod
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        inputs: Inputs | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
        selection: Any = None,
    ) -> Attended:
        """Attention.

        Args:
            q: [B, T, H, D]. k: [B, S, H, D]. v: [B, S, H, E].
            inputs: what q, k and v were made of, for patterns with projections of their own.
            visibility: positions, validity, segments; None for all defaults.
            terms: additions by position.
            key: random key of this layer and step.
            train: whether dropout and updates of buffers are on.
            selection: of `select`, for these arguments; None to select here.
        """

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Any:
        """What depends on content, as integers (buckets, members of clusters): a pytree, or None for positions alone.

        They are residuals: a backward pass is given those of the forward pass, since inputs that are recomputed or
        reconstructed can differ in the last bit, which would choose other keys.

        Args:
            q: [B, T, H, D]. k: [B, S, H, D].
            visibility: as in the call. key: the call's. train: the call's.
        """
        return None

    def colours(self, selection: Any) -> Array | None:
        """What drawings colour keys by, the bucket or cluster of each: integers [B, S, H], -1 for none; or None."""
        return None

    def selections(self, selection: Any) -> tuple[Any, ...]:
        """The selections of `parts`, from this pattern's own."""
        return (selection,)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        """The pattern's own integers, as the rule reads them: for T queries [B or 1, T] or [B or 1, T, H], and S keys.

        `selection` is that of `select`, which patterns that depend on content need.
        """
        return {}, {}

    def entries(
        self, queries: int, keys: int, visibility: Visibility, selection: Any = None
    ) -> tuple[Entries, Entries]:
        """All that the rule and visibility know of T queries and of the entries that stand for S keys.

        Patterns whose entries are no tokens (see `summarise`) give those of the entries.
        """
        q_position, k_position = visibility.positions(queries, keys)
        q_labels, k_labels = self.labels(queries, keys, visibility, selection)
        return (
            Entries(q_position, visibility.q_valid, visibility.q_segment, q_labels),
            Entries(k_position, visibility.k_valid, visibility.k_segment, k_labels),
        )

    def prepare(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys as their products take them, where the pattern normalises them."""
        return q, k

    def summarise(self, k: Array, v: Array, visibility: Visibility) -> tuple[Array, Array]:
        """The entries that are read in place of keys [B, S, H, D] and values [B, S, H, E]: [B, S', H, ...]."""
        return k, v

    def holds(self, keys: int, visibility: Visibility) -> np.ndarray:
        """Which of S keys each entry is made of, on the host: booleans [B or 1, S', S]."""
        return np.eye(keys, dtype=bool)[None]

    @property
    def own_terms(self) -> Terms:
        """Soft weights of the pattern itself: terms that it adds to those it is given."""
        return ()

    @property
    def own_values(self) -> bool:
        """Whether it makes values of its own, so that the output is not linear in those that it is given."""
        return False

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The patterns that this one is made of, in the order of their heads."""
        return (self,)

    @property
    def shares(self) -> np.ndarray:
        """Heads whose keys are their queries' projections: booleans [H]."""
        return np.concatenate([np.full(part.num_heads, part.projections == "shared_qk") for part in self.parts])

    def check_length(self, length: int) -> None:
        """Called by `Attention` with the tokens of its rows.

        Raises:
            UserError: sizes that would make little of such rows.
        """

    def adopt(self, query: Projection, key: Projection, value: Projection) -> None:
        """Called once by `Attention` with the initial values of its projections, for own ones that start from them."""

    def project(self) -> None:
        """Called after every optimizer update; clamps what has bounds."""

    def fit(self) -> bool:
        """Sets static sizes that depend on values, on the host; whether there are any. See `Decoder.fitted`."""
        return False

    def dropout_rate(self, train: bool) -> float:
        """The rate for this call."""
        return self.dropout if train else 0.0


class FunctionPattern(Pattern):
    """A pattern that is a function with arguments and does nothing else."""

    function: ClassVar[Callable[..., Array]]
    """The function, as a `staticmethod`."""

    @property
    @abc.abstractmethod
    def arguments(self) -> Mapping[str, Any]:
        """Its own arguments."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        inputs: Inputs | None = None,
        visibility: Visibility | None = None,
        terms: Terms = (),
        key: Array | None = None,
        train: bool = False,
        selection: Any = None,
    ) -> Attended:
        out = type(self).function(
            q, k, v, **self.arguments, causal=self.causal, visibility=visibility, terms=terms,
            dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        return Attended(out)


def default_scale(scale: float | None, width: int) -> float:
    """1/sqrt(D) unless given."""
    return width**-0.5 if scale is None else scale


def aligned(terms: Terms, q: Array, k: Array, visibility: Visibility | None) -> tuple[Array, Array, Visibility]:
    """Queries and keys after the terms' own rotations, and a visibility that is never None."""
    visibility = visibility or Visibility()
    if terms:
        q, k = terms_lib.prepare(terms, q, k, *visibility.positions(q.shape[1], k.shape[1]))
    return q, k, visibility
