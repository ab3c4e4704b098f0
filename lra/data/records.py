"""Documents on disk: a tfds builder that writes array_record files and reads them at random, without TensorFlow."""

import contextlib
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_FORMAT = "array_record"
Documents = Iterable[tuple[str, bytes]]


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does nothing: nobody publishes these corpora, and tfds would leave an empty temporary folder behind."""


class _Builder(tfds.core.GeneratorBasedBuilder):
    """One example a document, in the order given."""

    name = "documents"
    VERSION = tfds.core.Version("1.0.0")
    # Only downloads have use for it, and tfds 4.9.10 finds it by a package that it does not depend on.
    code_path = None

    def __init__(self, data_dir: Path, splits: Mapping[str, Documents], description: str) -> None:
        self._splits = splits
        self._description = description
        super().__init__(data_dir=data_dir, file_format=_FORMAT)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"path": tfds.features.Text(), "text": tfds.features.Tensor(shape=(None,), dtype=np.uint8)}
        return _Info(
            builder=self,
            description=self._description,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(documents) for split, documents in self._splits.items()}

    def _generate_examples(self, documents: Documents) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (path, text) in enumerate(documents):
            yield key, {"path": path, "text": np.frombuffer(text, np.uint8)}


def write(folder: Path, splits: Mapping[str, Documents], *, description: str) -> None:
    """Writes the documents, (path, text), of each split into a folder, silently; every split needs at least one."""
    tfds.disable_progress_bar()
    builder = _Builder(folder, splits, description)
    # tfds prints its progress on stdout, which belongs to the commands' own output.
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    shutil.rmtree(folder / "downloads", ignore_errors=True)


def read(folder: Path, split: str) -> Iterator[bytes]:
    """Yields the texts of a split in the order in which they were written."""
    for example in _Builder(folder, {}, "").as_data_source(split=split):
        yield example["text"].tobytes()
