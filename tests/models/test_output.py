"""Token embeddings and output heads: adaptive and in chunks, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full
from lra.models import AdaptiveEmbedding, AdaptiveSoftmax, Decoder, Embedding, Softmax, Stack
from lra.models.cost import cost
from lra.models.traced import flops

V, C = 31, 12
CLUSTERS = {
    "none": {"cutoffs": ()},
    "narrow": {"cutoffs": (), "table_width": 5},
    "one": {"cutoffs": (7,), "div_value": 2},
    "equal": {"cutoffs": (7, 19)},
    "shared": {"cutoffs": (7, 19), "table_width": 5},
    "four": {"cutoffs": (3, 7, 19), "div_value": 2},
}


def make(clusters, rng, *, width=C, **options):
    """An embedding and a head of random values, all of about the size of one."""
    embedding = AdaptiveEmbedding(**CLUSTERS[clusters], vocabulary_size=V, width=C, rngs=nnx.Rngs(0))
    head = AdaptiveSoftmax(**options, vocabulary_size=V, width=width, embedding=embedding, rngs=nnx.Rngs(1))
    for module in (embedding, head):
        for x in jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable)):
            x[...] = jnp.asarray(rng.normal(0, 0.7, x.shape), jnp.float32)
    return embedding, head


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def probabilities(embedding, head, x):
    """[N, C] to [N, V], in float64: the likelihood of a cluster times that of an id within it."""

    def inside(number):
        table, projection = embedding.cluster(number)
        if str(number) in head.projections:
            y = x @ np.asarray(head.projections[str(number)][...], np.float64)
        else:
            y = x if projection is None else x @ np.asarray(projection, np.float64).T
        first, end = embedding.borders[number]
        bias = 0 if head.bias is None else np.asarray(head.bias[...], np.float64)[first:end]
        return y, y @ np.asarray(table, np.float64).T + bias

    y, logits = inside(0)
    if head.clusters is None:
        return softmax(logits)
    bias = 0 if head.bias is None else np.asarray(head.cluster_bias[...], np.float64)
    first = softmax(np.concatenate([logits, y @ np.asarray(head.clusters[...], np.float64).T + bias], axis=-1))
    short = embedding.borders[0][1]
    tails = [first[:, short + n - 1, None] * softmax(inside(n)[1]) for n in range(1, len(embedding.borders))]
    return np.concatenate([first[:, :short], *tails], axis=-1)


@pytest.mark.parametrize("clusters", CLUSTERS)
def test_embedding(clusters, rng):
    embedding, _ = make(clusters, rng)
    tokens = rng.integers(0, V, (3, 17)).astype(np.int32)
    want = np.zeros((3, 17, C))
    for place, token in np.ndenumerate(tokens):
        number = sum(int(token) >= cutoff for cutoff in embedding.cutoffs)
        table, projection = (None if x is None else np.asarray(x, np.float64) for x in embedding.cluster(number))
        vector = table[token - embedding.borders[number][0]]
        want[place] = vector if projection is None else vector @ projection
    np.testing.assert_allclose(embedding(tokens), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("clusters", "options"),
    [
        ("none", {"chunk": 64}),
        ("narrow", {"bias": True}),
        ("one", {"bias": True}),
        ("equal", {"chunk": 38}),
        ("shared", {"tied_projections": (False, True, True)}),
        ("four", {"tied_projections": (False, True, True, True), "bias": True}),
        ("four", {"width": 2 * C, "chunk": 64}),
    ],
)
def test_adaptive_softmax(clusters, options, rng):
    """Likelihoods in the order of tokens, the likeliest id, and all gradients."""
    embedding, head = make(clusters, rng, **{"chunk": 5} | options)
    x = rng.normal(size=(2, 19, options.get("width", C))).astype(np.float32)
    p = probabilities(embedding, head, x.reshape(-1, x.shape[-1]).astype(np.float64)).reshape(2, 19, V)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-12)
    targets = rng.integers(0, V, (2, 19)).astype(np.int32)
    targets[:, ::2] = p.argmax(-1)[:, ::2]
    graph, params = nnx.split((embedding, head))

    @jax.jit
    def both(params, x):
        def scored(params, x):
            embedding, head = nnx.merge(graph, params)
            nats, right = head.score(x, embedding, targets)
            return (nats * weights).sum(), (nats, right)

        def plain(params, x):
            embedding, head = nnx.merge(graph, params)
            logits = jax.nn.log_softmax(head.logits(x, embedding))
            return -(jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] * weights).sum(), logits

        return [jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(params, x) for f in (scored, plain)]

    weights = rng.uniform(size=(2, 19)).astype(np.float32)
    ((_, (nats, right)), got), ((_, logits), want) = both(params, jnp.asarray(x))
    np.testing.assert_allclose(logits, np.log(p), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        nats, -np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0]), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(right, p.argmax(-1) == targets)
    assert 0.4 < np.asarray(right).mean() < 0.7
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("tied", "chunk"), [(True, 7), (False, 38), (False, 100)])
def test_softmax_in_chunks(tied, chunk, rng):
    """The same as at once: nats, what is right, gradients."""
    embedding = Embedding(table="normal_1", vocabulary_size=V, width=C, rngs=nnx.Rngs(0))
    options = {"tied": tied, "bias": True, "vocabulary_size": V, "width": C, "embedding": embedding}
    heads = [Softmax(**options, chunk=n, rngs=nnx.Rngs(1)) for n in (None, chunk)]
    for head in heads:
        head.bias[...] = jnp.linspace(-1.0, 1.0, V)
    x, targets = rng.normal(size=(2, 19, C)).astype(np.float32), rng.integers(0, V, (2, 19)).astype(np.int32)
    targets[:, ::2] = heads[0].logits(jnp.asarray(x), embedding).argmax(-1)[:, ::2]
    weights = rng.uniform(size=(2, 19)).astype(np.float32)
    found = []
    for head in heads:
        graph, params = nnx.split((embedding, head))

        def loss(params, x, graph=graph):
            embedding, head = nnx.merge(graph, params)
            nats, right = head.score(x, embedding, targets)
            return (nats * weights).sum(), (nats, right)

        found.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x))
    ((_, (nats, right)), want), ((_, (chunked, too)), got) = found
    np.testing.assert_allclose(chunked, nats, rtol=1e-6)
    np.testing.assert_array_equal(too, right)
    assert 0 < np.asarray(right).sum() < right.size
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_no_cutoffs_is_a_softmax(rng):
    embedding, head = make("none", rng)
    plain = Softmax(vocabulary_size=V, width=C, embedding=embedding, rngs=nnx.Rngs(1))
    x, targets = rng.normal(size=(1, 11, C)).astype(np.float32), rng.integers(0, V, (1, 11)).astype(np.int32)
    for got, want in zip(head.score(x, embedding, targets), plain.score(x, embedding, targets), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("adaptive", [False, True])
def test_logits_are_never_held(adaptive, rng):
    """Forward and backward, no array as large as B T V, and much less temporary memory than that takes."""
    size, width, rows, chunk = 4096, 8, 1024, 64
    rngs = nnx.Rngs(0)
    if adaptive:
        embedding = AdaptiveEmbedding(cutoffs=(512, 1024), div_value=2, vocabulary_size=size, width=width, rngs=rngs)
        kind = AdaptiveSoftmax
    else:
        embedding, kind = Embedding(vocabulary_size=size, width=width, rngs=rngs), Softmax
    head = kind(chunk=chunk, vocabulary_size=size, width=width, embedding=embedding, rngs=rngs)
    graph, params = nnx.split((embedding, head))

    def loss(params, x, targets):
        embedding, head = nnx.merge(graph, params)
        return head.score(x, embedding, targets)[0].sum()

    x, targets = jnp.zeros((2, rows // 2, width)), jnp.zeros((2, rows // 2), jnp.int32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows * size / 4


def test_work_follows_the_text(rng):
    """Targets of the first cluster cost no turn of the others: a loop of no turns leaves everything as it was."""
    embedding, head = make("four", rng, chunk=4)
    x = jnp.asarray(rng.normal(size=(1, 23, C)), jnp.float32)
    for number in range(1, 4):  # whatever stands in those clusters
        embedding.tables[number][...] = jnp.full_like(embedding.tables[number][...], jnp.nan)
    nats, _ = head.score(x, embedding, jnp.asarray(rng.integers(0, 3, (1, 23)), jnp.int32))
    assert np.isfinite(nats).all()


@pytest.mark.parametrize("kind", [Softmax, AdaptiveSoftmax])
def test_what_is_not_scored_is_left_out(kind, rng):
    """The other targets score as ever, at whatever price those left out have: NaN here."""
    embedding = AdaptiveEmbedding(
        cutoffs=(7, 19) if kind is AdaptiveSoftmax else (), vocabulary_size=V, width=C, rngs=nnx.Rngs(0)
    )
    head = kind(chunk=4, vocabulary_size=V, width=C, embedding=embedding, rngs=nnx.Rngs(1))
    x = jnp.asarray(rng.normal(size=(2, 23, C)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (2, 23)), jnp.int32)
    scored = jnp.asarray(rng.uniform(size=(2, 23)) < 0.4)
    want, right = head.score(x, embedding, targets)
    x = jnp.where(scored[..., None], x, jnp.nan)
    nats, found = head.score(x, embedding, targets, scored)
    np.testing.assert_allclose(nats[scored], want[scored], rtol=1e-6)
    np.testing.assert_array_equal(found[scored], right[scored])
    assert not nats[~scored].any()  # what was computed would not be 0


def test_operations_are_counted(rng):
    """Those of a chunk times the chunks, of every cluster as if all targets were in it."""
    embedding, head = make("one", rng, chunk=8)
    graph, params = nnx.split((embedding, head))

    def nats(params, x, targets):
        embedding, head = nnx.merge(graph, params)
        return head.score(x, embedding, targets)[0]

    shapes = jax.ShapeDtypeStruct((1, 20, C), jnp.float32), jax.ShapeDtypeStruct((1, 20), jnp.int32)
    first, tail = C * C * 2 + C * (7 + 1), C * C // 2 + C // 2 * (V - 7)  # the first projects for its entries too
    assert flops(nats, params, *shapes) == 2 * 24 * (first + 2 * tail)  # the likeliest id may be in the other cluster


def test_decoder_learns_by_clusters(rng):
    """The whole model: embedding and head named by configuration, cost, and a gradient for every parameter."""
    model = Decoder(
        num_layers=1, width=C, num_heads=2, pattern=Full, vocabulary_size=V,
        embedding=functools.partial(AdaptiveEmbedding, cutoffs=(7, 19), div_value=2),
        head=functools.partial(AdaptiveSoftmax, bias=True, tied_projections=(False, True, True), chunk=8),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, params = nnx.split(model)
    tokens = jnp.asarray(rng.permutation(V)[None], jnp.int32)
    gradient = jax.jit(
        jax.grad(lambda params: nnx.merge(graph, params).score(tokens[:, :-1], tokens[:, 1:]).nats.sum())
    )
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(gradient(params)))
    assert cost(model, length=30, batch=2).as_run["output head"] > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda **o: AdaptiveEmbedding(cutoffs=(20_000, 60_000), **o), r"cutoffs .* below the vocabulary's 31, got"),
        (lambda **o: AdaptiveEmbedding(cutoffs=(9, 9), **o), r"cutoffs needs ids that rise"),
        (lambda **o: AdaptiveEmbedding(cutoffs=(0,), **o), r"cutoffs needs ids that rise"),
        (lambda **o: AdaptiveEmbedding(cutoffs=(3, 9), div_value=4, **o), r"table_width=12 divided by div_value=4"),
        (lambda **o: AdaptiveEmbedding(cutoffs=(3, 9), div_value=0, **o), r"div_value=0"),
    ],
)
def test_embeddings_refuse(make, words):
    with pytest.raises(ValueError, match=words):
        make(vocabulary_size=V, width=C, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (functools.partial(AdaptiveSoftmax, tied_projections=(True,)), "one entry for each of 3 clusters, got 1"),
        (functools.partial(AdaptiveSoftmax, chunk=0), r"AdaptiveSoftmax\.chunk needs to be at least 1, got 0"),
        (functools.partial(Softmax, chunk=0), r"Softmax\.chunk needs to be at least 1, or None"),
        (Softmax, "set Decoder.head = @AdaptiveSoftmax, or Softmax.tied = False"),
        (functools.partial(Softmax, width=24), r"cannot be tied to it: set Softmax\.tied = False"),
    ],
)
def test_heads_refuse(head, words):
    embedding = AdaptiveEmbedding(cutoffs=(3, 9), vocabulary_size=V, width=C, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=words):
        head(
            **{"vocabulary_size": V, "width": C} | getattr(head, "keywords", {}), embedding=embedding, rngs=nnx.Rngs(0)
        )


def test_published_sizes():
    """Transformer-XL on WikiText-103: 151M, and 285M by the scripts of the large one (Dai et al. 2019 print 257M)."""
    from lra.attention import Attention, XLRelative
    from lra.models import FeedForward, parameters

    def size(layers, width, heads, hidden, div, tied, untie):
        model = nnx.eval_shape(
            lambda: Decoder(
                num_layers=layers, width=width, num_heads=heads, pattern=Full, vocabulary_size=267_735,
                attention=Attention, feed_forward=functools.partial(FeedForward, hidden=hidden, activation="relu"),
                stack=functools.partial(Stack, norm="post"), terms=(functools.partial(XLRelative, untie=untie),),
                embedding=functools.partial(AdaptiveEmbedding, cutoffs=(20_000, 40_000, 200_000), div_value=div),
                head=functools.partial(AdaptiveSoftmax, bias=True, tied_projections=tied), rngs=nnx.Rngs(0),
            )
        )  # fmt: skip
        return sum(parameters.count(nnx.state(model, nnx.Param)).values())

    tied = (False, True, True, True)
    assert round(size(16, 410, 10, 2100, 1, tied, False) / 1e6, 3) == 151.108
    assert round(size(18, 1024, 16, 4096, 4, tied, False) / 1e6, 3) == 285.171
    assert round(size(18, 1024, 16, 4096, 4, tied, True) / 1e6, 3) == 285.205
