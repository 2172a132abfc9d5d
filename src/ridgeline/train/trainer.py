"""The training engine: build in canonical order, then run steps. It uses the technique interface and knows no specific
technique."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ridgeline.data.batches import Batch, TextBatches, token_ids, tokenizer_of
from ridgeline.data.packing import InstructionBatches, load_instructions
from ridgeline.data.pairs import AnyBatches, HalvedBatches, PairBatches
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, load_into
from ridgeline.nn.model.init import DTYPES, allocate, build, init_weights
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.gradients import holders, sum_partial
from ridgeline.runtime.mesh import Mesh
from ridgeline.runtime.optimizer import parameter_groups
from ridgeline.runtime.train_build import Micro, TrainBuild
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import FineTune
from ridgeline.techniques.registry import require_sides, resolve
from ridgeline.techniques.technique import PHASES, Technique
from ridgeline.train import step_reports
from ridgeline.train.loader import Loader, Prepared, prepared, send
from ridgeline.train.shared_text import shared_tokens
from ridgeline.train.step_reports import Report


def assemble(run: TrainBuild, techniques: list[Technique], fill: Callable[[TrainBuild], None] | None = None) -> None:
    """Build the techniques, given in canonical order, asserting after every phase which parameters train.

    Between the phases that divide parameters and those that wrap them or consume their gradients, ``fill`` may allocate
    them and run callbacks that need their values; partial gradients are completed after each backward: those partial
    over tensor-parallel ranks, and those of a parameter that two stages hold.
    """
    run.assert_trainable()
    divided = False

    def complete() -> None:
        if run.gradients.partial and run.mesh:
            sum_partial([getattr(module, name) for module, name in run.gradients.partial], run.mesh.group("tp"))
        if run.gradients.tied:
            module, name, ends = run.gradients.tied
            sum_partial([getattr(module, name)], ends)

    for technique in (*techniques, None):
        if not divided and (technique is None or PHASES.index(technique.phase) >= PHASES.index("offload")):
            divided = True
            if fill:
                fill(run)
            for finish in run.hooks.filled:
                finish()
            if run.gradients.partial or run.gradients.tied:
                run.gradients.after_backward.append(complete)
        if technique is not None:
            technique.build(run)
        run.assert_trainable()


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: mean loss over the global batch's valid tokens, tokens trained, gradient norm, seconds."""

    step: int
    loss: float
    tokens: int
    grad_norm: float
    seconds: float
    stop: bool = False
    """Whether any rank received a stop signal."""
    finished: bool = False
    """Whether the plan ends training here (its budget is spent)."""


def global_batches(e: Experiment, rank: int, world: int) -> AnyBatches:
    """The batches of the experiment. Rank 0 tokenizes text, the others read its cache."""
    w, m = e.training, e.model
    if isinstance(w, FineTune) and w.instructions:
        if not m.causal:
            raise UserError(f"{m.name} is an encoder: it cannot learn answers", "fine-tune it on text, or a decoder")
        if m.is_encoder_decoder:
            examples = load_instructions(w, m.vocab_size, whole=True)
            return PairBatches(examples, w.seq_len, e.batch_size, m.start_token, w.seed, w.eval_batches)
        return InstructionBatches(
            load_instructions(w, m.vocab_size), w.seq_len, e.batch_size, w.packing, w.seed, w.eval_batches
        )
    tokens = shared_tokens(w.data, m.vocab_size, tokenizer_of(w), rank, world)
    length = w.seq_len * (2 if m.is_encoder_decoder else 1)
    text = TextBatches(tokens, length, e.batch_size, m.vocab_size, m.causal, w.seed, w.document_mask, w.eval_batches)
    return HalvedBatches(text, m.start_token) if m.is_encoder_decoder else text


def whole_model(e: Experiment, device: torch.device) -> Transformer:
    """The model before anything is divided, so that every layout and every engine starts from the same weights.

    On device "meta": only its shapes. Raises :class:`UserError` for a checkpoint of a model of other shapes.
    """
    w = e.training
    if w.checkpoint and device.type != "meta":
        model = load_checkpoint(Path(w.checkpoint), dtype=DTYPES[e.dtype]).to(device)
        needed = {p.name: p.shape for p in e.model.parameters()}
        if {p.name: p.shape for p in model.spec.parameters()} != needed:
            raise UserError(
                f"checkpoint {w.checkpoint} has other tensors than model {e.model.name}",
                f'give the checkpoint\'s own model: model="{w.checkpoint}"',
            )
    else:
        model = build(e.model, device, DTYPES[e.dtype], w.seed)
    model.set_attention("naive")
    return model


