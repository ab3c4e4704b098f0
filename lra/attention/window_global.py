"""Window and global tokens (Beltagy et al. 2020, arXiv:2004.05150, section 3.1). O(T (W + G)) time, O(T) memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import arrange, core
from lra.attention.arrange import Entries, Labels
from lra.attention.core import Rule, Terms
from lra.attention.pattern import Attended, Inputs, Pattern, Projection, Site, default_scale
from lra.attention.promise import BORDERED, EVERYTHING, Promise
from lra.attention.rows import lengths, take
from lra.attention.sliding_window import WindowRule, check_window
from lra.attention.terms import prepare
from lra.attention.visibility import Array, Entry, Visibility
from lra.errors import UserError


@dataclasses.dataclass(frozen=True)
class WindowGlobalRule:
    """Keys in the window; globals are read by all and read all; a causal query reads nothing after itself.

    `part` is one of the disjoint parts that it is computed by: "window" and "globals" of local queries, "all" of global
    ones; or "union".
    """

    window: WindowRule
    causal: bool
    part: Literal["union", "window", "globals", "all"] = "union"

    def __call__(self, q: Entry, k: Entry) -> Array:
        reader, read, near = q.labels["global"], k.labels["global"], self.window(q, k)
        if self.part == "union":
            allowed = near | reader | read
        elif self.part == "window":
            allowed = near & ~reader & ~read
        else:
            allowed = read & ~reader if self.part == "globals" else reader
        return allowed & (k.position <= q.position) if self.causal else allowed


@dataclasses.dataclass(frozen=True)
class Globals:
    """Which keys are global: those at some indices, those of some tokens, and those that the caller marks.

    Attributes:
        positions: numbers of tokens in their row, 0 for the first valid one.
        tokens: token ids.
        most: G, the largest number of global keys of a row.
    """

    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, positions: tuple[int, ...], tokens: tuple[int, ...], most: int | None) -> Globals:
        """Checked, with `most` counted where the positions are all there is."""
        for name, numbers in (("global_positions", positions), ("global_tokens", tokens)):
            if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
                raise ValueError(f"{name} needs different numbers of at least 0, got {numbers}")
        if most is None:
            if tokens or not positions:
                raise ValueError(
                    "window_global needs max_globals for globals by token or by mark (visibility.k_global), or "
                    "global_positions alone: give one of them, or use sliding_window"
                )
            most = len(positions)
        if most < max(1, len(positions)):
            raise ValueError(
                f"max_globals is {most}, but there are {len(positions)} global_positions: raise it to at least "
                f"{max(1, len(positions))}"
            )
        return cls(tuple(positions), tuple(tokens), most)

    def flags(self, queries: int, keys: int, visibility: Visibility) -> Array:
        """Booleans [B or 1, S]."""
        if self.positions and max(self.positions) >= keys:
            raise ValueError(
                f"global_positions {self.positions} need a row of at least {max(self.positions) + 1} tokens, got "
                f"{keys}: lower them or lengthen the row"
            )
        place = visibility.places(queries, keys)[1]
        flags = jnp.isin(jnp.asarray(place), jnp.asarray(self.positions, jnp.int32))
        if self.tokens:
            if visibility.k_token is None:
                raise ValueError(
                    "global_tokens need token ids: give visibility.k_token, call it through a model, or name "
                    "global_positions instead where there is no text, as in a drawing or a count"
                )
            flags = flags | jnp.isin(visibility.k_token, jnp.asarray(self.tokens, visibility.k_token.dtype))
        if visibility.k_global is not None:
            flags = flags | visibility.k_global
        return flags if visibility.k_valid is None else flags & visibility.k_valid

    def choose(self, flags: Array) -> Array:
        """Indices of the global keys [B or 1, G]; S, which is none, where a row has fewer."""
        find = functools.partial(jnp.nonzero, size=self.most, fill_value=flags.shape[1])
        return jax.vmap(lambda row: find(row)[0])(flags).astype(jnp.int32)

    def refuse_more(self, flags: Array, visibility: Visibility) -> None:
        """Raises where a row has more globals than G: at once or, under jit, when the values are there.

        Positions alone are never more, and need no call from compiled code, which the cache on disk would not keep.
        """
        if not self.tokens and visibility.k_global is None:
            return
        count = flags.sum(1).max()
        if isinstance(count, jax.core.Tracer):
            jax.debug.callback(self._refuse, count)
        else:
            self._refuse(count)

    def _refuse(self, count: Array) -> None:
        if int(np.max(count)) > self.most:
            raise UserError(f"a row has {int(np.max(count))} global tokens, but max_globals is {self.most}: raise it")


def window_global(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int,
    window_right: int = 0,
    dilation: int = 1,
    global_positions: tuple[int, ...] = (),
    global_tokens: tuple[int, ...] = (),
    max_globals: int | None = None,
    own: tuple[Array, Array, Array] | None = None,
    read_through: Literal["local", "global"] = "local",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Sliding window attention with a few global tokens, which read every token and are read by every token.

    Global are the tokens at `global_positions` of their row, those whose id is one of `global_tokens`
    (`visibility.k_token`), and those that the caller marks (`visibility.k_global`). A causal global
    reads all before it, and is read by all after it. No key counts twice.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        window: keys up to and including the query's own. window_right: keys after it; 0 when causal.
        dilation: step in tokens between the keys of a window.
        global_positions: numbers of tokens in their row, 0 for the first valid one.
        global_tokens: token ids.
        max_globals: G, room for globals a row; needed with tokens or marks.
        own: queries [B, T, H, D], keys and values of projections of their own, by which global queries read; None for
            q, k and v.
        read_through: the keys and values by which others read globals: "local" for k and v, as in the released code, or
            "global" for those of `own`.
        causal: a query reads its own key and keys before it.
        scale, visibility, terms, dropout, key, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may read nothing.

    Raises:
        ValueError: what `sliding_window` raises; a `read_through` that is unknown or has no effect; a position outside
            the row; more globals than `max_globals` (under jit this comes from the runtime, as
            `jax.errors.JaxRuntimeError` that quotes the sentence).

    Example:
        >>> import jax, lra.attention
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 17, 2, 8))
        >>> lra.attention.window_global(q, k, v, window=4, global_positions=(0, 5)).shape
        (1, 17, 2, 8)
    """
    check_window(window, window_right, dilation, causal)
    _check_reading(read_through, own is not None, "own")
    chosen = Globals.of(global_positions, global_tokens, max_globals)
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)
    flags = chosen.flags(length, size, visibility)
    chosen.refuse_more(flags, visibility)
    index = chosen.choose(flags)
    if own is not None:
        own = take(own[0], jnp.clip(index - (size - length), 0, length - 1)), own[1], own[2]
    return _attend(
        q, k, v, flags, index, own, visibility, terms, key, rule=WindowRule(window, window_right, dilation),
        read_through=read_through, causal=causal, scale=scale, dropout=dropout, precision=precision,
    )  # fmt: skip


