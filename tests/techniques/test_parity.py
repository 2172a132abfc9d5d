"""The generic parity tests: every technique, and every pair that the support matrix lets through (of these a part, the
others at night: ``tests/crossings.py``), is really trained and compared with the same plan without it, in one process.
A new technique file takes part by itself.

The optimizer is plain SGD, since Adam hides gradients of a wrong scale; clipping is active; rows have unequal numbers
of valid tokens; and what moved at all (the signal) must be far larger than what differs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from tests.crossings import crossings
from tests.serve.test_divided import CASES as DIVIDED
from tests.serve.test_pairs import CASES as SERVED
from tests.training import Curve, curve_of, make_trainer, small_domains, train, train_once
from tests.world import world

from ridgeline.nn.model.generate import make_cache
from ridgeline.nn.model.init import build
from ridgeline.predict.settle import settled
from ridgeline.runtime.build import Build
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.techniques.matrix import judge, pair_experiment, support_matrix
from ridgeline.techniques.registry import check, normalize, partners, registry, techniques_of
from ridgeline.techniques.technique import Technique

MATRIX = support_matrix()
TRAINING = {"pretrain", "finetune"}
RUNS = {n: t for n, t in registry().items() if t.card.runs}
TRAINED = [(n,) for n, t in RUNS.items() if t.card.tasks & TRAINING]
TRAINED += [(p.a, p.b) for p in MATRIX if p.status == "works" and p.task in TRAINING]
GENERATED = [(n,) for n, t in RUNS.items() if "generate" in (t.card.runs_in or t.card.tasks)]
GENERATED += [(p.a, p.b) for p in MATRIX if p.status == "works" and {(p.a,), (p.b,)} <= set(GENERATED)]
CLIPPED = {"mask_tuning": (0.003, 80.0)}
"""(grad_clip, lr) where the usual clip would not act: the gradient of a mask's scores is that of the weights times the
weights, which are small."""
MARGIN = 50
"""The signal must be this many times the residual."""


@dataclass
class Comparison:
    """A plan and the plan it must equal."""

    subject: Experiment
    reference: Experiment | None
    """None: another set of parameters trains, so there is nothing to equal."""
    tolerance: float
    linear: bool = True
    """Whether the optimizer answers small changes of gradients with small changes of every weight."""
    reordered: bool = False
    """Whether the two differ in the order of additions only, whatever then rounds their sums."""

    @property
    def exact(self) -> bool:
        """Whether only the order of fp32 additions may differ."""
        return self.tolerance <= 1e-5


def without(e: Experiment, gone: list[Technique]) -> Experiment:
    """The experiment without some techniques; in one process when what splits the batch goes."""
    names = {t.card.name for t in gone}
    plan = Plan(calls=tuple(c for c in e.plan.calls if c.name not in names))
    cluster = e.cluster.model_copy(update={"devices_per_node": 1})
    return settled(e.model_copy(update={"plan": plan, "cluster": cluster, "parallel": {}}))


def comparison(e: Experiment) -> Comparison:
    """Drop every lossless technique; if there is none, the first one that promises the same loss."""
    made = techniques_of(e.plan)
    lossless = [t for t in made if t.card.lossless]
    same = [t for t in made if t.card.bound == "same"]
    gone = lossless or same[:1]
    gone += [t for t in made if t not in gone and {g.card.name for g in gone} & set(partners(t))]
    # Low-precision arithmetic that stays on, coded states too, magnifies what a lossless technique merely reorders.
    stays = [t for t in made if t not in gone and (t.phase == "optimizer" or t.owns() >= {"weights", "optimizer"})]
    tolerance = max((t.card.tolerance for t in same + stays if t in gone or t.phase != "adapt"), default=0.0)
    linear, reordered = all(t.card.lossless for t in stays), all(t.card.lossless for t in gone)
    return Comparison(e, without(e, gone) if gone else None, tolerance, linear, reordered)


def prepared(names: tuple[str, ...], corpus) -> Experiment:
    """The matrix's own experiment, clipped below every gradient norm, with a step that moves the loss."""
    e = pair_experiment(*names)
    assert e.training.optimizer == "sgd"
    clip, lr = next((CLIPPED[n] for n in names if n in CLIPPED), (0.05, 10.0))
    workload = e.workload.model_copy(update={"data": str(corpus), "grad_clip": clip, "lr": lr})
    return settled(e.model_copy(update={"workload": workload, "plan": small_domains(e.plan, corpus)}))


