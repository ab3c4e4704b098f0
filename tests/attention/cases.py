"""Options of the contract suite, a pairwise covering array over them, and arrays for a case."""

import dataclasses
import functools
import itertools
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra.attention import EXAMPLE_HEADS, PATTERNS, Rotary, Site, Term, Visibility
from lra.attention.arrange import BLOCK
from lra.attention.precision import accumulator
from lra.attention.terms import ALiBiTerm, distances
from tests.attention.oracle import TermArrays

HEADS, WIDTH, BATCH = EXAMPLE_HEADS, 6, 2
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
PATTERN_EXAMPLES = [(name, n) for name, cls in PATTERNS.items() for n in range(len(cls.examples()))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableTerm(Term):
    """A learned score and a learned value by clipped distance: the seam's `score` and `value` with parameters."""

    scores: jax.Array  # [H, R]
    values: jax.Array  # [R, E]

    def score(self, q, q_pos, k_pos, scale):
        heads = jnp.arange(len(self.scores), dtype=jnp.int32)[:, None, None]
        return self.scores[heads, jnp.minimum(jnp.abs(distances(q_pos, k_pos)), self.scores.shape[1] - 1)]

    def value(self, weights, q_pos, k_pos):
        near = self.values[jnp.minimum(jnp.abs(distances(q_pos, k_pos)), len(self.values) - 1)]
        if near.ndim == 3:  # of two ranges
            return jnp.einsum("brhqk,qke->brhqe", weights, near.astype(weights.dtype))
        return jnp.einsum("brhqk,brhqke->brhqe", weights, jnp.broadcast_to(near, (*weights.shape, near.shape[-1])))

    def heads(self, start, stop):
        return TableTerm(self.scores[start:stop], self.values)


@dataclasses.dataclass(frozen=True)
class Case:
    pattern: str
    example: int
    causal: bool
    length: str  # 1, 7, W-1, W, W+1, 3W+5
    extra: str  # S - T: 0, 1, 5, W+3
    padding: str
    packed: bool
    term: str
    dtype: str
    values: int  # E

    def __str__(self):
        return "-".join(str(x) for x in dataclasses.astuple(self))


OPTIONS = {
    "causal": (True, False),
    "length": ("1", "7", "W-1", "W", "W+1", "3W+5"),
    "extra": ("0", "5", "W+3"),
    "padding": ("none", "left", "right", "ragged"),
    "packed": (False, True),
    "term": ("none", "rotary", "alibi", "table"),
    "dtype": ("float32", "float64", "float16", "bfloat16"),
    "values": (WIDTH, 5),
}


SHARED = {"term", "dtype", "values"}
"""Options that all patterns hand to the one block softmax: their pairs meet over all patterns, not in each."""


def make(name, example, causal, **site):
    """A pattern, or None where the example has no such form."""
    arguments = PATTERNS[name].examples()[example]
    try:
        return PATTERNS[name](
            **arguments, site=Site(num_heads=HEADS, head_dim=WIDTH, causal=causal, **site), rngs=nnx.Rngs(0)
        )
    except ValueError as error:
        if causal or "no bidirectional form" in str(error):
            return None
        raise


def build(cls, causal=True, heads=HEADS, **arguments):
    """A pattern of that class with these arguments."""
    return cls(**arguments, site=Site(num_heads=heads, head_dim=WIDTH, causal=causal), rngs=nnx.Rngs(0))


def normal(rng, *shape):
    """Standard normal numbers in float32."""
    return rng.normal(size=shape).astype(np.float32)


def window(name, example):
    """W: the largest integer among an example's arguments, or the block of patterns that have none."""
    arguments = PATTERNS[name].examples()[example]
    sizes = [x for x in arguments.values() if isinstance(x, int) and not isinstance(x, bool)]
    return max(sizes) if sizes else BLOCK if name == "full" else 8


def count(text, w):
    return {"W-1": w - 1, "W": w, "W+1": w + 1, "3W+5": 3 * w + 5, "W+3": w + 3}.get(text) or int(text)


@functools.cache
def _forms(name):
    """(example, causal) for the forms that exist."""
    examples = range(len(PATTERNS[name].examples()))
    return [(e, c) for e in examples for c in (True, False) if make(name, e, c) is not None]


@functools.cache
def pairwise(name):
    """Few cases in which every two options of a pattern's own meet in every legal combination (greedy, seeded).

    Options of `SHARED` have each value in each pattern. Their pairs, and the rest of the product, are sampled.
    """
    generator = random.Random(zlib.crc32(name.encode()))
    forms = _forms(name)
    names = ["example", *OPTIONS]
    causal = tuple(dict.fromkeys(form[1] for form in forms))
    lengths = tuple(length for length in OPTIONS["length"] if length != "W-1")  # which is left to the sample
    levels = {"example": tuple(range(len(PATTERNS[name].examples()))), **OPTIONS, "causal": causal, "length": lengths}
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in levels[a]
        for y in levels[b]
        if ((a, b) != ("example", "causal") or (x, y) in forms) and (b not in SHARED or a == "padding")
    }
    chosen = []
    while missing:
        best, gain = None, -1
        for _ in range(60):
            (a, x), (b, y) = generator.choice(sorted(missing, key=str))
            options = {n: generator.choice(levels[n]) for n in names} | {a: x, b: y}
            if (options["example"], options["causal"]) not in forms:
                continue
            covered = sum(pair in missing for pair in itertools.combinations(options.items(), 2))
            if covered > gain:
                best, gain = options, covered
        if best is None or gain == 0:
            continue
        missing -= set(itertools.combinations(best.items(), 2))
        chosen.append(Case(name, **best))
    return chosen


