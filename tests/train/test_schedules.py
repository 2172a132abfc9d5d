"""Domains that follow their losses, and budgets by a clock of our own."""

import math

import numpy as np
import pytest
import torch
from tests.training import experiment, make_trainer
from tests.world import world

from ridgeline.predict import predict
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.data.cramming_torch import Ramp, Spending, rapl_joules, triangle
from ridgeline.techniques.data.dynamic_batch_loading_torch import Domain, DomainBatches, sources, updated
from ridgeline.techniques.registry import check
from ridgeline.train.checkpoint import resume, save

# ---- domains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "losses", "reference", "clipped", "want"),
    [
        ([0.5, 0.5], [2.0, 2.0], [2.0, 2.0], True, [0.5, 0.5]),
        ([0.5, 0.5], [3.0, 2.0], [2.0, 2.0], True, [math.e / (math.e + 1), 1 / (math.e + 1)]),
        ([0.2, 0.8], [2.0, 1.0], [2.0, 2.0], True, [0.2, 0.8]),
        ([0.2, 0.8], [2.0, 1.0], [2.0, 2.0], False, [0.2 / (0.2 + 0.8 / math.e), 0.8 / math.e / (0.2 + 0.8 / math.e)]),
        ([0.5, 0.5], [900.0, 0.0], [0.0, 0.0], True, [1.0, 0.0]),
    ],
)
def test_the_formula_against_a_table(weights, losses, reference, clipped, want):
    got = updated(weights, losses, reference, clipped)
    assert got == pytest.approx(want)
    assert sum(got) == pytest.approx(1)
    assert min(updated(weights, losses, reference, clipped, floor=0.1)) >= 0.05


