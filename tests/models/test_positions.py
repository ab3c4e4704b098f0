"""Axial positions against NumPy, at any length up to the number of points."""

import numpy as np
import pytest
from flax import nnx

from lra.attention import Full
from lra.models import AxialPositions, Decoder


def make(shape=(3, 2, 5), widths=(4, 1, 2), width=7):
    return AxialPositions(shape=shape, widths=widths, width=width, rngs=nnx.Rngs(3))


@pytest.mark.parametrize(("shape", "widths"), [((3, 2, 5), (4, 1, 2)), ((6, 5), (3, 4)), ((30,), (7,))])
def test_axial_positions_equal_numpy(shape, widths):
    """A grid of one vector a coordinate, side by side, read row by row; a prefix of it for fewer tokens."""
    positions = make(shape, widths)
    tables = [np.asarray(table.embedding[...]) for table in positions.tables]
    assert [table.shape for table in tables] == list(zip(shape, widths, strict=True))
    for length in (1, 17, 30):
        want = np.empty((length, 7), np.float32)
        for p in range(length):
            rest, parts = p, []
            for table in tables[::-1]:
                rest, index = divmod(rest, len(table))
                parts.append(table[index])
            want[p] = np.concatenate(parts[::-1])
        np.testing.assert_array_equal(positions(np.arange(length)[None])[0], want)


def test_a_model_takes_any_length_up_to_the_number_of_points(rng):
    model = Decoder(
        num_layers=1, width=7, num_heads=1, pattern=Full, position=lambda **options: AxialPositions(
            shape=(2, 3), widths=(3, 4), **options
        ), vocabulary_size=5, rngs=nnx.Rngs(0),
    )  # fmt: skip
    x = rng.integers(0, 5, (1, 7)).astype(np.int32)
    for length in (1, 5):
        assert model(x[:, :length])[0].shape == (1, length, 5)
    with pytest.raises(ValueError, match=r"the model has 6 positions, got 7 tokens: raise AxialPositions.shape"):
        model(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": ()}, r"AxialPositions.shape needs one axis or more, of at least 1 point each, got \(\)"),
        ({"shape": (3, 0, 5)}, r"at least 1 point each, got \(3, 0, 5\)"),
        ({"widths": (4, 3)}, r"widths needs one width for each of 3 axes, which add up to the model's 7, got \(4, 3\)"),
        ({"widths": (4, 2, 2)}, r"the model's 7, got \(4, 2, 2\)"),
        ({"widths": (7, 0, 0)}, r"the model's 7, got \(7, 0, 0\)"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
