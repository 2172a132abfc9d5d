"""Optimizers against plain references in fp64, alone and divided over ranks; LOMO against SGD and its own memory."""

import math
import shutil

import pytest
import torch
from tests.crossings import crossing
from tests.train.test_traffic import EXPERTS, RING, SP, TP, WIDE, measure
from tests.training import MODEL, experiment, full, make_trainer, train, train_once
from tests.world import world

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.graph.build_graph import training_graph
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.quant.codec import decode_blockwise8, encode_blockwise8
from ridgeline.predict import predict
from ridgeline.runtime.optimizers import AdaLomoOptimizer, AdamW8bitOptimizer, LionOptimizer
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.optimizers.adamw8bit import AdamW8bit
from ridgeline.techniques.registry import check
from ridgeline.train.checkpoint import resume, save

LR, DECAY = 0.02, 0.1
SHAPES = {"matrix": (12, 7), "vector": (9,), "experts": (3, 6, 5)}


def lion(p, g, s, t):
    m = s.get("m", 0.0)
    p = p - LR * (torch.sign(0.9 * m + 0.1 * g) + DECAY * p)
    s["m"] = 0.99 * m + 0.01 * g
    return p


def adalomo(p, g, s, t):
    if p.ndim == 3:  # experts are matrices of their own
        return torch.stack([adalomo(p[i], g[i], s.setdefault(i, {}), t) for i in range(len(p))])
    b = 1 - t**-0.8
    if p.ndim == 1:
        s["v"] = v = b * s.get("v", 0.0) + (1 - b) * g**2
    else:
        s["r"] = b * s.get("r", 0.0) + (1 - b) * (g**2).sum(1)
        s["c"] = b * s.get("c", 0.0) + (1 - b) * (g**2).sum(0)
        v = torch.outer(s["r"], s["c"]) / s["r"].sum()
    u = g / v.sqrt()

    def rms(x):
        return float((x**2).mean() ** 0.5)

    return p - LR * max(1e-3, rms(p)) * u / max(1.0, rms(u))


def adamw(p, g, s, t):
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g**2
    p = p * (1 - LR * DECAY)
    return p - LR * (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.95**t)) ** 0.5 + 1e-8)


MADE = {
    "lion": (lambda groups: LionOptimizer(groups, LR, (0.9, 0.99)), lion),
    "adalomo": (lambda groups: AdaLomoOptimizer(groups, LR, 0.8, 1e-3), adalomo),
    "adamw8bit": (
        lambda groups: AdamW8bitOptimizer(groups, LR, (0.9, 0.95), 256, set()),
        adamw,
    ),  # too small to be coded
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MADE)
def test_twenty_steps_equal_a_plain_reference_in_fp64(name, shape):
    make, reference = MADE[name]
    g = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(SHAPES[shape], generator=g))
    want, state = p.detach().double(), {}
    optimizer = make([{"params": [p], "weight_decay": DECAY}])
    for t in range(1, 21):
        p.grad = torch.randn(p.shape, generator=g) * 10 ** (t % 5 - 3)
        want = reference(want, p.grad.double(), state, t)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = LR
    assert float((p.detach() - want).norm()) < 1e-6 * float(want.norm())


def test_coded_moments_equal_coding_by_hand():
    g = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(64, 96, generator=g))
    want, m, v = p.detach().clone(), torch.zeros(64, 96), torch.zeros(64, 96)
    optimizer = AdamW8bitOptimizer([{"params": [p], "weight_decay": DECAY}], LR, (0.9, 0.95), 64, set())
    for t in range(1, 21):
        p.grad = torch.randn(p.shape, generator=g)
        s = {"m": m, "v": v}
        want = adamw(want, p.grad, s, t)
        m, v = (decode_blockwise8(*encode_blockwise8(s[k], k == "m", 48), k == "m", 48) for k in "mv")
        optimizer.step()
    same = (p.detach() - want).abs() < 1e-6
    assert same.float().mean() > 0.99, "but where a moment lies between two codes"
    held = optimizer.state[p]
    assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.uint8
    tensors = [t for name, t in held.items() if name != "step"]
    assert sum(t.nbytes for t in tensors) == 64 * 96 * 2 + 2 * 4 * 64 * 2, "codes, and a scale for each 48 of a row"


# ---- in training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": True}], ids=["", "tied"])
def test_lomo_is_sgd_to_the_last_bit(clip, model, corpus):
    sizes = {"model": MODEL.model_copy(update=model), "lr": 0.5, "grad_clip": clip, "optimizer": "sgd"}
    a, b = (train(experiment(corpus, *plan, **sizes)) for plan in ((), ("lomo",)))
    assert b.losses == a.losses
    assert b.norms == a.norms
    assert all(torch.equal(b.after[n], t) for n, t in a.after.items())
    assert a.signal > 0.03


