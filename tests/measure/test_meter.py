"""The meter against bytes that are known, and against what the predictor says of the same experiment."""

import pytest
import torch
from tests.crossings import crossing
from tests.training import MODEL, experiment, make_trainer, small_domains
from tests.world import world
from torch import nn

from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.memory.meter import Meter, process_memory
from ridgeline.predict import predict
from ridgeline.spec.result import MEMORY_CATEGORIES
from ridgeline.techniques.matrix import pair_experiment
from ridgeline.techniques.registry import registry

WIDER = MODEL.model_copy(
    update={"hidden_size": 64, "head_dim": 16, "num_layers": 4, "intermediate_size": 160, "max_positions": 128}
)
TRAINING = {n: t.card for n, t in registry().items() if "pretrain" in t.card.tasks and t.card.runs}
del TRAINING["swap_advisor"]  # its memory is a budget that fits the model: tests/techniques/test_swap_advisor.py


def usage_of(rank, e):
    trainer = make_trainer(e, rank, uneven=False)
    for _ in range(2):  # steady state: the optimizer's states exist, and DDP has made its buckets anew
        trainer.step()
    # the least of two: gloo's worker thread may keep a collective's buffer for an instant after wait() returned
    usage = min((metered_step(trainer) for _ in range(2 if e.world > 1 else 1)), key=lambda u: u.total)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.run.root.parameters()]
    storages = {s._cdata: s.nbytes() for s in (p.untyped_storage() for p in local)}  # some share one
    return usage, sum(storages.values())


def measured(e):
    """On the rank that needs most, as predictions are."""
    return usage_of(0, e) if e.world == 1 else max(world(e.world).run(usage_of, e), key=lambda u: u[0].total)


def test_a_toy_models_bytes_are_exact():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False))
    model.register_buffer("table", torch.zeros(100))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8, 256)

    def step():
        model(x).square().sum().backward()
        optimizer.step()

    step()  # the states now exist; gradients stay, as in accumulation
    meter = Meter(model)
    meter.register_states(optimizer)
    parameters = 4 * (256 * 512 + 512 + 512 * 256)
    assert meter.total == 4 * parameters + 3 * 4 + 400
    with meter:
        step()
    got = meter.peak.categories
    assert got["parameters"] == got["gradients"] == parameters
    assert got["optimizer"] == 2 * parameters + 3 * 4, "two moments, and a step counter for each tensor"
    assert got["buffers"] == 400
    assert meter.peak.total == sum(got.values())
    # Forward output, its gradient or the like: at the peak a few [8, 512] tensors, and at most one new weight gradient.
    assert got.get("activations", 0) + got.get("temporaries", 0) <= parameters / 2 + 6 * 4 * 8 * 512


def test_sparse_tensors_are_their_indices_and_values():
    dense = torch.zeros(64, 64)
    dense[::8, 3] = 1.0
    sparse, x = dense.to_sparse(), torch.ones(64, 16)
    values = nn.Parameter(sparse._values(), requires_grad=False)
    with Meter(nn.Module()) as meter:
        y = torch.sparse.mm(sparse, x)
        assert torch.equal(y, dense @ x)
        meter.register([values], "parameters")
        again = torch.sparse.mm(sparse, x)
    assert again.shape == y.shape
    assert meter.peak.categories["parameters"] == values.nbytes
    assert meter.peak.total >= values.nbytes + 2 * y.nbytes


def test_what_is_let_go_is_no_longer_counted():
    meter = Meter(nn.Linear(1, 1))
    with meter:
        before = meter.total
        for _ in range(5):
            torch.ones(1000) + 1
        held = torch.ones(1000)
        assert meter.total == before + held.nbytes
        view = held[::2]
        assert meter.total == before + held.nbytes
        del held
        assert meter.total == before + 4000, "a view keeps the whole of its storage"
        del view
        assert meter.total == before
    assert meter.peak.total == before + 8000


@pytest.mark.parametrize(
    ("name", "micro"),
    [pytest.param(n, m, marks=crossing(f"{n}-{m}") if m else []) for n in TRAINING for m in (None, 1)],
)
def test_predicted_and_measured_memory_agree(name, micro, corpus):
    """Within 5 % of the total for every technique by itself; what is stored from step to step agrees exactly."""
    asked = pair_experiment(name)
    model = WIDER.model_copy(update=dict(TRAINING[name].needs_model))
    plan = small_domains(asked.plan, corpus).strings()
    e = experiment(corpus, *plan, ranks=asked.world, model=model, seq_len=64, micro_batch_size=micro)
    usage, stored = measured(e)
    said = {m.category: m.bytes for m in predict(e).memory}
    print(f"predicted {said}\nmeasured  {usage.categories} at {usage.instant}")
    assert set(usage.categories) <= set(MEMORY_CATEGORIES)
    assert usage.total == pytest.approx(sum(said.values()), rel=0.05)
    for kinds in (("parameters",), ("gradients",), ("optimizer",), ("buffers",), ("activations", "temporaries")):
        # the last two together: where forward and backward peak alike, either may be a little higher
        held, counted = (sum(of.get(k, 0) for k in kinds) for of in (said, usage.categories))
        assert held == pytest.approx(counted, abs=0.05 * usage.total), kinds
    scalars = 4 * 60  # a step counter for each tensor
    assert usage.categories.get("optimizer", 0) == pytest.approx(said.get("optimizer", 0), abs=scalars)
    assert usage.categories["parameters"] >= stored


@pytest.mark.parametrize("plan", ["lora", "lora:targets=all-linear", "bitfit"])
def test_a_frozen_product_leaves_nothing_to_free_in_backward(plan, corpus):
    """Where an adapter reads it, the wide input of the MLP's last product is saved, and freed before its gradients."""
    e = experiment(corpus, plan, model=WIDER.changed(intermediate_size=1024), seq_len=64)
    usage, _ = measured(e)
    assert predict(e).metrics["peak_bytes"].value == pytest.approx(usage.total, rel=0.02)


@pytest.mark.parametrize("stage", [2, 3])
def test_gathered_parameters_and_sharded_gradients_are_counted_as_what_they_are(stage, corpus):
    e = experiment(corpus, f"zero:stage={stage}", ranks=2, model=WIDER, seq_len=64, micro_batch_size=1)
    usage, stored = measured(e)
    whole = 4 * WIDER.num_parameters
    assert stored == pytest.approx(whole / 2, rel=0.01)
    block = 4 * (WIDER.num_parameters - 2 * WIDER.vocab_size * WIDER.hidden_size) / WIDER.num_layers
    # Reduced ones, and those of the block that is being reduced.
    assert 0.99 * whole / 2 <= usage.categories["gradients"] <= 1.01 * whole / 2 + block
    gathered = usage.categories["parameters"] - stored
    ends = 4 * 2 * WIDER.vocab_size * WIDER.hidden_size  # embedding and head stay gathered in every stage
    if stage == 2:
        assert gathered == pytest.approx(whole, rel=0.01)
    else:
        assert ends <= gathered < ends + (whole - ends) * 0.6


def test_the_processs_memory_is_the_kernels():
    before = process_memory()
    held = torch.ones(16_000_000)  # touched, so resident
    after = process_memory()
    assert after["rss"] - before["rss"] > 0.8 * held.nbytes
    assert after["rss_peak"] >= after["rss"] >= after["rss_anonymous"]
