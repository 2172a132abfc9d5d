"""FlashAttention: exact attention without a score matrix in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import AFTER_AMPERE, BIASED, LATENT, PORTABLE, Block, Graph, Op, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import CAPPED_ROWS
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.spec.scheduling import Scheduling


class FlashAttention(Technique):
    """Fuse scores, mask, softmax and values into one kernel that never writes the score matrix (Dao et al. 2022).

    Without it, attention is the explicit product of three operators; with it, PyTorch's fused
    ``scaled_dot_product_attention`` (FlashAttention-2 on CUDA, its blocked counterpart on CPU). In the serving engine
    it is one kernel over the pages of the cache, of ours in Triton or C++, and that function for prompts on a CPU;
    without it each sequence's keys and values are gathered for the three operators. Packed documents are
    computed each by itself, on CUDA in 16 bits by one kernel, which in training has sliding windows too. What that
    kernel lacks, soft caps on scores, ALiBi and windows that are chunks, training on CUDA in 16 bits computes by a
    kernel of ours in Triton. Elsewhere these are a bias on the scores, but for soft caps: attention with these goes by
    blocks of queries that are computed again in backward.
    """

    card: ClassVar[Card] = Card(
        name="flash_attention",
        title="FlashAttention",
        paper="arXiv:2205.14135",
        taxonomy="training/model/attention",
        tasks=frozenset({"pretrain", "finetune", "generate", "serve"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune", "generate", "serve"}),
        claim="-35 % forward and -25 % backward attention time (measured in arXiv:2311.03687)",
        default_in=frozenset({"serve"}),
        changes=frozenset({"fused_attention"}),
        in_engines=True,
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "compile"

    generation: Literal[1, 2, 3] | None = None
    """FlashAttention version of the GPU kernels. 2, PyTorch's and the default, is twice as fast as 1
    (arXiv:2307.08691); 3, also in cuDNN and Transformer Engine, adds optimizations for Hopper (arXiv:2407.08608). 1 and
    3 can be predicted, not run."""

    def check(self, e: Experiment) -> None:
        """A learned bias on the scores gets no gradient from the kernels."""
        self.needs(e.model.position != "relative" or not e.is_training, f"{e.model.name} learns relative positions, a"
                   " bias on the scores that fused attention computes no gradient of", "leave it out")  # fmt: skip

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """PyTorch's kernels only: a search does not switch to another library."""
        return [cls()]

    @classmethod
    def saves_memory(cls, e: Experiment) -> str:
        """The score matrix is not stored."""
        return "flash_attention" if not has(e, "fused_attention") else ""

    def lazy(self) -> bool:
        """True: it needs only shapes."""
        return True

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Fuse three operators into one; the score matrix and its gradient are never stored."""
        window, length = e.model.sliding_window, g.length
        groups = e.model.num_heads // e.model.num_kv_heads
        batch = max(1, g.tokens // g.length)
        documents = e.is_training and e.training.separates_documents
        capped, alibi = e.model.attention_soft_cap is not None, e.model.position == "alibi"
        cpu, varlen = e.cluster.device.kind == "cpu", _has_varlen(e)
        own = self.generation in (None, 2) and _has_own(e)
        # Attention within each document: on a CPU by calls, whose results are joined, on a GPU by one kernel, to which
        # the stages of a pipeline cannot pass where documents end, which ours does not ask.
        able = e.model.causal and not e.model.score_changes if cpu else varlen and e.parallel.get("pp", 1) == 1
        splits = documents and able and not has(e, "compiled_blocks")
        whole = documents and not splits
        separate = whole and not own
        cut, mixed = bool(window and length > window), e.model.window_every > 1
        slides = cut and (own or (varlen and not whole and not e.model.chunked_window))
        # Other kernels handle none of this themselves: one mask serves all layers of a kind.
        masks = (batch if documents else 1) if cut and not slides else 0
        masks += (batch if separate else 1) if ((capped and not own) or separate) and (mixed or not cut) else 0
        g.buffers += masks * length * length * DTYPE_BYTES[e.dtype]
        if alibi and not own:  # as a bias, which the mask is a part of
            g.buffers += e.model.num_heads * length * length * DTYPE_BYTES[e.dtype]
        first = self.generation == 1 or (alibi and not own)  # FlashAttention-2 accepts a bias only since 2024
        later = self.generation in (None, 2) and e.cluster.device.architecture.lower() in AFTER_AMPERE

        def fuse(b: Block) -> None:
            windowed = cut and (b.kind[1] or not mixed)
            chunked = windowed and e.model.chunked_window
            ours = own and (capped or alibi or whole or chunked)
            masked = (windowed and not slides) or separate
            banded = windowed and slides and e.model.causal
            causal = e.model.causal and not masked and not banded
            blocked = capped and not ours
            kernel = BIASED if first or masked or blocked else PORTABLE if later else ""
            share = _computed(length) if blocked and causal and length > 1 else 1.0
            if banded and window:
                share = window / length if chunked else _band(window, length)
            keys = min(length, window + _BLOCK) if banded and window else 0
            _fuse(b, groups, batch, causal, kernel if e.is_training else "", share, keys)
            if ours:
                _compute_again(b)
            context = b.saved.get("attention.context")
            if splits and cpu and context and not masked:
                b.saved["attention.parts"] = Saved(context.bytes, frozenset({"attention.flash.bwd"}))

        g = g.each_block(fuse, layers_only=True)
        return g.each_block(_keep_operands, layers_only=True) if capped and not own else g

    def scheduling(self, s: Scheduling) -> None:
        """A serving engine keeps no memory for score matrices."""
        s.flash = True

    def serve(self, run: ServeBuild) -> None:
        """Switch the model's attention backend."""
        self.apply(run)

    def apply(self, run: Build) -> None:
        """Switch the model's attention backend."""
        real = self.generation in (None, 2)
        self.needs(real, f"generation={self.generation} can be predicted, not run", "use generation=2")
        run.model.set_attention(run.fused_attention)