LAYOUTS = {
    "zero 3": (2, ("zero:stage=3",), {}, {}),
    "hybrid": (4, ("zero:stage=2,degree=2",), {}, {}),
    "data_parallel": (2, ("data_parallel",), {}, {}),
    "tensor": (2, (TP,), {}, {}),
    "sequence x zero 3": (4, (TP, SP, "zero:stage=3"), {}, {}),
    "ring x zero 3": (2, (*RING, "zero:stage=3"), {}, {}),
    "pipeline x zero 3": (4, ("pipeline:degree=2", "zero:stage=3"), {}, {"micro_batch_size": 1}),
    "zero 2, accumulating": (2, ("zero:stage=2",), {}, {"micro_batch_size": 1}),
    "experts x zero 3": (4, ("expert_parallel:degree=2", "zero:stage=3"), EXPERTS, {}),
}


def divided(share, first):
    """Both in every layout; by day one of them, in turn, and one in ``share`` of those that divide twice."""
    calls = ("lomo", "adalomo")
    turns = {(name, calls[(first + i) % 2]) for i, name in enumerate(n for n in LAYOUTS if " x " not in n)}
    other = [pytest.mark.nightly]
    return [
        pytest.param(call, name, marks=crossing(f"{call} {name}", share) if " x " in name else
                     [] if (name, call) in turns else other)
        for name in LAYOUTS for call in calls
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "name"), divided(3, 0))
def test_lomo_and_adalomo_divided_are_the_same_training(call, name, corpus):
    (ranks, plan, model, workload), lr = LAYOUTS[name], {"lomo": 0.5, "adalomo": 0.02}[call]
    fields = {"model": MODEL.model_copy(update=model), "grad_clip": 0.05, "optimizer": "sgd", "lr": lr, "steps": 3}
    whole = train_once(experiment(corpus, call, **fields))
    parts = train(experiment(corpus, call, *plan, ranks=ranks, **fields, **workload))
    assert parts.losses == pytest.approx(whole.losses, rel=2e-6)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-5)
    off = max(float((parts.after[n] - t).abs().max()) for n, t in whole.after.items())
    print(f"moved {whole.moved:.3g}, off by {off:.3g}")
    assert off < 2e-4 * whole.moved


@pytest.mark.parametrize(("call", "name"), divided(8, 1))
def test_traffic_and_memory_are_as_predicted(call, name, corpus):
    ranks, plan, model, workload = LAYOUTS[name]
    wide = WIDE.model_copy(update={"num_layers": 4 if "pipeline" in name else 3, **model})
    e = experiment(corpus, call, *plan, ranks=ranks, model=wide, batch_size=4 if workload else 8, seq_len=64,
                   **workload)  # fmt: skip
    said = predict(e)
    found = world(ranks).run(measure, e)
    got = {}
    for seen, _ in found:
        for key, (calls, size) in seen.items():
            entry = got.setdefault(key, [0.0, 0.0])
            entry[0] += calls / ranks
            entry[1] += size / ranks
    assert {k: pytest.approx(v, abs=1e-6) for k, v in got.items()} == {
        (t.kind, t.ranks): [t.calls, t.bytes] for t in said.traffic
    }
    sizes = [sum(held.values()) for _, held in found]
    peak = sum(m.bytes for m in said.memory)
    most = sum(sizes) / ranks if model else max(sizes)
    # Experts are reduced apart from the rest of their block, which is not predicted.
    assert peak == pytest.approx(most, rel=0.08 if model else 0.05)
    states = {m.category: m.bytes for m in said.memory}.get("optimizer", 0.0)
    if call == "adalomo" and not model and "pipeline" not in name:
        held = found[sizes.index(max(sizes))][1]
        assert states == pytest.approx(held["optimizer"], abs=4 * 60)


@pytest.mark.parametrize("call", ["lomo", "adalomo"])
def test_the_update_of_a_large_matrix_takes_no_more_memory(call, corpus):
    """The embedding's is there while most activations are."""
    wide = WIDE.model_copy(update={"vocab_size": 16384})
    e = experiment(corpus, call, model=wide, batch_size=2, seq_len=64, grad_clip=0.0)
    trainer = make_trainer(e)
    for _ in range(2):
        trainer.step()
    assert predict(e).metrics["peak_bytes"].value == pytest.approx(metered_step(trainer).total, rel=0.01)


def test_measured_gradients_are_one_layers_not_the_models(corpus):
    trainer = make_trainer(experiment(corpus, "lomo", model=WIDE, grad_clip=1.0))
    trainer.step()
    most = 0

    def live() -> int:
        return sum(p.grad.nbytes for p in trainer.parameters if p.grad is not None)

    optimizer = trainer.optimizer
    inner = optimizer.update

    def watched(p, group):
        nonlocal most
        most = max(most, live())
        inner(p, group)

    optimizer.update = watched
    trainer.step()
    largest = max(p.nbytes for p in trainer.parameters)
    whole = sum(p.nbytes for p in trainer.parameters)
    assert most == largest < whole / 4
    usage = metered_step(trainer)
    assert usage.categories.get("gradients", 0) <= largest


