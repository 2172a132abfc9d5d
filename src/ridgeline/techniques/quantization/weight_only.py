"""Shared code of the weight-only quantizers: bits and groups, checks, and the size of the weights."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.json_file import read_json
from ridgeline.spec.lowbit import bits_per_weight, checkpoint_bytes, held_bytes, striped
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.result import Metric, Result
from ridgeline.spec.workload import Generate, Serve
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import remaining_model
from ridgeline.techniques.technique import Phase, Technique

if TYPE_CHECKING:
    from ridgeline.nn.quant.packed import Packed
    from ridgeline.runtime.build import Build

PRUNE, FOLD, QUANTIZE, TUNE = -20, -10, 0, 10
"""Order of compression within phase adapt: pruning masks before grids, folded scales between, norms last. In training a
quantized base comes before its adapters, which come after 0."""


class WeightOnly(Technique):
    """Linear layers of the blocks (including experts, not the router) as integers with a scale per group of inputs."""

    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = QUANTIZE

    bits: int = Field(default=4, ge=2, le=8)
    """Bits per weight."""
    group_size: int = Field(default=128, ge=0)
    """Inputs that share a scale; 0: the whole row."""
    symmetric: bool = True
    """Whether the range is centered on zero; False: a zero point per group is stored too."""
    expert_bits: int | None = Field(default=None, ge=2, le=8)
    """Bits per weight of a mixture's experts; None: those of the other layers."""
    head_bits: int | None = Field(default=None, ge=2, le=8)
    """Bits per weight of the head in ``generate`` and ``serve``, rounded to nearest when the model loads; None: it
    stays dense. A tied head gets codes beside the table of tokens."""

    def bits_of(self, name: str) -> int:
        """Bits per weight of the parameter, layer or site ``name``."""
        return self.bits if self.expert_bits is None or EXPERTS not in name else self.expert_bits

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The defaults: the other options change quality, which is not predicted."""
        return [cls()]

    def check(self, e: Experiment) -> None:
        """Groups must divide the rows."""
        self.needs(self.expert_bits is None or e.model.num_experts > 0, f"{e.model.name} has no experts",
                   "leave out expert_bits")  # fmt: skip
        self.check_head(e)
        for name, (_, width) in widths(e).items():
            if self.group_size:
                self.needs(width % self.group_size == 0,
                           f"group_size {self.group_size} does not divide {name}'s input width {width}",
                           f"use a divisor of {width}, or 0 for whole rows")  # fmt: skip

    def groups_experts(self, e: Experiment) -> bool:
        """Groups must have whole words of the kernels."""
        return groups_codes(e, self.bits_of(EXPERTS), self.group_size)

    def check_head(self, e: Experiment) -> None:
        """A head is quantized where the model generates, and only one for the next token."""
        if self.head_bits is None:
            return
        self.needs(e.task in ("generate", "serve"), f"a head stays dense in task {e.task}",
                   "leave out head_bits, and give it to generate or serve")  # fmt: skip
        self.needs(e.model.head == "lm", f"{e.model.name} has no head for the next token", "leave out head_bits")
        width = e.model.hidden_size
        self.needs(not self.group_size or width % self.group_size == 0,
                   f"group_size {self.group_size} does not divide the head's input width {width}",
                   f"use a divisor of {width}, or 0 for whole rows")  # fmt: skip

    def owns(self) -> frozenset[Part]:
        """One weight format at a time."""
        return self.card.owns | {"weights"}

    def apply(self, run: Build) -> None:
        """A compressed checkpoint's layers are quantized already; random weights get quantized layers of the same
        format."""
        packed(run, self)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights to what is stored of them; kernels dequantize them on load."""
        return shrunk(g, e, self)

    def note(self, e: Experiment, result: Result) -> None:
        """Report the bytes of the checkpoint, and the stored bits per weight."""
        size, bits = stored(e, self)
        size += 16 * coded_matrices(e) * self.own_format  # our format stores four sizes per tensor, others two
        result.metrics["checkpoint_bytes"] = Metric(value=size, unit="bytes", better="lower", source="graph")
        result.metrics["bits_per_weight"] = Metric(value=bits, better="lower", source="graph")


