"""AlphaTuning: binary-coded weights of which only one scale per group is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.train_build import TrainBuild


class AlphaTuning(Technique):
    """Store the linear layers as sums of scaled sign vectors, and train only the first scale of each group."""

    card: ClassVar[Card] = Card(
        name="alpha_tuning",
        title="AlphaTuning",
        paper="arXiv:2210.03858",
        taxonomy="training/finetune/alpha_tuning",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="more than 10x compression at 4 bits and 1 000x fewer trainable parameters at competitive quality",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable", "weights"}),
    )
    phase: ClassVar[Phase] = "adapt"

    bits: int = Field(default=4, ge=1, le=8)
    """Sign vectors per group, which is also the number of bits per weight."""
    group_size: int = Field(default=0, ge=0)
    """Weights that share scales along the input dimension; 0: the whole row, as in the paper."""
    rounds: int = Field(default=15, ge=0)
    """Alternations between scales and signs after the greedy fit."""

    def check(self, e: Experiment) -> None:
        """Signs are packed into bytes, so widths must be multiples of 8, and groups must divide the rows."""
        self.needs("tp" not in e.parallel, "tensor-parallel ranks that divide a row would share its scale",
                   "divide the model by zero:stage=3 or pipeline instead")  # fmt: skip
        for p in e.model.block_parameters(0):
            if not _coded(p.name, p.shape):
                continue
            width = p.shape[1]
            self.needs(width % 8 == 0, f"{p.name} has width {width}: signs are packed eight to a byte",
                       "use a model whose widths are multiples of 8")  # fmt: skip
            self.needs(width % (self.group_size or width) == 0, f"group_size {self.group_size} does not divide"
                       f" {p.name}'s input width {width}", f"use a divisor of {width}, or 0 for a row")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Store signs and scales instead of weights; each use expands a matrix; everything else is frozen.

        The weight's gradient is still computed in full, then summed over each group. Nothing below the first layer's
        linears needs gradients.
        """
        blocks: list[Block] = []
        first = True
        for b in g.blocks:
            layer = b.is_layer
            self._code(b, layer)
            if not layer:
                if first:
                    b.drop_users([o.name for o in b.backward])
                blocks.append(b)
                continue
            if first:
                head = b.copy()
                head.repeat = 1
                gone = ["attention_residual.bwd", *([] if e.model.post_norm else ["attention_norm.bwd"])]
                for name in ("q_proj", "k_proj", "v_proj"):
                    gone += [f"attention.{name}{tail}" for tail in (".dx", ".dx.dequantize", ".accumulate")]
                head.drop_users(gone)
                blocks.append(head)
                b.repeat -= 1
                first = False
            if b.repeat:
                blocks.append(b)
        g.blocks = blocks
        return g

    def _code(self, b: Block, layer: bool) -> None:
        sizes: dict[str, float] = {}
        for p in list(b.params):
            p.trainable = False
            if not (layer and _coded(p.name, p.shape)):
                continue
            rows, width = p.shape
            groups = rows * (width // (self.group_size or width))
            p.bytes_per_element, p.dtype = self.bits / 8, f"binary{self.bits}"
            sizes[p.name] = p.numel
            prefix = p.name.removesuffix("weight")
            b.params.append(Param(f"{prefix}alpha", groups, "fp32", True, 4.0, shape=(rows, groups // rows)))
            if self.bits > 1:
                b.params.append(Param(f"{prefix}rest", groups * (self.bits - 1), "fp32", False, 4.0))
        trained = [o for o in b.backward if o.kind == "gemm" and o.role == "weight_gradient" and o.param in sizes]
        kept = {o.name for o in trained}
        b.drop_users(
            [o.name for o in b.backward if o.role in ("weight_gradient", "bias_gradient") and o.name not in kept]
        )
        for ops in (b.forward, b.backward):
            for op in [o for o in ops if o.kind == "gemm" and o.param in sizes]:
                n = sizes[op.param]
                at = ops.index(op)
                if (
                    op.role == "weight_gradient"
                ):  # the gradient and one plane of signs are read, a scale per group written
                    total = Op(f"{op.name}.sum", op.module, "reduce", "backward", 0, 4.125 * n, param=op.param)
                    ops.insert(at + 1, total)
                else:  # the sum is read and written once per plane
                    moved = n * (self.bits / 8 + 8.0 * self.bits - 4.0)
                    expand = Op(f"{op.name}.dequantize", op.module, "cast", op.direction, 0, moved, "binary",
                                param=op.param)  # fmt: skip
                    ops.insert(at, expand)
        largest = max(sizes.values(), default=0.0) * 4.0
        b.workspace = max(b.workspace, largest)
        b.backward_workspace = max(b.backward_workspace, largest)

    def build(self, run: TrainBuild) -> None:
        """Encode the linears of every block; only their first scales train."""
        from ridgeline.nn.quant.bcq import BinaryLinear
        from ridgeline.nn.quant.quantized import replace_linears

        replace_linears(run.model, lambda linear: BinaryLinear(linear, self.bits, self.group_size, self.rounds))
        run.trainable = lambda name: name.endswith(".alpha")

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Expand signs and scales into plain weights."""
        from ridgeline.nn.quant.bcq import BinaryLinear
        from ridgeline.nn.quant.quantized import expanded

        return expanded(state, BinaryLinear)


def _coded(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of a layer is stored as signs and scales."""
    return name.endswith("_proj.weight") and len(shape) == 2
