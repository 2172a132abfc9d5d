"""The synthetic ablation, made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from ridgeline.spec.ablation import Ablation


def _synthetic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic_report", Path(__file__).parent / "synthetic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def _made() -> Ablation:
    return _synthetic().ablation()


@pytest.fixture
def study(_made: Ablation) -> Ablation:
    """A fresh copy: tests may change it."""
    return _made.model_copy(deep=True)
