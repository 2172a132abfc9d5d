"""Bottleneck adapters: a small residual network after each sub-layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.targets import chosen
from ridgeline.techniques.adapters.adapted import Adapting, adapt, check_targets
from ridgeline.techniques.technique import Card, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter


class BottleneckAdapter(Adapting):
    """Down-project, GELU, up-project, add: after attention and after the feed-forward layer, before their residual
    additions. The adapter starts as the identity. Norms are not trained."""

    card: ClassVar[Card] = Card(
        name="bottleneck_adapter",
        title="Bottleneck adapters",
        paper="arXiv:1902.00751",
        taxonomy="training/finetune/bottleneck_adapter",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="within 0.4 % of full fine-tuning on GLUE, adding 3.6 % parameters per task",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("adapter_down", "adapter_down_bias", "adapter_up", "adapter_up_bias")

    size: int = Field(default=16, ge=1)
    """Width of the bottleneck."""
    targets: tuple[str, ...] = Field(default=("o_proj", "down_proj"), min_length=1)
    """The last linear layer of each sub-layer to adapt."""

    def check(self, e: Experiment) -> None:
        """Targets must exist and be wider than the bottleneck."""
        self.check_whole(e)
        check_targets(self, e, self.targets)
        for name, (out, _) in chosen(e.model, self.targets).items():
            leaf = name.rpartition(".")[2]
            self.needs(self.size < out, f"size {self.size} is not below {leaf}'s output width {out}",
                       f"use a size below {out}")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything; add two thin GEMMs, an activation and an addition per target."""
        return adapt(g, e, self.targets, self._add)

    def _add(self, b: Block, op: Op, source: str) -> None:
        m, n, _ = op.shape
        r, w = self.size, DTYPE_BYTES[op.dtype]
        name = f"{op.name}.adapter"
        at = b.forward.index(op) + 1
        flops, moved = 2.0 * m * n * r, (m * n + m * r + n * r) * w
        down = Op(f"{name}_down", op.module, "gemm", flops=flops, bytes=moved, dtype=op.dtype, shape=(m, r, n),
                  param=f"{name}_down")  # fmt: skip
        act = Op(f"{name}_act", op.module, "gelu", bytes=2.0 * m * r * w, dtype=op.dtype)
        up = changed(down, name=f"{name}_up", shape=(m, n, r), param=f"{name}_up")
        add = Op(f"{name}_add", op.module, "residual", bytes=3.0 * m * n * w, dtype=op.dtype)
        b.forward[at:at] = [down, act, up, add]
        for part, (rows, out, inner) in ((up, (m, n, r)), (down, (m, r, n))):
            b.backward.append(changed(part, name=f"{part.name}.dx", direction="backward", shape=(rows, inner, out)))
            b.backward.append(
                changed(
                    part, name=f"{part.name}.dw", direction="backward", shape=(out, inner, rows), role="weight_gradient"
                )
            )
            b.backward.append(Op(f"{part.name}.sum", op.module, "reduce", "backward", 0, rows * out * w, op.dtype,
                                 param=f"{part.name}_bias"))  # fmt: skip
            b.params.append(Param(part.param, out * inner, "fp32", True, 4.0, shape=(out, inner), grad_bytes=4.0))
            b.params.append(Param(f"{part.name}_bias", out, "fp32", True, 4.0, shape=(out,), grad_bytes=4.0))
        b.backward.append(changed(act, name=f"{act.name}.bwd", direction="backward", bytes=3.0 * m * r * w))
        b.backward.append(changed(add, name=f"{add.name}.bwd", direction="backward"))
        b.saved[f"{name}_in"] = Saved(m * n * w, frozenset({f"{down.name}.dw"}))
        b.saved[f"{name}_pre"] = Saved(m * r * w, frozenset({f"{act.name}.bwd"}))
        b.saved[f"{name}_mid"] = Saved(m * r * w, frozenset({f"{up.name}.dw"}))

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """An adapter that starts as the identity."""
        import torch

        from ridgeline.techniques.adapters.bottleneck_adapter_torch import BottleneckLinear

        return BottleneckLinear(base, self.size, torch.Generator().manual_seed(seed * 1_000_003 + layer))

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Always raises :class:`UserError`: the adapter cannot be merged."""
        raise UserError("bottleneck adapters are not linear: no plain model equals the adapted one",
                        "save the adapter instead of exporting the model")  # fmt: skip
