"""Steps of several ranks are captured on all of them, or on none.

Tensor-parallel ranks launch the same operators, all-reduces among them. While an all-reduce is captured nothing is
sent, so what fails then can be given up on every rank. Before it is captured a step really runs: where that fails on
one rank alone, the others' GPUs wait for what it does not send, and nothing more can be computed.

Steps of a pipeline are launched operator by operator: a stage's host launches while the stage before computes, so that
less is to be gained. So are steps with experts of which each rank has some: the host has to know how many rows those
get.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


class CannotCapture(RuntimeError):
    """No rank can capture a step, and all know."""


class AgreedCapture:
    """A capture that fails on all ranks if it fails on one."""

    def __init__(self, own: TwoParts, group: ProcessGroup, summing: ProcessGroup) -> None:
        """``group``: of all ranks, on the host: on the device an all-reduce may be waiting. ``summing``: of the
        all-reduces."""
        self.own, self.group, self.summing = own, group, summing

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture a step. Raises :class:`CannotCapture` on all ranks where one cannot, and :class:`UserError` where
        steps cannot go on; on a rank where what went wrong is no :class:`RuntimeError`, that."""
        _, said = self._tried(self.own.run_first, run)
        failed = [f"rank {i}: {one.why}" for i, one in enumerate(said) if one.why]
        if failed and (len(failed) < len(said) or len({one.sums for one in said}) > 1):
            raise UserError(
                f"a step failed while the engine started, on {failed[0]}",
                "leave more memory free (kv_cache_share), or let steps be smaller (max_num_batched_tokens)",
            )
        if not failed:
            found, said = self._tried(self.own.record, run)
            failed = [f"rank {i}: {one.why}" for i, one in enumerate(said) if one.why]
        if failed:
            raise CannotCapture(failed[0])
        replay, out = found
        return replay, out

    def _tried(self, part: Callable[[Callable[[], Tensor]], Any], run: Callable[[], Tensor]) -> tuple[Any, list[_Said]]:
        """What ``part`` returns, and what all ranks say of it. Raises what is no :class:`RuntimeError`."""
        found, error = None, None
        before = self._sums()
        try:
            found = part(run)
        except Exception as e:
            error = e
        why = "" if error is None else f"{error}".partition("\n")[0] or type(error).__name__
        other = error is not None and not isinstance(error, RuntimeError)
        try:
            said = ranks.gathered(_Said(why, other, self._sums() - before), self.group)
        except RuntimeError as e:  # nor can what follows be computed
            raise UserError(f"a rank was lost while the engine started: {e}", "see what it says") from error
        if error is not None and other:
            raise error
        for i, one in enumerate(said):
            if one.other:
                raise UserError(f"a step failed while the engine started, on rank {i}: {one.why}", "see what it says")
        return found, said

    def _sums(self) -> int:
        """All-reduces so far, of which all ranks must have begun as many for the next ones to be the same."""
        group: Any = self.summing
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError:  # backends beside NCCL and gloo do not count
            return 0


class _Said(NamedTuple):
    """What a rank says of a part."""

    why: str
    """What went wrong; empty: nothing did."""
    other: bool
    """Whether that was no :class:`RuntimeError`."""
    sums: int
    """All-reduces that it has begun."""


def host_group() -> ProcessGroup:
    """All ranks, on the host; all call it at once."""
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=COMPILING)
    return group


def require_same(graphs: StepGraphs, group: ProcessGroup) -> None:
    """Raise :class:`CannotCapture`, on all ranks, if they would not capture the same steps."""
    said = ranks.gathered((graphs.prompt_sizes, graphs.decode_sizes), group)
    if any(one != said[0] for one in said):
        raise CannotCapture("their ranks would capture different ones")
