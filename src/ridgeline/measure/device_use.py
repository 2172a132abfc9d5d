"""Used memory of the device, whatever in the process holds it: tensors, allocator cache, CUDA context.

On a GPU it is the device's total minus its free memory, the largest of the ranks (so the toolkit of arXiv:2311.03687
counts). A CPU's memory is shared: there it is the growth of the rank's processes up to their peak.
"""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from ridgeline.jobs.job import RankContext
from ridgeline.measure.bench import USED
from ridgeline.nn.memory.meter import process_memory
from ridgeline.spec.result import Metric


class DeviceUse:
    """Counts from its construction, which is before the model is built."""

    def __init__(self, here: RankContext) -> None:
        self.device, self.ranks = here.device, here.ranks
        self._before = 0 if self.device.type == "cuda" else _resident("rss")
        self._seen = 0

    def look(self) -> None:
        """Count what is in use now, by a process that ends before :meth:`bytes` is asked for. On a GPU this process's
        own context is in it, too."""
        self._seen = max(self._seen, self.bytes())

    def bytes(self) -> int:
        """Most bytes of this rank's device that were in use, up to now."""
        if self.device.type != "cuda":
            return max(self._seen, _resident("rss_peak") - self._before)
        free, total = torch.cuda.mem_get_info(self.device)
        given_back = torch.cuda.max_memory_reserved(self.device) - torch.cuda.memory_reserved(self.device)
        return max(self._seen, int(total - free + given_back))

    def metrics(self) -> dict[str, Metric]:
        """The largest of the ranks, as ``device_used_bytes``. All ranks of the job call this together."""
        own = self.bytes()
        every = [own] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(every, own)
        what = "total minus free" if self.device.type == "cuda" else "growth of the processes' resident memory"
        source = f"{what}, largest of the ranks"
        return {USED: Metric(value=max(every), unit="bytes", better="lower", source=source)}


def _resident(kind: str) -> int:
    """Bytes of this process and those that it started: ``rss`` or ``rss_peak`` (where that is not known, ``rss``)."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            known = process_memory(process.pid)
            total += known.get(kind) or process.memory_info().rss
        except (psutil.Error, OSError):
            continue  # it has exited meanwhile
    return total
