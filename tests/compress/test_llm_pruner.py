import json

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL, checkpoint, squeeze

from ridgeline import experiments
from ridgeline.graph import decode_graph, prefill_graph
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import token_loss
from ridgeline.runtime.structure import groups
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.pruning.llm_pruner import LLMPruner, _in_blocks
from ridgeline.techniques.pruning.llm_pruner_torch import saliency
from ridgeline.techniques.registry import techniques_of

BIG = {**LLAMA, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 96}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("big") / "model", BIG)


@pytest.mark.parametrize("measure", ["param_first", "vectorize", "param_second", "param_mix", "l2"])
def test_worth_by_loops(measure):
    """Against gradients of each window by themselves, summed entry by entry."""
    model = build(ModelSpec(**LLAMA), dtype=torch.float64)
    windows = torch.randint(0, 258, (3, 9), generator=torch.Generator().manual_seed(0))
    found = saliency(model, windows, measure)
    each = []
    for ids in windows:
        model.zero_grad()
        model.requires_grad_(True)
        (token_loss(model(ids[None, :-1], return_hidden=True), model.head, ids[None, 1:])[0] / 8).backward()
        each.append({n: p.grad.clone() for n, p in model.named_parameters()})
    group = groups(model.spec)["heads", 1]
    expected = torch.zeros(2)
    for part in group.parts:
        w = model.get_parameter(part.parameter).detach()
        g = sum(grads[part.parameter] for grads in each) / 3
        s = sum(grads[part.parameter] ** 2 for grads in each) / 3
        worth = {"param_first": (w * g).abs(), "vectorize": w * g, "param_second": w * w * s,
                 "param_mix": (w * g - w * w * s / 2).abs(), "l2": w * w}[measure]  # fmt: skip
        for unit in range(2):
            rows = range(unit * part.width, (unit + 1) * part.width)
            expected[unit] += abs(sum(worth.select(part.dim, r).sum().item() for r in rows))
    torch.testing.assert_close(found["heads", 1], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.35, 0.5])
def test_share_is_hit_as_nearly_as_channels_allow(ratio):
    for fields in (BIG, MIXTRAL, {**LLAMA, "intermediate_size": 64}):
        spec = ModelSpec(**fields)
        new = LLMPruner(ratio=ratio, multiple=1).resized(spec)
        inner = 3 * spec.hidden_size * spec.num_layers * max(1, spec.num_experts)
        assert abs(_in_blocks(new) - (1 - ratio) * _in_blocks(spec)) <= inner / 2
    wide = ModelSpec(**{**BIG, "hidden_size": 64})
    new = LLMPruner(ratio=ratio, mode="channel", multiple=1).resized(wide)
    assert new.hidden_size % 8 == 0  # transformers' Llama wants a multiple of the heads
    assert abs(new.num_parameters - (1 - ratio) * wide.num_parameters) <= 4 / 64 * wide.num_parameters
    free = LLMPruner(ratio=ratio, mode="channel", multiple=1).resized(wide.changed(family="mistral"))
    assert abs(free.num_parameters - (1 - ratio) * wide.num_parameters) <= 0.5 / 64 * wide.num_parameters + 1


@pytest.mark.parametrize("calls", ["llm_pruner:ratio=0.3,multiple=4", "llm_pruner:mode=channel,ratio=0.25,multiple=8"])
def test_result_is_a_plain_smaller_checkpoint(source, tmp_path, calls):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    report = squeeze(source, out, calls, form="dense")
    ours = load_checkpoint(out)
    e = experiments.make(str(source), "a100", {"kind": "generate", "prompt_len": 8, "output_len": 4}, [calls])
    (t,) = techniques_of(e.plan)
    assert ours.spec.num_parameters == t.resized(e.model).num_parameters == report["parameters"]
    for graph in (prefill_graph(e), decode_graph(e)):
        small = t.rewrite(graph.copy(), e)
        assert sum(p.numel * n for p, n in small.params) == ours.spec.num_parameters
        assert small.flops < graph.flops
        assert small.decode_steps == graph.decode_steps
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_codes_on_top(source, tmp_path):
    """Group sizes are checked against the widths that are left, and the layers that are left are coded."""
    with pytest.raises(Incompatible, match="does not divide"):
        squeeze(source, tmp_path / "a", "llm_pruner:ratio=0.3,multiple=4", "gptq:group_size=32")
    squeeze(source, tmp_path / "b", "llm_pruner:ratio=0.3,multiple=16", "gptq:group_size=16")
    assert load_checkpoint(tmp_path / "b").spec.num_parameters < load_checkpoint(source).spec.num_parameters


def test_worthless_units_go(tmp_path):
    """Channels that contribute nothing are found by every measure, so the model stays what it was."""
    dead = torch.arange(0, 96, 4)
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(5))

    def kill(model):
        for block in model.layers.values():
            block.mlp.down_proj.weight.data[:, dead] = 0
            block.mlp.up_proj.weight.data[dead] = 0

    source = checkpoint(tmp_path / "m", BIG, change=kill)
    expected = load_checkpoint(source)(ids)
    spec = ModelSpec(**BIG)
    ratio = 3 * 32 * 24 * 2 / _in_blocks(spec)
    for measure in ("param_first", "vectorize", "param_second", "param_mix"):
        out = tmp_path / measure
        squeeze(source, out, f"llm_pruner:ratio={ratio:.4f},heads=false,importance={measure},multiple=24", form="dense")
        model = load_checkpoint(out)
        assert model.spec.intermediate_size == 72
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-5)


def test_refusals():
    def ask(model, call):
        return experiments.make(model, "a100", {"kind": "generate"}, [call])

    with pytest.raises(Incompatible, match="LayerNorm"):
        ask("gpt2-tiny", "llm_pruner:mode=channel")
    with pytest.raises(Incompatible, match="heads=False"):
        ask("gpt2-tiny", "llm_pruner:ratio=0.5")
    assert ask("gpt2-tiny", "llm_pruner:heads=false").plan.has("llm_pruner")
    with pytest.raises(Incompatible, match="nothing of"):
        ask("llama-tiny", "llm_pruner:ratio=0.001,multiple=64")


@pytest.mark.parametrize("measure", ["param_first", "vectorize", "param_second", "param_mix"])
def test_worth_is_of_what_a_unit_does(measure):
    """Moving scale from one projection of a channel to the other changes nothing; its weights' size would."""
    model = build(ModelSpec(**LLAMA), dtype=torch.float64)
    windows = torch.randint(0, 258, (3, 9), generator=torch.Generator().manual_seed(0))
    worth, size = saliency(model, windows, measure), saliency(model, windows, "l2")
    factor = torch.linspace(0.1, 10, 48, dtype=torch.float64)
    for block in model.layers.values():
        block.mlp.up_proj.weight.data.mul_(factor[:, None])
        block.mlp.down_proj.weight.data.div_(factor)
    moved, moved_size = saliency(model, windows, measure), saliency(model, windows, "l2")
    for layer in range(2):
        torch.testing.assert_close(moved["inner", layer], worth["inner", layer], rtol=1e-4, atol=1e-12)
        assert not torch.allclose(moved_size["inner", layer], size["inner", layer], rtol=0.1)
