import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

# pytest's importlib mode has no package to import helpers from.
_SPEC = importlib.util.spec_from_file_location("tests_training_tiny", Path(__file__).parent / "tiny.py")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    module = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(module)
    return module


@pytest.fixture
def run(tiny: ModuleType, tmp_path: Path) -> Callable:
    """Trains in tmp_path/run without showing anything."""
    from lra.training import train

    return functools.partial(_run, train, tiny, tmp_path / "run")


def _run(train: Callable, tiny: ModuleType, default: Path, experiment, workdir: Path | None = None, **options):
    options = {"config_text": "a = 1", "difference": tiny.difference, "console": Console(quiet=True), **options}
    return train(experiment, workdir or default, **options)
