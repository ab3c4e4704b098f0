"""The root of a configuration: everything that a run can use, constructed and checked before the first step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax import nnx

from lra.data import Batches, Corpus
from lra.errors import UserError
from lra.evaluation import Protocol
from lra.models import Decoder
from lra.training.checks import require, whole
from lra.training.optimizers import Optimizer
from lra.training.state import TrainState
from lra.training.step import initial_state

Weights = Literal["last", "ema"]


class Training:
    """How long a run is and what happens on the way. Its last step is always evaluated and saved.

    Args:
        steps: updates in all.
        evaluate_every: steps between evaluations; 0 for none but the last.
        evaluate_tokens: how much of "valid" is scored each time; None for all of it.
        checkpoint_every: steps between checkpoints; 0 for none but the last.
        keep_checkpoints: how many of the newest are kept.
        keep_best: how many of the best are kept besides, by bits per byte on "valid"; an evaluation that comes among
            them is saved, whatever `checkpoint_every` says.
        log_every: steps between lines of metrics.
        tensorboard: whether the metrics are written for TensorBoard too.
        accumulate: micro-batches that a batch is computed in, one after the other, for less memory; divides its rows.
        evaluate_weights: what is evaluated: the "last" parameters, or their moving average "ema".
        non_finite: what follows a step whose loss or gradients are not finite: "stop" and name the first tensor that is
            not, "skip" the step, or "rewind" to the last checkpoint and go on with the data behind the step, as
            Chowdhery et al. 2022 (arXiv:2204.02311, section 5.1) did.
        non_finite_limit: skips in a row, or rewinds in all, after which the run stops all the same.
    """

    def __init__(
        self,
        *,
        steps: int,
        evaluate_every: int = 0,
        evaluate_tokens: int | None = None,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 2,
        keep_best: int = 0,
        log_every: int = 10,
        tensorboard: bool = False,
        accumulate: int = 1,
        evaluate_weights: Weights = "last",
        non_finite: Literal["stop", "skip", "rewind"] = "stop",
        non_finite_limit: int = 10,
    ) -> None:
        for name, value, least in (
            ("steps", steps, 1),
            ("evaluate_every", evaluate_every, 0),
            ("checkpoint_every", checkpoint_every, 0),
            ("keep_checkpoints", keep_checkpoints, 1),
            ("keep_best", keep_best, 0),
            ("log_every", log_every, 1),
            ("accumulate", accumulate, 1),
            ("non_finite_limit", non_finite_limit, 1),
        ):
            require(self, name, value, whole(value, least), f"an integer of at least {least}")
        limited = evaluate_tokens is None or whole(evaluate_tokens, 1)
        require(self, "evaluate_tokens", evaluate_tokens, limited, "an integer of at least 1, or None")
        for name, choice, choices in (
            ("evaluate_weights", evaluate_weights, ("last", "ema")),
            ("non_finite", non_finite, ("stop", "skip", "rewind")),
        ):
            require(self, name, choice, choice in choices, f"one of {', '.join(map(repr, choices))}")
        self.accumulate, self.evaluate_weights = accumulate, evaluate_weights
        self.non_finite, self.non_finite_limit = non_finite, non_finite_limit
        self.steps, self.log_every, self.tensorboard = steps, log_every, tensorboard
        self.evaluate_every, self.evaluate_tokens = evaluate_every, evaluate_tokens
        self.checkpoint_every, self.keep_checkpoints, self.keep_best = checkpoint_every, keep_checkpoints, keep_best


class Experiment:
    """What a configuration describes.

    Everything but the model is constructed at once; `build` constructs the model without computing anything.

    Args:
        corpus: class of the corpus.
        model: class of the model, called with `vocabulary_size` and `rngs`.
        data: class of the order in which training reads the corpus.
        optimizer: class of the optimizer.
        training: class of the training settings.
        protocols: classes of evaluation protocols by name; the first one is used while training.
        seed: of initial values, data order and dropout.
    """

    def __init__(
        self,
        *,
        corpus: Callable[[], Corpus],
        model: Callable[..., Decoder],
        data: Callable[[], Batches],
        optimizer: Callable[[], Optimizer],
        training: Callable[[], Training],
        protocols: Mapping[str, Callable[[], Protocol]],
        seed: int = 0,
    ) -> None:
        require(self, "seed", seed, whole(seed, 0) and seed < 2**32, "an integer of at least 0 and below 2**32")
        require(self, "protocols", dict(protocols), len(protocols) > 0, "a mapping with one protocol at least")
        self.seed = seed
        self.corpus, self.data, self.optimizer, self.training = corpus(), data(), optimizer(), training()
        self.protocols = {name: protocol() for name, protocol in protocols.items()}
        self.optimizer = self.optimizer.in_steps(self._steps_per)
        self._make_model = functools.partial(model, vocabulary_size=self.corpus.vocabulary.size)

    @functools.cached_property
    def initial(self) -> Callable[[], tuple[Any, TrainState]]:
        """Gives the model's graph and the state at step 0; compiled."""
        initial = initial_state(
            self._make_model, self.optimizer,
            total_steps=self.training.steps, seed=self.seed, batch_size=self.data.batch_size,
        )  # fmt: skip
        # Placed as a restored state is, so that both run the same compiled step.
        return jax.jit(initial, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    @functools.cached_property
    def _abstract(self) -> tuple[Any, TrainState]:
        result: tuple[Any, TrainState] = jax.eval_shape(self.initial)
        return result

    @property
    def graph(self) -> Any:
        """The model's graph definition, for `nnx.merge` with parameters and buffers."""
        return self._abstract[0]

    @property
    def abstract_state(self) -> TrainState:
        """The shapes and dtypes of the training state."""
        return self._abstract[1]

    @property
    def protocol(self) -> Protocol:
        """The evaluation protocol while training."""
        return next(iter(self.protocols.values()))

    def build(self) -> None:
        """Constructs model and optimizer and checks the protocols against the model; raises what these raise."""
        model = self.model(self.abstract_state)
        rows, accumulate = self.data.batch_size, self.training.accumulate
        if rows % accumulate:
            raise UserError(
                f"Training.accumulate is {accumulate}, which does not divide the {rows} rows of a batch: "
                f"set it to a divisor, or change {type(self.data).__name__}.batch_size"
            )
        if self.training.evaluate_weights == "ema":
            self.averaged(self.abstract_state)
        if self.abstract_state.memory is not None and not self.data.carries:
            raise UserError(
                f"the model has a memory, which would stay empty, since {type(self.data).__name__} starts rows anew: "
                "set Experiment.data = @Streams (include data/streams.gin) or Decoder.memory = None"
            )
        if self.abstract_state.memory is not None:
            model.stack.layers[0].memory.check(self.data.segment)
        for protocol in self.protocols.values():
            protocol.check(model)

    def averaged(self, state: TrainState) -> TrainState:
        """The state with the moving average in place of the parameters.

        Raises:
            UserError: the run keeps none.
        """
        if state.average is None:
            raise UserError(
                "the run keeps no moving average of its parameters: set Optimizer.ema_decay and train, "
                "or evaluate the weights 'last'"
            )
        return dataclasses.replace(state, parameters=state.average)

    def _steps_per(self, unit: str) -> float:
        """The steps of one token or epoch."""
        if unit == "tokens":
            return 1 / (self.data.batch_size * self.data.segment)
        documents = self.corpus.document_starts("train") if self.data.documents else None
        return self.data.epoch_length(self.corpus.tokens("train"), documents)

    def model(self, values: Any) -> Decoder:
        """The model with the parameters and buffers of `values`, such as a `TrainState`; shares its arrays."""
        model: Decoder = nnx.merge(self.graph, values.parameters, values.buffers)
        return model
