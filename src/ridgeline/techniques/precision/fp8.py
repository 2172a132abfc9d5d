"""FP8: the layers' matrix multiplications in 8-bit floating point, in training and inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import COLUMN, ROW
from ridgeline.techniques.registry import has, refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build
    from ridgeline.runtime.train_build import TrainBuild

COMPACT_BYTES = 5.0
"""Optimizer bytes per element with fp8 states: fp16 master, fp8 first moment, fp16 second moment."""


class FP8(Technique):
    """Run the linear layers of the blocks in fp8, with 16-bit activations elsewhere; inference also stores their
    weights in fp8.

    Inputs, weights and gradients are e4m3; each tensor has a scale from its own largest magnitude. Weights are
    quantized once a pass, and their codes kept for its backward half, unless a technique frees weights between uses,
    moves what is saved, or has several micro-batches in flight. ``gradients`` and ``states`` add the rest of FP8-LM
    (arXiv:2310.18313). On a device without fp8 units the products are emulated in training; at inference weights are
    stored in fp8 and multiplied in 16 bits.

    At inference each row of inputs has a scale, a power of two, and a product's results are rounded to bf16. On a GPU
    up to 8 rows are not rounded to fp8: their kernels read the codes of weights and multiply inputs in 16 bits, so that
    few sequences have smaller errors than those of a larger batch; without fp8 units no rows are.
    """

    card: ClassVar[Card] = Card(
        name="fp8",
        title="FP8 linear layers",
        paper="arXiv:2209.05433",
        taxonomy="hardware/precision/fp8",
        tasks=frozenset({"pretrain", "finetune", "generate", "serve"}),
        lossless=False,
        validated=frozenset({"pretrain", "generate", "serve"}),
        claim="GPT models up to 175B trained to the loss of 16-bit training with unchanged hyperparameters; with fp8"
        " gradients and states (FP8-LM, arXiv:2310.18313) GPT-175B in 39 % less memory, 75 % faster than BF16 on H100",
        tolerance=2**-4,  # the largest rounding error of a weight in e4m3
        quality="training loss within 5 % of 16-bit training after the same tokens; perplexity within 2 %",
        changes=frozenset({"weights", "experts", "products"}),
        needs={"compute_dtype": "the rest of the model runs in 16 bits, which is not on"},
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 2

    scaling: Literal["tensor", "rowwise", "delayed"] = "tensor"
    """Training: a scale for each tensor; one for each row of each operand, a power of two, with gradients in e4m3 too
    (torchao's ``rowwise``); or, predicted and not yet run, one for each tensor from earlier steps (Transformer
    Engine)."""
    gathered: Literal["values", "codes"] = "values"
    """Training: what is gathered of weights that are shards, and of activations that tensor-parallel ranks divide. With
    codes each rank converts its own part, by scales that all agree on (torchao's float8 all-gather): predicted, not
    yet run."""
    gradients: bool = False
    """Training: sum gradients over data-parallel ranks in e4m3, with one scale per tensor shared by all ranks."""
    states: bool = False
    """Training: keep the first moment in e4m3, the second and the master weights in fp16, with a scale per tensor."""

    @property
    def runs(self) -> bool:
        """All but the scales of earlier steps."""
        return self.card.runs and self.scaling != "delayed" and self.gathered == "values"

    def stored(self) -> dict[str, Any]:
        """Optimizer states in 8 and 16 bits."""
        return {"states": True} if self.states else {}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Only where the device multiplies in fp8: elsewhere it is emulated, or only a storage format."""
        if "fp8" not in e.cluster.device.peak_flops:
            return []
        low = e.is_training and has(e, "masters")
        return [cls(), *([cls(states=True)] if low else [])]

    def check(self, e: Experiment) -> None:
        """Training needs 16-bit arithmetic for the rest and a GPU that multiplies in fp8; inference needs a single
        weight format."""
        if not e.is_training:
            self.needs(not (self.gradients or self.states), "there are no gradients or states without training",
                       "drop gradients and states")  # fmt: skip
            self.needs(self.gathered == "values", "gathered=codes is of training", "drop gathered")
            self.needs(self.scaling == "tensor", f"scaling={self.scaling} is of training: stored weights have a scale"
                       " for each tensor", "drop scaling")  # fmt: skip
            return
        device = e.cluster.device
        self.needs(device.kind != "gpu" or "fp8" in device.peak_flops, f"{device.name} has no fp8 arithmetic",
                   "use a device of the Hopper, Ada or later generations, or drop fp8")  # fmt: skip
        self.needs(self.gathered == "values" or has(e, "shards") or has(e, "sequence_parts"),
                   "gathered=codes says what is gathered of shards, and nothing here is divided",
                   "add zero:stage=3, or drop gathered")  # fmt: skip
        if self.gradients:
            refuse(self, e, "shards", "gradients=true sums whole buckets, but {other} scatters them as it sums",
                   "use data_parallel instead of {other}, or gradients=false")  # fmt: skip
        self.needs(has(e, "masters") or not self.states, "states=true narrows the master weights, but weights=fp32 has"
                   " none", "add mixed_precision with weights=low, or use states=false")  # fmt: skip
        if self.states:
            fix = "use states=false, or drop {other}"
            refuse(self, e, "divided_tensors", "states=true cannot be used with {other}: a rank that has a part of a"
                   " tensor does not know its scale", fix)  # fmt: skip
            refuse(self, e, "optimizer", "states=true cannot be used with {other}, which keeps them in fp32", fix)

    def groups_experts(self, e: Experiment) -> bool:
        """The kernel takes 16 inputs at a time."""
        return e.model.hidden_size % 16 == e.model.intermediate_size % 16 == 0

    def apply(self, run: Build) -> None:
        """Swap the linear layers."""
        from ridgeline.nn.quant.quantized import replace_linears
        from ridgeline.techniques.precision.fp8_linear_torch import (
            Float8Product,
            StoredFp8Linear,
            store_experts,
            use_fp8,
        )

        if not run.experiment.is_training:
            replace_linears(run.model, StoredFp8Linear)
            store_experts(run.model)
            return
        use_fp8(run.model, Float8Product(self.scaling == "rowwise", _keeps(run.experiment)))

    def build(self, run: TrainBuild) -> None:
        """Swap the linear layers; use fp8 for gradient buckets and optimizer states if enabled."""
        self.apply(run)
        if self.gradients:
            from ridgeline.techniques.precision.fp8_torch import sum_bucket

            run.gradients.send_bucket = sum_bucket
        if self.states:
            from ridgeline.runtime.flat import FlatWeights

            owner = run.update.make_optimizer.__self__  # type: ignore[attr-defined]
            assert isinstance(owner, FlatWeights)
            owner.compact = True

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Adjust the cost of the linear layers: one-byte operands, two-byte results; in training both operands are
        quantized first."""
        if not e.is_training:
            compute = "fp8" if "fp8" in e.cluster.device.peak_flops else ""
            return g.each_block(lambda b: _store(b, compute), layers_only=True)
        units, rowwise, keep = "fp8" in e.cluster.device.peak_flops, self.scaling == "rowwise", _keeps(e)
        coded = self.gathered == "codes" and has(e, "shards") and not has(e, "replicas")
        if self.scaling == "delayed" or not units:
            g.each_block(lambda b: _lower(b, _quantized), layers_only=True)
        else:
            g.each_block(lambda b: _lower(b, partial(_encoded, params={p.name: p for p in b.params}, rowwise=rowwise,
                                                     keep=keep, coded=coded)), layers_only=True)  # fmt: skip
        if units and (self.scaling == "delayed" or self.gathered == "codes"):
            g.each_block(_gather_codes, layers_only=True)
        if units and self.scaling != "delayed" and self.gathered == "codes" and has(e, "sequence_parts"):
            g.each_block(lambda b: _encode_parts(b, e.parallel["tp"]), layers_only=True)
        if keep and self.scaling != "delayed":
            g.each_block(_keep_codes, layers_only=True)
        if not units:
            g.each_block(_emulated, layers_only=True)
        if self.gradients:
            g.byte_sums = True
            g.closing.append(_narrow_sums)
        if self.states:
            g.optimizer_bytes = COMPACT_BYTES if e.training.optimizer == "adamw" else 2.0
        return g


def _linear(op: Op) -> bool:
    return op.kind == "gemm" and op.param.endswith(("_proj.weight", "_proj"))


def _keeps(e: Experiment) -> bool:
    """Whether the codes of weights are kept from forward to backward: not by stages, which would hold them once for
    each micro-batch in flight."""
    return "pp" not in e.parallel and not any(has(e, part) for part in ("shards", "resting_weights", "activations"))


def _lower(b: Block, lowered: Callable[[Op], list[Op]]) -> None:
    """Training: products in fp8 with weights in their original dtype, which are no longer cast to 16 bits.
    ``lowered``: what becomes of a product."""
    params = {op.param for op in b.forward if _linear(op)}
    wide = {f"{op.name}.dw": op.shape for op in b.forward if _linear(op)}

    def low(ops: list[Op]) -> list[Op]:
        kept = (op for op in ops if op.kind != "cast" or op.param not in params)
        return [new for op in kept for new in (lowered(op) if _linear(op) else [op])]

    b.forward, b.backward = low(b.forward), low(b.backward)
    for p in b.params:
        if p.name in params:
            p.working_bytes = 0.0
    for key, s in b.saved.items():  # inputs are kept in fp8, and in full only where another operator needs them
        mine = [u for u in s.users if u in wide]
        if mine:
            rows, _, inner = wide[mine[0]]
            others = s.users.difference(mine)
            b.saved[key] = replace(s, bytes=float(rows * inner) + (s.bytes if others else 0.0))


def _keep_codes(b: Block) -> None:
    """A byte for each weight whose input has a gradient, from forward to backward."""
    products = {op.name for op in b.backward}
    for op in b.forward:
        if _linear(op) and f"{op.name}.dx" in products:
            size = float(op.shape[1] * op.shape[2] * op.experts)
            b.saved[f"{op.name}.codes"] = Saved(size, frozenset({f"{op.name}.dx"}))


def _quantized(op: Op) -> list[Op]:
    """A product in fp8, preceded by the quantization of its new operands as other engines do it: inputs and weights in
    forward, the gradient of the result in backward (which both backward products read)."""
    m, n, k = op.shape
    low = changed(op, dtype="fp8", bytes=op.bytes * 2 / 3)
    tail = op.name.rpartition(".")[2]
    if tail == "dw":
        return [low]
    new = {"quantize": m * k} if tail == "dx" else {"quantize": m * k, "quantize_weight": n * k * op.experts}
    codes = [  # two bytes read, one written
        Op(f"{op.name}.{name}", op.module, "quantize", op.direction, 0, 3.0 * size, "fp8", recompute=op.recompute)
        for name, size in new.items()
    ]
    return [*codes, low]


def _gather_codes(b: Block) -> None:
    """What tensor-parallel ranks gather are the codes that products read."""

    def narrow(op: Op) -> Op:
        gather = op.axis == "tp" and op.kind == "all_gather"
        return changed(op, bytes=op.bytes / 2, link_bytes=op.link_bytes / 2) if gather else op

    b.forward, b.backward = [narrow(o) for o in b.forward], [narrow(o) for o in b.backward]


def _encode_parts(b: Block, t: int) -> None:
    """Each of ``t`` ranks finds the largest magnitude of its part of the sequence and codes it before it is gathered;
    the gathered codes are transposed by every rank."""
    inputs = tuple(f"{name}.quantize" for name in COLUMN)
    gradients = tuple(f"{name}.dx.quantize" for name in ROW)

    def parts(op: Op, names: tuple[str, ...]) -> Op:
        if op.name.removesuffix(".peaks").endswith(names):
            return changed(op, bytes=op.bytes / t if op.name.endswith(".peaks") else op.bytes / 4 * (3 / t + 2))
        return op

    b.forward = [parts(o, inputs) for o in b.forward]
    b.backward = [parts(o, gradients) for o in b.backward]


def _encoded(op: Op, params: dict[str, Param], rowwise: bool, keep: bool, coded: bool) -> list[Op]:
    """The same as this engine does it: one kernel finds largest magnitudes (``.peaks``), one writes codes, also
    transposed where a gradient of weights needs them. By rows (``rowwise``) one kernel does both where none does.
    ``coded``: codes of weights arrive, and are only transposed for backward."""
    m, n, k = op.shape
    low = changed(op, dtype="fp8", bytes=op.bytes * 2 / 3)
    tail = op.name.rpartition(".")[2]
    width = params[op.param].bytes_per_element
    if tail == "dw":
        wide = Op(
            f"{op.name}.wide", op.module, "cast", op.direction, 0, (2.0 + width) * m * n, op.dtype, param=op.param
        )
        return [low, wide] if rowwise and width > 2 else [low]

    def encoded(name: str, size: float, width: float, transposed: bool) -> list[Op]:
        def cast(name: str, each: float) -> Op:
            return Op(f"{op.name}.{name}", op.module, "cast", op.direction, 0, each * size, "fp8",
                      recompute=op.recompute)  # fmt: skip

        codes = width + 1 + transposed
        if rowwise and not transposed:
            return [cast(name, width + codes)]
        return [cast(f"{name}.peaks", width), cast(name, codes)]

    codes = encoded("quantize", m * k, 2.0, params[op.param].trainable)
    if coded:
        params[op.param].coded = True
        turned = Op(f"{op.name}.turn_weight", op.module, "cast", op.direction, 0, 2.0 * n * k * op.experts, "fp8",
                    recompute=op.recompute)  # fmt: skip
        codes += [turned] if tail == "dx" else []
    elif tail != "dx":
        codes += encoded("encode_weight", n * k * op.experts, width, keep)
    elif not keep:
        codes += encoded("encode_weight", n * k * op.experts, width, True)
    return [*codes, low]


def _emulated(b: Block) -> None:
    """Without fp8 units operands are quantized, dequantized, and multiplied in fp32, operator by operator.

    Quantization moves some 29 bytes per element (largest magnitude, upcast, scaling, clamping, rounding),
    dequantization 13.
    """

    def spelled(op: Op) -> list[Op]:
        if op.kind == "quantize":
            return [changed(op, bytes=op.bytes * 29 / 3)]
        if op.kind != "gemm" or op.dtype != "fp8":
            return [op]
        m, n, k = op.shape
        operands = m * k + n * k * op.experts
        decode = Op(f"{op.name}.decode", op.module, "cast", op.direction, 0, 13.0 * operands, "fp32",
                    recompute=op.recompute)  # fmt: skip
        return [decode, changed(op, dtype="fp32", bytes=4.0 * (operands + m * n))]

    b.forward = [new for op in b.forward for new in spelled(op)]
    b.backward = [new for op in b.backward for new in spelled(op)]


def _narrow_sums(g: Graph) -> None:
    """Gradient all-reduces become an exchange of fp8 values, an all-gather of their sums, and two maxima for the
    scales."""
    for b in g.blocks:
        tensors = sum(p.trainable for p in b.params)
        b.reduce = [new for op in b.reduce for new in (_narrow_sum(op, tensors) if op.kind == "all_reduce" else [op])]


def _narrow_sum(op: Op, tensors: int) -> list[Op]:
    codes = -(-op.link_bytes / 4 // op.ranks) * op.ranks  # padded to equal shares

    def part(kind: str, size: float) -> Op:
        return changed(op, name=f"{op.name}.{kind}", kind=kind, bytes=size, link_bytes=size, dtype="int8")

    scales = changed(op, name=f"{op.name}.scales", bytes=4.0 * tensors, link_bytes=4.0 * tensors)
    return [scales, part("alltoall", codes), scales, part("all_gather", codes)]


def _store(b: Block, compute: str) -> None:
    """Inference: one-byte weights, unless another technique already stores fewer bits."""
    wide = {p.name: p.bytes_per_element for p in b.params
            if p.name.endswith(("_proj.weight", "_proj")) and p.bytes_per_element > 1}  # fmt: skip
    for p in b.params:
        if p.name in wide:
            p.bytes_per_element, p.dtype, p.trainable = 1.0, "fp8", False
    ops: list[Op] = []
    cast: set[str] = set()
    for o in b.forward:
        if _linear(o) and o.param in wide:
            layer, _, leaf = o.name.rpartition(".")
            if compute and cast.isdisjoint(f"{layer}.{first}" for first in _SHARES.get(leaf, ())):
                cast.add(o.name)
                elements = float(o.shape[-3] * o.shape[-1])
                ops.append(Op(f"{o.name}.quantize", o.module, "quantize", bytes=3 * elements, dtype=o.dtype))
            o = _narrow(o, wide[o.param], compute)
        ops.append(o)
    b.forward = ops


_SHARES = {"k_proj": ("q_proj",), "v_proj": ("q_proj",), "kv_a_proj": ("q_a_proj", "q_proj"), "up_proj": ("gate_proj",)}
"""Projections of a layer whose input is that of another one before them, which casts it."""


def _narrow(op: Op, width: float, compute: str) -> Op:
    rows, out, inner = op.shape[-3:]
    weights = out * inner * op.experts
    inputs = rows * inner * (1.0 if compute else width)  # without fp8 units only the weights are stored in fp8
    return changed(op, bytes=rows * out * width + inputs + weights, weight_bytes=weights, dtype=compute or op.dtype,
                   weight_dtype="fp8")  # fmt: skip
