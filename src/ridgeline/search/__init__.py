"""The planner: which plan is best for a model, a cluster, a workload and a goal, and what stops the others."""

from ridgeline.search.found import Answer
from ridgeline.search.question import Question
from ridgeline.search.search import search

__all__ = ["Answer", "Question", "search"]
