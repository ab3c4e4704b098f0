"""LSH attention (Kitaev et al. 2020, "Reformer", arXiv:2001.04451, section 2). O(rounds T chunk) time, O(T) memory.

Tokens that fall into the same bucket read each other. In each round the tokens of a head are sorted by (bucket,
position) and cut into chunks, which read themselves and the chunk before. Queries and keys are one projection.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra.attention import arrange, core, hashing
from lra.attention.arrange import Entries, Labels
from lra.attention.core import Rule, Terms
from lra.attention.hashing import Buckets
from lra.attention.pattern import Attended, Inputs, Pattern, Site, aligned, default_scale
from lra.attention.precision import accumulator
from lra.attention.promise import Promise
from lra.attention.rows import harmless, lengths
from lra.attention.sorted_chunks import arranged, combined, earlier, sets_of, sort
from lra.attention.visibility import Array, Entry, Visibility
from lra.errors import UserError

Sets = Literal["paper", "released"]
"""What a round lets a query read.

"paper": the keys of its own bucket, each once however many rounds bring it (equation 16).
"released": all keys of the two chunks, once for each round that brings them (the program of the authors).
"""

FORMS = {"paper": (True, True), "released": (False, False)}
"""Whether keys of other buckets are left out, and whether a key counts once only."""


@dataclasses.dataclass(frozen=True)
class SharedRule:
    """Other tokens that share one of these rounds' sets, unless they share one of those in `without`.

    The set of an entry is an integer (see `sets_of`): a query reads its own set and the one before.
    """

    causal: bool
    rounds: tuple[str, ...]
    without: tuple[str, ...] = ()

    def __call__(self, q: Entry, k: Entry) -> Array:
        shared = functools.reduce(jnp.logical_or, [_shared(q, k, name) for name in self.rounds])
        for name in self.without:
            shared = shared & ~_shared(q, k, name)
        return shared & (k.position < q.position if self.causal else k.position != q.position)


@dataclasses.dataclass(frozen=True)
class OwnRule:
    """A token itself."""

    def __call__(self, q: Entry, k: Entry) -> Array:
        return q.position == k.position


@dataclasses.dataclass(frozen=True)
class LSHRule:
    """The keys of these rounds' sets; a query itself where it may read nothing else in any round, its label "alone"."""

    causal: bool
    rounds: tuple[str, ...]

    def __call__(self, q: Entry, k: Entry) -> Array:
        others = SharedRule(self.causal, self.rounds)(q, k)
        return others | ((q.position == k.position) & (q.labels["alone"] > 0))


def _shared(q: Entry, k: Entry, name: str) -> Array:
    back = q.labels[name] - k.labels[name]
    return (back == 0) | (back == 1)


def unit(x: Array) -> Array:
    """Vectors [..., D] of length sqrt(D), as in the released code: at scale 1/sqrt(D) they count as length 1.

    In at least float32, since rounding them again would change their gradients by as much as half precision has.
    """
    wide = x.astype(accumulator(x.dtype))
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)


