"""Adapters in training: the base is left alone, layouts agree, memory is as predicted, folders hold what trained."""

import hashlib

import pytest
import torch
from tests.crossings import crossing
from tests.measure.test_meter import WIDER, measured
from tests.training import MODEL, experiment, full, make_trainer, train
from tests.world import world

from ridgeline import experiments
from ridgeline.nn import build, save_checkpoint
from ridgeline.nn.adapters.adapter import merge
from ridgeline.predict import predict
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.adapters.adapted import Adapting
from ridgeline.techniques.registry import check, registry, techniques_of
from ridgeline.train.adapter_folder import adapters, adapting, attach, go_on, load_adapter, merged_model, save_adapter
from ridgeline.train.training_loop import plain_state

SGD = {"optimizer": "sgd", "lr": 1.0, "warmup_steps": 0, "grad_clip": 0.05}
PLANS = {
    "lora": "lora:rank=4",
    "every": "lora:rank=4,targets=all-linear,rslora=true",
    "layer": "lora:rank=4,targets=layers.1.*",
    "dropout": "lora:rank=4,targets=all-linear,dropout=0.2",
    "dora": "lora:rank=4,targets=all-linear,dora=true",
    "bitfit": "bitfit",
    "bottleneck": "bottleneck_adapter:size=4",
    "diff": "diff_pruning:density=0.1",
    "mask": "mask_tuning",
}
KINDS = {n for n, t in registry().items() if issubclass(t, Adapting)}


def digest(trainer):
    """Of every frozen tensor."""
    out = hashlib.sha256()
    for p in trainer.run.root.parameters():
        if not p.requires_grad:
            out.update(full(p).numpy().tobytes())
    return out.hexdigest()


@pytest.mark.parametrize("plan", PLANS)
def test_training_starts_at_the_base_and_leaves_it_alone(plan, corpus):
    e = experiment(corpus, PLANS[plan], lr=0.01)
    trainer, bare = make_trainer(e), make_trainer(experiment(corpus, lr=0.01))
    before = digest(trainer)
    stats = [trainer.step() for _ in range(5)]
    first = bare.step()
    # Gates are drawn, but there is no difference yet for them to act on; dropout acts on an update that is zero.
    assert stats[0].loss == first.loss, "not the base at the start, to the bit"
    assert digest(trainer) == before, "the base changed"
    assert stats[-1].loss < stats[0].loss
    trained = {n.rpartition(".")[2] for n, p in trainer.run.root.named_parameters() if p.requires_grad}
    assert trained <= set(adapting(e).leaves)


@pytest.mark.parametrize(("plan", "micro"), [
    pytest.param(plan, micro, marks=crossing(f"{plan} {micro}", 3) if micro else [])
    for plan in PLANS for micro in (None, 1)
])  # fmt: skip
def test_predicted_and_measured_memory_agree(plan, micro, corpus):
    e = experiment(corpus, PLANS[plan], model=WIDER, seq_len=64, micro_batch_size=micro)
    usage, _ = measured(e)
    said = {m.category: m.bytes for m in predict(e).memory}
    print(f"predicted {said}\nmeasured  {usage.categories} at {usage.instant}")
    assert usage.total == pytest.approx(sum(said.values()), rel=0.05)
    assert usage.categories["optimizer"] == pytest.approx(said["optimizer"], abs=4 * 300)


TP = "tensor_parallel:degree=2"
LAYOUTS = [
    ("dropout", (TP,), 2),
    ("dropout", (TP, "sequence_parallel"), 2),
    ("dropout", ("recompute",), 1),
    ("every", (TP, "sequence_parallel"), 2),
    ("dora", ("zero:stage=3",), 2),
    ("dora", ("recompute",), 1),
    ("dora", ("pipeline:degree=2",), 2),
    ("diff", ("zero:stage=3",), 2),
    ("diff", ("recompute",), 1),
    ("mask", ("zero:stage=3", "recompute"), 2),
    ("bottleneck", ("pipeline:degree=2",), 2),
]


@pytest.mark.parametrize(("plan", "others", "ranks"), LAYOUTS, ids=str)
def test_layouts_equal_one_process(plan, others, ranks, corpus):
    micro = 1 if "pipeline:degree=2" in others else None
    alone = train(experiment(corpus, PLANS[plan], micro_batch_size=micro, **SGD))
    spread = train(experiment(corpus, PLANS[plan], *others, ranks=ranks, micro_batch_size=micro, **SGD))
    assert alone.moved > 1e-3
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    assert spread.norms == pytest.approx(alone.norms, rel=1e-4)
    for name in alone.trained:
        assert (spread.after[name] - alone.after[name]).abs().max() < 1e-3 * alone.moved, name


