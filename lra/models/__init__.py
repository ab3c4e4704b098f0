"""Models: embeddings, feed-forward, stack, decoder, output heads, generation."""

from lra.models.decoder import Decoder, Scored
from lra.models.embeddings import AdaptiveEmbedding, Embedding, TokenEmbedding
from lra.models.feed_forward import FeedForward
from lra.models.layer import Layer
from lra.models.output import AdaptiveSoftmax, Head, Softmax
from lra.models.positions import (
    AxialPositions,
    GridPositions,
    LearnedPositions,
    PositionEmbedding,
    SinusoidalPositions,
)
from lra.models.reversible import Reversible
from lra.models.stack import Layers, Stack, StackOutput

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "AxialPositions",
    "Decoder",
    "Embedding",
    "FeedForward",
    "GridPositions",
    "Head",
    "Layer",
    "Layers",
    "LearnedPositions",
    "PositionEmbedding",
    "Reversible",
    "Scored",
    "SinusoidalPositions",
    "Softmax",
    "Stack",
    "StackOutput",
    "TokenEmbedding",
]
