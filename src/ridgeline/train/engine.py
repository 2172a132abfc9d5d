"""The training engine: build in canonical order, then steps. It knows the technique protocol, never a technique."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ridgeline.nn.checkpoint import load_checkpoint
from ridgeline.nn.init import build
from ridgeline.predict.settle import settle
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Training
from ridgeline.techniques.base import PHASES, Technique
from ridgeline.techniques.registry import check
from ridgeline.train.build import Micro, TrainBuild
from ridgeline.train.data import IGNORE, Batches, Tokens, load_tokens
from ridgeline.train.gradients import holders, sum_partial
from ridgeline.train.mesh import Mesh, inner_ranks
from ridgeline.train.optimizer import parameter_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def assemble(run: TrainBuild, made: list[Technique]) -> None:
    """Build the techniques, given in canonical order, asserting after every phase what trains."""
    run.assert_trainable()
    completed = False
    for i, technique in enumerate(made):
        if PHASES.index(technique.phase) >= PHASES.index("offload") and not completed:
            completed = _complete_gradients(run)
        technique.build(run)
        if i + 1 == len(made) or made[i + 1].phase != technique.phase:
            run.assert_trainable()
    if not completed:
        _complete_gradients(run)


def _complete_gradients(run: TrainBuild) -> bool:
    """After what reduces gradients over data-parallel ranks, and before anything takes them away: sum those that are
    partial over tensor-parallel ranks, and those of a parameter that two stages hold."""

    def complete() -> None:
        if run.partial and run.mesh:
            sum_partial([getattr(module, name) for module, name in run.partial], run.mesh.group("tp"))
        if run.tied:
            module, name, ends = run.tied
            sum_partial([getattr(module, name)], ends)

    if run.partial or run.tied:
        run.after_backward.append(complete)
    return True


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: mean loss over the global batch's valid tokens, tokens trained, gradient norm, seconds."""

    step: int
    loss: float
    tokens: int
    grad_norm: float
    seconds: float
    stop: bool = False
    """Whether any rank was asked to stop."""


