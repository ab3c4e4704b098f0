import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.errors import UserError
from lra.training import Checkpoints
from lra.training.checkpoints import DamagedError
from lra.training.quiet import quiet


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


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_is_not_newer_is_an_error(folder, step):
    with Checkpoints(folder, keep=2) as checkpoints, pytest.raises(RuntimeError, match=f"step {step} cannot be saved"):
        checkpoints.save(step, make_state(), data={}, config_text="")


def test_arrays_are_compared_with_what_was_in_memory(folder, monkeypatch):
    """The files are as they were written; what is between them and memory is at fault."""
    from orbax.checkpoint import AsyncCheckpointer

    former = AsyncCheckpointer.restore

    def other(self, *arguments, **options):
        found = former(self, *arguments, **options)
        if "state" in found.keys():  # noqa: SIM118 - orbax' Composite
            found.state["matrix"] = found.state["matrix"].at[2, 3].multiply(1 + 1e-6)
        return found

    with Checkpoints(folder) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(AsyncCheckpointer, "restore", other)
        with pytest.raises(UserError, match="3 is damaged at matrix"):
            checkpoints.restore(3, abstract(make_state()))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_is_not_finite_is_never_saved(folder, value, dtype):
    state = make_state() | {"worse": jnp.array([1, value], dtype)}
    with Checkpoints(folder, keep=2) as checkpoints:
        with pytest.raises(UserError, match="state of step 4 is not saved, since worse is not finite"):
            checkpoints.save(4, state, data={}, config_text="")
        assert checkpoints.steps == [2, 3]


def test_the_best_are_kept_besides_the_newest(tmp_path):
    """Scores that get worse, a step without one, one that is not a number, a tie (the earlier one stays)."""
    scores = [3.0, 2.0, 2.5, None, float("nan"), 2.0, 9.0, -float("inf")]
    kept = []
    for step, score in enumerate(scores, start=1):
        with Checkpoints(tmp_path, keep=2, keep_best=2) as checkpoints:  # a new process each time
            better = checkpoints.would_be_best(np.inf if score is None else score)
            checkpoints.save(step, {"x": jnp.ones(2)}, data={}, config_text="", score=score)
            checkpoints.wait()
            kept.append(checkpoints.steps)
            assert better == (step in (1, 2, 3, 6)), step
    assert kept == [[1], [1, 2], [1, 2, 3][1:], [2, 3, 4], [2, 3, 4, 5], [2, 5, 6], [2, 6, 7], [2, 6, 7, 8]]
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (2, 8)


def test_best_alone_counts_what_is_there(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.best is None
        assert not checkpoints.would_be_best(0.5)
        checkpoints.save(1, {"x": jnp.ones(2)}, data={}, config_text="", score=1.5)
        checkpoints.wait()
        assert checkpoints.best == 1


def test_a_best_that_cannot_be_told_is_named(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step, score in ((1, 1.5), (2, 0.5), (3, 2.5)):
            checkpoints.save(step, {"x": jnp.ones(2)}, data={}, config_text="", score=score)
    (tmp_path / "2" / "meta" / "metadata").write_text("{}")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=r"/2 is damaged at meta/metadata: put "):
        _ = checkpoints.best
    with Checkpoints(tmp_path, keep=3, keep_best=1) as checkpoints:  # a run goes on without it
        assert checkpoints.best == 1
        assert checkpoints.would_be_best(1.0)


class Dying:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_only_what_orbax_also_raises_is_kept_quiet(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    with quiet():
        Dying(RuntimeError("Event loop is closed"))
        Dying(RuntimeError("something else"))
    Dying(RuntimeError("Event loop is closed"))
    assert seen == ["something else", "Event loop is closed"]


def test_polling_deletes_what_is_no_longer_kept(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(), data={}, config_text="")
        end = time.monotonic() + 20
        while checkpoints.steps != [2] and time.monotonic() < end:
            checkpoints.poll()
        assert checkpoints.steps == [2]


def test_damaged_ones_are_named_and_the_newest_whole_one_taken(folder):
    (folder / "3" / "meta" / "metadata").unlink()
    with Checkpoints(folder, keep=2) as checkpoints:
        step, state, damaged = checkpoints.newest(abstract(make_state()))
        assert step == 2
        assert damaged == {3: f"checkpoint {folder / '3'} is damaged at meta/metadata"}
        np.testing.assert_array_equal(state["matrix"], make_state()["matrix"])
        checkpoints.set_aside(3)
        checkpoints.save(3, make_state(), data={}, config_text="")
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "3.damaged"]


def test_without_a_whole_one_all_are_named(folder):
    for step in "23":
        (folder / step / "digests.json").write_text("{}")
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(
            UserError, match=r"/3 is damaged at digests.json; .*/2 is .*no checkpoint is whole, so put back"
        ):
            checkpoints.newest(abstract(make_state()))
        assert checkpoints.steps == [2, 3]


def test_a_reader_is_not_misled_by_a_run_that_deletes_what_it_reads(folder, monkeypatch):
    former, calls = Checkpoints._read, []

    def slow(self, step, *arguments):
        if not calls:
            calls.append(step)
            with Checkpoints(folder, keep=1) as writer:
                writer.save(5, make_state(), data={}, config_text="")
        return former(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "_read", slow)
    with Checkpoints(folder) as checkpoints:
        whole = checkpoints.newest(abstract(make_state()))
    assert (calls, whole.step, whole.damaged) == ([3], 5, {})


def test_a_model_that_does_not_fit_is_no_damage(folder):
    other = make_state() | {"more": jnp.ones(2)}
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="3 lacks more") as caught:
        checkpoints.newest(abstract(other))
    assert not isinstance(caught.value, DamagedError)


def test_a_deletion_that_was_cut_off_leaves_no_checkpoint(folder):
    (folder / "1.deleted").mkdir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps == [2, 3]
    with Checkpoints(folder, keep=2):
        assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


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
    monkeypatch.setattr("lra.training.checkpoints.FORMAT", 3)
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match=r"has format 2.*reads format 3"):
        checkpoints.restore(3, abstract(make_state()))


def test_the_leaves_of_a_training_state_have_readable_names(tiny):
    from lra.models.parameters import named

    state = tiny.experiment().abstract_state
    names = named(dataclasses.replace(state, optimizer=(), memory=None))
    assert {"step", "parameters.embedding.embedding", "parameters.stack.layers.0.attention.query.kernel"} < set(names)
