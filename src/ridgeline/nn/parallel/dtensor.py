"""Recognizes distributed tensors without importing their module, which takes longer than the rest of a server's start
and is not needed where nothing is divided."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(t: Tensor) -> TypeIs[DTensor]:
    """Whether ``t`` is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return module is not None and isinstance(t, module.DTensor)
