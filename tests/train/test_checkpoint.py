"""Checkpoints: resumed curves are bitwise the straight ones; what is damaged or foreign is refused; exports load."""

import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from tests.crossings import crossing
from tests.nn.conftest import CONFIGS
from tests.training import MODEL, experiment, make_trainer, state
from tests.world import RankFailed, world
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ridgeline.nn import load_checkpoint
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.train import checkpoint
from ridgeline.train.async_checkpoints import AsyncCheckpoints
from ridgeline.train.checkpoint import checkpoints, resume, save
from ridgeline.train.training_loop import Evaluations, export


def part(rank, e, folder, steps):
    """Resume if there is something to resume, go on for some steps, save; losses from the start, and parameters."""
    trainer = make_trainer(e, rank)
    losses = resume(trainer, folder)
    assert len(losses) == trainer.steps_done
    for _ in range(steps):
        losses.append(trainer.step().loss)
    save(trainer, folder, losses)
    return losses, state(trainer)


def run(e, folder, steps):
    return part(0, e, folder, steps) if e.world == 1 else world(e.world).run(part, e, folder, steps)[0]


@pytest.mark.parametrize(
    ("plan", "ranks", "workload"),
    [
        ((), 1, {}),
        ((), 1, {"optimizer": "sgd"}),
        (("recompute", "mixed_precision"), 1, {"micro_batch_size": 2}),
        (("lora", "rtn"), 1, {}),
        (("lora", "rtn:bits=4,group_size=16"), 1, {}),
        (("data_parallel",), 2, {}),
        (("zero:stage=2",), 2, {"micro_batch_size": 1}),
        (("zero:stage=3", "lora", "rtn"), 2, {}),
    ],
)
def test_three_and_three_steps_are_bitwise_six(plan, ranks, workload, corpus, tmp_path):
    e = experiment(corpus, *plan, ranks=ranks, steps=6, lr=1e-2, **workload)
    straight, after = run(e, tmp_path / "straight", 6)
    run(e, tmp_path / "parts", 3)
    parts, resumed = run(e, tmp_path / "parts", 3)
    assert parts == straight
    assert len(set(straight)) == 6
    for name, p in after.items():
        assert torch.equal(p, resumed[name]), name


def test_the_optimizers_state_is_part_of_it(corpus, tmp_path, monkeypatch):
    """Negative control: without the moments the curve is another one."""
    e = experiment(corpus, steps=10, lr=1e-2)
    straight, _ = run(e, tmp_path / "straight", 10)
    run(e, tmp_path / "parts", 5)
    load = torch.distributed.checkpoint.load
    monkeypatch.setattr(
        "torch.distributed.checkpoint.load", lambda tensors, **how: load({"model": tensors["model"]}, **how)
    )
    assert run(e, tmp_path / "parts", 5)[0] != straight


def test_only_the_newest_stays_and_a_run_can_be_prolonged(corpus, tmp_path):
    run(experiment(corpus, steps=4), tmp_path, 2)
    run(experiment(corpus, steps=4), tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    assert len(run(experiment(corpus, steps=8), tmp_path, 1)[0]) == 4


def test_a_run_from_the_start_replaces_what_was_there(corpus, tmp_path):
    run(experiment(corpus), tmp_path, 2)
    e = experiment(corpus, lr=0.1)
    trainer = make_trainer(e)
    losses = [trainer.step().loss for _ in range(2)]
    save(trainer, tmp_path, losses)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    assert resume(make_trainer(e), tmp_path) == losses


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.5}, "workload.lr"), ({"seed": 1}, "workload.seed"), ({"plan": ("lora",)}, "plan"),
        ({"plan": ("lion",)}, "plan"), ({"plan": ("adamw8bit",)}, "plan"),
        ({"plan": ("cramming:tokens=4096",)}, "plan"),
    ],
)  # fmt: skip
def test_another_experiments_checkpoint_is_refused(change, named, corpus, tmp_path):
    run(experiment(corpus), tmp_path, 1)
    other = make_trainer(experiment(corpus, *change.pop("plan", ()), **change))
    before = state(other)
    with pytest.raises(UserError, match=f"another experiment .*{named}") as error:
        resume(other, tmp_path)
    assert "--out" in error.value.fix
    assert all(torch.equal(t, before[n]) for n, t in state(other).items())
    assert other.steps_done == 0


