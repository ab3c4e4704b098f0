"""The corpora of the papers: checked when they are prepared, under names that tell a part from the whole."""

from lra.data.corpora.pg19 import PG19, PG19Head
from lra.data.corpora.published import Facts, PublishedCorpus
from lra.data.corpora.single_file import Enwik8, Enwik8Head, Text8, Text8Head
from lra.data.corpora.wikitext import PTB, WikiText2, WikiText103, WikiText103Head

PUBLISHED: dict[str, type[PublishedCorpus]] = {
    cls.name: cls
    for cls in (
        Enwik8, Enwik8Head, Text8, Text8Head, WikiText103, WikiText103Head, WikiText2, PTB, PG19, PG19Head,
    )
}  # fmt: skip
"""By name."""

__all__ = [
    "PG19",
    "PTB",
    "PUBLISHED",
    "Enwik8",
    "Enwik8Head",
    "Facts",
    "PG19Head",
    "PublishedCorpus",
    "Text8",
    "Text8Head",
    "WikiText2",
    "WikiText103",
    "WikiText103Head",
]