def test_adapters_train_and_the_base_stays(corpus):
    c = train(experiment(corpus, "lomo", "lora", lr=0.5, grad_clip=0.0))
    assert all("lora_" in n for n in c.trained)
    for name, before in c.before.items():
        assert torch.equal(before, c.after[name]) == (name not in c.trained)


def test_a_step_with_an_overflow_is_skipped_before_anything_moves(corpus):
    e = experiment(corpus, "lomo", "mixed_precision:dtype=fp16,loss_scale=1e30", lr=0.5)
    trainer = make_trainer(e)
    before = [full(p) for p in trainer.parameters]
    trainer.step()
    assert all(torch.equal(a, p.detach()) for a, p in zip(before, trainer.parameters, strict=True))
    assert trainer.run.update.scaler.scale == 2.0**24 or trainer.run.update.scaler.scale == 5e29
    ok = train(experiment(corpus, "lomo", "mixed_precision:dtype=fp16,loss_scale=1024", lr=0.5, optimizer="sgd"))
    sgd = train(experiment(corpus, "mixed_precision:dtype=fp16,loss_scale=1024", lr=0.5, optimizer="sgd"))
    assert ok.losses == pytest.approx(sgd.losses, rel=1e-6)


def test_coded_adamw_stays_near_adamw(corpus):
    fields = {"model": WIDE, "lr": 2e-3, "steps": 10, "seq_len": 32}
    a, b = (train(experiment(corpus, *plan, **fields)) for plan in ((), ("adamw8bit",)))
    print(a.losses, b.losses)
    assert a.losses[0] - a.losses[-1] > 0.5
    assert b.losses == pytest.approx(a.losses, rel=0.01)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _part(rank, e, folder, steps):
    trainer = make_trainer(e, rank)
    losses = resume(trainer, folder)
    for _ in range(steps):
        losses.append(trainer.step().loss)
    save(trainer, folder, losses)
    return losses


@pytest.mark.parametrize("call", ["lion", "lomo", "adalomo", "adamw8bit"])
def test_a_resumed_run_is_the_straight_one_on_other_ranks_too(call, corpus, tmp_path):
    model = MODEL.model_copy(update={"vocab_size": 512})
    two = experiment(corpus, call, "zero:stage=3", ranks=2, model=model, steps=4, lr=1e-2)
    one = experiment(corpus, call, model=model, steps=4, lr=1e-2)
    straight = world(2).run(_part, two, tmp_path / "a", 4)[0]
    assert world(2).run(_part, two, tmp_path / "b", 2)[0] == straight[:2]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    assert world(2).run(_part, two, tmp_path / "b", 2)[0] == straight
    assert _part(0, one, tmp_path / "c", 2) == pytest.approx(straight, rel=1e-3 if call == "lion" else 1e-5)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (("lion", "lomo"), "also decides how the optimizer's states"),
        (("adalomo", "zero_offload"), "also decides how the optimizer's states"),
        (("lion", "mixed_precision:weights=low"), "by itself"),
        (("lomo:norm=none", "mixed_precision:dtype=fp16"), "overflow"),
        (("adalomo", "mixed_precision:dtype=fp16"), "overflow"),
        (("lomo", "static_memory"), "updates are part of it"),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, tuple) else "",
)
def test_what_does_not_go_together_is_said(plan, says, corpus):
    with pytest.raises(Incompatible, match=says):
        check(experiment(corpus, *plan))


def test_two_passes_are_predicted_as_two(corpus):
    times = [predict(experiment(corpus, *plan, model=WIDE, optimizer="sgd")).metrics["step_time_s"].value
             for plan in ((), ("lomo:norm=none",), ("lomo",))]  # fmt: skip
    assert times[1] <= times[0]
    assert 1.5 < times[2] / times[1] < 2.05
    assert math.isfinite(times[2])


def test_bytes_of_8_bit_adamw_are_those_of_its_kernel_and_of_fused_adamw():
    """In blocks of 256: 16 bytes and a 16th; embeddings and norms have fp32 moments, which take 28."""
    model = catalog.model("llama-3.2-1b")
    e = make(model, "h100-sxm", {"kind": "pretrain", "seq_len": 64, "batch_size": 4, "steps": 4}, ["adamw8bit"])
    name, moved = AdamW8bit().rewrite(training_graph(e), e).optimizer
    plain = (model.vocab_size + 2 * model.num_layers + 1) * model.hidden_size
    coded = model.num_parameters - plain
    assert name == "adamw8bit"
    assert moved == pytest.approx((16.0625 * coded + 28 * plain) / (coded + plain), rel=1e-3)