def learning_rate(w: Training, step: int) -> float:
    """Linear warm-up, then cosine to ``min_lr_ratio`` of the peak."""
    if step < w.warmup_steps:
        return w.lr * (step + 1) / w.warmup_steps
    span = max(1, w.steps - w.warmup_steps)
    share = min(1.0, (step - w.warmup_steps) / span)
    return w.lr * (w.min_lr_ratio + (1 - w.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    """One rank's training state. ``step()`` runs one optimizer step on the next global batch."""

    def __init__(self, e: Experiment, device: torch.device | None = None, rank: int = 0, world: int = 1) -> None:
        e = settle(e)
        self.experiment = e
        self.workload = e.training
        self.device = device or torch.device("cpu")
        self.rank, self.world = rank, world
        made = check(e)
        w = self.workload
        tokens = self._tokens()
        self.batches = Batches(tokens, w.seq_len, e.batch_size, e.model.vocab_size, e.model.causal, w.seed)
        self.run = self._build(made)
        self.parameters = [p for p in self.run.root.parameters() if p.requires_grad]
        if not self.parameters:
            raise UserError("this plan leaves no parameter to train", "add lora, or drop what freezes the model")
        stages = self.run.mesh.size("pp") if self.run.mesh else 1
        self.copies = {p: holders(p, world // stages) for p in self.parameters}
        if self.run.tied:
            module, name, _ = self.run.tied
            self.copies[getattr(module, name)] *= 2
        self.optimizer = self.run.optimizer = self.run.make_optimizer(parameter_groups(self.parameters, w), w)
        self.steps_done = 0
        self.stop_requested = False

    def _tokens(self) -> Tokens:
        """Rank 0 tokenises, the others read what it kept."""
        if self.rank > 0:
            dist.barrier()
        tokens = load_tokens(self.workload.data, self.experiment.model.vocab_size, self.workload.tokenizer)
        if self.rank == 0 and self.world > 1:
            dist.barrier()
        return tokens

    def _build(self, made: list[Technique]) -> TrainBuild:
        e, w = self.experiment, self.workload
        # The whole model before anything is split, so that every layout starts from the same weights.
        if w.checkpoint:
            model = load_checkpoint(Path(w.checkpoint), dtype=DTYPES[e.dtype]).to(self.device)
        else:
            model = build(e.model, self.device, DTYPES[e.dtype], w.seed)
        model.set_attention("naive")
        run = TrainBuild(e, model, self.device, rank=self.rank, world=self.world)
        if self.world > 1:
            run.mesh = Mesh.make(e, self.device.type, inner_ranks(made))
        assemble(run, made)
        return run

    # ---- one step -----------------------------------------------------------------------------------------------

    def local_batch(self, step: int) -> tuple[list[Micro], int]:
        """This rank's micro-batches of ``step`` and the valid tokens of the whole global batch.

        Every rank derives the global batch from the step, so counting needs no communication.
        """
        return self._mine(*self.batches.batch(step))

    def _mine(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[list[Micro], int]:
        valid = max(1, int((labels != IGNORE).sum()))
        share = len(ids) // self.experiment.data_parallel
        place = self.run.mesh.data_rank if self.run.mesh else 0
        mine = slice(place * share, (place + 1) * share)
        size = self.experiment.micro_batch_size
        ids, labels = ids[mine].to(self.device), labels[mine].to(self.device)
        micros = [Micro(i, t) for i, t in zip(ids.split(size), labels.split(size), strict=True)]
        for take in self.run.cut:
            micros = [take(m) for m in micros]
        return micros, valid

    def forward_backward(self, step: int) -> tuple[torch.Tensor, int]:
        """Accumulate gradients of sum(token losses) / (valid tokens of the global batch), and reduce them.

        Returns this rank's part of the mean loss, and the global count of valid tokens.
        """
        micros, valid = self.local_batch(step)
        run = self.run
        scale = run.scaler.scale if run.scaler else 1.0
        total = run.execute(micros, scale / valid) / scale
        for finish in run.after_backward:
            finish()
        return self._counted_once(total), valid

    def _counted_once(self, loss: torch.Tensor) -> torch.Tensor:
        """Tensor-parallel ranks all have the loss of the same tokens: the first reports it."""
        return torch.zeros_like(loss) if self.run.mesh and self.run.mesh.at("tp") else loss

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over one held-out batch, the same for every plan; None when the corpus has none to spare."""
        batch = self.batches.held_out_batch()
        if batch is None:
            return None
        micros, valid = self._mine(*batch)
        total = self._counted_once(self.run.score(micros)) / valid
        self.run.after_evaluation()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total)

    def update(self, step: int) -> torch.Tensor:
        """Clip and apply the gradients; returns their global norm before clipping.

        With loss scaling, gradients that are not finite are dropped and the scale is lowered.
        """
        run = self.run
        scale = run.scaler.scale if run.scaler else 1.0
        norm = run.norm(self.parameters, self.copies, self.world) / scale
        limit = self.workload.grad_clip
        finite = run.scaler is None or bool(torch.isfinite(norm))
        if finite:
            run.clip(self.parameters, norm, limit, scale)
            lr = learning_rate(self.workload, step)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        run.clear(self.parameters, run.keep_gradients)
        for finish in run.after_update:
            finish()
        if run.scaler:
            run.scaler.update(finite)
        return norm

    def step(self) -> StepStats:
        """One optimizer step. Raises ``FloatingPointError`` on a loss that is not finite, before the next update."""
        start = time.perf_counter()
        step = self.steps_done
        loss, valid = self.forward_backward(step)
        norm = self.update(step)
        value, stop = self.report(loss)
        self.steps_done += 1
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        return StepStats(step, value, valid, float(norm), time.perf_counter() - start, stop)

    def report(self, loss: torch.Tensor) -> tuple[float, bool]:
        """The loss over all ranks, and whether any of them was asked to stop."""
        report = torch.tensor([0.0, float(self.stop_requested)], dtype=torch.float64, device=self.device)
        report[0] = loss
        if self.world > 1:
            dist.all_reduce(report)
        value, stop = report.tolist()
        return value, stop > 0