@functools.partial(
    jax.jit,
    static_argnames=("chunk", "buckets", "rounds", "sets", "causal", "scale", "dropout", "precision"),
)
def lsh(
    q: Array,
    k: Array,
    v: Array,
    *,
    chunk: int,
    buckets: Buckets,
    rounds: int,
    sets: Sets = "paper",
    causal: bool = True,
    scale: float | None = None,
    visibility: Visibility | None = None,
    terms: Terms = (),
    selection: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
    precision: str = "highest",
) -> Array:
    """Attention to the other tokens of a query's bucket, and to itself where there are none.

    Queries and keys are one projection: q is the last T of k. Keys count as vectors of length 1. What a query reads can
    depend on later tokens, since these move the borders of chunks; what it reads of them is nothing when causal.

    Args:
        q: [B, T, H, D]. k: [B, S, H, D], S >= T, the last T being the queries' own tokens. v: [B, S, H, E].
        chunk: tokens of a chunk of the sorted row; about twice S / buckets lets most buckets fit into two chunks. One
            that is not shorter than the row holds it whole.
        buckets: their number, even, or a tuple of even factors of it: those are cheaper to compute where many.
        rounds: how many times tokens are hashed, each time with other random directions.
        sets: what a round lets a query read: "paper" or "released", see `Sets`.
        scale: factor of the products of queries and keys of length sqrt(D); None for 1/sqrt(D).
        selection: what `select` gave, [B, S, H, rounds]; None for `select` of k with `key`.
        key: random key of the directions and of dropout; None for directions that are always the same.
        causal, visibility, terms, dropout, precision: as of `full`.

    Returns:
        [B, T, H, E] in q's dtype; exactly 0 where a query may not even read itself.

    Raises:
        ValueError: a chunk or a number of rounds below 1, buckets that are not even, shapes that do not fit.

    Example:
        >>> import jax, lra.attention
        >>> q, v = jax.random.normal(jax.random.key(0), (2, 1, 50, 2, 8))
        >>> lra.attention.lsh(q, q, v, chunk=8, buckets=12, rounds=2, key=jax.random.key(1)).shape
        (1, 50, 2, 8)
    """
    check_sizes(chunk, buckets, rounds, sets)
    visibility = visibility or Visibility()
    length, size = lengths(q, k, visibility)
    if selection is None:
        selection = select(k, buckets=buckets, rounds=rounds, visibility=visibility, key=key)
    width = q.shape[-1]
    q, k, visibility = aligned(terms, q, unit(harmless(k, visibility.k_valid)), visibility)
    attend = functools.partial(
        core.attend, scale=default_scale(scale, width), terms=terms, dropout=dropout, precision=precision
    )
    within, once = FORMS[sets]
    grid, index, place = arranged(
        q, k, v, selection, visibility, chunk=chunk, within=hashing.count(buckets) if within else None, once=once
    )
    rule = SharedRule(causal, ("own",), earlier(rounds) if once else ())
    others = combined(attend(grid, rule=rule, key=core.part_key(key, 1)), index, place)
    out, logsumexp = others.out[:, size - length :], others.logsumexp[:, size - length :]
    band = arrange.band(q, k, v, visibility, before=0, after=0, block=8)
    itself = attend(band, rule=OwnRule(), key=core.part_key(key, 2))
    nothing = logsumexp == core.empty(logsumexp.dtype)
    return jnp.where(nothing[..., None], itself.out, out).astype(q.dtype)


def select(
    k: Array, *, buckets: Buckets, rounds: int, visibility: Visibility | None = None, key: Array | None = None
) -> Array:
    """The bucket of each key in each round: the integers by which `lsh` chooses.

    Args:
        k: [B, S, H, D].
        buckets, rounds, key: as of `lsh`.
        visibility: for the validity of S keys.

    Returns:
        int32 [B, S, H, rounds].
    """
    key = core.part_key(jax.random.key(0) if key is None else key, 0)
    rotations = hashing.rotations(key, buckets, rounds=rounds, heads=k.shape[2], width=k.shape[3])
    k = harmless(k, None if visibility is None else visibility.k_valid)
    return hashing.hashes(k, rotations, buckets)


def check_sizes(chunk: int, buckets: Buckets, rounds: int, sets: str) -> None:
    """Raises for arguments that make no sense."""
    if chunk < 1:
        raise ValueError(f"chunk counts the tokens of a chunk and needs to be at least 1, got {chunk}")
    if rounds < 1:
        raise ValueError(f"rounds needs to be at least 1, got {rounds}")
    hashing.factors(buckets)
    if sets not in FORMS:
        raise ValueError(f'sets needs to be "paper" or "released", got {sets!r}')


