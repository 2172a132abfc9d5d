"""Memory by category: every tensor of the step with its lifetime; the peak, and what makes it.

The sweep follows autograd: saved activations grow in forward and shrink in backward, while gradients appear;
working copies of weights (gathered, cast) live from first use to their block's backward, or (ZeRO-3) around each use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.graph.graph import Block, Graph, alternate
from ridgeline.graph.schedule import in_flight


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

    __slots__ = ("backward", "block", "forward", "full", "gradients", "keeps", "largest", "layer", "saved", "sharded",
                 "states", "stored", "tile", "work")  # fmt: skip

    def __init__(self, b: Block, g: Graph) -> None:
        self.block = b
        self.layer = b.name.startswith(("layers", "encoder"))
        self.saved = b.saved_bytes
        self.tile = 0.0
        """The largest piece of what passes through the device in pieces."""
        self.work = self.stored = self.states = self.gradients = self.full = self.largest = 0.0
        self.sharded = False
        for p in b.params:
            self.work += p.numel * p.working_bytes
            if p.tiles == 1:
                self.stored += p.numel * p.bytes_per_element / p.shards
            else:
                self.tile = max(self.tile, p.numel * p.bytes_per_element / p.tiles)
            self.sharded |= p.shards > 1
            if p.trainable:
                self.states += p.held_states(g.optimizer_bytes)
                self.gradients += p.numel * p.grad_bytes / p.grad_shards / p.tiles
                self.largest = max(self.largest, p.numel * p.grad_bytes)
                if p.grad_shards > 1:  # unreduced until the block's reduction, beyond its share of the reduced ones
                    self.full += p.numel * p.grad_bytes
        self.keeps = 0.0 if g.host_activations and self.layer else self.saved - b.hosted
        """Saved bytes that stay on the device."""
        self.forward, self.backward = (b.recomputed + extra for extra in _beside_saved(b))
        """Temporaries of each direction, as seen beside all that the block saves."""
        if g.host_activations and self.layer:  # what it saves comes and goes as a whole
            self.forward, self.backward = b.recomputed + b.workspace, b.recomputed + b.backward_workspace
        if b.name == "head":
            self.backward += _last_products(b)


def _last_products(b: Block) -> float:
    """What the head's backward makes first, while all activations are there: the gradient of its weight, and the input
    that the product reads, where that was kept in parts (gathered, and once more in its shape)."""
    made = 0.0
    for op in b.backward:
        if op.kind == "gemm" and op.name.endswith("head.out.dw"):
            made += op.shape[0] * op.shape[1] * (2.0 if op.dtype in ("bf16", "fp16") else 4.0)
        elif op.name == "head.regather":
            made += 2 * op.bytes
    return made


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
        # The first backward pass, while all that may be in flight is, finds no gradients yet.
        mine = list(own.values())
        late = 0.0
        if pipe.schedule == "zero_bubble":
            late = (min(rank, g.accumulation - 1) + 1) * sum(_output_gradients(b) * b.repeat for b in mine)
        # One message is on its way out, and one of each kind on its way in.
        virtual = pipe.degree * pipe.chunks
        sends = sum(v < virtual - 1 for v in range(rank, virtual, pipe.degree))
        receives = sends + sum(v > 0 for v in range(rank, virtual, pipe.degree))
        peak = _rank_peak(g, mine, sizes, held, g.accumulation > held, late)
        messages = (min(sends, 1) + receives) * g.residual
        peak.categories["activations"] = peak.categories.get("activations", 0.0) + messages
        if peak.total > best.total:
            best = Peak(peak.categories, f"{peak.instant}, stage {rank}")
    return best


def resting(g: Graph, place: int | None = None) -> dict[str, float]:
    """Bytes that a rank holds between steps: parameters, gradients (whether or not they outlive the step) and optimizer
    states. ``place``: on which place of the pipeline; None: the mean. What uneven shards differ by is averaged."""
    blocks, places = g.blocks, g.stages
    if g.pipeline and place is not None:
        stages = g.cut(g.pipeline.degree * g.pipeline.chunks)
        blocks, places = [b for stage in stages[place :: g.pipeline.degree] for b in stage], 1
    held = [(p, b.repeat / places) for b in blocks for p in b.params]
    trained = [(p, n) for p, n in held if p.trainable]
    return {
        "parameters": sum(p.stored_bytes * n for p, n in held),
        "gradients": sum(p.numel * p.grad_bytes / p.grad_shards * n for p, n in trained),
        "optimizer": sum(p.held_states(g.optimizer_bytes) * n for p, n in trained),
    }


def _output_gradients(b: Block) -> float:
    """Gradients of the outputs of linear layers and norms, which wait for the weights' turn (schedule zero_bubble)."""
    size = 0.0
    for op in b.backward:
        if op.kind == "gemm" and op.name.endswith(".dw") and b.name != "head":
            size += op.shape[0] * op.shape[2] * (2.0 if op.dtype in ("bf16", "fp16") else 4.0)
        elif op.kind == "norm":
            size += op.bytes / 5  # of what its backward reads and writes
    return size


