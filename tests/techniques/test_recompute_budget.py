"""Recomputation under a memory budget: the chosen blocks are the best ones, and the real step keeps the budget."""

import pytest
from tests.training import MODEL, experiment, make_trainer, train

from ridgeline import experiments
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.predict import predict
from ridgeline.predict.settle import ask, settled
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.memory.recompute import Recompute
from ridgeline.techniques.registry import make, normalize

WIDER = MODEL.model_copy(
    update={"hidden_size": 64, "head_dim": 16, "num_layers": 6, "intermediate_size": 160, "max_positions": 128}
)


def peak_and_time(e, t):
    found = ask(t.placed(e))
    return found.metrics["peak_bytes"].value, found.metrics["step_time_s"].value


def small(corpus, *plan, **workload):
    return experiment(corpus, *plan, model=WIDER, **{"seq_len": 128, "batch_size": 8, **workload})


@pytest.mark.parametrize("others", [[], ["flash_attention"], ["mixed_precision"], ["lora:rank=4"]], ids="+".join)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.8, 1.0])
def test_the_choice_is_that_of_brute_force(others, share, corpus):
    e = small(corpus, "recompute", *others)
    scores = 0 if others == ["flash_attention"] else WIDER.num_layers
    all_of_them = {}
    for full in range(WIDER.num_layers + 1):
        for selective in range(min(scores, WIDER.num_layers - full) + 1):
            t = Recompute(policy="budget", full_blocks=full, selective_blocks=selective)
            all_of_them[full, selective] = peak_and_time(e, t)
    peaks = [p for p, _ in all_of_them.values()]
    budget = int(min(peaks) + share * (max(peaks) - min(peaks)))
    (chosen,) = [
        c
        for c in settled(small(corpus, f"recompute:policy=budget,budget={budget}", *others)).plan.calls
        if c.name == "recompute"
    ]
    peak, seconds = all_of_them[chosen.options["full_blocks"], chosen.options["selective_blocks"]]
    best = min(t for p, t in all_of_them.values() if p <= budget)
    print(chosen, f"peak {peak:.0f} of {budget}, {seconds:.3g} s of {best:.3g} s")
    assert peak <= budget
    assert seconds == pytest.approx(best, rel=1e-12)


def test_an_unreachable_budget_names_what_can_be_reached(corpus):
    with pytest.raises(Incompatible, match="smallest reachable peak is") as caught:
        settled(small(corpus, "recompute:policy=budget,budget=1MB"))
    assert "flash_attention" in caught.value.fix
    reachable = caught.value.what.split("peak is ")[1]
    number, unit = reachable.split()
    enough = f"{float(number) * 1.01}{unit}"
    assert settled(small(corpus, f"recompute:policy=budget,budget={enough}")).plan.option("recompute", "full_blocks")


@pytest.mark.parametrize("share", [0.35, 0.7])
def test_the_real_step_keeps_the_budget(share, corpus):
    plain = peak_and_time(small(corpus, "recompute"), Recompute(policy="budget", full_blocks=0))[0]
    full = peak_and_time(small(corpus, "recompute"), Recompute())[0]
    budget = int(full + share * (plain - full))
    e = settled(small(corpus, f"recompute:policy=budget,budget={budget}", steps=2))
    trainer = make_trainer(e, uneven=False)
    trainer.step(), trainer.step()
    usage = metered_step(trainer)
    said = predict(e).metrics["peak_bytes"].value
    print(e.plan.strings(), f"measured {usage.total}, predicted {said:.0f}, budget {budget}, without {plain:.0f}")
    assert usage.total == pytest.approx(said, rel=0.05)
    assert usage.total <= 1.05 * budget


def test_the_settled_plan_trains_the_same(corpus):
    fields = {"model": MODEL, "optimizer": "sgd", "lr": 1.0, "grad_clip": 0.05}
    plain = train(experiment(corpus, **fields))
    mixed = train(experiment(corpus, "recompute:policy=budget,full_blocks=1,selective_blocks=1", **fields))
    residual = max(abs(a - b) for a, b in zip(plain.losses, mixed.losses, strict=True))
    print(f"signal {plain.signal:.3g}, residual {residual:.3g}")
    assert plain.signal > 50 * residual
    assert mixed.losses == pytest.approx(plain.losses, rel=1e-6)


def test_settled_plans_are_concrete_canonical_and_stay_as_they_are():
    workload = {"kind": "pretrain", "seq_len": 4096, "batch_size": 16}
    plan = ["zero:stage=3", "mixed_precision", "recompute:policy=budget,budget=70GB"]
    e = experiments.make("llama2-13b", "8xa800-80g", workload, plan)
    call = next(c for c in e.plan.calls if c.name == "recompute")
    print(call)
    assert call.options["budget"] == 70_000_000_000
    assert 0 < call.options["full_blocks"] + call.options["selective_blocks"] <= 40
    assert predict(e).metrics["peak_bytes"].value <= 70e9
    assert settled(e) == e
    again = experiments.make("llama2-13b", "8xa800-80g", workload, e.plan.strings())
    assert again.id == e.id
    assert make(call) == Recompute(**call.options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("recompute:policy=budget", "has no budget"),
        ("recompute:budget=2GB", "has no budget"),
        ("recompute:policy=budget,budget=1GB,every=2", "chooses the blocks itself"),
        ("recompute:policy=budget,full_blocks=9", "9 blocks"),
    ],
)
def test_options_that_do_not_belong_together(call, says):
    from ridgeline.techniques.registry import check

    with pytest.raises(Incompatible, match=says):
        check(normalize(experiment("x", call)))
