"""What position and distance add to attention: the seam `Term`, and rotary and ALiBi."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention.precision import accumulator
from lra.attention.visibility import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Range:
    """Consecutive positions `start, start + step, ...`, up to a constant that queries and keys share.

    Only differences between two ranges mean anything. `start` is a traced integer; `length` and `step` are static.
    """

    start: Array
    length: int = dataclasses.field(metadata={"static": True})
    step: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def positions(self) -> Array:
        """[length] integers."""
        return self.start + self.step * jnp.arange(self.length, dtype=jnp.int32)


Positions = Range | Array


def distances(q_pos: Positions, k_pos: Positions) -> Array:
    """Query position minus key position, [..., q, k]."""
    q = q_pos.positions if isinstance(q_pos, Range) else q_pos
    k = k_pos.positions if isinstance(k_pos, Range) else k_pos
    return q[..., :, None] - k[..., None, :]


class Term:
    """A pure function of position with its parameters as leaves: a frozen dataclass registered as a pytree.

    It is an argument of every attention function, and differentiated as one. Each method is the identity by default; a
    block hands in queries [B, R, H, q, D] (after `query`), and positions as a `Range` where they are consecutive, else
    as integers that broadcast to [B, R, H, q] and [B, R, H, k].
    """

    def query(self, q: Array, position: Array) -> Array:
        """Queries [B, T, H, D] at positions [B or 1, T], before scaling."""
        return q

    def key(self, k: Array, position: Array) -> Array:
        """Keys [B, S, H, D] at positions [B or 1, S]."""
        return k

    def score(self, q: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array | None:
        """Added to the scaled logits: broadcasts to [B, R, H, q, k], or None for nothing."""
        return None

    def value(self, weights: Array, q_pos: Positions, k_pos: Positions) -> Array | None:
        """Added to weights @ v: [B, R, H, q, E], or None for nothing."""
        return None

    def heads(self, start: int, stop: int) -> Term:
        """The same term for heads start..stop-1 (see `Heads`)."""
        return self

    def layer(self, number: Array | int) -> Term:
        """The term of that layer, which the stack hands to it; under `scan` the number is traced."""
        return self

    def within(self, ahead: int, back: int) -> Term:
        """The same where a query reads keys of distances -ahead..back alone, as the attention layer knows.

        Raises:
            ValueError: the term has no value for some of them.
        """
        return self


class TermModule(nnx.Module):
    """Owns a term's parameters: one instance a model, shared by its layers.

    Subclasses are final, take their own arguments and then `num_layers`, `width`, `num_heads`, `head_dim` and `rngs`
    from the model.
    """

    distances = True
    """Whether the term needs patterns that promise `distances`."""

    @abc.abstractmethod
    def __call__(self, key: Array | None = None) -> Term:
        """The term, made of the module's parameters; `key` is the random key of a training step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotaryTerm(Term):
    """See `Rotary`."""

    frequencies: Array  # [pairs], radians a token

    def query(self, q: Array, position: Array) -> Array:
        return self._rotate(q, position)

    def key(self, k: Array, position: Array) -> Array:
        return self._rotate(k, position)

    def _rotate(self, x: Array, position: Array) -> Array:
        frequencies = jax.lax.stop_gradient(self.frequencies)
        wide = accumulator(x.dtype)
        angle = position[..., None, None].astype(wide) * frequencies.astype(wide)  # [B or 1, T, 1, pairs]
        half = frequencies.shape[0]
        a, b, rest = x[..., :half].astype(wide), x[..., half : 2 * half].astype(wide), x[..., 2 * half :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
        return jnp.concatenate([turned, rest], axis=-1)


class Rotary(TermModule):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34), in the half-split form of later code.

    Args:
        base: wavelengths run from 2 pi to 2 pi base.
        fraction: share of the head's width that is rotated; the rest passes.
    """

    def __init__(
        self,
        *,
        base: float = 10_000.0,
        fraction: float = 1.0,
        num_layers: int,
        width: int,
        num_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
    ) -> None:
        if base <= 1:
            raise ValueError(f"Rotary.base needs to be above 1, got {base}")
        if not 0 < fraction <= 1:
            raise ValueError(f"Rotary.fraction needs to be above 0 and at most 1, got {fraction}")
        pairs = int(head_dim * fraction) // 2
        if pairs == 0:
            raise ValueError(f"Rotary needs at least 2 rotated features a head, got head_dim={head_dim} x {fraction}")
        self.base, self.pairs = base, pairs

    def __call__(self, key: Array | None = None) -> Term:
        return RotaryTerm(jnp.asarray(self.base ** -(np.arange(self.pairs) / self.pairs), jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ALiBiTerm(Term):
    """See `ALiBi`."""

    slopes: Array  # [H], nats a token

    def score(self, q: Array, q_pos: Positions, k_pos: Positions, scale: float) -> Array:
        away = jnp.abs(distances(q_pos, k_pos)).astype(self.slopes.dtype)
        return -self.slopes[:, None, None] * away

    def heads(self, start: int, stop: int) -> Term:
        return ALiBiTerm(self.slopes[start:stop])


class ALiBi(TermModule):
    """Attention with linear biases (Press et al. 2021, arXiv:2108.12409): minus a slope a head, times the distance.

    Slopes are 2^(-8 i / H) for i = 1..H; where H is no power of two the released code interpolates, as here.
    Bidirectional attention uses the absolute distance.
    """

    def __init__(self, *, num_layers: int, width: int, num_heads: int, head_dim: int, rngs: nnx.Rngs) -> None:
        self.num_heads = num_heads

    def __call__(self, key: Array | None = None) -> Term:
        return ALiBiTerm(jnp.asarray(_slopes(self.num_heads), jnp.float32))


def _slopes(heads: int) -> list[float]:
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


def prepare(terms: tuple[Any, ...], q: Array, k: Array, q_position: Array, k_position: Array) -> tuple[Array, Array]:
    """Queries and keys after every term's `query` and `key`."""
    for term in terms:
        q, k = term.query(q, q_position), term.key(k, k_position)
    return q, k
