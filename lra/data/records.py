"""Documents on disk: a tfds data set of array_record files, written one document at a time, without TensorFlow."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from lra.data.store import Documents

SHARD_DOCUMENTS = 64


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does nothing: nobody publishes these corpora, and tfds would leave an empty temporary folder behind."""


def write(
    folder: Path,
    splits: Mapping[str, Documents],
    *,
    name: str,
    description: str,
    facts: Mapping[str, Any] | None = None,
    fields: tuple[str, ...] = (),
    about: Callable[[str], Mapping[str, str]] | None = None,
) -> None:
    """Writes the documents of each split into an existing folder, which `tfds.builder_from_directory` reads.

    One document is in memory at a time: tfds' generator-based builders hold a whole split, or all of it in one bucket.

    Args:
        folder: it, empty.
        splits: the documents by split.
        name: of the corpus.
        description: of the corpus, for tfds.
        facts: further arguments of `tfds.core.DatasetInfo`, such as `citation`.
        fields: names of further texts of a document.
        about: gives the further texts of the document at a path.
    """
    version = tfds.core.Version("2.0.0")
    identity = tfds.core.dataset_info.DatasetIdentity(name, version, data_dir=str(folder), module_name=__name__)
    features = tfds.features.FeaturesDict({field: tfds.features.Text() for field in ("path", "text", *fields)})
    info = _Info(builder=identity, description=description, features=features, disable_shuffling=True, **(facts or {}))
    writer = tfds.core.SequentialWriter(info, SHARD_DOCUMENTS, file_format="array_record")
    writer.initialize_splits(list(splits))
    for split, documents in splits.items():
        for path, text in documents:
            more = about(path) if about else {}
            writer.add_examples({split: [{"path": path, "text": text, **more}]})
    writer.close_all()


def examples(folder: Path, split: str) -> Iterator[dict[str, bytes]]:
    """Yields the documents of a split with all their fields, in the order in which they were written."""
    yield from tfds.builder_from_directory(folder).as_data_source(split=split)


def read(folder: Path, split: str) -> Iterator[bytes]:
    """Yields the texts of a split in the order in which they were written."""
    for example in examples(folder, split):
        yield example["text"]
