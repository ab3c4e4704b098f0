"""Evaluation: protocols that say which context each token is scored in, one core that scores them, and the report."""

from lra.evaluation.evaluate import evaluate
from lra.evaluation.protocols import Block, Carried, Protocol
from lra.evaluation.report import Report

__all__ = ["Block", "Carried", "Protocol", "Report", "evaluate"]
