"""`lra cost`: what a configuration costs, as tables and as JSON."""

import json

import pytest

from lra.commands import config
from tests.cli.conftest import LAYERS


@pytest.mark.parametrize("name", config.names())
def test_every_shipped_configuration_has_a_cost(heads, lra, name):
    path = ("--set", "text_file.path='book.txt'") if name == "text_file" else ()
    result = lra("cost", name, "--json", "--set", f"LAYERS={LAYERS.get(name, 1)}", *path)
    assert result.status == 0, result.err
    shown = json.loads(result.out)
    assert shown["length"] > 0
    for held in shown["bytes"].values():
        assert held["total"] == sum(held.values()) - held["total"] > 0
    for counted in shown["flops_per_token"].values():
        assert counted["forward"] > 0


def test_tables_say_what_each_column_counts(lra):
    shown = json.loads(lra("cost", "tiny.gin", "--json").out)
    assert (shown["length"], shown["batch"]) == (16, 2)
    (layer,) = shown["layers"]
    assert (layer["layers"], layer["scores"], layer["square"]) == ([0, 1], 2 * (10 + 12 * 5), 2 * 16 * 16)
    out = lra("cost", "tiny.gin").out
    for words in ("0 to 1", "SlidingWindow, causal", "140 (560 B)", "512 (2.00 KiB)", "T^1.10", "whatever it masks"):
        assert words in out
    model, whole = shown["bytes"]["as_run"]["model"], shown["bytes"]["as_run"]["total"]
    assert f"{model / 1024:.2f} KiB ({model / whole:.1%})" in out
    forward = shown["flops_per_token"]["as_run"]["forward"]
    assert f"{forward:,.0f}" in out
    assert f"{forward / 2:,.0f}" in out


def test_length_overrides_and_attention(lra):
    shown = json.loads(
        lra("cost", "tiny.gin", "--length", "301", "--set", "BATCH=1", "--attention", "full", "--json").out
    )
    assert (shown["length"], shown["batch"]) == (301, 1)
    assert shown["layers"][0]["pattern"] == "Full"
    assert shown["layers"][0]["scores"] == 2 * 301 * 302 // 2
    assert "quadratic, T^2.00" in lra("cost", "tiny.gin", "--length", "301", "--attention", "full").out
    assert "linear, T^1.00" in lra("cost", "tiny.gin", "--length", "301").out


@pytest.mark.parametrize("length", ["0", "-3", "100000"])
def test_a_length_that_cannot_be_counted(lra, length):
    result = lra("cost", "tiny.gin", "--length", length)
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"lra: the length is {length}, but the cost of this model is known for 1 to 65536 tokens: change it\n"
    )


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["global_positions = (0, 16)"], "need a row of at least 17 tokens, got 16: lower them or lengthen"),
        (["global_positions = ()", "global_tokens = (10,)", "max_globals = 4"], "global_tokens need token ids: "),
    ],
)
def test_what_a_pattern_cannot_say_without_a_text_is_one_sentence(lra, bindings, sentence):
    extra = [word for binding in bindings for word in ("--set", f"WindowGlobal.{binding}")]
    result = lra("cost", "tiny.gin", "--attention", "window_global", *extra)
    assert (result.status, result.out) == (2, "")
    assert sentence in result.err
    assert "Traceback" not in result.err
