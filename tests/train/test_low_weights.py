"""16-bit weights beside fp32 masters on several ranks and beyond the device: the training of one process.

Plain SGD, clipping active, rows with unequal numbers of labels. Where a plan computes every row as one process does,
only the order of fp32 sums may differ; where it divides a product, partial sums are rounded to bf16.
"""

from __future__ import annotations

import functools

import pytest
import torch
from tests.crossings import named
from tests.training import MODEL, experiment, full, make_trainer, state, train
from tests.world import world

from ridgeline.spec.model import ModelSpec
from ridgeline.train.checkpoint import resume, save

LOW = "mixed_precision:weights=low"
TP, SP = "tensor_parallel:degree=2", "sequence_parallel"
RING = ("ring_attention:degree=2", "flash_attention")
EXPERT = "expert_parallel:degree=2"
DEEP = MODEL.model_copy(update={"num_layers": 4, "vocab_size": 301})
"""A layer for every stage, and rows that do not divide evenly."""
TIED = DEEP.model_copy(update={"tie_embeddings": True})
EXPERTS = MODEL.model_copy(update={"num_experts": 4, "experts_per_token": 2})
SETTINGS = {"optimizer": "sgd", "lr": 5.0, "grad_clip": 0.05, "batch_size": 8, "micro_batch_size": 1, "steps": 3}
EPS = 2**-8
"""The largest relative error of rounding to bf16, either way."""

SAME = {
    "data": (2, ("data_parallel",), DEEP),
    "zero 1": (2, ("zero:stage=1",), DEEP),
    "zero 2, lora": (2, ("zero:stage=2", "lora:rank=4,targets=all-linear"), DEEP),
    "zero 3": (2, ("zero:stage=3",), DEEP),
    "hybrid 2": (4, ("zero:stage=2,degree=2",), DEEP),
    "hybrid 3": (4, ("zero:stage=3,degree=2",), DEEP),
    "zero 2, recompute": (2, ("zero:stage=2", "recompute", "activation_offload"), DEEP),
    "pipeline x zero 1, tied": (4, ("pipeline:degree=2", "zero:stage=1"), TIED),
    "zero_bubble x zero 2": (4, ("pipeline:degree=2,schedule=zero_bubble", "zero:stage=2"), DEEP),
    "interleaved x zero 3": (4, ("pipeline:degree=2,schedule=interleaved,chunks=2", "zero:stage=3"), DEEP),
    "offload": (1, ("zero_offload",), DEEP),
    "disk": (1, ("zero_infinity:parameters=nvme,optimizer=nvme",), DEEP),
}
ROUNDED = {
    # the head's gradient, which a fused loss sums in fp32, passes through autograd in bf16 where weights come later
    "zero_bubble x zero 3, fused": (
        4,
        ("pipeline:degree=2,schedule=zero_bubble", "zero:stage=3", "flash_attention", "fused_layers"),
        DEEP,
    ),
    "tensor x zero 1": (4, (TP, SP, "zero:stage=1"), DEEP),
    "ring x zero 2": (4, (*RING, "zero:stage=2"), DEEP),
    # an expert's rows come from all ranks: the product that is its gradient is rounded once
    "experts x zero 1": (4, (EXPERT, "zero:stage=1"), EXPERTS),
    "experts x zero 3": (4, (EXPERT, "zero:stage=3"), EXPERTS),
    # gradients that were summed in fp32 travel to the host in bf16
    "data, offload": (2, ("data_parallel", "zero_offload"), DEEP),
    "pipeline x zero 1, offload": (4, ("pipeline:degree=2", "zero:stage=1", "zero_offload"), DEEP),
    "zero 3, infinity": (2, ("zero:stage=3", "zero_infinity:parameters=cpu,optimizer=nvme"), DEEP),
}


@functools.cache
def one_process(corpus, model: ModelSpec, kept: tuple[str, ...]):
    """Its training on the micro-batches that the ranks have together."""
    return train(experiment(corpus, LOW, *kept, model=model, **SETTINGS))


