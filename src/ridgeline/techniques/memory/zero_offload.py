"""ZeRO-Offload: optimizer states and their update in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class ZeroOffload(Technique):
    """Keep master weights and optimizer states in host memory, send gradients there, update on the CPU.

    The device keeps only its weights. The copies overlap with the backward pass; the update itself does not, unless it
    is delayed by one step, so that it overlaps with the next one.
    """

    card: ClassVar[Card] = Card(
        name="zero_offload",
        title="ZeRO-Offload",
        paper="arXiv:2101.06840",
        taxonomy="training/offload/zero_offload",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="13B parameters on one V100, 10x larger than without; 40 TFLOP/s at 10B",
        owns=frozenset({"optimizer"}),
        changes=frozenset({"masters"}),
    )
    phase: ClassVar[Phase] = "offload"

    delayed: bool = False
    """Apply each update one step late, in parallel with the next step (which changes the loss)."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The update in its own step: a delayed one changes the loss, so a search does not choose it."""
        return [cls()]

    def stored(self) -> dict[str, Any]:
        """A delayed update has a master copy that is one step ahead."""
        return {"delayed": True} if self.delayed else {}

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Copy gradients out after each block's backward, and new weights in after the update."""
        offload_states(g, twice=self.delayed)
        g.delayed_update = self.delayed
        return g

    def build(self, run: TrainBuild) -> None:
        """Move gradients, norm, clipping and update to the host."""
        from ridgeline.nn.memory.tiered_store import TieredStore
        from ridgeline.runtime.host_optimizer import HostStates

        run.store = TieredStore(run.device)
        HostStates(run, run.store, delayed=self.delayed)


def offload_states(g: Graph, disk: bool = False, weights_on_disk: bool | None = None, rest: bool = False,
                   twice: bool = False) -> None:  # fmt: skip
    """Move the optimizer's states and step to the host or its disk, with the copies that this needs.

    ``weights_on_disk``: where master weights are, if not with the states; ``rest``: they are the only copy of the
    weights; ``twice``: two sets of gradients.
    """
    g.host_states = True
    if g.weights_16bit and not g.bucket_bytes and not any(b.reduce for b in g.blocks):
        g.gradients_resident = False  # the flat buffer belongs to the device's own update
    masters_on_disk = disk if weights_on_disk is None else weights_on_disk
    if not g.gradients_resident and not any(b.reduce for b in g.blocks):
        g.reduce_every_micro_batch = True  # nothing to wait for
    after: list[Op] = []
    staged = added = 0.0
    for b in g.blocks:
        for params, tiles in moved_together(b):
            sent, grads, weights, held, states = (size / tiles for size in _sizes(params, g, rest))
            times = (b.repeat // g.stages or 1) * tiles
            if not grads:
                g.host_bytes += held * times * (not masters_on_disk)
                continue
            out = [host_copy("offload.gradients", "d2h", sent, "backward")]
            ops: list[Op] = []
            if disk:
                out.append(host_copy("offload.gradients_out", "disk_write", grads, "backward"))
                reads = g.accumulation if g.reduce_every_micro_batch else 1  # to accumulate them, and to apply them
                ops += [host_copy("offload.gradients_in", "disk_read", grads, "update")] * reads
            b.reduce += out * tiles
            ops += _both(held, "weights") if masters_on_disk else []
            ops += _both(states, "states") if disk else []
            if not rest:
                ops.append(host_copy("offload.weights", "h2d", weights, "update"))
            after += ops * times
            g.host_bytes += (held * (not masters_on_disk) + (grads * (1 + twice) + states) * (not disk)) * times
            if sent < grads or (g.accumulation > 1 and g.reduce_every_micro_batch):
                added = max(added, sent)
            staged = max(staged, held * masters_on_disk + (grads + states) * disk)
    # What arrives to be added; the part that is worked on, and the buffers through which others come and go.
    g.host_bytes += added + 4 * staged
    g.after_update = after + g.after_update


def moved_together(b: Block) -> list[tuple[list[Param], int]]:
    """Parameters of a block that are copied together, and the number of tiles; a tiled parameter is copied
    separately."""
    tiled: list[tuple[list[Param], int]] = [([p], p.tiles) for p in b.params if p.tiles > 1]
    return [([p for p in b.params if p.tiles == 1], 1), *tiled]


def _sizes(params: list[Param], g: Graph, rest: bool) -> tuple[float, float, float, float, float]:
    """Bytes of parameters: gradients as transferred and as accumulated, weights that are copied back, what the host
    keeps of weights, and the optimizer's states. With 16-bit weights the master copy counts as a state."""
    sent = grads = weights = held = states = 0.0
    for p in params:
        if p.trainable:
            share = p.numel / max(p.grad_shards, p.state_shards)
            sent += share * min(p.grad_bytes, 2.0 if g.weights_16bit else 4.0)
            grads += share * p.grad_bytes
            weights += share * p.bytes_per_element
            states += share * g.optimizer_bytes
    if rest:
        held = sum(p.stored_bytes for p in params)
    elif not g.weights_16bit:
        held = weights
    return sent, grads, weights, held, states


def _both(size: float, what: str) -> list[Op]:
    if not size:
        return []
    return [host_copy(f"offload.{what}_in", "disk_read", size, "update"),
            host_copy(f"offload.{what}_out", "disk_write", size, "update")]  # fmt: skip
