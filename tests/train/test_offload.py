"""Offload: late updates equal late gradients, checkpoints, copies as predicted, and a device budget that is kept."""

from pathlib import Path

import pytest
import tomli_w
import torch
from tests.forked import Fork
from tests.train.test_checkpoint import run
from tests.training import MODEL, experiment, make_trainer, state, train, train_once, train_rank
from tests.world import world
from typer.testing import CliRunner

from ridgeline import catalog
from ridgeline.cli import app
from ridgeline.jobs import launchers
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn import load_checkpoint
from ridgeline.nn.memory.meter import process_memory, return_freed_memory
from ridgeline.nn.memory.tiled import whole_weights
from ridgeline.predict import predict
from ridgeline.runtime.gradients import clear, clip, global_norm
from ridgeline.runtime.host_optimizer import HostStates
from ridgeline.runtime.optimizer import learning_rate
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import check
from ridgeline.train.budget import Budget
from ridgeline.train.checkpoint import save
from ridgeline.train.training_loop import export

WIDER = MODEL.model_copy(
    update={"hidden_size": 64, "head_dim": 16, "num_layers": 4, "intermediate_size": 160, "vocab_size": 320}
)
DISK = "zero_infinity:parameters=nvme,optimizer=nvme"
PLANS = ["zero_offload", "zero_infinity", "zero_infinity:parameters=device,optimizer=nvme",
         "zero_infinity:parameters=cpu,optimizer=nvme", DISK]  # fmt: skip


# ---- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("plan", PLANS)
def test_one_process_is_bitwise_the_same(plan, optimizer, corpus):
    settings = {"optimizer": optimizer, "micro_batch_size": 2, "grad_clip": 0.05, "lr": 1e-2}
    plain, moved = train_once(experiment(corpus, **settings)), train(experiment(corpus, plan, **settings))
    assert min(plain.norms) > 0.05
    assert plain.signal > 1e-3
    assert moved.losses == plain.losses
    assert moved.norms == plain.norms
    assert all(torch.equal(moved.after[n], t) for n, t in plain.after.items())


@pytest.mark.parametrize("base", [("lora", "recompute"), ("mixed_precision",)])
@pytest.mark.parametrize("plan", ["zero_offload", DISK])
def test_with_adapters_recomputation_and_low_precision(base, plan, corpus):
    plain = train_once(experiment(corpus, *base, lr=1e-2, steps=3))
    moved = train(experiment(corpus, *base, plan, "activation_offload", lr=1e-2, steps=3))
    assert moved.losses == plain.losses
    assert all(torch.equal(moved.after[n], t) for n, t in plain.after.items())


SHARDED = [
    (("zero:stage=1",), ("zero_offload",)),
    (("zero:stage=3",), ("zero_infinity",)),
    (("zero:stage=3", "recompute", "lora"), (DISK,)),
    (("zero:stage=3", "mixed_precision"), ("zero_infinity:parameters=nvme", "activation_offload")),
]


@pytest.mark.parametrize(("base", "plan"), SHARDED, ids=lambda v: "+".join(v))
def test_shards_are_the_same(base, plan, corpus):
    settings = {"ranks": 2, "optimizer": "sgd", "micro_batch_size": 1, "grad_clip": 0.05, "lr": 10.0}
    plain, moved = (train(experiment(corpus, *base, *p, **settings)) for p in ((), plan))
    assert plain.signal > (1e-4 if "lora" in base else 0.1)
    assert moved.losses == pytest.approx(plain.losses, rel=1e-6)
    assert moved.norms == pytest.approx(plain.norms, rel=1e-6)
    assert all(float((moved.after[n] - t).abs().max()) < 1e-5 * plain.moved for n, t in plain.after.items())


@pytest.mark.parametrize("plan", ["zero_infinity:tile=4", f"{DISK},tile=2"])
def test_tiles_are_the_whole_matrix(plan, corpus, tmp_path):
    settings = {"optimizer": "sgd", "micro_batch_size": 2, "grad_clip": 0.05, "lr": 10.0, "weight_decay": 0.0}
    plain, moved = train_once(experiment(corpus, **settings)), train(experiment(corpus, plan, **settings))
    assert moved.losses == pytest.approx(plain.losses, rel=1e-5)
    assert moved.norms == pytest.approx(plain.norms, rel=1e-4)
    assert plain.signal > 0.1
    assert moved.trained != plain.trained, "the tiles are parameters"
    after = whole_weights(moved.after)
    assert all(float((after[n] - t).abs().max()) < 1e-4 * plain.moved for n, t in plain.after.items())


