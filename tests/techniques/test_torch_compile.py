"""Compiled blocks: what the compiler may not change, and what it cannot do without. Parity with plain steps, alone and
in pairs, is in ``test_parity.py``, by traced blocks; C++ takes long to compile."""

import shutil

import pytest
import torch
from tests.training import MODEL, curve_of, make_trainer

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.nn.model.init import build
from ridgeline.predict import predict
from ridgeline.spec.errors import UserError

LOW = ["mixed_precision", "flash_attention"]


def experiment(*plan, data=""):
    workload = {"kind": "pretrain", "seq_len": 32, "batch_size": 2, "steps": 3, **({"data": data} if data else {})}
    return make("llama-tiny", "local", workload, list(plan))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 300)
    return str(path)


def test_blocks_are_traced_whole_and_once(text):
    catalog.allow_unprobed()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trainer = make_trainer(experiment("flash_attention", "torch_compile:backend=aot_eager", data=text))
    for _ in range(2):
        trainer.step()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1  # one for all blocks


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"family": "gemma", "norm_offset": 1.0, "activation": "gelu_tanh", "output_norms": True},
        {"family": "gpt_oss", "activation": "swigluoai", "attention_sinks": True},
        {"family": "llama4_text", "qk_norm": True, "qk_norm_weight": False},
        {"family": "gpt_neox", "norm": "layernorm", "rotary_dim": 4, "gated": False, "activation": "gelu"},
    ],
    ids=lambda f: f.get("family", "llama"),
)
def test_every_gradient_of_compiled_blocks_is_the_plain_one(fields):
    torch._dynamo.reset()
    ids = torch.arange(24).view(2, 12)
    found = []
    for compiled in (False, True):
        model = build(MODEL.model_copy(update=fields))
        for block in model.blocks.values() if compiled else ():
            block.compile(backend="aot_eager", dynamic=False)
        torch.logsumexp(model(ids).float(), -1).sum().backward()
        found.append({n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()})
    plain, ours = found
    assert plain.keys() == ours.keys()
    for name, want in plain.items():
        assert (want - ours[name]).norm() <= 1e-4 * want.norm(), name


@pytest.mark.nightly
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.parametrize("plan", [[], LOW])
def test_compiled_steps_are_plain_ones(text, plan):
    catalog.allow_unprobed()
    torch._dynamo.reset()
    want, got = (curve_of(make_trainer(experiment(*plan, *more, data=text))) for more in ([], ["torch_compile"]))
    assert got.losses == pytest.approx(want.losses, rel=2e-3 if plan else 1e-5)
    assert got.norms == pytest.approx(want.norms, rel=2e-2 if plan else 1e-4)


def test_without_a_compiler_it_says_so(text, monkeypatch):
    catalog.allow_unprobed()
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(UserError, match=r"no C\+\+ compiler"):
        make_trainer(experiment("torch_compile", data=text))


def test_a_compiled_step_is_predicted_to_be_faster_where_operators_are_not_fused():
    work = {"kind": "pretrain", "seq_len": 4096, "batch_size": 4}  # operators take longer than their launches

    def said(*plan):
        found = predict(make("llama3.2-1b", "h100-sxm", work, [*LOW, *plan]))
        return found.metrics["step_time_s"].value, any("as without torch_compile" in note for note in found.notes)

    (plain, _), (compiled, same) = said(), said("torch_compile")
    assert 0.5 * plain < compiled < plain
    assert not same
    assert said("torch_compile:backend=aot_eager") == (plain, True)


def test_divided_experts_are_predicted_in_pieces():
    workload = {"kind": "pretrain", "seq_len": 2048, "batch_size": 16, "micro_batch_size": 1}
    plan = ["flash_attention", "expert_parallel:degree=8"]
    with pytest.raises(UserError, match="experts are all on one device"):
        make("mixtral-8x7b", "2x8xh100", workload, [*plan, "torch_compile"])
    eager, pieces = (predict(make("mixtral-8x7b", "2x8xh100", workload, [*plan, *more])).metrics["tokens_per_s"].value
                     for more in ([], ["torch_compile:pieces=true"]))  # fmt: skip
    assert pieces > eager
