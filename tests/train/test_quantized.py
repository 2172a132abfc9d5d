"""Training on quantized weights: QLoRA against LoRA, AlphaTuning's few parameters, QFT against Lion in fp32."""

from statistics import mean, stdev

import pytest
import torch
from tests.training import MODEL, curve_of, experiment, make_trainer, state, train
from tests.world import world

from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.model.init import build
from ridgeline.nn.parallel.collectives import local
from ridgeline.nn.quant.bcq import BinaryLinear
from ridgeline.nn.quant.nf4 import NF4Linear, dequantize
from ridgeline.predict import predict
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.optimizers import qft_linear_torch as qft
from ridgeline.techniques.registry import check
from ridgeline.train.checkpoint import resume, save
from ridgeline.train.training_loop import plain_state

WIDE = MODEL.model_copy(update={"hidden_size": 128, "head_dim": 32, "intermediate_size": 256})
"""Whose rows are whole blocks on two tensor-parallel ranks."""


# ---- qlora -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_qlora_is_within_noise_of_lora(seed, corpus):
    fields = {"model": WIDE, "steps": 20, "lr": 1e-2, "seed": seed}
    dense, coded = (
        train(experiment(corpus, *plan, **fields)).losses for plan in (("lora",), ("qlora:targets=q_proj+v_proj",))
    )
    assert dense[-1] < dense[0] - 0.3
    assert coded == pytest.approx(dense, rel=0.01)
    assert coded != dense


def parts_rank(rank, e):
    trainer = make_trainer(e, rank)
    found = {}
    for name, module in trainer.run.root.named_modules():
        if isinstance(module, NF4Linear):
            parts = [local(getattr(module, part)) for part in module.stored]
            whole = min(len(p) for p in parts) == max(len(p) for p in parts)
            found[name] = ([tuple(p.shape) for p in parts], dequantize(*parts) if whole else None)
    trainer.step()
    return found


@pytest.mark.parametrize("plan", ["zero:stage=3", "tensor_parallel:degree=2"])
def test_codes_are_divided_between_blocks_and_parts_expand_to_parts(plan, corpus):
    fields = {"model": WIDE, "optimizer": "sgd"}
    (whole,) = [parts_rank(0, experiment(corpus, "qlora", **fields))]
    ranks = world(2).run(parts_rank, experiment(corpus, plan, "qlora", ranks=2, **fields))
    assert len(whole) == 7 * MODEL.num_layers
    for name, (_, weight) in whole.items():
        along = 1 if plan.startswith("tensor") and name.removesuffix(".base").endswith(("o_proj", "down_proj")) else 0
        pieces = weight.chunk(2, along)
        for found, piece in zip(ranks, pieces, strict=True):
            (codes, scales, spans), part = found[name]
            assert codes[1] == 32 * scales[1], "a block is never cut"
            assert spans[1] == 8
            assert torch.equal(part, piece), name


def test_a_cut_through_blocks_is_refused(corpus):
    with pytest.raises(Incompatible, match="would split blocks of 64"):
        check(experiment(corpus, "qlora", "tensor_parallel:degree=2", ranks=2))


@pytest.mark.parametrize("plan", [("qlora",), ("alpha_tuning:bits=3,group_size=16",), ("qft",)], ids="+".join)
def test_the_plain_model_gives_what_the_trained_one_gives(plan, corpus):
    trainer = make_trainer(experiment(corpus, *plan, steps=2))
    for _ in range(2):
        trainer.step()
    plain = build(MODEL, seed=5)
    plain.load_state_dict(plain_state(trainer.experiment, dict(trainer.run.model.state_dict())))
    ids = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(plain(ids), trainer.run.model(ids), atol=1e-5)


# ---- paged optimizer states ------------------------------------------------------------------------------------------

PAGED = ("qlora:paged=true",)