def batches(weights=(0.2, 0.8), rows=10):
    ids = [np.arange(10 * 33 * 4 + 1), np.arange(100_000, 100_000 + 20 * 33 * 4 + 1)]
    domains = [Domain(str(i), x, (len(x) - 1) // 4, rows) for i, x in enumerate(ids)]
    return DomainBatches(None, domains, 4, rows, 7, list(weights))


def test_shares_are_binomial_and_no_window_comes_twice_before_its_domain_is_through():
    b = batches()
    seen = [[], []]
    for step in range(200):
        for row in b.batch(step).ids:
            seen[int(row[0] >= 100_000)].append(int(row[0]))
    n = 200 * 10
    assert abs(len(seen[0]) - 0.2 * n) < 4 * math.sqrt(n * 0.2 * 0.8)
    for domain, starts in zip(b.domains, seen, strict=True):
        for epoch in range(len(starts) // domain.trained + 1):
            part = starts[epoch * domain.trained : (epoch + 1) * domain.trained]
            assert len(set(part)) == len(part)
        held = {int(r[0]) for r in b.held_out_of(int(domain.name)).ids}
        assert not held & set(starts)


def test_asked_again_and_resumed_it_goes_on_the_same():
    straight, other = batches(), batches()
    first = [straight.batch(s).ids for s in range(9)]
    for s in range(4):
        other.batch(s)
        assert torch.equal(other.batch(s).ids, first[s])
    again = batches()
    again.load_state_dict(other.state_dict())
    assert all(torch.equal(again.batch(s).ids, first[s]) for s in range(4, 9))
    renamed = batches()
    renamed.domains[0].name = "x"
    with pytest.raises(UserError, match="has the domains"):
        renamed.load_state_dict(other.state_dict())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two domains: words that repeat, and numbers that do not."""
    root = tmp_path_factory.mktemp("domains")
    rng = np.random.default_rng(0)
    (root / "easy.txt").write_text("the roof is the peak of the step\n" * 600)
    (root / "hard.txt").write_text("\n".join(str(rng.integers(10**9)) for _ in range(2500)))
    return root


CALL = "dynamic_batch_loading:every=2,reference=1+1,weights=1+1"


def _part(rank, e, place, steps):
    trainer = make_trainer(e, rank, uneven=False)
    losses = resume(trainer, place)
    for _ in range(steps):
        losses.append(trainer.step().loss)
    save(trainer, place, losses)
    kept = [s.state_dict() for s in trainer.run.hooks.states.values()]
    return losses, kept


def test_a_domain_that_lags_gains_weight_on_all_ranks_and_across_a_resume(folder, tmp_path):
    e = experiment(folder, CALL, ranks=2, steps=8, lr=1e-2)
    straight = world(2).run(_part, e, tmp_path / "a", 8)
    assert straight[0] == straight[1]
    weights = straight[0][1][0]["weights"]
    assert abs(weights[0] - 0.5) > 0.1, "one is easier"
    world(2).run(_part, e, tmp_path / "b", 5)
    assert world(2).run(_part, e, tmp_path / "b", 3)[0] == straight[0]
    alone = _part(0, experiment(folder, CALL, steps=8, lr=1e-2), tmp_path / "c", 8)
    assert alone[0] == pytest.approx(straight[0][0], rel=1e-5)
    assert alone[1][0]["weights"] == pytest.approx(weights, rel=1e-4)


def test_sources(folder, corpus):
    assert [p.rsplit("/", 1)[1] for p in sources(str(folder))] == ["easy.txt", "hard.txt"]
    assert sources("a.txt, b") == ["a.txt", "b"]
    trainer = make_trainer(experiment(f"{folder / 'easy.txt'},{folder / 'hard.txt'}", CALL), uneven=False)
    assert len(trainer.run.data.batches.domains) == 2
    with pytest.raises(UserError, match="is one domain"):
        make_trainer(experiment(corpus, "dynamic_batch_loading"))
    with pytest.raises(UserError, match="3 values in reference, but 2 domains"):
        make_trainer(experiment(folder, "dynamic_batch_loading:reference=1+1+1"))
    with pytest.raises(UserError, match=r"easy.txt.* sequences of 64"):
        make_trainer(experiment(folder, "dynamic_batch_loading", seq_len=64, batch_size=90))


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_learning_rate_and_rows_as_functions_of_the_share():
    assert [triangle(x, 0.5) for x in (0, 0.25, 0.5, 0.75, 1.0)] == [0, 0.5, 1.0, 0.5, 0.0]
    ramp = Ramp(None, 16, 4, 0.25, 0.5, lambda step: step / 8)
    assert [ramp.rows(s) for s in range(9)] == [4, 8, 8, 12, 16, 16, 16, 16, 16]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_budget_ends_within_a_step_and_resuming_keeps_the_share():
    clock = Clock()
    s = Spending(60.0, clock)
    shares = []
    for step in range(100):
        shares.append(s.share(step))
        clock.now += 7.0
        assert s.share(step) == shares[-1], "one number per step"
        if s.finished():
            break
    assert shares == pytest.approx([7 * i / 60 for i in range(9)])
    half = Spending(60.0, clock)
    half.share(0)
    clock.now += 30
    again = Spending(60.0, clock)
    state = half.state_dict()
    clock.now += 1000  # the machine was off
    again.load_state_dict(state)
    assert again.share(5) == pytest.approx(0.5)


def test_training_stops_when_the_tokens_are_spent(corpus, tmp_path):
    e = experiment(corpus, "cramming:tokens=500,start=0.5,ramp=0.5", steps=40, lr=1e-2)
    trainer = make_trainer(e, uneven=False)
    seen, rates, sizes = 0, [], []
    ids = []
    for _ in range(40):
        stats = trainer.step()
        sizes.append(stats.tokens)
        rates.append(trainer.run.update.lr)
        ids.append(trainer.run.data.batches.batch(stats.step).ids)
        seen += stats.tokens
        if stats.finished:
            break
    assert 500 <= seen < 500 + 64
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (32, 64)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    fixed = make_trainer(experiment(corpus, steps=40), uneven=False)
    stream = torch.cat([fixed.run.data.batches.batch(s).ids for s in range(10)])
    mine = torch.cat(ids)
    assert torch.equal(mine, stream[: len(mine)]), "no row is left out or comes twice"
    half, place = make_trainer(e, uneven=False), tmp_path / "x"
    losses = [half.step().loss for _ in range(4)]
    save(half, place, losses)
    rest = make_trainer(e, uneven=False)
    resume(rest, place)
    assert torch.equal(rest.run.data.batches.batch(4).ids, ids[4])
    assert rest.step().tokens == sizes[4]
    assert rest.run.update.lr == rates[4]


def test_all_ranks_agree_and_the_steps_are_predicted(corpus):
    e = experiment(corpus, "cramming:minutes=1", ranks=2, steps=3)
    got = world(2).run(_lengths, e)
    assert got[0] == got[1]
    said = predict(e).metrics
    assert said["budget_steps"].value == pytest.approx(60 / said["step_time_s"].value)
    tokens = predict(experiment(corpus, "cramming:tokens=6400")).metrics["budget_steps"].value
    assert tokens == 100
    watts = predict(experiment(corpus, "cramming:joules=600,watts=10")).metrics
    assert watts["budget_steps"].value == pytest.approx(60 / watts["step_time_s"].value)


def _lengths(rank, e):
    trainer = make_trainer(e, rank)
    return [(trainer.step().loss, trainer.run.update.lr) for _ in range(3)]


def test_energy_counters(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("9000000")
    (zone / "max_energy_range_uj").write_text("10000000")
    read = rapl_joules(tmp_path)
    (zone / "energy_uj").write_text("9500000")
    assert read() == pytest.approx(0.5)
    (zone / "energy_uj").write_text("500000")  # wrapped round
    assert read() == pytest.approx(1.5)
    assert rapl_joules(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (("cramming:minutes=1,tokens=5",), "several budgets"),
        (("cramming", "growlength"), "sizes of batches"),
        (("cramming", "static_memory"), "shapes must stay"),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, tuple) else "",
)
def test_refusals(plan, says, corpus):
    with pytest.raises(Incompatible, match=says):
        check(experiment(corpus, *plan))


def largest_gap(folder, every):
    """How far the worst domain is from its reference after 40 steps that began with nine rows of one to one of the
    other."""
    call = f"dynamic_batch_loading:every={every},reference=0.2+3,weights=9+1"
    trainer = make_trainer(experiment(folder, call, steps=40, lr=1e-2, batch_size=10), uneven=False)
    for _ in range(40):
        trainer.step()
    batches = trainer.run.data.batches
    losses = [trainer.run.data.loss_of(batches.held_out_of(i)) for i in range(2)]
    return max(loss - reference for loss, reference in zip(losses, (0.2, 3), strict=True)), losses


def test_gaps_close_faster_than_with_fixed_weights(folder):
    fixed, at_fixed = largest_gap(folder, 1000)
    moving, at_moving = largest_gap(folder, 4)
    print(f"fixed {at_fixed}, moving {at_moving}")
    assert 0 < moving < fixed - 0.1
