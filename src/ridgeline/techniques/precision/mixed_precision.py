"""Mixed precision: low-precision matrix multiplications over fp32 master weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import has, refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild

_MATMUL = {"gemm", "bmm", "attention"}
_FP32_SAVED = ("input", "mlp_sum", "cross_input", "attention_sum", "final_sum", "embed.sum")


class MixedPrecision(Technique):
    """Run matrix multiplications in 16 bits.

    With ``weights=fp32`` (autocast, FSDP) parameters, gradients and optimizer states stay fp32 and are cast on use.
    With ``weights=low`` (Megatron, DeepSpeed) parameters and all activations are 16-bit, gradients are summed in fp32,
    and the optimizer keeps an fp32 master copy: 2 + 4 + 12 = 18 bytes per parameter under AdamW. The parameters are
    then views of one flat buffer, which one fused update rewrites (LightSeq2, arXiv:2110.05722). With
    ``weights=gathered`` (FSDP2's own policy, torchtitan) shards, their gradients and states stay fp32, 16 bytes per
    parameter, and all that is gathered and computed is 16-bit.

    fp16 trains with dynamic loss scaling: a step whose gradients overflow is skipped and the scale halved.
    """

    card: ClassVar[Card] = Card(
        name="mixed_precision",
        title="Mixed-precision training",
        paper="arXiv:1710.03740",
        taxonomy="hardware/precision",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        standard=True,
        validated=frozenset({"pretrain", "finetune"}),
        claim="about half the memory of fp32 at the same accuracy",
        tolerance=0.02,
        quality="training loss within 2 % of fp32 after the same tokens",
        changes=frozenset({"compute_dtype"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 1
    """After flash_attention, so that it also applies to the fused operator."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    """Compute dtype of matrix multiplications."""
    weights: Literal["fp32", "low", "gathered"] = "fp32"
    """How parameters are stored: in fp32 and cast on use; in the compute dtype with a master copy; or as fp32 shards
    that are gathered in the compute dtype, in which all else is computed (predicted, not yet run)."""
    loss: Literal["in_place", "copies", "compiled"] = "in_place"
    """How the loss is taken in 32 bits: the logits are overwritten by their gradient; by PyTorch's cross_entropy of a
    copy, which keeps log-probabilities and in backward two gradients of their size; or by the same, compiled, which
    reads the logits as they are and writes their gradient beside them (the latter two predicted, not yet run)."""

    loss_scale: float = Field(default=2.0**16, ge=1.0)
    """fp16: initial loss scale."""
    growth_interval: int = Field(default=2000, ge=1)
    """fp16: number of consecutive steps without overflow after which the scale doubles."""

    @property
    def runs(self) -> bool:
        """What is our own engine's: parameters that are stored as they are gathered, and its loss."""
        return self.card.runs and self.weights != "gathered" and self.loss == "in_place"

    def changes(self) -> frozenset[Part]:
        """16-bit weights have a master copy; fp16 scales the loss."""
        low: frozenset[Part] = frozenset({"masters"}) if self.weights == "low" else frozenset()
        return self.card.changes | low | ({"loss_scale"} if self.dtype == "fp16" else frozenset())

    def stored(self) -> dict[str, Any]:
        """16-bit weights are stored with a master copy."""
        return {"weights": self.weights, "dtype": self.dtype} if self.weights == "low" else {}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """bf16 where the device supports it, otherwise fp16; master weights are kept in both cases."""
        dtype: Literal["bf16", "fp16"] = "bf16" if "bf16" in e.cluster.device.peak_flops else "fp16"
        return [cls(dtype=dtype, weights="fp32"), cls(dtype=dtype, weights="low")]

    @classmethod
    def saves_memory(cls, e: Experiment) -> str:
        """Smaller activations."""
        return "mixed_precision" if e.dtype == "fp32" and not has(e, "compute_dtype") else ""

    def lazy(self) -> bool:
        """True: parameters are rounded once they have values."""
        return True

    def check(self, e: Experiment) -> None:
        """Needs fp32 master weights, and shards to gather."""
        self.needs(e.dtype == "fp32", f"the weights are stored in {e.dtype}", 'set workload dtype = "fp32"')
        sharded = has(e, "shards") and not has(e, "replicas")
        self.needs(self.weights != "gathered" or sharded, "weights=gathered is for parameters that are shards, and"
                   " gathered to be used", "add zero:stage=3, or use weights=low")  # fmt: skip
        if self.loss != "in_place":
            refuse(self, e, "fused_loss", f"loss={self.loss} is how the loss is taken, which {{other}} fuses",
                   "use loss=in_place, or leave the loss out of {other}")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Matrix multiplications and most activations take half the bytes; every weight is cast once per
        micro-batch."""
        g.dtype = self.dtype
        if self.loss != "in_place":
            g.closing.append(_copied_loss if self.loss == "copies" else _compiled_loss)
        if self.weights != "fp32":
            return _all_low(g, self.dtype, self.weights == "low")
        # The residual stream stays fp32, unless every sum of it goes through a norm with a low-precision result.
        wide = ("embed.sum",) if e.model.post_norm else _FP32_SAVED
        return g.each_block(lambda b: _lower(b, self.dtype, wide))

    def build(self, run: TrainBuild) -> None:
        """Run the forward pass under ``torch.autocast``, or convert the parameters themselves; scale an fp16 loss."""
        import torch

        from ridgeline.techniques.precision.mixed_precision_torch import DynamicScale

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]
        if self.dtype == "fp16":
            run.update.scaler = run.hooks.states["scaler"] = DynamicScale(self.loss_scale, self.growth_interval)
        if self.weights == "fp32":
            run.compute_dtype = dtype
            return
        from ridgeline.runtime.flat import FlatWeights, lower

        flat = FlatWeights(run.update.masters)
        run.update.weights_16bit = dtype
        run.hooks.filled.append(lambda: run.update.masters.update(lower(run.root, dtype)))
        run.sync = flat.sync
        run.update.make_optimizer = flat.optimizer


def _all_low(g: Graph, dtype: str, stored: bool) -> Graph:
    """Everything except statistics and dropout masks is 16-bit; the loss is computed in 32 bits. ``stored``: so are the
    parameters, beside a master copy."""
    g.residual /= 2
    if stored:
        g.weights_16bit = True
        g.gradients_resident = True  # accumulated in place, in fp32
        g.optimizer_bytes += 4.0
    g.closing.append(_sum_gradients)

    def low(o: Op) -> Op:
        if o.dtype != "fp32" or o.kind == "loss" or "dequantize" in o.name or (o.axis and o.name.startswith("loss.")):
            return o
        return changed(o, dtype=dtype, bytes=o.bytes / 2, link_bytes=o.link_bytes / 2)

    for b in g.blocks:
        b.forward = [low(o) for o in b.forward]
        b.backward = [low(o) for o in b.backward]
        for p in b.params:
            if stored and p.bytes_per_element == 4.0:
                p.bytes_per_element = 2.0
        for key, s in b.saved.items():
            if not key.endswith((".stats", ".lse", ".mask")):
                # A softmax in fp32 is kept, in addition to its low-precision copy.
                b.saved[key] = replace(s, bytes=s.bytes * (1.5 if key.endswith(".probs") else 0.5))
        b.workspace /= 2
        b.backward_workspace /= 2
        if "logits" in b.saved:  # the loss is taken in fp32 on a copy
            b.workspace = 2 * b.saved["logits"].bytes
    return g


def _copied_loss(g: Graph) -> None:
    """What PyTorch's cross_entropy of an fp32 copy of 16-bit logits moves and holds, in bytes per logit.

    Forward: copy (2 read, 4 written), log-softmax (8). Backward: a gradient that is zero but for the labels (4), that
    of log-softmax (12), in 16 bits (6). At once: log-probabilities and two gradients, beside the block of the 16-bit
    logits, in which none of them fits. Over a vocabulary that is divided (torch.distributed.tensor.parallel), maxima,
    shifted and exponentiated logits are tensors of their own: 26 forward, 46 backward, and a fourth one is held.
    """
    for b in g.blocks:
        if "logits" not in b.saved or not any(o.name == "loss" for o in b.forward):
            continue
        rows, vocab, _ = next(o.shape for o in b.forward if o.name == "head.out")
        size = float(rows * vocab)
        divided = any(o.name == "loss.reduce" for o in b.forward)
        forward, backward = (26.0, 46.0) if divided else (14.0, 22.0)
        b.forward = [changed(o, bytes=forward * size) if o.name == "loss" else o for o in b.forward]
        b.backward = [changed(o, bytes=backward * size) if o.name == "loss.bwd" else o for o in b.backward]
        b.saved["logits"] = replace(b.saved["logits"], bytes=4.0 * size)
        b.workspace = (10.0 if divided else 6.0) * size
        b.backward_workspace = (14.0 if divided else 10.0) * size


def _compiled_loss(g: Graph) -> None:
    """Two bytes per logit: read twice forward, for sums and for the loss, and once backward, where as many are
    written."""
    for b in g.blocks:
        if "logits" in b.saved and any(o.name == "loss" for o in b.forward):
            rows, vocab, _ = next(o.shape for o in b.forward if o.name == "head.out")
            size = 2.0 * rows * vocab
            b.forward = [changed(o, bytes=2 * size) if o.name == "loss" else o for o in b.forward]
            b.backward = [changed(o, bytes=2 * size) if o.name == "loss.bwd" else o for o in b.backward]
            b.saved["logits"] = replace(b.saved["logits"], bytes=size)
            b.workspace, b.backward_workspace = 0.0, size


def _sum_gradients(g: Graph) -> None:
    """Add each micro-batch's 16-bit gradients to their fp32 sums: 2 bytes per element read, 4 read and 4 written."""
    if g.fused_update:  # gradients are used up one by one
        return
    for b in g.blocks:
        sizes = {p.name: p.numel for p in b.params if p.trainable and p.grad_shards == 1}
        b.backward = [
            new for op in b.backward for new in (op, *(
                [Op(f"{op.name}.sum", op.module, "accumulate", "backward", 0, 10.0 * sizes[op.param], op.dtype)]
                if op.role == "weight_gradient" and op.param in sizes else []
            ))
        ]  # fmt: skip


def _lower(b: Block, dtype: str, wide_saved: tuple[str, ...]) -> None:
    def low(o: Op) -> Op:
        if o.axis and (o.name.startswith(("embed.", "loss.")) or o.dtype == "int64"):  # sums of fp32 rows; counts
            return o
        if o.axis and o.axis != "dp":  # partial sums of matrix products are communicated in their output dtype
            return changed(o, bytes=o.bytes / 2, link_bytes=o.link_bytes / 2)
        if o.kind in _MATMUL or (o.kind in ("rope", "activation", "softmax", "mask", "copy") and o.dtype == "fp32"):
            return changed(o, dtype=dtype, bytes=o.bytes / 2)
        return o

    b.forward = [low(o) for o in b.forward]
    b.backward = [low(o) for o in b.backward]
    casts: list[Op] = []
    params = {p.name: p for p in b.params}
    kept_weights = {o.param for o in b.backward}  # below the first adapter of a frozen model, none
    for o in b.forward:
        p = params.get(o.param)
        if o.kind == "gemm" and p is not None and p.bytes_per_element == 4.0:
            casts.append(Op(f"{o.name}.cast", o.module, "cast", bytes=6.0 * p.numel, dtype=dtype, param=p.name))
            if p.trainable:  # the gradient comes out in the low dtype and is cast to fp32
                grad = Op(f"{o.name}.grad_cast", o.module, "cast", "backward", 0, 6.0 * p.numel, dtype, param=p.name)
                b.backward.append(grad)
            p.working_bytes = 2.0 if p.name in kept_weights or not b.backward else 0.0
    b.forward = casts + b.forward
    kept = {}
    for key, saved in b.saved.items():
        wide = key in wide_saved or key.endswith((".stats", ".lse", ".routing", ".mask"))
        kept[key] = saved if wide else Saved(saved.bytes / 2, saved.users)
    for key in [k for k in kept if k.endswith(".probs")]:  # softmax in fp32, and its low-precision copy
        kept[key] = Saved(3 * kept[key].bytes, kept[key].users)
    b.saved = kept
    b.workspace /= 2
    b.backward_workspace /= 2
    if "logits" in kept:  # the loss is taken in fp32 on a copy
        b.workspace = 2 * kept["logits"].bytes
    b.recomputed /= 2
