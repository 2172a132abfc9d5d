"""Diff pruning: learn a sparse difference to the pre-trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.adapters.adapted import Adapting, adapt, check_targets, train_matrix, unwrapped
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.technique import Card, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter
    from ridgeline.runtime.train_build import TrainBuild


class DiffPruning(Adapting):
    """Weights are W + d ∘ z: a difference d, and gates z that a penalty on the expected number of open gates closes.

    The gates follow the hard-concrete distribution. The penalty's gradient is applied to them separately from the
    loss's, after each update, in the way AdamW decays weights. What is saved or exported is projected: only the
    differences of largest magnitude, a fraction ``density`` of all, are kept.
    """

    card: ClassVar[Card] = Card(
        name="diff_pruning",
        title="Diff pruning",
        paper="arXiv:2012.07463",
        taxonomy="training/finetune/diff_pruning",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="matches full fine-tuning on GLUE while changing 0.5 % of the parameters per task",
        bound="falls",
        example={"targets": ["*.attention.*", "down_proj"]},
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        conflicts={"products": "{other} multiplies by weights of its own layers"},
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("adapter_diff", "adapter_gate")

    density: float = Field(default=0.005, gt=0, le=1)
    """Fraction of the adapted weights that may differ in what is saved."""
    penalty: float = Field(default=0.1, ge=0)
    """Coefficient of the penalty on the expected number of open gates."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """The linear layers to adapt: last names, ``all-linear``, or globs or regular expressions."""

    def check(self, e: Experiment) -> None:
        """Targets must exist; the weights must be plain tensors, and the optimizer must update them in place."""
        self.check_whole(e)
        refuse(self, e, "masters", "{other} keeps the gates in a copy that the penalty does not reach",
               "drop {other}, or have it keep none (mixed_precision:weights=fp32)")  # fmt: skip
        check_targets(self, e, self.targets)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything; two tensors of the shape of each weight train, and are combined with it at every use."""

        def add(b: Block, op: Op, source: str) -> None:
            train_matrix(b, op, source, "adapter_gated", self.leaves, 3.0, 4.0)

        return adapt(g, e, self.targets, add)

    @property
    def reads_weight(self) -> bool:
        """Its effect is a change of the weight."""
        return True

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """A zero difference with open gates."""
        from ridgeline.nn.adapters.diff import DiffLinear

        return DiffLinear(base, layer=layer)  # type: ignore[arg-type]

    def build(self, run: TrainBuild) -> None:
        """Insert the adapters; apply the gate penalty after each update."""
        import torch

        from ridgeline.nn.adapters.adapter import placed
        from ridgeline.nn.adapters.diff import DiffLinear, shut
        from ridgeline.nn.adapters.dropout import Dropout
        from ridgeline.nn.parallel.collectives import local

        super().build(run)
        noise = Dropout(0.0, run.experiment.training.seed)
        run.hooks.before_step.append(noise.at)
        for _, adapter in placed(run.model):
            assert isinstance(adapter, DiffLinear)
            adapter.noise = noise

        @torch.no_grad()
        def penalize() -> None:
            for name, p in run.root.named_parameters():
                if name.endswith("adapter_gate"):
                    shut(local(p.detach()), run.update.lr * self.penalty)

        if self.penalty:
            run.hooks.after_update.append(penalize)

    def _kept(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The projected difference of each layer."""
        from ridgeline.nn.adapters.diff import projected, settled

        layers = [n.removesuffix(".adapter_diff") for n in state if n.endswith(".adapter_diff")]
        found = {n: state[f"{n}.adapter_diff"] * settled(state[f"{n}.adapter_gate"]) for n in layers}
        return projected(found, self.density) if found else found

    def compact(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Positions (in the weight, row-major) and values of the differences that are kept, and the shape."""
        import torch

        out = {}
        for name, diff in self._kept(state).items():
            at = diff.flatten().nonzero().flatten()
            out[f"{name}.adapter_places"] = at.to(torch.int32)
            out[f"{name}.adapter_values"] = diff.flatten()[at]
            out[f"{name}.adapter_shape"] = torch.tensor(diff.shape, dtype=torch.int32)
        return out

    def expand(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Differences with gates that are open where they are kept and closed elsewhere; training resumes from
        these."""
        import torch

        out = {}
        for key in [k for k in state if k.endswith(".adapter_shape")]:
            name = key.removesuffix(".adapter_shape")
            shape = tuple(state[key].tolist())
            values = state[f"{name}.adapter_values"]
            at = state[f"{name}.adapter_places"].long()
            diff = values.new_zeros(shape).flatten()
            gate = torch.full_like(diff, -20.0)
            diff[at], gate[at] = values, 20.0
            out[f"{name}.adapter_diff"], out[f"{name}.adapter_gate"] = diff.view(shape), gate.view(shape)
        return out

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the projected differences to the weights."""
        out = unwrapped(state, self.leaves)
        for name, diff in self._kept(state).items():
            out[f"{name}.weight"] = out[f"{name}.weight"] + diff
        return out
