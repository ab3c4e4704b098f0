"""A toy framework and its configurations: an experiment, a decoder, patterns built once a layer, an optimizer."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from lra import config
from lra.errors import UserError


class Pattern:
    def __init__(self, *, site: int) -> None:
        self.site = site


class Full(Pattern):
    pass


class Window(Pattern):
    def __init__(self, *, window: int | tuple[int, ...], dilation: int = 1, site: int) -> None:
        super().__init__(site=site)
        if dilation < 1:
            raise UserError(f"Window.dilation must be positive, got {dilation}: write 1")
        self.window = window[site] if isinstance(window, tuple) else window
        self.dilation = dilation


class Hash(Pattern):
    def __init__(self, *, chunk: int, rounds: int = 2, site: int) -> None:
        super().__init__(site=site)
        self.chunk, self.rounds = chunk, rounds


class Heads(Pattern):
    def __init__(self, *, groups: tuple[tuple[int, type[Pattern]], ...], site: int) -> None:
        super().__init__(site=site)
        self.groups = [(count, make(site=site)) for count, make in groups]


class Decoder:
    def __init__(
        self,
        *,
        pattern: type[Pattern] | tuple[type[Pattern], ...],
        width: int = 8,
        num_layers: int = 2,
        title: str = "toy",
        named: Mapping[str, type[Pattern]] | None = None,
        note: tuple[float, bool] | None = None,
    ) -> None:
        if width % 2:
            raise ValueError(f"Decoder.width must be even, got {width}: write {width + 1}")
        makers = pattern if isinstance(pattern, tuple) else (pattern,)
        self.layers = [makers[i % len(makers)](site=i) for i in range(num_layers)]
        self.named = {name: make(site=0) for name, make in (named or {}).items()}
        self.width, self.title, self.note = width, title, note


@dataclass(frozen=True)
class Adam:
    learning_rate: float = 0.1
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0


class Experiment:
    def __init__(
        self, *, model: type[Decoder], optimizer: Adam, encoder: type[Decoder] | None = None, seed: int = 0
    ) -> None:
        self.make_model, self.make_encoder, self.optimizer, self.seed = model, encoder, optimizer, seed

    def build(self) -> None:
        self.model = self.make_model()
        self.encoder = self.make_encoder() if self.make_encoder else None


TOYS: dict[str, type] = {cls.__name__: cls for cls in (Full, Window, Hash, Heads, Decoder, Adam, Experiment)}
TOY_PATTERNS = {"Full": "full", "Window": "window", "Hash": "hash", "Heads": "heads"}

FILES = {
    "base.gin": """
        WIDTH = 8
        KNOB = 1
        Experiment.model = @Decoder
        Experiment.optimizer = @Adam()
        Decoder.width = %WIDTH
        """,
    "attention/hash.gin": """
        Decoder.pattern = @Hash
        Hash.chunk = 64
        """,
    "attention/window.gin": """
        Decoder.pattern = @Window
        Window.window = 16
        """,
    "data/text.gin": "Experiment.seed = 7",
    "text/small.gin": """
        include "base.gin"
        include "data/text.gin"

        SPAN = 5
        Decoder.pattern = @Window
        Window.window = %SPAN
        """,
}

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """The toy classes are all that is registered."""
    monkeypatch.setattr(config, "REGISTRY", {})
    monkeypatch.setattr(config, "_PATTERNS", {})
    monkeypatch.setattr(config, "_public", lambda: (TOYS, TOY_PATTERNS))
    config.register(TOYS, TOY_PATTERNS)
    return TOYS


@pytest.fixture(autouse=True)
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file of the toy configurations, which replace the shipped ones."""
    root = tmp_path / "configs"
    monkeypatch.setattr(config, "CONFIGS", root)

    def write_file(name: str, text: str) -> Path:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    for name, text in FILES.items():
        write_file(name, text)
    return write_file


@pytest.fixture
def load(write: Write) -> Callable[..., config.Loaded]:
    """Writes a text as `test.gin` and loads it."""

    def load_text(text: str, **options: Any) -> config.Loaded:
        write("test.gin", text)
        return config.load("test", **options)

    return load_text


@pytest.fixture
def refused(load: Callable[..., config.Loaded]) -> Callable[..., str]:
    """The message with which loading and building a text fails."""

    def message(text: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            config.build(load(text, **options))
        return str(caught.value)

    return message