def copied(rank, e):
    trainer = make_trainer(e, rank, uneven=False)
    for _ in range(2):
        trainer.step()
    before = {k: (t.bytes, t.count) for k, t in trainer.run.store.traffic.items()}
    usage = metered_step(trainer)
    return usage, {k: (t.bytes - before[k][0], t.count - before[k][1]) for k, t in trainer.run.store.traffic.items()}


@pytest.mark.parametrize("plan", [PAGED, ("zero:stage=3", *PAGED)], ids="+".join)
def test_paged_states_change_nothing_but_where_they_are(plan, corpus):
    ranks = 2 if "zero:stage=3" in plan else 1
    e = experiment(corpus, *plan, ranks=ranks, seq_len=32)
    kept = train(experiment(corpus, "qlora", *plan[:-1], ranks=ranks, seq_len=32))
    moved = train(e)
    assert moved.losses == kept.losses
    assert all(torch.equal(moved.after[n], t) for n, t in kept.after.items())
    usage, traffic = copied(0, e) if ranks == 1 else world(2).run(copied, e)[0]
    said = predict(e)
    for kind in ("h2d", "d2h"):
        rows = [row for row in said.breakdown if row.kind == kind]
        assert traffic[kind] == (sum(r.link_bytes for r in rows), sum(r.count for r in rows))
    predicted = {m.category: m.bytes for m in said.memory}
    print(f"predicted {predicted}\nmeasured  {usage.categories}, host {usage.host}")
    assert "optimizer" not in predicted
    assert usage.categories.get("optimizer", 0) <= 4 * 60, "a step counter for each tensor"
    assert usage.host == pytest.approx(said.metrics["host_bytes"].value, rel=0.01)
    if ranks == 1:
        assert usage.total == pytest.approx(sum(predicted.values()), rel=0.05)


def test_paged_states_are_resumed(corpus, tmp_path):
    e = experiment(corpus, *PAGED, steps=6)
    through = make_trainer(e)
    losses = [through.step().loss for _ in range(3)]
    save(through, tmp_path, losses)
    losses += [through.step().loss for _ in range(3)]
    again = make_trainer(experiment(corpus, "qlora", steps=6))
    assert resume(again, tmp_path) == losses[:3]
    assert [again.step().loss for _ in range(3)] == losses[3:]
    back = make_trainer(e)
    resume(back, tmp_path)
    assert [back.step().loss for _ in range(3)] == losses[3:]