def test_a_checkpoint_of_other_data_under_the_same_name_is_refused(corpus, tmp_path):
    text = tmp_path / "text.txt"
    shutil.copy(corpus, text)
    run(experiment(text), tmp_path / "out", 1)
    assert resume(make_trainer(experiment(text)), tmp_path / "out")
    text.write_text(text.read_text()[::-1])
    with pytest.raises(UserError, match=r"text\.txt' is not what .*step-000001 was trained on"):
        resume(make_trainer(experiment(text)), tmp_path / "out")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device on which there is no room is Linux's")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("what", ["__0_0.distcp", ".metadata.tmp", ".state.json.part", None])
def test_a_checkpoint_that_cannot_be_written_is_one_message_and_leaves_the_one_before(
    what, later, corpus, tmp_path, monkeypatch
):
    """Where there is no room, it says so; ``what`` is the file that meets it. None: a file may not be that large."""
    e = experiment(corpus)
    losses, _ = run(e, tmp_path, 1)
    trainer = make_trainer(e)
    before = resume(trainer, tmp_path)
    trainer.step()
    saving = AsyncCheckpoints(trainer, tmp_path)

    def write():
        if not later:
            return save(trainer, tmp_path, [*losses, 1.0])
        saving.save([*losses, 1.0])
        return saving.wait()

    def full_device(call):
        """``call``, after which the file is one on which there is no room."""

        def led(path, *args, **more):
            found = call(path, *args, **more)
            folder = path if path.suffix == ".new" else path.parent
            if folder.suffix == ".new" and not (folder / what).is_symlink():
                (folder / what).symlink_to("/dev/full")
            return found

        return led

    if what == ".state.json.part":  # not before all other files were read
        monkeypatch.setattr(checkpoint, "_checksum", full_device(checkpoint._checksum))
    elif what:
        monkeypatch.setattr(Path, "mkdir", full_device(Path.mkdir))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if what else 20_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"a checkpoint cannot be written to ") as error:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        saving.close()
    full = "No space left on device" in error.value.what
    assert full or "File too large" in error.value.what
    assert full == bool(what) == error.value.fix.startswith("make room") == (" MB are free" in error.value.what)
    assert resume(make_trainer(e), tmp_path) == before == losses


