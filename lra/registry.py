"""The public classes: all that a configuration can name."""

from lra import attention, data, evaluation, models, training

CLASSES: tuple[type, ...] = (
    *attention.PATTERNS.values(),
    attention.ALiBi,
    attention.Attention,
    attention.CompressiveMemory,
    attention.LearnedDistance,
    attention.Recurrence,
    attention.Rotary,
    attention.ShawRelative,
    attention.XLRelative,
    data.Streams,
    data.Windows,
    evaluation.Block,
    evaluation.Carried,
    evaluation.Sliding,
    models.AdaptiveEmbedding,
    models.AdaptiveSoftmax,
    models.AxialPositions,
    models.Decoder,
    models.Embedding,
    models.FeedForward,
    models.GridPositions,
    models.LearnedPositions,
    models.Reversible,
    models.SinusoidalPositions,
    models.Softmax,
    models.Stack,
    training.Adafactor,
    training.Adagrad,
    training.Adam,
    training.AdamW,
    training.Constant,
    training.Cosine,
    training.Experiment,
    training.Group,
    training.Linear,
    training.Lion,
    training.Optimizer,
    training.Rsqrt,
    training.SGD,
    training.Training,
)

CORPORA: dict[str, type] = {
    "duplication": data.Duplication,
    "python_source": data.PythonSource,
    "text_file": data.TextFile,
    **data.PUBLISHED,
}
"""By the name that stands in configurations and in reports."""


def public() -> tuple[dict[str, type], dict[str, str]]:
    """All public classes by gin name, and the registry names of the patterns."""
    patterns = {cls.__name__: name for name, cls in attention.PATTERNS.items()}
    return {cls.__name__: cls for cls in CLASSES} | CORPORA, patterns
