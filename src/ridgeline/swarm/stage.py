"""A stage of a pipeline as one peer trains it: its layers, the gradients of its micro-batches, its optimizer.

A peer is stateless between micro-batches but for the sum of their gradients: a backward pass computes the forward again
from its input, so that both may be computed by different peers (arXiv:2301.11913, section 3.1).

Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.graph.graph import even
from ridgeline.nn.checkpoint.checkpoint import load_into
from ridgeline.nn.model.init import DTYPES, allocate, init_weights
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.optimizer import make_optimizer, parameter_groups
from ridgeline.runtime.train_build import LossModel
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.swarm.link import Refused
from ridgeline.techniques.registry import make


def cuts(e: Experiment, stages: int) -> list[range]:
    """The layers of each stage."""
    counts = even(e.model.num_layers, stages)
    return [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def training_identity(e: Experiment, stages: int) -> str:
    """What peers of a training must agree on: model, workload, number of stages and of layers that share weights."""
    same = {"model": e.model.model_dump(mode="json"), "workload": e.workload.model_dump(mode="json"), "stages": stages,
            "shared": shared_layers(e)}  # fmt: skip
    return "swarm training " + hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def shared_layers(e: Experiment) -> int:
    """How many consecutive layers share their weights, as the plan says; 1: none do."""
    return max((make(c).layers_per_weights() for c in e.plan.calls), default=1)


def require_trainable(e: Experiment) -> None:
    """Raise :class:`Incompatible` for what a swarm does not train."""
    if e.model.tie_embeddings:
        raise Incompatible(f"the first and the last stage of {e.model.name} would share a parameter",
                           "train a model with tie_embeddings = false")  # fmt: skip
    more = [c.name for c in e.plan.calls if not make(c).card.runs_by and not make(c).owns() & {"batch_split"}]
    if more:
        raise Incompatible(f"a swarm trains without other techniques, not with {', '.join(more)}", "drop them")


def share(layers: nn.ModuleDict, n: int) -> None:
    """Put the first of each ``n`` layers in the place of all of them (as in arXiv:2301.11913, section 4.4)."""
    for i in layers:
        layers[i] = layers[str(int(i) // n * n)]


def require_equal(layers: nn.ModuleDict, n: int, checkpoint: str) -> None:
    """Raise :class:`UserError` where layers that are to share their weights have their own."""
    for i, layer in layers.items():
        first = layers[str(int(i) // n * n)]
        if not all(torch.equal(a, b) for a, b in zip(layer.parameters(), first.parameters(), strict=True)):
            raise UserError(
                f"layer {i} of {checkpoint} has other weights than layer {int(i) // n * n}, and the plan lets {n}"
                " layers share theirs",
                "train without shared, or without a checkpoint",
            )


class Stage:
    """One stage. For one thread."""

    def __init__(self, e: Experiment, stages: int, index: int) -> None:
        self.e, self.index, self.last = e, index, index == stages - 1
        with torch.device("meta"):
            model = Transformer(e.model)
        self.layers = cuts(e, stages)[index]
        model.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in self.layers})
        if index:
            model.embed = None
        if not self.last:
            model.norm = model.head = None
        shared = shared_layers(e)
        if e.training.checkpoint:
            allocate(model, "cpu", DTYPES[e.dtype])
            load_into(model, Path(e.training.checkpoint))
            require_equal(model.layers, shared, e.training.checkpoint)
            share(model.layers, shared)
        else:
            share(model.layers, shared)
            allocate(model, "cpu", DTYPES[e.dtype])
            init_weights(model, e.training.seed)
        model.set_attention("naive")
        self.model, self.call = model, LossModel(model)
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(parameter_groups(self.parameters, e.training), e.training)
        self.step = 0
        """Optimizer steps that the weights have seen."""
        self.micros: dict[int, str] = {}
        """Micro-batches of this step whose gradients are in the sum, and the attempt that each was."""
        self._flat: Tensor | None = None

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def require(self, step: int) -> None:
        """Raise :class:`Refused` unless this is the step."""
        if step != self.step:
            raise Refused(f"it is at step {self.step}, not {step}")

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    def forward(self, step: int, x: Tensor) -> Tensor:
        """Hidden states [B, S, H] of the next stage, from ids [B, S] or hidden states; nothing is kept."""
        self.require(step)
        with torch.no_grad():
            out: Tensor = self.call(x)
        return out

    def backward(self, step: int, micro: int, attempt: str, x: Tensor, grad: Tensor) -> Tensor | None:
        """Add a micro-batch's gradients, from that of what :meth:`forward` gave → that of ``x``; None for ids.

        Without an ``attempt`` nothing is added: another peer has these gradients.
        """
        self.require(step)
        return self._gradients(micro, attempt, x, lambda x: (self.call(x), grad))[1]

    def loss(
        self, step: int, micro: int, attempt: str, x: Tensor, labels: Tensor, factor: float
    ) -> tuple[float, Tensor | None]:
        """The last stage's forward and backward pass → the sum of token losses, and the gradient of ``x`` of that sum
        times ``factor``. ``attempt`` as in :meth:`backward`."""
        self.require(step)
        total, dx = self._gradients(micro, attempt, x, lambda x: (self.call(x, labels), torch.tensor(factor)))
        return float(total), dx

    def _gradients(
        self, micro: int, attempt: str, x: Tensor, run: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        """The output of ``run`` and the gradient of ``x``; the parameters' go into the sum wholly or not at all."""
        if attempt and micro in self.micros:
            raise Refused(f"it has the gradients of micro-batch {micro} already")
        x = x.requires_grad_() if x.is_floating_point() else x
        out, grad = run(x)
        wanted = [*([x] if x.requires_grad else []), *(self.parameters if attempt else [])]
        found = torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True)
        if not all(g is None or bool(g.isfinite().all()) for g in found):
            raise Refused("the gradients are not finite")
        for p, own in zip(self.parameters, found[len(found) - len(self.parameters) :] if attempt else (), strict=False):
            if own is not None:
                p.grad = own if p.grad is None else p.grad.add_(own)
        if attempt:
            self.micros[micro], self._flat = attempt, None
        return out.detach(), found[0] if x.requires_grad else None

    # ---- the sum over the stage's peers ------------------------------------------------------------------------------

    def gradient(self, part: int, parts: int) -> Tensor:
        """A part of this peer's own sum, fp32."""
        if self._flat is None:
            each = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            self._flat = torch.cat([g.flatten().float() for g in each])
        return self._flat.tensor_split(parts)[part]

    def holds(self, micros: dict[int, str]) -> bool:
        """Whether the gradients here are those of exactly these micro-batches."""
        return self.micros == micros

    def drop(self) -> None:
        """Forget this step's gradients."""
        self.micros, self._flat = {}, None
        for p in self.parameters:
            p.grad = None

    def commit(self, step: int, summed: Tensor, factor: float, lr: float) -> None:
        """The optimizer's step with the ``summed`` gradient of all peers, times ``factor``."""
        self.require(step)
        at = 0
        for p in self.parameters:
            p.grad = (summed[at : at + p.numel()].view_as(p) * factor).to(p.dtype)
            at += p.numel()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop()
        self.step += 1

    # ---- the state, for peers that join ------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer states by name."""
        out = {f"p{i}": p.detach().clone() for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            for name, value in self.optimizer.state.get(p, {}).items():
                out[f"s{i}.{name}"] = torch.as_tensor(value).clone()
        return out

    def load(self, step: int, state: dict[str, Tensor]) -> None:
        """Take another peer's state. Raises :class:`BadPeer` for what does not fit."""
        for i, p in enumerate(self.parameters):
            given = state.get(f"p{i}")
            if given is None or given.shape != p.shape or given.dtype != p.dtype or not bool(given.isfinite().all()):
                raise BadPeer(f"it sent a state without parameter {i} as it should be")
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                p.copy_(state[f"p{i}"])
                own = {n.partition(".")[2]: t for n, t in state.items() if n.startswith(f"s{i}.")}
                if own:
                    self.optimizer.state[p] = own
        self.drop()
        self.step = step