EXPERTS = ".experts."
"""In the names of a mixture's experts."""
CODED = ("_proj.weight", ".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")
"""Name suffixes of quantized parameters."""


def shrunk(g: Graph, e: Experiment, t: WeightOnly) -> Graph:
    """The graph with the blocks' linear layers (and experts) quantized as :mod:`ridgeline.spec.lowbit` specifies."""
    device = "cpu" if e.cluster.device.kind == "cpu" else "cuda"

    def shrink(b: Block) -> None:
        held_as: dict[str, tuple[float, float, str]] = {}
        for p in b.params:
            if p.name.endswith(CODED) and p.dtype != "ternary":  # qmoe's experts are already quantized
                out, width = p.shape[-2:]
                bits = t.bits_of(p.name)
                each = held_bytes(out, width, bits, t.group_size, t.symmetric, device) / (out * width)
                dtype = "int4" if bits <= 4 else "int8"
                held_as[p.name] = each, p.bytes_per_element, dtype
                p.bytes_per_element, p.dtype, p.trainable = each, dtype, False
        b.forward = [narrow(o, *held_as[o.param]) if o.kind == "gemm" and o.param in held_as else o
                     for o in b.forward]  # fmt: skip

    g.each_block(shrink, layers_only=True)
    if t.head_bits is not None:
        _shrink_head(g, device, t, t.head_bits)
    return g


def _shrink_head(g: Graph, device: str, t: WeightOnly, bits: int) -> None:
    for b in g.blocks:
        product = next((o for o in b.forward if o.name == "head.out"), None)
        if product is None:
            continue
        out, width = product.shape[-2:]
        each = held_bytes(out, width, bits, t.group_size, t.symmetric, device) / (out * width)
        dtype = "int4" if bits <= 4 else "int8"
        own = next((p for p in b.params if p.name == "head.out.weight"), None)
        wide = DTYPE_BYTES[product.dtype]
        if own is None:  # the head is tied: its codes are held beside the table of tokens
            b.params.append(Param("head.out.codes", out * width, dtype, False, each, (out, width)))
        else:
            own.bytes_per_element, own.dtype, own.trainable = each, dtype, False
        b.forward = [narrow(o, each, wide, dtype) if o is product else o for o in b.forward]


def stored(e: Experiment, t: WeightOnly) -> tuple[int, float]:
    """(bytes of all tensors of the model's checkpoint in the compressed-tensors format, stored bits per weight of its
    linear layers).

    Layers that stay dense have the dtype of the checkpoint that is compressed; without one, the dtype of the plan.
    """
    return _stored(remaining_model(e), DTYPE_BYTES[_checkpoint_dtype(e)], t)


@lru_cache(maxsize=64)  # a search asks for each of its thousands of plans
def _stored(model: ModelSpec, wide: float, t: WeightOnly) -> tuple[int, float]:
    total, kept, count = 0.0, 0.0, 0
    for p in model.parameters():
        if not _is_coded(p.name):
            total += p.numel * wide
            continue
        out, width = p.shape[-2:]
        form = t.bits_of(p.name), t.group_size, t.symmetric
        total += p.numel // (out * width) * checkpoint_bytes(out, width, *form)
        kept += p.numel * bits_per_weight(width, *form)
        count += p.numel
    return round(total), kept / max(1, count)


def coded_matrices(e: Experiment) -> int:
    """Number of quantized matrices, counting each expert's."""
    return _coded(remaining_model(e))[0]


def coded_weights(e: Experiment) -> int:
    """Number of quantized weights."""
    return _coded(remaining_model(e))[1]


