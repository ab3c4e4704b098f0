"""Models: embeddings, feed-forward, stack, decoder, output heads, generation."""

from lra.models.decoder import Decoder, Scored
from lra.models.embeddings import GridPositions, LearnedPositions, PositionEmbedding, SinusoidalPositions
from lra.models.feed_forward import FeedForward
from lra.models.output import Softmax
from lra.models.stack import Layer, Stack, StackOutput

__all__ = [
    "Decoder",
    "FeedForward",
    "GridPositions",
    "Layer",
    "LearnedPositions",
    "PositionEmbedding",
    "Scored",
    "SinusoidalPositions",
    "Softmax",
    "Stack",
    "StackOutput",
]
