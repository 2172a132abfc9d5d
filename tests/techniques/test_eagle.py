"""Training a draft head: against plain PyTorch, from the command line, and that what it has learned is accepted."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from tests.serve.drafts import always
from tests.serving import ask, engine, greedy, run
from tests.train.test_instructions import chat, checkpoint  # noqa: F401  (fixtures)
from tests.training import MODEL, experiment, make_trainer, train
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.data.batches import IGNORE
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.checkpoint.draft_head_files import load_head, save_head
from ridgeline.spec.draft_head import CONFIG, TENSORS
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.adapters.eagle import MEMBER
from ridgeline.techniques.registry import make
from ridgeline.train.training_loop import plain_state

# ---- against plain PyTorch -------------------------------------------------------------------------------------------


def rms(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + MODEL.norm_eps).rsqrt() * weight


def rotated(x):
    """[B, heads, S, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / MODEL.rope_theta ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def reference_loss(w, features, embedded, head, labels, regression, classification):
    """arXiv:2401.15077, sections 3.1 and 3.2, over one llama layer with the weights ``w``."""
    before = torch.zeros_like(features)
    before[:, 1:] = features[:, :-1]
    x = torch.cat((embedded, before), -1) @ w["fuse.weight"].T + w["fuse.bias"]
    at = "body.layers.0."
    read = rms(x, w[f"{at}attention_norm.weight"])
    q, k, v = (
        (read @ w[f"{at}attention.{n}_proj.weight"].T).unflatten(-1, (-1, MODEL.head_dim)).transpose(1, 2)
        for n in "qkv"
    )
    repeat = MODEL.num_heads // MODEL.num_kv_heads
    k, v = rotated(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = rotated(q) @ k.transpose(-1, -2) / MODEL.head_dim**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{at}attention.o_proj.weight"].T
    read = rms(x, w[f"{at}mlp_norm.weight"])
    gate, up, down = (w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    x = x + (F.silu(read @ gate) * (read @ up)) @ down
    total = 0.0
    for guess, truth in zip(x[labels != IGNORE], features[labels != IGNORE], strict=True):
        gap = (guess - truth).abs()
        near = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
        same = -((head @ truth).softmax(0) * (head @ guess).log_softmax(0)).sum()
        total = total + regression * near + classification * same
    return total


@pytest.mark.parametrize("options", ["", "regression=0.2,classification=0.7"])
def test_training_is_that_of_plain_pytorch(corpus, options):
    e = experiment(corpus, f"eagle:{options}".removesuffix(":"), optimizer="sgd", lr=0.5, warmup_steps=0, grad_clip=1e9,
                   weight_decay=0.0)  # fmt: skip
    t = make(e.plan.calls[0])
    trainer = make_trainer(e)
    model, draft = trainer.run.model, getattr(trainer.run.model, MEMBER)
    w = {n: p.detach().clone().requires_grad_() for n, p in draft.named_parameters()}
    start = {n: p.detach().clone() for n, p in w.items()}
    for step in range(5):
        batch = trainer.run.data.batches.batch(step)
        with torch.no_grad():
            features, embedded = model(batch.ids, return_hidden=True), model.embed.tokens(batch.ids)
        valid = int((batch.labels != IGNORE).sum())
        loss = reference_loss(w, features, embedded, model.head.out.weight, batch.labels, t.regression,
                              t.classification) / valid  # fmt: skip
        gradients = torch.autograd.grad(loss, list(w.values()))
        with torch.no_grad():
            for p, g in zip(w.values(), gradients, strict=True):
                p -= trainer.run.update.schedule(step) * g
        assert trainer.step().loss == pytest.approx(float(loss.detach()), rel=1e-5)
    apart = max(float((w[n] - p).abs().max()) for n, p in draft.named_parameters())
    moved = max(float((start[n] - p).abs().max()) for n, p in draft.named_parameters())
    assert apart < 1e-4 * moved


def test_packed_documents_begin_anew(corpus):
    """Two documents in one row are as they are in two rows."""
    trainer = make_trainer(experiment(corpus, "eagle"))
    ids, labels = (torch.randint(300, (1, 16), generator=torch.Generator().manual_seed(s)) for s in range(2))
    places = torch.cat((torch.arange(9), torch.arange(7)))[None]
    documents = torch.tensor([[0] * 9 + [1] * 7])
    call = trainer.run.call
    both = call(ids, labels, places, documents)
    apart = sum(call(ids[:, at], labels[:, at]) for at in (slice(0, 9), slice(9, 16)))
    assert float(both) == pytest.approx(float(apart), rel=1e-5)
    mixed = call(ids, labels)
    assert abs(float(mixed) - float(both)) > 1e-4, "documents make no difference: the test sees nothing"


@pytest.mark.parametrize("plan", ["zero:stage=1", "zero:stage=3"])
def test_sharded_training(corpus, plan):
    alone = train(experiment(corpus, "eagle", optimizer="sgd", lr=1.0))
    ranks = train(experiment(corpus, "eagle", plan, ranks=2, optimizer="sgd", lr=1.0))
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-5)


# ---- what it is for --------------------------------------------------------------------------------------------------


def test_what_a_head_has_learned_is_accepted(corpus, tmp_path):
    """A model that has learned a text by heart, and a head for it; the same tokens, in fewer steps."""
    text = tmp_path / "text.txt"
    text.write_text("the ridge line runs along the roof, and the roof keeps off the rain. " * 400, encoding="utf-8")
    fields = {"lr": 1e-2, "steps": 150, "seq_len": 32, "batch_size": 8}
    first = make_trainer(experiment(text, **fields), uneven=False)
    for _ in range(150):
        first.step()
    model = first.run.model
    base, folder = tmp_path / "base", tmp_path / "head"
    save_checkpoint(model, base)
    first.run.data.batches.tokenizer.save(str(base / "tokenizer.json"))
    head = make_trainer(experiment(text, "eagle", checkpoint=str(base), **{**fields, "lr": 3e-3}), uneven=False)
    losses = [head.step().loss for _ in range(150)]
    assert losses[-1] < 0.5 * losses[0]
    state = {n.removeprefix("model."): t for n, t in head.run.root.state_dict().items()}
    head.run.hooks.write(state, folder)
    model = load_checkpoint(base).requires_grad_(False)
    prompts = [head.run.data.batches.batch(0).ids[i, :8].tolist() for i in range(3)]
    for options in ("tokens=4", "tokens=4,branches=3,nodes=10"):
        eng = always(engine(model, f"speculative:draft={folder},{options}"))
        got, _ = run(eng, *(ask(str(i), p, 24) for i, p in enumerate(prompts)))
        assert got == {(str(i), 0): greedy(model, p, 24) for i, p in enumerate(prompts)}
        assert eng.stats().steps < 16, "24 tokens of each"


def test_the_model_is_exported_without_the_head(corpus):
    trainer = make_trainer(experiment(corpus, "eagle"))
    state = {n.removeprefix("model."): t for n, t in trainer.run.root.state_dict().items()}
    left = plain_state(trainer.experiment, state)
    assert set(state) - set(left) == {n for n in state if n.startswith(f"{MEMBER}.")} != set()


def test_heads_are_stored_and_read(corpus, tmp_path):
    trainer = make_trainer(experiment(corpus, "eagle"))
    draft = getattr(trainer.run.model, MEMBER)
    save_head(tmp_path, MODEL, draft.state_dict())
    again = load_head(tmp_path, MODEL, torch.float32)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in draft.state_dict().items()
    }


def test_finetune_writes_the_head_and_says_how_to_use_it(checkpoint, chat, tmp_path):  # noqa: F811
    out = tmp_path / "head"
    args = ["finetune", str(checkpoint), "--data", str(chat), "--template", str(chat.parent / "short.jinja"),
            "--out", str(out), "--with", "eagle", "--seq-len", "32", "--batch-size", "4", "--steps", "6",
            "--eval-every", "3", "--eval-batches", "1"]  # fmt: skip
    got = CliRunner().invoke(app, [*args, "--json"])
    assert got.exit_code == 0, got.output
    result = json.loads(got.stdout)
    assert result["best"][1] < result["evaluations"][0][1]
    assert sorted(p.name for p in out.glob("draft_head*")) == sorted((CONFIG, TENSORS))
    assert not list(out.glob("*config.json"))
    assert not list(out.glob("model*"))
    assert f"serve {checkpoint.resolve()} --with speculative:draft={out}" in got.stderr
    text = CliRunner().invoke(app, ["generate", str(checkpoint), "--prompt", "the roof", "--max-tokens", "12"])
    drafted = CliRunner().invoke(app, ["generate", str(checkpoint), "--prompt", "the roof", "--max-tokens", "12",
                                       "--with", f"speculative:draft={out},branches=2,nodes=6"])  # fmt: skip
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == text.stdout


def test_a_head_is_not_merged(checkpoint, chat, tmp_path):  # noqa: F811
    args = ["finetune", str(checkpoint), "--data", str(chat), "--out", str(tmp_path), "--with", "eagle", "--merged"]
    with pytest.raises(UserError, match="--merged"):
        CliRunner().invoke(app, args, catch_exceptions=False)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["pipeline:degree=2", "tensor_parallel:degree=2"])
def test_a_divided_model_is_refused(corpus, plan):
    with pytest.raises(Incompatible, match="over ranks") as refusal:
        make_trainer(experiment(corpus, "eagle", plan, ranks=2))
    assert refusal.value.fix


def test_an_encoder_is_refused(corpus):
    with pytest.raises(Incompatible, match="no decoder"):
        make_trainer(experiment(corpus, "eagle", model=MODEL.changed(causal=False)))


def test_a_loss_of_nothing_is_refused(corpus):
    with pytest.raises(Incompatible, match="nothing is trained"):
        make_trainer(experiment(corpus, "eagle:regression=0,classification=0"))
