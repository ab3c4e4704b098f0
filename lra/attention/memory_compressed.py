"""Memory-compressed attention (Liu et al. 2018, arXiv:1801.10198, section 4.2.4). O(T^2 / r) time, O(T) memory."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Entries
from lra.attention.core import Rule, Terms
from lra.attention.full import FullRule
from lra.attention.initialisers import initialiser
from lra.attention.pattern import Attended, Inputs, Pattern, Site, default_scale
from lra.attention.promise import BORDERED, Promise
from lra.attention.rows import Anchored, anchor, harmless, same_rows, take
from lra.attention.terms import prepare
from lra.attention.visibility import Array, Visibility

Convolution = tuple[Array, Array | None]
"""Kernel [w, C', C'] over w tokens, and bias [C'] or None."""


@functools.partial(jax.jit, static_argnames=("rate", "empty", "causal", "scale", "dropout", "precision"))
def memory_compressed(
    q: Array,
    k: Array,
    v: Array,
    *,
    rate: int,
    key_convolution: Convolution,
    value_convolution: Convolution,
    empty: Literal["nothing", "first"] = "nothing",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to slots, each of them a strided convolution over the keys and values of a few tokens.

    Slot m is made of the tokens from m * rate on, as many as the kernel is wide, counted from the first valid key of a
    row. It has the position of its last token, and is visible once all its tokens are past, where the query's own token
    counts as past, as everywhere here. Slots that hold padding or tokens of two segments, and tokens at the end that
    fill no slot, are not read.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        rate: r, tokens from slot to slot.
        key_convolution: kernel [w, H D, H D] over the tokens' heads side by side, and bias [H D] or None.
        value_convolution: the same for values, with E in place of D.
        empty: what a causal query reads that no slot precedes: "nothing", or the "first" key, which then stands before
            the slots for every query, as in the released code.
        causal: a query reads slots of its own and earlier tokens; else all.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: a rate or kernel below 1, an unknown `empty`, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> mean = jax.numpy.eye(16)[None].repeat(3, axis=0) / 3, None
        >>> lra.attention.memory_compressed(q, k, v, rate=3, key_convolution=mean, value_convolution=mean).shape
        (1, 17, 2, 8)
    """
    _check(rate, len(key_convolution[0]), empty)
    row = anchor(q, k, v, visibility or Visibility(), period=rate)
    summarise = functools.partial(_summarise, row.visibility, rate=rate, empty=empty, precision=precision)
    slots = (
        summarise(x.reshape(*x.shape[:2], -1), convolution=convolution).reshape(x.shape[0], -1, *x.shape[2:])
        for x, convolution in ((row.k, key_convolution), (row.v, value_convolution))
    )
    return _attend(
        row, *slots, rate=rate, kernel=len(key_convolution[0]), empty=empty, causal=causal, scale=scale, terms=terms,
        dropout=dropout, key=key, precision=precision,
    )  # fmt: skip


def _summarise(
    visibility: Visibility, x: Array, *, convolution: Convolution, rate: int, empty: str, precision: str
) -> Array:
    """Anchored rows [B, S, C'] to slots [B, M, C'], the first valid row before them if it is to be there."""
    kernel, bias = convolution
    x = harmless(x[:, :, None], visibility.k_valid)[:, :, 0]
    slots = jax.lax.conv_general_dilated(
        jnp.pad(x, ((0, 0), (0, max(0, len(kernel) - x.shape[1])), (0, 0))), kernel.astype(x.dtype), (rate,), "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"), precision=precision,
    )  # fmt: skip
    if bias is not None:
        slots = slots + bias.astype(x.dtype)
    if empty == "nothing":
        return slots
    return jnp.concatenate([_at_first(x, visibility), slots], axis=1)


def _at_first(x: Array, visibility: Visibility) -> Array:
    """What stands at the first valid key, [B or 1, 1, ...] of [B or 1, S, ...]."""
    if visibility.k_valid is None:
        return x[:, :1]
    first = jnp.argmax(visibility.k_valid, axis=1).astype(jnp.int32)
    return take(x, first[:, None])


def _attend(
    row: Anchored, k: Array, v: Array, *, rate: int, kernel: int, empty: str, causal: bool, scale: float | None,
    terms: Terms, dropout: float, key: Array | None, precision: str,
) -> Array:  # fmt: skip
    """Attention of anchored queries to the slots k [B, M, H, D] and v [B, M, H, E]."""
    length, size, seen = row.q.shape[1], row.k.shape[1], row.visibility
    q_position, k_position = seen.positions(length, size)
    count = k.shape[1] - (empty == "first")
    token = np.arange(count, dtype=np.int32)[:, None] * rate + np.arange(kernel, dtype=np.int32)  # [M, w]
    last = token[:, -1]

    def slots(x: Array) -> Array:
        """[B or 1, S] to the tokens of the slots, [B or 1, M, w]; zeros after the end."""
        return jnp.pad(jnp.asarray(x), ((0, 0), (0, max(0, int(last[-1]) + 1 - size))))[:, token]

    valid = np.ones((1, size), bool) if seen.k_valid is None else seen.k_valid
    whole, segment, position = slots(valid).all(-1), None, slots(k_position)[:, :, -1]
    if seen.k_segment is not None:
        held = slots(seen.k_segment)
        whole, segment = whole & (held == held[:, :, :1]).all(-1), held[:, :, 0]
    if empty == "first":
        prepend = lambda x, y: jnp.concatenate(same_rows(_at_first(jnp.asarray(x), seen), y), axis=1)  # noqa: E731
        position, last = prepend(k_position, position), np.concatenate([[0], last])
        whole = prepend(valid, whole)
        segment = None if segment is None else prepend(seen.k_segment, segment)
    q, k = prepare(terms, row.q, harmless(k, whole), q_position, position)
    queries = Entries(jnp.asarray(q_position), seen.q_valid, seen.q_segment)
    grid = arrange.tiles(
        q, k, v, queries, Entries(position, whole, segment),
        pairs=lambda i, j: not causal or int(last[j[0]]) <= size - length + i[-1],
    )  # fmt: skip
    part = core.attend(
        grid, rule=FullRule(causal), scale=default_scale(scale, q.shape[-1]), terms=terms, dropout=dropout, key=key,
        precision=precision,
    )  # fmt: skip
    return row.release(part.out).astype(q.dtype)


def _check(rate: int, kernel: int, empty: str, convolve: str = "projected") -> None:
    for name, tokens in (("rate", rate), ("kernel", kernel)):
        if tokens < 1:
            raise ValueError(f"{name} is a number of tokens and needs to be at least 1, got {tokens}")
    for name, value, known in (
        ("empty", empty, ("nothing", "first")),
        ("convolve", convolve, ("projected", "inputs")),
    ):
        if value not in known:
            raise ValueError(f"{name} needs to be {known[0]!r} or {known[1]!r}, got {value!r}")


class MemoryCompressed(Pattern):
    """See `memory_compressed`; `rate` and `kernel` may be tuples with one entry a layer.

    Args:
        rate: r, tokens from slot to slot (the paper: 3).
        kernel: w, tokens of a slot; None for the rate.
        convolve: "projected" keys and values, as the paper says, or the layer's "inputs", which are then projected, as
            the released code does.
        empty: "nothing" or "first", see `memory_compressed`.
        bias: whether the convolutions have biases.
        kernel_init: name of the initialiser of the convolutions.
        site: where the layer stands. rngs: random streams.
    """

    def __init__(
        self,
        *,
        rate: int | tuple[int, ...],
        kernel: int | tuple[int, ...] | None = None,
        convolve: Literal["projected", "inputs"] = "projected",
        empty: Literal["nothing", "first"] = "nothing",
        bias: bool = False,
        kernel_init: str = "lecun_normal",
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.rate = site.pick("MemoryCompressed.rate", rate)
        self.kernel = self.rate if kernel is None else site.pick("MemoryCompressed.kernel", kernel)
        self.convolve, self.empty = convolve, empty
        super().__init__(site)
        _check(self.rate, self.kernel, empty, convolve)

        widths = [site.width]
        if convolve == "projected":
            widths = [site.num_heads * site.head_dim, site.num_heads * (site.value_dim or site.head_dim)]
        make = initialiser(kernel_init)
        self.kernels = nnx.List([nnx.Param(make(rngs.params(), (self.kernel, w, w))) for w in widths])
        self.biases = nnx.List([nnx.Param(jnp.zeros((w,))) for w in widths] if bias else [])

    @property
    def promise(self) -> Promise:
        return BORDERED

    @property
    def own_values(self) -> bool:
        return True

    @property
    def rule(self) -> Rule:
        return FullRule(self.causal)

    def _convolutions(self) -> list[Convolution]:
        biases: list[Array | None] = [bias[...] for bias in self.biases] or [None] * len(self.kernels)
        return [(kernel[...], bias) for kernel, bias in zip(self.kernels, biases, strict=True)]

    def _tokens(self, keys: int, visibility: Visibility) -> tuple[Array, Array]:
        """Index of the tokens of each entry and whether it is whole: [B or 1, M, w] and [B or 1, M]."""
        first = -visibility.places(keys, keys)[1][:, :1, None]
        count = max(1, (keys - self.kernel) // self.rate + 1)
        token = np.arange(count, dtype=np.int32)[:, None] * self.rate + np.arange(self.kernel, dtype=np.int32)
        if self.empty == "first":
            token = np.concatenate([np.zeros((1, self.kernel), np.int32), token])
        index = first + token[None]
        whole, index = (index < keys).all(-1), jnp.minimum(index, keys - 1)
        if visibility.k_valid is not None:
            whole = whole & take(visibility.k_valid, index).all(-1)
        if visibility.k_segment is not None:
            held = take(visibility.k_segment, index)
            whole = whole & (held == held[:, :, :1]).all(-1)
        return index, whole

    def entries(
        self, queries: int, keys: int, visibility: Visibility, selection: Any = None
    ) -> tuple[Entries, Entries]:
        known, _ = super().entries(queries, keys, visibility, selection)
        token, whole = self._tokens(keys, visibility)
        last = token[:, :, -1]
        position = take(visibility.positions(queries, keys)[1], last)
        segment = None if visibility.k_segment is None else take(visibility.k_segment, last)
        return known, Entries(position, whole, segment)

    def holds(self, keys: int, visibility: Visibility) -> np.ndarray:
        token, _ = self._tokens(keys, visibility)
        return (np.asarray(token)[..., None] == np.arange(keys)).any(2)

    def summarise(self, k: Array, v: Array, visibility: Visibility) -> tuple[Array, Array]:
        """The slots by their definition, for the oracle: `memory_compressed` convolves."""
        token, whole = self._tokens(k.shape[1], visibility)
        made = []
        for x, (kernel, bias) in zip((k, v), self._convolutions(), strict=True):
            held = take(x, token)
            held = jnp.where(whole[:, :, None, None, None], held, jnp.zeros((), x.dtype))
            flat = held.reshape(*held.shape[:3], -1)
            slots = jnp.einsum("bmwc,wcd->bmd", flat, kernel.astype(x.dtype), precision="highest")
            slots = slots if bias is None else slots + bias.astype(x.dtype)
            if self.empty == "first":
                slots = jnp.concatenate([flat[:, :1, 0], slots[:, 1:]], axis=1)
            made.append(slots.reshape(*slots.shape[:2], *x.shape[2:]))
        return made[0], made[1]

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"rate": 3}, {"rate": 2, "kernel": 3, "empty": "first", "bias": True}

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
        options: dict[str, Any] = {
            "rate": self.rate, "empty": self.empty, "causal": self.causal, "terms": terms,
            "dropout": self.dropout_rate(train), "key": key,
        }  # fmt: skip
        if self.convolve == "projected":
            of_keys, of_values = self._convolutions()
            out = memory_compressed(
                q, k, v, visibility=visibility, key_convolution=of_keys, value_convolution=of_values, **options
            )
            return Attended(out)
        if inputs is None:
            raise ValueError("MemoryCompressed.convolve = 'inputs' needs the layer's inputs: call it through Attention")
        x = inputs.keys[:, :, None].astype(q.dtype)  # what the layer's projections compute in
        row = anchor(q, x, x, visibility or Visibility(), period=self.rate)
        summaries = _summarise(
            row.visibility, row.k[:, :, 0], convolution=self._convolutions()[0], rate=self.rate, empty=self.empty,
            precision="highest",
        )  # fmt: skip
        _, k, v = inputs.project(summaries)
        return Attended(_attend(row, k, v, kernel=self.kernel, scale=None, precision="highest", **options))
