import pytest

from lra import config
from lra.errors import UserError
from lra.gin_files import literal

TEXT = """
    include "text/small.gin"
    Decoder.pattern = (@Heads, @near/Window, @Window)
    Decoder.num_layers = 3
    Decoder.title = 'it\\'s "quoted" \\\\ and\\nbroken, with \\u00e9 and #'
    Decoder.named = {"near": @near/Window, 'all': @Full}
    Decoder.note = (1, True)
    Heads.groups = ((4, @near/Window), (2, @Full))
    near/Window.window = (9, 8, 7)
    Adam.learning_rate = 1e-5
    """
UNNAMED = "\n".join(line for line in TEXT.splitlines() if "named" not in line)


def test_every_parameter_that_is_used_with_its_effective_value(load):
    config.build(load(TEXT))
    assert config.resolved() == {
        "Adam.learning_rate": "1e-05",
        "Adam.schedule": "'constant'",
        "Adam.warmup": "0",
        "Decoder.named": "{'near': @near/Window, 'all': @Full}",
        "Decoder.note": "(1, True)",
        "Decoder.num_layers": "3",
        "Decoder.pattern": "(@Heads, @near/Window, @Window)",
        "Decoder.title": repr('it\'s "quoted" \\ and\nbroken, with é and #'),
        "Decoder.width": "8",
        "Experiment.encoder": "None",
        "Experiment.model": "@Decoder",
        "Experiment.optimizer": "@Adam()",
        "Experiment.seed": "7",
        "Heads.groups": "((4, @near/Window), (2, @Full))",
        "Window.dilation": "1",
        "Window.window": "5",
        "near/Window.dilation": "1",
        "near/Window.window": "(9, 8, 7)",
    }


def test_the_text_reads_back_to_the_same(load, tmp_path):
    first = config.build(load(TEXT))
    text, values = config.resolved_text(), config.resolved()
    (tmp_path / "config.gin").write_text(text)
    second = config.build(config.load(tmp_path))
    assert config.resolved() == values
    assert config.resolved_text() == text
    assert second.model.title == first.model.title
    assert [type(layer) for layer in second.model.layers] == [type(layer) for layer in first.model.layers]


def test_the_text_is_grouped_by_class_and_scope(load):
    config.build(load('include "text/small.gin"\nDecoder.pattern = (@Window, @near/Window)\nnear/Window.dilation = 2'))
    assert config.resolved_text().endswith(
        "Window.dilation = 1\nWindow.window = 5\n\nnear/Window.dilation = 2\nnear/Window.window = 5\n"
    )


def test_reading_back_allows_a_swap_and_an_override(load, tmp_path):
    config.build(load(UNNAMED))
    (tmp_path / "config.gin").write_text(config.resolved_text())
    built = config.build(config.load(tmp_path, attention="hash", overrides=["Hash.rounds = 5"]))
    assert built.model.layers[2].rounds == 5


def test_difference(load):
    config.build(load(UNNAMED))
    old = config.resolved_text()
    config.build(load(UNNAMED.replace("1e-5", "0.2"), attention="hash"))
    assert config.difference(old, old) == []
    assert config.difference(old, config.resolved_text()) == [
        "Adam.learning_rate: 1e-05 -> 0.2",
        "Decoder.pattern: (@Heads, @near/Window, @Window) -> @Hash",
        "Hash.chunk: (absent) -> 64",
        "Hash.rounds: (absent) -> 2",
        "Heads.groups: ((4, @near/Window), (2, @Full)) -> (absent)",
        "Window.dilation: 1 -> (absent)",
        "Window.window: 5 -> (absent)",
        "near/Window.dilation: 1 -> (absent)",
        "near/Window.window: (9, 8, 7) -> (absent)",
    ]


@pytest.mark.parametrize("value", [object(), {1, 2}, float("inf"), float("nan"), b"raw", 3j])
def test_what_has_no_literal_form_is_refused(value):
    with pytest.raises(UserError, match="cannot be written in a configuration"):
        literal((1, value))


@pytest.mark.parametrize("value", [(), (1,), [], {}, -3, -0.5, 1e300, None, True, "", ((1, (2,)), [3])])
def test_literals_read_back(load, value):
    from lra.gin_files import read_text

    (binding,) = read_text(f"A.b = {literal(value)}", "text").values()
    assert binding.value == value
    assert type(binding.value) is type(value)
