"""What is not promised raises when the layer is built, and side by side the weakest promise holds."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from flax import nnx

from lra.attention import Attended, Attention, Full, Heads, Pattern, Promise, Site, SlidingWindow, Visibility

ALL = Promise(
    causal="strict", bidirectional=True, memory=True, padding=True, packing="equal", decode="exact", distances=True,
    globals=True, dropout=True,
)  # fmt: skip


class Toy(Pattern):
    """Promises what it is told to."""

    rule = None
    examples = Full.examples

    def __init__(self, *, told, site, rngs):
        self.told = told
        super().__init__(site)

    @property
    def promise(self):
        return self.told

    def __call__(self, q, k, v, **_):
        return Attended(jnp.zeros((*q.shape[:3], v.shape[-1])))


def build(told, **options):
    site = Site(num_heads=3, head_dim=5, width=7, causal=options.pop("causal", True))
    return Attention(pattern=functools.partial(Toy, told=told), site=site, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("lacking", "options", "message"),
    [
        ({"causal": None}, {}, "Toy has no causal form"),
        ({"bidirectional": False}, {"causal": False}, "Toy has no bidirectional form"),
        ({"dropout": False}, {"dropout": 0.1}, r"dropout of attention weights: set Attention\.dropout = 0"),
        ({"memory": False}, {"memory": True}, "Toy does not promise memory"),
        ({"distances": False}, {"distances": True}, "Toy does not promise distances"),
    ],
)
def test_what_is_not_promised_raises(lacking, options, message):
    build(ALL, **options)
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(ALL, **lacking), **options)
    build(dataclasses.replace(ALL, **lacking), causal="causal" not in lacking)


@pytest.mark.parametrize(("lacking", "field"), [({"padding": False}, "valid"), ({"packing": None}, "segment")])
def test_what_is_not_promised_raises_at_the_call(lacking, field):
    mask = jnp.ones((2, 11), bool if field == "valid" else jnp.int32)
    visibility = Visibility.tokens(**{field: mask})
    x = jnp.ones((2, 11, 7))
    build(ALL)(x, 11, visibility=visibility)
    with pytest.raises(ValueError, match=f"Toy does not promise {next(iter(lacking))}"):
        build(dataclasses.replace(ALL, **lacking))(x, 11, visibility=visibility)


def test_heads_promise_the_weakest():
    weak = Promise(causal="selection", bidirectional=True, packing="masked", decode="rule", dropout=True, sorts=True)
    make = lambda told: functools.partial(Toy, told=told)  # noqa: E731
    heads = Heads(groups=((1, make(ALL)), (2, make(weak))), site=Site(num_heads=3, head_dim=5), rngs=nnx.Rngs(0))
    assert heads.promise == weak
    mixed = ((1, make(ALL)), (2, make(Promise(bidirectional=True))))
    with pytest.raises(ValueError, match="Toy has no causal form"):
        Heads(groups=mixed, site=Site(num_heads=3), rngs=nnx.Rngs(0))
    assert Heads(groups=mixed, site=Site(num_heads=3, causal=False), rngs=nnx.Rngs(0)).promise.causal is None


@pytest.mark.parametrize("counts", [(1, 1), (0, 3), (4,)])
def test_heads_add_up(counts):
    groups = tuple((count, Full) for count in counts)
    with pytest.raises(ValueError, match="add up to 3 heads"):
        Heads(groups=groups, site=Site(num_heads=3), rngs=nnx.Rngs(0))


def test_one_entry_a_layer():
    for layer, window in enumerate((2, 3, 5)):
        site = Site(layer=layer, num_layers=3)
        assert SlidingWindow(window=(2, 3, 5), site=site, rngs=None).window == window
    with pytest.raises(ValueError, match=r"SlidingWindow.window needs one entry for each of 3 layers, got 2"):
        SlidingWindow(window=(2, 3), site=Site(num_layers=3), rngs=None)
