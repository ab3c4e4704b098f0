import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.errors import UserError
from lra.models import AdaptiveEmbedding, AdaptiveSoftmax
from lra.models.parameters import named
from lra.training import SGD, Adafactor, Adagrad, Adam, AdamW, Constant, Cosine, Group, Linear, Lion, Optimizer, Rsqrt
from lra.training.groups import decays

TOTAL = 20


def rates(schedule) -> np.ndarray:
    return np.array([schedule.rates(TOTAL)(step) for step in range(TOTAL)])


def test_schedules_have_their_closed_forms():
    n = np.arange(TOTAL)
    rise, after = (n[:5] + 1) / 5, n[5:] - 5
    np.testing.assert_allclose(rates(Constant(0.3)), 0.3, rtol=1e-6)
    linear = np.concatenate([0.3 * rise, 0.3 + (0.1 - 0.3) * after / 15])
    np.testing.assert_allclose(rates(Linear(0.3, 5, final=0.1)), linear, rtol=1e-5)
    cosine = np.concatenate([0.3 * rise, 0.3 * (0.1 + 0.9 * (1 + np.cos(np.pi * after / 15)) / 2)])
    np.testing.assert_allclose(rates(Cosine(0.3, 5, final_ratio=0.1)), cosine, rtol=1e-5)
    rsqrt = 0.3 * np.minimum((n + 1) / 5, np.sqrt(5 / (n + 1)))
    np.testing.assert_allclose(rates(Rsqrt(0.3, 5)), rsqrt, rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_a_rise_the_first_rate_is_the_whole_one(warmup):
    assert rates(Linear(0.3, warmup))[0] == pytest.approx(0.3)
    assert (np.diff(rates(Linear(0.3, warmup))[1:]) < 0).all()


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match=r"Linear.warmup is 21.*Training.steps = 20"):
        Linear(0.1, 21).rates(TOTAL)
    with pytest.raises(UserError, match=r"Linear.warmup is 8 steps, but Linear.total is 7"):
        Linear(0.1, 8, total=7).rates(TOTAL)


def test_a_total_of_its_own_ends_the_fall():
    shorter, whole = rates(Cosine(0.3, 2, final_ratio=0.1, total=11)), Cosine(0.3, 2, final_ratio=0.1).rates(11)
    np.testing.assert_array_equal(shorter[:11], [whole(step) for step in range(11)])
    np.testing.assert_allclose(shorter[11:], 0.03, rtol=1e-6)


@pytest.mark.parametrize("make", [Linear, Cosine])
def test_lengths_in_tokens_and_epochs_are_those_in_steps(make):
    per = {"tokens": 1 / 13, "epochs": 7.0}  # 13 tokens a step, 7 steps an epoch
    expected = rates(make(0.3, 5, total=14))
    for unit, warmup, total in (("tokens", 65, 182), ("epochs", 5 / 7, 2)):
        np.testing.assert_array_equal(rates(make(0.3, warmup, total=total, unit=unit).in_steps(per.get)), expected)
    tokens = Rsqrt(0.3, 65, unit="tokens").in_steps(per.get)
    np.testing.assert_array_equal(rates(tokens), rates(Rsqrt(0.3, 5)))


