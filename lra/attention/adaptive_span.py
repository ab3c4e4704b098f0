"""Adaptive attention span: heads learn how far back they read (Sukhbaatar et al. 2019, arXiv:1905.07799).

O(T W) time, O(T) memory; W is the largest span, whatever the maximum is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Labels
from lra.attention.core import Rule, Terms
from lra.attention.pattern import Attended, Buffer, Inputs, Pattern, Site, aligned, default_scale
from lra.attention.precision import accumulator
from lra.attention.promise import EVERYTHING, Promise
from lra.attention.rows import harmless
from lra.attention.terms import Positions, Term, distances
from lra.attention.visibility import Array, Entry, Visibility
from lra.errors import UserError

STEP = 64
"""Windows are whole multiples of so many keys, so that programs are compiled anew only where spans cross one."""
_DYNAMIC_BIAS = -4.0  # section 2.2 of the paper


@dataclasses.dataclass(frozen=True)
class SpanRule:
    """Keys before the query, or around it, whose soft weight is above 0; the label `reach` counts them."""

    max_span: int
    own_key: bool
    causal: bool

    @property
    def furthest(self) -> int:
        """The largest distance that is read."""
        return self.max_span - int(self.own_key)

    def __call__(self, q: Entry, k: Entry) -> Array:
        back = q.position - k.position
        away = (back if self.causal else abs(back)) - int(not self.own_key)
        return (away >= 0) & (away < self.max_span) & (away < q.labels["reach"])


def reach(spans: Array, ramp: int) -> Array:
    """Keys whose soft weight is above 0, int32: as many distances d = 0, 1, ... are below the span plus the ramp."""
    return jnp.ceil(spans).astype(jnp.int32) + ramp


def log_weight(spans: Array, away: Array, ramp: int) -> Array:
    """Log of the soft weight min(1, (ramp + span - d) / ramp) at distances d; 0 where that is not above 0.

    Where its slopes from left and right differ, at d = span and at d = span + ramp, it has the slope 0; the released
    code has that of the ramp.
    """
    weight = (ramp - away.astype(spans.dtype) + spans) / ramp
    weight = jnp.where((weight > 0) & (weight < 1), weight, 1)
    return jnp.log(weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpanTerm(Term):
    """The log of the soft weights of spans that are the same at every query."""

    spans: Array  # [H], tokens
    ramp: int = dataclasses.field(metadata={"static": True})
    own_key: bool = dataclasses.field(metadata={"static": True})

    def score(self, q: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
        away = abs(distances(q_pos, k_pos)) - int(not self.own_key)
        return log_weight(self.spans[:, None, None], away, self.ramp)

    def heads(self, start: int, stop: int) -> Term:
        return dataclasses.replace(self, spans=self.spans[start:stop])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicSpanTerm(Term):
    """The same where each query has a span of its own, its last feature; `terms` see the features before it."""

    terms: Terms
    ramp: int = dataclasses.field(metadata={"static": True})
    own_key: bool = dataclasses.field(metadata={"static": True})

    def score(self, q: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
        away = abs(distances(q_pos, k_pos)) - int(not self.own_key)
        total = log_weight(q[..., -1:], away, self.ramp)
        for term in self.terms:
            extra = term.score(q[..., :-1], q_pos, k_pos, scale)
            total = total if extra is None else total + extra.astype(total.dtype)
        return total

    def value(self, weights: Array, q_pos: Positions, k_pos: Positions) -> Array | None:
        values = [term.value(weights, q_pos, k_pos) for term in self.terms]
        known = [value for value in values if value is not None]
        return sum(known[1:], known[0]) if known else None


@functools.partial(jax.jit, static_argnames=("max_span", "ramp", "own_key", "causal", "scale", "dropout", "precision"))
def adaptive_span(
    q: Array,
    k: Array,
    v: Array,
    *,
    spans: Array,
    max_span: int,
    ramp: int = 32,
    own_key: bool = False,
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the last `max_span` keys, with soft weights that fall to 0 behind a span (equations 4 and 5).

    A key at distance d has the soft weight clamp((ramp + span - d) / ramp, 0, 1), which multiplies its weight before
    these are normalised: its log is added to the logits. d = 0 is the key before the query, or its own with `own_key`.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        spans: tokens, real numbers of at least 0: [H], or [B or 1, T, H] for a span of its own at every query.
        max_span: bound of the keys that are read. Time and memory grow with it, not with the spans.
        ramp: tokens over which soft weights fall from 1 to 0.
        own_key: whether a query reads its own key. In the paper it does not, so a first token reads nothing.
        causal: whether keys after the query are hidden; else distances count on both sides.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a `max_span` or ramp below 1, shapes that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 7, 2, 8))
        >>> out = lra.attention.adaptive_span(q, k, v, spans=jnp.zeros(2), max_span=5, ramp=1)
        >>> bool((out[:, 1:] == v[:, :-1]).all())
        True
    """
    _check(max_span, ramp)
    width, dtype, wide = q.shape[-1], q.dtype, accumulator(q.dtype)
    if spans.shape[-1:] != (q.shape[2],) or spans.ndim not in (1, 3):
        raise ValueError(f"spans need shape [H] or [B or 1, T, H] with H = {q.shape[2]}, got {list(spans.shape)}")
    q, k, visibility = aligned(terms, q, k, visibility)
    spans = spans.astype(wide)
    read = _read(q.shape[1], k.shape[1], reach(spans, ramp).max(), own_key, causal)
    k, v = harmless(k, read), harmless(v, read)
    rule = SpanRule(max_span, own_key, causal)
    if spans.ndim == 1:
        terms = (*terms, SpanTerm(spans, ramp, own_key))
        lengths = jnp.broadcast_to(reach(spans, ramp), (1, q.shape[1], len(spans)))
    else:
        terms = (DynamicSpanTerm(terms, ramp, own_key),)
        lengths = reach(spans, ramp)
        precision = "default" if jnp.finfo(dtype).bits < 32 else precision
        span = jnp.broadcast_to(spans[..., None], (*q.shape[:3], 1))
        q, k = jnp.concatenate([q.astype(wide), span], -1), jnp.pad(k.astype(wide), ((0, 0),) * 3 + ((0, 1),))
    grid = arrange.band(
        q, k, v, visibility,
        before=rule.furthest, after=0 if causal else rule.furthest,
        block=min(arrange.BLOCK, max(8, max_span)), labels=({"reach": lengths}, {}),
    )  # fmt: skip
    part = core.attend(
        grid, rule=rule, scale=default_scale(scale, width), terms=terms, dropout=dropout, key=key, precision=precision
    )
    return part.out.astype(dtype)


