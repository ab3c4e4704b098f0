"""What importing costs, and what the library's source must not contain."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "lra"
HEAVY = ("jax", "flax", "numpy", "tensorflow", "tensorflow_datasets", "torch")


def test_importing_lra_loads_nothing_heavy():
    code = f"import lra, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def imports_framework(node: ast.AST) -> bool:
    """Whether it imports TensorFlow or torch, by statement or by name; tensorflow_datasets is neither."""
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            modules = [module]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(name), *_]):
            modules = [str(name)]
        case _:
            modules = []
    return any(module.split(".")[0] in ("tensorflow", "torch") for module in modules)


def is_mask_constant(node: ast.AST) -> bool:
    """Whether it is a float such as 1e9, the mark of a mask that is added; masks are booleans here."""
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 1e8 <= node.value < float("inf")


def is_assert(node: ast.AST) -> bool:
    """Whether it is an assert, which vanishes under `python -O`; the library raises instead."""
    return isinstance(node, ast.Assert)


def nodes(*parts: str) -> Iterator[tuple[str, ast.AST]]:
    """Every syntax node of the library's files under `parts`, with where it is."""
    for part in parts:
        for path in sorted((LIBRARY / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield f"{path.relative_to(LIBRARY.parent)}:{getattr(node, 'lineno', 0)}", node


@pytest.mark.parametrize(
    ("unwanted", "parts"),
    [(imports_framework, ["."]), (is_assert, ["."]), (is_mask_constant, ["attention", "models"])],
)
def test_library_is_free_of(unwanted, parts):
    assert [where for where, node in nodes(*parts) if unwanted(node)] == []


@pytest.mark.parametrize(
    ("unwanted", "code", "found"),
    [
        (imports_framework, "import tensorflow as tf", True),
        (imports_framework, "from torch.nn import Linear", True),
        (imports_framework, "importlib.import_module('tensorflow')", True),
        (imports_framework, "import tensorflow_datasets as tfds", False),
        (imports_framework, "from . import torch", False),
        (is_mask_constant, "logits - 1e9 * mask", True),
        (is_mask_constant, "x = -1.0e10", True),
        (is_mask_constant, "x = 1e-9 + 10_000.0", False),
        (is_assert, "assert x", True),
    ],
)
def test_the_searches_find(unwanted, code, found):
    assert any(unwanted(node) for node in ast.walk(ast.parse(code))) == found
