"""DeepSpeed's engine (ZeRO 1/2/3, offload) on our own model: same weights, batches, optimizer, clipping, schedule.

The model is the native torch twin, so that a comparison is one of engines. Source: Rajbhandari et al. 2020
(arXiv:1910.02054); options as in DeepSpeed's configuration reference.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.data.batches import IGNORE
from ridgeline.measure.backends import OF_THE_MODEL
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.runtime.optimizer import learning_rate, make_optimizer, parameter_groups
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parallel.zero import Zero
from ridgeline.techniques.precision.mixed_precision import MixedPrecision
from ridgeline.techniques.registry import has, of_kind, resolve
from ridgeline.train.trainer import StepStats, global_batches, whole_model
from ridgeline.train.training_loop import plain_state, write_tokenizer


class DeepSpeed:
    """One rank under ``deepspeed.initialize``."""

    def __init__(self, e: Experiment, device: torch.device, rank: int, world: int) -> None:
        self.experiment, techniques = resolve(e)
        e = self.experiment
        self.device, self.rank, self.world = device, rank, world
        self.batches = global_batches(e, rank, world)
        self.run = TrainBuild(e, whole_model(e, device), device, rank=rank, world=world)
        self.run.assert_trainable()
        for technique in techniques:
            if type(technique) in OF_THE_MODEL:
                technique.build(self.run)
                self.run.assert_trainable()
        for finish in self.run.hooks.filled:
            finish()
        self.engine = self._initialize()

    def _initialize(self) -> Any:
        e, w = self.experiment, self.experiment.training
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if self.world == 1:  # it always needs a process group
            for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"),
                                ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):  # fmt: skip
                os.environ.setdefault(name, value)
        import deepspeed

        deepspeed.init_distributed("nccl" if self.device.type == "cuda" else "gloo", verbose=False)
        parameters = [p for p in self.run.root.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=self.run.root,
            optimizer=make_optimizer(parameter_groups(parameters, w), w),
            config=configuration(e, cpu=self.device.type == "cpu"),
            dist_init_required=False,
        )
        return engine

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over the held-out batch (every rank takes all of it: the forward pass may be collective)."""
        batch = self.batches.held_out_batch()
        if batch is None:
            return None
        size = self.experiment.micro_batch_size
        ids, labels = (t.to(self.device).split(size) for t in (batch.ids, batch.labels))
        self.engine.eval()
        total = sum(float(self.engine(i, t)) for i, t in zip(ids, labels, strict=True))
        self.engine.train()
        return total / max(1, int((batch.labels != IGNORE).sum()))

    def drive(self, watch: Callable[[StepStats], bool]) -> None:
        """Run the workload to its end; each step is passed to ``watch``."""
        for step in range(self.experiment.training.steps):
            if watch(self._step(step)):
                break

    def _step(self, step: int) -> StepStats:
        e, engine = self.experiment, self.engine
        start = time.perf_counter()
        ids, labels, *_ = self.batches.batch(step)
        valid = max(1, int((labels != IGNORE).sum()))
        share = len(ids) // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        parts = (t[mine].to(self.device).split(e.micro_batch_size) for t in (ids, labels))
        lr = learning_rate(e.training, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for x, t in zip(*parts, strict=True):
            loss = engine(x, t) / valid
            # It averages gradients over ranks and micro-batches; the loss is a sum over all of them.
            engine.backward(loss * (self.world * e.accumulation))
            engine.step()
            total += loss.detach().double()
        if self.world > 1:
            dist.all_reduce(total)
        value, norm = float(total), engine.get_global_grad_norm()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        norm = math.nan if norm is None else float(norm)
        return StepStats(step, value, valid, norm, time.perf_counter() - start)

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint."""
        import deepspeed

        from ridgeline.nn.model.transformer import Transformer

        root = self.run.root
        stage3 = _stage(self.experiment) == 3
        whole = deepspeed.zero.GatheredParameters([*root.parameters()]) if stage3 else contextlib.nullcontext()
        with whole:
            if self.rank:
                return
            state = {name.removeprefix("model."): t.detach().clone() for name, t in root.state_dict().items()}
        with torch.device("meta"):
            model = Transformer(self.experiment.model)
        model.load_state_dict(plain_state(self.experiment, state), assign=True)
        model.tie()
        save_checkpoint(model, folder)
        write_tokenizer(self.batches.tokenizer, self.experiment.training, folder)


def configuration(e: Experiment, cpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration of an experiment."""
    zero: dict[str, Any] = {"stage": _stage(e)}
    offload = has(e, "optimizer")
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not cpu}
        zero["stage"] = zero["stage"] or 1
    out = {
        "train_micro_batch_size_per_gpu": e.micro_batch_size,
        "gradient_accumulation_steps": e.accumulation,
        "gradient_clipping": e.training.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # On a CPU there is nothing to offload, and torch's fused AdamW is the fair baseline.
        "zero_force_ds_cpu_optimizer": offload and not cpu,
        "steps_per_print": 2**31 - 1,
    }
    mixed = of_kind(e, MixedPrecision)
    if mixed:
        out[mixed.dtype] = {"enabled": True}
    return out


def _stage(e: Experiment) -> int:
    zero = of_kind(e, Zero)
    return zero.stage if zero else 0
