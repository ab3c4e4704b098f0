"""How much of full attention's heaviest keys a pattern reads is counted as by loops."""

import runpy
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[1] / "scripts" / "heaviest_keys.py"


def test_shares_of_keys_and_of_weight(rng):
    heads, length = 2, 90
    weights = rng.random((heads, length, length))
    read = rng.random((heads, length, length)) < 0.5
    rows = []
    for h in range(heads):
        for t in range(65, length):
            heaviest = sorted(range(t), key=lambda s, row=weights[h, t]: -row[s])[:64]
            own = [s for s in range(t) if read[h, t, s]]
            hit, weight = len(set(own) & set(heaviest)) / 64, weights[h, t, own].sum() / weights[h, t, :t].sum()
            rows.append((len(own), hit, min(len(own), 64) / 64, weight))
    shares = runpy.run_path(str(SCRIPT))["shares"]
    np.testing.assert_allclose(shares(weights, read), np.mean(rows, axis=0), rtol=1e-12)
    assert shares(weights, np.ones_like(read)) == (np.mean(range(65, length)), 1, 1, 1)