def test_tiles_are_exported_whole(corpus, tmp_path):
    trainer = make_trainer(experiment(corpus, f"{DISK},tile=4"))
    trainer.step()
    export(trainer, save(trainer, tmp_path / "run", []), tmp_path / "model")
    want = whole_weights(state(trainer))
    for name, p in load_checkpoint(tmp_path / "model").named_parameters():
        assert torch.equal(p, want[f"model.{name}"]), name


@pytest.mark.parametrize("lost", ["_back", "_leave"])
def test_what_is_lost_on_the_way_is_seen(lost, corpus, monkeypatch):
    """Negative control: weights that do not come back, gradients of which only the last micro-batch counts."""
    settings = {"optimizer": "sgd", "micro_batch_size": 2, "grad_clip": 0.05, "lr": 10.0, "steps": 2}
    plain = train(experiment(corpus, **settings))
    if lost == "_back":
        monkeypatch.setattr(HostStates, "_back", lambda self, part: None)
    else:
        leave = HostStates._leave

        def forget(self, part):
            part.arrived = set()
            leave(self, part)

        monkeypatch.setattr(HostStates, "_leave", forget)
    moved = train(experiment(corpus, "zero_offload", **settings))
    assert moved.losses[0] == plain.losses[0]
    assert moved.losses[1] != pytest.approx(plain.losses[1], rel=1e-3)


def late(e):
    """Plain training that applies each step's gradients, with their own clipping and rate, one step late."""
    trainer = make_trainer(e)
    losses, held = [], None
    for step in range(e.training.steps):
        losses.append(float(trainer.forward_backward(step)[0]))
        norm = global_norm(trainer.parameters, trainer.copies, 1)
        clip(trainer.parameters, norm, e.training.grad_clip)
        fresh = [p.grad.clone() for p in trainer.parameters], learning_rate(e.training, step)
        if held is not None:
            for p, g in zip(trainer.parameters, held[0], strict=True):
                p.grad = g
            for group in trainer.optimizer.param_groups:
                group["lr"] = held[1]
            trainer.optimizer.step()
        clear(trainer.parameters, False)
        held = fresh
    return losses, state(trainer)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_delayed_update_is_exactly_one_step_late(optimizer, corpus):
    settings = {"optimizer": optimizer, "micro_batch_size": 2, "grad_clip": 0.05, "lr": 1e-2, "steps": 6}
    moved = train_rank(0, experiment(corpus, "zero_offload:delayed=true", **settings))
    losses, after = late(experiment(corpus, **settings))
    on_time = train_rank(0, experiment(corpus, **settings))
    assert moved.losses == losses
    assert all(torch.equal(moved.after[n], t) for n, t in after.items())
    assert moved.losses[:2] == [on_time.losses[0], moved.losses[1]] != on_time.losses[:2]


def test_what_got_no_gradient_is_left_alone(corpus):
    """AdamW skips a parameter without a gradient: no decay, no step counted. So must the host."""

    def one(plan):
        trainer = make_trainer(experiment(corpus, *plan, lr=1e-2))
        block = trainer.run.model.layers["1"]
        whole = block.mlp.forward
        trainer.step()
        block.mlp.forward = lambda x: x
        trainer.step()
        block.mlp.forward = whole
        trainer.step()
        return state(trainer)

    plain, moved = one(()), one(("zero_offload",))
    assert all(torch.equal(moved[n], t) for n, t in plain.items())


# ---- copies and memory as predicted ---------------------------------------------------------------------------------

COPIES = ("d2h", "h2d", "disk_read", "disk_write")


def copied(rank, e):
    trainer = make_trainer(e, rank, uneven=False)
    for _ in range(2):
        trainer.step()
    store = trainer.run.store
    store.finish()
    before = {k: (t.bytes, t.count) for k, t in store.traffic.items()}
    usage = metered_step(trainer)
    store.finish()
    return usage, {k: (t.bytes - before[k][0], t.count - before[k][1]) for k, t in store.traffic.items()}


