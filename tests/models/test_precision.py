"""The precision policy: what is computed in what, read from the traced program."""

import functools
from collections import defaultdict
from pathlib import Path

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, MemoryCompressed, Recurrence, Rotary, WindowGlobal
from lra.attention.layer import Attention
from lra.models import AdaptiveEmbedding, AdaptiveSoftmax, Decoder, Embedding, FeedForward, Softmax, Stack

SIZES = {"num_layers": 2, "width": 12, "num_heads": 3, "vocabulary_size": 17}
NARROW = pytest.mark.parametrize("narrow", ["bfloat16", "float16"])


def make(compute_dtype, *, norm="pre", remat="none", scan=False):
    return functools.partial(
        Decoder, **SIZES, pattern=Full, terms=(Rotary,), compute_dtype=compute_dtype,
        memory=functools.partial(Recurrence, length=5), feed_forward=functools.partial(FeedForward, hidden=20),
        stack=functools.partial(Stack, norm=norm, remat=remat, scan=scan), attention=Attention,
    )(rngs=nnx.Rngs(0))  # fmt: skip


def loss_of(model):
    graph, state = nnx.split(model)

    def loss(state, tokens, memory):
        scored = nnx.merge(graph, state).score(tokens[:, :-1], tokens[:, 1:], memory=memory, key=None, train=True)
        return scored.nats.mean(), scored

    return loss, state


def equations(jaxpr):
    """All equations, those inside calls and loops too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr)):
            inner = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
            if isinstance(inner, core.Jaxpr):
                yield from equations(inner)


def source(eqn):
    """The innermost file of lra or of flax's layers that the equation comes from."""
    for frame in eqn.source_info.traceback.frames:
        path = Path(frame.file_name)
        if "lra" in path.parts or path.name in ("normalization.py", "linear.py"):
            return "/".join(path.parts[-2:]) if path.name == "layer.py" else path.name  # two have that name
    return "elsewhere"


def dtypes(eqn):
    """Of inputs and outputs that are real."""
    kinds = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    return tuple(str(kind) for kind in kinds if jnp.issubdtype(kind, jnp.floating))


@NARROW
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("options", [{}, {"remat": "full", "scan": True}], ids=["plain", "remat and scan"])
def test_what_is_computed_in_what(rng, narrow, norm, options):
    model = make(narrow, norm=norm, **options)
    loss, state = loss_of(model)
    tokens, memory = rng.integers(0, 17, (2, 8), np.int32), model.initial_memory(2, True)
    forward = jax.make_jaxpr(loss)(state, tokens, memory)
    seen = defaultdict(set)
    for eqn in equations(forward.jaxpr):
        seen[eqn.primitive.name, source(eqn)].add(dtypes(eqn))
    products = {place: kinds for (name, place), kinds in seen.items() if name == "dot_general"}
    assert products == {
        "linear.py": {(narrow,) * 3},
        "output.py": {(narrow, narrow, "float32")},
        "core.py": {("float32",) * 3},
    }
    for (name, place), kinds in seen.items():  # softmax, norms, logits and loss; the activation alone may be narrow
        if name in ("exp", "exp2", "log", "rsqrt", "reduce_sum", "reduce_max", "cumsum", "div", "sqrt"):
            assert {kind for kinds_of in kinds for kind in kinds_of} <= {"float32"}, (name, place, kinds)
    assert seen["exp", "core.py"]
    assert seen["rsqrt", "normalization.py"]
    for kinds in [kinds for (name, place), kinds in seen.items() if name == "add" and place == "models/layer.py"]:
        assert kinds - {()} == {("float32",) * 3}, "the residual stream"


@NARROW
@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (functools.partial(WindowGlobal, window=3, global_positions=(0, 2)), ("dot_general", "window_global.py")),
        (
            functools.partial(MemoryCompressed, rate=2, convolve="inputs"),
            ("conv_general_dilated", "memory_compressed.py"),
        ),
        (functools.partial(MemoryCompressed, rate=2), ("conv_general_dilated", "memory_compressed.py")),
    ],
)
def test_projections_of_patterns_are_as_narrow_as_the_layers(rng, narrow, pattern, place):
    model = Decoder(**SIZES, pattern=pattern, compute_dtype=narrow, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(lambda *args: model.score(*args).nats)(*rng.integers(0, 17, (2, 2, 8), np.int32)).jaxpr
    assert {dtypes(eqn) for eqn in equations(jaxpr) if (eqn.primitive.name, source(eqn)) == place} == {(narrow,) * 3}


@NARROW
@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        (Embedding, functools.partial(Softmax, bias=True, chunk=4)),
        (
            functools.partial(AdaptiveEmbedding, cutoffs=(5, 11), div_value=2),
            functools.partial(AdaptiveSoftmax, bias=True),
        ),
    ],
    ids=["in chunks", "adaptive"],
)
def test_heads_in_chunks_are_narrow_in_their_operands_alone(rng, narrow, embedding, head):
    model = Decoder(**SIZES, pattern=Full, compute_dtype=narrow, embedding=embedding, head=head, rngs=nnx.Rngs(0))
    loss, state = loss_of(model)
    tokens, seen = rng.integers(0, 17, (2, 8), np.int32), defaultdict(set)
    for eqn in equations(jax.make_jaxpr(loss)(state, tokens, None).jaxpr):
        if source(eqn) in ("output.py", "some_rows.py"):
            seen[eqn.primitive.name].add(dtypes(eqn))
    assert seen["dot_general"] == {(narrow, narrow, "float32")}
    for name in ("exp", "log", "reduce_sum", "reduce_max", "add", "scatter"):
        assert {kind for kinds in seen[name] for kind in kinds} <= {"float32"}, name
    assert seen["exp"]
    (value, scored), gradients = jax.eval_shape(jax.value_and_grad(loss, has_aux=True), state, tokens, None)
    logits, _ = nnx.eval_shape(lambda model: model(tokens), model)
    for x in jax.tree.leaves((value, scored.nats, logits, gradients)):
        assert x.dtype == jnp.float32


@NARROW
def test_parameters_gradients_memory_and_loss_are_float32(rng, narrow):
    model = make(narrow)
    loss, state = loss_of(model)
    tokens, memory = rng.integers(0, 17, (2, 8), np.int32), model.initial_memory(2, True)
    (value, scored), gradients = jax.eval_shape(jax.value_and_grad(loss, has_aux=True), state, tokens, memory)
    logits, _ = nnx.eval_shape(lambda model: model(tokens, memory=memory), model)
    for x in jax.tree.leaves((value, state, gradients, scored.nats, scored.memory[0].hidden, logits)):
        assert x.dtype == jnp.float32


@NARROW
def test_narrow_products_are_near_those_of_float32(rng, narrow):
    """And not equal: the binding does something. bfloat16 has 8 significant bits, float16 has 11."""
    tolerance = {"bfloat16": 2e-2, "float16": 3e-3}[narrow]
    tokens = rng.integers(0, 17, (2, 8), np.int32)
    results = []
    for dtype in ("float32", narrow):
        model = make(dtype)
        loss, state = loss_of(model)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        results.append(gradient(state, tokens, model.initial_memory(2, True))[0])
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(results[0]), jax.tree.leaves(results[1]), strict=True
    ):  # fmt: skip
        error = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(x))
        assert 0 < error < tolerance, (jax.tree_util.keystr(path), error)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"Decoder.compute_dtype needs to be 'float32', 'bfloat16' or 'float16'"):
        make("float8")
