import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.errors import UserError
from lra.training import Checkpoints


def make_state() -> dict:
    return {
        "matrix": jnp.arange(12.0).reshape(3, 4),
        "pair": (jnp.ones((), jnp.int32), jnp.array([True, False])),
        "half": jnp.ones(5, jnp.bfloat16) / 3,
        "nothing": None,
    }


def abstract(state) -> dict:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)


@pytest.fixture
def folder(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(), data={"position": step}, config_text="a = 1")
    return tmp_path


def test_what_was_saved_comes_back_bit_for_bit(folder):
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 3
        assert checkpoints.data(3) == {"position": 3}
        state = checkpoints.restore(3, abstract(make_state()))
    assert jax.tree.structure(state) == jax.tree.structure(make_state())
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(make_state()), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_the_newest_are_kept(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


def test_a_state_is_saved_as_it_was_although_its_buffers_are_donated(tmp_path):
    grow = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    state = grow(jnp.ones((1000, 1000)))
    expected = np.array(state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": state}, data={}, config_text="")
        for _ in range(3):
            state = grow(state)
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore(1, abstract({"x": state}))["x"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("matrix"), r"has matrix, which this model lacks"),
        (lambda state: state.update(more=jnp.ones(2)), r"lacks more, which this model has"),
        (lambda state: state.update(matrix=jnp.ones((4, 4))), r"has matrix as float32\[3, 4\].*needs float32\[4, 4\]"),
        (lambda state: state.update(pair=(jnp.ones(()), state["pair"][1])), r"pair.0 as int32\[\].*float32\[\]"),
    ],
    ids=["extra", "missing", "reshaped", "dtype"],
)
def test_a_leaf_that_does_not_fit_is_named(folder, change, message):
    other = make_state()
    change(other)
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(3, abstract(other))


def test_partly_restored_leaves_are_checked_too(folder):
    with Checkpoints(folder) as checkpoints:
        part = checkpoints.restore(3, abstract({"matrix": make_state()["matrix"]}), partial=True)
        np.testing.assert_array_equal(part["matrix"], make_state()["matrix"])
        with pytest.raises(UserError, match="lacks other"):
            checkpoints.restore(3, abstract({"other": jnp.ones(1)}), partial=True)


def test_a_save_that_orbax_declines_is_an_error(folder):
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(RuntimeError, match="did not save step 2"):
        checkpoints.save(2, make_state(), data={}, config_text="")


def test_other_bits_are_noticed(folder, monkeypatch):
    from lra.training import checkpoints as module

    monkeypatch.setattr(module, "_checksum", lambda leaf, former=module._checksum: former(leaf) ^ (leaf.ndim == 2))
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="3 is damaged at matrix"):
        checkpoints.restore(3, abstract(make_state()))


def test_an_unfinished_checkpoint_is_passed_over_and_a_reader_leaves_it_alone(folder):
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 3
    assert (folder / "4.orbax-checkpoint-tmp").exists()
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest == 3
        checkpoints.save(4, make_state(), data={}, config_text="")
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_another_format_is_refused(folder, monkeypatch):
    monkeypatch.setattr("lra.training.checkpoints.FORMAT", 2)
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match=r"has format 1.*reads format 2"):
        checkpoints.restore(3, abstract(make_state()))


def test_the_leaves_of_a_training_state_have_readable_names(tiny):
    from lra.models.parameters import named

    state = tiny.experiment().abstract_state
    names = named(dataclasses.replace(state, optimizer=(), memory=None))
    assert {"step", "parameters.embedding.embedding", "parameters.stack.layers.0.attention.query.kernel"} < set(names)
