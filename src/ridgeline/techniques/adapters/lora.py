"""LoRA: train low-rank updates of frozen linear layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ROW
from ridgeline.spec.targets import chosen
from ridgeline.techniques.adapters.adapted import Adapting, adapt, check_targets
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter
    from ridgeline.runtime.train_build import TrainBuild


class LoRA(Adapting):
    """y = W x + (alpha / rank) · B A x with W frozen; A is random, B starts at zero (Hu et al. 2021, eq. 3)."""

    card: ClassVar[Card] = Card(
        name="lora",
        title="LoRA",
        paper="arXiv:2106.09685",
        taxonomy="training/finetune/lora",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        validated=frozenset({"finetune"}),
        claim="10 000x fewer trainable parameters and 3x less GPU memory than full fine-tuning of GPT-3 175B",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        changes=frozenset({"low_rank"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b", "lora_m")
    in_peft: ClassVar[bool] = True

    rank: int = Field(default=8, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale numerator: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)
    """The linear layers to adapt: last names, ``all-linear``, or globs or regular expressions over full names such as
    ``layers.0.attention.q_proj``. With latent attention, the default is the last projections to queries and to values:
    ``q_proj`` or ``q_b_proj``, and ``kv_b_proj``."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout rate of the update's input in training, with the same mask each time a step is run; none in
    evaluation."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps the update's size at high ranks (arXiv:2312.03732)."""

    dora: bool = False
    """Learn the norms of the weight's rows separately from their directions (DoRA, arXiv:2402.09353)."""

    @property
    def scale(self) -> float:
        """Factor that the update is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """The default targets by the names that they have with latent attention."""
        if e.model.kv_lora_rank is None or self.targets != type(self).model_fields["targets"].default:
            return self
        queries = "q_b_proj" if e.model.q_lora_rank else "q_proj"
        return self.model_copy(update={"targets": (queries, "kv_b_proj")})

    def check(self, e: Experiment) -> None:
        """Targets must exist, and the rank must be below the smaller dimension of each."""
        check_targets(self, e, self.targets)
        for name, shape in chosen(e.model, self.targets).items():
            leaf, side = name.rpartition(".")[2], min(shape)
            self.needs(self.rank < side, f"rank {self.rank} is not below {leaf}'s smaller side {side}",
                       f"use a rank below {side}")  # fmt: skip
            self.needs(not (self.dora and leaf in ROW and "tp" in e.parallel),
                       f"dora needs the lengths of {leaf}'s rows, which tensor_parallel divides over ranks",
                       "leave out o_proj and down_proj, or use dora=false")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything (no weight gradients, no optimizer state); add two thin GEMMs per target."""
        return adapt(g, e, self.targets, self._adapt)

    def _adapt(self, b: Block, op: Op, source: str) -> None:
        r = self.rank
        m, n, k = op.shape
        w = DTYPE_BYTES[op.dtype]
        down = Op(f"{op.name}.lora_a", op.module, "gemm", flops=2.0 * m * r * k, bytes=(m * k + m * r + r * k) * w,
                  dtype=op.dtype, shape=(m, r, k), param=f"{op.name}.lora_a")  # fmt: skip
        up = Op(f"{op.name}.lora_b", op.module, "gemm", flops=2.0 * m * n * r, bytes=(m * n + m * r + n * r) * w,
                dtype=op.dtype, shape=(m, n, r), param=f"{op.name}.lora_b")  # fmt: skip
        add = Op(f"{op.name}.lora_add", op.module, "residual", bytes=3.0 * m * n * w, dtype=op.dtype)
        after = [add]
        if self.dora:
            after += self._rescale(b, op)
        at = b.forward.index(op)
        b.forward[at : at + 1] = [down, up, op, *after]
        for part, (rows, out, inner) in ((down, (m, r, k)), (up, (m, n, r))):
            dx = changed(part, name=f"{part.name}.dx", direction="backward", shape=(rows, inner, out))
            dw = changed(
                part, name=f"{part.name}.dw", direction="backward", shape=(out, inner, rows), role="weight_gradient"
            )
            b.backward += [dx, dw]
            b.params.append(Param(part.param, out * inner, "fp32", True, 4.0, shape=(out, inner), grad_bytes=4.0))
        if self.dropout:  # the mask is drawn and applied, and both again in backward
            drop = Op(f"{op.name}.lora_drop", op.module, "cast", bytes=4.0 * m * k * w, dtype=op.dtype)
            b.forward.insert(b.forward.index(down), drop)
            b.backward.append(changed(drop, name=f"{drop.name}.bwd", direction="backward", bytes=5.0 * m * k * w))
        b.backward.append(
            Op(f"{op.name}.lora_add.bwd", op.module, "residual", "backward", 0, 3.0 * m * n * w, op.dtype)
        )
        old = b.saved.get(source)
        users = (old.users if old else frozenset()) | {f"{down.name}.dw"}
        b.saved[source] = Saved(m * k * w, users)
        b.saved[f"{op.name}.lora_mid"] = Saved(m * r * w, frozenset({f"{up.name}.dw"}))

    def _rescale(self, b: Block, op: Op) -> list[Op]:
        """DoRA: compute the norms of the sum's rows, and one pass that rescales them to the learned norms."""
        m, n, k = op.shape
        r, w = self.rank, DTYPE_BYTES[op.dtype]
        name = f"{op.name}.lora_m"
        sizes = Op(f"{name}.lengths", op.module, "gemm", flops=2.0 * n * k * r, bytes=4.0 * n * k * w, dtype="fp32",
                   shape=(n, k, r))  # fmt: skip
        scale = Op(name, op.module, "cast", bytes=2.0 * m * n * w, dtype=op.dtype)
        b.backward.append(changed(scale, name=f"{name}.bwd", direction="backward", bytes=4.0 * m * n * w))
        b.params.append(Param(name, n, "fp32", True, 4.0, shape=(n,), grad_bytes=4.0))
        b.saved[f"{name}.scaled"] = Saved(m * n * w, frozenset({f"{name}.bwd"}))
        b.saved[f"{name}.stats"] = Saved(8.0 * n, frozenset({f"{name}.bwd"}))  # the norms; ratio to the learned
        b.workspace = max(b.workspace, 1.0 * n * k * w)
        return [sizes, scale]

    def build(self, run: TrainBuild) -> None:
        """Wrap each target linear and freeze the rest."""
        import torch

        from ridgeline.nn.adapters.adapter import put
        from ridgeline.nn.adapters.dropout import Dropout
        from ridgeline.nn.adapters.lora_linear import LoRALinear

        seed = run.experiment.training.seed
        dropout = None
        if self.dropout:
            place = run.mesh.data_rank * run.mesh.size("cp") + run.mesh.at("cp") if run.mesh else 0
            dropout = Dropout(self.dropout, seed, place)
            run.hooks.before_step.append(dropout.at)
        generator = torch.Generator().manual_seed(seed)
        for i, name in enumerate(chosen(run.model.spec, self.targets)):
            base = run.model.get_submodule(name)
            put(run.model, name, LoRALinear(base, self.rank, self.scale, generator, dropout, i, self.dora))
        run.trainable = lambda name: name.rpartition(".")[2] in self.leaves

    @property
    def reads_weight(self) -> bool:
        """DoRA's norms are the weight's."""
        return self.dora

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """A low-rank update that starts at zero."""
        import torch

        from ridgeline.nn.adapters.lora_linear import LoRALinear

        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        return LoRALinear(base, self.rank, self.scale, generator, layer=layer, dora=self.dora)

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge the updates into the weights."""
        from ridgeline.nn.adapters.lora_linear import merged

        return merged(state, self.scale)
