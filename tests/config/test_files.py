"""Reading: syntax, includes, and bindings that undo each other."""

import pytest

from lra import config
from lra.errors import UserError

START = 'include "text/small.gin"\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Adam.warmup 3", "test.gin:2 cannot be read: Couldn't parse statement, expected ':' or '='"),
        ("Adam.warmup = 4*512", "test.gin:2 cannot be read: Expected newline"),
        ("Adam.schedule = cosine", "test.gin:2 cannot be read: cosine is no value (strings need quotes)"),
        ("Adam.warmup = (1, 2", "test.gin:2 cannot be read: a bracket or string is left open"),
        ("Adam.warmup = $", "test.gin:2 cannot be read: Unable to parse value"),
        ("import math", "test.gin:2 imports math: remove the line, all classes are known"),
        (
            'include "nowhere.gin"',
            "test.gin:2 includes 'nowhere.gin', which is neither in configs/ nor beside it: "
            "write a path relative to one of the two",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(refused, line, message):
    assert refused(START + line) == message


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "bad.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"bad\.gin cannot be read"):
        config.load(tmp_path / "bad.gin")


def test_twice_in_one_file(refused):
    assert refused(START + "Adam.warmup = 3\n\nAdam.warmup = 4") == (
        "Adam.warmup = 3 (test.gin:2) is undone by Adam.warmup = 4 (test.gin:4): remove one of the two"
    )


def test_twice_in_one_file_in_a_block(refused):
    assert refused(START + "Adam:\n  warmup = 3\nAdam.warmup = 4") == (
        "Adam.warmup = 3 (test.gin:3) is undone by Adam.warmup = 4 (test.gin:4): remove one of the two"
    )


def test_a_macro_twice_in_one_file(refused):
    assert refused(START + "WIDTH = 4\nWIDTH = 6") == (
        "WIDTH = 4 (test.gin:2) is undone by WIDTH = 6 (test.gin:3): remove one of the two"
    )


def test_an_include_below_a_binding(refused):
    assert refused('SPAN = 3\ninclude "text/small.gin"') == (
        "SPAN = 3 (test.gin:1) is undone by SPAN = 5 (text/small.gin:4), which test.gin:2 includes below it: "
        "move the include up"
    )


def test_an_include_below_other_bindings_is_fine(load):
    assert config.build(load('Adam.warmup = 3\ninclude "text/small.gin"')).optimizer.warmup == 3


def test_an_included_binding_may_be_overridden_below(load):
    assert config.build(load(START + "SPAN = 3\nExperiment.seed = 1")).seed == 1


def test_a_scoped_binding_is_another_one(load):
    built = config.build(load(START + "near/Window.window = 3\nDecoder.pattern = (@Window, @near/Window)"))
    assert [layer.window for layer in built.model.layers] == [5, 3]


def test_a_part_included_twice_does_not_undo_what_came_between(write, load):
    write("model/wide.gin", 'include "base.gin"\nWIDTH = 32')
    write("data/other.gin", 'include "base.gin"\nExperiment.seed = 3')
    text = 'include "model/wide.gin"\ninclude "data/other.gin"\nDecoder.pattern = @Full'
    assert config.build(load(text)).model.width == 32


def test_a_file_beside_the_including_one(tmp_path, write):
    mine = tmp_path / "mine" / "run.gin"
    mine.parent.mkdir()
    mine.write_text('include "text/small.gin"\ninclude "part.gin"\n')
    (mine.parent / "part.gin").write_text("Adam.warmup = 1e5\n")
    with pytest.raises(UserError, match=rf"^Adam\.warmup \({mine.parent}/part\.gin:1\) needs int"):
        config.load(mine)
    (mine.parent / "part.gin").write_text("Adam.warmup = 9\n")
    assert config.build(config.load(mine)).optimizer.warmup == 9


def test_a_file_that_is_in_both_places_is_ambiguous(tmp_path):
    (tmp_path / "base.gin").write_text("WIDTH = 4\n")
    (tmp_path / "run.gin").write_text('include "base.gin"\n')
    with pytest.raises(UserError, match=r"run\.gin:1 includes 'base\.gin', which is both in configs/ and beside it"):
        config.load(tmp_path / "run.gin")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["Adam.warmup = 1", "Adam.warmup = 2"], "--set gives Adam.warmup twice, 1 and 2: keep one"),
        (["Adam.warmup 1"], "--set 'Adam.warmup 1' cannot be read: Couldn't parse statement, expected ':' or '='"),
        ([""], "--set '' holds 0 bindings: write one Name.parameter = value"),
        (['include "base.gin"'], "--set 'include \"base.gin\"' may hold bindings only: write Name.parameter = value"),
        (["Adam.warmup = 1e3"], "Adam.warmup (--set) needs int, got 1000.0 (float): write 1_000"),
    ],
)
def test_faulty_overrides(refused, overrides, message):
    assert refused(START, overrides=overrides) == message


def test_overrides_win_over_everything(load):
    built = config.build(load(START + "Adam.warmup = 3", overrides=["Adam.warmup = 4", "WIDTH = 16", "SPAN = (1, 2)"]))
    assert (built.optimizer.warmup, built.model.width, built.model.layers[1].window) == (4, 16, 2)