def test_an_experiment_knows_its_tokens_and_epochs(tiny):
    """Batches of 3 x 8 tokens; 500 tokens are 20 of them."""

    def of(**options):
        schedule = functools.partial(Linear, 0.1, **options)
        return tiny.experiment(optimizer=tiny.optimizer(schedule=schedule), training={"steps": 50}).optimizer.schedule

    assert of(warmup=48, unit="tokens").warmup == 2
    assert (of(warmup=0.5, total=2, unit="epochs").warmup, of(warmup=0.5, total=2, unit="epochs").total) == (10, 40)
    with pytest.raises(UserError, match=r"Linear.warmup is 5, .* as much as one step, which is 24 tokens"):
        of(warmup=5, unit="tokens")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Constant(0.0), "Constant.learning_rate"),
        (lambda: Constant(float("nan")), "Constant.learning_rate"),
        (lambda: Linear(0.1, -1), "Linear.warmup"),
        (lambda: Linear(0.1, 0.5), "Linear.warmup.*integer.*unit is steps"),
        (lambda: Linear(0.1, 1.5, unit="tokens"), "Linear.warmup.*integer.*unit is tokens"),
        (lambda: Linear(0.1, float("nan"), unit="epochs"), "Linear.warmup"),
        (lambda: Linear(0.1, 1, total=0), "Linear.total"),
        (lambda: Linear(0.1, 1, unit="weeks"), "Linear.unit is 'weeks'.*'epochs'"),
        (lambda: Linear(0.1, 1, final=-0.1), "Linear.final"),
        (lambda: Cosine(0.1, final_ratio=1.5), "Cosine.final_ratio"),
        (lambda: Rsqrt(0.1, 0), "Rsqrt.warmup"),
        (lambda: Adam(b1=1.0), "Adam.b1"),
        (lambda: Adam(eps=0.0), "Adam.eps"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW.weight_decay"),
        (lambda: Adafactor(clipping_threshold=0.5), "Adafactor.clipping_threshold"),
        (lambda: Adafactor(factored_from=0), "Adafactor.factored_from"),
        (lambda: Adagrad(initial=-1.0), "Adagrad.initial"),
        (lambda: Adagrad(clip_array_norm=0.0), "Adagrad.clip_array_norm"),
        (lambda: SGD(momentum=1.0), "SGD.momentum"),
        (lambda: SGD(nesterov=True), "SGD.nesterov"),
        (lambda: Lion(b2=1.0), "Lion.b2"),
        (lambda: Group(pattern="*", rate=0.0), "Group.rate"),
        (lambda: Group(pattern="*", clip_norm=0.0), "Group.clip_norm"),
        (lambda: Optimizer(update=Adam, schedule=lambda: Constant(0.1), update_every=0), "Optimizer.update_every is 0"),
        (
            lambda: Optimizer(update=Adam, schedule=lambda: Constant(0.1), update_every_after=9),
            "update_every_after is 9, but needs to be 0",
        ),
        (lambda: Optimizer(update=Adam, schedule=lambda: Constant(0.1), clip_norm=0.0), "Optimizer.clip_norm"),
        (lambda: Optimizer(update=Adam, schedule=lambda: Constant(0.1), ema_decay=1.0), "Optimizer.ema_decay"),
    ],
)
def test_ranges_are_checked_by_constructors(make, name):
    with pytest.raises(UserError, match=name):
        make()


@pytest.mark.parametrize("update", [Adam, AdamW, Adafactor, Lion])
def test_the_logged_rate_is_the_applied_one(update):
    """On a constant gradient Adam moves by the rate itself; Adafactor, without its relative steps, too."""
    options = {"relative": False} if update is Adafactor else {}
    optimizer = Optimizer(
        update=functools.partial(update, **options), schedule=functools.partial(Linear, 0.1, 3, final=0.02)
    )
    transformation = optimizer.transformation(7)
    parameters = {"w": jnp.zeros(5)}
    state = transformation.init(parameters)
    for step in range(7):
        updates, state = transformation.update({"w": jnp.full(5, 0.5)}, state, parameters)
        np.testing.assert_allclose(-updates["w"], optimizer.learning_rate(step, 7), rtol=1e-4)


def test_clipping_bounds_the_global_norm():
    optimizer = Optimizer(update=lambda: _Identity(), schedule=lambda: Constant(1.0), clip_norm=1.0)
    transformation = optimizer.transformation(1)
    gradients = {"a": jnp.full(3, 2.0), "b": jnp.full(1, 2.0)}
    updates, _ = transformation.update(gradients, transformation.init(gradients), gradients)
    np.testing.assert_allclose(jax.tree.leaves(updates)[0], 0.5, rtol=1e-6)


class _Identity:
    def transformation(self, rates):
        import optax

        return optax.identity()


@pytest.mark.parametrize("update", [AdamW, Lion])
def test_norms_and_biases_do_not_decay(tiny, update):
    experiment = tiny.experiment(
        model=tiny.model(memory=False), optimizer=tiny.optimizer(functools.partial(update, weight_decay=0.5))
    )
    _, state = experiment.initial()
    transformation = experiment.optimizer.transformation(4)
    zeros = jax.tree.map(jnp.zeros_like, state.parameters)
    updates, _ = transformation.update(zeros, state.optimizer, state.parameters)
    decayed = {name for name, x in named(updates).items() if x.any()}
    layer = "stack.layers.0."
    assert decayed == {
        "embedding.embedding",
        *(f"{layer}attention.{name}.kernel" for name in ("query", "key", "value", "output")),
        *(f"{layer}feed_forward.{name}.kernel" for name in ("inner", "outer")),
    }
    assert len(named(updates)) == 15


def test_what_decays_goes_by_name_and_then_by_the_axes_in_a_layer():
    shapes = {
        "kernel": (2, 3), "bias": (2, 3), "scale": (2, 3), "slopes": (5,), "gain": (),
        "layers": [{"kernel": (4, 2, 3), "span": (4, 7), "bias": (4, 2, 3), "biases": [(4, 2, 3)]}],
    }  # fmt: skip
    parameters = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    assert {name for name, x in named(decays(parameters)).items() if x} == {"kernel", "layers.0.kernel"}


