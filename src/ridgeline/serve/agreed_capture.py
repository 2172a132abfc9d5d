"""Steps of several ranks are captured on all of them, or on none.

Tensor-parallel ranks launch the same operators, sums over the ranks (all-reduces) among them. While a sum is captured
nothing is sent, so what fails then can be given up on every rank. Before it is captured a step really runs: where that
fails on one rank alone, the others' GPUs wait for what it does not send, and nothing more can be computed.

Steps of a pipeline are launched operator by operator: a stage's host launches while the stage before computes, so that
less is to be gained. So are steps with experts of which each rank has some: the host has to know how many rows those
get.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ridgeline.serve import ranks
from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.serve.step_graphs import StepGraphs

COMPILING = timedelta(minutes=10)
"""How long a rank waits for another that compiles a step's kernels."""


class TwoParts(Protocol):
    """What captures on one rank, in two parts."""

    def run_first(self, run: Callable[[], Tensor]) -> None:
        """Run as often as is needed before."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture what was run → (a call that launches the same again, the result that this fills)."""


class AgreedCapture:
    """A capture that fails on all ranks if it fails on one."""

    def __init__(self, own: TwoParts, group: ProcessGroup) -> None:
        """``group``: of all ranks, on the host: sums on the device may be waiting."""
        self.own, self.group = own, group

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture a step. Raises :class:`RuntimeError` on all ranks where one cannot, and :class:`UserError` where
        steps cannot go on."""
        _, said = self._tried(self.own.run_first, run)
        failed = [f"rank {i}: {why}" for i, why in enumerate(said) if why]
        if failed and len(failed) < len(said):
            raise UserError(
                f"a step failed while the engine started, on {failed[0]}",
                "leave more memory free (kv_cache_share), or let steps be smaller (max_num_batched_tokens)",
            )
        if not failed:
            found, said = self._tried(self.own.record, run)
            failed = [f"rank {i}: {why}" for i, why in enumerate(said) if why]
        if failed:
            raise RuntimeError(failed[0])
        replay, out = found
        return replay, out

    def _tried(self, part: Callable[[Callable[[], Tensor]], Any], run: Callable[[], Tensor]) -> tuple[Any, list[str]]:
        """What ``part`` returns, and what went wrong on each rank; empty: nothing did."""
        found, why = None, ""
        try:
            found = part(run)
        except RuntimeError as e:
            why = str(e).partition("\n")[0] or type(e).__name__
        return found, ranks.gathered(why, self.group)


def host_group() -> ProcessGroup:
    """All ranks, on the host; all call it at once."""
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=COMPILING)
    return group


def require_same(graphs: StepGraphs, group: ProcessGroup) -> None:
    """Raise :class:`RuntimeError`, on all ranks, if they would not capture the same steps."""
    said = ranks.gathered((graphs.prompt_sizes, graphs.decode_sizes), group)
    if any(one != said[0] for one in said):
        raise RuntimeError("their ranks would capture different ones")
