"""Memory by category: every tensor of the step with its lifetime, and the composition of the peak.

The sweep follows autograd: saved activations grow in forward and shrink in backward, while gradients appear;
working copies of weights (gathered, cast) live from first use to their block's backward, or (ZeRO-3) around each use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from ridgeline.graph.graph import Block, Graph, Op, Pipeline, alternate
from ridgeline.graph.schedule import in_flight


class Instant(Enum):
    """What a step is doing when its memory may be at its peak; the value is the text in a :class:`Peak`, with the
    block's name."""

    FORWARD = "forward of {}"
    BACKWARD = "backward of {}"
    WEIGHTS_WAIT = "weight gradients of {} wait"
    REDUCTION = "end of backward of {}"
    UPDATE = "optimizer step"


@dataclass(slots=True)
class Peak:
    """The memory peak: bytes per category on one rank, and where in the step it occurs."""

    categories: dict[str, float]
    instant: str

    @property
    def total(self) -> float:
        """Sum over categories."""
        return sum(self.categories.values())


class _Sizes:
    """Sizes of one repeat of a block, summed once."""

    __slots__ = ("backward", "block", "forward", "full", "gradients", "is_layer", "keeps", "saved", "sharded", "states",
                 "stored", "tile", "work")  # fmt: skip

    def __init__(self, b: Block, g: Graph) -> None:
        self.block = b
        self.is_layer = b.is_layer
        self.saved = b.saved_bytes
        self.tile = 0.0
        """The largest piece of what is processed on the device in pieces."""
        self.work = self.stored = self.states = self.gradients = self.full = 0.0
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
                if p.grad_shards > 1:  # unreduced until the block's reduction, beyond its share of the reduced ones
                    self.full += p.numel * p.grad_bytes
        self.keeps = 0.0 if g.host_activations and self.is_layer else self.saved - b.hosted
        """Saved bytes that stay on the device."""
        self.forward, self.backward = (b.recomputed + extra for extra in _beside_saved(b))
        """Temporaries of each direction, on top of everything that the block saves."""
        if g.host_activations and self.is_layer:  # its saved activations are moved as a whole
            self.forward, self.backward = b.recomputed + b.workspace, b.recomputed + b.backward_workspace
        if b.is_head:
            self.backward += _last_products(b)


def _width(op: Op) -> float:
    """Bytes of one element of a gradient: products in 16 bits give 16-bit ones, all others fp32."""
    return 2.0 if op.dtype in ("bf16", "fp16") else 4.0


def _last_products(b: Block) -> float:
    """What the head's backward allocates first, while all activations are alive: the gradient of its weight, and the
    product's input if that was kept in parts (gathered, and once more in its shape)."""
    size = 0.0
    for op in b.backward:
        if op.name == "head.out.dw":
            size += op.shape[0] * op.shape[1] * _width(op)
        elif op.role == "regather":
            size += 2 * op.bytes
    return size


