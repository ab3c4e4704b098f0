"""Where values stop being finite: the first tensor of a step that is not, found by doing the step again.

The compiled step hands back the state from before it (see `make_step`), so that nothing needs to be kept for this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lra
from lra.data import Batch
from lra.models import Decoder
from lra.models.parameters import named
from lra.training.compiled import arrays, padded
from lra.training.experiment import Experiment
from lra.training.gradients import make_gradients
from lra.training.state import TrainState


class NotFiniteError(Exception):
    """A step was not finite, and the run is to go on from an earlier checkpoint.

    Args:
        step: which one.
        position: of the data behind that step.
        rewinds: how many there are, with this one.
        sentence: what was not finite.
    """

    def __init__(self, step: int, position: dict[str, Any], rewinds: int, sentence: str) -> None:
        super().__init__(sentence)
        self.step, self.position, self.rewinds = step, position, rewinds


def name(metrics: Mapping[str, Any]) -> str:
    """The first metric that is not finite; the loss with its auxiliary ones where these are at fault."""
    watched = ("loss_nats", *(name for name in metrics if name.startswith("loss/")), "gradient_norm", "parameter_norm")
    return next(name for name in watched if not np.isfinite(metrics[name]))


def explain(experiment: Experiment, step: int, state: TrainState, batch: Batch, guarded: bool) -> str:
    """Half a sentence on the first tensor of a step that is not finite.

    Args:
        experiment: the run's configuration.
        step: which one.
        state: from before the step, but for its counters; or from after it, where `guarded` is False.
        batch: of the step.
        guarded: whether the step has left the state alone, since its loss or gradients were not finite.
    """
    if guarded:
        before = dataclasses.replace(state, step=jnp.asarray(step - 1, jnp.int32))
        accumulate = experiment.training.accumulate
        found = first(experiment.model(state), before, batch, seed=experiment.seed, accumulate=accumulate)
    else:
        found = leaf(state)
    return f"the first tensor that is not finite is {found}" if found else "done again, all its tensors are finite"


def first(model: Decoder, state: TrainState, batch: Batch, *, seed: int, accumulate: int = 1) -> str | None:
    """Names the first tensor of a step that is not finite; None if all are.

    The state's own arrays come first, then every operation of the forward and the backward pass, one after the other.

    Args:
        model: of the run, with any values; its stack is changed.
        state: before the step.
        batch: of the step.
        seed: of the run.
        accumulate: micro-batches of the batch.
    """
    if name := leaf(state):
        return name
    model.stack.scan = False  # storage is the same, and each layer then has a name of its own
    graph, *_ = nnx.split(model, ...)
    gradients = make_gradients(graph, seed=seed, accumulate=accumulate)
    masks, inputs = padded(batch), (state, arrays(batch))
    closed = jax.make_jaxpr(lambda state, batch: gradients(state, batch, masks))(*inputs)
    return _walk(closed.jaxpr, closed.consts, jax.tree.leaves(inputs))


def leaf(tree: Any) -> str | None:
    """Name of the first leaf that is not finite, such as "parameters.embedding.embedding"."""
    return next((name for name, x in named(tree).items() if not _finite(x)), None)


def rewound(experiment: Experiment, state: TrainState, rewinds: int) -> TrainState:
    """A restored state for other data: its memory, which would be of other text, starts anew."""
    rows = jnp.ones(experiment.data.batch_size, bool)
    anew = experiment.model(state).reset_memory(state.memory, rows)
    empty = jax.tree.map(lambda x, before: jax.device_put(x, before.sharding), anew, state.memory)
    faults = state.faults
    count = jnp.full_like(faults.rewinds, rewinds, device=faults.rewinds.sharding)
    return dataclasses.replace(state, memory=empty, faults=dataclasses.replace(faults, rewinds=count))


def _walk(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], scope: tuple[str, ...] = ()) -> str | None:
    """Evaluates one equation after the other; describes the first that makes what is not finite of what is.

    Compiling the whole with a check for every equation takes longer than this does.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, core.Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        inputs = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        result = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        outputs = list(result) if eqn.primitive.multiple_results else [result]
        if not all(map(_finite, outputs)) and all(map(_finite, inputs)):
            inner = (*scope, str(eqn.source_info.name_stack))
            return _inside(eqn, inputs, inner) or _describe(eqn, inner)
        env.update(zip(eqn.outvars, outputs, strict=True))
        for v in {v for v in eqn.invars if not isinstance(v, core.Literal) and last_use[v] == i}:
            del env[v]
    return None


def _inside(eqn: Any, inputs: Sequence[Any], scope: tuple[str, ...]) -> str | None:
    """The same within what the equation calls."""
    if eqn.primitive.name == "scan":
        return _inside_scan(eqn.params, inputs, scope)
    for value in eqn.params.values():
        closed = isinstance(value, core.ClosedJaxpr)
        inner = value.jaxpr if closed else value
        if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(inputs):
            return _walk(inner, value.consts if closed else [], inputs, scope)
    return None


def _inside_scan(params: dict[str, Any], inputs: Sequence[Any], scope: tuple[str, ...]) -> str | None:
    """The same within the first turn of a loop that is not finite."""
    body, ahead = params["jaxpr"], params["num_consts"] + params["num_carry"]
    consts, carry, rows = inputs[: params["num_consts"]], inputs[params["num_consts"] : ahead], inputs[ahead:]
    run = jax.jit(core.jaxpr_as_fun(body))
    turns = range(params["length"])
    for i in reversed(turns) if params["reverse"] else turns:
        values = [*consts, *carry, *(x[i] for x in rows)]
        outputs = run(*values)
        if not all(map(_finite, outputs)):
            return _walk(body.jaxpr, body.consts, values, scope)
        carry = outputs[: len(carry)]
    return None


def _describe(eqn: Any, scope: tuple[str, ...]) -> str:
    stack = "/".join(scope)
    way = "backward" if "transpose" in stack else "forward"
    part = re.search(r"(layer\d*s?)(?:.*?(attention|feed_forward))?|head", stack)
    made = ", ".join(v.aval.str_short() for v in eqn.outvars)
    place = _place(eqn)
    return (
        f"the output {made} of {eqn.primitive.name} in the {way} pass"
        + (f" of {'/'.join(filter(None, part.groups())) or part[0]}" if part else "")
        + (f" ({place})" if place else "")
    )


def _place(eqn: Any) -> str | None:
    """The innermost line of lra's own code that the equation comes from."""
    root = Path(lra.__file__).parent
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = Path(frame.file_name)
        if path.is_relative_to(root):
            return f"lra/{path.relative_to(root).as_posix()}:{frame.line_num}"
    return None


def _finite(x: Any) -> bool:
    """On the host, where nothing is compiled for it."""
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(np.isfinite(np.asarray(x)).all())