class LSH(Pattern):
    """See `lsh`; `chunk` and `rounds` may be tuples with one entry a layer.

    In training each step hashes by other directions, in evaluation by those of the run's seed.

    Args:
        evaluation_rounds: rounds outside of training; None for as many. More of them find more.
        chunk, buckets, rounds, sets: as of `lsh`.
        site: where the layer stands. rngs: random streams.
    """

    projections = "shared_qk"

    def __init__(
        self,
        *,
        chunk: int | tuple[int, ...],
        buckets: Buckets,
        rounds: int | tuple[int, ...],
        evaluation_rounds: int | None = None,
        sets: Sets = "paper",
        site: Site,
        rngs: nnx.Rngs,
    ) -> None:
        self.chunk, self.rounds = site.pick("LSH.chunk", chunk), site.pick("LSH.rounds", rounds)
        self.evaluation_rounds = self.rounds if evaluation_rounds is None else evaluation_rounds
        self.buckets, self.sets = buckets, sets
        super().__init__(site)
        for n in (self.rounds, self.evaluation_rounds):
            check_sizes(self.chunk, buckets, n, sets)
        self.combination = "union" if FORMS[sets][1] else "rounds"

    @property
    def promise(self) -> Promise:
        return Promise(
            causal="selection", bidirectional=True, memory=True, padding=True, packing="masked", distances=True,
            dropout=True, sorts=True,
        )  # fmt: skip

    @property
    def rule(self) -> LSHRule:
        return LSHRule(self.causal, tuple(f"round{r}" for r in range(self.evaluation_rounds)))

    @property
    def rules(self) -> tuple[Rule, ...]:
        rule = self.rule
        if self.combination == "union":
            return (rule,)
        return tuple(LSHRule(self.causal, (name,)) for name in rule.rounds)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {"chunk": 4, "buckets": 4, "rounds": 2},
            {"chunk": 3, "buckets": (2, 2), "rounds": 3, "sets": "released"},
        )

    @classmethod
    def typical(cls, num_heads: int) -> dict[str, Any]:
        return {"chunk": 64, "buckets": (16, 16), "rounds": 4}

    def select(
        self, q: Array, k: Array, *, visibility: Visibility | None = None, key: Array | None = None, train: bool = False
    ) -> Array:
        lengths(q, k, visibility or Visibility())
        rounds = self.rounds if train else self.evaluation_rounds
        return select(k, buckets=self.buckets, rounds=rounds, visibility=visibility, key=key)

    def check_length(self, length: int) -> None:
        if self.chunk > length:
            raise UserError(
                f"LSH.chunk is {self.chunk}, but rows have {length} tokens, so that one chunk holds them all and "
                f"nothing is saved: lower it to {max(1, length // 4)} or so, or use full"
            )

    def colours(self, selection: Any) -> Array:
        """Buckets of the first round."""
        return selection[..., 0]

    def labels(self, queries: int, keys: int, visibility: Visibility, selection: Any = None) -> Labels:
        """The set of each entry in each round, and "alone" for queries that may read no other token in any of them."""
        within = hashing.count(self.buckets) if FORMS[self.sets][0] else None
        return _labels(selection, visibility, queries, chunk=self.chunk, within=within, causal=self.causal)

    def prepare(self, q: Array, k: Array) -> tuple[Array, Array]:
        return q, unit(k)

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
        if selection is None:
            selection = self.select(q, k, visibility=visibility, key=key, train=train)
        rounds = selection.shape[-1]  # a memory may ask for the weights of a training step without `train`
        out = lsh(
            q, k, v, chunk=self.chunk, buckets=self.buckets, rounds=rounds, sets=self.sets, causal=self.causal,
            visibility=visibility, terms=terms, selection=selection, dropout=self.dropout_rate(train), key=key,
        )  # fmt: skip
        return Attended(out)


@functools.partial(jax.jit, static_argnums=2, static_argnames=("chunk", "within", "causal"))
def _labels(
    buckets: Array, visibility: Visibility, queries: int, *, chunk: int, within: int | None, causal: bool
) -> Labels:
    """See `LSH.labels`."""
    keys = buckets.shape[1]
    numbers = sets_of(buckets, sort(buckets, visibility)[1], chunk, within)
    known = {f"round{r}": numbers[:, :, r].swapaxes(1, 2) for r in range(numbers.shape[2])}
    asked = {name: x[:, keys - queries :] for name, x in known.items()}
    places = visibility.positions(queries, keys)
    q = Entries(places[0], visibility.q_valid, visibility.q_segment, asked)
    k = Entries(places[1], visibility.k_valid, visibility.k_segment, known)
    alone = ~_any(SharedRule(causal, tuple(known)), q, k)
    return asked | {"alone": alone.astype(jnp.int32)}, known


def _any(rule: Rule, q: Entries, k: Entries) -> Array:
    """Whether each query may read any key by `rule` and visibility: booleans [B, T, H], never holding T x S of them."""

    def wide(x: Array) -> Array:
        return jnp.asarray(x)[..., None] if x.ndim == 2 else x

    q, k = jax.tree.map(wide, (q, k))
    known = Entry(k.position, 0, k.labels)

    def row(q: Entries) -> Array:
        q = jax.tree.map(lambda x: x[:, None], q)
        allowed = rule(Entry(q.position, 0, q.labels), known)
        for own, other in ((True, k.valid), (q.segment, k.segment)):
            allowed = allowed if other is None else allowed & (own == other)
        return allowed.any(1)

    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), q)
    return jnp.moveaxis(jax.lax.map(row, moved), 0, 1)
