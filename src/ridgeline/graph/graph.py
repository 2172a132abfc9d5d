"""The analytic model's data: operators and tensors of one rank's step. Numbers only.

A :class:`Graph` is a list of :class:`Block`, each standing for ``repeat`` identical parts of the model (one embedding,
L transformer layers, one head), plus the optimizer's operators. Techniques rewrite it; ``predict`` times it. All counts
are for ONE block, ONE micro-batch, ONE rank.

FLOPs follow PyTorch's counter: matrix multiplications and attention only (2·m·n·k each, no causal halving); all other
operators are accounted by the bytes they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal

Direction = str  # "forward" | "backward" | "update"
BIASED = "biased"
"""Kernel of fused attention that adds a bias or a mask to its scores, or of FlashAttention's first generation."""
PORTABLE = "portable"
"""Kernel of fused attention that uses only Ampere's features, on a newer device."""
AFTER_AMPERE = ("hopper", "blackwell")
"""Architectures whose fused attention was measured with kernels other than PyTorch's (see ``catalog/efficiency``)."""
LATENT = "latent"
"""Kernel of fused attention whose values are its keys (latent attention with absorbed projections)."""
NARROW = "narrow"
"""Kernel of fused attention whose decode steps have tiles of 16 rows at most."""
Role = Literal["", "weight_gradient", "bias_gradient", "regather", "entry"]


@dataclass(slots=True, frozen=True)
class Op:
    """One operator (one eager kernel, or one collective).

    ``kind`` selects its cost model: gemm, bmm, attention, softmax, norm, activation, rope, residual, embedding, loss,
    optimizer, clip, cast, copy, all_reduce, all_gather, reduce_scatter, …
    """

    name: str
    module: str
    """embed, attention, mlp, norm, head, optimizer or communication."""
    kind: str
    direction: Direction = "forward"
    flops: float = 0.0
    bytes: float = 0.0
    """Memory traffic: operands read once, results written once."""
    dtype: str = "fp32"
    shape: tuple[int, ...] = ()
    """gemm: (m, n, k); bmm: (batch, m, n, k); attention: (batch, heads, kv_heads, q_len, kv_len, head_dim)."""
    param: str = ""
    """The parameter whose gradient this operator computes (weight-gradient GEMMs), or by which it multiplies."""
    link_bytes: float = 0.0
    """Payload of a collective or copy: bytes of the full buffer on one rank."""
    requests: float = 1
    """Number of transfers that a copy is made in, one after the other (expected number); each has the latency."""
    ranks: int = 1
    """Number of ranks in a collective."""
    axis: str = ""
    """Mesh axis of a collective: dp, tp, pp, cp, ep."""
    stride: int = 1
    """Distance, in ranks, between neighbors of a collective's group (the product of the inner axes)."""
    rails: int = 0
    """Number of network cards of a node that a collective uses; 0: all."""
    causal: bool = False
    """attention: whether a fused kernel may skip the masked half (``flops`` counts all of it, as PyTorch does)."""
    recompute: bool = False
    """Whether it repeats forward work in the backward pass."""
    behind: str = ""
    """For a collective inside a block: the operator of the block with which it overlaps; empty: no overlap. For a copy
    from or to host memory or disk before a layer of inference: ``layers``, it overlaps with any of the pass;
    ``weights``, it brings the layer's weights whose names begin with ``param`` through the ring of
    :attr:`Graph.weight_buffers`; ``module``, it overlaps with what computes with these."""
    pieces: int = 1
    """Number of pieces of an overlapping collective; with more than one, the first (or last) piece has nothing to
    overlap with. Of an operator: number of pieces that it is computed in, one after the other."""
    experts: float = 1
    """gemm: number of weight matrices over which the rows are spread in one grouped kernel (expected number, for routed
    rows)."""
    calls: float = 1
    """Number of operators that PyTorch runs for it one after the other on a CPU (expected number), which has no grouped
    kernels; engines have one."""
    weight_dtype: str = ""
    """gemm: storage dtype of weights that the kernel dequantizes on the fly; empty: they are of ``dtype``."""
    sparse: bool = False
    """gemm: whether two of every four weights are zero, and skipped by sparse tensor cores."""
    weight_bytes: float = 0.0
    """gemm: the part of ``bytes`` that is weights stored in a dtype other than that of rows and results; 0: all are the
    same."""
    reuse: float = 0.0
    """gemm: bytes of weights, attention: of keys and values, accessed between two uses of the same one, where the
    operator runs repeatedly in isolation; 0: more than a cache holds."""
    kv_dtype: str = ""
    """attention: storage dtype of keys and values; empty: they are of ``dtype``."""
    kernel: str = ""
    """attention: library of the fused kernel, flash (default), narrow, biased, portable, latent or trtllm. gemm: the
    format of the weight's codes, where its dtype does not say it, and whether a kernel of ours reads them."""
    wan: tuple[float, float] | None = None
    """For a collective: (seconds there and back, bytes/s of each end) of a network that it takes instead of the
    cluster's."""
    role: Role = ""
    """What it computes in backward, where that matters: gradients of parameters, or the gathering of a divided
    input; ``entry``: what happens to a layer's input before the layer, which is not part of its recomputation."""
    timed: Any = field(default=None, init=False, compare=False, repr=False)
    """Cached result of the time model; not part of the operator's value, so a changed copy starts without it."""

    @property
    def phase(self) -> str:
        """The breakdown's phase: forward, backward, optimizer or communication."""
        if self.link_bytes and self.axis:
            return "communication"
        return "optimizer" if self.direction == "update" else self.direction


