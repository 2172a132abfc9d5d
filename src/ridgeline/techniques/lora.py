"""LoRA: train low-rank updates of frozen linear layers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param, Saved
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.train.build import TrainBuild


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

    rank: int = Field(default=8, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale numerator: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
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
            _freeze(b)
            if b.name.startswith(("layers", "encoder")):
                self._adapt(b, g.tokens)
                if first:
                    head = deepcopy(b)
                    head.repeat = 1
                    _no_input_gradient(head)
                    blocks.append(head)
                    b.repeat -= 1
                    first = False
                if b.repeat:
                    blocks.append(b)
            else:
                blocks.append(b)
        g.blocks = blocks
        return g

    def _adapt(self, b: Block, tokens: int) -> None:
        r = self.rank
        for op in list(b.forward):
            leaf = op.name.rpartition(".")[2]
            if op.kind != "gemm" or leaf not in self.targets or not op.param.endswith(".weight"):
                continue
            m, n, k = op.shape
            w = 4.0
            source = next((key for key, s in _sources(op, b)), f"{op.name}.input")
            down = Op(f"{op.name}.lora_a", op.module, "gemm", flops=2.0 * m * r * k, bytes=(m * k + m * r + r * k) * w,
                      dtype=op.dtype, shape=(m, r, k), param=f"{op.name}.lora_a")  # fmt: skip
            up = Op(f"{op.name}.lora_b", op.module, "gemm", flops=2.0 * m * n * r, bytes=(m * n + m * r + n * r) * w,
                    dtype=op.dtype, shape=(m, n, r), param=f"{op.name}.lora_b")  # fmt: skip
            add = Op(f"{op.name}.lora_add", op.module, "residual", bytes=3.0 * m * n * w, dtype=op.dtype)
            b.forward[b.forward.index(op) + 1 : b.forward.index(op) + 1] = [down, up, add]
            for part, (rows, out, inner) in ((down, (m, r, k)), (up, (m, n, r))):
                dx = replace(part, name=f"{part.name}.dx", direction="backward", shape=(rows, inner, out))
                dw = replace(part, name=f"{part.name}.dw", direction="backward", shape=(out, inner, rows))
                b.backward += [dx, dw]
                b.params.append(Param(part.param, out * inner, "fp32", True, 4.0, shape=(out, inner), grad_bytes=4.0))
            b.backward.append(
                Op(f"{op.name}.lora_add.bwd", op.module, "residual", "backward", 0, 3.0 * m * n * w, op.dtype)
            )
            old = b.saved.get(source)
            users = (old.users if old else frozenset()) | {f"{down.name}.dw"}
            b.saved[source] = Saved(m * k * w, users)
            b.saved[f"{op.name}.lora_mid"] = Saved(m * r * w, frozenset({f"{up.name}.dw"}))

    def build(self, run: TrainBuild) -> None:
        """Wrap each target linear, freeze the rest."""
        from ridgeline.nn.lora import wrap_linears

        wrap_linears(run.model, self.targets, self.rank, self.alpha, seed=run.experiment.training.seed)
        run.trainable = lambda name: name.rpartition(".")[2] in ("lora_a", "lora_b")


def _linears(m: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Last name → (out, in) of every plain linear layer of the transformer blocks."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(min(m.num_layers, 2)):
        for p in m.block_parameters(i):
            if p.name.endswith("_proj.weight") and len(p.shape) == 2:
                found[p.name.split(".")[-2]] = p.shape
    return found


def _sources(op: Op, b: Block) -> list[tuple[str, Saved]]:
    """The saved activation that is the input of linear ``op`` (kept under another linear's name when shared)."""
    module = {"q_proj": "attention_input", "k_proj": "attention_input", "v_proj": "attention_input",
              "o_proj": "context", "gate_proj": "mlp_input", "up_proj": "mlp_input", "down_proj": "inner"}  # fmt: skip
    leaf = op.name.rpartition(".")[2]
    prefix = op.name.rpartition(".")[0]
    key = module.get(leaf, f"{leaf}.input")
    key = f"{prefix}.{key}" if key in ("context", "inner") else key
    return [(key, b.saved.get(key, Saved(0.0, frozenset())))]


def _freeze(b: Block) -> None:
    for p in b.params:
        p.trainable = False
    gone = [o.name for o in b.backward if o.name.endswith((".dw", ".db"))]
    b.drop_users(gone)


def _no_input_gradient(b: Block) -> None:
    """The first layer's input needs no gradient: no input-gradient GEMMs into it, no normalisation backward."""
    gone = ["attention_norm.bwd", "attention_residual.bwd"]
    gone += [f"attention.{p}_proj{part}.dx" for p in "qkv" for part in ("", ".lora_a")]
    gone += [f"attention.{p}_proj.accumulate" for p in "qkv"]
    b.drop_users(gone)