def _check_reading(read_through: str, own: bool, name: str) -> None:
    if read_through not in ("local", "global"):
        raise ValueError(f"read_through needs to be 'local' or 'global', got {read_through!r}")
    if read_through == "global" and not own:
        raise ValueError(f"read_through = 'global' has no effect without projections of their own: give {name}")


@functools.partial(jax.jit, static_argnames=("rule", "read_through", "causal", "scale", "dropout", "precision"))
def _attend(
    q: Array, k: Array, v: Array, flags: Array, index: Array, own: tuple[Array, Array, Array] | None,
    visibility: Visibility, terms: Terms, key: Array | None, *, rule: WindowRule, read_through: str, causal: bool,
    scale: float | None, dropout: float, precision: str,
) -> Array:  # fmt: skip
    """The three parts: windows, globals read by local queries, everything read by the G global ones (`own`[0])."""
    length, size = lengths(q, k, visibility)
    offset = size - length
    attend = functools.partial(
        core.attend, scale=default_scale(scale, q.shape[-1]), terms=terms, dropout=dropout, precision=precision
    )
    part = functools.partial(WindowGlobalRule, rule, causal)
    position, k_position = (jnp.asarray(x) for x in visibility.positions(length, size))
    labels: Labels = ({"global": flags[:, offset:]}, {"global": flags})
    queries = Entries(position, visibility.q_valid, visibility.q_segment, labels[0])
    keys = Entries(k_position, visibility.k_valid, visibility.k_segment, labels[1])
    there = index < size
    index = jnp.minimum(index, size - 1)
    asking = there & (index >= offset)
    asked = jnp.maximum(index - offset, 0)
    own_q, own_k, own_v = (take(q, asked), k, v) if own is None else own
    readers = _taken(queries, asked, asking)
    q, k = prepare(terms, q, k, position, k_position)
    own_q, own_k = prepare(terms, own_q, own_k, readers.position, k_position)
    near = arrange.band(
        q, k, v, visibility, before=rule.window - 1, after=rule.window_right, step=rule.dilation, labels=labels,
        block=rule.block,
    )  # fmt: skip
    read_k, read_v = (k, v) if read_through == "local" else (own_k, own_v)
    far = arrange.tiles(q, take(read_k, index), take(read_v, index), queries, _taken(keys, index, there))
    local = core.union(
        attend(near, rule=part("window"), key=core.part_key(key, 0)),
        attend(far, rule=part("globals"), key=core.part_key(key, 1)),
    ).out
    every = arrange.tiles(own_q, own_k, own_v, readers, keys)
    read = attend(every, rule=part("all"), key=core.part_key(key, 2)).out
    row = jnp.broadcast_to(jnp.where(asking, asked, length), read.shape[:2])  # none is at T
    out = jax.vmap(lambda rows, i, x: rows.at[i].set(x, mode="drop"))(local, row, read)
    return out.astype(q.dtype)