def test_of_an_adaptive_softmax_biases_alone_do_not_decay():
    sizes = {"vocabulary_size": 31, "width": 12, "rngs": nnx.Rngs(0)}
    embedding = AdaptiveEmbedding(cutoffs=(7, 19), div_value=2, **sizes)
    head = AdaptiveSoftmax(bias=True, tied_projections=False, embedding=embedding, **sizes)
    found = named(decays(nnx.state(nnx.Dict(embedding=embedding, head=head), nnx.Param)))
    assert {name for name, x in found.items() if not x} == {"head.bias", "head.cluster_bias"}
    assert len(found) == 3 + 3 + 3 + 3  # tables; projections of both; clusters and biases


def test_new_rules_have_their_closed_forms():
    """Three gradients; the sums by hand, in float64."""
    g = np.array([[0.5, -2.0], [1.0, 0.25], [-0.125, 3.0]])
    moves = {
        SGD: lambda i: g[i],
        functools.partial(SGD, momentum=0.9): lambda i: sum(0.9 ** (i - j) * g[j] for j in range(i + 1)),
        functools.partial(SGD, momentum=0.9, nesterov=True): lambda i: (
            g[i] + 0.9 * sum(0.9 ** (i - j) * g[j] for j in range(i + 1))
        ),
        functools.partial(Adagrad, initial=0.2): lambda i: g[i] / np.sqrt(0.2 + (g[: i + 1] ** 2).sum(0)),
        functools.partial(Lion, b1=0.8, b2=0.9): lambda i: np.sign(
            0.8 * sum(0.1 * 0.9 ** (i - 1 - j) * g[j] for j in range(i)) + 0.2 * g[i]
        ),
    }
    for update, expected in moves.items():
        transformation = Optimizer(update=update, schedule=lambda: Constant(0.1)).transformation(3)
        parameters = {"w": jnp.ones(2)}
        state = transformation.init(parameters)
        for i in range(3):
            step, state = transformation.update({"w": jnp.asarray(g[i], jnp.float32)}, state, parameters)
            np.testing.assert_allclose(step["w"], -0.1 * expected(i), rtol=1e-5)


def test_adagrad_that_clips_by_array_is_that_of_the_released_code():
    """facebookresearch/adaptive-span, 27b815fee821: five steps, of which most are clipped; w1 as a stack of layers."""
    with np.load(Path(__file__).with_name("optimisers.npz")) as stored:
        want = dict(stored)
    update = functools.partial(Adagrad, initial=0.0, eps=1e-20, clip_array_norm=0.03)
    optimizer = Optimizer(update=update, schedule=functools.partial(Linear, 0.07, 3, final=0.07))
    transformation = optimizer.transformation(5)

    def arranged(prefix):
        found = [jnp.asarray(want[f"{prefix}{name}"]) for name in ("w1", "b1", "w2")]
        return {"stack": {"layers": [{"w1": found[0][None]}]}, "b1": found[1], "w2": found[2]}

    parameters, ratios = arranged("weights/adagrad/"), []
    state = transformation.init(parameters)
    for n in range(5):
        gradients = arranged(f"grads/adagrad/step{n}/")
        updates, state = transformation.update(gradients, state, parameters)
        parameters = jax.tree.map(lambda x, y: x + y, parameters, updates)
        np.testing.assert_allclose(optimizer.learning_rate(n, 5), want["outputs/adagrad/lr_used"][n], rtol=1e-6)
        after = f"outputs/adagrad/step{n}/"
        for got, known in ((parameters, arranged(after)), (state[0].sum_of_squares, arranged(f"{after}sum_"))):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, known)
        ratios += [0.03 / np.linalg.norm(x) for x in jax.tree.leaves(gradients)]
    assert min(ratios) < 0.5


def test_arrays_are_clipped_in_each_layer():
    """Norms are 0.5 and 50, and 50.0025 of both; unclipped, Adagrad's first step is 1 everywhere."""
    transformation = Adagrad(initial=0.0, clip_array_norm=1.0).transformation(lambda step: 1.0)
    x = jnp.asarray([[0.3, 0.4], [30.0, 40.0]])
    tree = {"other": x, "stack": {"layers": [{"kernel": x}]}}
    updates, _ = transformation.update(tree, transformation.init(tree), tree)
    np.testing.assert_allclose(updates["other"], -np.full((2, 2), 1 / 50.0025), rtol=1e-4)
    np.testing.assert_allclose(updates["stack"]["layers"][0]["kernel"], [[-1, -1], [-0.02, -0.02]], rtol=1e-4)


