"""Encoder-decoders train on halves of text and on pairs, alone and over ranks, to the losses of the plain plan; what
does not run on them says so."""

import json

import pytest
import torch
from tests.nn.conftest import PAIRS
from tests.training import experiment, train
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.data.batches import END, IGNORE
from ridgeline.data.packing import load_instructions
from ridgeline.data.pairs import PairBatches
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.model.generate import generate
from ridgeline.nn.model.init import build
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import FineTune
from ridgeline.techniques.registry import registry
from ridgeline.train.trainer import Trainer, global_batches


def of(name, corpus, *plan, ranks=1, **workload):
    model = ModelSpec.from_config({**PAIRS[name], "vocab_size": 300}, name=name)
    fields = {"optimizer": "sgd", "lr": 1.0, "warmup_steps": 0, "steps": 4, **workload}
    return experiment(corpus, *plan, ranks=ranks, model=model, **fields)


@pytest.fixture(scope="module")
def reference():
    """The plain plan's curve, of each model once; it must move enough for the comparisons to see something."""
    known = {}

    def run(name, corpus):
        if name not in known:
            known[name] = train(of(name, corpus))
            assert known[name].signal > 0.02
            assert known[name].losses[-1] < known[name].losses[0]
        return known[name]

    return run


@pytest.mark.parametrize("name", ["t5_gated", "switch"])
@pytest.mark.parametrize("plan", ["recompute", "recompute:policy=selective", "recompute:every=2"])
def test_recomputation(name, plan, corpus, reference):
    assert train(of(name, corpus, plan)).losses == pytest.approx(reference(name, corpus).losses, rel=1e-5)


LAYOUTS = ["data_parallel", "zero:stage=1", "zero:stage=2", "zero:stage=3", "zero:stage=3,prefetch=2+recompute"]


@pytest.mark.parametrize(("name", "plan"), [
    pytest.param(name, plan, marks=pytest.mark.nightly if (i + j) % 2 else [])  # by day each layout of one of them
    for i, name in enumerate(("t5_gated", "switch")) for j, plan in enumerate(LAYOUTS)
])  # fmt: skip
def test_two_ranks(name, plan, corpus, reference):
    other, expected = train(of(name, corpus, *plan.split("+"), ranks=2)), reference(name, corpus)
    assert other.losses == pytest.approx(expected.losses, rel=1e-5)
    assert other.norms == pytest.approx(expected.norms, rel=1e-4)


def test_mixed_precision(corpus, reference):
    other, expected = train(of("t5", corpus, "mixed_precision")), reference("t5", corpus)
    assert other.losses == pytest.approx(expected.losses, rel=0.02)
    assert other.losses != expected.losses


@pytest.mark.parametrize("plan", ["lora:targets=all-linear", "lora+rtn", "lora:dora=true", "bottleneck_adapter",
                                  "bitfit", "diff_pruning", "mask_tuning", "qlora"])  # fmt: skip
def test_adapters_train_in_both_stacks(plan, corpus):
    curve = train(of("t5", corpus, *plan.split("+"), lr=0.3))
    assert curve.moved > 0
    stacks = {name.split(".")[1] for name in curve.trained}
    assert plan == "bitfit" or stacks == {"encoder", "layers"}


@pytest.mark.parametrize("plan", ["adamw8bit", "lion"])
def test_optimizers(plan, corpus):
    curve = train(of("switch", corpus, plan, optimizer="adamw", lr=1e-2 if plan == "adamw8bit" else 3e-3, steps=12))
    assert curve.losses[-1] < curve.losses[0]


def test_integer_bases_in_both_stacks(corpus):
    model = Trainer(of("t5", corpus, "lora", "rtn"), torch.device("cpu"), 0, 1).run.model
    for stack in (model.encoder, model.layers):
        found = {name.rpartition(".")[2] for name, p in stack.named_parameters() if p.dtype == torch.int8}
        assert found, "its weights are codes"
        assert not [n for n, m in stack.named_modules() if is_linear(m)]


def test_halves_of_text(corpus):
    e = of("t5", corpus)
    batch = global_batches(e, 0, 1).batch(0)
    assert batch.ids.shape == batch.labels.shape == batch.source.shape == (4, 16)
    assert torch.equal(batch.ids[:, 1:], batch.labels[:, :-1])
    assert (batch.ids[:, 0] == 0).all()
    assert (batch.labels != IGNORE).all()


