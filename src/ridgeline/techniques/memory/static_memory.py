"""Static memory: a step's tensors get fixed offsets in one arena that is allocated once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class StaticMemory(Technique):
    """Record one step's lifetimes, give every tensor that dies within the step an offset in one arena, and reuse it.

    Covered are results of operators whose kernel can write into a given tensor, in forward and backward, including
    saved activations. Gradients of parameters, optimizer states and results of other kernels (fused attention,
    collectives) are allocated as before. The planner places the largest tensors first, into the best-fitting gap.
    """

    card: ClassVar[Card] = Card(
        name="static_memory",
        title="Static memory (LightSeq2)",
        paper="arXiv:2110.05722",
        taxonomy="training/memory/static",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="LightSeq2 as a whole trains 1.4-3.5x as fast as what came before, 308 % on WMT14 En-De",
        owns=frozenset({"activations"}),
        changes=frozenset({"recorded_step"}),
        conflicts={"batch_shape": "shapes must stay as they were recorded, but {other} changes the sizes of batches"},
    )
    phase: ClassVar[Phase] = "loop"

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it saves allocator work, which is not predicted."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs the same operators, shapes and lifetimes in every step."""
        self.needs(not e.model.num_experts, "routing changes the sizes of tensors from step to step, so that no"
                   " recorded step stands for the next", "use a dense model, or drop static_memory")  # fmt: skip
        axes = ", ".join(e.parallel)
        self.needs(not e.parallel, f"a recorded step is that of a whole model, but the plan divides it ({axes})",
                   "use zero or data_parallel for the ranks, or drop static_memory")  # fmt: skip
        self.needs(
            not (e.world > 1 and e.cluster.device.kind == "gpu"),
            "on GPUs collectives use memory on streams of their own, which a fixed place does not wait for",
            "use one GPU, or drop static_memory",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Activations and temporaries become one buffer of their peak total, which is kept from step to step."""
        g.static = True
        return g

    def build(self, run: TrainBuild) -> None:
        """Put the arena around the step's execution."""
        from ridgeline.nn.memory.arena import StaticArena as Executor

        run.execute = Executor(run.execute, run.root, run.device)