_names_of_op = tuple(f.name for f in fields(Op) if f.init)
_values_of_op = attrgetter(*_names_of_op)
_OpDraft = make_dataclass(
    "_OpDraft", [(f.name, f.type, field(default=None if f.default is MISSING else f.default)) for f in fields(Op)],
    slots=True,
)  # fmt: skip
"""An operator whose fields can still be set: a frozen class sets each of its own ten times slower."""


def _op(cls: type[Op], *args: Any, **values: Any) -> Op:
    new: Any = _OpDraft(*args, **values)
    new.__class__ = cls  # of the same slots
    made: Op = new
    return made


Op.__new__, Op.__init__ = _op, object.__init__  # type: ignore[method-assign, assignment]
keep_time: Callable[[Op, Any], None] = vars(Op)["timed"].__set__
"""Sets :attr:`Op.timed`, although the class is frozen."""


def changed(op: Op, **values: Any) -> Op:
    """A copy of ``op`` with other values in some fields: ``dataclasses.replace`` in a tenth of the time, as techniques
    copy thousands of operators per prediction. Raises :class:`AttributeError` for an unknown field."""
    new: Any = _OpDraft(*_values_of_op(op))
    for name, value in values.items():
        setattr(new, name, value)
    new.__class__ = Op  # of the same slots
    copied: Op = new
    return copied


@dataclass(slots=True, frozen=True)
class Saved:
    """An activation kept for the backward pass: its bytes, and the backward operators that need it."""

    bytes: float
    users: frozenset[str]


@dataclass(slots=True)
class Param:
    """One parameter tensor of a block on this rank."""

    name: str
    numel: float
    dtype: str = "fp32"
    trainable: bool = True
    bytes_per_element: float = 4.0
    """Storage dtype, including quantization scales."""
    shape: tuple[int, ...] = ()
    shards: int = 1
    """How many ranks share the stored copy (ZeRO-3)."""
    state_shards: int = 1
    """How many ranks share its optimizer state."""
    grad_shards: int = 1
    """How many ranks share its reduced gradient."""
    grad_bytes: float = 4.0
    """Bytes per element of the gradient."""
    working_bytes: float = 0.0
    """Bytes per element of a temporary working copy while the block runs (cast or gathered); 0: none."""
    spread: int = 1
    """Data-parallel ranks over which the tensor is already divided (experts): fewer remain to share or reduce it."""

    tiles: int = 1
    """Number of pieces that are moved to the device one at a time."""
    state_bytes: float | None = None
    """Optimizer-state bytes per element, if not the graph's."""
    resident: float = 1.0
    """In inference: fraction of it that stays on the device."""
    coded: bool = False
    """Whether shards of it are gathered as one-byte codes."""

    def copy(self) -> Param:
        """A copy that can be changed independently."""
        return Param(
            self.name, self.numel, self.dtype, self.trainable, self.bytes_per_element, self.shape, self.shards,
            self.state_shards, self.grad_shards, self.grad_bytes, self.working_bytes, self.spread,
            self.tiles, self.state_bytes, self.resident, self.coded,
        )  # fmt: skip

    def held_states(self, each: float) -> float:
        """Bytes of its optimizer states on this rank, at ``each`` bytes per element unless it has its own."""
        return self.numel / self.state_shards * (each if self.state_bytes is None else self.state_bytes)

    @property
    def stored_bytes(self) -> float:
        """Bytes that this rank stores."""
        return self.numel * self.bytes_per_element / self.shards


