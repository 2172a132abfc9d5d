"""Triton as tests have it: in its interpreter, or on a GPU where that is asked for (``tests/conftest.py``).

Modules that import this are skipped where there is neither.
"""

import importlib.util
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes int() of one-element arrays, which NumPy 2.4 refuses (triton-lang/triton#9171, fixed in 3.7).
_refused = Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4")
if DEVICE == "cpu" and _refused:
    pytest.skip("this Triton's interpreter needs NumPy before 2.4", allow_module_level=True)