def _beside_saved(b: Block) -> tuple[float, float]:
    """Workspace of a block's forward and backward on top of everything that it saves, each at the worse of two points.

    In forward, attention has its scores before anything of the MLP is saved, and the probabilities among them are what
    is saved. In backward the MLP's gradients come first; when those of attention are computed, what the MLP saved has
    been freed.
    """
    mlp = b.saved_by_mlp
    probs = sum(s.bytes for name, s in b.saved.items() if name.endswith(".probs"))
    act = next((o.bytes for o in b.backward if o.kind == "activation"), 0.0)
    if not (act and mlp):
        return b.workspace, b.backward_workspace
    parts = 5 if "mlp.gate" in b.saved else 3  # tensors that the activation's backward reads and writes
    forward = max(min(act / parts, b.workspace), b.workspace - mlp - min(probs, b.workspace / 2))
    # Gradients that come in and go out, less what the last product had saved; a frozen one saves nothing.
    saves = "mlp.inner" in b.saved or b.recomputed > 0
    gradients = act * (parts // 2 + (not saves)) / parts
    return forward, max(min(gradients, b.backward_workspace), b.backward_workspace - mlp)


def training_peak(g: Graph, ranks: Collection[int] = ()) -> Peak:
    """The peak of one training step in steady state (optimizer states exist), on the rank that needs most: of a
    pipeline's ``ranks``, or of all."""
    sizes = {id(b.params): _Sizes(b, g) for b in g.blocks}
    if g.pipeline is None:
        return _Sweep(g, g.blocks, sizes, 1.0, g.accumulation > 1).peak()
    pipe = g.pipeline
    best = Peak({}, "")
    stages = g.cut(pipe.degree * pipe.chunks)
    for rank in ranks or _candidates(stages, pipe):
        own: dict[int, Block] = {}  # chunks of one kind together
        for b in (b for stage in stages[rank :: pipe.degree] for b in stage):
            earlier = own.get(id(b.params))
            own[id(b.params)] = b.repeated(b.repeat + earlier.repeat) if earlier else b
        held = in_flight(pipe.schedule, rank, pipe.degree, g.accumulation, pipe.chunks)
        # In the first backward pass, with all micro-batches in flight, there are no gradients yet.
        mine = list(own.values())
        late = 0.0
        if pipe.schedule == "zero_bubble":
            late = (min(rank, g.accumulation - 1) + 1) * sum(_output_gradients(b) * b.repeat for b in mine)
        # One message is being sent, and one of each kind received; PyTorch's stages have a buffer for each micro-batch.
        virtual = pipe.degree * pipe.chunks
        sends = sum(v < virtual - 1 for v in range(rank, virtual, pipe.degree))
        receives = sends + sum(v > 0 for v in range(rank, virtual, pipe.degree))
        peak = _Sweep(g, mine, sizes, held, g.accumulation > held, late).peak()
        messages = (min(sends, 1) + receives * (g.accumulation if pipe.keeps_outputs else 1)) * g.residual
        kept = _outputs(g, mine, sends) if pipe.keeps_outputs else 0.0
        peak.categories["activations"] = peak.categories.get("activations", 0.0) + messages + kept
        if peak.total > best.total:
            best = Peak(peak.categories, f"{peak.instant}, stage {rank}")
    return best


def _candidates(stages: list[list[Block]], pipe: Pipeline) -> list[int]:
    """Ranks one of which needs most: of those with the same blocks, the first has the most micro-batches in flight, and
    with delayed weight gradients the last has the most of these."""
    first: dict[tuple[tuple[int, int], ...], int] = {}
    last: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in range(pipe.degree):
        blocks = tuple([(id(b.params), b.repeat) for stage in stages[rank :: pipe.degree] for b in stage])
        first.setdefault(blocks, rank)
        last[blocks] = rank
    return sorted({*first.values(), *(last.values() if pipe.schedule == "zero_bubble" else ())})


def least_activations(g: Graph, moved: bool = True) -> dict[str, float]:
    """Bytes of activations and temporaries that a step needs wherever parameters, gradients and states are: the peak
    without these. With ``moved``, wherever saved activations are, too: as if each block's were here only while it runs.
    ``g`` is not changed.
    """
    alone = g.copy()
    alone.close()
    for b in alone.blocks:
        b.params = []
        if moved:
            b.hosted = b.saved_bytes
    return training_peak(alone).categories


def accumulates(g: Graph) -> bool:
    """Whether gradients of earlier micro-batches are there at the peak of the activations, unless an update takes each
    at once."""
    if g.pipeline is None:
        return g.accumulation > 1
    pipe = g.pipeline
    return g.accumulation > in_flight(pipe.schedule, 0, pipe.degree, g.accumulation, pipe.chunks)


def _outputs(g: Graph, blocks: list[Block], sends: int) -> float:
    """Bytes of what a rank's stages have put out at its last backward pass: to ``sends`` others, and 16-bit logits."""
    logits = (o.shape[0] * o.shape[1] * _width(o) for b in blocks for o in b.forward if o.name == "head.out")
    return g.accumulation * sends * g.residual + (g.accumulation - 1) * sum(logits)


def resting(g: Graph, place: int | None = None) -> dict[str, float]:
    """Bytes that a rank holds between steps: parameters, gradients (whether or not they outlive the step) and optimizer
    states. ``place``: index of the pipeline stage; None: the mean. Uneven shards are averaged."""
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


def resident(g: Graph) -> dict[str, float]:
    """Bytes of parameters, optimizer states and gradients that an average rank holds during the update, a lower bound
    for the peak of the rank that needs most."""
    found = {"parameters": 0.0, "optimizer": 0.0, "gradients": 0.0}
    taken = g.fused_update or (g.host_states and not g.gradients_resident)  # one by one, in the backward pass
    for b in g.blocks:
        share = b.repeat / g.stages
        for p in b.params:
            if not g.host_parameters and p.tiles == 1:
                found["parameters"] += p.numel * p.bytes_per_element / p.shards * share
            if not g.host_states and p.trainable:
                found["optimizer"] += p.held_states(g.optimizer_bytes) * share
            if not taken and p.trainable:
                found["gradients"] += p.numel * p.grad_bytes / p.grad_shards / p.tiles * share
    return found


def _output_gradients(b: Block) -> float:
    """Gradients of the outputs of linear layers and norms, which are kept for delayed weight gradients (schedule
    zero_bubble)."""
    size = 0.0
    for op in b.backward:
        if op.kind == "gemm" and op.role == "weight_gradient" and not b.is_head:
            size += op.shape[0] * op.shape[2] * _width(op)
        elif op.kind == "norm":
            size += op.bytes / 5  # of what its backward reads and writes
    return size


@dataclass(slots=True, frozen=True)
class _Live:
    """Bytes that are allocated and freed within a step."""

    gathered: float
    gradients: float
    activations: float
    temporaries: float


class _Sweep:
    """Walks through one rank's step block by block and records the peak."""

    def __init__(
        self, g: Graph, blocks: list[Block], sizes: dict[int, _Sizes], held: float, accumulates: bool, late: float = 0.0
    ) -> None:
        """``blocks`` are the rank's, and it holds the activations of ``held`` micro-batches of them.

        ``late``: gradients of outputs that wait, with all activations, for delayed weight gradients.
        """
        self.g, self.late = g, late
        self.known = known = [(sizes[id(b.params)], b.repeat) for b in blocks]
        self.runs = [(known[i][0], repeat) for i, repeat in alternate(blocks)]
        self.stored = 0.0 if g.host_parameters else sum(s.stored * n for s, n in known)
        self.states = 0.0 if g.host_states else sum(s.states * n for s, n in known)
        self.fixed = self.stored + self.states + g.buffers
        self.sharded = any(s.sharded for s, _ in known)
        self.after_update = max((o.bytes * (1 + 1 / o.ranks) for b in blocks for o in b.after_update), default=0.0)
        self._gradients(accumulates)
        self._parameters()
        self._activations(held)
        self.most, self.arena = -1.0, 0.0
        self.at = Instant.UPDATE
        self.at_block = ""
        self.live = _Live(0.0, 0.0, 0.0, 0.0)

    def _gradients(self, accumulates: bool) -> None:
        g, known = self.g, self.known
        # An update in backward, or on the host, takes each gradient as soon as it is complete.
        self.leave = g.fused_update or (g.host_states and not g.gradients_resident)
        self.all_gradients = 0.0 if self.leave else sum(s.gradients * n for s, n in known)
        self.accumulated = (accumulates or g.gradients_resident) and not self.leave
        self.base_gradients = self.all_gradients if self.accumulated else 0.0
        # Everything outside the layers is gathered and reduced together.
        whole = self.sharded and g.pipeline is None
        self.ends = sum(s.full * n for s, n in known if not s.is_layer) if whole else 0.0
        # A reduction's input is freed by the next reduction: at first that of the last micro-batch's end.
        self.before = self.ends if g.reduce_every_micro_batch and g.accumulation > 1 else 0.0

    def _parameters(self) -> None:
        g, known = self.g, self.known
        self.gathered = self.layer = 0.0
        if g.host_parameters:  # on the device: everything outside the layers, a layer and the next one
            self.gathered = sum(s.stored * n for s, n in known if not s.is_layer)
            self.layer = max((s.stored for s, _ in known if s.is_layer), default=0.0)
        self.layers = sum(n for s, n in known if s.is_layer)
        self.passed = 0
        self.ahead = 1 if g.host_parameters else 2  # gathered: the block's, and the prefetched next one's

    def _activations(self, held: float) -> None:
        g, known = self.g, self.known
        # All of the micro-batches in flight; but for some schedules those of the head go at once.
        every = g.pipeline is not None and g.pipeline.schedule in ("gpipe", "zero_bubble")
        self.saved = (held - 1) * sum(s.keeps * n for s, n in known if every or not s.block.is_head)
        # Offloaded ones are here while their layer runs, and in backward one layer ahead.
        self.moved = max((s.saved for s, _ in known if s.is_layer), default=0.0) if g.host_activations else 0.0

    def peak(self) -> Peak:
        """Categories and time of the step's peak."""
        self._forward()
        self._backward()
        self._consider(Instant.UPDATE, "", 0.0, self.all_gradients, 0.0, self.after_update)
        categories = {
            "parameters": self.stored + self.live.gathered,
            "gradients": self.live.gradients,
            "optimizer": self.states,
            "activations": self.live.activations,
            "temporaries": self.live.temporaries,
            "buffers": self.g.buffers + self.arena,
        }
        # Less than a byte is what sums of shares leave of nothing.
        return Peak({k: v for k, v in categories.items() if v >= 1.0}, self.at.value.format(self.at_block))

    def _consider(
        self, instant: Instant, block: str, gathered: float, gradients: float, activations: float, temporaries: float
    ) -> None:
        if self.g.static:  # but for buffers of collectives
            reducing = instant is Instant.REDUCTION
            self.arena = max(self.arena, activations + (0.0 if reducing else temporaries))
            activations, temporaries = 0.0, temporaries if reducing else 0.0
        total = self.fixed + gathered + gradients + activations + temporaries
        if total > self.most:
            self.most, self.at, self.at_block = total, instant, block
            self.live = _Live(gathered, gradients, activations, temporaries)

    def _keeps_gathered(self, s: _Sizes) -> bool:
        return self.g.keep_gathered or not self.sharded or not s.is_layer

    def _forward(self) -> None:
        """Saved activations and kept working copies accumulate on those of the micro-batches already in flight."""
        for s, repeat in self.runs:
            keep = self._keeps_gathered(s)
            for first in (0, repeat - 1) if repeat > 1 else (0,):
                piled = self.saved + s.keeps * (first + 1) + (self.moved if s.is_layer else 0.0)
                during = self.gathered + (s.work * (first + 1) if keep else self.ahead * s.work)
                if s.is_layer:
                    during += self.layer * min(2, self.layers - self.passed - first) + s.tile
                self._consider(
                    Instant.FORWARD,
                    s.block.name,
                    during,
                    self.base_gradients,
                    piled + s.block.hosted + s.forward,
                    self.before,
                )
            self.passed += repeat if s.is_layer else 0
            self.saved += s.keeps * repeat
            self.gathered += s.work * repeat if keep else 0.0

    def _backward(self) -> None:
        """In reverse order, activations are freed and gradients allocated."""
        gradients = self.base_gradients
        waits = 0.0  # unreduced gradients of the head: it is reduced with the embedding, after everything
        for s, repeat in reversed(self.runs):
            self.passed -= repeat if s.is_layer else 0
            for done in sorted({0, min(1, repeat - 1), max(0, repeat - 2), repeat - 1}):
                self._backward_of(s, repeat, done, gradients, waits)
            if not self.late:
                self.saved -= s.keeps * repeat
            self.gathered -= s.work * repeat if self._keeps_gathered(s) else 0.0
            if self.ends and s.block.is_head:
                waits = s.full
            elif not self.accumulated and not self.leave:
                gradients += s.gradients * repeat

    def _backward_of(self, s: _Sizes, repeat: int, done: int, gradients: float, waits: float) -> None:
        """One of ``repeat`` equal blocks in a row, ``done`` of which have already run backward."""
        b, g = s.block, self.g
        grad = 0.0 if self.accumulated or self.leave else s.gradients
        left = self.saved - s.keeps * done + b.hosted
        near = min(2, self.passed + repeat - done) if s.is_layer else 0
        during = self.gathered + (-s.work * done if self._keeps_gathered(s) else self.ahead * s.work)
        during += self.layer * near + s.tile
        now = gradients + grad * done
        own = s.backward + (self.before if not waits else s.full if done and g.pipeline is None else 0.0)
        self._consider(Instant.BACKWARD, b.name, during, now, left + self.moved * near, own + waits)
        if self.late:
            piled = self.saved + self.moved * near
            self._consider(Instant.WEIGHTS_WAIT, b.name, during, now, piled, own + self.late)
        # Reduction copies the unreduced gradients into one flat buffer.
        came = now + (s.gradients if self.leave else grad)
        left += self.moved * max(0, near - 1) - s.keeps - b.hosted
        self._consider(Instant.REDUCTION, b.name, during, came, left, 2 * s.full + waits)


def inference_peak(prefill: Graph, decode: Graph | None) -> Peak:
    """The peak of generation: weights, cache and the larger of the two phases' workspace."""
    stored = prefill.resident_bytes
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