@dataclass(slots=True)
class Block:
    """``repeat`` identical consecutive parts of the model."""

    name: str
    repeat: int
    params: list[Param]
    forward: list[Op]
    backward: list[Op]
    saved: dict[str, Saved]
    """Activations kept from forward to backward, per block."""
    workspace: float = 0.0
    """Largest temporary bytes inside the block's forward beyond what is saved."""
    backward_workspace: float = 0.0
    """Largest temporary bytes inside its backward (gradients of activations)."""
    recomputed: float = 0.0
    """Bytes of recomputed activations that are alive only during the block's own backward."""
    gather_forward: list[Op] = field(default_factory=list)
    """Collectives that must finish before the block's forward (parameter gathering)."""
    gather_backward: list[Op] = field(default_factory=list)
    reduce: list[Op] = field(default_factory=list)
    """Collectives issued after the block's backward (gradient reduction), and copies of the reduced gradient."""
    store: list[Op] = field(default_factory=list)
    """Copies to another memory issued after the block's forward (offloaded activations)."""
    hosted: float = 0.0
    """Bytes of ``saved`` that are in host memory between the block's forward and its backward."""
    after_update: list[Op] = field(default_factory=list)
    """Collectives after the update of its parameters (to distribute new weights)."""
    kind: tuple[bool, bool] = (False, False)
    """Which of a stack's layers they are (:meth:`ModelSpec.layer_kind`)."""

    @property
    def is_layer(self) -> bool:
        """Whether it stands for transformer layers, of the decoder or of the encoder."""
        return self.name.startswith(("layers", "encoder"))

    @property
    def is_head(self) -> bool:
        """Whether it is the language-model head (or the classifier)."""
        return self.name == "head"

    @property
    def saved_bytes(self) -> float:
        """Activation bytes kept until backward, for one repeat."""
        return sum(s.bytes for s in self.saved.values())

    @property
    def saved_by_mlp(self) -> float:
        """The part of it that only the MLP's backward reads."""
        return sum(s.bytes for s in self.saved.values() if all(user.startswith("mlp") for user in s.users))

    def copy(self) -> Block:
        """A block with its own lists and parameters; operators are immutable and shared."""
        return Block(
            self.name, self.repeat, [p.copy() for p in self.params], [*self.forward], [*self.backward],
            {**self.saved}, self.workspace, self.backward_workspace, self.recomputed, [*self.gather_forward],
            [*self.gather_backward], [*self.reduce], [*self.store], self.hosted, [*self.after_update], self.kind,
        )  # fmt: skip

    def repeated(self, times: int) -> Block:
        """The same block, ``times`` times in a row; it shares lists and parameters with this one."""
        return Block(
            self.name, times, self.params, self.forward, self.backward, self.saved, self.workspace,
            self.backward_workspace, self.recomputed, self.gather_forward, self.gather_backward, self.reduce,
            self.store, self.hosted, self.after_update, self.kind,
        )  # fmt: skip

    def drop_users(self, gone: Iterable[str]) -> None:
        """Remove backward operators and free the activations that are no longer needed."""
        names = frozenset(gone)
        self.backward = [op for op in self.backward if op.name not in names]
        kept = {k: replace(s, users=s.users - names) for k, s in self.saved.items()}
        self.saved = {k: s for k, s in kept.items() if s.users}


@dataclass(slots=True, frozen=True)
class Pipeline:
    """How the blocks are divided into stages: ``degree`` ranks hold ``chunks`` stages each and follow ``schedule``."""

    degree: int
    schedule: str
    chunks: int = 1
    layers: tuple[int, ...] = ()
    """Number of layers of every stage; empty: divided evenly."""
    send: Op | None = None
    """Bytes sent between neighboring stages for every micro-batch and direction."""
    waits: bool = False
    """Whether both ranks wait for every transfer."""
    keeps_outputs: bool = False
    """Whether what a stage puts out is kept until the step ends."""