def _taken(entries: Entries, index: Array, there: Array) -> Entries:
    """The entries at index [B or 1, G], valid where they are there."""
    taken = jax.tree.map(lambda x: take(x, index), entries)
    return dataclasses.replace(taken, valid=there if taken.valid is None else there & taken.valid)


class WindowGlobal(Pattern):
    """See `window_global`; `window`, `window_right`, `dilation` and `max_globals` may be tuples with one entry a layer.

    It promises no memory with `global_positions`, which would count from the oldest token that is remembered, and move
    on with it. Remembered tokens have no ids and no marks, so that none of them is global.

    Args:
        window: keys up to and including the query's own. window_right: keys after it. dilation: step in tokens.
        global_positions: numbers of tokens in their row. global_tokens: token ids. max_globals: room for globals a row.
        own_projections: whether global queries read by q, k and v projections of their own, which start from the local
            ones; needs the `Attention` layer.
        read_through: "local" or "global", see `window_global`; "global" needs `own_projections`.
        site: where the layer stands. rngs: random streams.
    """

    def __init__(
        self,
        *,
        window: int | tuple[int, ...],
        window_right: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        global_positions: tuple[int, ...] = (),
        global_tokens: tuple[int, ...] = (),
        max_globals: int | tuple[int, ...] | None = None,
        own_projections: bool = True,
        read_through: Literal["local", "global"] = "local",
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.window = WindowRule(
            site.pick("WindowGlobal.window", window),
            site.pick("WindowGlobal.window_right", window_right),
            site.pick("WindowGlobal.dilation", dilation),
        )
        most = None if max_globals is None else site.pick("WindowGlobal.max_globals", max_globals)
        self.chosen = Globals.of(global_positions, global_tokens, most)
        self.own_projections, self.read_through = own_projections, read_through
        super().__init__(site)
        check_window(self.window.window, self.window.window_right, self.window.dilation, site.causal)
        _check_reading(read_through, own_projections, "own_projections = True")

    @property
    def promise(self) -> Promise:
        by_position = bool(self.chosen.positions)
        return dataclasses.replace(BORDERED if by_position else EVERYTHING, globals=True, memory=not by_position)

    @property
    def own_values(self) -> bool:
        return self.own_projections

    @property
    def rule(self) -> Rule:
        return WindowGlobalRule(self.window, self.causal)

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        flags = self.chosen.flags(queries, keys, visibility)
        self.chosen.refuse_more(flags, visibility)
        return {"global": flags[:, keys - queries :]}, {"global": flags}

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {"window": 5, "global_positions": (0,), "own_projections": False},
            {"window": 3, "window_right": 2, "dilation": 2, "global_positions": (0,), "own_projections": False},
            {"window": 4, "max_globals": 3, "own_projections": False},
        )

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"window": 128, "global_positions": (0, 1, 2, 3), "own_projections": False}

    def adopt(self, query: Projection, key: Projection, value: Projection) -> None:
        if self.own_projections:
            kernels = [each.kernel for each in (query, key, value)]
            self.kernels = nnx.List([nnx.Param(jnp.array(kernel)) for kernel in kernels])
            if query.bias is not None:
                self.biases = nnx.List([nnx.Param(jnp.array(each.bias)) for each in (query, key, value)])

    def _project(self, n: int, x: Array) -> Array:
        """[B, L, C] to [B, L, H, D] by projection n of q, k, v."""
        out = jnp.einsum("blc,chd->blhd", x, self.kernels[n][...].astype(x.dtype))
        return out + self.biases[n][...].astype(x.dtype) if hasattr(self, "biases") else out

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
        visibility = visibility or Visibility()
        length, size = lengths(q, k, visibility)
        flags = self.chosen.flags(length, size, visibility)
        self.chosen.refuse_more(flags, visibility)
        index, own = self.chosen.choose(flags), None
        if self.own_projections:
            if inputs is None or not hasattr(self, "kernels"):
                raise ValueError(
                    "WindowGlobal.own_projections needs the layer's inputs: call it through Attention, or set "
                    "WindowGlobal.own_projections = False"
                )
            asking = take(inputs.queries, jnp.clip(index - (size - length), 0, length - 1)).astype(q.dtype)
            read = inputs.keys.astype(q.dtype)  # what the layer's projections compute in
            own = self._project(0, asking), self._project(1, read), self._project(2, read)
        out = _attend(
            q, k, v, flags, index, own, visibility, terms, key, rule=self.window, read_through=self.read_through,
            causal=self.causal, scale=None, dropout=self.dropout_rate(train), precision="highest",
        )  # fmt: skip
        return Attended(out)