def _read(queries: int, keys: int, longest: Array, own_key: bool, causal: bool) -> Array:
    """Which keys any query may read [1, S], of what is not hidden otherwise."""
    index = np.arange(keys, dtype=np.int32)[None]
    unread = int(not own_key and (causal or queries == 1))  # the last key, which is the last query's own
    return (index < keys - unread) & (keys - queries - int(not own_key) - index < longest)


def _check(max_span: int, ramp: int) -> None:
    for name, value in (("max_span", max_span), ("ramp", ramp)):
        if value < 1:
            raise ValueError(f"{name} counts tokens and needs to be at least 1, got {value}")


def _mean(share: Array, valid: Array | None) -> Array:
    """[H], of the valid queries of [B, T, H]."""
    if valid is None:
        return share.mean((0, 1))
    valid = jnp.broadcast_to(valid, share.shape[:2])
    counted = jnp.where(valid[..., None], share, 0)
    return counted.sum((0, 1)) / jnp.maximum(valid.sum(), 1).astype(share.dtype)


class AdaptiveSpan(Pattern):
    """Spans z S that are learned: a z in [0, 1] for each head, or for each head and query (section 2.2).

    The auxiliary loss of a layer is `loss_coefficient` x S x mean z. Metrics of a layer: `span` [H], the keys that
    heads read, ceil(z S) + ramp, at most S; `span_largest` of them, `span_average` of the mean z, and `span_window`,
    the keys that are computed.

    The window that is computed is the largest span, rounded up to `STEP` keys, once the values are known (see `fit`);
    equal layers are stored together and share it. Until then, and for spans of queries, it is S.

    Args:
        max_span: S, the longest span. z is its share, so it belongs to the trained values.
        ramp: R, tokens over which soft weights fall from 1 to 0.
        loss_coefficient: of the auxiliary loss; the paper's models have 2e-6 at S = 1024 and 5e-7 at S = 8192.
        own_key: whether a query reads its own key; the paper's does not.
        dynamic: whether z = sigmoid(v x + b) of a query's layer input x, with b = -4 and v = 0 at the start.
        initial: z at the start where it is not dynamic, one for all heads or one each.
        site: where the layer stands. rngs: random streams.
    """

    def __init__(
        self,
        *,
        max_span: int,
        ramp: int = 32,
        loss_coefficient: float,
        own_key: bool = False,
        dynamic: bool = False,
        initial: float | tuple[float, ...] = 0.0,
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        _check(max_span, ramp)
        values = initial if isinstance(initial, tuple) else (initial,) * site.num_heads
        if len(values) != site.num_heads or not all(0 <= z <= 1 for z in values):
            raise ValueError(
                f"AdaptiveSpan.initial needs a number in [0, 1], or one for each of {site.num_heads} heads, "
                f"got {initial}"
            )
        if dynamic and any(values):
            raise ValueError(f"AdaptiveSpan.initial has no effect on dynamic spans: leave it at 0, got {initial}")
        if not 0 <= loss_coefficient < math.inf:
            raise ValueError(f"AdaptiveSpan.loss_coefficient needs to be at least 0 and finite, got {loss_coefficient}")
        self.max_span, self.ramp, self.own_key, self.dynamic = max_span, ramp, own_key, dynamic
        self.loss_coefficient, self.window = loss_coefficient, max_span
        super().__init__(site)
        if dynamic:
            self.kernel = nnx.Param(jnp.zeros((site.width, site.num_heads), jnp.float32))
            self.bias = nnx.Param(jnp.full(site.num_heads, _DYNAMIC_BIAS, jnp.float32))
        else:
            self.spans = nnx.Param(jnp.asarray(values, jnp.float32))
        self.trained = Buffer(jnp.asarray(max_span, jnp.int32))  # what z is a share of

    @property
    def promise(self) -> Promise:
        return EVERYTHING

    @property
    def rule(self) -> Rule:
        return SpanRule(self.max_span, self.own_key, self.causal)

    @property
    def reach(self) -> int:
        return SpanRule(self.window, self.own_key, self.causal).furthest

    @property
    def own_terms(self) -> Terms:
        return () if self.dynamic else (SpanTerm(self._known() * self.max_span, self.ramp, self.own_key),)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return ({"max_span": 9, "loss_coefficient": 0.0, "initial": (0.13, 0.0, 0.83), "ramp": 4},)

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"max_span": 128, "loss_coefficient": 2e-6, "initial": 0.5}

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        """Dynamic spans, and those of a model without values, count as the longest: so far a query may read."""
        lengths = reach(self._known() * self.max_span, self.ramp)
        return {"reach": jnp.broadcast_to(lengths, (1, queries, self.num_heads))}, {}

    def fit(self) -> bool:
        trained = np.asarray(self.trained[...]).max()
        if trained != self.max_span:
            raise UserError(
                f"AdaptiveSpan.max_span is {self.max_span}, but spans were trained as shares of {trained}: "
                f"set AdaptiveSpan.max_span = {trained}"
            )
        if self.dynamic:
            return False
        largest = np.ceil(np.asarray(self.spans[...], np.float64).max() * self.max_span)
        # Of values that are no numbers nothing follows.
        wanted = STEP * -(-(int(largest) + self.ramp) // STEP) if np.isfinite(largest) else self.max_span
        self.window = min(self.max_span, wanted)
        return True

    def project(self) -> None:
        if not self.dynamic:
            self.spans[...] = jnp.clip(self.spans[...], 0, 1)

    def tokens(self, share: Array) -> Array:
        """The keys that spans of these z read, as the released code counts them, as floats."""
        return jnp.minimum(jnp.ceil(share * self.max_span) + self.ramp, self.max_span)

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
        share = self._dynamic(inputs) if self.dynamic else self.spans[...]
        out = adaptive_span(
            q, k, v, spans=share.astype(accumulator(q.dtype)) * self.max_span, max_span=self.window, ramp=self.ramp,
            own_key=self.own_key, causal=self.causal, visibility=visibility, terms=terms,
            dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        by_head = share if share.ndim == 1 else _mean(share, None if visibility is None else visibility.q_valid)
        shown = {"span": by_head, "span_average": by_head.mean(), "span_largest": share.max()}
        return Attended(
            out,
            losses={"span": self.loss_coefficient * self.max_span * by_head.mean()},
            metrics={
                **{name: self.tokens(value) for name, value in shown.items()},
                "span_window": jnp.asarray(self.window, jnp.float32),
            },
        )

    def _dynamic(self, inputs: Inputs | None) -> Array:
        """The z of each query [B, T, H]."""
        if inputs is None:
            raise ValueError("dynamic spans are made of layer inputs: pass `inputs`")
        x = inputs.queries.astype(jnp.float32)
        return jax.nn.sigmoid(jnp.dot(x, self.kernel[...], precision="highest") + self.bias[...])

    def _known(self) -> Any:
        """The z [H]; 1 where it depends on inputs, or in a model that has shapes only."""
        value = None if self.dynamic else self.spans.get_value()
        if value is None or isinstance(value, jax.ShapeDtypeStruct):
            return jnp.ones(self.num_heads)
        return value.astype(jnp.result_type(float))