@lru_cache(maxsize=64)
def _coded(model: ModelSpec) -> tuple[int, int]:
    """(matrices, weights) that are quantized."""
    coded = [p for p in model.parameters() if _is_coded(p.name)]
    return sum(p.numel // (p.shape[-1] * p.shape[-2]) for p in coded), sum(p.numel for p in coded)


def _is_coded(name: str) -> bool:
    """Whether a parameter is quantized: the linear layers of all blocks are."""
    return name.startswith(("layers.", "encoder.")) and name.endswith(CODED)


def _checkpoint_dtype(e: Experiment) -> str:
    w = e.workload
    config = read_json(Path(getattr(w, "checkpoint", None) or "") / "config.json")
    if not config:
        return e.dtype
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(dtype, "fp32")


def packed(run: Build, t: WeightOnly, codes_dense: bool = False, mse: bool = False) -> None:
    """Make a generating model's linear layers compute from quantized weights.

    Those of a compressed checkpoint do; weights without a checkpoint (or, where ``codes_dense``, of a dense one) are
    rounded to nearest. Raises :class:`UserError` for a dense checkpoint otherwise, and for quantization other than
    requested.
    """
    import torch

    from ridgeline.nn.quant.packed_model import pack_head, pack_layers, packed_layers
    from ridgeline.runtime.solve.grid import Affine

    def code(name: str, expert: int | None) -> tuple[Packed, None]:
        weight = run.model.get_parameter(name).detach()
        wide = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
        weight = (weight if expert is None else weight[expert]).float()
        return Affine(t.bits_of(name), t.group_size, t.symmetric, mse, wide).fit(weight).pack(weight), None

    w = run.experiment.workload
    assert isinstance(w, (Generate, Serve))
    layers = packed_layers(run.model)
    if layers:
        wrong = next((n for n, layer in layers.items() if layer.bits != t.bits_of(n)), None)
        if wrong is not None:
            held = {kind: next((x.bits for n, x in layers.items() if (EXPERTS in n) == expert), None)
                    for kind, expert in (("bits", False), ("expert_bits", True))}  # fmt: skip
            asks = ",".join(f"{kind}={bits}" for kind, bits in held.items() if bits is not None)
            raise UserError(f"{w.checkpoint} holds codes of {layers[wrong].bits} bits in {wrong}, {t.card.name} asks"
                            f" for {t.bits_of(wrong)}", f"use {t.card.name}:{asks}, or compress it again")  # fmt: skip
    elif w.checkpoint and not codes_dense:
        raise UserError(
            f"{w.checkpoint} is not compressed yet",
            f"run `ridgeline compress {w.checkpoint} --with {t.card.name} --out DIR` and generate from DIR",
        )
    else:
        device = next(run.model.parameters()).device
        pack_layers(run.model, code, device)
    if t.head_bits is not None and run.model.head is not None:
        dense = run.model.head.out.weight.detach()
        weight = dense.float()
        wide = torch.bfloat16 if dense.dtype == torch.bfloat16 else torch.float16
        form = Affine(t.head_bits, t.group_size, t.symmetric, mse, wide)
        pack_head(run.model, form.fit(weight).pack(weight), dense.device)


def narrow(op: Op, each: float, wide: float, dtype: str) -> Op:
    """The product with weights of ``each`` bytes instead of ``wide``; activations and results are unchanged."""
    rows, out, inner = op.shape[-3:]
    weights = out * inner * op.experts
    return changed(op, bytes=rows * (out + inner) * wide + weights * each, weight_bytes=weights * each,
                   weight_dtype=dtype)  # fmt: skip


def groups_codes(e: Experiment, bits: int, group_size: int) -> bool:
    """Whether GPU kernels read all experts' codes of ``bits`` with a scale per group; 0: per row."""
    spec = remaining_model(e)
    return all(striped(width, bits, group_size or width) for width in (spec.hidden_size, spec.intermediate_size))


def in_int8(g: Graph, e: Experiment) -> Graph:
    """Compute products with quantized weights in int8, on a device that supports it."""
    if "int8" not in e.cluster.device.peak_flops:
        return g

    def lower(b: Block) -> None:
        b.forward = [changed(o, dtype="int8") if o.kind == "gemm" and o.weight_dtype else o for o in b.forward]

    return g.each_block(lower, layers_only=True)


def widths(e: Experiment) -> dict[str, tuple[int, int]]:
    """(out, in) of all linear layers of the blocks, including an expert's, by name."""
    from ridgeline.spec.targets import linears

    spec = remaining_model(e)
    found = linears(spec)
    if spec.num_experts:
        h, f = spec.hidden_size, spec.intermediate_size
        found |= {"an expert's up_proj": (f, h), "an expert's down_proj": (h, f)}
    return found
