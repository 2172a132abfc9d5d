"""LoRA: train low-rank updates of frozen linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.build import TrainBuild


class LoRA(Technique):
    """y = W x + (alpha / rank) · B A x with W frozen; A is random, B starts at zero (Hu et al. 2021, eq. 3)."""

    card: ClassVar[Card] = Card(
        name="lora",
        title="LoRA",
        paper="arXiv:2106.09685",
        taxonomy="training/finetune/lora",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="10 000x fewer trainable parameters and 3x less GPU memory than full fine-tuning of GPT-3 175B",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    adapts: ClassVar[bool] = True

    rank: int = Field(default=8, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale numerator: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)
    """Last name of each linear layer to adapt."""

    def check(self, e: Experiment) -> None:
        """Targets must exist, and the rank must be below the smaller side of each."""
        shapes = _linears(e.model)
        for t in self.targets:
            self.needs(t in shapes, f"target {t!r} matches no linear layer of {e.model.name}",
                       f"its linear layers: {', '.join(sorted(shapes))}")  # fmt: skip
            side = min(shapes[t])
            self.needs(self.rank < side, f"rank {self.rank} is not below {t}'s smaller side {side}",
                       f"use a rank below {side}")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything (no weight gradients, no optimizer state); add two thin GEMMs per target.

        Nothing below the first adapter needs gradients, so the first layer computes none for its input.
        """
        blocks: list[Block] = []
        first = True
        for b in g.blocks:
            sources = _sources(b)
            _freeze(b)
            if not b.name.startswith(("layers", "encoder")):
                if first:
                    b.drop_users([o.name for o in b.backward])
                blocks.append(b)
                continue
            self._adapt(b, sources)
            if first:
                head = b.copy()
                head.repeat = 1
                head.drop_users(_needless(set(self.targets), e.model.post_norm))
                blocks.append(head)
                b.repeat -= 1
                first = False
            if b.repeat:
                blocks.append(b)
        g.blocks = blocks
        return g

    def _adapt(self, b: Block, sources: dict[str, str]) -> None:
        r = self.rank
        for op in list(b.forward):
            leaf = op.name.rpartition(".")[2]
            if op.kind != "gemm" or leaf not in self.targets or not op.param.endswith(".weight"):
                continue
            m, n, k = op.shape
            w = DTYPE_BYTES[op.dtype]
            down = Op(f"{op.name}.lora_a", op.module, "gemm", flops=2.0 * m * r * k, bytes=(m * k + m * r + r * k) * w,
                      dtype=op.dtype, shape=(m, r, k), param=f"{op.name}.lora_a")  # fmt: skip
            up = Op(f"{op.name}.lora_b", op.module, "gemm", flops=2.0 * m * n * r, bytes=(m * n + m * r + n * r) * w,
                    dtype=op.dtype, shape=(m, n, r), param=f"{op.name}.lora_b")  # fmt: skip
            add = Op(f"{op.name}.lora_add", op.module, "residual", bytes=3.0 * m * n * w, dtype=op.dtype)
            at = b.forward.index(op)
            b.forward[at : at + 1] = [down, up, op, add]
            for part, (rows, out, inner) in ((down, (m, r, k)), (up, (m, n, r))):
                dx = changed(part, name=f"{part.name}.dx", direction="backward", shape=(rows, inner, out))
                dw = changed(part, name=f"{part.name}.dw", direction="backward", shape=(out, inner, rows))
                b.backward += [dx, dw]
                b.params.append(Param(part.param, out * inner, "fp32", True, 4.0, shape=(out, inner), grad_bytes=4.0))
            b.backward.append(
                Op(f"{op.name}.lora_add.bwd", op.module, "residual", "backward", 0, 3.0 * m * n * w, op.dtype)
            )
            source = sources[op.name]
            old = b.saved.get(source)
            users = (old.users if old else frozenset()) | {f"{down.name}.dw"}
            b.saved[source] = Saved(m * k * w, users)
            b.saved[f"{op.name}.lora_mid"] = Saved(m * r * w, frozenset({f"{up.name}.dw"}))

    def build(self, run: TrainBuild) -> None:
        """Wrap each target linear, freeze the rest."""
        from ridgeline.nn.lora import wrap_linears

        wrap_linears(run.model, self.targets, self.rank, self.alpha, seed=run.experiment.training.seed)
        run.trainable = lambda name: name.rpartition(".")[2] in ("lora_a", "lora_b")

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Updates merged into the weights."""
        from ridgeline.nn.lora import merged

        return merged(state, self.alpha / self.rank)


def _linears(m: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Last name → (out, in) of every plain linear layer of the transformer blocks."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(min(m.num_layers, 2)):
        for p in m.block_parameters(i):
            if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                found[p.name.split(".")[-2]] = p.shape
    return found


def _sources(b: Block) -> dict[str, str]:
    """Linear layer → the saved activation that is its input (linears that read the same tensor share one)."""
    return {user.removesuffix(".dw"): key for key, s in b.saved.items() for user in s.users if user.endswith(".dw")}


def _freeze(b: Block) -> None:
    for p in b.params:
        p.trainable = False
    gone = [o.name for o in b.backward if o.name.endswith((".dw", ".db"))]
    b.drop_users(gone)


def _needless(targets: set[str], post_norm: bool) -> list[str]:
    """Backward operators that the first layer does not run: those of tensors that depend on no adapter."""

    def linear(name: str) -> list[str]:
        return [f"{name}.dx", f"{name}.lora_a.dx", f"{name}.accumulate"]

    q, k, v = ("q_proj" in targets, "k_proj" in targets, "v_proj" in targets)
    attended = q or k or v
    added = attended or "o_proj" in targets
    inner = added or bool({"gate_proj", "up_proj"} & targets)
    gone = ["attention_residual.bwd", *linear("attention.q_proj"), *linear("attention.k_proj")]
    gone += linear("attention.v_proj")
    if not post_norm:
        gone.append("attention_norm.bwd")
    for part, needed, product in (("q", q, "scores.dq"), ("k", k, "scores.dk"), ("v", v, "values.dv")):
        if not needed:
            gone += [f"attention.{name}" for name in (f"{part}_norm.bwd", f"{part}_rope.bwd", product)]
    if not (q or k):
        gone += ["attention.softmax.bwd", "attention.values.dprobs"]
    if not attended:
        gone += linear("attention.o_proj")
    if not added:
        gone += ["attention_norm.bwd" if post_norm else "mlp_norm.bwd", "mlp_residual.bwd"]
        gone += [*linear("mlp.gate_proj"), *linear("mlp.up_proj")]
    if not inner:
        gone += ["mlp.act.bwd", *linear("mlp.down_proj")]
    return gone