# ---- alpha_tuning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 16])
def test_alpha_tuning_trains_one_scale_per_group_of_packed_weights(group, corpus):
    e = experiment(corpus, f"alpha_tuning:bits=3,group_size={group}", steps=20, lr=1e-2)
    trainer = make_trainer(e, uneven=False)
    layers = [m for m in trainer.run.root.modules() if isinstance(m, BinaryLinear)]
    assert len(layers) == 7 * MODEL.num_layers
    groups = sum(m.out_features * (m.in_features // (group or m.in_features)) for m in layers)
    weights = sum(m.out_features * m.in_features for m in layers)
    assert sum(p.numel() for p in trainer.parameters) == groups
    assert sum(p.nbytes for m in layers for p in m.parameters()) == weights * 3 // 8 + 3 * groups * 4
    stored = sum(p.nbytes for p in trainer.run.root.parameters())
    assert {m.category: m.bytes for m in predict(e).memory}["parameters"] == stored
    curve = curve_of(trainer)
    assert curve.losses[-1] < curve.losses[0] - 0.1


# ---- qft -------------------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """In fp32, as written in arXiv:2302.06675, algorithm 2."""

    def __init__(self, parameters, scale, decay):
        super().__init__([{"params": parameters}], {"lr": 0.0})
        self.scale, self.decay = scale, decay
        self.moments = {p: torch.zeros_like(p) for p in parameters}

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.param_groups[0]["lr"] * self.scale
        for p, m in self.moments.items():
            decay = self.decay if p.ndim > 1 else 0.0
            p.copy_(p - lr * (torch.sign(0.9 * m + 0.1 * p.grad) + decay * p))
            m.copy_(0.99 * m + 0.01 * p.grad)


def last_loss(corpus, seed, plan, lion=False):
    """Mean of the last five of 40 steps, and how far the loss fell to it."""
    e = experiment(corpus, *plan, steps=40, lr=1e-3, grad_clip=0.0, batch_size=8, seed=seed)
    trainer = make_trainer(e, uneven=False)
    if lion:
        trainer.optimizer = Lion(trainer.parameters, 0.1, e.training.weight_decay)
    losses = [trainer.step().loss for _ in range(40)]
    return mean(losses[-5:]), losses[0] - mean(losses[-5:])


def test_qft_follows_lion_in_fp32_and_rounding_to_nearest_stalls(corpus, monkeypatch):
    seeds = (0, 1)
    wide = [last_loss(corpus, s, (), lion=True) for s in seeds]
    coded = [last_loss(corpus, s, ("qft:lr_ratio=0.1",)) for s in seeds]
    monkeypatch.setattr(qft, "stochastic_round", lambda x, generator=None: x.round_())
    naive = [last_loss(corpus, s, ("qft:lr_ratio=0.1",)) for s in seeds]
    behind = [c[0] - w[0] for c, w in zip(coded, wide, strict=True)]
    print(f"behind by {mean(behind):.4f} ± {stdev(behind):.4f} of a fall of {mean(f for _, f in wide):.3f}")
    for (_, fp32), (_, int8), (_, nearest) in zip(wide, coded, naive, strict=True):
        assert int8 > 0.97 * fp32
        assert nearest < 0.4 * fp32


def test_qft_states_are_integers_and_small(corpus):
    """Bytes of weights, gradients and momentum per parameter, as metered: below 21 % of AdamW's 16."""
    e = experiment(corpus, "qft", model=WIDE)
    trainer = make_trainer(e, uneven=False)
    trainer.step()
    seen = metered_step(trainer).categories
    per_parameter = sum(seen.get(k, 0) for k in ("parameters", "gradients", "optimizer")) / WIDE.num_parameters
    print(f"{per_parameter:.3f} bytes per parameter")
    assert per_parameter < 0.21 * 16
    by_dtype = {}
    for t in (*trainer.run.root.parameters(), *(t for s in trainer.optimizer.state.values() for t in s.values())):
        by_dtype[t.dtype] = by_dtype.get(t.dtype, 0) + t.nbytes
    assert by_dtype[torch.int8] > 0.85 * sum(by_dtype.values())
    matrices = {n: p for n, p in trainer.run.root.named_parameters() if n.endswith("codes")}
    assert sum(p.numel() for p in matrices.values()) > 0.99 * WIDE.num_parameters
    assert all(p.dtype == torch.int8 and p.grad is None for p in matrices.values())


def test_a_gradient_that_waits_for_other_micro_batches_waits_as_codes(corpus):
    whole = train(experiment(corpus, "qft", lr=1e-3))
    parts = train(experiment(corpus, "qft", lr=1e-3, micro_batch_size=1))
    assert parts.losses == pytest.approx(whole.losses, rel=2e-3)
    assert parts.norms == pytest.approx(whole.norms, rel=2e-2)


def test_a_resumed_qft_goes_on_with_the_same_numbers(corpus, tmp_path):
    e = experiment(corpus, "qft", lr=1e-3, steps=6)
    through = make_trainer(e)
    losses = [through.step().loss for _ in range(3)]
    save(through, tmp_path, losses)
    losses += [through.step().loss for _ in range(3)]
    again = make_trainer(e)
    assert resume(again, tmp_path) == losses[:3]
    assert [again.step().loss for _ in range(3)] == losses[3:]
    a, b = state(through), state(again)
    assert all(torch.equal(a[n], b[n]) for n in a)
