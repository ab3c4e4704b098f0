"""Routing attention: google-research's (derived from its code) and lucidrains' routing-transformer 1.6.1."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra.attention import Term, Visibility, block_local, clustering
from lra.attention.routing import attend as attend_members
from lra.attention.routing import choose
from lra.attention.terms import RotaryTerm, distances
from tests.attention.parity.fixtures import close, close_gradient, gradients, load

WINDOW, AUX_WEIGHT, BETA = 8, 100.0, 1e-4
pytestmark = pytest.mark.usefixtures("quick_compilation")


def rows(x):
    """[B, H, T, D] to [B, T, H, D]."""
    return jnp.asarray(x).swapaxes(1, 2)


def check_members(members, want, variant):
    np.testing.assert_array_equal(members.queries, np.sort(want[f"outputs/{variant}/q_indices"], -1))
    np.testing.assert_array_equal(members.keys, np.sort(want[f"outputs/{variant}/k_indices"], -1))


def check_gradients(want, variant, got):
    for name, gradient in got.items():
        close_gradient(gradient, want[f"grads/{variant}/{name}"])


def damped(out, count, epsilon):
    """The programs divide by the number of a token's clusters and a little more."""
    count = count.astype(out.dtype)
    return out * (count / (count + epsilon))[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankTable(Term):
    """Scores and values by the rank inside the cluster, which blocks of one cluster hold in order."""

    keys: jax.Array  # [R, D]
    values: jax.Array  # [R, E]

    def rows(self, table, like):
        n = jnp.arange(WINDOW, dtype=jnp.int32)
        return table[jnp.clip(n - n[:, None], -5, 5) + 5].astype(like.dtype)

    def score(self, q, q_pos, k_pos, scale):
        return jnp.einsum("brhqd,qkd->brhqk", q, self.rows(self.keys, q), precision="highest") * scale

    def value(self, weights, q_pos, k_pos):
        return jnp.einsum("brhqk,qkd->brhqd", weights, self.rows(self.values, weights), precision="highest")


@pytest.mark.parametrize("variant", ["causal_shared", "causal_shared_relative", "bidir"])
def test_google(variant):
    want = load("routing_google")
    causal = variant != "bidir"
    q, k, v, cotangent = (rows(want[f"inputs/{x}"]) for x in ("q", "k", "v", "cotangent"))
    means = jnp.asarray(want["weights/means"])
    tables = [jnp.asarray(want[f"weights/relative_{x}"]) for x in ("keys", "values")]
    normal = clustering.normalise
    members = choose(normal(q), normal(q if causal else k), centroids=means, window=WINDOW, causal=causal)
    check_members(members, want, variant)

    def auxiliary(q, k):
        return BETA * (
            clustering.commitment(q, means, members.q_cluster) + clustering.commitment(k, means, members.k_cluster)
        )

    def attend(q, k, v, *tables):
        q, k = normal(q), normal(q if causal else k)
        terms = (RankTable(*tables),) if variant.endswith("relative") else ()
        out, count = attend_members(q, k, v, members, causal=causal, scale=1.0, terms=terms)
        return damped(out, count, 1e-2), auxiliary(q, k)

    (out, loss), grads = gradients(attend, (q, k, v, *tables), (cotangent, jnp.float32(AUX_WEIGHT)))
    close(out, rows(want[f"outputs/{variant}/out"]))
    close(loss, want[f"outputs/{variant}/aux_loss"][0])
    got = dict(zip("qkv", (rows(g) for g in grads[:3]), strict=True))
    if causal:
        del got["k"]
    if variant.endswith("relative"):
        got |= {"relative_keys": grads[3], "relative_values": grads[4]}
    check_gradients(want, variant, got)
    if variant == "causal_shared":
        check_update(want, normal(q), members)


def check_update(want, x, members):
    sums, counts = clustering.totals(x, members.q_cluster, 4)
    count = clustering.averaged(jnp.asarray(want["weights/ema_count"]), counts, 0.999)
    total = clustering.averaged(jnp.asarray(want["weights/ema_means"]), sums, 0.999)
    close(count, want["outputs/ema/count"])
    close(total, want["outputs/ema/means_sum"])
    close(clustering.centroids(total, count), want["outputs/ema/new_centroids"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NotItself(Term):
    """A token reads itself where it may read nothing else."""

    def score(self, q, q_pos, k_pos, scale):
        return jnp.where(distances(q_pos, k_pos) == 0, -5e4, 0.0)


def unit(x):
    return x / jnp.maximum(jnp.sqrt((x**2).sum(-1, keepdims=True)), 1e-12)


def lucidrains(q, k, v, means, *, causal, shared, slots=(), valid=None):
    """Attention, the commitment loss, and the members; `slots` are keys and values [H, K, M, D] of the clusters."""
    k = q if shared else k
    visibility = Visibility.tokens(valid=valid)
    members = choose(unit(q), unit(k), centroids=means, window=WINDOW, causal=shared)  # padding takes places
    both = [clustering.commitment(unit(q), means, members.q_cluster)]
    both += [] if shared else [clustering.commitment(unit(k), means, members.k_cluster)]
    loss = BETA * sum(both) / len(both)
    k = unit(k) if shared else k
    chosen, (batch, length) = members, q.shape[:2]
    if slots and slots[0].shape[2]:
        heads, clusters, count, width = slots[0].shape

        def behind(slots, x):
            slots = slots.reshape(1, heads, -1, width).swapaxes(1, 2)
            return jnp.concatenate([jnp.broadcast_to(slots, (batch, *slots.shape[1:])), x], axis=1)

        k, v = (behind(*each) for each in zip(slots, (k, v), strict=True))
        first = jnp.arange(clusters * count, dtype=jnp.int32).reshape(clusters, count)
        first = jnp.broadcast_to(first, (*members.keys.shape[:3], count))
        chosen = dataclasses.replace(chosen, keys=jnp.concatenate([first, members.keys + clusters * count], -1))
        place = jnp.arange(length, dtype=jnp.int32)[None]
        visibility = Visibility(
            q_position=place, k_position=jnp.concatenate([jnp.full((1, clusters * count), -1, jnp.int32), place], 1)
        )
    terms = (NotItself(),) if shared else ()
    out, count = attend_members(q, k, v, chosen, causal=causal, visibility=visibility, terms=terms)
    return damped(out, count, 1e-5), loss, members


LUCIDRAINS = {  # causal, shared
    "causal_shared": (True, True), "causal_shared_mem": (True, True), "causal_separate": (True, False),
    "bidir": (False, False), "bidir_masked": (False, False),
}  # fmt: skip


@pytest.mark.parametrize("variant", LUCIDRAINS)
def test_lucidrains(variant):
    want = load("routing_lucidrains")
    causal, shared = LUCIDRAINS[variant]
    q, k, v, cotangent = (rows(want[f"inputs/{x}"]) for x in ("q", "k", "v", "cotangent"))
    means = jnp.asarray(want["weights/kmeans.means"])
    slots = [jnp.asarray(want[n]) for x in ("key", "value") if (n := f"weights/{variant}/mem_{x}") in want]
    valid = jnp.asarray(want["inputs/key_mask"]) if variant == "bidir_masked" else None
    options = {"causal": causal, "shared": shared, "valid": valid}
    check_members(lucidrains(q, k, v, means, slots=slots, **options)[2], want, variant)

    def attend(q, k, v, *slots):
        return lucidrains(q, k, v, means, slots=slots, **options)[:2]

    (out, loss), grads = gradients(attend, (q, k, v, *slots), (cotangent, jnp.float32(AUX_WEIGHT)))
    close(loss, want[f"outputs/{variant}/aux_loss"][0])
    wanted = rows(want[f"outputs/{variant}/out"])
    if valid is not None:  # padding there reads the mean of its clusters' values, and passes them a gradient
        close(jnp.where(valid[..., None, None], out, 0), jnp.where(valid[..., None, None], wanted, 0))
        return
    close(out, wanted)
    got = dict(zip("qkv", (rows(g) for g in grads[:3]), strict=True))
    if shared:
        del got["k"]
    check_gradients(want, variant, got | dict(zip(("mem_key", "mem_value"), grads[3:], strict=False)))


def layer(x, w, means, table):
    """Local heads of a window and the one before, then routing heads whose q and v are rotated."""
    dim = table.shape[-1]

    def project(name, x):
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", jnp.zeros(()))
        return y.reshape(*x.shape[:2], -1, dim)

    def rotated(x):  # in neighbouring pairs
        sin, cos = (jnp.repeat(half, 2, axis=-1)[:, None] for half in jnp.split(table, 2, axis=-1))
        return x * cos + jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin

    local = jnp.split(project("local_to_qkv", x), 3, axis=2)
    turning = RotaryTerm(10_000.0 ** -(jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2)))
    near = block_local(*local, block=WINDOW, look_back=1, terms=(turning,))
    q, v = rotated(project("to_q", x)), rotated(project("to_v", x))
    far, loss, _ = lucidrains(q, q, v, means, causal=True, shared=True)
    joined = jnp.concatenate([near, far], axis=2)
    return joined.reshape(*x.shape[:2], -1) @ w["to_out.weight"].T, loss


def norm(x, w):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def part_of(weights, prefix):
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def test_lucidrains_language_model():
    want = load("routing_lucidrains_lm")
    weights = {n: jnp.asarray(x) for n, x in part_of(want, "weights/").items()}
    inputs, targets = want["inputs/data"][:, :-1], want["inputs/data"][:, 1:]

    def model(weights):
        x, auxiliary = weights["token_emb.weight"][inputs], 0.0
        for n in range(2):
            w = part_of(weights, f"routing_transformer.layers.layers.{n}.")
            attention, forward = part_of(w, "0.fn."), part_of(w, "1.fn.fn.")
            means = attention["global_attn.kmeans.means"]
            y, loss = layer(norm(x, part_of(w, "0.norm.")), attention, means, weights["sinu_pos_emb.emb"])
            x, auxiliary = x + y, auxiliary + loss
            y = norm(x, part_of(w, "1.norm.")) @ forward["w1.weight"].T + forward["w1.bias"]
            x = x + jax.nn.gelu(y, approximate=False) @ forward["w2.weight"].T + forward["w2.bias"]
        logits = norm(x, part_of(weights, "norm.")) @ weights["out.weight"].T + weights["out.bias"]
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None].astype(np.int32), -1).mean()
        return nats + auxiliary, (logits, nats, auxiliary)

    with jax.default_matmul_precision("highest"):
        grads, (logits, nats, auxiliary) = jax.jit(jax.grad(model, has_aux=True))(weights)
    close(logits, want["outputs/logits"])
    close(nats, want["outputs/lm_loss"][0])
    close(auxiliary, want["outputs/aux_loss"][0])
    stored = part_of(want, "grads/")
    assert len(stored) > 5
    for name, gradient in stored.items():
        close_gradient(grads[name], gradient)
