"""Checkpoints of a run: the training state, the position of its data and its configuration, by orbax.

A checkpoint has three items: `state`, arrays by the name of their leaf ("parameters.embedding.embedding"); `data`, the
data's position and corpus (JSON); `config`, the resolved configuration, the format's version and a checksum for each
array (JSON), since orbax restores flipped bits without an error.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from lra.attention.visibility import Array
from lra.errors import UserError
from lra.models.parameters import named

FORMAT = 1
"""Version of the layout; a change of it needs a way to read the former one."""


class Checkpoints:
    """The checkpoints in a folder, of which the newest are kept.

    Saving goes on in the background; leaving the context waits until it is finished and raises if it failed.

    Args:
        folder: of the checkpoints, one subfolder a step; made by the first save.
        keep: how many to keep; None for reading only.
    """

    def __init__(self, folder: Path, *, keep: int | None = None) -> None:
        self.folder = folder.absolute()
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
            "config": ocp.JsonCheckpointHandler(),
        }
        # A reader must leave alone what a run beside it is writing. Not `read_only`, which logs three warnings.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=keep is not None, cleanup_tmp_directories=keep is not None
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        step: int | None = self._manager.latest_step()
        return step

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / str(step)

    def save(self, step: int, state: Any, *, data: Mapping[str, Any], config_text: str) -> None:
        """Saves a state (any pytree of arrays); returns before it is on disk, but after it has been copied.

        Raises:
            RuntimeError: orbax declined, or the last save failed.
        """
        leaves = named(state)
        checksums = {name: _checksum(leaf) for name, leaf in leaves.items()}
        config = {"format": FORMAT, "config": config_text, "checksums": checksums}
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(leaves),
                data=ocp.args.JsonSave(dict(data)),
                config=ocp.args.JsonSave(config),
            ),
        )
        if not saved:
            raise RuntimeError(f"orbax did not save step {step}: {self.folder} has step {self.latest} already")

    def data(self, step: int) -> dict[str, Any]:
        """The data item of a step."""
        with _readable(self.path(step)):
            item: dict[str, Any] = self._read(step, data=ocp.args.JsonRestore())["data"]
        return item

    def restore(self, step: int, abstract: Any, *, partial: bool = False) -> Any:
        """Restores a state with the structure, the shapes and the dtypes of an abstract one.

        Args:
            step: which checkpoint.
            abstract: a pytree of `jax.ShapeDtypeStruct` with shardings, which need not be those of the saved state.
            partial: whether the checkpoint may have leaves that are not asked for.

        Raises:
            UserError: a leaf is missing, too many, or of another shape or dtype; bits flipped; another format.
        """
        where = self.path(step)
        wanted = named(abstract)
        with _readable(where):
            config = self._read(step, config=ocp.args.JsonRestore())["config"]
            written_as, checksums = config["format"], config["checksums"]
        if written_as != FORMAT:
            raise UserError(
                f"checkpoint {where} has format {written_as}, but this version of lra reads format {FORMAT}: "
                "use the version that wrote it"
            )
        with _readable(where):
            stored = dict(self._manager.item_metadata(step)["state"])
        _compare(where, stored, wanted, partial)
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=partial
        )
        with _readable(where):
            leaves = self._read(step, state=arguments)["state"]
        for name, leaf in leaves.items():
            if _checksum(leaf) != checksums.get(name):
                raise UserError(f"checkpoint {where} is damaged at {name}: delete that folder to use an earlier one")
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])

    def _read(self, step: int, **items: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Returns when everything is on disk; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()


@contextlib.contextmanager
def _readable(where: Path) -> Iterator[None]:
    """Names the checkpoint in what orbax raises for a damaged file: errors of many kinds, from JSON to tensorstore."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {where} is damaged and cannot be read ({type(error).__name__}): "
            "delete that folder to use an earlier one"
        ) from error


def _checksum(leaf: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data)


def _compare(where: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool) -> None:
    """Raises for the first leaf that differs. orbax itself would cast dtypes without a word."""
    for name, leaf in wanted.items():
        if name not in stored:
            raise UserError(f"checkpoint {where} lacks {name}, which this model has: use the configuration of that run")
        old, new = ((tuple(x.shape), np.dtype(x.dtype)) for x in (stored[name], leaf))
        if old != new:
            raise UserError(
                f"checkpoint {where} has {name} as {old[1]}{list(old[0])}, but this model needs "
                f"{new[1]}{list(new[0])}: use the configuration of that run"
            )
    for name in stored:
        if name not in wanted and not partial:
            raise UserError(f"checkpoint {where} has {name}, which this model lacks: use the configuration of that run")
