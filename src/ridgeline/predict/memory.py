"""Memory by category: every tensor of the step with its lifetime; the peak, and what makes it.

The sweep follows autograd: saved activations grow in forward and shrink in backward, while gradients appear;
working copies of weights (gathered, cast) live from first use to their block's backward, or (ZeRO-3) around each use.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph.graph import Block, Graph


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
    """The peak of one training step in steady state (optimizer states exist)."""
    stored = sum(p.stored_bytes * n for p, n in g.params)
    states = sum(p.numel * g.optimizer_bytes / p.state_shards * n for p, n in g.params if p.trainable)
    all_gradients = sum(_gradients(b) * b.repeat for b in g.blocks)
    sharded = any(p.shards > 1 for p, _ in g.params)
    accumulated = g.accumulation > 1 or g.gradients_resident

    best = Peak({}, "")

    def consider(instant: str, gathered: float, gradients: float, activations: float, temporaries: float) -> None:
        nonlocal best
        at = {
            "parameters": stored + gathered,
            "gradients": gradients,
            "optimizer": states,
            "activations": activations,
            "temporaries": temporaries,
            "buffers": g.buffers,
        }
        if sum(at.values()) > best.total:
            best = Peak({k: v for k, v in at.items() if v}, instant)

    # Forward: walk the blocks, letting saved activations and kept working copies pile up.
    base_gradients = all_gradients if accumulated else 0.0
    saved = gathered = 0.0
    for b in g.blocks:
        keep = g.keep_gathered or not sharded or not b.name.startswith(("layers", "encoder"))
        work = _working(b)
        for_block = work if keep else 2 * work  # this block's and the prefetched next one's
        for first in {0, b.repeat - 1}:
            piled = saved + b.saved_bytes * (first + 1)
            held = gathered + (work * (first + 1) if keep else for_block)
            consider(f"forward of {b.name}", held, base_gradients, piled, b.workspace + b.recomputed)
        saved += b.saved_bytes * b.repeat
        gathered += work * b.repeat if keep else 0.0

    # Backward: in reverse, activations go and gradients come.
    gradients = base_gradients
    for b in reversed(g.blocks):
        keep = g.keep_gathered or not sharded or not b.name.startswith(("layers", "encoder"))
        work = _working(b)
        grad = 0.0 if accumulated else _gradients(b)
        for done in {0, b.repeat - 1}:
            left = saved - b.saved_bytes * done
            held = gathered - (work * done if keep else 0.0) + (0.0 if keep else 2 * work)
            now = gradients + grad * done
            full = _full_gradients(b)
            consider(f"backward of {b.name}", held, now, left, b.recomputed + b.backward_workspace)
            tail = left - b.saved_bytes
            # Reduction copies the unreduced gradients into one flat buffer.
            consider(f"end of backward of {b.name}", held, now + grad, tail, 2 * full)
        saved -= b.saved_bytes * b.repeat
        gathered -= work * b.repeat if keep else 0.0
        gradients += grad * b.repeat
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
