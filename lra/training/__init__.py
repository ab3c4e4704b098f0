"""Training: state, step, optimizers, loop, checkpoints, and the root of a configuration."""

from lra.training.checkpoints import Checkpoints
from lra.training.compiled import Step
from lra.training.experiment import Experiment, Training
from lra.training.loop import Outcome, load_model, train
from lra.training.optimizers import SGD, Adafactor, Adagrad, Adam, AdamW, Group, Lion, Optimizer, Update
from lra.training.schedules import Constant, Cosine, Linear, Rsqrt, Schedule
from lra.training.state import TrainState
from lra.training.step import initial_state, make_step

__all__ = [
    "SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Checkpoints", "Constant", "Cosine", "Experiment", "Group",
    "Linear", "Lion", "Optimizer", "Outcome", "Rsqrt", "Schedule", "Step", "TrainState", "Training", "Update",
    "initial_state", "load_model", "make_step", "train",
]  # fmt: skip
