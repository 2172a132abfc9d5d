"""Static memory really run: nothing that is planned is allocated, the bytes are predicted, the loss stays."""

from contextlib import suppress

import pytest
import torch
from tests.training import MODEL, experiment, make_trainer
from tests.world import world
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import experiments
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.memory.arena import Arena
from ridgeline.predict import predict
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.registry import check

WIDER = MODEL.model_copy(
    update={"hidden_size": 64, "head_dim": 16, "num_layers": 3, "intermediate_size": 160, "max_positions": 128}
)


def ready(corpus, *plan, rank=0, **workload):
    e = experiment(corpus, *plan, model=WIDER, **{"seq_len": 128, "batch_size": 4, **workload})
    trainer = make_trainer(e, rank, uneven=False)
    for _ in range(3):
        trainer.step()
    return trainer


class Through(TorchDispatchMode):
    """Does nothing; but under any mode autograd adds gradients out of place, so the comparison needs one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def allocations(trainer) -> int:
    """Calls of the CPU allocator in one forward and backward, as the profiler sees them, constants of 0 dimensions
    aside."""
    micros, valid = trainer.local_batch(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p, Through():
        trainer.run.execute(micros, 1.0 / valid)
    return sum(1 for e in p.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 64)


PLANS = [([], None), ([], 2), (["flash_attention"], None), (["recompute"], None), (["mixed_precision"], None)]


@pytest.mark.parametrize(("others", "micro"), [*PLANS, (["lora:rank=4"], None)], ids=str)
def test_memory_is_predicted_and_the_plan_close_to_its_bound(others, micro, corpus):
    trainer = ready(corpus, "static_memory", *others, micro_batch_size=micro)
    static, usage = trainer.run.execute, metered_step(trainer)
    said = {m.category: m.bytes for m in predict(trainer.experiment).memory}
    print(f"arena {static.arena.nbytes}, bound {static.bound}, naive {static.naive}, served {static.arena.served}")
    print(f"predicted {said}\nmeasured  {usage.categories}")
    assert static.bound <= static.arena.nbytes <= 1.05 * static.bound
    assert static.arena.nbytes <= static.naive
    assert not static.arena.diverged
    assert static.arena.served == len(static.arena.places) > 50
    assert usage.total == pytest.approx(sum(said.values()), rel=0.05)
    assert usage.categories["buffers"] == pytest.approx(said["buffers"], rel=0.15)


def test_no_planned_tensor_is_allocated(corpus):
    plain, static = ready(corpus), ready(corpus, "static_memory")
    before, after = allocations(plain), allocations(static)
    placed = sum(p.size.numel() * p.dtype.itemsize > 64 for p in static.run.execute.arena.places.values())
    print(f"{before} allocations without, {after} with {placed} results in the arena")
    assert after <= before - placed


def test_bitwise_the_same_steps(corpus):
    plain, static = (make_trainer(experiment(corpus, *plan, steps=6)) for plan in ([], ["static_memory"]))
    for _ in range(6):
        assert plain.step().loss == static.step().loss
    for a, b in zip(plain.parameters, static.parameters, strict=True):
        assert torch.equal(a, b)
    assert static.run.execute.arena.served


def test_another_batch_size_allocates_as_usual(corpus):
    static = ready(corpus, "static_memory")
    micros, valid = static.local_batch(0)
    fewer = [type(m)(m.ids[:2, :50], m.labels[:2, :50]) for m in micros]
    got = static.run.execute(fewer, 1.0 / valid)
    plain = ready(corpus)
    for p, q in zip(plain.parameters, static.parameters, strict=True):
        p.data.copy_(q)
    assert got.item() == plain.run.execute(fewer, 1.0 / valid).item()


def test_a_plan_with_overlap_is_noticed(corpus):
    """Negative control: with every tensor at one place the loss is wrong."""
    static = ready(corpus, "static_memory")
    micros, valid = static.local_batch(0)
    right = static.run.execute(micros, 1.0 / valid).item()
    arena: Arena = static.run.execute.arena
    for place in arena.places.values():
        place.offset //= 128 * 64
        place.offset *= 64
    wrong = None
    with suppress(RuntimeError):  # PyTorch itself notices some
        wrong = static.run.execute(micros, 1.0 / valid).item()
    assert wrong != right


def totals(rank, e):
    trainer = make_trainer(e, rank, uneven=False)
    for _ in range(3):
        trainer.step()
    return metered_step(trainer).total, trainer.run.execute.arena.diverged, trainer.run.execute.arena.served


@pytest.mark.parametrize("other", ["data_parallel", "zero:stage=1", "zero:stage=2", "zero:stage=3"])
def test_on_two_ranks(other, corpus):
    e = experiment(corpus, other, "static_memory", model=WIDER, ranks=2, seq_len=128, batch_size=4)
    said = sum(m.bytes for m in predict(e).memory)
    for got, diverged, served in world(2).run(totals, e):
        print(f"{other}: measured {got}, predicted {said:.0f}")
        assert not diverged
        assert served > 50
        assert got == pytest.approx(said, rel=0.05)


@pytest.mark.parametrize(
    ("model", "plan", "says"),
    [
        ("mixtral-tiny", ["static_memory"], "routing changes the sizes"),
        ("llama-tiny", ["static_memory", "swap_advisor"], "also decides where saved activations are kept"),
        ("llama-tiny", ["static_memory", "zero"], "on GPUs collectives"),
    ],
)
def test_refusals(model, plan, says):
    on = "2xa100" if "zero" in plan else "a100"
    with pytest.raises(Incompatible, match=says):
        check(experiments.make(model, on, {"kind": "pretrain", "seq_len": 32, "batch_size": 2}, plan))