def _truncate(place):
    file = next(place.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def _flip(place):
    file = next(place.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.name


def _remove(place):
    file = next(place.glob("*.distcp"))
    file.unlink()
    return file.name


def _no_index(place):
    (place / ".metadata").write_bytes(b"")
    return ".metadata"


def _not_json(place):
    (place / "state.json").write_text('{"step": 1')
    return "state.json"


def _no_step(place):
    file = place / "state.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "step"}))
    return "state.json"


def _a_list(place):
    (place / "state.json").write_text("[1]")
    return "state.json"


@pytest.mark.parametrize("damage", [_truncate, _flip, _remove, _no_index, _not_json, _no_step, _a_list])
def test_a_damaged_checkpoint_is_named(damage, corpus, tmp_path):
    e = experiment(corpus)
    run(e, tmp_path, 1)
    file = damage(checkpoints(tmp_path)[-1])
    with pytest.raises(UserError, match=file) as error:
        resume(make_trainer(e), tmp_path)
    assert "damaged" in str(error.value)
    assert "step-000001" in error.value.fix


def killed_while_saving(rank, e, folder, where):
    """Two steps and a save, one more, and death in the midst of the second save."""
    trainer = make_trainer(e, rank)
    losses = [trainer.step().loss, trainer.step().loss]
    save(trainer, folder, losses)
    losses.append(trainer.step().loss)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(*{"tensors written": (checkpoint, "_checksum", die), "before the rename": (os, "replace", die)}[where])
    save(trainer, folder, losses)


@pytest.mark.parametrize("where", ["tensors written", "before the rename"])
def test_death_while_saving_leaves_the_last_checkpoint(where, corpus, tmp_path):
    e, out = experiment(corpus, steps=6), tmp_path / "out"
    with pytest.raises(RankFailed, match="exit code -9"):
        world(1).run(killed_while_saving, e, out, where)
    assert len(list(out.iterdir())) == 2, "the draft and the complete one"
    assert [p.name for p in checkpoints(out)] == ["step-000002"]
    straight, _ = run(e, tmp_path / "straight", 4)
    assert run(e, out, 2)[0] == straight
    assert [p.name for p in out.iterdir()] == ["step-000004"]


# ---- any layout ------------------------------------------------------------------------------------------------------

DEEP = MODEL.model_copy(update={"num_layers": 4})
SAME = MODEL.model_copy(update={"num_layers": 4, "tie_embeddings": True})
LAYOUTS = {
    "one": (1, ()),
    "zero 3": (4, ("zero:stage=3",)),
    "zero 2": (2, ("zero:stage=2",)),
    "data": (2, ("data_parallel",)),
    "tensor x pipeline": (4, ("tensor_parallel:degree=2", "pipeline:degree=2")),
    "tensor x zero": (4, ("tensor_parallel:degree=2", "sequence_parallel", "zero:stage=2")),
    "interleaved": (2, ("pipeline:degree=2,schedule=interleaved,chunks=2",)),
    "pipeline x zero": (4, ("pipeline:degree=2", "zero:stage=1")),
    "ring": (2, ("ring_attention:degree=2", "flash_attention")),
    "offload": (1, ("zero_offload",)),
}
MOVES = [
    ("tensor x pipeline", "zero 3", DEEP),
    ("zero 3", "tensor x pipeline", DEEP),
    ("one", "pipeline x zero", DEEP),
    ("tensor x zero", "one", DEEP),
    ("interleaved", "zero 2", DEEP),
    ("data", "tensor x zero", DEEP),
    ("ring", "offload", DEEP),
    ("zero 2", "pipeline x zero", SAME),
    ("tensor x pipeline", "one", SAME),
]


def leg(rank, e, folder, steps, model=None):
    """Resume from ``folder``, run to ``steps`` and save; export the model if asked to."""
    trainer = make_trainer(e, rank)
    losses = resume(trainer, folder)
    while trainer.steps_done < steps:
        losses.append(trainer.step().loss)
    place = save(trainer, folder, losses)
    if model:
        export(trainer, place, model)
    return losses


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Of a model in one process, once: its losses, and where it was exported to."""
    known = {}

    def run(model, run_leg):
        key = model.model_dump_json()
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            known[key] = run_leg("one", folder / "run", 6, folder / "plain"), folder / "plain"
        return known[key]

    return run


@pytest.mark.parametrize(
    ("before", "after", "model"), [pytest.param(*m, marks=crossing(f"{m[0]} to {m[1]}", 3)) for m in MOVES],
    ids=lambda v: v if isinstance(v, str) else v.name,
)  # fmt: skip
def test_checkpoints_move_between_layouts(before, after, model, corpus, straight, tmp_path):
    """AdamW's states travel too: without them the curve would bend at the change of layout."""

    def run_leg(layout, folder, steps, out=None):
        ranks, plan = LAYOUTS[layout]
        settings = {"model": model, "batch_size": 4, "micro_batch_size": 1, "steps": 6, "lr": 2e-2}
        e = experiment(corpus, *plan, ranks=ranks, **settings)
        args = (e, folder, steps, out)
        return leg(0, *args) if ranks == 1 else world(ranks).run(leg, *args)[0]

    losses, there = straight(model, run_leg)
    run_leg(before, tmp_path / "moved", 3)
    moved = run_leg(after, tmp_path / "moved", 6, tmp_path / "model")
    assert abs(losses[5] - losses[2]) > 0.05
    assert moved == pytest.approx(losses, rel=1e-5)
    plain, other = (dict(load_checkpoint(place).named_parameters()) for place in (there, tmp_path / "model"))
    for name, p in plain.items():
        assert torch.allclose(p, other[name], atol=1e-3), name


# ---- export ---------------------------------------------------------------------------------------------------------


def export_rank(rank, e, folder):
    """Train, export; the trained model's own logits for some tokens."""
    trainer = make_trainer(e, rank)
    for _ in range(3):
        trainer.step()
    export(trainer, save(trainer, folder / "run", []), folder)
    if e.world > 1:
        trainer.run.root.unshard()
    with torch.no_grad():
        return trainer.run.model(torch.arange(24).reshape(2, 12))


GPT2 = ModelSpec.from_config({**CONFIGS["gpt2"], "vocab_size": 300}, name="gpt2-test")
TIED = ModelSpec.from_config({**CONFIGS["qwen3"], "vocab_size": 300}, name="tied-test")
EXPORTS = [
    ((), 1, None),
    (("lora",), 1, None),
    (("lora", "rtn"), 1, None),
    (("lora", "rtn:bits=4,group_size=16"), 1, None),
    (("lora:targets=q_proj+o_proj+up_proj+down_proj", "rtn"), 1, GPT2),
    ((), 1, TIED),
    (("zero:stage=3", "lora", "rtn"), 2, None),
    (("zero:stage=2",), 2, TIED),
]


@pytest.mark.parametrize(("plan", "ranks", "model"), EXPORTS)
def test_the_export_is_the_trained_model(plan, ranks, model, corpus, tmp_path):
    more = {"model": model} if model else {}
    e = experiment(corpus, *plan, ranks=ranks, lr=0.05, warmup_steps=0, **more)
    logits = world(2).run(export_rank, e, tmp_path)[0] if ranks == 2 else export_rank(0, e, tmp_path)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.allclose(load_checkpoint(tmp_path)(ids), logits, atol=1e-4)
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, logits, atol=1e-4)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer("the ridge")["input_ids"]) == "the ridge"


