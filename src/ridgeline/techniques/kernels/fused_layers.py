"""Fused layers: one kernel instead of several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.nn.kernels.backends import Case, GatedKernel, NormKernel
    from ridgeline.runtime.train_build import TrainBuild


CHUNK, GPU_CHUNK = 256, 4096
"""Minimum number of logit rows per chunk: with fewer, matrix products are inefficient; on a GPU, each chunk also reads
and writes the whole gradient of the head."""


class FusedLayers(Technique):
    """Merge projections that read the same input, residual additions with norms, and the loss with its gradient."""

    card: ClassVar[Card] = Card(
        name="fused_layers",
        title="Fused layers",
        paper="arXiv:2110.05722",
        taxonomy="training/model/fused_layers",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="1.4-3.5x faster training of Transformers than with unfused kernels (LightSeq2)",
        changes=frozenset({"fused_linears"}),
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 5

    projections: bool = True
    """One matrix multiplication for query, key and value, one for gate and up."""
    elementwise: bool = True
    """Fuse residual additions into norms, and biases and activations into adjacent operators."""
    loss: bool = True
    """Cross-entropy that reads the logits in the compute dtype and writes their gradient in place."""
    chunked: bool = True
    """Compute the head's product inside the loss, in chunks of rows: the logits of a whole batch are never stored."""

    def changes(self) -> frozenset[Part]:
        """Merged projections, norms that include the preceding residual additions, and the loss."""
        linears = self.card.changes if self.projections else frozenset()
        norms: frozenset[Part] = frozenset({"fused_norms"}) if self.elementwise else frozenset()
        return linears | norms | ({"fused_loss"} if self.loss or self.chunked else frozenset())

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """All fusions at once."""
        return [cls()]

    def build(self, run: TrainBuild) -> None:
        """Replace parts of the model by functions that use fused kernels (C++ on the CPU, Triton on CUDA)."""
        from ridgeline.nn.model import fused, fused_loss
        from ridgeline.nn.model.attention import naive_attention

        if self.projections:
            fused.merge_projections(run.model, _gated_kernel(run))
            run.kernels.own("merged projections", run.device)
        if self.elementwise:
            fused.fuse_elementwise(run.model, _norm_kernel(run))
            fused.share_peaks(run.model)
            backend = run.model.backend
            if backend.function is naive_attention:
                run.model.set_attention(replace(backend, function=fused.fused_naive_attention))
        if run.divider is not None:  # a vocabulary that is split over ranks has its own loss
            return
        if self.chunked:
            least = CHUNK if run.device.type == "cpu" else GPU_CHUNK
            kernel = run.kernels.find("head_loss", _case(run))
            run.root.loss = partial(fused_loss.chunked_token_loss, rows=partial(chunk_rows, least=least), kernel=kernel)
        elif self.loss:
            run.root.loss = fused_loss.fused_token_loss
        for part in run.chunks:
            part.loss = run.root.loss

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Fewer operators and fewer bytes; the same FLOPs."""
        if self.projections:
            g.each_block(_merge_projections, layers_only=True)
        if self.elementwise:
            g.fused = True
            g.each_block(_fuse_elementwise, layers_only=True)
            if e.cluster.device.kind == "gpu":
                g.each_block(lambda b: _find_peaks(b, e.model, self.projections), layers_only=True)
            if "fp8" in e.cluster.device.peak_flops:
                g.each_block(_fuse_casts, layers_only=True)
                g.closing.append(_cast_once)
            wide = 3.0 if g.dtype in ("bf16", "fp16") else 1.0
            g.each_block(lambda b: _fuse_softmax(b, wide), layers_only=True)
        if e.parallel.get("tp", 1) > 1:  # a vocabulary that is split over ranks has its own loss
            return g
        if self.chunked:
            low = g.weights_16bit or has(e, "shards")  # which gathers weights in the compute dtype
            least = CHUNK if e.cluster.device.kind == "cpu" else GPU_CHUNK
            g.each_block(lambda b: _chunk_loss(b, _width(g), low, least))
        elif self.loss:
            g.each_block(lambda b: _fuse_loss(b, _width(g)))
        return g


def _case(run: TrainBuild, width: int = 0) -> Case:
    """What the operators of a step compute with: the residual stream in the weights' dtype, products in autocast's."""
    from ridgeline.nn.kernels.backends import Case

    stream = run.update.weights_16bit or next(run.model.parameters()).dtype
    return Case(run.device, stream, run.compute_dtype or stream, width)


def _norm_kernel(run: TrainBuild) -> NormKernel | None:
    """Who computes RMS norms, if the model has any."""
    spec = run.model.spec
    kernel: NormKernel | None = None
    if spec.norm == "rmsnorm" and not spec.norm_offset:
        kernel = run.kernels.find("norm", _case(run, spec.hidden_size))
    return kernel


def _gated_kernel(run: TrainBuild) -> GatedKernel | None:
    """Who computes SwiGLU, if the model has it."""
    spec = run.model.spec
    kernel: GatedKernel | None = None
    if spec.gated and spec.activation == "silu":
        kernel = run.kernels.find("swiglu", _case(run, spec.intermediate_size))
    return kernel


def _width(g: Graph) -> float:
    return 2.0 if g.dtype in ("bf16", "fp16") else 4.0


def chunk_rows(rows: int, vocab: int, hidden: int, least: int = CHUNK) -> int:
    """Rows of logits per chunk: as many as take the same bytes as the hidden states, rounded up to a multiple of
    ``least``."""
    return min(rows, max(1, -(-rows * hidden // (vocab * least))) * least)


_PEAKS = ("", ".peaks")
"""What becomes an operand's codes: a pass over it that finds largest magnitudes, where it is one of its own, and one
that writes codes."""


def _merge_projections(b: Block) -> None:
    groups = {
        "attention.qkv_proj": [f"attention.{n}_proj" for n in "qkv"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.experts.gate_up_proj": ["mlp.experts.gate_proj", "mlp.experts.up_proj"],
    }
    for name, parts in groups.items():
        adapters = tuple(f"{p}.{kind}" for p in parts for kind in ("lora_", "adapter_"))
        adapted = any(op.name.startswith(adapters) for op in b.forward)
        if adapted or sum(op.name in parts for op in b.forward) < 2:
            continue
        b.forward = _merge(b.forward, parts, name, 1)
        b.backward = _merge(b.backward, [f"{p}.dx" for p in parts], f"{name}.dx", 2)
        b.backward = _merge(b.backward, [f"{p}.dw" for p in parts], f"{name}.dw", 0)
        accumulated = {f"{p}.accumulate" for p in parts}
        b.backward = [op for op in b.backward if op.name not in accumulated]
        once = {f"{p}.quantize{peaks}" for p in parts[1:] for peaks in _PEAKS}  # they read the same input
        b.forward = [op for op in b.forward if op.name not in once]
        for peaks in _PEAKS:
            b.forward = _join(b.forward, [f"{p}.encode_weight{peaks}" for p in parts])
            for cast in ("dx.quantize", "dx.encode_weight"):
                b.backward = _join(b.backward, [f"{p}.{cast}{peaks}" for p in parts])
        b.backward = _join(b.backward, [f"{p}.dw.wide" for p in parts])
        inputs = {f"{p}.dx" for p in parts}
        b.backward = [changed(op, behind=f"{name}.dx") if op.behind in inputs else op for op in b.backward]
        renamed = {f"{p}.{d}": f"{name}.{d}" for p in parts for d in ("dw", "dx")}
        for key, s in b.saved.items():
            b.saved[key] = replace(s, users=frozenset(renamed.get(u, u) for u in s.users))


def _find_peaks(b: Block, spec: ModelSpec, merged: bool) -> None:
    """What norms and activations write, and gradients that they send back, come with their largest magnitudes
    (:func:`ridgeline.nn.model.fused.share_peaks`). Codes of a gated activation's gradient are made from what that is
    made of, in two passes: neither it nor its peaks are written.

    ``merged``: projections that read one input are one product.
    """
    found: set[str] = set()
    plain = spec.norm == "rmsnorm" and not spec.norm_offset and not spec.post_norm
    if plain and not spec.is_latent:
        found |= {f"attention.{n}_proj.quantize" for n in "qkv"}
        if not spec.parallel_residual and not spec.is_encoder_decoder:
            found |= {"mlp.gate_proj.quantize", "mlp.up_proj.quantize"}
            inside = not spec.output_norms and not spec.residual_multiplier
            found |= {"attention.o_proj.dx.quantize"} if inside else set()
    products = {op.name for op in b.forward}
    if merged and "attention.qkv_proj" in products:
        found.add("attention.q_proj.dx.quantize")
    if merged and spec.activation == "silu" and "mlp.gate_up_proj" in products:
        found.add("mlp.down_proj.quantize")
        mine = (op for op in b.backward if op.name == "mlp.gate_proj.dx.quantize" and op.kind == "cast")
        codes = next(mine, None)  # not what other engines convert, by scales that they have
        if codes is not None and not spec.mlp_bias and any(op.name == "mlp.gate_up_proj.dw" for op in b.backward):
            found.add("mlp.gate_proj.dx.quantize")
            # For each number behind the activation: 5 are read and written of 2 bytes, and 2 become 4 codes; then 3
            # are read, and again, and 4 codes are written.
            changes = {"mlp.act.bwd": 6 / 10, codes.name: 10 / 8}
            b.backward = [changed(op, bytes=op.bytes * changes.get(op.name, 1.0)) for op in b.backward]
    gone = {f"{name}.peaks" for name in found}
    b.forward = [op for op in b.forward if op.name not in gone]
    b.backward = [op for op in b.backward if op.name not in gone]


def _merge(ops: list[Op], names: list[str], new: str, side: int) -> list[Op]:
    """Merge several GEMMs that differ only in dimension ``side`` of (m, n, k) into one."""
    found = [op for op in ops if op.name in names]
    if not found:
        return ops
    first = found[0]
    whole = sum(op.shape[side] for op in found)
    shape = tuple(whole if i == side else d for i, d in enumerate(first.shape))

    def elements(s: tuple[int, ...]) -> int:
        return s[0] * s[1] + s[0] * s[2] + s[1] * s[2]

    moved = first.bytes * elements(shape) / elements(first.shape)
    merged = changed(first, name=new, flops=sum(op.flops for op in found), bytes=moved, shape=shape)
    return [merged if op is first else op for op in ops if op is first or op.name not in names]


def _join(ops: list[Op], names: list[str]) -> list[Op]:
    """Casts of the parts of a merged tensor become one."""
    found = [op for op in ops if op.name in names and op.kind == "cast"]
    if len(found) < 2:
        return ops
    whole = changed(found[0], bytes=sum(op.bytes for op in found))
    first = found[0]
    return [whole if op is first else op for op in ops
            if op is first or op.name not in names or op.kind != "cast"]  # fmt: skip


def _fuse_elementwise(b: Block) -> None:
    def fuse(ops: list[Op]) -> list[Op]:
        # A sum that stays in registers for the following norm is written, but not read again.
        kept = [op for op in ops if op.role != "bias_gradient"]
        return [changed(op, bytes=op.bytes * 2 / 3) if op.kind == "residual" else op for op in kept]

    b.forward, b.backward = fuse(b.forward), fuse(b.backward)


_NORMED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose input is written by a norm."""


