"""A wheel of this checkout, built once a worker from a copy, so that nothing is left in the tree."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARGO = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the wheel. The build backend is called directly: no isolated environment, hence no registry."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools, the build backend, is not installed here")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in CARGO:
        shutil.copy(ROOT / name, tree)
    for link in ROOT.iterdir():
        if link.is_symlink():
            (tree / link.name).symlink_to(link.readlink())
    shutil.copytree(ROOT / "lra", tree / "lra", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built