def test_schedules_of_the_released_transformer_xl():
    """kimiyoung/transformer-xl, 44781ed21dba: the same without a warm-up; with one, TensorFlow's after the rise."""
    with np.load(Path(__file__).with_name("optimisers.npz")) as stored:
        for name, schedule, total, since in (
            ("txl_pytorch_lr/nowarm", Cosine(0.00025), 40, 0),
            ("txl_tf_lr_derived/nowarm", Cosine(0.00025, final_ratio=0.01), 40, 0),
            ("txl_tf_lr_derived/warm", Cosine(0.00025, 10, final_ratio=0.01), 60, 10),
        ):
            got = [schedule.rates(total)(step) for step in range(since, total)]
            np.testing.assert_allclose(got, stored[f"outputs/{name}"][since:], atol=1e-9)


def test_groups_have_rates_and_rules_of_their_own(tiny):
    groups = (
        functools.partial(Group, pattern="embedding.*", rate=0.5),
        functools.partial(Group, pattern="*.query.kernel", update=functools.partial(SGD, momentum=0.9), rate=3.0),
        functools.partial(Group, pattern="*.kernel", rate=2.0),
    )
    experiment = tiny.experiment(optimizer=tiny.optimizer(SGD, groups=groups), model=tiny.model(memory=False))
    _, state = experiment.initial()
    transformation = experiment.optimizer.transformation(4)
    ones = jax.tree.map(jnp.ones_like, state.parameters)
    _, optimizer = transformation.update(ones, state.optimizer, state.parameters)
    updates, _ = transformation.update(ones, optimizer, state.parameters)
    for name, x in named(updates).items():
        factor = 1.0
        if name.startswith("embedding"):
            factor = 0.5
        elif name.endswith("query.kernel"):
            factor = 3 * 1.9
        elif name.endswith("kernel"):
            factor = 2.0
        np.testing.assert_allclose(x, -0.01 * factor, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("pattern", ["*.memory.*", "*.scale"])
def test_a_group_that_takes_nothing_is_refused(tiny, pattern):
    groups = (functools.partial(Group, pattern="*.scale"), functools.partial(Group, pattern=pattern))
    experiment = tiny.experiment(optimizer=tiny.optimizer(groups=groups), model=tiny.model(memory=False))
    with pytest.raises(UserError, match=r"takes no parameter.*there are embedding\.embedding, "):
        experiment.build()


def test_a_group_with_its_own_clipping_counts_for_nobody_else(tiny):
    """The norms by hand: of the group alone, and of all others together."""
    groups = (functools.partial(Group, pattern="embedding.*", clip_norm=0.25),)
    optimizer = tiny.optimizer(lambda: _Identity(), groups=groups, clip_norm=0.5)
    experiment = tiny.experiment(optimizer=optimizer, model=tiny.model(memory=False))
    _, state = experiment.initial()
    gradients = jax.tree.map(lambda x: jnp.full_like(x, 3.0), state.parameters)
    sizes = {name: x.size for name, x in named(gradients).items()}
    own = sizes["embedding.embedding"]
    transformation = experiment.optimizer.transformation(4)
    updates, _ = transformation.update(gradients, transformation.init(state.parameters), state.parameters)
    for name, x in named(updates).items():
        norm, bound = (own, 0.25) if name.startswith("embedding") else (sum(sizes.values()) - own, 0.5)
        np.testing.assert_allclose(x, bound / np.sqrt(norm), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(
        experiment.optimizer.clip_ratio(gradients), 0.5 / (3 * np.sqrt(sum(sizes.values()) - own)), rtol=1e-5
    )


def test_updates_every_fourth_step_after_the_second():
    """Gradients of the steps between are averaged; the rate is that of the step; nothing moves in between."""
    g = np.arange(1, 12, dtype=np.float32)
    optimizer = Optimizer(
        update=SGD, schedule=functools.partial(Linear, 0.1, 3, total=11), update_every=4, update_every_after=2
    )
    transformation = optimizer.transformation(11)
    parameters = {"w": jnp.zeros(2)}
    state, moves = transformation.init(parameters), []
    for step in range(11):
        updates, state = transformation.update({"w": jnp.full(2, g[step])}, state, parameters)
        moves.append(float(updates["w"][0]))
    rate = [float(optimizer.learning_rate(step, 11)) for step in range(11)]
    want = np.zeros(11)
    for steps in ([0], [1], [2, 3, 4, 5], [6, 7, 8, 9]):
        want[steps[-1]] = -rate[steps[-1]] * g[steps].mean()
    np.testing.assert_allclose(moves, want, rtol=1e-5)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