_VARLEN = ("ampere", "ada", *AFTER_AMPERE)
"""Architectures on which PyTorch's kernel for sequences of different lengths runs."""
_PARTS = ("scores", "soft_cap", "mask", "softmax", "values")
_BACKWARD_PARTS = ("soft_cap.bwd", "values.dprobs", "values.dv", "softmax.bwd", "scores.dq", "scores.dk")


_BLOCK = 128
"""Queries of a block of the kernel, which sees all keys that one of them does."""


def _fits(e: Experiment) -> bool:
    """Whether a GPU's kernels for attention in training that need no mask compute in this dtype and width of heads."""
    m, device = e.model, e.cluster.device
    narrow = e.dtype in ("bf16", "fp16") or has(e, "compute_dtype")
    fits = m.head_dim <= 256 and m.head_dim % 8 == 0
    return e.is_training and device.architecture.lower() in _VARLEN and narrow and fits


def _has_varlen(e: Experiment) -> bool:
    """Whether attention in training is by PyTorch's kernel for documents and windows."""
    return _fits(e) and e.model.attention_soft_cap is None and e.model.position not in ("alibi", "relative")


def _has_own(e: Experiment) -> bool:
    """Whether attention in training is by our kernel where PyTorch has none."""
    m = e.model
    known = m.position != "relative" and not (m.position == "alibi" and m.attention_sinks)
    return _fits(e) and known and not m.is_latent and e.parallel.get("cp", 1) == 1


def _band(window: int, length: int) -> float:
    """The part of all scores of a row that are within ``window`` of each other: as elsewhere, the causal half of them
    counts twice."""
    return 1.0 - (1.0 - window / length) ** 2


def _computed(length: int) -> float:
    """The part of all scores that is computed where blocks of queries leave out the keys behind them."""
    ends = [*range(CAPPED_ROWS, length, CAPPED_ROWS), length]
    found: int = sum(end * (end - start) for start, end in pairwise([0, *ends]))
    return found / (length * length)


