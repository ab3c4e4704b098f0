"""Corpora, vocabularies and the order in which training reads them; imports no other part of lra but its errors."""

from lra.data.corpora import PUBLISHED, PublishedCorpus
from lra.data.corpus import Corpus, SourceCorpus
from lra.data.duplication import Duplication
from lra.data.python_source import PythonSource
from lra.data.store import SPLITS
from lra.data.streams import Batch, Batches, BatchIterator, Streams, Text, Windows
from lra.data.text_file import TextFile
from lra.data.vocabulary import Bytes, Vocabulary

__all__ = [
    "PUBLISHED",
    "SPLITS",
    "Batch",
    "BatchIterator",
    "Batches",
    "Bytes",
    "Corpus",
    "Duplication",
    "PublishedCorpus",
    "PythonSource",
    "SourceCorpus",
    "Streams",
    "Text",
    "TextFile",
    "Vocabulary",
    "Windows",
]
