"""Studies: a benchmark as a file. Axes of models, platforms, plans and loads; every cell an experiment."""

from ridgeline.study.file import StudyFile, load_study
from ridgeline.study.run import run_study

__all__ = ["StudyFile", "load_study", "run_study"]
