"""The moving average of the parameters."""

import jax
import numpy as np
import pytest

from lra.errors import UserError
from lra.evaluation import evaluate
from lra.models.parameters import named
from lra.training import Checkpoints, load_model, make_step


@pytest.fixture(scope="module")
def averaging(tiny):
    def make(**training):
        return tiny.experiment(
            model=tiny.model(memory=False, dropout=0.0),
            optimizer=tiny.optimizer(ema_decay=0.25, clip_norm=1.0),
            training=training,
        )

    return make


def test_the_average_has_its_closed_form_and_memory_of_its_own(averaging):
    experiment = averaging()
    step = make_step(experiment.graph, experiment.optimizer, total_steps=4, seed=0)
    _, state = experiment.initial()
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    batches = experiment.data.batches(experiment.corpus.tokens("train"), start=0, seed=0, prefetch=0)
    expected = {name: np.asarray(x, np.float64) for name, x in named(state.parameters).items()}
    for n in range(1, 5):
        state, metrics = step(state, next(batches))
        decay = min(0.25, (1 + n) / (10 + n))
        for name, x in named(state.parameters).items():
            expected[name] = decay * expected[name] + (1 - decay) * np.asarray(x, np.float64)
            np.testing.assert_allclose(named(state.average)[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(metrics["clip_ratio"], min(1, 1 / metrics["gradient_norm"]), rtol=1e-6)


def test_the_average_is_evaluated_by_name(averaging, run, tmp_path):
    experiment = averaging(evaluate_weights="ema", steps=3)
    experiment.build()
    outcome = run(experiment)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        state = checkpoints.restore(3, experiment.abstract_state)
    scores = {}
    for weights, parameters in (("last", state.parameters), ("ema", state.average)):
        model, step, _ = load_model(averaging(), tmp_path / "run", weights)
        assert step == 3
        for name, x in named(parameters).items():
            np.testing.assert_array_equal(named(model_state(model))[name], x, err_msg=name)
        report = evaluate(model, experiment.corpus, "valid", experiment.protocol, limit=40, weights=weights)
        assert report.as_dict()["weights"] == weights
        scores[weights] = report.bits_per_byte
    assert scores["ema"] != scores["last"]
    assert outcome.evaluation["bits_per_byte"] == pytest.approx(scores["ema"], rel=1e-6)
    assert outcome.evaluation["weights"] == "ema"


def model_state(model):
    from flax import nnx

    return nnx.state(model, nnx.Param)


def test_a_run_without_an_average_says_so(tiny, run, tmp_path):
    plain = tiny.experiment(model=tiny.model(memory=False, dropout=0.0))
    run(plain, steps=1)
    with pytest.raises(UserError, match=r"keeps no moving average.*set Optimizer.ema_decay"):
        load_model(plain, tmp_path / "run", "ema")
    with pytest.raises(UserError, match=r"keeps no moving average"):
        tiny.experiment(training={"evaluate_weights": "ema"}).build()
    with pytest.raises(UserError, match=r"Training.evaluate_weights is 'best'"):
        tiny.experiment(training={"evaluate_weights": "best"})
