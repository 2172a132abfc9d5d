"""Activation recomputation (checkpointing): trade forward arithmetic for activation memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Saved, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.train.build import TrainBuild


class Recompute(Technique):
    """Drop a block's activations after its forward pass and rebuild them just before its backward pass."""

    card: ClassVar[Card] = Card(
        name="recompute",
        title="Activation recomputation",
        paper="arXiv:1604.06174",
        taxonomy="training/model/recompute",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="activation memory of O(sqrt n) layers for about one third more compute; selective: arXiv:2205.05198",
    )
    phase: ClassVar[Phase] = "recompute"

    policy: Literal["full", "selective"] = "full"
    """full: whole blocks; selective: only scores, softmax and values (the score matrix)."""
    every: int = Field(default=1, ge=1)
    """With policy full: recompute every how many-th block."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Full, full in every other layer, selective."""
        return [cls(), cls(every=2), cls(policy="selective")]

    def check(self, e: Experiment) -> None:
        """Selective recomputation has nothing to drop when attention is fused, and has no ``every``."""
        self.needs(
            not (self.policy == "selective" and e.plan.has("flash_attention")),
            "policy 'selective' drops the score matrix, which flash_attention never stores",
            "use policy=full, or drop one of the two",
        )
        self.needs(
            not (self.policy == "selective" and self.every > 1),
            "policy 'selective' treats every block alike",
            "drop every=…, or use policy=full",
        )
        layers = e.model.num_layers
        self.needs(self.every <= layers, f"every={self.every} exceeds the {layers} layers", f"use at most {layers}")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Forward operators move into the backward phase too; saved activations shrink to the block's input."""
        g.closing.append(self._drop)
        return g

    def _drop(self, g: Graph) -> None:
        """Rebuild the chosen layers; the input of each stays."""
        blocks: list[Block] = []
        passed: dict[str, int] = {}
        for block in g.blocks:
            if not block.name.startswith(("layers", "encoder")):
                blocks.append(block)
            elif self.policy == "selective":
                _selective(block)
                blocks.append(block)
            else:
                first = passed.get(block.name, 0)
                passed[block.name] = first + block.repeat
                chosen = sum(i % self.every == 0 for i in range(first, first + block.repeat))
                rest = block.copy()
                rest.repeat = block.repeat - chosen
                if chosen:  # first, as the chosen layer is the first of each group
                    block.repeat = chosen
                    _full(block, g.residual)
                    blocks.append(block)
                if rest.repeat:
                    blocks.append(rest)
        g.blocks = blocks

    def build(self, run: TrainBuild) -> None:
        """Wrap the forward of each chosen block (or of its attention core) in ``torch.utils.checkpoint``."""
        from functools import partial

        from torch.utils.checkpoint import checkpoint

        # The model has no dropout, so there is no random state to restore.
        again = partial(partial, checkpoint, use_reentrant=False, preserve_rng_state=False)
        if self.policy == "selective":
            backend = run.model.backend
            run.model.set_attention(replace(backend, function=again(backend.function)))
            return
        for i, block in enumerate(run.model.layers.values()):
            if i % self.every == 0:
                block.forward = again(block.forward)


def _again(ops: list[Op]) -> list[Op]:
    return [
        changed(
            o, name=f"{o.name}.again", direction="backward", recompute=True, behind=o.behind and f"{o.behind}.again"
        )
        for o in ops
    ]


def _full(b: Block, kept: float) -> None:
    """All of the forward pass is repeated, but for what comes after the last tensor that backward needs.

    A matrix multiplication keeps only what it reads, so the last one of a pre-norm layer is not run again.
    """
    needed = {o.name.rpartition(".")[0] for o in b.backward if o.kind != "residual"}
    end = max((i for i, o in enumerate(b.forward) if o.name in needed and o.kind != "residual"), default=-1)
    quantised = any(o.kind == "cast" and o.param == b.forward[end].param for o in b.forward[:end])
    if b.forward[end].kind != "gemm" or quantised:
        end += 1
    b.recomputed = _rebuilt(b)
    b.saved = {"input": Saved(kept, frozenset({"recompute"}))}
    b.backward = _again(b.forward[:end]) + b.backward


def _rebuilt(b: Block) -> float:
    """Rebuilt bytes at the worse of two instants, as seen beside the largest workspace of the backward pass.

    The MLP's gradients come first, with everything rebuilt alive; when those of attention come, its part is gone.
    """
    everything = b.saved_bytes
    mlp = sum(s.bytes for s in b.saved.values() if all(user.startswith("mlp") for user in s.users))
    act = next((o for o in b.backward if o.kind == "activation"), None)
    if act is None or not mlp:
        return everything
    gated = "mlp.gate" in b.saved
    in_mlp = act.bytes * (0.6 if gated else 2 / 3)  # of what it moves: the gradients that come in and go out
    at = max(everything + min(in_mlp, b.backward_workspace), everything - mlp + b.backward_workspace)
    return at - b.backward_workspace


def _selective(b: Block) -> None:
    for prefix in ("attention", "cross_attention"):
        # The product with the values reads the last tensor to be rebuilt, and is not run again.
        core = {f"{prefix}.{part}" for part in ("scores", "mask", "softmax")}
        again = _again([o for o in b.forward if o.name in core])
        for name in ("probs", "probs.mask", "probs.dropped"):
            dropped = b.saved.pop(f"{prefix}.{name}", None)
            b.recomputed += dropped.bytes if dropped else 0.0
        b.backward = again + b.backward