def test_dora_on_rows_under_tensor_parallelism(corpus):
    spread = train(experiment(corpus, "lora:rank=4,dora=true,targets=q_proj+v_proj+up_proj", TP, ranks=2, **SGD))
    alone = train(experiment(corpus, "lora:rank=4,dora=true,targets=q_proj+v_proj+up_proj", **SGD))
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    with pytest.raises(Incompatible, match="lengths of o_proj's rows"):
        check(experiment(corpus, PLANS["dora"], TP, ranks=2))


# ---- folders --------------------------------------------------------------------------------------------------------


def bare_model(trainer):
    """The base that the trainer started from."""
    model = build(trainer.experiment.model, seed=trainer.workload.seed)
    model.set_attention("naive")
    return model.requires_grad_(False)


IDS = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("plan", PLANS)
def test_folders_hold_what_trained(plan, corpus, tmp_path):
    e = experiment(corpus, PLANS[plan], lr=0.01)
    trainer = make_trainer(e)
    for _ in range(5):
        trainer.step()
    state = {n: full(p) for n, p in trainer.run.model.state_dict().items()}
    save_adapter(e, state, tmp_path)
    loaded = load_adapter(tmp_path, e.model)
    assert loaded.technique.card.name == adapting(e).card.name
    model = bare_model(trainer)
    start = model(IDS)
    attach(model, loaded)
    adapted = model(IDS)
    assert (adapted - start).abs().max() > 1e-6
    if plan != "diff":  # which is projected when it is saved
        with torch.no_grad():
            trained = trainer.run.model(IDS)
        torch.testing.assert_close(adapted, trained, rtol=1e-5, atol=1e-5)
    # The exported model is the adapted one, and so is the merged one.
    if plan in ("bottleneck", "bitfit"):
        with pytest.raises(UserError, match="plain model"):
            plain_state(e, state)
    else:
        whole = bare_model(trainer)
        whole.load_state_dict(plain_state(e, state))
        torch.testing.assert_close(whole(IDS), adapted, rtol=1e-4, atol=1e-5)
        merge(model)
        torch.testing.assert_close(model(IDS), adapted, rtol=1e-4, atol=1e-5)
    # And a trainer goes on from it.
    other = make_trainer(e)
    go_on(other, loaded)
    want = dict(load_adapter(tmp_path, e.model).state)
    got = dict(other.run.model.named_parameters())
    assert want
    assert all(torch.equal(got[n], t) for n, t in want.items())


def test_biases_merge_where_a_family_has_them(corpus, tmp_path):
    biased = MODEL.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True})
    e = experiment(corpus, "bitfit", model=biased, lr=0.01)
    trainer = make_trainer(e)
    for _ in range(3):
        trainer.step()
    whole = bare_model(trainer)
    whole.load_state_dict(plain_state(e, trainer.run.model.state_dict()))
    torch.testing.assert_close(whole(IDS), trainer.run.model(IDS), rtol=1e-5, atol=1e-6)
    save_checkpoint(bare_model(trainer), tmp_path / "base")
    save_adapter(e, trainer.run.model.state_dict(), tmp_path / "adapter")
    torch.testing.assert_close(merged_model(tmp_path / "base", tmp_path / "adapter")(IDS), whole(IDS))
    bare = experiment(corpus, "bitfit")
    save_checkpoint(make_trainer(experiment(corpus)).run.model, tmp_path / "plain")
    save_adapter(bare, make_trainer(bare).run.model.state_dict(), tmp_path / "other")
    with pytest.raises(UserError, match="no place"):
        merged_model(tmp_path / "plain", tmp_path / "other")


def test_a_small_task_is_a_small_file(corpus, tmp_path):
    sizes = {}
    for plan in ("mask", "diff"):
        e = experiment(corpus, PLANS[plan], lr=0.01)
        trainer = make_trainer(e)
        for _ in range(2):
            trainer.step()
        save_adapter(e, trainer.run.model.state_dict(), tmp_path / plan)
        sizes[plan] = sum(t.nbytes for t in load_tensors(tmp_path / plan).values())
    weights = sum(p.numel() for p in make_trainer(experiment(corpus)).run.model.layers.parameters() if p.ndim > 1)
    assert sizes["mask"] == weights / 8 + 14 * 8
    assert sizes["diff"] == pytest.approx(0.1 * weights * 8 + 14 * 8, rel=0.01)


def load_tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def go_on_rank(rank, e, folder):
    trainer = make_trainer(e, rank)
    loaded = load_adapter(folder, e.model)
    go_on(trainer, loaded)
    got = {n.removeprefix("model."): full(p) for n, p in trainer.run.root.named_parameters() if p.requires_grad}
    return all(torch.equal(got[n], t) for n, t in loaded.state.items()) and set(got) == set(loaded.state)


