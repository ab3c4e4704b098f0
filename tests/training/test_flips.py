"""One flipped bit anywhere in a checkpoint is noticed by name, or does no harm."""

import shutil

import jax
import numpy as np
import pytest

from lra.training import Checkpoints
from lra.training.checkpoints import DamagedError


@pytest.fixture
def saved(tiny, run, tmp_path):
    """An experiment, the folder of its checkpoints of steps 1 and 2, and what they hold."""
    experiment = tiny.experiment(training={"checkpoint_every": 1})
    run(experiment, steps=2)
    folder = tmp_path / "run" / "checkpoints"
    return experiment, folder, {step: contents(folder, experiment, step) for step in (1, 2)}


def contents(folder, experiment, step):
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.restore(step, experiment.abstract_state)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], checkpoints.data(step)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def search(saved, rng, count):
    """How many of `count` random flips were named and how many did no harm; each leaves the folder as it was.

    Every second flip draws its file first, since nearly all bits are in the arrays.
    """
    experiment, folder, expected = saved
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file() and path.stat().st_size)
    sizes = np.array([path.stat().st_size for path in files])
    named = harmless = 0
    with Checkpoints(folder) as checkpoints:
        for n in range(count):
            path = files[rng.choice(len(files), p=sizes / sizes.sum() if n % 2 else None)]
            before, bit = path.read_bytes(), int(rng.integers(8 * path.stat().st_size))
            flip(path, bit)
            whole = checkpoints.newest(experiment.abstract_state)
            path.write_bytes(before)
            state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole.state)]
            assert (state, checkpoints.data(whole.step)) == expected[whole.step], f"silent: {path}, bit {bit}"
            named += whole.step == 1 and str(folder / "2") in whole.damaged[2]
            harmless += whole.step == 2 and not whole.damaged
    assert named + harmless == count
    return named, harmless


def test_some_flips(saved, rng):
    named, _ = search(saved, rng, 12)
    assert named > 4


@pytest.mark.slow
def test_two_hundred_flips(saved, rng, capsys):
    named, harmless = search(saved, rng, 200)
    with capsys.disabled():
        print(f"\n200 single-bit flips: {named} named, {harmless} harmless, 0 silent")
    assert named > 100


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/d/*", "meta/metadata"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "gone"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(saved, name, harm):
    experiment, folder, _ = saved
    (path,) = (folder / "2").glob(name)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if harm == "cut" else b"")
    with Checkpoints(folder) as checkpoints:
        whole = checkpoints.newest(experiment.abstract_state)
        assert (whole.step, list(whole.damaged)) == (1, [2])
        with pytest.raises(DamagedError, match="checkpoints/2 is damaged"):
            checkpoints.restore(2, experiment.abstract_state)


def test_an_empty_folder_and_copies_of_others_are_noticed(saved):
    experiment, folder, _ = saved
    (folder / "3").mkdir()
    shutil.copytree(folder / "1", folder / "4")
    shutil.rmtree(folder / "2" / "state")
    shutil.copytree(folder / "1" / "state", folder / "2" / "state")
    with Checkpoints(folder) as checkpoints:
        whole = checkpoints.newest(experiment.abstract_state)
    assert (whole.step, list(whole.damaged)) == (1, [4, 3, 2])
    assert whole.damaged[4].endswith("4 is a copy of step 1")
    assert whole.damaged[3].endswith("3 is damaged at digests.json")
    assert "2 is damaged at state/" in whole.damaged[2]
