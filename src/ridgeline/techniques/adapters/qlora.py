"""QLoRA: low-rank adapters over a 4-bit NormalFloat base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.adapters.lora import LoRA
from ridgeline.techniques.optimizers.replaced_optimizer import no_masters
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.train_build import TrainBuild

_BLOCK = 64


class QLoRA(LoRA):
    """LoRA over frozen linear layers in NF4 with doubly quantized scales, each matrix expanded at every use."""

    card: ClassVar[Card] = Card(
        name="qlora",
        title="QLoRA",
        paper="arXiv:2305.14314",
        taxonomy="training/finetune/qlora",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        validated=frozenset({"finetune"}),
        claim="a 65B model fine-tuned on one 48 GB GPU",
        bound="falls",
        quality="training loss within 1 % of LoRA's on the unquantized base",
        needs_model={"head_dim": 32, "intermediate_size": 128},
        owns=frozenset({"trainable", "weights"}),
        changes=frozenset({"low_rank"}),
        encoder_decoders=True,
    )

    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """The linear layers to adapt; all by default (section 4 of the paper). Same syntax as in ``lora``."""

    paged: bool = False
    """Keep the optimizer's states in host memory, except those that are being updated."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Optimizer states on the device, and paged."""
        return [cls(paged=paged) for paged in (False, True)]

    def owns(self) -> frozenset[Part]:
        """Paged states determine where the optimizer's states are stored."""
        return self.card.owns | ({"optimizer"} if self.paged else frozenset())

    def stored(self) -> dict[str, Any]:
        """LoRA's options; a checkpoint does not depend on where optimizer states are stored."""
        return {k: v for k, v in super().stored().items() if k != "paged"}

    def check(self, e: Experiment) -> None:
        """The same checks as LoRA; the base is quantized once, and can only be divided between blocks."""
        super().check(e)
        if self.paged:
            no_masters(self, e)
        tp = e.parallel.get("tp", 1)
        for p in e.model.block_parameters(0):
            if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                width = p.shape[1]
                self.needs(width % 2 == 0, f"{p.name} has odd width {width}: codes of 4 bits come in pairs",
                           "use a model of even width, or lora alone")  # fmt: skip
                if tp > 1 and p.name.endswith(("o_proj.weight", "down_proj.weight")):
                    self.needs(width % (_BLOCK * tp) == 0, f"{p.name}'s input of {width} cut over {tp}"
                               f" tensor-parallel ranks would split blocks of {_BLOCK} weights",
                               f"use a degree whose parts are multiples of {_BLOCK}, or zero:stage=3")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights and expand one weight matrix before every use; then as LoRA.

        Besides its 4-bit codes, each block of a row has a one-byte scale, and each row the mean and largest deviation
        of its scales. A GPU's kernel writes a weight as it is multiplied, PyTorch's operators in fp32 first.
        """
        low = e.dtype in ("bf16", "fp16") or has(e, "compute_dtype")
        written = 2.0 if low and e.cluster.device.kind == "gpu" else 4.0

        def quantize(b: Block) -> None:
            sizes: dict[str, float] = {}
            for p in list(b.params):
                if not (p.name.endswith("_proj.weight") and len(p.shape) == 2):
                    continue
                rows, width = p.shape
                copies = p.numel / (rows * width)
                p.bytes_per_element, p.dtype, p.trainable = 0.5, "nf4", False
                sizes[p.name] = p.numel
                prefix = p.name.removesuffix("weight")
                blocks = rows * -(-width // _BLOCK) * copies
                b.params += [Param(f"{prefix}scales", blocks, "uint8", False, 1.0),
                             Param(f"{prefix}spans", rows * copies, "uint8", False, 8.0)]  # fmt: skip
            for ops in (b.forward, b.backward):
                for op in [o for o in ops if o.kind == "gemm" and o.param in sizes and o.role != "weight_gradient"]:
                    moved = sizes[op.param] * (0.5 + 1 / _BLOCK + written)
                    expand = Op(f"{op.name}.dequantize", op.module, "cast", op.direction, 0, moved, "nf4",
                                param=op.param)  # fmt: skip
                    ops.insert(ops.index(op), expand)
            largest = max(sizes.values(), default=0.0) * written
            b.workspace = max(b.workspace, largest)
            b.backward_workspace = max(b.backward_workspace, largest)

        if self.paged:
            g.closing.append(_page_states)
        return super().rewrite(g.each_block(quantize, layers_only=True), e)

    def build(self, run: TrainBuild) -> None:
        """Replace the linears of every block by quantized ones, then adapt them."""
        from ridgeline.nn.quant.nf4 import NF4Linear
        from ridgeline.nn.quant.quantized import replace_linears

        replace_linears(run.model, NF4Linear)
        super().build(run)
        if self.paged:
            from ridgeline.techniques.adapters.qlora_torch import page_states

            page_states(run)

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Dequantize the weights and merge the updates into them."""
        from ridgeline.nn.quant.nf4 import NF4Linear
        from ridgeline.nn.quant.quantized import expanded

        return super().plain(expanded(state, NF4Linear))


def _page_states(g: Graph) -> None:
    """Optimizer states are kept in host memory; each part's are copied to the device for its update, and back."""
    for b in g.blocks:
        size = sum(p.numel / p.state_shards for p in b.params if p.trainable) * g.optimizer_bytes
        if size:
            times = b.repeat // g.stages or 1
            g.host_bytes += size * times
            pair = [host_copy("paged.in", "h2d", size, "update"), host_copy("paged.out", "d2h", size, "update")]
            g.after_update = pair * times + g.after_update
    g.optimizer_bytes = 0.0
