"""Small experiments on a small text, and functions that train them in one process or on the ranks of a pool."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.world import world

from ridgeline.data.batches import IGNORE, Batch
from ridgeline.runtime.train_build import BatchSource
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import normalize
from ridgeline.train.trainer import Trainer

MODEL = ModelSpec(
    name="test-tiny", family="llama", vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=64, max_positions=64,
)  # fmt: skip


def write_corpus(file: Path, lines: int = 400) -> Path:
    """Some 20 kB of sentences, the same on every machine."""
    rng = random.Random(0)
    words = ["roof", "ridge", "memory", "bandwidth", "gradient", "of", "the", "a", "step", "model", "is", "peak"]
    text = "\n".join(" ".join(rng.choices(words, k=9)) + f" {rng.randrange(100)}." for _ in range(lines))
    file.write_text(text, encoding="utf-8")
    return file


def experiment(data: Path | str, *plan: str, ranks: int = 1, model: ModelSpec = MODEL, **workload: Any) -> Experiment:
    """A normalized experiment on ``ranks`` CPU processes."""
    fields = {"seq_len": 16, "batch_size": 4, "steps": 5, "warmup_steps": 1, "lr": 1e-3, **workload}
    e = Experiment(
        model=model,
        cluster=Cluster(device=CPU, devices_per_node=ranks),
        workload=Pretrain(data=str(data), **fields),
        plan=Plan.parse(plan),
    )
    return normalize(e)


def small_domains(plan: Plan, corpus: Path) -> Plan:
    """Domains of text that are read in no time: the corpus, and the same in capitals."""
    other = corpus.with_name("capitals.txt")
    if not other.exists():
        other.write_text(corpus.read_text(encoding="utf-8").upper(), encoding="utf-8")
    own = {"domains": [str(corpus), str(other)]}
    return Plan(calls=tuple(c.model_copy(update={"options": {**c.options, **own}}) if "domains" in c.options else c
                            for c in plan.calls))  # fmt: skip


@dataclass
class UnevenBatches:
    """Every row has another number of valid labels, so that means over parts are not the mean over all."""

    inner: BatchSource

    @property
    def tokenizer(self) -> Any:
        return self.inner.tokenizer

    def batch(self, step: int) -> Batch:
        batch = self.inner.batch(step)
        labels = batch.labels.clone()
        for row in range(len(labels)):
            labels[row, : (4 * row + 3 * step) % (labels.shape[1] - 1)] = IGNORE
        return batch._replace(labels=labels)

    def held_out_batch(self) -> Batch | None:
        return self.inner.held_out_batch()


def make_trainer(e: Experiment, rank: int = 0, uneven: bool = True) -> Trainer:
    trainer = Trainer(e, torch.device("cpu"), rank, e.world)
    if uneven:
        trainer.run.data.batches = UnevenBatches(trainer.run.data.batches)
    return trainer


def full(t: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a tensor, sharded or not."""
    t = t.detach()
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter, whole, by name; of 16-bit ones the fp32 master copy."""
    found = {}
    with trainer.run.hooks.resident(False):
        for name, p in trainer.run.root.named_parameters():
            master = trainer.optimizer.state.get(p, {}).get("master")
            wide = p.dtype != torch.float32 and master is not None and master.dtype == torch.float32
            found[name.replace("_orig_mod.", "")] = full(master if wide else p)
    return found


@dataclass
class Curve:
    """What a short training did."""

    losses: list[float]
    norms: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    trained: set[str]

    @property
    def signal(self) -> float:
        """How far the loss moved: what a comparison could have seen."""
        return abs(self.losses[-1] - self.losses[0])

    @property
    def moved(self) -> float:
        """How far the parameters moved at most."""
        return max(float((self.after[n] - self.before[n]).abs().max()) for n in self.trained)


def curve_of(trainer: Trainer) -> Curve:
    before = state(trainer)
    updated = {p for group in trainer.optimizer.param_groups for p in group["params"]}  # integers need no gradient
    named = trainer.run.root.named_parameters()
    trained = {n.replace("_orig_mod.", "") for n, p in named if p.requires_grad or p in updated}
    stats = [trainer.step() for _ in range(trainer.workload.steps)]
    return Curve([s.loss for s in stats], [s.grad_norm for s in stats], before, state(trainer), trained)


def train_rank(rank: int, e: Experiment, uneven: bool = True) -> Curve:
    return curve_of(make_trainer(e, rank, uneven))


def train(e: Experiment, uneven: bool = True) -> Curve:
    """Train the experiment for real: here, or on as many processes as it asks for. All ranks must agree."""
    if e.world == 1:
        return train_rank(0, e, uneven)
    curves = world(e.world).run(train_rank, e, uneven)
    whole = curves[0]
    for other in curves[1:]:
        assert other.losses == whole.losses
        assert other.norms == whole.norms
        assert all(torch.equal(other.after[n], t) for n, t in whole.after.items() if n in other.after)
        whole.before.update(other.before)  # a pipeline stage has only its layers
        whole.after.update(other.after)
        whole.trained |= other.trained
    if e.model.tie_embeddings and e.parallel.get("pp", 1) > 1:  # the last stage's copy must have stayed one
        copy = whole.after.pop("model.head.out.weight")
        assert torch.equal(copy, whole.after["model.embed.tokens.weight"])
        whole.trained.discard("model.head.out.weight")
    return whole


_ONCE: dict[str, Curve] = {}


def train_once(e: Experiment) -> Curve:
    """:func:`train` of what several tests compare with: once for each experiment. The curve is not to be changed."""
    if e.id not in _ONCE:
        _ONCE[e.id] = train(e)
    return _ONCE[e.id]