class Trainer:
    """One rank's training state. ``step()`` runs one optimizer step on the next global batch.

    ``begin()`` and ``reports()`` are its two halves: a GPU has the next step to do while the host reads of the last.
    """

    def __init__(self, e: Experiment, device: torch.device | None = None, rank: int = 0, world: int = 1) -> None:
        e, techniques = resolve(e)
        require_sides(e)
        self.experiment = e
        self.workload = e.training
        self.device = device or torch.device("cpu")
        self.rank, self.world = rank, world
        w = self.workload
        self.run = self._build(techniques)
        self.parameters = [p for p in self.run.root.parameters() if p.requires_grad]
        if not self.parameters:
            raise UserError("this plan leaves no parameter to train", "add lora, or drop what freezes the model")
        stages = self.run.mesh.size("pp") if self.run.mesh else 1
        self.copies = {p: holders(p, world // stages) for p in self.parameters}
        if self.run.gradients.tied:
            module, name, _ = self.run.gradients.tied
            self.copies[getattr(module, name)] *= 2
        self.optimizer = self.run.update.optimizer = self.run.update.make_optimizer(
            parameter_groups(self.parameters, w), w
        )
        self.loader = Loader(lambda step: self._prepared(self.run.data.batches.batch(step)), self.device,
                             ahead=self.run.data.ahead and self.device.type == "cuda")  # fmt: skip
        self.steps_done = 0
        """Those that have begun."""
        self.stop_requested = False
        self._under_way: deque[tuple[int, int, Callable[[], Report]]] = deque()
        """Number, valid tokens and report of steps that have begun."""
        self._since = 0.0

    def _build(self, techniques: list[Technique]) -> TrainBuild:
        e = self.experiment
        early = [t for t in techniques if PHASES.index(t.phase) < PHASES.index("offload")]
        # A tied head must be one parameter with the embedding from the start.
        lazy = self.world > 1 and not e.model.tie_embeddings and all(t.lazy() for t in early)
        model = whole_model(e, torch.device("meta") if lazy else self.device)
        run = TrainBuild(e, model, self.device, rank=self.rank, world=self.world)
        run.data.batches = global_batches(e, self.rank, self.world)
        self._data = run.data.batches
        run.data.tokens_of = functools.partial(token_ids, tokenizer=run.data.batches.tokenizer)
        run.data.loss_of = self.loss_of
        if self.world > 1:
            run.mesh = Mesh.make(e, self.device.type, max((t.inner() for t in techniques), default=1))
        assemble(run, techniques, self._fill if lazy else None)
        run.kernels.require_used()
        return run

    @property
    def ahead(self) -> int:
        """Steps that begin before the last one's report is read: one on a GPU, none where the host waits within a step
        anyway, or where a report decides whether there is a next one."""
        run = self.run
        waits = run.update.scaler is not None or run.store is not None or run.hooks.finished is not None
        return int(self.device.type == "cuda" and not waits)

    @property
    def data_digest(self) -> str:
        """A hash of the tokens that the workload's data are."""
        return self._data.digest

    def _fill(self, run: TrainBuild) -> None:
        """Allocate parameters that are shapes only, with the values of this rank's part."""
        allocate(run.model, self.device, DTYPES[self.experiment.dtype])
        if self.workload.checkpoint:
            load_into(run.model, self.workload.checkpoint)
        else:
            init_weights(run.model, self.workload.seed)

    # ---- one step -----------------------------------------------------------------------------------------------

    def local_batch(self, step: int) -> tuple[list[Micro], int]:
        """This rank's micro-batches of ``step`` and the valid tokens of the whole global batch.

        Every rank derives the global batch from the step, so counting needs no communication.
        """
        micros, valid = self.loader.take(step, more=step + 1 < self.workload.steps)
        return self._cut(micros), valid

    def _cut(self, micros: list[Micro]) -> list[Micro]:
        for take in self.run.cut:
            micros = [take(m) for m in micros]
        return micros

    def _prepared(self, batch: Batch) -> Prepared:
        """This rank's part of a global batch, on the host."""
        share = len(batch.ids) // self.experiment.data_parallel
        place = self.run.mesh.data_rank if self.run.mesh else 0
        # The same number of tokens at a time, even if the sequences are shorter than the workload's.
        size = max(1, self.experiment.micro_batch_size * self.workload.seq_len // batch.ids.shape[1])
        return prepared(batch, slice(place * share, (place + 1) * share), size, self.device)

    def forward_backward(self, step: int) -> tuple[torch.Tensor, int]:
        """Accumulate gradients of sum(token losses) / (valid tokens of the global batch), and reduce them.

        Returns this rank's part of the mean loss, and the global count of valid tokens.
        """
        run = self.run
        run.update.lr = run.update.schedule(step)
        for prepare in run.hooks.before_step:
            prepare(step)
        micros, valid = self.local_batch(step)
        scale = run.update.scaler.scale if run.update.scaler else 1.0
        total = run.execute(micros, scale / valid) / scale
        for finish in run.gradients.after_backward:
            finish()
        return self._counted_once(total), valid

    def _counted_once(self, loss: torch.Tensor) -> torch.Tensor:
        """Tensor-parallel ranks all compute the loss of the same tokens: only the first reports it."""
        return torch.zeros_like(loss) if self.run.mesh and self.run.mesh.at("tp") else loss

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over one held-out batch, the same for every plan; None if the corpus is too small for one."""
        batch = self.run.data.batches.held_out_batch()
        if batch is None:
            return None
        return self.loss_of(batch)

    @torch.no_grad()
    def loss_of(self, batch: Batch) -> float:
        """Mean loss of a batch, without training on it."""
        micros, valid = send(self._prepared(batch), self.device)
        total = self._counted_once(self.run.score(self._cut(micros))) / valid
        self.run.hooks.after_evaluation()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total)

    def update(self, step: int, loss: torch.Tensor | None = None) -> tuple[torch.Tensor, Report | None]:
        """Clip and apply the gradients; returns their global norm before clipping.

        With loss scaling, gradients that are not finite are dropped and the scale is lowered. The host has to know that
        before it goes on, so that the step's report is made then, of this rank's part of the ``loss``, and returned.
        """
        run = self.run
        scale = run.update.scaler.scale if run.update.scaler else 1.0
        norm = run.gradients.norm(self.parameters, self.copies, self.world) / scale
        limit = self.workload.grad_clip
        known = self.report(loss, norm) if run.update.scaler and loss is not None else None
        finite = run.update.scaler is None or (math.isfinite(known.norm) if known else bool(torch.isfinite(norm)))
        if finite:
            run.gradients.clip(self.parameters, norm, limit, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = run.update.lr
            self.optimizer.step()
        run.gradients.clear(self.parameters, run.gradients.keep)
        for finish in run.hooks.after_update:
            finish()
        if run.update.scaler:
            run.update.scaler.update(finite)
        return norm, known

    def begin(self) -> None:
        """Launch the next step; its report is for :meth:`reports`."""
        if not self._under_way:
            self._since = time.perf_counter()
        step = self.steps_done
        loss, valid = self.forward_backward(step)
        norm, known = self.update(step, loss)
        self.loader.queue(step + 1)
        report = (lambda: known) if known else self._send_report(loss, norm).read
        self._under_way.append((step, valid, report))
        self.steps_done += 1

    def reports(self, complete: bool = False) -> Iterator[StepStats]:
        """Those of steps that have begun, but for the last :attr:`ahead`, which come as well if ``complete`` or if
        training ends. Raises ``FloatingPointError`` on a loss that is not finite."""
        while len(self._under_way) > (0 if complete else self.ahead):
            stats = self._read()
            complete = complete or stats.stop or stats.finished
            yield stats

    def step(self) -> StepStats:
        """One optimizer step, with its report. Raises ``FloatingPointError`` on a loss that is not finite."""
        self.begin()
        return list(self.reports(complete=True))[-1]

    def _read(self) -> StepStats:
        """The report of the first step under way. Its seconds are those since it began, or since the report before."""
        step, valid, arrived = self._under_way.popleft()
        value, size, stop, finished = arrived()
        before, self._since = self._since, time.perf_counter()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        return StepStats(step, value, valid, size, self._since - before, stop, finished)

    def report(self, loss: torch.Tensor, norm: torch.Tensor) -> Report:
        """What all ranks know of a step, at its end, for which the host waits."""
        return self._send_report(loss, norm).read()

    def _send_report(self, loss: torch.Tensor, norm: torch.Tensor) -> step_reports.Sent:
        finished = self.run.hooks.finished
        flags = self.stop_requested, self.rank == 0 and finished is not None and finished()
        return step_reports.send(loss, norm, flags, self.world)

    def drive(self, watch: Callable[[StepStats], bool]) -> None:
        """Run steps to the end of the workload, passing each to ``watch``, which returns whether to stop. One that has
        begun by then ends, but is not passed on."""
        for left in reversed(range(self.workload.steps)):
            self.begin()
            for stats in self.reports(complete=not left):
                if watch(stats) or stats.finished:
                    list(self.reports(complete=True))
                    return
