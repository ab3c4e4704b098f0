"""lucidrains/compressive-transformer-pytorch: four segments with memory, the reconstruction loss, and gradients.

The adapter holds its residual layers: memory of normalised inputs, GRU gates, memories moved one layer down, a table
by distance of which as many rows are used as there are keys so far, the last one for distance 0, and a mean squared
error that is averaged over layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra.attention import Attention, CompressiveMemory, Full, Site, Visibility
from lra.attention.compressive import content
from lra.attention.memory import Attending
from lra.attention.terms import Term, distances
from tests.attention.parity.fixtures import close, close_gradient, load

pytestmark = pytest.mark.usefixtures("quick_compilation")
HEADS, WIDTH, LENGTH, SLOTS, RATE, SEGMENTS = 2, 16, 8, 6, 4, 4
REMEMBERING = {"compressive_lucidrains": (0, 1), "compressive_lucidrains_gru": (1, 2)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(Term):
    """A vector a distance and head [H, R, D], that of distance 0 in the row `last`."""

    rows: jax.Array
    last: jax.Array

    def score(self, q, q_pos, k_pos, scale):
        vectors = self.rows[:, self.last - jnp.maximum(distances(q_pos, k_pos), 0)]
        vectors = vectors.reshape(HEADS, *vectors.shape[-3:])  # positions are shared by all rows
        return jnp.einsum("brhqd,hqkd->brhqk", q, vectors, precision="highest") * scale


def linear(weights, name, x):
    bias = weights.get(f"{name}.bias", 0)
    return jnp.dot(x, weights[f"{name}.weight"].T, precision="highest") + bias


def norm(weights, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def joined(weights, name, y, x):
    """The sum, or torch's GRU cell with input y and state x where the program has gates."""
    if f"{name}.gru.weight_ih" not in weights:
        return x + y
    sides = []
    for a, kind in ((y, "ih"), (x, "hh")):
        kernel, bias = weights[f"{name}.gru.weight_{kind}"], weights[f"{name}.gru.bias_{kind}"]
        sides.append(jnp.split(jnp.dot(a, kernel.T, precision="highest") + bias, 3, axis=-1))
    (ri, zi, ni), (rh, zh, nh) = sides
    z = jax.nn.sigmoid(zi + zh)
    return (1 - z) * jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh) + z * x


def parts(weights, n):
    """The attention and the memory of layer n with these values, which may be traced."""
    name = f"attn_layers.{n}.fn.fn"
    layer = Attention(bias=True, pattern=Full, site=Site(num_heads=HEADS, head_dim=8, width=WIDTH), rngs=nnx.Rngs(0))
    keys, values = jnp.split(weights[f"{name}.to_kv.weight"], 2)
    kernels = {"query": weights[f"{name}.to_q.weight"], "key": keys, "value": values}
    for own, kernel in (kernels | {"output": weights[f"{name}.to_out.weight"]}).items():
        getattr(layer, own).kernel[...] = kernel.T
    layer.output.bias[...] = weights[f"{name}.to_out.bias"]
    memory = CompressiveMemory(length=LENGTH, compressed_length=SLOTS, rate=RATE, width=WIDTH, rngs=nnx.Rngs(0))
    kernel = weights[f"{name}.compress_mem_fn.conv.weight"]
    memory.convolution.kernel[...] = kernel.transpose(2, 1, 0).reshape(RATE * WIDTH, WIDTH)
    memory.convolution.bias[...] = weights[f"{name}.compress_mem_fn.conv.bias"]
    return layer, memory


