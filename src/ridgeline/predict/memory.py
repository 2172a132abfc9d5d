"""Memory by category: every tensor of the step with its lifetime; the peak, and what makes it.

The sweep follows autograd: saved activations grow in forward and shrink in backward, while gradients appear;
working copies of weights (gathered, cast) live from first use to their block's backward, or (ZeRO-3) around each use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


class _Sizes:
    """Bytes of one repeat of a block, summed once."""

    __slots__ = (
        "backward",
        "block",
        "forward",
        "full",
        "gradients",
        "keeps",
        "layer",
        "saved",
        "sharded",
        "states",
        "stored",
        "work",
    )

    def __init__(self, b: Block, g: Graph) -> None:
        self.block = b
        self.layer = b.name.startswith(("layers", "encoder"))
        self.saved = b.saved_bytes
        self.work = self.stored = self.states = self.gradients = self.full = 0.0
        self.sharded = False
        for p in b.params:
            self.work += p.numel * p.working_bytes
            self.stored += p.numel * p.bytes_per_element / p.shards
            self.sharded |= p.shards > 1
            if p.trainable:
                self.states += p.numel / p.state_shards
                self.gradients += p.numel * p.grad_bytes / p.grad_shards
                if p.grad_shards > 1:  # unreduced until the block's reduction, beyond its share of the reduced ones
                    self.full += p.numel * p.grad_bytes
        self.keeps = 0.0 if g.host_activations and self.layer else self.saved - b.hosted
        """Saved bytes that stay on the device."""
        self.forward, self.backward = (b.recomputed + extra for extra in _beside_saved(b))
        """Temporaries of each direction, as seen beside all that the block saves."""


def _beside_saved(b: Block) -> tuple[float, float]:
    """Workspace of a block's forward and backward beside all that it saves, each at the worse of two instants.

    In forward, attention has its scores when nothing of the MLP is saved yet, and the probabilities among them are what
    is saved. In backward the MLP's gradients come first; when those of attention come, what it saved is gone.
    """
    mlp = probs = 0.0
    for name, s in b.saved.items():
        if s.users and all(user.startswith("mlp") for user in s.users):
            mlp += s.bytes
        elif name.endswith(".probs"):
            probs += s.bytes
    act = next((o.bytes for o in b.backward if o.kind == "activation"), 0.0)
    if not (act and mlp):
        return b.workspace, b.backward_workspace
    parts = 5 if "mlp.gate" in b.saved else 3  # tensors that the activation's backward reads and writes
    forward = max(min(act / parts, b.workspace), b.workspace - mlp - min(probs, b.workspace / 2))
    gradients = act * (parts // 2) / parts  # those that come in and go out, less what the last product had saved
    return forward, max(min(gradients, b.backward_workspace), b.backward_workspace - mlp)


def training_peak(g: Graph) -> Peak:
    """The peak of one training step in steady state (optimizer states exist), on the rank that needs most."""
    sizes = {id(b.params): _Sizes(b, g) for b in g.blocks}
    if g.pipeline is None:
        return _rank_peak(g, g.blocks, sizes, 1.0, g.accumulation > 1)
    pipe = g.pipeline
    best = Peak({}, "")
    stages = g.cut(pipe.degree * pipe.chunks)
    for rank in sorted({0, 1, pipe.degree - 1}):
        own: dict[int, Block] = {}  # chunks of one kind together
        for b in (b for stage in stages[rank :: pipe.degree] for b in stage):
            earlier = own.get(id(b.params))
            own[id(b.params)] = replace(b, repeat=b.repeat + earlier.repeat) if earlier else b
        held = in_flight(pipe.schedule, rank, pipe.degree, g.accumulation, pipe.chunks)
        peak = _rank_peak(g, list(own.values()), sizes, held, True)
        if peak.total > best.total:
            best = Peak(peak.categories, f"{peak.instant}, stage {rank}")
    return best


def _rank_peak(g: Graph, blocks: list[Block], sizes: dict[int, _Sizes], held: float, accumulates: bool) -> Peak:
    """The peak of a rank that runs ``blocks`` and holds the activations of ``held`` micro-batches of them."""
    known = [(sizes[id(b.params)], b.repeat) for b in blocks]
    stored = 0.0 if g.host_parameters else sum(s.stored * n for s, n in known)
    states = 0.0 if g.host_states else sum(s.states * n for s, n in known) * g.optimizer_bytes
    all_gradients = 0.0 if g.host_states else sum(s.gradients * n for s, n in known)
    sharded = any(s.sharded for s, _ in known)
    accumulated = (accumulates or g.gradients_resident) and not g.host_states
    fixed = stored + states + g.buffers
    most, arena = -1.0, 0.0
    at: tuple[str, float, float, float, float] = ("", 0.0, 0.0, 0.0, 0.0)

    def consider(instant: str, gathered: float, gradients: float, activations: float, temporaries: float) -> None:
        nonlocal most, at, arena
        if g.static:  # but for buffers of collectives
            reducing = instant.startswith("end of backward")
            arena = max(arena, activations + (0.0 if reducing else temporaries))
            activations, temporaries = 0.0, temporaries if reducing else 0.0
        total = fixed + gathered + gradients + activations + temporaries
        if total > most:
            most, at = total, (instant, gathered, gradients, activations, temporaries)

    # Forward: walk the blocks, letting saved activations and kept working copies pile up on those of the micro-batches
    # that are already in flight.
    base_gradients = all_gradients if accumulated else 0.0
    saved = (held - 1) * sum(s.keeps * n for s, n in known if s.block.name != "head")
    moving = 2 * max((s.saved for s, _ in known), default=0.0) if g.host_activations else 0.0
    gathered = 0.0
    runs = alternate(blocks)
    for i, repeat in runs:
        s, b = known[i][0], blocks[i]
        keep = g.keep_gathered or not sharded or not s.layer
        for first in (0, repeat - 1) if repeat > 1 else (0,):
            piled = saved + s.keeps * (first + 1) + moving
            during = gathered + (s.work * (first + 1) if keep else 2 * s.work)  # and the prefetched next one's
            consider(f"forward of {b.name}", during, base_gradients, piled + b.hosted, s.forward)
        saved += s.keeps * repeat
        gathered += s.work * repeat if keep else 0.0

    # Backward: in reverse, activations go and gradients come.
    gradients = base_gradients
    for i, repeat in reversed(runs):
        s, b = known[i][0], blocks[i]
        keep = g.keep_gathered or not sharded or not s.layer
        grad = 0.0 if accumulated or g.host_states else s.gradients
        for done in (0, repeat - 1) if repeat > 1 else (0,):
            left = saved - s.keeps * done + moving + b.hosted
            during = gathered - s.work * done if keep else gathered + 2 * s.work
            now = gradients + grad * done
            consider(f"backward of {b.name}", during, now, left, s.backward)
            # Reduction copies the unreduced gradients into one flat buffer.
            consider(f"end of backward of {b.name}", during, now + grad, left - s.keeps - b.hosted, 2 * s.full)
        saved -= s.keeps * repeat
        gathered -= s.work * repeat if keep else 0.0
        gradients += grad * repeat
    consider("optimizer step", 0.0, all_gradients, 0.0, 0.0)
    instant, gathered, gradients, activations, temporaries = at
    categories = {
        "parameters": stored + gathered,
        "gradients": gradients,
        "optimizer": states,
        "activations": activations,
        "temporaries": temporaries,
        "buffers": g.buffers + arena,
    }
    return Peak({k: v for k, v in categories.items() if v}, instant)


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