@pytest.mark.parametrize("layout", ["zero:stage=3", TP])
def test_any_layout_goes_on_from_a_folder(layout, corpus, tmp_path):
    e = experiment(corpus, PLANS["every"], lr=0.01)
    trainer = make_trainer(e)
    trainer.step()
    save_adapter(e, trainer.run.model.state_dict(), tmp_path)
    assert all(world(2).run(go_on_rank, experiment(corpus, PLANS["every"], layout, ranks=2), tmp_path))


def test_another_plan_does_not_go_on(corpus, tmp_path):
    e = experiment(corpus, PLANS["lora"])
    save_adapter(e, make_trainer(e).run.model.state_dict(), tmp_path)
    loaded = load_adapter(tmp_path, e.model)
    with pytest.raises(
        UserError, match=r"which trains layers\.0\.attention\.k_proj(.|\n)*--with lora:.*q_proj\+v_proj"
    ):
        go_on(make_trainer(experiment(corpus, PLANS["every"])), loaded)
    with pytest.raises(UserError, match=r"has alpha=16.0, the plan alpha=8.0"):
        go_on(make_trainer(experiment(corpus, "lora:rank=4,alpha=8.0")), loaded)
    with pytest.raises(UserError, match="trains no adapter"):
        adapting(experiment(corpus))


@pytest.mark.parametrize("plan", ["bitfit", "mask"])
def test_own_kinds_of_another_base_are_refused(plan, corpus, tmp_path):
    e = experiment(corpus, PLANS[plan])
    save_adapter(e, make_trainer(e).run.model.state_dict(), tmp_path)
    with pytest.raises(UserError, match=r"adapts layers\.\d\..* of shape"):
        load_adapter(tmp_path, e.model.model_copy(update={"intermediate_size": 48}))


def test_the_library_of_peft_does_not_mistake_our_kinds(corpus, tmp_path):
    peft = pytest.importorskip("peft")
    e = experiment(corpus, "bitfit")
    save_adapter(e, make_trainer(e).run.model.state_dict(), tmp_path)
    with pytest.raises((ValueError, KeyError), match="RIDGELINE_BITFIT"):
        peft.PeftConfig.from_pretrained(str(tmp_path))


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = [
    (("lora:targets=nothing",), {}, "'nothing' matches no linear layer of test-tiny"),
    (("lora:targets=(",), {}, "matches no linear layer"),
    (("lora:rank=16,targets=k_proj",), {}, "rank 16 is not below k_proj's smaller side 16"),
    (("lora:targets=layers.1.*", "pipeline:degree=2"), {"ranks": 2}, "first layer to adapt is layers.1"),
    (("bottleneck_adapter:size=32",), {}, "size 32 is not below"),
    (("mask_tuning:start=0.0",), {}, "start 0 is not above threshold"),
    (("bitfit", "lora"), {}, "lora also decides which parameters train"),
    (("bitfit", TP), {"ranks": 2}, "tensor_parallel divides linear layers"),
    (("diff_pruning", "mixed_precision:weights=low"), {}, "penalty does not reach"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "more", "says"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refusals(plan, more, says, corpus):
    with pytest.raises(Incompatible, match=says.replace("(", r"\(")) as caught:
        check(experiment(corpus, *plan, **more))
    assert caught.value.fix


def test_every_adapter_is_one_kind_among_the_techniques():
    assert {"lora", "bitfit", "bottleneck_adapter", "diff_pruning", "mask_tuning"} <= KINDS


def test_the_scale_of_rank_stabilised_adapters(corpus):
    (t,) = techniques_of(experiment(corpus, "lora:rank=16,alpha=32,rslora=true,targets=o_proj").plan)
    assert t.scale == 8.0
    assert adapters(build(experiment(corpus).model), load_one(t, corpus))["layers.0.attention.o_proj"].scale == 8.0


def test_the_scale_of_plain_lora(corpus):
    (t,) = techniques_of(experiment(corpus, "lora:rank=16,alpha=32,targets=o_proj").plan)
    assert adapters(build(experiment(corpus).model), load_one(t, corpus))["layers.0.attention.o_proj"].scale == 2.0


def load_one(t, corpus):
    from ridgeline.spec.plan import Call
    from ridgeline.train.adapter_folder import Loaded

    model = build(experiment(corpus).model)
    adapter = t.around(model.get_submodule("layers.0.attention.o_proj"))
    state = {f"layers.0.attention.o_proj.{n}": p for n, p in adapter.state().items()}
    return Loaded(Call(name="lora", options=t.model_dump()), state)


@pytest.mark.parametrize(("model", "targets"), [
    ("deepseek-v2-lite", ["q_proj", "kv_b_proj"]), ("deepseek-v3", ["q_b_proj", "kv_b_proj"]),
    ("llama2-7b", ["q_proj", "v_proj"]),
])  # fmt: skip
def test_default_targets_exist(model, targets):
    e = experiments.make(model, "8xa100", {"kind": "finetune"}, ["lora"])
    assert e.plan.option("lora", "targets") == targets