def _rank_peak(
    g: Graph, blocks: list[Block], sizes: dict[int, _Sizes], held: float, accumulates: bool, late: float = 0.0
) -> Peak:
    """The peak of a rank that runs ``blocks`` and holds the activations of ``held`` micro-batches of them.

    ``late``: gradients of outputs that wait, with all activations, for delayed weight gradients.
    """
    known = [(sizes[id(b.params)], b.repeat) for b in blocks]
    stored = 0.0 if g.host_parameters else sum(s.stored * n for s, n in known)
    states = 0.0 if g.host_states else sum(s.states * n for s, n in known)
    # Gradients, as backward produces them
    leave = g.fused_update or (g.host_states and not g.gradients_resident)
    all_gradients = 0.0 if leave else sum(s.gradients * n for s, n in known)
    sharded = any(s.sharded for s, _ in known)
    accumulated = (accumulates or g.gradients_resident) and not leave
    outside = max_layer = 0.0
    if g.host_parameters:  # here while they are used: what is no layer all the time, a layer and the next one
        outside = sum(s.stored * n for s, n in known if not s.layer)
        max_layer = max((s.stored for s, _ in known if s.layer), default=0.0)
    layers = sum(n for s, n in known if s.layer)
    ahead = 1 if g.host_parameters else 2  # gathered: the block's, and the prefetched next one's
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
    every = g.pipeline is not None and g.pipeline.schedule in ("gpipe", "zero_bubble")  # else the head's go at once
    saved = (held - 1) * sum(s.keeps * n for s, n in known if every or s.block.name != "head")
    # Offloaded ones are here while their layer runs, and in backward one layer ahead.
    moved = max((s.saved for s, _ in known if s.layer), default=0.0) if g.host_activations else 0.0
    # What is no layer is gathered and reduced together.
    ends = sum(s.full * n for s, n in known if not s.layer) if sharded and g.pipeline is None else 0.0
    # What a reduction read is freed by the next one: at first that of the last micro-batch's ends.
    before = ends if g.reduce_every_micro_batch and g.accumulation > 1 else 0.0
    gathered = outside
    passed = 0
    runs = alternate(blocks)
    for i, repeat in runs:
        s, b = known[i][0], blocks[i]
        keep = g.keep_gathered or not sharded or not s.layer
        for first in (0, repeat - 1) if repeat > 1 else (0,):
            piled = saved + s.keeps * (first + 1) + (moved if s.layer else 0.0)
            during = gathered + (s.work * (first + 1) if keep else ahead * s.work)
            during += max_layer * min(2, layers - passed - first) + s.tile if s.layer else 0.0
            consider(f"forward of {b.name}", during, base_gradients, piled + b.hosted + s.forward, before)
        passed += repeat if s.layer else 0
        saved += s.keeps * repeat
        gathered += s.work * repeat if keep else 0.0

    # Backward: in reverse, activations go and gradients come.
    gradients = base_gradients
    waits = 0.0  # unreduced gradients of the head: it is reduced with the embedding, after everything
    for i, repeat in reversed(runs):
        s, b = known[i][0], blocks[i]
        keep = g.keep_gathered or not sharded or not s.layer
        grad = 0.0 if accumulated or leave else s.gradients
        passed -= repeat if s.layer else 0
        for done in sorted({0, min(1, repeat - 1), max(0, repeat - 2), repeat - 1}):
            left = saved - s.keeps * done + b.hosted
            near = min(2, passed + repeat - done) if s.layer else 0
            during = gathered - s.work * done if keep else gathered + ahead * s.work
            during += max_layer * near + s.tile
            now = gradients + grad * done
            own = s.backward + (before if not waits else s.full if done and g.pipeline is None else 0.0)
            consider(f"backward of {b.name}", during, now, left + moved * near, own + waits)
            if late:
                consider(f"weight gradients of {b.name} wait", during, now, saved + moved * near, own + late)
            # Reduction copies the unreduced gradients into one flat buffer.
            came = now + (s.gradients if leave else grad)
            left += moved * max(0, near - 1) - s.keeps - b.hosted
            consider(f"end of backward of {b.name}", during, came, left, 2 * s.full + waits)
        if not late:
            saved -= s.keeps * repeat
        gathered -= s.work * repeat if keep else 0.0
        if ends and b.name == "head":
            waits = s.full
        else:
            gradients += grad * repeat
    handed = max((o.bytes * (1 + 1 / o.ranks) for b in blocks for o in b.after_update), default=0.0)
    consider("optimizer step", 0.0, all_gradients, 0.0, handed)
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
