"""QFT: weights, gradients and Lion's momentum in int8."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.optimizers.replaced_optimizer import scaled
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.train_build import TrainBuild


def _at_once(e: Experiment) -> int:
    """Number of weights updated at once (as :func:`ridgeline.techniques.optimizers.qft_linear_torch.at_once`)."""
    return 1 << 13 if e.cluster.device.kind == "cpu" else 1 << 23


class QFT(Technique):
    """Train all parameters in integers: every matrix, its gradient and Lion's momentum are int8 codes.

    The largest 1 % of each row's weights stay fp32 in a list. Updates happen within the backward pass, one layer after
    another, with stochastic rounding. Norms, biases, position tables and tied embeddings stay fp32. Gradients are not
    clipped, since the size of Lion's step does not depend on them.
    """

    card: ClassVar[Card] = Card(
        name="qft",
        title="Quantized full-parameter tuning",
        paper="arXiv:2310.07147",
        taxonomy="training/finetune/qft",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="model state reduced to 21 % of the standard solution; LLaMA-7B fine-tuned in less than 30 GB",
        bound="falls",
        quality="another optimizer on rounded weights: the training loss must fall below its starting value",
        example={"lr_ratio": 1e-4},
        owns=frozenset({"weights", "trainable", "optimizer"}),
    )
    phase: ClassVar[Phase] = "adapt"

    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor on the workload's learning rate; Lion's paper uses 0.1 to 0.3 of AdamW's."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """One process must own weights, gradients and optimizer."""
        self.needs(e.world == 1, "each layer is updated within the backward pass of one process: ranks would have to"
                   " agree on its gradient first", "run on 1 device, or use qlora with zero")  # fmt: skip
        low = has(e, "masters") or has(e, "loss_scale")
        self.needs(not low, "integer weights have no 16-bit copy, and their updates cannot be taken back when a scaled"
                   " fp16 loss overflows", "use mixed_precision with dtype=bf16 and weights=fp32")  # fmt: skip
        self.needs(not e.model.num_experts, f"the experts of {e.model.name} are not linear layers of their own",
                   "use a dense model")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Integer codes and a few outliers instead of weights; each use expands a matrix; one-byte states.

        A gradient is kept only between micro-batches, as integer codes.
        """
        states = trained = 0.0
        for b in g.blocks:
            rows = self._code(b, e, 1.0 if g.accumulation > 1 else 0.0)
            for p in b.params:
                if p.trainable:
                    states += (p.numel * (1.0 if p.name in rows else 4.0) + 4.0 * rows.get(p.name, 0)) * b.repeat
                    trained += p.numel * b.repeat
        g.optimizer_bytes, g.clips = states / trained, False
        # A GPU's kernel reads gradient, codes and random numbers, and writes codes; elsewhere there are about 40 passes
        # over four-byte values and their codes, a third of them random.
        g.optimizer = ("qft", 24.0 if e.cluster.device.kind == "gpu" else 400.0)
        return g

    def _code(self, b: Block, e: Experiment, gradient: float) -> dict[str, int]:
        """Returns a function that rewrites a block for integer matrices. ``gradient``: bytes kept per element of the
        gradient."""
        rows: dict[str, int] = {}
        for p in list(b.params):
            if not _coded(p.name, p.shape, e.model.tie_embeddings):
                continue
            rows[p.name], width = p.shape
            outliers = rows[p.name] * max(1, round(0.01 * width))
            p.bytes_per_element, p.dtype, p.grad_bytes = 1.0, "int8", gradient * (1 + 4.0 / width)
            prefix = p.name.removesuffix("weight")
            b.params += [Param(f"{prefix}scale", rows[p.name], "fp32", False, 4.0),
                         Param(f"{prefix}outliers", outliers, "fp32", False, 8.0)]  # fmt: skip
        sizes = {p.name: p.numel for p in b.params if p.name in rows}
        gpu = e.cluster.device.kind == "gpu"
        written = 2.0 if gpu and has(e, "compute_dtype") else 4.0
        for ops in (b.forward, b.backward):
            for op in [o for o in ops if o.kind == "gemm" and o.param in sizes and o.role != "weight_gradient"]:
                moved = (1.0 + written) * sizes[op.param]
                expand = Op(f"{op.name}.dequantize", op.module, "cast", op.direction, 0, moved, "int8",
                            param=op.param)  # fmt: skip
                ops.insert(ops.index(op), expand)
        if sizes:
            largest = max(sizes.values())
            b.workspace = max(b.workspace, largest * 4.0)
            update = min(largest, _at_once(e)) * (8.0 if gpu and not gradient else 20.0)  # on a GPU random numbers
            if b.is_head:  # whose gradient is counted where it is computed
                b.backward_workspace += update
            else:
                b.backward_workspace = max(b.backward_workspace, largest * 4.0 + update)
        return rows

    def build(self, run: TrainBuild) -> None:
        """Replace matrices by integer layers, and consume their gradients."""
        from ridgeline.techniques.optimizers.qft_torch import IntegerUpdates

        scaled(run, self.lr_ratio)
        IntegerUpdates(run).code()
        run.trainable = lambda name: name.rpartition(".")[2] not in ("scale", "outliers")

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Expand codes and outliers into plain weights."""
        from ridgeline.nn.quant.quantized import expanded
        from ridgeline.techniques.optimizers.qft_linear_torch import IntegerLinear

        return expanded(state, IntegerLinear)


def _coded(name: str, shape: tuple[int, ...], tied: bool) -> bool:
    """Whether a parameter is stored in integers."""
    if len(shape) != 2:
        return False
    return name.endswith("_proj.weight") or (not tied and name in ("embed.tokens.weight", "head.out.weight"))