@functools.partial(jax.jit, static_argnames="case")
def segment(case, weights, tokens, states):
    """Logits, states and reconstruction loss of a segment."""
    remembering, x = REMEMBERING[case], weights["token_emb.weight"][tokens]
    states, losses = dict(states), []
    length, state = tokens.shape[1], states[remembering[0]]
    held = state.memory.valid[0].sum(dtype=jnp.int32) + state.compressed.valid[0].sum(dtype=jnp.int32)
    term = Table(weights["pos_emb"], held + LENGTH - 1)
    for n in range(len(remembering) + remembering[0]):
        name = f"attn_layers.{n}"
        (layer, memory), h = parts(weights, n), norm(weights, f"{name}.fn.norm", x)
        inputs, seen = h, Visibility()
        if n in remembering:
            past = memory.read(states[n])
            inputs, seen = jnp.concatenate([past.inputs, h], axis=1), seen.after(past.filled, length)
        out = layer(inputs, length, visibility=seen, terms=(term,)).out
        x = joined(weights, name, out, x)
        if n in remembering and length % RATE == 0:
            _, old = states[n].memory.push(dataclasses.replace(states[n].memory, hidden=h))
            states[n], loss, _ = memory.update(states[n], h, None, Attending(layer.project, None), True)
            assert set(loss) == {"attention_reconstruction"}
            q, _, _ = layer.project(h)
            both = old, memory.compress(old)
            read = [content(q, *layer.project(s.hidden)[1:], s.valid) for s in both]
            losses.append(((read[0] - read[1]) ** 2).mean())
        name = f"ff_layers.{n}"
        wide = jax.nn.gelu(linear(weights, f"{name}.fn.fn.w1", norm(weights, f"{name}.fn.norm", x)), approximate=False)
        x = joined(weights, name, linear(weights, f"{name}.fn.fn.w2", wide), x)
    return linear(weights, "to_logits.1", x), states, sum(losses) / len(remembering)


def rolled(case, states):
    """Enhanced recurrence: each layer reads the memory of the one above, and the last that of the first."""
    if not case.endswith("gru"):
        return states
    return dict(zip(states, [*list(states.values())[1:], next(iter(states.values()))], strict=True))


@pytest.mark.parametrize(
    "case", ["compressive_lucidrains", pytest.param("compressive_lucidrains_gru", marks=pytest.mark.slow)]
)
def test_segments_loss_and_gradients(case):
    want = load(case)
    weights = {name.removeprefix("weights/"): jnp.asarray(x) for name, x in want.items() if name.startswith("weights/")}
    data = jnp.asarray(want["inputs/data"])
    states = {n: parts(weights, n)[1].initial(len(data), True) for n in REMEMBERING[case]}
    for i in range(SEGMENTS):
        tokens = data[:, LENGTH * i : LENGTH * (i + 1)]
        before = rolled(case, states)
        logits, states, loss = segment(case, weights, tokens, before)
        close(logits, want["outputs/logits"][i])
        close(loss, want[f"outputs/aux_loss/seg{i}"][0])
        for j, state in enumerate(states.values()):
            for name, slots in (("mem", state.memory), ("cmem", state.compressed)):
                held = want[f"outputs/{name}/seg{i}"][j]
                np.testing.assert_array_equal(slots.valid.sum(1), held.shape[1])
                if held.size:
                    close(slots.hidden[:, slots.length - held.shape[1] :], held)
    short, _, _ = segment(case, weights, jnp.asarray(want["inputs/short_segment"]), rolled(case, states))
    close(short, want["outputs/short/logits"])

    def both(weights):
        logits, _, loss = segment(case, weights, tokens, before)
        targets = data[:, LENGTH * (SEGMENTS - 1) + 1 :]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean(), loss

    @jax.jit
    def pulled(weights):
        _, pull = jax.vjp(both, weights)
        return pull((1.0, 0.0))[0], pull((0.0, 1.0))[0]

    gradient, auxiliary = pulled(weights)
    for name in want:
        kind, _, weight = name.partition("/")
        if kind == "grads":
            close_gradient(gradient[weight], want[name])
        elif kind == "grads_aux":
            close_gradient(auxiliary[weight], want[name])
            np.testing.assert_array_equal(gradient[weight], 0)
