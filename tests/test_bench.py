"""What `lra bench` measures."""

import contextlib
import itertools

import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from lra import bench
from lra.attention import PATTERNS, Attended, Full
from lra.errors import UserError

SETTING = bench.Setting(num_heads=3, head_dim=8, batch=2, repeat=3)


def candidates(*texts, setting=SETTING):
    return [bench.candidate(text, setting) for text in texts]


def test_rows_hold_medians_spreads_and_ratios_turn_by_turn(monkeypatch):
    order = []
    # Seconds of a forward pass by turn: ratios 2, 0.5 and 0.5, whose median is not the ratio of the medians.
    seconds = {"full": (1.0, 2.0, 4.0), "sliding_window(window=2)": (2.0, 1.0, 2.0)}
    turns = itertools.count()

    def run(self):
        order.append((self.name, self.kind))
        turn = next(turns) // 4 - 1  # the first round is not measured
        return seconds[self.name][turn] * (3 if self.kind == "forward + backward" else 1)

    former = bench._Program.__init__

    def remembers(self, each, kind, *rest):
        former(self, each, kind, *rest)
        self.name, self.kind = each.name, kind

    monkeypatch.setattr(bench._Program, "__init__", remembers)
    monkeypatch.setattr(bench._Program, "run", run)
    full, window = candidates("full", "sliding_window(window=2)")
    rows = bench.compare([full, window], full, 7, SETTING)
    names = [(name, kind) for name in seconds for kind in bench.PASSES]
    assert order == names * 4
    assert [(row["pattern"], row["pass"]) for row in rows] == names
    assert [row["milliseconds"] for row in rows] == [2000, 6000, 2000, 6000]
    assert [row["milliseconds_iqr"] for row in rows] == [1500, 4500, 500, 1500]
    assert [row["ratio"] for row in rows] == [1, 1, 0.5, 0.5]
    assert [row["ratio_iqr"] for row in rows] == [0, 0, 0.75, 0.75]
    assert {row["length"] for row in rows} == {7}
    table = Console(width=90)
    with table.capture() as captured:
        table.print(bench.table(rows, "title"))
    assert "2000.00 ± 1500.00" in captured.get()
    assert captured.get().count("0.500 ± 0.750") == 2


def test_temporary_bytes_are_of_the_compiled_function():
    """JAX's own attention holds T x T scores for each head; a window's memory is linear in T."""
    full, window = candidates("jax", "sliding_window(window=16)")
    short, long = (bench.compare([full, window], full, length, SETTING) for length in (512, 1024))
    scores = SETTING.batch * SETTING.num_heads * 1024**2 * 4
    assert all(row["temporary_bytes"] >= scores for row in long[:2])
    growth = [after["temporary_bytes"] / before["temporary_bytes"] for before, after in zip(short, long, strict=True)]
    assert growth[0] > 3
    assert max(growth[2:]) < 2.2


@pytest.mark.parametrize("causal", [True, False])
def test_both_passes_compute_what_jax_does(causal):
    setting = bench.Setting(num_heads=3, head_dim=5, batch=2, causal=causal)
    own, other = candidates("full", "jax", setting=setting)
    arrays = bench._arrays(13, setting)
    for kind in bench.PASSES:
        a, b = (bench._Program(each, kind, arrays, setting).call() for each in (own, other))
        if kind == "forward":
            pairs = [(a.out, b.out)]
        else:
            pairs = list(zip(a[0][1:], b[0][1:], strict=True))  # of q, k and v
            assert len(pairs) == 3
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


class Gated(nnx.Module):
    """A pattern that somebody registers: it has a parameter and reads the layer's inputs."""

    def __init__(self, *, site, rngs):
        self.full = Full(site=site, rngs=rngs)
        self.gate = nnx.Param(np.full(site.width, 0.5, np.float32))

    @classmethod
    def typical(cls, num_heads):
        return {}

    def __call__(self, q, k, v, *, inputs, key, train):
        attended = self.full(q, k, v)
        scaled = (inputs.queries * self.gate[...]).reshape(attended.out.shape)
        return Attended(attended.out + scaled, losses={"size": (self.gate[...] ** 2).sum()})


def test_a_newly_registered_pattern_is_measured_with_its_parameters(monkeypatch):
    monkeypatch.setitem(PATTERNS, "gated", Gated)
    (gated,) = candidates("gated")
    arrays = bench._arrays(5, SETTING)
    gradients, _ = bench._Program(gated, "forward + backward", arrays, SETTING).call()
    expected = np.einsum("bthd,bthd->hd", arrays[0], arrays[3]).ravel() + 2 * 0.5
    np.testing.assert_allclose(gradients[0]["gate"][...], expected, rtol=1e-4, atol=1e-4)
    assert [row["pattern"] for row in bench.compare([gated], gated, 5, SETTING)] == ["gated"] * 2


@pytest.mark.parametrize("name", PATTERNS)
def test_typical_arguments_suit_the_benchmark(name):
    """In one form at least, for few heads and many."""
    built = []
    for heads, causal in itertools.product((2, 8), (True, False)):
        setting = bench.Setting(num_heads=heads, causal=causal)
        (each,) = candidates(name, setting=setting)
        with contextlib.suppress(UserError):
            built.append((heads, each.build(setting)))
    assert {heads for heads, _ in built} == {2, 8}


def test_arguments_that_do_not_fit_the_setting():
    (each,) = candidates("heads(groups=((4, full),))")
    with pytest.raises(UserError, match=r"heads\(groups=\(\(4, full\),\)\): Heads.groups needs .* 3 heads"):
        each.build(SETTING)
    with pytest.raises(UserError, match="jax: local_window_size needs"):
        candidates("jax(local_window_size='wide')")