def train_reference(c: Comparison) -> Curve:
    """Many plans share a reference."""
    assert c.reference is not None
    return train_once(c.reference)


def assert_parity(c: Comparison, subject: Curve, reference: Curve) -> None:
    limit = c.subject.training.grad_clip
    assert min(subject.norms) > limit, "clipping is not active: the test would see less than it should"
    residual = max(abs(a - b) for a, b in zip(subject.losses, reference.losses, strict=True))
    print(f"signal {reference.signal:.3g}, residual {residual:.3g}, tolerance {c.tolerance:g}")
    assert reference.signal > MARGIN * residual
    for a, b in zip(subject.losses, reference.losses, strict=True):
        assert a == pytest.approx(b, rel=c.tolerance)
    # Clipping makes the step's length independent of the gradient's scale, so the norm itself is compared too.
    for a, b in zip(subject.norms, reference.norms, strict=True):
        assert a == pytest.approx(b, rel=1e-4 if c.exact else 2 * c.tolerance)
    assert subject.trained == reference.trained
    turned: list[torch.Tensor] = []
    for name in sorted(subject.trained):
        difference = (subject.after[name] - reference.after[name]).float()
        way = (reference.after[name] - reference.before[name]).float()
        if c.exact or c.linear:
            assert float(difference.abs().max()) < reference.moved * (1e-4 if c.exact else 0.1), name
        elif c.reordered:  # a rounded state may fall on the next of its 2^7 steps
            assert difference.norm() <= way.norm() / 2**7, name
        else:  # signs flip where gradients are nearly zero, not where they drove a weight far
            far = way.abs() > 0.5 * way.abs().max()
            turned.append((way + difference)[far].sign() != way[far].sign())
            # Of an unrelated gradient half would turn. A single weight may have few that were driven far.
            assert turned[-1].sum() <= 0.25 * len(turned[-1]), name
    every = torch.cat(turned) if turned else torch.zeros(1)
    assert every.sum() <= 0.05 * len(every)


def held_out_curve(e: Experiment) -> tuple[Curve, float]:
    """A short training, and by how much it lowered the loss of a batch that it did not see."""
    trainer = make_trainer(e)
    before = trainer.evaluate()
    curve = curve_of(trainer)
    after = trainer.evaluate()
    assert before is not None
    assert after is not None
    return curve, before - after


@pytest.mark.parametrize("names", crossings(TRAINED))
def test_training_parity(names, corpus):
    c = comparison(prepared(names, corpus))
    alone = c.reference is None and c.subject.world == 1
    subject, fell = held_out_curve(c.subject) if alone else (train(c.subject), 0.0)
    for name in set(subject.before) - subject.trained:
        assert torch.equal(subject.before[name], subject.after[name]), f"{name} is frozen, yet it changed"
    assert subject.moved > 0
    if alone:  # batches differ by more than some techniques learn in five steps, or grow
        assert fell > 1e-3
    elif c.reference is None:
        assert subject.losses[-1] < subject.losses[0] - 1e-3
    else:
        assert_parity(c, subject, train_reference(c))


@pytest.mark.parametrize("name", registry())
def test_refused_pairs_are_refused_before_anything_runs(name):
    for pair in MATRIX:
        if pair.a != name or pair.status != "refused":
            continue
        e = pair_experiment(pair.a, pair.b)
        if e.is_training:  # the data does not exist: a later refusal would be another error
            e = e.model_copy(update={"workload": e.workload.model_copy(update={"data": "/nowhere"})})
        print(f"{name} beside {pair.b}")  # the last one failed
        with pytest.raises(Incompatible) as refusal:
            make_trainer(e) if e.is_training else check(normalize(e))
        assert refusal.value.what
        assert refusal.value.fix


