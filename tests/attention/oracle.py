"""An independent oracle: dense softmax attention and its gradients by hand, NumPy, float64."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class TermArrays:
    """What the oracle knows of a term: rotation frequencies, biases by distance, values by distance."""

    kind: str = "none"
    frequencies: np.ndarray | None = None  # [pairs]
    slopes: np.ndarray | None = None  # [H]
    scores: np.ndarray | None = None  # [H, R], by min(|distance|, R - 1)
    values: np.ndarray | None = None  # [R, E]

    def heads(self, first, last):
        """What it knows of these heads."""
        cut = lambda x: None if x is None else x[first:last]  # noqa: E731
        return dataclasses.replace(self, slopes=cut(self.slopes), scores=cut(self.scores))


def rotate(x, position, frequencies, sign=1.0):
    half = len(frequencies)
    angle = sign * position[..., None, None] * frequencies
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def combined(q, k, v, sets, combination, scale, term, d_out, q_pos, k_pos):
    """`attend` by several sets of keys, booleans or soft weights [B,H,T,S] each: one softmax over their union, one in
    which a key counts once for each set that holds it ("rounds"), or the mean of one for each set that is not empty."""
    arrays = q, k, v
    if combination == "union":
        return attend(*arrays, np.max(sets, axis=0), scale, term, d_out, q_pos, k_pos)
    if combination == "rounds":
        return attend(*arrays, np.sum(sets, axis=0), scale, term, d_out, q_pos, k_pos)
    count = np.sum([each.any(-1) for each in sets], axis=0).swapaxes(1, 2)[..., None]  # [B, T, H, 1]
    share = 1 / np.maximum(count, 1)
    parts = [attend(*arrays, each, scale, term, d_out * share, q_pos, k_pos) for each in sets]
    gradients = {name: sum(part[1][name] for part in parts) for name in parts[0][1]}
    return sum(part[0] for part in parts) * share, gradients


def attend(q, k, v, allowed, scale, term, d_out, q_pos, k_pos):
    """Output and the gradients of sum(out * d_out) by q, k, v and the term's arrays.

    q [B,T,H,D], k [B,S,H,D], v [B,S,H,E], positions [B or 1,T] and [B or 1,S]; allowed [B,H,T,S], booleans or how much
    a key counts. Entries that nobody may read count as 0.
    """
    times, allowed = allowed.astype(np.float64), allowed > 0
    q = np.where(allowed.any((1, 3))[:, :, None, None], q.astype(np.float64), 0)
    read = allowed.any((1, 2))[:, :, None, None]
    k, v = np.where(read, k.astype(np.float64), 0), np.where(read, v.astype(np.float64), 0)
    d_out = d_out.astype(np.float64)
    away = np.abs(q_pos[:, :, None] - k_pos[:, None, :])  # [B or 1, T, S]
    away = np.broadcast_to(away, (len(q), *away.shape[1:]))
    if term.frequencies is not None:
        q, k = rotate(q, q_pos, term.frequencies), rotate(k, k_pos, term.frequencies)
    s = np.einsum("bthd,bshd->bhts", q, k) * scale
    if term.slopes is not None:
        s = s - term.slopes[:, None, None] * away[:, None]
    if term.scores is not None:
        near = np.minimum(away, term.scores.shape[1] - 1)
        s = s + np.moveaxis(term.scores[:, near], 0, 1)
    s = np.where(allowed, s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top) * times
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total > 0, total, 1)
    out = np.einsum("bhts,bshe->bthe", p, v)
    dp = np.einsum("bthe,bshe->bhts", d_out, v)
    grads = {}
    if term.values is not None:
        near_v = np.minimum(away, len(term.values) - 1)
        out = out + np.einsum("bhts,btse->bthe", p, term.values[near_v])
        dp = dp + np.einsum("bthe,btse->bhts", d_out, term.values[near_v])
        grads["values"] = np.zeros_like(term.values)
        np.add.at(grads["values"], near_v, np.einsum("bhts,bthe->btse", p, d_out))
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    if term.slopes is not None:
        grads["slopes"] = -np.einsum("bhts,bts->h", ds, away)
    if term.scores is not None:
        grads["scores"] = np.zeros_like(term.scores)
        for h in range(len(term.scores)):
            np.add.at(grads["scores"][h], near, ds[:, h])
    dq, dk = np.einsum("bhts,bshd->bthd", ds, k) * scale, np.einsum("bhts,bthd->bshd", ds, q) * scale
    if term.frequencies is not None:
        dq, dk = rotate(dq, q_pos, term.frequencies, -1.0), rotate(dk, k_pos, term.frequencies, -1.0)
    return out, {"q": dq, "k": dk, "v": np.einsum("bhts,bthe->bshe", p, d_out), **grads}


def error(got, want, floor=0.0):
    """Root mean square of the difference, relative to that of what was wanted, or to `floor` if that is larger.

    Gradients cancel where a query reads next to nothing; their rounding does not.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    norm = max(np.sqrt(np.mean(want**2)), floor)
    return np.sqrt(np.mean((got - want) ** 2)) / (norm if norm > 0 else 1.0)