def _fuse_casts(b: Block) -> None:
    """Conversion to fp8 as in Transformer Engine (arXiv:2209.05433), with scales of earlier steps: norms write fp8
    directly; everything else is read once and written both as is and transposed."""

    def fuse(op: Op) -> list[Op]:
        if op.kind != "quantize":
            return [op]
        layer, _, what = op.name.rpartition(".")
        if what == "quantize" and layer.endswith(_NORMED):
            return []
        return [changed(op, kind="cast", bytes=op.bytes * 4 / 3)]

    b.forward = [new for op in b.forward for new in fuse(op)]
    b.backward = [new for op in b.backward for new in fuse(op)]


def _cast_once(g: Graph) -> None:
    """Weights that do not change between micro-batches are converted once per step; each micro-batch is charged an
    equal part. Products of weight gradients add to the sums themselves: 8 bytes per element instead of 2 and 10."""
    for b in g.blocks:
        b.backward = [changed(op, bytes=op.bytes * 0.6) if op.kind == "accumulate" else op for op in b.backward]
        if not b.gather_forward:
            b.forward = [changed(op, bytes=op.bytes / g.accumulation) if op.name.endswith(".quantize_weight") else op
                         for op in b.forward]  # fmt: skip


def _fuse_softmax(b: Block, copies: float) -> None:
    """Scale, mask and softmax in one kernel over the scores, which become the probabilities in place.

    ``copies``: tensors in the compute dtype that the plain softmax stores (in 16 bits an fp32 result and its copy).
    """
    for prefix in ("attention", "cross_attention"):
        probs = b.saved.get(f"{prefix}.probs")
        if probs is None:
            continue
        kept = probs.bytes / copies
        b.forward = [op for op in b.forward if op.name != f"{prefix}.mask"]
        b.saved[f"{prefix}.probs"] = replace(probs, bytes=kept)
        activations = [op for op in b.forward if op.kind == "activation"]
        b.workspace = max([0.0, *(op.bytes / 3 for op in activations)])
        b.backward_workspace = max([kept, *(op.bytes for op in activations)])