def test_what_does_not_run_is_refused(corpus):
    runs = {name for name, cls in registry().items() if cls.card.encoder_decoders}
    assert {"zero", "lora", "recompute", "mixed_precision", "data_parallel"} <= runs
    for plan, ranks in (("tensor_parallel:degree=2", 2), ("pipeline:degree=2", 2), ("fused_layers", 1),
                        ("activation_offload", 1)):  # fmt: skip
        with pytest.raises(Incompatible, match="has an encoder too") as told:
            Trainer(of("t5", corpus, plan, ranks=ranks), torch.device("cpu"), 0, 1)
        assert "zero" in told.value.fix
    with pytest.raises(Incompatible, match="relative positions"):
        Trainer(of("t5", corpus, "flash_attention"), torch.device("cpu"), 0, 1)
    with pytest.raises(Incompatible, match="not packed"):
        Trainer(of("t5", corpus, document_mask=True), torch.device("cpu"), 0, 1)


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    """A small T5 with a tokenizer."""
    folder = tmp_path_factory.mktemp("t5")
    e = of("t5", corpus)
    save_checkpoint(build(e.model), folder)
    global_batches(e, 0, 1).tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def command(*args):
    got = CliRunner().invoke(app, [str(a) for a in args])
    if got.exception and not isinstance(got.exception, SystemExit):
        raise got.exception
    assert got.exit_code == 0, got.output
    return got.stdout


def test_pairs(checkpoint, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": "the roof" * i, "completion": " peak model"}) + "\n" for i in (1, 9)))
    w = FineTune(data=str(data), tokenizer=str(checkpoint), packing=False, seq_len=12)
    examples = load_instructions(w, 300, whole=True)
    tokenizer, batches = examples.tokenizer, PairBatches(examples, 12, 2, start=7)
    short, long = (batches._rows([i]) for i in (0, 1))
    assert batches.batch(3).source.shape == (2, 12)
    answer = tokenizer.encode(" peak model").ids
    assert short.labels[0, : len(answer) + 1].tolist() == [*answer, examples.end]
    assert short.ids[0, : len(answer) + 1].tolist() == [7, *answer]
    assert (short.labels[0, len(answer) + 1 :] == IGNORE).all()
    read = [*tokenizer.encode("the roof").ids, examples.end]
    assert short.source[0, : len(read)].tolist() == read
    assert short.source_mask[0].tolist() == [i < len(read) for i in range(12)]
    assert long.source[0].tolist() == [*tokenizer.encode("the roof" * 9).ids, examples.end][-12:]


def test_fine_tuned_on_pairs_and_asked(checkpoint, tmp_path):
    data, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    pairs = {"the roof": " ridge peak", "a step": " gradient of", "memory": " is peak the", "model model": " bandwidth"}
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs.items()) * 8)
    options = ["--seq-len", 12, "--batch-size", 4, "--lr", "1e-2", "--steps", 40, "--out", out, "--json"]
    with pytest.raises(UserError, match="not packed"):
        command("finetune", checkpoint, "--data", data, *options)
    result = json.loads(command("finetune", checkpoint, "--data", data, "--no-packing", *options))
    assert result["losses"][-1] < 0.7 * result["losses"][0]
    model, tokenizer = load_checkpoint(out), load_tokenizer(str(out))
    end = tokenizer.token_to_id(END)

    def wanted(prompt):
        ids = torch.tensor([[*tokenizer.encode(prompt).ids, end]])
        return tokenizer.decode(generate(model, ids, 12, eos=end)[0, 1:].tolist())

    assert command("generate", out, "--prompt", "a step", "--max-tokens", 12).rstrip("\n") == wanted("a step")
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ["half \ud800", *pairs]))
    command("generate", out, "--input", prompts, "--out", answers, "--max-tokens", 12)
    bad, *lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert "surrogate" in bad["error"]
    assert [x["outputs"][0]["text"] for x in lines] == [wanted(p) for p in pairs]
    with pytest.raises(UserError, match="surrogate"):
        command("generate", out, "--prompt", "half \ud800")
    with pytest.raises(UserError, match="without the engine"):
        command("generate", out, "--prompt", "a", "--n", 2)


@pytest.mark.parametrize(
    "args",
    [["serve", "--port", 0], ["eval", "--text", "corpus"], ["compress", "--with", "gptq:bits=4", "--out", "out"]],
    ids=lambda a: a[0],
)
def test_what_only_decoders_do_is_refused(checkpoint, corpus, tmp_path, args, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = [str(corpus) if a == "corpus" else a for a in args]
    with pytest.raises(UserError, match="has an encoder and a decoder"):
        command(args[0], checkpoint, *args[1:])


def test_trained_weights_generate(checkpoint):
    model = load_checkpoint(checkpoint)
    out = generate(model, torch.arange(5, 15)[None].repeat(2, 1), 4, temperature=1.0, seed=3)
    assert out.shape == (2, 5)
    assert (out[:, 0] == 0).all()
