"""Sizes that make no sense: one sentence at build that names the argument and says how to mend it, never a clamp."""

import functools

import numpy as np
import pytest
from flax import nnx

from lra.attention import (
    BlockLocal,
    Blockwise,
    Fixed,
    Full,
    Heads,
    MemoryCompressed,
    Site,
    SlidingWindow,
    Strided,
    WindowGlobal,
    block_local,
    blockwise,
    fixed,
    memory_compressed,
    sliding_window,
    strided,
    window_global,
)
from tests.attention import cases

FUNCTIONS = {
    BlockLocal: block_local, Blockwise: blockwise, Fixed: fixed, SlidingWindow: sliding_window, Strided: strided,
    WindowGlobal: window_global,
}  # fmt: skip
AT_LEAST_1 = "needs to be at least 1, got"
BELOW_1 = [
    (SlidingWindow, {"window": 0}, f"window .*{AT_LEAST_1} 0"),
    (SlidingWindow, {"window": 3, "dilation": 0}, f"dilation .*{AT_LEAST_1} 0"),
    (SlidingWindow, {"window": 3, "window_right": -1}, "window_right needs to be at least 0, got -1"),
    (SlidingWindow, {"window": 3, "window_right": 2}, "set window_right = 0, got 2"),
    (WindowGlobal, {"window": -4, "max_globals": 1}, f"window .*{AT_LEAST_1} -4"),
    (WindowGlobal, {"window": 3, "dilation": 0, "max_globals": 1}, f"dilation .*{AT_LEAST_1} 0"),
    (Strided, {"stride": 0}, f"stride .*{AT_LEAST_1} 0"),
    (Strided, {"stride": 3, "part": "global"}, "part needs to be one of 'both', 'local', 'column', got 'global'"),
    (Fixed, {"block": 0, "summary": 1}, f"block {AT_LEAST_1} 0"),
    (Fixed, {"block": 4, "summary": 0}, f"summary {AT_LEAST_1} 0"),
    (Fixed, {"block": 4, "summary": 1, "groups": 0}, f"groups {AT_LEAST_1} 0"),
    (Fixed, {"block": 4, "summary": 1, "part": "column"}, "part needs to be one of 'both', 'local', 'summary'"),
    (BlockLocal, {"block": 0}, f"block .*{AT_LEAST_1} 0"),
    (BlockLocal, {"block": 4, "look_back": -1}, "look_back .*needs to be at least 0, got -1"),
]
DO_NOT_FIT = [
    (
        Fixed,
        {"block": 5, "summary": 2, "groups": 3},
        "no 3 x 2 summary columns: lower summary or groups, or raise block",
    ),
    (WindowGlobal, {"window": 3}, "needs max_globals .* or global_positions .*: give one of them"),
    (WindowGlobal, {"window": 3, "global_tokens": (5,)}, "needs max_globals"),
    (WindowGlobal, {"window": 3, "max_globals": 0}, "max_globals is 0, .* raise it to at least 1"),
    (
        WindowGlobal,
        {"window": 3, "global_positions": (0, 4, 9), "max_globals": 2},
        "max_globals is 2, but there are 3 global_positions: raise it to at least 3",
    ),
    (
        WindowGlobal,
        {"window": 3, "global_positions": (0, -1)},
        "global_positions needs different numbers of at least 0",
    ),
    (WindowGlobal, {"window": 3, "global_tokens": (-1,), "max_globals": 1}, "global_tokens needs different numbers"),
]
BLOCKS = [
    ({"blocks": 0, "heads": (3,)}, f"blocks {AT_LEAST_1} 0"),
    ({"blocks": 2}, r"needs heads, such as \(10, 2\), or shifts, one a head: give one of them"),
    ({"blocks": 2, "heads": (2, 1), "shifts": (0, 0, 1)}, "give one of them"),
    ({"blocks": 2, "heads": (2, 2)}, r"heads needs at most 2 numbers .* add up to 3 heads, got \(2, 2\)"),
    ({"blocks": 2, "heads": (3, 0)}, r"heads needs .* at least 1 .* got \(3, 0\)"),
    ({"blocks": 2, "heads": (1, 1, 1)}, r"heads needs at most 2 numbers"),
    ({"blocks": 2, "shifts": (0, 1)}, r"shifts needs 3 numbers in 0\.\.1, one a head, got \(0, 1\)"),
    ({"blocks": 2, "shifts": (0, 1, 2)}, r"shifts needs 3 numbers in 0\.\.1, one a head, got \(0, 1, 2\)"),
]