@dataclass(slots=True, frozen=True)
class GraphSizes:
    """The sizes for which a graph was built, in addition to the model."""

    batch: int
    q_len: int
    kv_len: int
    dtype: str
    training: bool
    last_only: bool = False
    """Whether logits are computed only for each sequence's last token."""
    windows: bool = False
    """Whether layers with a sliding window are counted as attending to no more than the window."""
    source: int = 0
    """Tokens of the encoder's input, in an encoder-decoder."""
    encodes: bool = True
    """Whether the encoder reads them."""


@dataclass(slots=True)
class Graph:
    """One rank's step: blocks in forward order, the optimizer's operators, and how the step is repeated."""

    blocks: list[Block]
    update: list[Op] = field(default_factory=list)
    """Optimizer operators, once per step (built by :func:`ridgeline.graph.build_graph.optimizer_ops`)."""
    accumulation: int = 1
    """Micro-batches per step."""
    tokens: int = 0
    """Tokens of one micro-batch on one rank."""
    length: int = 1
    """Number of tokens of one sequence that are computed at once."""
    dtype: str = "fp32"
    """Compute dtype of matrix multiplications."""
    optimizer_bytes: float = 8.0
    """Optimizer-state bytes per trained element."""
    optimizer: tuple[str, float] | None = None
    """An optimizer other than the workload's: its name, and the bytes that its update moves per trained element."""
    clips: bool = True
    """Whether gradients are scaled in a separate pass before the update."""
    fused_update: bool = False
    """Whether the update happens in backward, so that a gradient is freed as soon as it is complete."""
    passes: int = 1
    """How often a step runs all forward and backward passes (twice, if the first only computes the gradient norm)."""
    buffers: float = 0.0
    """Bytes of communication buffers and constant tables."""
    kv_cache: float = 0.0
    """Bytes of the key/value cache."""
    reduce_every_micro_batch: bool = False
    """Whether gradient reduction happens in every micro-batch (else only in the last)."""
    gradients_resident: bool = False
    """Whether gradient buffers stay allocated from step to step (bucketed reduction)."""
    bucket_bytes: float = 0.0
    """Gradients are reduced in buckets of this size; 0: by block."""
    byte_sums: bool = False
    """Whether buckets are sent as one-byte codes, with a scale for each tensor."""
    layer_gathers: float | None = None
    """How often a layer is gathered in a pipeline's step, where everything outside the layers is gathered once; None:
    once for every forward and every backward pass that has gathers."""
    keep_gathered: bool = False
    """Whether gathered parameters stay until the block's backward."""
    residual: float = 0.0
    """Bytes of the residual stream of one micro-batch on this rank: a layer's input, and what a stage sends."""
    overlap_reduce: bool = True
    """Whether gradient reduction overlaps with backward."""
    gathers_after_reduction: bool = False
    """Whether backward gathers a block's parameters only after the gradients of the block before it are reduced."""
    fused: bool = False
    """Whether chains of elementwise operators run as one kernel each, as their bytes are counted."""
    weights_16bit: bool = False
    """Whether weights are stored in 16 bits, with fp32 masters among the optimizer's states (as in Megatron-LM)."""
    pipeline: Pipeline | None = None
    """None: every rank runs all blocks."""
    before_update: list[Op] = field(default_factory=list)
    """Collectives between the last backward pass and the optimizer's operators."""
    after_update: list[Op] = field(default_factory=list)
    """Copies after the optimizer's operators, before the blocks' collectives."""
    host_states: bool = False
    """Whether the optimizer's states, including master weights, are stored and updated in host memory or on disk."""
    delayed_update: bool = False
    """Whether the host's update overlaps with the next step."""
    host_parameters: bool = False
    """Whether parameters are stored in host memory or on disk between uses."""
    weight_buffers: float = 0.0
    """In inference: bytes of the device's buffers for weights that are stored elsewhere."""
    host_bytes: float = 0.0
    """Bytes of host memory used by this rank's offloaded tensors."""
    host_activations: bool = False
    """Whether saved activations are offloaded until their backward."""
    static: bool = False
    """Whether activations and temporaries are in one arena that persists from step to step."""
    decode_steps: int = 0
    """How often the graph is run, for a decode graph."""
    sizes: GraphSizes | None = None
    """The sizes for which the graph was built."""
    closing: list[Callable[[Graph], None]] = field(default_factory=list)
    """Passes to run after those of all techniques: they copy operators that later phases still modify."""

    def copy(self) -> Graph:
        """A copy that techniques can rewrite independently."""
        return replace(
            self, blocks=[b.copy() for b in self.blocks], update=[*self.update],
            before_update=[*self.before_update], after_update=[*self.after_update],
            closing=[*self.closing],
        )  # fmt: skip

    def close(self) -> Graph:
        """Run the closing passes; returns the graph."""
        for run in self.closing:
            run(self)
        self.closing = []
        return self

    def each_block(self, fn: Callable[[Block], None], layers_only: bool = False) -> Graph:
        """Apply ``fn`` to every block (or to the transformer layers only); returns the graph."""
        for block in self.blocks:
            if not layers_only or block.is_layer:
                fn(block)
        return self

    @property
    def params(self) -> list[tuple[Param, int]]:
        """Every parameter with the repeat count of its block."""
        return [(p, b.repeat) for b in self.blocks for p in b.params]

    @property
    def resident_bytes(self) -> float:
        """Bytes of parameters on this rank's device in inference: those that stay, and the buffers for the others."""
        return sum(p.stored_bytes * p.resident * n for p, n in self.params) + self.weight_buffers

    @property
    def stages(self) -> int:
        """Number of ranks that a micro-batch passes through one after another."""
        return self.pipeline.degree if self.pipeline else 1

    def cut(self, parts: int) -> list[list[Block]]:
        """The blocks of each of ``parts`` stages: embedding first, head last, layers divided evenly or as the pipeline
        specifies.

        Blocks of one name (dense and expert layers, layers with and without recomputation) alternate evenly.
        """
        layers = [b for b in self.blocks if b.is_layer]
        order = [i for i, n in alternate(layers) for _ in range(n)]
        found: list[list[Block]] = []
        counts = self.pipeline.layers if self.pipeline else ()
        ends = list(accumulate(counts or even(len(order), parts)))
        made: dict[tuple[int, int], Block] = {}  # stages with as many layers share a block
        alike: dict[tuple[int, ...], list[Block]] = {}
        for start, end in zip([0, *ends], ends, strict=False):
            part = tuple(order[start:end])
            if part not in alike:
                counts_of = [(i, part.count(i)) for i in dict.fromkeys(part)]
                for key in counts_of:
                    if key not in made:
                        made[key] = layers[key[0]].repeated(key[1])
                alike[part] = [made[key] for key in counts_of]
            found.append([*alike[part]])
        others = [b for b in self.blocks if not b.is_layer]
        found[0] = [b for b in others if not b.is_head] + found[0]
        found[-1] += [b for b in others if b.is_head]
        return found

    @property
    def flops(self) -> float:
        """Matrix-multiply FLOPs of one micro-batch, including recomputation, over all stages."""
        return sum(b.repeat * (sum(o.flops for o in b.forward) + sum(o.flops for o in b.backward)) for b in self.blocks)

    @property
    def model_flops(self) -> float:
        """The same without recomputation: the numerator of MFU."""
        return sum(
            b.repeat * (sum(o.flops for o in b.forward) + sum(o.flops for o in b.backward if not o.recompute))
            for b in self.blocks
        )


def even(layers: int, stages: int) -> list[int]:
    """Number of layers of each stage, as even as possible."""
    return [layers * (s + 1) // stages - layers * s // stages for s in range(stages)]


def alternate(blocks: list[Block]) -> list[tuple[int, int]]:
    """The order in which blocks run, as (index, number in a row): those of one name alternate evenly."""
    names = [b.name for b in blocks]
    if len(set(names)) == len(names):
        return [(i, b.repeat) for i, b in enumerate(blocks)]
    runs: list[tuple[int, int]] = []
    for name in dict.fromkeys(names):
        stack = [i for i, n in enumerate(names) if n == name]
        places = sorted(((n + 0.5) / blocks[i].repeat, i) for i in stack for n in range(blocks[i].repeat))
        for _, i in places:
            if runs and runs[-1][0] == i:
                runs[-1] = (i, runs[-1][1] + 1)
            else:
                runs.append((i, 1))
    return runs