def test_every_pair_that_works_has_a_parity_test():
    served = {*SERVED, *((Call.parse(divided).name, name) for divided, name, *_ in DIVIDED)}
    tested = {"pretrain": set(TRAINED), "finetune": set(TRAINED), "generate": set(GENERATED), "serve": served}
    missing = [(p.a, p.b) for p in MATRIX if p.status == "works" and not {(p.a, p.b), (p.b, p.a)} & tested[p.task]]
    assert not missing
    assert all(judge(n).status != "refused" for n in registry()), "a technique that its own example experiment refuses"


@pytest.mark.parametrize("names", crossings(GENERATED))
def test_logits_parity(names):
    """What runs in generation too: logits with and without, through the model alone."""
    e = pair_experiment(*names)
    made = [t for t in techniques_of(e.plan) if t.card.name in names]
    ids = torch.randint(e.model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))

    def logits(use: list[Technique]) -> torch.Tensor:
        model = build(e.model, seed=3)
        with torch.no_grad():
            for p in model.parameters():  # far from the start, where attention is nearly uniform
                p.mul_(4 if p.ndim > 1 else 1)
        model.set_attention("naive")
        run = Build(e, model, torch.device("cpu"))
        for technique in use:
            technique.build(run)
        with torch.no_grad():  # through a cache, as generation does: some of the tokens behind others
            cache = make_cache(model, *ids.shape)
            return torch.cat([model(part, cache=cache) for part in ids.split(8, dim=1)], 1)

    plain = logits([])
    error = float((logits(made) - plain).norm() / plain.norm())
    print(f"relative error of the logits: {error:.3g}")
    assert error < max(1e-5, *(0.0 if t.card.lossless else t.card.tolerance for t in made))
    lossy = any(not t.card.lossless for t in made)
    assert (error > 1e-6) == lossy, "a lossy technique that changes nothing did nothing"


# ---- negative controls: the comparison must be able to fail ----------------------------------------------------------


def _never_reduced(rank: int, e: Experiment) -> Curve:
    trainer = make_trainer(e, rank)
    trainer.run.gradients.after_backward.clear()
    trainer.run.sync = lambda last: nullcontext()
    return curve_of(trainer)


def _wrong_scale(rank: int, e: Experiment) -> Curve:
    trainer = make_trainer(e, rank)
    trainer.run.gradients.after_backward.append(lambda: torch._foreach_mul_([p.grad for p in trainer.parameters], 0.5))
    return curve_of(trainer)


def _averaged_shards(rank: int, e: Experiment) -> Curve:
    from torch.distributed.fsdp import FSDPModule

    trainer = make_trainer(e, rank)
    for module in trainer.run.root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
    return curve_of(trainer)


def _half_frozen(rank: int, e: Experiment) -> Curve:
    trainer = make_trainer(e, rank)
    block = next(iter(trainer.run.model.layers.values()))
    inner = block.forward
    block.forward = lambda x, *args: inner(x.detach(), *args)
    return curve_of(trainer)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("data_parallel", _never_reduced),
        ("data_parallel", _wrong_scale),
        ("zero", _averaged_shards),
        ("recompute", _half_frozen),
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_a_broken_technique_fails_the_comparison(name, broken, corpus):
    c = comparison(prepared((name,), corpus))
    curve = broken(0, c.subject) if c.subject.world == 1 else world(2).run(broken, c.subject)[0]
    with pytest.raises(AssertionError):
        assert_parity(c, curve, train_reference(c))


def test_the_comparison_sees_one_wrong_parameter(corpus):
    c = comparison(prepared(("recompute",), corpus))
    reference = train_reference(c)
    assert_parity(c, replace(reference), reference)
    name = sorted(reference.trained)[0]
    shifted = {**reference.after, name: reference.after[name] + 0.01 * reference.moved}
    with pytest.raises(AssertionError, match=name):
        assert_parity(c, replace(reference, after=shifted), reference)
