"""What general compressors need for the same bytes: a score to stand beside a model's."""

import bz2
import gzip
import lzma


def compressed(data: bytes) -> dict[str, float]:
    """Returns bits per byte by `gzip -9`, `bzip2 -9` and `xz -9`, headers included.

    Args:
        data: the original text, such as a whole split.

    Raises:
        ValueError: there are no bytes.
    """
    if not data:
        raise ValueError("compression needs at least one byte, got none: give the text of a split")
    sizes = {
        "gzip -9": len(gzip.compress(data, 9, mtime=0)),
        "bzip2 -9": len(bz2.compress(data, 9)),
        "xz -9": len(lzma.compress(data, preset=9)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}
