"""The planner: which plan is best for a model, a cluster, a workload and a goal, and what stops the others."""

from ridgeline.search.question import Question
from ridgeline.search.search import Answer, search

__all__ = ["Answer", "Question", "search"]