@pytest.mark.parametrize("name", named([*SAME, *ROUNDED]))
def test_the_same_training(name, corpus):
    ranks, plan, model = {**SAME, **ROUNDED}[name]
    kept = tuple(c for c in plan if c.startswith(("lora", "flash", "fused")))
    alone = one_process(corpus, model, kept)
    made = train(experiment(corpus, LOW, *plan, ranks=ranks, model=model, **SETTINGS))
    assert min(alone.norms) > SETTINGS["grad_clip"]
    assert alone.signal > 0.05
    # A sum in another order turns the rounding of few weights; each moves a gradient by less than it is rounded by.
    rounding = EPS if name in ROUNDED else 1e-2 * EPS
    assert made.losses == pytest.approx(alone.losses, rel=rounding)
    assert made.norms == pytest.approx(alone.norms, rel=2 * EPS if name in ROUNDED else EPS)
    assert made.trained == alone.trained
    for p in sorted(alone.trained):
        way = alone.after[p] - alone.before[p]
        assert made.after[p].dtype == torch.float32  # what is compared are the masters
        assert (made.after[p] - alone.after[p]).norm() <= (8 if name in ROUNDED else 1) * EPS * way.norm(), p


# ---- what the masters are for ---------------------------------------------------------------------------------------

SMALL = {"optimizer": "adamw", "lr": 8e-4, "steps": 16, "batch_size": 4}
"""AdamW moves a weight by at most about ``lr`` a step: less than half of the 2^-8 between 1 and the bf16 below it."""


def norms_of(rank, e):
    """The first norm's weights, which start at 1: as they rest after every step, and their masters at the end."""
    trainer = make_trainer(e, rank, uneven=False)

    def weight():
        return trainer.run.model.layers["0"].attention_norm.weight

    rest = []
    for _ in range(trainer.workload.steps):
        trainer.step()
        with trainer.run.hooks.resident(False):
            rest.append(full(weight()))
    return rest, state(trainer)


@pytest.mark.parametrize(("ranks", "plan"), [(2, ("zero:stage=1",)), (2, ("zero:stage=3",)), (1, ("zero_offload",))])
def test_updates_too_small_for_16_bits_add_up(ranks, plan, corpus):
    def run(*calls, **fields):
        e = experiment(corpus, *calls, ranks=ranks, **SMALL, **fields)
        return norms_of(0, e) if ranks == 1 else world(ranks).run(norms_of, e)[0]

    rest, after = run(LOW, *plan)
    name = next(n for n in after if n.endswith("layers.0.attention_norm.weight"))
    moved = after[name] - 1
    assert float(moved.abs().max()) > 2**-9
    assert torch.equal(rest[0], torch.ones_like(rest[0])), "the first step alone is lost in 16 bits"
    assert not torch.equal(rest[-1], rest[0])
    assert torch.equal(rest[-1].float(), after[name].bfloat16().float())
    lost, _ = run(*plan, dtype="bf16")  # negative control: the same weights without masters
    assert torch.equal(lost[-1], torch.ones_like(lost[-1]))


# ---- checkpoints ----------------------------------------------------------------------------------------------------

LAYOUTS = [
    (2, ("zero:stage=1",)),
    (4, (TP, "zero:stage=3")),
    (1, ("zero_offload",)),
    (4, ("pipeline:degree=2", "zero:stage=2")),
    (1, ()),
]


def go_on(rank, e, folder, steps):
    trainer = make_trainer(e, rank)
    losses = resume(trainer, folder)
    held = state(trainer)
    losses += [trainer.step().loss for _ in range(steps)]
    save(trainer, folder, losses)
    return losses, held, state(trainer)


def test_a_checkpoint_moves_between_layouts_with_its_masters(corpus, tmp_path):
    fields = {"optimizer": "adamw", "lr": 3e-3, "batch_size": 8, "micro_batch_size": 2, "steps": 10, "model": DEEP}
    straight = train(experiment(corpus, LOW, **fields))
    left: dict[str, torch.Tensor] = {}
    for ranks, plan in LAYOUTS:
        e = experiment(corpus, LOW, *plan, ranks=ranks, **fields)
        found = [go_on(0, e, tmp_path, 2)] if ranks == 1 else world(ranks).run(go_on, e, tmp_path, 2)
        losses = found[0][0]
        held = {k: v for _, parts, _ in found for k, v in parts.items()}
        assert not left or all(torch.equal(held[name], t) for name, t in left.items())
        left = {k: v for _, _, parts in found for k, v in parts.items()}
    assert losses == pytest.approx(straight.losses, rel=EPS)
    assert straight.signal > 20 * EPS * straight.losses[-1]