def _fuse_loss(b: Block, width: float) -> None:
    """The logits are overwritten by their gradient in their own dtype, without an fp32 copy."""
    if "logits" not in b.saved:
        return
    rows, vocab, _ = next(op.shape for op in b.forward if op.name == "head.out")
    size = float(rows * vocab) * width
    b.forward = [changed(op, bytes=2 * size) if op.name == "loss" else op for op in b.forward]
    b.backward = [changed(op, bytes=2 * size) if op.name == "loss.bwd" else op for op in b.backward]
    b.saved["logits"] = replace(b.saved["logits"], bytes=size)
    b.workspace = 0.0


def _chunk_loss(b: Block, width: float, low: bool, least: int) -> None:
    """The head's three products move into the forward pass, chunk by chunk; backward scales their results.

    ``low``: the head's weight is already in the compute dtype. ``least``: see :func:`chunk_rows`.
    """
    if "logits" not in b.saved:
        return
    product = next(op for op in b.forward if op.name == "head.out")
    rows, vocab, hidden = product.shape
    trains = any(op.name == "head.out.dw" for op in b.backward)
    dx, dw = rows * hidden * width, vocab * hidden * 4.0 if trains else 0.0
    b.forward = [changed(op, bytes=2 * rows * vocab * width) if op.name == "loss" else op
                 for op in b.forward if op.name != "head.out.cast"]  # fmt: skip
    b.forward += [changed(op, direction="forward") for op in b.backward if op.name in ("head.out.dx", "head.out.dw")]
    b.drop_users(["head.out.dx", "head.out.dw", "head.out.grad_cast"])
    b.backward = [changed(op, bytes=2 * (dx + dw)) if op.name == "loss.bwd" else op for op in b.backward]
    del b.saved["logits"]
    b.saved["head.gradients"] = Saved(dx + dw, frozenset({"loss.bwd"}))
    # Besides a chunk of logits: the head's input, and in 16 bits copies of its weight and of the weight's gradient.
    copies = 0 if width == 4.0 else (not low) + trains
    b.workspace = chunk_rows(rows, vocab, hidden, least) * vocab * width + dx + copies * vocab * hidden * width
    for p in b.params:
        if p.name == product.param:
            p.working_bytes = 0.0