CASES = [
    *[
        pytest.param((plan,), 1, micro, marks=[pytest.mark.nightly] if (i + j) % 2 else [])  # by day one of each plan
        for i, plan in enumerate(PLANS)
        for j, micro in enumerate((None, 1))
    ],
    (("activation_offload",), 1, None),
    (("activation_offload", "flash_attention", "zero_infinity"), 1, 1),
    (("recompute", "activation_offload"), 1, None),
    (("mixed_precision", "lora:rank=4", "activation_offload", DISK), 1, None),
    (("zero_infinity:tile=4",), 1, 1),
    ((f"{DISK},tile=4", "activation_offload"), 1, None),
    (("data_parallel", "zero_offload"), 2, 1),
    (("zero:stage=1", "zero_offload"), 2, 1),
    (("zero:stage=3", "zero_infinity"), 2, None),
    (("zero:stage=3", DISK, "activation_offload"), 2, 1),
]


@pytest.mark.parametrize(("plan", "ranks", "micro"), CASES, ids=lambda v: "+".join(v) if isinstance(v, tuple) else None)
def test_copies_and_memory_are_those_predicted(plan, ranks, micro, corpus):
    e = experiment(corpus, *plan, ranks=ranks, model=WIDER, seq_len=64, micro_batch_size=micro)
    usage, moved = copied(0, e) if ranks == 1 else world(ranks).run(copied, e)[0]
    said = predict(e)
    counts = dict.fromkeys(COPIES, (0, 0))
    for row in said.breakdown:
        if row.kind in counts:
            counts[row.kind] = counts[row.kind][0] + int(row.link_bytes), counts[row.kind][1] + int(row.count)
    assert moved == counts
    predicted = {m.category: m.bytes for m in said.memory}
    print(f"predicted {predicted}\nmeasured  {usage.categories} at {usage.instant}, host {usage.host}")
    if ranks == 1:  # what fully_shard allocates is another test's business
        assert usage.total == pytest.approx(sum(predicted.values()), rel=0.05)
    host = said.metrics["host_bytes"].value
    if moved["disk_read"][0]:  # of the four buffers through which blocks come and go, one more or less
        assert usage.host == pytest.approx(host, rel=1 / 4)
    else:
        assert usage.host == pytest.approx(host, rel=0.05)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (("zero_offload",), 1),
        (("zero_offload:delayed=true",), 1),
        ((DISK, "lora"), 1),
        (("zero:stage=2", "zero_offload:delayed=true"), 2),
        (("zero:stage=3", "zero_infinity:parameters=cpu,optimizer=nvme"), 2),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, tuple) else None,
)
def test_three_and_three_steps_are_bitwise_six(plan, ranks, corpus, tmp_path):
    e = experiment(corpus, *plan, ranks=ranks, steps=6, lr=1e-2)
    straight, after = run(e, tmp_path / "straight", 6)
    run(e, tmp_path / "parts", 3)
    parts, resumed = run(e, tmp_path / "parts", 3)
    assert parts == straight
    assert len(set(straight)) == 6
    assert all(torch.equal(p, resumed[name]) for name, p in after.items())


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_found_before_training(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"offload path .* cannot be written"):
        make_trainer(experiment(corpus, f"{DISK},path={tmp_path}/file/x"))


def test_the_disk_is_reserved_as_it_is_used(corpus):
    """Too little would be found in the middle of training, too much would refuse what can be done."""
    for plan in (DISK, f"{DISK},tile=4", "zero_infinity:parameters=cpu,optimizer=nvme"):
        for optimizer in ("sgd", "adamw"):
            deep = DEEP.model_copy(update={"num_layers": 12})
            trainer = make_trainer(experiment(corpus, plan, optimizer=optimizer, model=deep))
            trainer.step()
            store = trainer.run.store
            store.finish()
            assert store._end <= store.capacity < 1.2 * store._end


@pytest.mark.parametrize(
    ("plan", "ranks", "says"),
    [
        (("zero:stage=2", "zero_infinity"), 2, "keeps whole parameters on every device"),
        (("data_parallel", "zero_infinity"), 2, "keeps whole parameters on every device"),
        (("zero_offload", "zero_infinity"), 1, "also decides how the optimizer's states"),
        (("zero_infinity:tile=5",), 1, "tile=5 does not divide the rows of every linear"),
        (("zero_infinity:tile=2,parameters=device",), 1, "parameters=device keeps them"),
        (("zero_infinity:tile=2", "lora"), 1, "wraps whole linears"),
    ],
)
def test_refusals(plan, ranks, says, corpus):
    with pytest.raises(Incompatible, match=says) as refusal:
        check(experiment(corpus, *plan, ranks=ranks))
    assert refusal.value.fix


