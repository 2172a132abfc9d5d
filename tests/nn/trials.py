"""Trials of kernels of training steps, in Triton's interpreter or on a GPU."""

import warnings

import torch
from tests.nn.interpreter import DEVICE

from ridgeline.nn.model import own_kernels


def tried(module, monkeypatch):
    """What is said when the kernel of a module is tried, up to the reason; it is taken if nothing is."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    own_kernels.is_right.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        right = module._is_right(torch.device(DEVICE))
    own_kernels.is_right.cache_clear()
    assert right is not bool(said)
    return [str(w.message).partition(" here")[0] for w in said]
