"""What is found before anything is built."""

from dataclasses import dataclass, field

import pytest

from lra import config

START = 'include "text/small.gin"\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "Widow.window = 3",
            "Widow.window = 3 (test.gin:2) names a class Widow that does not exist: did you mean Window?",
        ),
        (
            "Zebra.x = 3",
            "Zebra.x = 3 (test.gin:2) names a class Zebra that does not exist: "
            "there are Adam, Decoder, Experiment, Full, Hash, Heads, Window",
        ),
        (
            "near/Window.windw = 3",
            "near/Window.windw = 3 (test.gin:2) names a parameter that Window does not have: did you mean window?",
        ),
        (
            "Window.chunk = 3",
            "Window.chunk = 3 (test.gin:2) names a parameter that Window does not have: "
            "there are dilation, site, window; Hash has one",
        ),
        (
            "Decoder.named = {'a': @Windw}",
            "Decoder.named (test.gin:2) refers to @Windw, a class that does not exist: did you mean Window?",
        ),
        (
            "Adam.warmup = %SPN",
            "Adam.warmup (test.gin:2) uses the macro %SPN, which is not defined: did you mean SPAN?",
        ),
        ("SPAN = %SPAN", "the macro %SPAN (test.gin:2) is defined by itself: give it a value"),
        (
            "Adam.warmup = %gin.REQUIRED",
            "Adam.warmup (test.gin:2) has no value yet and Adam.warmup needs int: "
            "give one with --set 'Adam.warmup = ...'",
        ),
        (
            "SPAN = (1, %gin.REQUIRED)",
            "SPAN (test.gin:2) has no value yet and Window.window needs int | tuple[int, ...]: "
            "give one with --set 'SPAN = ...'",
        ),
        ("Adam.warmup = 1e5", "Adam.warmup (test.gin:2) needs int, got 100000.0 (float): write 100_000"),
        (
            "SPAN = (1, 2.5)",
            "Window.window (text/small.gin:6) needs int at [1], got 2.5 (float); "
            "it comes from SPAN = (1, 2.5) (test.gin:2)",
        ),
        ("Experiment.model = @Adam", "Experiment.model (test.gin:2) needs type[Decoder], got @Adam (a class)"),
        (
            "Experiment.optimizer = @Adam",
            "Experiment.optimizer (test.gin:2) needs Adam, got @Adam (a class): write @Adam()",
        ),
        (
            "Adam.schedule = 'cosin'",
            "Adam.schedule (test.gin:2) needs one of 'constant', 'cosine', got 'cosin' (str): did you mean 'cosine'?",
        ),
        ("SPON = 3", "SPON = 3 (test.gin:2) has no effect: nothing uses this macro; did you mean SPAN?"),
        ("KNOB = 2", "KNOB = 2 (test.gin:2) has no effect: nothing uses this macro; there are SPAN, WIDTH"),
    ],
)
def test_mistakes_are_named_with_file_and_line(refused, line, message):
    assert refused(START + line) == message


def test_macros_of_macros_are_followed(load):
    assert config.build(load(START + "SPAN = %KNOB\nKNOB = 3")).model.layers[0].window == 3


def test_a_required_value_may_be_given_later(load):
    built = config.build(load(START + "SPAN = %gin.REQUIRED", overrides=["SPAN = 11"]))
    assert built.model.layers[0].window == 11


def test_an_unused_macro_set_by_an_override(refused):
    assert refused(START, overrides=["SPON = 3"]) == (
        "SPON = 3 (--set) has no effect: nothing uses this macro; did you mean SPAN?"
    )


def test_an_override_may_leave_a_macro_without_use(load, refused):
    text = START + "SPAN = 5\nWindow.window = %SPAN"
    assert config.build(load(text, overrides=["Window.window = 7"])).model.layers[0].window == 7
    assert refused(text, overrides=["Window.window = 7", "SPAN = 9"]).startswith("SPAN = 9 (--set) has no effect")


def test_one_value_a_layer(load):
    built = config.build(load(START + "SPAN = (1, 2, 3)\nDecoder.num_layers = 3"))
    assert [layer.window for layer in built.model.layers] == [1, 2, 3]


def test_registering_again_does_nothing_and_another_class_is_refused(toys):
    config.register(toys)
    with pytest.raises(ValueError, match="Window is registered already"):
        config.register({"Window": toys["Full"]})


def test_a_default_without_a_literal_form_is_refused():
    @dataclass
    class Lax:
        sizes: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match=r"the default of Lax\.sizes must be a literal"):
        config.register({"Lax": Lax})


def test_instances_are_of_the_original_class(load, toys):
    built = config.build(load(START + "Decoder.pattern = @near/Window\nnear/Window.dilation = 2"))
    assert type(built) is toys["Experiment"]
    assert type(built.model.layers[0]) is toys["Window"]
