"""Gradient sums in float8: right, without overflow, and with exactly the predicted bytes on the wire."""

import math

import pytest
import torch
import torch.distributed as dist
from tests.training import experiment, make_trainer, train
from tests.world import world

from ridgeline.graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.techniques.precision.fp8_torch import sum_fp8
from ridgeline.techniques.registry import techniques_of

SIZES = [60, 7, 200, 1, 33]  # 301 elements: shares are padded, and tensors lie across them


def mine(rank, scale):
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(rank)) * scale**rank


def summed(rank, scale, poison=None):
    flat = mine(rank, scale)
    if poison is not None and rank == 1:
        flat[70] = poison
    sum_fp8(flat, SIZES, dist.group.WORLD)
    return flat


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_sum_within_the_formats_error(ranks, scale):
    """Ranks whose gradients differ by 10⁴ (10¹² over four ranks) share a scale: nothing overflows."""
    results = world(ranks).run(summed, scale)
    want = sum(mine(r, scale).double() for r in range(ranks))
    for got in results:
        assert torch.equal(got, results[0])
        for a, b in zip(got.split(SIZES), want.split(SIZES), strict=True):
            # Half a unit in the last place of e4m3 is a sixteenth, for each summand and again for the sum.
            assert float((a - b).norm() / b.norm()) < 0.06
    assert not torch.allclose(results[0].double(), want, rtol=1e-4)  # it was coded at all


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_reaches_every_rank_and_only_its_tensor(value):
    for got in world(2).run(summed, 1.0, value):
        finite = [bool(torch.isfinite(t).all()) for t in got.split(SIZES)]
        assert finite == [True, True, False, True, True]


def scaled_alone(rank):
    """The mistake that a shared scale prevents: every rank's own scale, sums of raw codes."""
    from ridgeline.nn.quant.codec import E4M3, quantize

    codes, scale = quantize(mine(rank, 1e4), E4M3)
    total = codes.float()
    dist.all_reduce(total)
    return total / scale


def test_negative_control_own_scales_give_another_sum():
    want = sum(mine(r, 1e4).double() for r in range(2))
    errors = [float((got - want).norm() / want.norm()) for got in world(2).run(scaled_alone)]
    assert max(errors) > 0.3


def counted(rank, e):
    """Calls and payload bytes of every collective while gradients are reduced."""
    trainer = make_trainer(e, rank)
    calls = []
    originals = {n: getattr(dist, n) for n in ("all_reduce", "all_to_all_single")}
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    originals[gather] = getattr(dist, gather)

    def watch(name, inner):
        def call(tensor, *args, **kwargs):
            kind = name.split("_single")[0].split("_into")[0].replace("all_to_all", "alltoall")
            calls.append((kind, tensor.numel() * tensor.element_size()))
            return inner(tensor, *args, **kwargs)

        return call

    try:
        for name, inner in originals.items():
            setattr(dist, name, watch(name, inner))
        trainer.forward_backward(0)
    finally:
        for name, inner in originals.items():
            setattr(dist, name, inner)
    return calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire_are_those_predicted(ranks, corpus):
    """With one bucket per step; the prediction has one per block, so sums are compared kind by kind."""
    e = experiment(corpus, "mixed_precision", "fp8:gradients=true", ranks=ranks)
    g = rewritten(training_graph(e), e, techniques_of(e.plan))
    predicted: dict[str, float] = {}
    for b in g.blocks:
        for op in b.reduce:
            predicted[op.kind] = predicted.get(op.kind, 0.0) + op.link_bytes * b.repeat
    for calls in world(ranks).run(counted, e):
        got: dict[str, float] = {}
        for kind, size in calls:
            got[kind] = got.get(kind, 0.0) + size
        assert got == predicted
    elements = e.model.num_parameters
    assert elements % ranks == 0
    assert predicted["alltoall"] == predicted["all_gather"] == elements


def test_training_with_narrow_sums_follows_the_wide_ones(corpus):
    plans = (["mixed_precision", "fp8"], ["mixed_precision", "fp8:gradients=true"])
    wide, narrow = (train(experiment(corpus, *p, ranks=2, optimizer="sgd", lr=10.0, grad_clip=0.05)) for p in plans)
    assert wide.signal > 0.1
    assert narrow.losses == pytest.approx(wide.losses, rel=0.01)
    assert narrow.norms == pytest.approx(wide.norms, rel=0.05)
