"""The decoder: token embedding, a causal stack, an output head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention.core import Terms
from lra.attention.layer import Attention, dropout
from lra.attention.memory import Memory
from lra.attention.pattern import Pattern, Site
from lra.attention.terms import TermModule
from lra.attention.visibility import Array, Visibility
from lra.models.embeddings import Embedding, TokenEmbedding
from lra.models.feed_forward import FeedForward
from lra.models.layer import Layer
from lra.models.output import Head, Softmax
from lra.models.positions import PositionEmbedding
from lra.models.stack import Layers, Stack, StackOutput

_EMBEDDING = 1 << 20  # number of the embedding's random key; layers have theirs from 0
_TERMS = 1 << 21  # number of the first term's
_OUTPUT = 1 << 22  # number of the last layer's output


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """A segment scored by a model.

    Attributes:
        nats: negative log-likelihood of each target [B, T], in nats.
        right: whether each target is the likeliest token [B, T].
        memory: the memory after this segment, or None.
        losses: weighted auxiliary losses.
        metrics: by layer, [L] each.
        updates: new buffer values, for `Decoder.write`.
    """

    nats: Array
    right: Array
    memory: Any
    losses: Mapping[str, Array]
    metrics: Mapping[str, Array]
    updates: Any


class Decoder(nnx.Module):
    """A causal language model. Every part is injected; patterns may differ by layer.

    Args:
        num_layers: L. width: C. num_heads: H.
        head_dim: D; None for C / H, which must divide.
        pattern: a pattern class, or a tuple of them: cycled over the layers, or one entry a layer.
        attention: class of the attention layer. feed_forward: class of the feed-forward layer.
        stack: class of the stack. embedding: class of the token embedding. head: class of the output head.
        terms: classes of terms by position, shared by all layers.
        memory: class of the memory between segments, or None.
        position: class of the absolute position embedding, or None.
        scale_residual: whether the weights that write to the residual stream (attention output, second feed-forward
            projection) start scaled by 1/sqrt(2 L) (Child et al. 2019, arXiv:1904.10509, section 5.2).
        embedding_scale: whether embeddings are multiplied by sqrt(C) (Vaswani et al. 2017, section 3.4).
        dropout: share of embedding features dropped in training.
        output_dropout: share of the last layer's features dropped in training (Dai et al. 2019, released code).
        compute_dtype: of projections, feed-forward layers and the operands of the output head. Parameters, residual
            stream, norms, softmax, logits and loss stay in float32.
        vocabulary_size: V, from the corpus. rngs: random streams.

    Raises:
        ValueError: sizes that do not fit, or an option that a pattern does not promise.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        width: int,
        num_heads: int,
        head_dim: int | None = None,
        pattern: Callable[..., Pattern] | tuple[Callable[..., Pattern], ...],
        attention: Callable[..., Attention] = Attention,
        feed_forward: Callable[..., FeedForward] = FeedForward,
        stack: Callable[..., Layers] = Stack,
        embedding: Callable[..., TokenEmbedding] = Embedding,
        head: Callable[..., Head] = Softmax,
        terms: tuple[Callable[..., TermModule], ...] = (),
        memory: Callable[..., Memory] | None = None,
        position: Callable[..., PositionEmbedding] | None = None,
        scale_residual: bool = False,
        embedding_scale: bool = False,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        vocabulary_size: int,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads, "head_dim": head_dim}
        _check(sizes, {"dropout": dropout, "output_dropout": output_dropout}, compute_dtype)
        if head_dim is None and width % num_heads:
            raise ValueError(
                f"Decoder.num_heads={num_heads} does not divide Decoder.width={width}: "
                "change one of them or set Decoder.head_dim"
            )
        if memory is not None and position is not None:
            raise ValueError(
                "absolute positions repeat in every segment, so memory would hold two tokens at one position: "
                "set Decoder.position = None and use Decoder.terms, or set Decoder.memory = None"
            )
        head_dim = head_dim or width // num_heads
        patterns = pattern if isinstance(pattern, tuple) else (pattern,)
        if not patterns or num_layers % len(patterns):
            raise ValueError(
                f"Decoder.pattern needs a number of entries that divides {num_layers} layers, got {len(patterns)}"
            )
        self.vocabulary_size, self.width, self.dropout = vocabulary_size, width, dropout
        self.compute_dtype, self.embedding_scale, self.output_dropout = compute_dtype, embedding_scale, output_dropout
        narrow = None if compute_dtype == "float32" else compute_dtype  # None: the dtype of the parameters
        self.embedding = embedding(vocabulary_size=vocabulary_size, width=width, rngs=rngs)
        self.position = None if position is None else position(width=width, rngs=rngs)
        sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads, "head_dim": head_dim}
        self.terms = nnx.List([term(**sizes, rngs=rngs) for term in terms])
        distances = any(term.distances for term in self.terms)
        output_scale = (2 * num_layers) ** -0.5 if scale_residual else 1.0

        def layer(i: int, *, norm: Any, dropout: float, rngs: nnx.Rngs) -> Layer:
            site = Site(i, num_layers, num_heads, head_dim, width, causal=True, compute_dtype=narrow)
            return Layer(
                norm=norm,
                dropout=dropout,
                attention=attention(
                    pattern=patterns[i % len(patterns)],
                    site=site,
                    memory=memory is not None,
                    distances=distances,
                    output_scale=output_scale,
                    rngs=rngs,
                ),
                feed_forward=feed_forward(width=width, output_scale=output_scale, compute_dtype=narrow, rngs=rngs),
                memory=None if memory is None else memory(width=width, rngs=rngs),
                width=width,
                rngs=rngs,
            )

        self.stack = stack(num_layers=num_layers, width=width, layer=layer, rngs=rngs)
        self.head = head(
            vocabulary_size=vocabulary_size, width=self.stack.output_width, embedding=self.embedding,
            compute_dtype=narrow, rngs=rngs,
        )  # fmt: skip

    def initial_memory(self, batch: int, train: bool, length: int | None = None) -> Any:
        """The memory of B rows that have seen nothing, or None without memory; `length` overrides its own."""
        return self.stack.initial_memory(batch, train, length)

    def reset_memory(self, memory: Any, rows: Array) -> Any:
        """The memory with the given rows [B] emptied."""
        return None if memory is None else self.stack.reset_memory(memory, rows)

    def hidden(
        self,
        tokens: Array,
        *,
        valid: Array | None = None,
        memory: Any = None,
        key: Array | None = None,
        train: bool = False,
        probes: Terms = (),
    ) -> StackOutput:
        """What the stack returns, with the vectors that the head reads; arguments as of `score`."""
        x = self.embedding(tokens)  # in the dtype of the parameters as they are
        x = x * self.width**0.5 if self.embedding_scale else x
        if self.position is not None:
            limit = self.position.max_length
            if limit is not None and tokens.shape[1] > limit:
                bound = f"{type(self.position).__name__}.{self.position.bound}"
                raise ValueError(f"the model has {limit} positions, got {tokens.shape[1]} tokens: raise {bound}")
            x = x + self.position(jnp.arange(tokens.shape[1])[None])
        x = dropout(x, self.dropout if train else 0.0, None if key is None else jax.random.fold_in(key, _EMBEDDING))
        term_key = key if train else None
        keys = [None if term_key is None else jax.random.fold_in(term_key, _TERMS + n) for n in range(len(self.terms))]
        terms: Terms = (*(term(key) for term, key in zip(self.terms, keys, strict=True)), *probes)
        visibility = Visibility.tokens(valid=valid, token=tokens)
        output = self.stack(x, memory=memory, visibility=visibility, terms=terms, key=key, train=train)
        if not (train and self.output_dropout):
            return output
        last = None if key is None else jax.random.fold_in(key, _OUTPUT)
        return dataclasses.replace(output, x=dropout(output.x, self.output_dropout, last))

    def __call__(
        self,
        tokens: Array,
        *,
        valid: Array | None = None,
        memory: Any = None,
        key: Array | None = None,
        train: bool = False,
    ) -> tuple[Array, StackOutput]:
        """Logits [B, T, V] for the tokens after `tokens` [B, T], and what the stack returned."""
        output = self.hidden(tokens, valid=valid, memory=memory, key=key, train=train)
        return self.head.logits(output.x, self.embedding), output

    def score(
        self,
        tokens: Array,
        targets: Array,
        *,
        valid: Array | None = None,
        memory: Any = None,
        key: Array | None = None,
        train: bool = False,
        probes: Terms = (),
        scored: Array | None = None,
    ) -> Scored:
        """Scores the targets [B, T], which follow the tokens [B, T].

        Args:
            tokens: integers below V, checked by the caller on the host.
            targets: integers below V.
            valid: [B, T] booleans, False for padding; None for none.
            memory: the state that `initial_memory` or the last segment gave.
            key: random key of this step, for dropout.
            train: whether dropout and updates of buffers are on.
            probes: terms that change nothing and leave what they measure among the metrics.
            scored: [B, T] booleans, False where nats are not asked for and may be anything; None for all.
        """
        output = self.hidden(tokens, valid=valid, memory=memory, key=key, train=train, probes=probes)
        with jax.named_scope("head"):
            nats, right = self.head.score(output.x, self.embedding, targets, scored)
        return Scored(nats, right, output.memory, output.losses, output.metrics, output.updates)

    def write(self, updates: Any) -> None:
        """Writes the buffer values that a training step has accepted."""
        self.stack.write(updates)

    def project(self) -> None:
        """The patterns' hook after an optimizer update."""
        self.stack.project()

    def fitted(self) -> Decoder:
        """The same arrays with static sizes as small as their values allow, such as windows of learned spans.

        Sizes that nobody fitted are the largest, which are right for all values; these are so for these values alone.
        On the host: where a pattern has such sizes, it waits for the values.
        """
        model: Decoder = nnx.merge(*nnx.split(self))
        model.stack.fit()
        return model


def _check(sizes: Mapping[str, int | None], rates: Mapping[str, float], compute_dtype: str) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"Decoder.{name} needs to be at least 1, got {value}")
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"Decoder.{name} needs to be at least 0 and below 1, got {rate}")
    if compute_dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"Decoder.compute_dtype needs to be 'float32', 'bfloat16' or 'float16', got {compute_dtype!r}")
