"""The training engine: build in canonical order, then steps. It knows the technique protocol, never a technique."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.nn.checkpoint import load_checkpoint
from ridgeline.nn.init import build
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Training
from ridgeline.techniques.registry import check, normalise
from ridgeline.train.build import TrainBuild
from ridgeline.train.data import IGNORE, Batches, Tokens, load_tokens

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        e = normalise(e)
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
        self.optimizer = self._optimizer()
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

    def _build(self, made: list) -> TrainBuild:  # type: ignore[type-arg]
        e, w = self.experiment, self.workload
        # The whole model before anything is split, so that every layout starts from the same weights.
        if w.checkpoint:
            model = load_checkpoint(Path(w.checkpoint), dtype=DTYPES[e.dtype]).to(self.device)
        else:
            model = build(e.model, self.device, DTYPES[e.dtype], w.seed)
        model.set_attention("naive")
        run = TrainBuild(e, model, self.device, rank=self.rank, world=self.world)
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            run.mesh = init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("dp",))
        run.assert_trainable()
        for i, technique in enumerate(made):
            technique.build(run)
            if i + 1 == len(made) or made[i + 1].phase != technique.phase:
                run.assert_trainable()
        return run

    def _optimizer(self) -> torch.optim.Optimizer:
        w = self.workload
        if w.optimizer == "sgd":
            return torch.optim.SGD(self.parameters, lr=w.lr)
        decay = [p for p in self.parameters if p.ndim >= 2]
        rest = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": w.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        groups = [g for g in groups if g["params"]]
        return torch.optim.AdamW(groups, lr=w.lr, betas=(w.beta1, w.beta2), fused=True)

    # ---- one step -----------------------------------------------------------------------------------------------

    def local_batch(self, step: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """This rank's micro-batches of ``step`` and the valid tokens of the whole global batch.

        Every rank derives the global batch from the step, so counting needs no communication.
        """
        return self._mine(*self.batches.batch(step))

    def _mine(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        valid = max(1, int((labels != IGNORE).sum()))
        share = len(ids) // self.experiment.data_parallel
        mine = slice(self.rank * share, (self.rank + 1) * share)
        size = self.experiment.micro_batch_size
        ids, labels = ids[mine].to(self.device), labels[mine].to(self.device)
        return list(zip(ids.split(size), labels.split(size), strict=True)), valid

    def forward_backward(self, step: int) -> tuple[torch.Tensor, int]:
        """Accumulate gradients of sum(token losses) / (valid tokens of the global batch).

        Returns this rank's part of the mean loss, and the global count of valid tokens.
        """
        micro, valid = self.local_batch(step)
        total = torch.zeros((), device=self.device)
        run = self.run
        for i, (ids, labels) in enumerate(micro):
            with run.sync(i + 1 == len(micro)):
                with torch.autocast(self.device.type, run.compute_dtype, enabled=run.compute_dtype is not None):
                    loss = run.call(ids, labels)
                (loss * (run.loss_scale / valid)).backward()
            total += loss.detach() / valid
        return total, valid

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over one held-out batch, the same for every plan; None when the corpus has none to spare."""
        batch = self.batches.held_out_batch()
        if batch is None:
            return None
        micro, valid = self._mine(*batch)
        run = self.run
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for ids, labels in micro:
            with torch.autocast(self.device.type, run.compute_dtype, enabled=run.compute_dtype is not None):
                total += run.call(ids, labels).double() / valid
        run.after_evaluation()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total)

    def update(self, step: int) -> torch.Tensor:
        """Clip and apply the gradients; returns their global norm before clipping."""
        limit = self.workload.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        lr = learning_rate(self.workload, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.run.keep_gradients)
        return norm

    def step(self) -> StepStats:
        """One optimizer step. Raises ``FloatingPointError`` on a loss that is not finite, before the next update."""
        start = time.perf_counter()
        step = self.steps_done
        loss, valid = self.forward_backward(step)
        norm = self.update(step)
        report = torch.tensor([0.0, float(self.stop_requested)], dtype=torch.float64, device=self.device)
        report[0] = loss
        if self.world > 1:
            dist.all_reduce(report)
        value, stop = report.tolist()
        self.steps_done += 1
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        return StepStats(step, value, valid, float(norm), time.perf_counter() - start, stop > 0)
