"""Many fine-tuned tasks over one base model, in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.runtime.partition import cheapest_runs
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.serving.length_dp import dp_batches
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.spec.scheduling import Cost


class MultiAdapter(Technique):
    """Serve requests of different adapters (LoRA, BitFit, bottleneck, diff pruning, masks) in one batch: the product
    with the base's weights is shared by all, and each task adds its own part for its rows (PetS). Adapters can be
    loaded and unloaded while the engine runs; their memory is taken from the cache's.

    On a GPU two kernels add what plain LoRA adapters do for all rows of a step (Punica, arXiv:2310.18547), also in
    captured steps. A step with another kind of adapter goes from task to task, and is not captured.
    """

    card: ClassVar[Card] = Card(
        name="multi_adapter",
        title="Parameter-efficient multi-task serving",
        paper="PetS, USENIX ATC 2022",
        taxonomy="inference/multi-task/adapters",
        tasks=frozenset({"serve"}),
        lossless=True,
        example={"adapters": 4},
        claim="26x the tasks, 1.53x (edge) to 1.63x (server) the throughput of one model a task",
        changes=frozenset({"adapter_table"}),
    )
    phase: ClassVar[Phase] = "loop"
    two_stage: bool = False
    """Divide the queue into batches within each task first, then across tasks; for padded batches."""
    adapters: int = Field(default=0, ge=0)
    """For predictions: number of loaded LoRA adapters, each around every linear layer and requested equally often. 0:
    not known, predicted as the base model alone."""
    rank: int = Field(default=8, ge=1)
    """For predictions: their rank."""

    def owns(self) -> frozenset[Part]:
        """With two stages, the order of the queue."""
        return frozenset({"queue"}) if self.two_stage else frozenset()

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """A single stage: what two stages save depends on which tasks are requested."""
        return [cls()]

    def check(self, e: Experiment) -> None:
        """Needs an undivided model; two stages need padding."""
        self.needs(not e.parallel, "adapters are loaded into one process, and the model is divided over several",
                   "use one process, or merge the adapter into the model")  # fmt: skip
        if self.two_stage:
            refuse(self, e, "packed_rows", "two_stage saves padding, and the batches of {other} have none",
                   "leave out two_stage, or {other}")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Hold every adapter, and add to each product two thin ones with the adapters requested by its rows, each as
        one grouped kernel (Punica, arXiv:2310.18547; an engine that loops over adapters takes longer). Engines that
        merge products merge these, too, where they do so
        (:func:`ridgeline.predict.serving.engine_fusions.fuse`)."""
        return g.each_block(self._beside, layers_only=True) if self.adapters else g

    def _beside(self, b: Block) -> None:
        out: list[Op] = []
        for op in b.forward:
            out.append(op)
            if op.kind != "gemm" or not op.param.endswith("_proj.weight"):
                continue
            (rows, n, k), r = op.shape, self.rank
            dtype = "bf16" if op.dtype in ("fp8", "int8") else op.dtype
            width = DTYPE_BYTES[dtype]
            loaded = self.adapters * (1 - (1 - 1 / self.adapters) ** rows)
            for name, wide, deep in (("lora_a", r, k), ("lora_b", n, r)):
                moved = (rows * (wide + deep) + loaded * wide * deep) * width
                out.append(Op(f"{op.name}.{name}", op.module, "gemm", flops=2.0 * rows * wide * deep, bytes=moved,
                              dtype=dtype, shape=(rows, wide, deep), experts=loaded))  # fmt: skip
                b.params.append(Param(f"{op.name}.{name}", float(self.adapters * wide * deep), dtype, False, width))
            out.append(Op(f"{op.name}.lora_add", op.module, "copy", bytes=3.0 * rows * n * width, dtype=dtype))
        b.forward = out

    def note(self, e: Experiment, result: Result) -> None:
        """State the assumptions."""
        if not self.adapters:
            result.notes.append(
                "multi_adapter: predicted without adapters' weights and products; state how many with adapters"
            )

    def serve(self, run: ServeBuild) -> None:
        """Give the engine a task table."""
        run.adapters = True
        if self.two_stage:
            run.cut, run.per_task = two_stage_batches, True


def two_stage_batches(lengths: Sequence[int], tasks: Sequence[str], shared: Cost, own: Cost) -> list[list[int]]:
    """PetS' batches of sequences of several tasks, as indices: small ones within each task, the cheapest for the task's
    own operators, then adjacent lengths combined, the cheapest overall.

    ``shared(length, batch)``: seconds of the base's operators; ``own``: of the operators of one task in a batch. "" is
    the base without an adapter. Each stage is a dynamic program over sequences, or small batches, in order of length.
    """
    small: list[list[int]] = []
    for task in dict.fromkeys(tasks):
        mine = [i for i, t in enumerate(tasks) if t == task]
        cut = dp_batches([lengths[i] for i in mine], own) if task else [[i] for i in range(len(mine))]
        small += [[mine[i] for i in batch] for batch in cut]
    small.sort(key=lambda batch: max(lengths[i] for i in batch))

    def seconds(start: int, stop: int) -> float:
        group = small[start:stop]
        length = max(lengths[k] for k in group[-1])
        both = shared(length, sum(map(len, group)))
        return both if math.isinf(both) else both + sum(own(length, len(b)) for b in group if tasks[b[0]])

    runs = cheapest_runs(len(small), seconds)
    return [[k for batch in small[start:stop] for k in batch] for start, stop in runs]
