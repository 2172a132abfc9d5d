"""Hugging Face ``Trainer`` on the same weights, batches, optimizer, clipping and schedule as the native engine."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HfTrainer
from transformers.utils import logging

from ridgeline.data.batches import Batch
from ridgeline.data.pairs import AnyBatches
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.runtime.optimizer import learning_rate, make_optimizer, parameter_groups
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.precision.mixed_precision import MixedPrecision
from ridgeline.techniques.registry import has, of_kind, resolve
from ridgeline.train.adapter_folder import adapting, save_adapter
from ridgeline.train.trainer import StepStats, global_batches, whole_model
from ridgeline.train.training_loop import write_tokenizer


class HuggingFace:
    """One rank under ``transformers.Trainer``. A step's seconds are those of the Trainer's whole loop, data and logging
    of the loss included, as the native step's are."""

    def __init__(self, e: Experiment, device: torch.device, rank: int, world: int) -> None:
        self.experiment = e = resolve(e)[0]
        self.device, self.rank, self.world = device, rank, world
        self.batches = global_batches(e, rank, world)
        self.model = self._model()

    def _model(self) -> Any:
        """The library's own model with our weights, broadcast from rank 0."""
        e, quiet = self.experiment, cast(Any, logging)
        quiet.disable_progress_bar()
        model: Any = None
        attention = "sdpa" if has(e, "fused_attention") else "eager"
        if self.rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                save_checkpoint(whole_model(e, torch.device("cpu")), Path(folder))
                model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
                if has(e, "low_rank"):
                    model = self._adapted(model, Path(folder) / "adapter")
        if self.world > 1:
            shape = [model.config if model is not None else None]
            dist.broadcast_object_list(shape, device=self.device)
            if model is None:
                model = cast(Any, AutoModelForCausalLM).from_config(shape[0], attn_implementation=attention)
            model = model.to(device=self.device)
            for p in model.parameters():
                dist.broadcast(p.data, 0)
        return model

    def _adapted(self, model: Any, folder: Path) -> Any:
        """The model under ``peft``, its adapters starting where ours do."""
        from peft import PeftModel

        run = TrainBuild(self.experiment, whole_model(self.experiment, torch.device("cpu")), torch.device("cpu"))
        adapting(self.experiment).build(run)
        save_adapter(self.experiment, run.model.state_dict(), folder)
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over the held-out batch."""
        batch = self.batches.held_out_batch()
        if batch is None:
            return None
        self.model.to(self.device).eval()
        total = 0.0
        size = self.experiment.micro_batch_size
        parts = (t.to(self.device).split(size) for t in (batch.ids, batch.labels))
        for ids, labels in zip(*parts, strict=True):
            total += float(self.model(input_ids=ids, labels=labels, shift_labels=labels).loss) * len(ids)
        self.model.train()
        return total / len(batch.ids)

    def drive(self, watch: Callable[[StepStats], bool]) -> None:
        """Run ``Trainer.train()``; each step is passed to ``watch``."""
        e, w = self.experiment, self.experiment.training
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = make_optimizer(parameter_groups(trained, w), w)
        # Trainer's own warm-up starts at a rate of zero; ours is the workload's.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(w, step) / (w.lr or 1.0))
        mixed = of_kind(e, MixedPrecision)
        low = mixed.dtype if mixed else "fp32"
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=e.micro_batch_size, max_steps=w.steps,
                gradient_accumulation_steps=e.accumulation, max_grad_norm=w.grad_clip, logging_steps=1, report_to=[],
                logging_nan_inf_filter=False, save_strategy="no", disable_tqdm=True, log_level="error",
                use_cpu=self.device.type == "cpu", remove_unused_columns=False,
                dataloader_pin_memory=self.device.type == "cuda", train_sampling_strategy="sequential", seed=w.seed,
                bf16=low == "bf16", fp16=low == "fp16", gradient_checkpointing=has(e, "recomputation"),
                gradient_checkpointing_kwargs={"use_reentrant": False},
                ddp_find_unused_parameters=False,
                ddp_backend="gloo" if self.device.type == "cpu" and self.world > 1 else None,
            )  # fmt: skip
            trainer = HfTrainer(
                model=self.model, args=arguments, train_dataset=_Rows(self.batches, w.steps), data_collator=_collate,
                optimizers=(optimizer, schedule), callbacks=[_Clock(watch, e.batch_size * w.seq_len)],
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    def export(self, folder: Path) -> None:
        """Write the model and its tokenizer."""
        if self.rank == 0:
            self.model.save_pretrained(folder)
            write_tokenizer(self.batches.tokenizer, self.experiment.training, folder)


class _Rows(Dataset[dict[str, Tensor]]):
    """The rows of every step's batch, one after the other, created on demand."""

    def __init__(self, batches: AnyBatches, steps: int) -> None:
        self.batches, self.steps = batches, steps
        self._step = -1
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return self.steps * self.batches.batch_size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        step, row = divmod(i, self.batches.batch_size)
        if step != self._step or self._batch is None:
            self._step, self._batch = step, self.batches.batch(step)
        ids, labels, *_ = self._batch
        return {"input_ids": ids[row], "labels": labels[row]}


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Labels come shifted, as many as tokens: the Trainer counts them, the model takes them as they are."""
    labels = torch.stack([r["labels"] for r in rows])
    return {"input_ids": torch.stack([r["input_ids"] for r in rows]), "labels": labels, "shift_labels": labels}


class _Clock(TrainerCallback):
    """Passes each step to ``watch`` when its loss is logged."""

    def __init__(self, watch: Callable[[StepStats], bool], tokens: int) -> None:
        self.watch, self.tokens = watch, tokens
        self.since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """One step is done."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {state.global_step - 1}")
        seconds = time.perf_counter() - self.since
        norm = float(logs.get("grad_norm", math.nan))
        if self.watch(StepStats(state.global_step - 1, loss, self.tokens, norm, seconds)):
            control.should_training_stop = True
        self.since = time.perf_counter()