# ---- the device's memory as a budget --------------------------------------------------------------------------------

DEEP = MODEL.model_copy(update={"hidden_size": 128, "head_dim": 32, "num_layers": 32, "intermediate_size": 352})
LIMIT = 22_000_000
"""Less than the parameters of DEEP."""


def resident(send, corpus, plan):
    """Train two steps of DEEP, after a small model has brought in all that any run needs → losses, and the bytes by
    which the process has grown."""

    def now():
        return_freed_memory()
        return process_memory()["rss_anonymous"]

    def go(model):
        trainer = make_trainer(experiment(corpus, *plan, model=model, steps=2))
        losses = [trainer.step().loss for _ in range(2)]
        if trainer.run.store:
            trainer.run.store.finish()
        return losses, trainer

    small = go(DEEP.model_copy(update={"num_layers": 2}))
    before = now()
    losses, trainer = go(DEEP)
    send((losses, now() - before))
    del small, trainer


def alone(corpus, *plan):
    """:func:`resident` in a process of its own."""
    return Fork(resident, corpus, plan).answer()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's RssAnon")
def test_parameters_on_disk_are_not_resident(corpus):
    """RssAnon, as VmRSS counts file pages and VmHWM never falls; in processes of their own, as memory is reused."""
    parameters = 4 * DEEP.num_parameters
    losses, plain = alone(corpus)
    same, moved = alone(corpus, DISK)
    print(f"parameters {parameters / 1e6:.1f} MB; resident: plain {plain / 1e6:.1f} MB, on disk {moved / 1e6:.1f} MB")
    assert losses == same
    assert plain > 2.5 * parameters, "parameters and two moments"
    assert moved < parameters, "not even the parameters"


def test_a_model_larger_than_the_device_trains_on_disk(corpus):
    assert 4 * DEEP.num_parameters > LIMIT
    curves = {}
    for plan, limit in (((), None), ((DISK, "activation_offload"), LIMIT)):
        trainer = make_trainer(experiment(corpus, *plan, model=DEEP, steps=3))
        budget = Budget(trainer, limit)
        losses = []
        for _ in range(3):
            with budget.step():
                losses.append(trainer.step().loss)
        curves[plan] = losses
    assert 0 < budget.peak < LIMIT
    assert len({tuple(c) for c in curves.values()}) == 1
    assert curves[()][-1] < curves[()][0]


def test_without_offload_the_same_budget_is_out_of_memory(corpus):
    with pytest.raises(torch.OutOfMemoryError, match=r"limited to 22\.0 MB: parameters 23\.9 MB; add zero_infinity"):
        Budget(make_trainer(experiment(corpus, model=DEEP)), LIMIT)


def test_the_command_line_says_so_as_of_any_memory_that_ran_out(corpus, tmp_path, monkeypatch):
    catalog.save_device(CPU)
    file = tmp_path / "x.toml"
    model = MODEL.model_dump(exclude_none=True, exclude_defaults=True)
    workload = {"kind": "pretrain", "data": str(corpus), "seq_len": 16, "batch_size": 4, "steps": 2}
    file.write_text(tomli_w.dumps({"name": "x", "model": model, "on": "local", "workload": workload}))
    short = CliRunner().invoke(app, ["train", str(file), "--device-memory", "100kB"])
    assert short.exit_code == 1
    assert "the run failed (oom): out of memory" in short.stderr
    assert "limited to 0.1 MB: parameters" in short.stderr
    wrong = CliRunner().invoke(app, ["train", str(file), "--device-memory", "lots"])
    assert isinstance(wrong.exception, UserError)
    assert "no amount of memory" in str(wrong.exception)
    monkeypatch.setattr(launchers, "run_job", lambda job, *_: asked.append(job.options.device_memory) or result)
    asked = []
    moved = {"disk_read": {"bytes": 3e6, "count": 7, "bandwidth": 1.5e9}}
    result = {"losses": [2.0, 1.0], "step": 2, "stopped": False, "checkpoint": "", "device_peak_bytes": 5_000_000,
              "traffic": moved}  # fmt: skip
    told = CliRunner().invoke(app, ["train", str(file), "--device-memory", "1.5GiB"])
    assert told.exit_code == 0
    assert asked == [1.5 * 2**30]
    assert "device memory: 5.0 MB at most" in told.stdout
    assert "disk_read: 3.0 MB in 7 moves at 1.50 GB/s" in told.stdout
