"""Evaluation: protocols that say which context each token is scored in, one core that scores them, and the report."""

from lra.evaluation.breakdown import Breakdown
from lra.evaluation.by_context import ByContext
from lra.evaluation.by_distance import ByDistance
from lra.evaluation.by_frequency import ByFrequency
from lra.evaluation.by_position import ByPosition
from lra.evaluation.evaluate import evaluate, reach
from lra.evaluation.protocols import Block, Carried, Protocol, Rows, Sliding
from lra.evaluation.report import Report

BREAKDOWNS: dict[str, type[Breakdown]] = {each.name: each for each in (ByContext, ByDistance, ByFrequency, ByPosition)}
"""What `lra eval --by NAME` can put beside a score."""

__all__ = [
    "BREAKDOWNS", "Block", "Breakdown", "ByContext", "ByDistance", "ByFrequency", "ByPosition", "Carried", "Protocol",
    "Report", "Rows", "Sliding", "evaluate", "reach",
]  # fmt: skip