@pytest.mark.parametrize(("cls", "arguments", "sentence"), BELOW_1 + DO_NOT_FIT)
def test_class_and_function_say_the_same(cls, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        cases.build(cls, **arguments)
    x = np.zeros((1, 11, 3, 4), np.float32)
    with pytest.raises(ValueError, match=sentence):
        FUNCTIONS[cls](x, x, x, **arguments)


@pytest.mark.parametrize(("arguments", "sentence"), BLOCKS)
def test_blocks_and_heads(arguments, sentence):
    site = Site(num_heads=3, head_dim=4, causal=False)
    with pytest.raises(ValueError, match=sentence):
        Blockwise(**arguments, site=site, rngs=nnx.Rngs(0))
    x = np.zeros((1, 11, 3, 4), np.float32)
    with pytest.raises(ValueError, match=sentence):
        blockwise(x, x, x, **arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rate": 0}, f"rate .*{AT_LEAST_1} 0"),
        ({"rate": 3, "kernel": 0}, f"kernel .*{AT_LEAST_1} 0"),
        ({"rate": 3, "empty": "zero"}, "empty needs to be 'nothing' or 'first', got 'zero'"),
        ({"rate": 3, "convolve": "keys"}, "convolve needs to be 'projected' or 'inputs', got 'keys'"),
    ],
)
def test_slots(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        cases.build(MemoryCompressed, **arguments)


def test_slots_of_the_function():
    x, kernel = np.zeros((1, 11, 3, 4), np.float32), (np.zeros((3, 12, 12), np.float32), None)
    with pytest.raises(ValueError, match=f"rate .*{AT_LEAST_1} 0"):
        memory_compressed(x, x, x, rate=0, key_convolution=kernel, value_convolution=kernel)


def test_reading_through():
    x = np.zeros((1, 11, 3, 4), np.float32)
    for read_through, sentence in (
        ("own", "read_through needs to be 'local' or 'global', got 'own'"),
        ("global", "read_through = 'global' has no effect without projections of their own: give own"),
    ):
        arguments = {"window": 3, "max_globals": 1, "read_through": read_through}
        with pytest.raises(ValueError, match=sentence):
            cases.build(WindowGlobal, **arguments, own_projections=False)
        with pytest.raises(ValueError, match=sentence):
            window_global(x, x, x, **arguments)


def test_heads_of_a_layer_do_not_add_up():
    with pytest.raises(ValueError, match=r"Heads\.groups needs counts that add up to 3 heads, got \[1, 1\]"):
        cases.build(Heads, groups=((1, Full), (1, functools.partial(Strided, stride=3))))


ONE_A_LAYER = [
    (SlidingWindow, {"window": 3}, ("window", "dilation")),
    (Strided, {"stride": 3}, ("stride",)),
    (Fixed, {"block": 6, "summary": 1}, ("block", "summary", "groups")),
    (BlockLocal, {"block": 3}, ("block", "look_back")),
    (Blockwise, {"blocks": 2, "heads": (3,)}, ("blocks",)),
    (WindowGlobal, {"window": 3, "max_globals": 1}, ("window", "dilation", "max_globals")),
    (MemoryCompressed, {"rate": 3}, ("rate", "kernel")),
]


@pytest.mark.parametrize(
    ("cls", "arguments", "name"), [(cls, arguments, name) for cls, arguments, names in ONE_A_LAYER for name in names]
)
def test_one_entry_a_layer(cls, arguments, name):
    """One too few is a mistake; with one for each, a layer is as if it had been given its own."""

    def build(**options):
        site = Site(1, 3, num_heads=3, head_dim=4, width=12, causal=cls is not Blockwise)
        return cls(**arguments | options, site=site, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=f"{cls.__name__}.{name} needs one entry for each of 3 layers, got 2"):
        build(**{name: (1, 2)})
    assert repr(build(**{name: (1, 2, 1)})) == repr(build(**{name: 2})) != repr(build(**{name: 1}))
