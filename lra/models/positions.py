"""Absolute position embeddings, added to the token embeddings."""

from __future__ import annotations

import abc
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention.initialisers import initialiser
from lra.attention.visibility import Array


class PositionEmbedding(nnx.Module):
    """Vectors [B or 1, T, C] for positions [B or 1, T]. Subclasses are final."""

    max_length: int | None = None
    """Positions 0..max_length-1 exist; None for no bound."""

    bound: ClassVar[str] = "max_length"
    """The argument that says how many."""

    @abc.abstractmethod
    def __call__(self, position: Array) -> Array:
        """The vectors of these positions."""


class LearnedPositions(PositionEmbedding):
    """A learned vector a position (Gehring et al. 2017, arXiv:1705.03122).

    Args:
        max_length: number of positions.
        table: name of the initialiser.
    """

    def __init__(self, *, max_length: int, table: str = "normal_0.02", width: int, rngs: nnx.Rngs) -> None:
        if max_length < 1:
            raise ValueError(f"LearnedPositions.max_length needs to be at least 1, got {max_length}")
        self.max_length = max_length
        self.embedding = nnx.Embed(max_length, width, embedding_init=initialiser(table), rngs=rngs)

    def __call__(self, position: Array) -> Array:
        return self.embedding(position)


class GridPositions(PositionEmbedding):
    """Points of a grid with a learned vector a coordinate, summed (Child et al. 2019, arXiv:1904.10509, section 5.3).

    Rows and columns for text and sound, in a grid as wide as the stride; rows, columns and channels for images.

    Args:
        shape: points along each axis, such as (96, 128); the last axis runs fastest. Their product is the number of
            positions.
        table: name of the initialiser of the n tables [points, C], which are scaled by 1/sqrt(n), so that the sum has
            its variance; the default gives the paper's N(0, 0.125/sqrt(C n)).
    """

    bound = "shape"

    def __init__(self, *, shape: tuple[int, ...], table: str = "fan_out_0.125", width: int, rngs: nnx.Rngs) -> None:
        if not shape or min(shape) < 1:
            raise ValueError(f"GridPositions.shape needs one axis or more, of at least 1 point each, got {shape}")
        self.shape, self.max_length = shape, math.prod(shape)
        init = initialiser(table, len(shape) ** -0.5)
        self.tables = nnx.List([nnx.Embed(size, width, embedding_init=init, rngs=rngs) for size in shape])

    def __call__(self, position: Array) -> Array:
        point = jnp.unravel_index(position, self.shape)
        return sum(table(index) for table, index in zip(self.tables, point, strict=True))


class AxialPositions(PositionEmbedding):
    """Points of a grid with a learned vector a coordinate, side by side (Kitaev et al. 2020, arXiv:2001.04451).

    `GridPositions` sums vectors of the model's width instead. A row of any length up to the number of points goes.

    Args:
        shape: points along each axis, such as (128, 512); the last axis runs fastest. Their product is the number of
            positions.
        widths: of each axis' vectors; they add up to C.
        table: name of the initialiser of the tables [points, width]; the released code has N(0, 1), beside token
            embeddings as large.
    """

    bound = "shape"

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        widths: tuple[int, ...],
        table: str = "normal_0.02",
        width: int,
        rngs: nnx.Rngs,
    ) -> None:
        if not shape or min(shape) < 1:
            raise ValueError(f"AxialPositions.shape needs one axis or more, of at least 1 point each, got {shape}")
        if len(widths) != len(shape) or min(widths) < 1 or sum(widths) != width:
            raise ValueError(
                f"AxialPositions.widths needs one width for each of {len(shape)} axes, which add up to the model's "
                f"{width}, got {widths}"
            )
        self.shape, self.max_length = shape, math.prod(shape)
        init = initialiser(table)
        self.tables = nnx.List(
            [nnx.Embed(*size, embedding_init=init, rngs=rngs) for size in zip(shape, widths, strict=True)]
        )

    def __call__(self, position: Array) -> Array:
        point = jnp.unravel_index(position, self.shape)
        return jnp.concatenate([table(index) for table, index in zip(self.tables, point, strict=True)], axis=-1)


class SinusoidalPositions(PositionEmbedding):
    """Sines and cosines, concatenated (Vaswani et al. 2017, arXiv:1706.03762, section 3.5, which interleaves them).

    Args:
        base: wavelengths run from 2 pi to 2 pi base, in tokens.
    """

    def __init__(self, *, base: float = 10_000.0, width: int, rngs: nnx.Rngs) -> None:
        if width % 2:
            raise ValueError(f"SinusoidalPositions needs an even width, got {width}")
        if base <= 1:
            raise ValueError(f"SinusoidalPositions.base needs to be above 1, got {base}")
        self.base, self.width = base, width

    def __call__(self, position: Array) -> Array:
        half = self.width // 2
        frequencies = jnp.asarray(self.base ** -(np.arange(half) / half), jnp.float32)
        angle = position[..., None].astype(jnp.float32) * frequencies
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
