"""Memory by category: every tensor of the step with its lifetime; the peak, and what makes it.

The sweep follows autograd: saved activations grow in forward and shrink in backward, while gradients appear;
working copies of weights (gathered, cast) live from first use to their block's backward, or (ZeRO-3) around each use.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph.graph import Block, Graph, alternate
from ridgeline.predict.schedule import in_flight


@dataclass(slots=True)
class Peak:
    """The instant of peak: bytes per category on one rank, and where in the step it is."""

    categories: dict[str, float]
    instant: str

    @property
    def total(self) -> float:
        """Sum over categories."""
        return sum(self.categories.values())


def _working(b: Block) -> float:
    return sum(p.numel * p.working_bytes for p in b.params)


def _gradients(b: Block) -> float:
    return sum(p.numel * p.grad_bytes / p.grad_shards for p in b.params if p.trainable)


def _full_gradients(b: Block) -> float:
    """Unreduced gradients alive until the block's reduction, beyond its share of the reduced ones."""
    return sum(p.numel * p.grad_bytes for p in b.params if p.trainable and p.grad_shards > 1)


def training_peak(g: Graph) -> Peak:
    """The peak of one training step in steady state (optimizer states exist), on the rank that needs most."""
    if g.pipeline is None:
        return _rank_peak(g, g.blocks, 1.0, g.accumulation > 1)
    pipe = g.pipeline
    best = Peak({}, "")
    stages = g.cut(pipe.degree * pipe.chunks)
    for rank in sorted({0, 1, pipe.degree - 1}):
        blocks = [b for stage in stages[rank :: pipe.degree] for b in stage]
        held = in_flight(pipe.schedule, rank, pipe.degree, g.accumulation, pipe.chunks)
        peak = _rank_peak(g, blocks, held, True)
        if peak.total > best.total:
            best = Peak(peak.categories, f"{peak.instant}, stage {rank}")
    return best


def _rank_peak(g: Graph, blocks: list[Block], held: float, accumulates: bool) -> Peak:
    """The peak of a rank that runs ``blocks`` and holds the activations of ``held`` micro-batches of them."""
    stored = 0.0 if g.host_parameters else sum(p.stored_bytes * b.repeat for b in blocks for p in b.params)
    states = 0.0
    if not g.host_states:
        elements = sum(p.numel / p.state_shards * b.repeat for b in blocks for p in b.params if p.trainable)
        states = elements * g.optimizer_bytes
    all_gradients = 0.0 if g.host_states else sum(_gradients(b) * b.repeat for b in blocks)
    sharded = any(p.shards > 1 for b in blocks for p in b.params)
    accumulated = (accumulates or g.gradients_resident) and not g.host_states

    best = Peak({}, "")

    def consider(instant: str, gathered: float, gradients: float, activations: float, temporaries: float) -> None:
        nonlocal best
        total = stored + gathered + gradients + states + activations + temporaries + g.buffers
        if total <= best.total:
            return
        at = {
            "parameters": stored + gathered,
            "gradients": gradients,
            "optimizer": states,
            "activations": activations,
            "temporaries": temporaries,
            "buffers": g.buffers,
        }
        best = Peak({k: v for k, v in at.items() if v}, instant)

    saved_of = {id(b): b.saved_bytes for b in blocks}

    def kept(b: Block) -> float:
        """Saved bytes of one repeat that stay on the device."""
        return 0.0 if g.host_activations and b.name.startswith(("layers", "encoder")) else saved_of[id(b)]

    # Forward: walk the blocks, letting saved activations and kept working copies pile up on those of the micro-batches
    # that are already in flight.
    base_gradients = all_gradients if accumulated else 0.0
    saved = (held - 1) * sum(kept(b) * b.repeat for b in blocks if b.name != "head")
    moving = 2 * max((b.saved_bytes for b in blocks), default=0.0) if g.host_activations else 0.0
    gathered = 0.0
    runs = alternate(blocks)
    for i, repeat in runs:
        b = blocks[i]
        keep = g.keep_gathered or not sharded or not b.name.startswith(("layers", "encoder"))
        work = _working(b)
        for_block = work if keep else 2 * work  # this block's and the prefetched next one's
        for first in {0, repeat - 1}:
            piled = saved + kept(b) * (first + 1) + moving
            during = gathered + (work * (first + 1) if keep else for_block)
            consider(f"forward of {b.name}", during, base_gradients, piled, b.workspace + b.recomputed)
        saved += kept(b) * repeat
        gathered += work * repeat if keep else 0.0

    # Backward: in reverse, activations go and gradients come.
    gradients = base_gradients
    for i, repeat in reversed(runs):
        b = blocks[i]
        keep = g.keep_gathered or not sharded or not b.name.startswith(("layers", "encoder"))
        work = _working(b)
        grad = 0.0 if accumulated or g.host_states else _gradients(b)
        for done in {0, repeat - 1}:
            left = saved - kept(b) * done + moving
            during = gathered - (work * done if keep else 0.0) + (0.0 if keep else 2 * work)
            now = gradients + grad * done
            full = _full_gradients(b)
            consider(f"backward of {b.name}", during, now, left, b.recomputed + b.backward_workspace)
            tail = left - kept(b)
            # Reduction copies the unreduced gradients into one flat buffer.
            consider(f"end of backward of {b.name}", during, now + grad, tail, 2 * full)
        saved -= kept(b) * repeat
        gathered -= work * repeat if keep else 0.0
        gradients += grad * repeat
    consider("optimizer step", 0.0, all_gradients, 0.0, 0.0)
    return best


def inference_peak(prefill: Graph, decode: Graph | None) -> Peak:
    """The peak of generation: weights, cache and the larger of the two phases' workspace."""
    stored = sum(p.stored_bytes * n for p, n in prefill.params)
    work = max(b.workspace for b in prefill.blocks)
    residuals = [o.bytes / 3 for b in prefill.blocks for o in b.forward if o.kind == "residual"]
    stream = max(residuals, default=0.0)
    cache = max(prefill.kv_cache, decode.kv_cache if decode else 0.0)
    categories = {
        "parameters": stored,
        "kv_cache": cache,
        "activations": 4 * stream,
        "temporaries": work,
        "buffers": prefill.buffers,
    }
    return Peak({k: v for k, v in categories.items() if v}, "prefill")
