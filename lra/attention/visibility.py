"""Who may be seen: positions, validity and segments of queries and keys, the only carrier of masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # jax.Array, numpy.ndarray or tracer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """What a rule knows of queries or of keys; everything broadcasts to [B, H, T, S].

    Attributes:
        position: integer positions in the row, [B or 1, 1, T, 1] for queries and [B or 1, 1, 1, S] for keys.
        head: head numbers inside the pattern, [1, H, 1, 1].
        labels: the pattern's own integers by name (block, bucket, cluster), shaped like `position` (or with H heads).
    """

    position: Array
    head: Array
    labels: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Positions, validity and segments of T queries and S >= T keys. It can only remove pairs, never add one.

    The last T keys are the queries' own tokens. A field that is None has its default: positions by index (keys 0..S-1,
    queries S-T..S-1), everything valid, one segment. Positions must be contiguous inside a segment; leave them None
    under padding and packing, where they differ from the index by a constant only and every distance is the same.

    What else a pattern may choose keys by travels along: token ids and marks. Patterns with borders (blocks, strided
    convolutions) count from the first valid key of a row (`places`), so that padding in front changes nothing.

    Attributes:
        q_position: [B or 1, T] integers.
        k_position: [B or 1, S] integers.
        q_valid: [B or 1, T] booleans; an invalid query reads nothing: its output is 0.
        k_valid: [B or 1, S] booleans; an invalid key is read by nobody, whatever it holds.
        q_segment: [B or 1, T] integers; queries read keys of their own segment only.
        k_segment: [B or 1, S] integers, given together with `q_segment`.
        k_token: [B or 1, S] token ids, for patterns that choose keys by token; -1 where a memory slot stands.
        k_global: [B or 1, S] booleans, keys that the caller marks as global.
    """

    q_position: Array | None = None
    k_position: Array | None = None
    q_valid: Array | None = None
    k_valid: Array | None = None
    q_segment: Array | None = None
    k_segment: Array | None = None
    k_token: Array | None = None
    k_global: Array | None = None

    @classmethod
    def tokens(
        cls,
        *,
        valid: Array | None = None,
        segment: Array | None = None,
        token: Array | None = None,
        marked: Array | None = None,
    ) -> Visibility:
        """Self-attention over T tokens.

        Args:
            valid: [B, T] booleans, False for padding.
            segment: [B, T] integers, one a packed document.
            token: [B, T] token ids.
            marked: [B, T] booleans, True for global tokens.
        """
        return cls(q_valid=valid, k_valid=valid, q_segment=segment, k_segment=segment, k_token=token, k_global=marked)

    def after(self, memory_valid: Array, length: int, memory_position: Sequence[int] | None = None) -> Visibility:
        """The same with M memory slots standing before the keys.

        Args:
            memory_valid: [B, M] booleans, False for slots that are still empty.
            length: number of keys so far (S).
            memory_position: M integers counted from the first key; None for consecutive ones that end before it.
        """
        if self.k_segment is not None:
            raise ValueError("packed segments need rows without memory: memory slots belong to no segment")
        batch, slots = memory_valid.shape
        own = jnp.ones((1, length), bool) if self.k_valid is None else self.k_valid
        valid = jnp.concatenate([memory_valid, jnp.broadcast_to(own, (batch, length))], axis=1)
        q_position, position = self.q_position, self.k_position
        if position is None and memory_position is not None:
            position = jnp.arange(length, dtype=jnp.int32)[None]
            q_position = position  # without memory so far, queries are the keys
        if position is not None:
            ahead = range(-slots, 0) if memory_position is None else memory_position
            position = jnp.concatenate([position[:, :1] + np.asarray(ahead, position.dtype), position], axis=1)

        def behind(x: Array | None, fill: int) -> Array | None:
            return None if x is None else jnp.pad(x, ((0, 0), (slots, 0)), constant_values=fill)

        return dataclasses.replace(
            self, k_valid=valid, q_position=q_position, k_position=position, k_token=behind(self.k_token, -1),
            k_global=behind(self.k_global, False),
        )  # fmt: skip

    def positions(self, queries: int, keys: int) -> tuple[Array, Array]:
        """Positions of T queries and S keys, [B or 1, T] and [B or 1, S]: those given, or the index."""
        index = np.arange(keys, dtype=np.int32)[None]
        q_position = index[:, keys - queries :] if self.q_position is None else self.q_position
        return q_position, index if self.k_position is None else self.k_position

    def places(self, queries: int, keys: int) -> tuple[Array, Array]:
        """Numbers of T queries and S keys in their row, [B or 1, T] and [B or 1, S]: 0 for the first valid key."""
        index = np.arange(keys, dtype=np.int32)[None]
        if self.k_valid is not None:
            index = index - jnp.argmax(self.k_valid, axis=1).astype(jnp.int32)[:, None]
        return index[:, keys - queries :], index

    def place_labels(self, queries: int, keys: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """`places` as labels of a pattern with borders."""
        q_place, k_place = self.places(queries, keys)
        return {"place": q_place}, {"place": k_place}

    def check(self, batch: int, queries: int, keys: int) -> Visibility:
        """Raises where shapes or dtypes do not fit; returns self."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            length = queries if field.name.startswith("q_") else keys
            if value.ndim != 2 or value.shape[0] not in (1, batch) or value.shape[1] != length:
                raise ValueError(f"{field.name} needs shape [{batch} or 1, {length}], got {list(value.shape)}")
            kind = jnp.bool_ if field.name.endswith(("valid", "global")) else jnp.integer
            if not jnp.issubdtype(value.dtype, kind):
                raise ValueError(f"{field.name} needs dtype {kind.__name__}, got {value.dtype}")
        for name in ("position", "segment"):
            if (getattr(self, f"q_{name}") is None) != (getattr(self, f"k_{name}") is None):
                raise ValueError(f"q_{name} and k_{name} have no effect alone: give both or none")
        return self