def test_an_export_is_where_the_next_run_starts(corpus, tmp_path):
    first = make_trainer(experiment(corpus, "lora", lr=0.05, warmup_steps=0))
    for _ in range(4):
        first.step()
    export(first, save(first, tmp_path / "run", []), tmp_path)
    again = make_trainer(experiment(corpus, checkpoint=str(tmp_path)))
    ids, labels, *_ = again.run.data.batches.batch(9)
    with torch.no_grad():
        assert float(again.run.call(ids, labels)) == pytest.approx(float(first.run.call(ids, labels)), rel=1e-5)
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocabulary.json")
    with pytest.raises(UserError, match=r"has no tokenizer.json, and its weights") as refused:
        make_trainer(experiment(corpus, checkpoint=str(tmp_path)))
    assert "--workload.tokenizer" in refused.value.fix
    named = make_trainer(experiment(corpus, checkpoint=str(tmp_path), tokenizer=str(tmp_path / "vocabulary.json")))
    assert torch.equal(named.run.data.batches.batch(9).ids, ids)
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError):
        make_trainer(experiment(corpus, checkpoint=str(tmp_path)))


def later(rank, e, folder, steps, at):
    """Train, with a checkpoint begun at step ``at`` whose writing the rest of the steps does not wait for."""
    trainer, losses = make_trainer(e, rank), []
    saving = AsyncCheckpoints(trainer, folder)
    held, write = threading.Event(), FileSystemWriter.write_data
    checkpoints_then = []

    def slowly(writer, plan, planner):
        assert held.wait(60)
        return write(writer, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", slowly)
        for step in range(steps):
            losses.append(trainer.step().loss)
            if step + 1 == at:
                saving.save(losses)
        checkpoints_then = checkpoints(folder)
        held.set()
        saving.wait()
    saving.close()
    return losses, checkpoints_then, state(trainer)


@pytest.mark.parametrize(
    ("plan", "ranks", "workload"),
    [((), 1, {}), (("lora", "rtn"), 1, {}), (("zero:stage=2",), 2, {}), (("zero:stage=3", "lora", "rtn"), 2, {}),
     (("tensor_parallel:degree=2",), 2, {}), (("zero_offload",), 1, {})],
)  # fmt: skip
def test_checkpoints_written_while_training_goes_on(plan, ranks, workload, corpus, tmp_path):
    """They hold what the state was when they began."""
    e = experiment(corpus, *plan, ranks=ranks, steps=6, lr=1e-2, **workload)
    folder = tmp_path / "later"
    found = later(0, e, folder, 6, 3) if ranks == 1 else world(ranks).run(later, e, folder, 6, 3)[0]
    losses, meanwhile, straight = found
    assert meanwhile == []
    assert [p.name for p in checkpoints(folder)] == ["step-000003"]
    resumed, after = run(e, folder, 3)
    assert resumed == losses
    for name, p in straight.items():
        assert torch.equal(p, after[name]), name


def test_it_holds_the_evaluations_of_its_step():
    evaluations = Evaluations()
    evaluations.found.append((1, 2.0))
    kept = evaluations.state_dict()
    evaluations.found.append((2, 1.0))
    assert kept == {"found": [(1, 2.0)]}


def test_the_next_checkpoint_waits_for_the_last(corpus, tmp_path):
    trainer, losses = make_trainer(experiment(corpus, steps=4)), []
    saving = AsyncCheckpoints(trainer, tmp_path)
    for _ in range(3):
        losses.append(trainer.step().loss)
        saving.save(losses)
    saving.wait()
    saving.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_a_checkpoint_that_cannot_be_begun_is_one_message(corpus, tmp_path):
    trainer = make_trainer(experiment(corpus))
    trainer.step()
    (tmp_path / ".step-000001.new").touch()  # no directory, so that it is not removed as one that is left
    with pytest.raises(UserError, match=r"a checkpoint cannot be written to .*: File exists"):
        save(trainer, tmp_path, [])


def test_an_error_of_the_writer_is_raised_by_the_next(corpus, tmp_path, monkeypatch):
    trainer = make_trainer(experiment(corpus, steps=4))
    saving = AsyncCheckpoints(trainer, tmp_path)

    def full(place, about):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ridgeline.train.async_checkpoints.complete", full)
        saving.save([trainer.step().loss])
        with pytest.raises(UserError, match="No space left"):
            saving.wait()
    assert checkpoints(tmp_path) == []
    saving.save([1.0, trainer.step().loss])
    saving.wait()
    saving.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
