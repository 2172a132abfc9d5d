"""SwapAdvisor: swap only as much of the saved activations to host memory as a budget of device memory requires."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, alternate
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.sizes import Size, say_size
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class SwapAdvisor(Technique):
    """Record one step's tensor lifetimes, search for which saved tensors to swap and when (genetic algorithm), then run
    that plan.

    Tensors are copied out after their last use in forward and back before their first use in backward, on two copy
    streams. The order of operators and the allocator are PyTorch's; swaps and prefetch times are searched.
    """

    card: ClassVar[Card] = Card(
        name="swap_advisor",
        title="SwapAdvisor",
        paper="doi:10.1145/3373376.3378530",
        taxonomy="training/offload/swap",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="models up to 12x the GPU's memory at 53-99 % of the throughput of an infinite memory",
        example={"budget": "640kB"},
        owns=frozenset({"activations"}),
        changes=frozenset({"recorded_step"}),
        conflicts={"batch_shape": "shapes must stay as they were recorded, but {other} changes the sizes of batches"},
    )
    phase: ClassVar[Phase] = "offload"
    order: ClassVar[int] = 2

    budget: Size | None = None
    """Bytes of device memory for the whole step on one rank, e.g. 200MB; by default all of the device's memory."""
    share: float | None = Field(default=None, ge=0, le=1)
    """Fraction of the layers' saved bytes that predictions assume to be swapped; by default
    chosen by the predictor."""

    def limit(self, e: Experiment) -> float:
        """Maximum bytes that one rank's step may use."""
        if self.budget is not None:
            return float(self.budget)
        return e.cluster.device.shared_by(e.cluster.devices_per_node).memory_bytes

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a search minimizes memory or time; it has no budget."""
        return []

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """The smallest fraction whose predicted peak is within the budget."""
        if self.share is not None or not e.is_training:
            return self

        def peak(share: float) -> float:
            return _peak(ask(self._with(share).placed(e)))

        limit = self.limit(e)
        if peak(0.0) <= limit:
            return self._with(0.0)
        least = peak(1.0)
        if least > limit:
            raise Incompatible(
                f"swap_advisor: the step does not fit into a budget of {say_size(limit)}: with every saved activation"
                f" of the layers in host memory its peak is still {say_size(least)}",
                "raise the budget, use a smaller micro_batch_size, or add recompute, flash_attention or zero",
            )
        low, high = 0, 4096
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if peak(middle / 4096) <= limit else (middle, high)
        return self._with(high / 4096)

    def _with(self, share: float) -> SwapAdvisor:
        return self.model_copy(update={"share": share})

    def check(self, e: Experiment) -> None:
        """Needs saved activations that are plain tensors of a step that runs on one rank."""
        self.needs(not e.model.num_experts, "routing changes the sizes of saved tensors from step to step, so that no"
                   " recorded step stands for the next", "use activation_offload or recompute")  # fmt: skip
        axes = ", ".join(e.parallel)
        self.needs(not e.parallel, f"a recorded step is that of a whole model, but the plan divides it ({axes})",
                   "use zero or data_parallel for the ranks, or activation_offload")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The first layers, whose activations are kept longest, are swapped first; one copy out and one in for each."""
        g.closing.append(lambda graph: _swap(graph, self.share or 0.0))
        return g

    def build(self, run: TrainBuild) -> None:
        """Put the swapper around the step's execution."""
        from ridgeline.techniques.memory.swap_advisor_torch import Swapper

        run.execute = Swapper(
            run.execute, run.root, run.device, int(self.limit(run.experiment)), lambda: run.update.optimizer
        )


def _peak(r: Result) -> float:
    return r.metrics["peak_bytes"].value


def _swap(g: Graph, share: float) -> None:
    """Keep ``share`` of the layers' saved bytes on the host, in model order; each run of equal layers gets a name of
    its own, so that the order is preserved."""
    layers = [b for b in g.blocks if b.is_layer]
    left = share * sum(b.saved_bytes * b.repeat for b in layers)
    if not left:
        return
    parts: list[Block] = []
    place: dict[str, int] = {}
    for i, n in alternate(layers):
        block = layers[i]
        size = block.saved_bytes
        whole = min(n, int(left / size)) if size else n
        rest = n - whole
        cuts = [(whole, size)]
        left -= whole * size
        if rest and left > 0:
            cuts.append((1, left))
            left, rest = 0.0, rest - 1
        cuts.append((rest, 0.0))
        for repeat, hosted in cuts:
            if repeat:
                part = block.copy()
                first = place.get(block.name, 0)
                place[block.name] = first + repeat
                part.name, part.repeat, part.hosted = f"{block.name} {first}", repeat, hosted
                if hosted:
                    part.store.append(host_copy("swap.out", "d2h", hosted, "forward"))
                    part.gather_backward.append(host_copy("swap.in", "h2d", hosted, "backward"))
                parts.append(part)
    at = next(i for i, b in enumerate(g.blocks) if b in layers)
    others = [b for b in g.blocks if b not in layers]
    g.blocks = others[:at] + parts + others[at:]
