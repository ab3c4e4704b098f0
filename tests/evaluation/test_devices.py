"""Scores do not depend on how many devices hold the model, nor on how many processes there are."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lra.attention import Full, Recurrence, XLRelative
from lra.data import Bytes
from lra.evaluation import Block, Carried, Sliding, evaluate
from lra.models import Decoder, Stack

PROTOCOLS = {
    "block": Block(segment=7, batch_size=3),
    "sliding": Sliding(window=7, stride=3, batch_size=3),
    "carried": Carried(streams=3, segment=7),
}
"""Of one shape, so that a program compiles once for all of them."""


class Corpus:
    """101 random bytes."""

    name, description, vocabulary = "toy", "toy", Bytes()

    def tokens(self, split: str) -> np.ndarray:
        return np.random.default_rng(7).integers(97, 123, 101, np.uint8)

    def scored(self, split: str) -> None:
        return None

    def num_bytes(self, split: str, limit: int | None = None) -> int:
        return 101

    num_characters = num_bytes

    def num_words(self, split: str) -> None:
        return None


def scores(devices: list[jax.Device]) -> dict[str, float]:
    """Nats per token by protocol, of one model that all of the devices hold."""
    model = Decoder(
        num_layers=2, width=8, num_heads=2, pattern=Full, terms=(XLRelative,), vocabulary_size=256,
        memory=functools.partial(Recurrence, length=5), stack=functools.partial(Stack, scan=True), rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, state = nnx.split(model)
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.asarray(devices), "data"), jax.P())
    state = jax.device_put(jax.tree.map(lambda x: np.asarray(3 * x), state), place)
    model = nnx.merge(graph, state)
    return {
        name: evaluate(model, Corpus(), "test", protocol).nats_per_token  # type: ignore[arg-type]
        for name, protocol in PROTOCOLS.items()
    }


def start(*arguments: object, devices: int = 1) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> list[dict[str, float]]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def agree(found: list[dict[str, float]]) -> None:
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6)


def test_the_number_of_devices_changes_nothing() -> None:
    found = printed(start(1, 4, devices=4))
    assert len(found) == 2
    assert len(set(found[0].values())) == 3
    agree(found)


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing() -> None:
    """Each process scores all: two of them that know of each other, and one alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(1, address, number) for number in range(2)]
    agree([line for process in [*processes, start(1)] for line in printed(process)])


def main() -> None:
    """Prints scores for each number of devices; with an address and a number, as one of two processes."""
    counts = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    if ":" in " ".join(sys.argv):
        address, number = sys.argv[2:]
        jax.distributed.initialize(address, num_processes=2, process_id=int(number))
        assert (jax.process_count(), jax.process_index()) == (2, int(number))
        counts = counts[:1]
    for count in counts:
        print(json.dumps(scores(jax.local_devices()[:count])), flush=True)


if __name__ == "__main__":
    main()