def sampled(name, number):
    """A seeded sample of the full product."""
    generator = random.Random(zlib.crc32(name.encode()) + 1)
    chosen = {}
    while len(chosen) < number:
        example, causal = generator.choice(_forms(name))
        case = Case(name, example, causal, *(generator.choice(OPTIONS[option]) for option in [*OPTIONS][1:]))
        chosen[str(case)] = case
    return list(chosen.values())


@dataclasses.dataclass
class Arrays:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    visibility: Visibility | None
    term: tuple  # of Term
    term_arrays: TermArrays


def tied(pattern, q, k):
    """The queries [B, T, H, D]; of heads that share the projection, those of the last T keys."""
    return q if pattern is None else np.where(pattern.shares[:, None], k[:, k.shape[1] - q.shape[1] :], q)


def arrays(case, rng, poison=True, pattern=None):
    """Arrays in the case's dtype, as the pattern's layer projects them; entries that nobody may read hold NaN."""
    w = window(case.pattern, case.example)
    length, extra = count(case.length, w), count(case.extra, w)
    size = length + extra
    dtype = jnp.dtype(case.dtype)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    q, k = normal(BATCH, length, HEADS, WIDTH), normal(BATCH, size, HEADS, WIDTH)
    q = tied(pattern, q, k)
    v, d_out = normal(BATCH, size, HEADS, case.values), normal(BATCH, length, HEADS, case.values)
    valid = _valid(case.padding, length, extra, rng)
    fields = {}
    if valid is not None:
        fields |= {"q_valid": valid[:, extra:], "k_valid": valid}
        if poison:
            hide = lambda x, mask: np.where(mask[:, :, None, None], x, np.nan).astype(dtype)  # noqa: E731
            q, k, v = hide(q, valid[:, extra:]), hide(k, valid), hide(v, valid)
    if case.packed:
        borders = np.sort(rng.integers(0, size + 1, (BATCH, 2)), axis=1)
        segment = (np.arange(size)[None, :, None] >= borders[:, None, :]).sum(-1).astype(np.int32)
        fields |= {"q_segment": segment[:, extra:], "k_segment": segment}
    visibility = Visibility(**{name: jnp.asarray(x) for name, x in fields.items()}) if fields else None
    term, term_arrays = _term(case, rng, dtype)
    return Arrays(q, k, v, d_out, visibility, term, term_arrays)


def _valid(padding, length, extra, rng):
    if padding == "none":
        return None
    size, index = length + extra, np.arange(length + extra)[None]
    first, last = rng.integers(0, size, (2, BATCH, 1))
    if padding == "left":
        return index >= first
    if padding == "right":
        return index <= last
    return (index >= np.minimum(first, last)) & (index <= np.maximum(first, last))


def _term(case, rng, dtype):
    wide = accumulator(dtype)
    if case.term == "rotary":
        made = Rotary(num_layers=1, width=HEADS * WIDTH, num_heads=HEADS, head_dim=WIDTH, rngs=nnx.Rngs(0))()
        made = dataclasses.replace(made, frequencies=made.frequencies.astype(wide))
        return (made,), TermArrays("rotary", frequencies=np.asarray(made.frequencies, np.float64))
    if case.term == "alibi":
        slopes = rng.uniform(0.1, 0.5, HEADS).astype(wide)
        return (ALiBiTerm(jnp.asarray(slopes)),), TermArrays("alibi", slopes=slopes.astype(np.float64))
    if case.term == "table":
        scores, values = rng.normal(size=(HEADS, 5)).astype(wide), rng.normal(size=(7, case.values)).astype(wide)
        made = TableTerm(jnp.asarray(scores), jnp.asarray(values))
        return (made,), TermArrays("table", scores=scores.astype(np.float64), values=values.astype(np.float64))
    return (), TermArrays()
