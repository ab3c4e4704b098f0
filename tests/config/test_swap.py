"""`--attention`: only what belongs to the replaced patterns changes."""

import pytest

from lra import config
from lra.errors import UserError

START = 'include "text/small.gin"\n'


def resolved(loaded):
    config.build(loaded)
    return config.resolved()


def test_only_the_pattern_changes(load):
    text = START + "Window.dilation = 3\nAdam.warmup = 2"
    before, loaded = resolved(load(text)), load(text, attention="hash")
    after = resolved(loaded)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"Decoder.pattern", "Window.window", "Window.dilation", "Hash.chunk", "Hash.rounds"}
    assert after["Decoder.pattern"] == "@Hash"
    assert loaded.swapped == (
        "window replaced by hash in Decoder.pattern; removed SPAN, Window.dilation, Window.window"
    )


def test_overrides_come_after(load):
    assert resolved(load(START, attention="hash", overrides=["Hash.chunk = 9"]))["Hash.chunk"] == "9"


def test_an_override_of_what_was_removed_has_no_effect(refused):
    assert refused(START, attention="hash", overrides=["SPAN = 3"]).startswith(
        "SPAN = 3 (--set) has no effect: nothing uses this macro"
    )


def test_a_macro_that_something_else_uses_stays(load):
    loaded = load(START + "Adam.warmup = %SPAN", attention="hash")
    assert resolved(loaded)["Adam.warmup"] == "5"


def test_a_macro_that_the_attention_file_uses_stays(write, load):
    write("attention/hash.gin", "Decoder.pattern = @Hash\nHash.chunk = %SPAN")
    assert resolved(load(START, attention="hash"))["Hash.chunk"] == "5"


def test_patterns_inside_heads_go_with_it(load):
    text = """
        include "base.gin"
        Decoder.pattern = (@Heads, @Full)
        Heads.groups = ((4, @near/Window), (2, @Full))
        Window.window = 3
        near/Window.dilation = 7
        """
    loaded = load(text, attention="hash")
    assert {key.name for key in loaded.values} == {"Experiment", "Decoder", "Hash"}
    assert loaded.swapped.startswith("full, heads, window replaced by hash in Decoder.pattern")
    resolved(loaded)


def test_a_pattern_that_another_part_names_stays(write, load):
    text = """
        include "base.gin"
        Experiment.encoder = @enc/Decoder
        Experiment.model = @Decoder
        Decoder.pattern = @dec/Window
        Experiment.seed = 3
        Decoder.named = {"x": @side/Window}
        side/Window.window = 3
        dec/Window.window = 4
        """
    loaded = load(text, attention="hash")
    assert "side/Window.window" in {str(key) for key in loaded.values}
    assert "dec/Window.window" not in {str(key) for key in loaded.values}
    resolved(loaded)


def test_another_scope_of_the_incoming_pattern_stays(load):
    text = """
        include "base.gin"
        Decoder.pattern = @Hash
        Decoder.named = {"x": @side/Window}
        Hash.chunk = 8
        side/Window.window = 3
        """
    after = resolved(load(text, attention="window"))
    assert (after["Window.window"], after["side/Window.window"]) == ("16", "3")


def test_the_same_pattern_again_gives_the_attention_files_values(load):
    after = resolved(load(START + "Window.dilation = 3", attention="window"))
    assert (after["Window.window"], after["Window.dilation"]) == ("16", "1")


def test_a_scoped_binding_of_the_same_place_goes_too(load):
    text = START + "Experiment.model = @dec/Decoder\ndec/Decoder.pattern = @Full\nDecoder.width = 4"
    with pytest.raises(UserError, match=r"Decoder\.pattern = @Window .* has no effect"):
        config.build(load(text))
    assert resolved(load(text, attention="hash"))["dec/Decoder.pattern"] == "@Hash"


def test_a_macro_as_the_place(write, load):
    write("attention/hash.gin", "PATTERN = @Hash\nHash.chunk = 64")
    text = 'include "base.gin"\nPATTERN = @Window\nDecoder.pattern = %PATTERN\nWindow.window = 3'
    loaded = load(text, attention="hash")
    assert resolved(loaded)["Decoder.pattern"] == "@Hash"
    assert loaded.swapped == "window replaced by hash in PATTERN; removed Window.window"


def test_the_base_is_not_read_again(write, load):
    write("attention/hash.gin", 'include "base.gin"\nDecoder.pattern = @Hash\nHash.chunk = %KNOB')
    after = resolved(load(START + "WIDTH = 16", attention="hash"))
    assert (after["Decoder.width"], after["Hash.chunk"]) == ("16", "1")


def test_an_unknown_attention_lists_those_that_exist(refused):
    assert refused(START, attention="hsh") == "there is no attention 'hsh': there are hash, window"


def test_an_override_takes_along_what_only_the_replaced_class_had(load, refused):
    text = START + "WIDE = 3\nDecoder.pattern = @Heads\nHeads.groups = ((1, @Hash),)\nHash.chunk = %WIDE"
    after = resolved(load(text, overrides=["Decoder.pattern = @Full"]))
    assert after["Decoder.pattern"] == "@Full"
    assert not {"Heads.groups", "Hash.chunk"} & after.keys()
    assert resolved(load(text, overrides=["Decoder.pattern = @Hash"]))["Hash.chunk"] == "3"
    assert refused(text, overrides=["Decoder.pattern = @Full", "Hash.chunk = 4"]) == (
        "Hash.chunk = 4 (--set) has no effect: this configuration builds no Hash"
    )
