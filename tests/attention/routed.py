"""Who reads whom by routing attention and by windows over sorted tokens, by loops over their definitions."""

import numpy as np


def normalised(x):
    """Layer norm without gain, float64."""
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def clusters(x, centroids, window, valid=None):
    """The members of each cluster, lists by [batch][head][cluster], of tokens [B, L, H, D] and centroids [H, K, D]."""
    scores = np.einsum("blhd,hkd->bhkl", x.astype(np.float64), centroids.astype(np.float64))
    valid = np.ones(x.shape[:2], bool) if valid is None else valid
    return [
        [
            [sorted(sorted(np.flatnonzero(valid[b]), key=lambda t: -row[t])[:window]) for row in rows]
            for rows in scores[b]
        ]
        for b in range(len(x))
    ]


def attend(q, k, v, q_members, k_members, causal, scale):
    """The mean over clusters of a softmax inside each; T = S."""
    total, count = np.zeros(v.shape), np.zeros(v.shape[:3])
    for b, of_heads in enumerate(q_members):
        for h, of_clusters in enumerate(of_heads):
            for asked, known in zip(of_clusters, k_members[b][h], strict=True):
                for i in asked:
                    read = [j for j in known if j <= i or not causal]
                    if not read:
                        continue
                    logits = scale * k[b, read, h] @ q[b, i, h]
                    weights = np.exp(logits - logits.max())
                    total[b, i, h] += weights / weights.sum() @ v[b, read, h]
                    count[b, i, h] += 1
    return total / np.maximum(count, 1)[..., None], count


def newest(labels, window, queries, valid=None, segment=None):
    """The newest keys of a query's own label in any round: booleans [B, H, T, S] of labels [B, S, H, rounds]."""
    batch, size, heads, rounds = labels.shape
    valid = np.ones((batch, size), bool) if valid is None else valid
    segment = np.zeros((batch, size), int) if segment is None else segment
    read = np.zeros((batch, heads, size, size), bool)
    for b, h, r in np.ndindex(batch, heads, rounds):
        for i in np.flatnonzero(valid[b]):
            own = [
                j for j in range(i + 1)
                if valid[b, j] and labels[b, j, h, r] == labels[b, i, h, r] and segment[b, j] == segment[b, i]
            ]  # fmt: skip
            read[b, h, i, own[-window:]] = True
    return read[:, :, size - queries :]


def in_one_cluster(members, causal, queries):
    """Figures of routing, from what was selected."""
    asked, known = np.asarray(members.queries)[0], np.asarray(members.keys)[0]
    size = np.asarray(members.k_cluster).shape[1]
    read = np.zeros((len(asked), queries, size), bool)
    for h in range(len(asked)):
        for own, other in zip(asked[h], known[h], strict=True):
            for i in own[own >= 0]:
                for j in other:
                    read[h, i, j] |= j <= i + size - queries or not causal
    return read
