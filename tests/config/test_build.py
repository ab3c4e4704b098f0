"""Construction, and bindings that no constructor received."""

import pytest

from lra import config
from lra.errors import UserError

START = 'include "text/small.gin"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hash.chunk = 3", "Hash.chunk = 3 (test.gin:2) has no effect: this configuration builds no Hash"),
        (
            "nera/Window.dilation = 3",
            "nera/Window.dilation = 3 (test.gin:2) has no effect: "
            "no Window is built in the scope nera; it is in: the outermost",
        ),
        (
            "near/Window.dilation = 3\nWindow.dilation = 2\nDecoder.pattern = @near/Window",
            "Window.dilation = 2 (test.gin:3) has no effect: "
            "Window is built only where near/Window.dilation = 3 (test.gin:2) overrides it",
        ),
        (
            "near/Window.dilation = 3\nDecoder.pattern = @nearer/Window",
            "near/Window.dilation = 3 (test.gin:2) has no effect: "
            "no Window is built in the scope near; it is in: nearer",
        ),
        ("Window.site = 3", "Window.site = 3 (test.gin:2) has no effect: the program passes site itself"),
        (
            "Hash.chunk = 3\nHash.rounds = 1",
            "Hash.chunk = 3 (test.gin:2) has no effect: this configuration builds no Hash\n"
            "Hash.rounds = 1 (test.gin:3) has no effect: this configuration builds no Hash",
        ),
        # The words of the constructors, with nothing of gin's.
        ("Window.dilation = 0", "Window.dilation must be positive, got 0: write 1"),
        ("WIDTH = 7", "Decoder.width must be even, got 7: write 8"),
        (
            "Decoder.pattern = (@Window, @far/Hash)",
            "far/Hash.chunk has no value and no default: give one (int) with --set 'far/Hash.chunk = ...'",
        ),
    ],
)
def test_mistakes_that_show_in_construction(refused, text, message):
    assert refused(START + text) == message


def test_an_override_without_effect(refused):
    assert refused(START, overrides=["Hash.chunk = 3"]) == (
        "Hash.chunk = 3 (--set) has no effect: this configuration builds no Hash"
    )


def test_a_part_left_at_a_class_must_be_injected(load, toys, write):
    class Model:
        def __init__(self, *, part: type = toys["Adam"]) -> None:
            self.part = part()

    config.register({"Model": Model})
    write("test.gin", "Model.part = @Adam\nAdam.warmup = 3\n")
    assert config.build(config.load("test"), root="Model").part.warmup == 3
    write("test.gin", "")
    with pytest.raises(UserError, match=r"^Model\.part must be bound, since its default ignores bindings: .* = @Adam$"):
        config.build(config.load("test"), root="Model")


def test_a_fault_of_the_program_keeps_its_type(load, toys, monkeypatch):
    def broken(self):
        raise TypeError("not the user's")

    monkeypatch.setattr(toys["Experiment"], "build", broken)
    with pytest.raises(TypeError, match="not the user's"):
        config.build(load(START))


def test_an_outer_binding_counts_where_one_call_sees_it(load):
    text = "near/Window.dilation = 3\nWindow.dilation = 2\nDecoder.pattern = (@near/Window, @Window)"
    assert [layer.dilation for layer in config.build(load(START + text)).model.layers] == [3, 2]


def test_a_scope_is_active_when_its_class_is_called_later(load):
    text = """
        include "base.gin"
        Decoder.pattern = @Heads
        Heads.groups = ((4, @near/Window), (2, @Full), (1, @far/Window))
        Window.window = 3
        near/Window.window = 7
        far/Window.dilation = 2
        """
    groups = config.build(load(text)).model.layers[0].groups
    near, far = groups[0][1], groups[2][1]
    assert [count for count, _ in groups] == [4, 2, 1]
    assert (near.window, near.dilation, far.window, far.dilation) == (7, 1, 3, 2)


def test_what_a_scoped_class_builds_inherits_its_scope(load):
    text = """
        include "base.gin"
        Experiment.encoder = @enc/Decoder
        Experiment.model = @dec/Decoder
        Decoder.pattern = @Window
        enc/Window.window = 4
        dec/Window.window = 8
        """
    built = config.build(load(text))
    assert (built.encoder.layers[0].window, built.model.layers[0].window) == (4, 8)
    assert config.resolved()["enc/Window.window"] == "4"


def test_a_scoped_class_in_a_macro_runs_in_its_own_scope(load):
    text = "PATTERN = @near/Window\nDecoder.pattern = %PATTERN\nnear/Window.dilation = 2"
    assert config.build(load(START + text)).model.layers[0].dilation == 2


def test_two_loads_in_a_row_are_independent(load):
    first = load(START + "Adam.warmup = 3\nWindow.dilation = 2")
    second = load(START)
    assert config.build(second).optimizer.warmup == 0
    assert "Window.dilation" in config.resolved()
    assert config.resolved()["Window.dilation"] == "1"
    assert config.build(first).optimizer.warmup == 3
    assert config.build(second).optimizer.warmup == 0