def _fuse(b: Block, groups: int, batch: int, causal: bool, kernel: str, share: float,
          keys: int) -> None:  # fmt: skip
    """Replace the operators of every attention of a block of ``batch`` sequences; ``groups`` query heads share one
    key/value head; ``causal``: the kernel may skip the masked half of self-attention in a decoder; ``share``: the part
    of the products that is counted; ``keys``: those that a block of queries sees, if not all."""
    for prefix in ("attention", "cross_attention"):
        scores = next((o for o in b.forward if o.name == f"{prefix}.scores"), None)
        if scores is None:
            continue
        heads, q_len, kv_len, dim = scores.shape
        value = next(o.shape[2] for o in b.forward if o.name == f"{prefix}.values")
        flops = 4.0 * heads * q_len * kv_len * dim * share
        elements = float(heads * (2 * q_len + 2 * kv_len) * dim)
        width = scores.bytes / (heads * q_len * dim + heads * kv_len * dim + heads * q_len * kv_len)
        width = 2.0 if scores.dtype in ("bf16", "fp16") else max(width, 4.0) if scores.dtype == "fp32" else width
        old = {f"{prefix}.{part}" for part in _PARTS}
        old_backward = {f"{prefix}.{part}" for part in _BACKWARD_PARTS}
        each = max(1, heads // batch)
        if any(o.name == f"{prefix}.absorb" for o in b.forward):
            groups, kernel = each, LATENT
        seen = keys if keys and prefix == "attention" else kv_len
        shape = (batch, each, max(1, each // groups), q_len, seen, dim)
        masked = causal and prefix == "attention" and b.name.startswith("layers")
        fused = Op(f"{prefix}.flash", "attention", "attention", flops=flops, bytes=elements * width,
                   dtype=scores.dtype, shape=shape, causal=masked, kernel=kernel)  # fmt: skip
        b.forward = _replace(b.forward, old, fused)
        if any(o.name in old_backward for o in b.backward):  # not below the first adapter of a frozen model
            # Five matrix products backward (scores again, dV, dP, dQ, dK) against two forward.
            grad = Op(f"{prefix}.flash.bwd", "attention", "attention", "backward", 2.5 * flops, 2 * elements * width,
                      scores.dtype, shape, causal=masked, kernel=kernel)  # fmt: skip
            b.backward = _replace(b.backward, old_backward, grad)
            saved = {k: v for k, v in b.saved.items() if not k.startswith((f"{prefix}.probs", f"{prefix}.capped"))}
            shared = heads * kv_len * dim * width / groups
            for part, kept in (("q", heads * q_len * dim * width), ("k", shared), ("v", shared)):
                saved[f"{prefix}.{part}"] = Saved(kept, frozenset({grad.name}))
            context = saved.get(f"{prefix}.context")
            own, users = frozenset({grad.name}), context.users if context else frozenset()
            out = float(heads * q_len * dim) * width
            if value == dim:
                saved[f"{prefix}.context"] = Saved(out, users | own)
            else:  # computed with values as wide as the keys, of which a part is read on
                saved[f"{prefix}.padded_context"] = Saved(out, own)
            saved[f"{prefix}.lse"] = Saved(heads * q_len * 4.0, frozenset({grad.name}))
            b.saved = saved
        small = float(heads * q_len * dim) * width
        others = [o for o in b.forward if o.kind == "activation"]
        expanded = [p.numel * 4.0 for o in b.forward if o.kind == "cast" for p in b.params if p.name == o.param]
        b.workspace = max([small, *expanded] + [o.bytes / 3 for o in others])
        b.backward_workspace = max([3 * small, *expanded] + [o.bytes for o in others])


def _compute_again(b: Block) -> None:
    """The two kernels of our backward pass both compute scores and the gradients of weights: two products more, as many
    as the forward pass has."""
    forward = next((o for o in b.forward if o.name == "attention.flash"), None)
    at = next((i for i, o in enumerate(b.backward) if o.name == "attention.flash.bwd"), None)
    if forward is not None and at is not None:
        again = changed(forward, name="attention.flash.scores", direction="backward", recompute=True)
        b.backward = [*b.backward[:at], again, *b.backward[at:]]


def _keep_operands(b: Block) -> None:
    """Where scores are computed again, neither their sums nor the result is kept for that."""
    b.saved.pop("attention.lse", None)
    context = b.saved.get("attention.context")
    if context is not None:
        users = context.users - {"attention.flash.bwd"}
        b.saved["attention.context"] = Saved(context.bytes, users)
        if not users:
            del b.saved["attention.context"]


def _replace(ops: list[Op], gone: set[str], new: Op) -> list[Op]:
    out: list[Op] = []
    for op in ops:
        if op.name not in gone:
            out.append(op)
        elif new not in out:
            out.append(new)
    return out
