"""The graph's parameters and saved activations are those of the real model."""

import pytest
import torch
from tests.graph.conftest import crossed, fitting

from ridgeline import catalog, experiments, nn
from ridgeline.graph import prefill_graph, training_graph
from ridgeline.graph.build_graph import kv_cache_bytes


def test_parameters_of_every_family(spec, twins):
    g = twins(spec).graph()
    real = dict(nn.build(spec, device="meta").named_parameters())
    listed = {p.name: p.shape for p in spec.parameters()}
    assert {name: tuple(p.shape) for name, p in real.items()} == listed
    assert sum(p.numel * n for p, n in g.params) == spec.num_parameters == sum(p.numel() for p in real.values())
    assert sum(p.stored_bytes * n for p, n in g.params) == sum(p.nbytes for p in real.values())
    for stack, count in (("encoder", spec.encoder_layers),):
        assert sum(b.repeat for b in g.blocks if b.name == stack) == count
    # Block by block, not only in the sum: one block for each kind of layer.
    layers = [b for b in g.blocks if b.name == "layers"]
    kinds = [spec.layer_kind(i) for i in range(spec.num_layers)]
    for block, at in zip(layers, (kinds.index(kind) for kind in sorted(set(kinds))), strict=True):
        one = {f"layers.{at}.{p.name}": p.shape for p in block.params}
        assert one == {name: shape for name, shape in listed.items() if name.startswith(f"layers.{at}.")}
    assert sum(b.repeat for b in layers) == spec.num_layers


@pytest.mark.parametrize("name", catalog.models())
def test_parameters_of_every_catalog_model(name):
    spec = catalog.model(name)
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        workload = {"kind": "pretrain", "seq_len": 8, "batch_size": 1, "dtype": dtype}
        g = training_graph(experiments.make(name, "a100", workload, []))
        assert sum(p.numel * n for p, n in g.params) == spec.num_parameters
        assert sum(p.stored_bytes * n for p, n in g.params) == width * spec.num_parameters


def really_saved(twins):
    """Bytes that autograd keeps from forward to backward: each storage once; no parameters, inputs or rope tables."""
    run, given = twins.real(), twins.inputs()
    ids = given[0]
    for prepare in run.hooks.before_step:
        prepare(0)
    known = {p.untyped_storage().data_ptr() for p in run.model.parameters()} | {
        t.untyped_storage().data_ptr() for t in given if t is not None
    }
    for windowed in (False, True):  # constants, which the graph counts as buffers
        tables = run.model.rope(windowed, None, 0, ids.shape[1], ids.device, torch.float32) or ()
        known |= {t.untyped_storage().data_ptr() for t in tables}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return t

    low = run.compute_dtype
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", low, enabled=low is not None),
    ):
        loss = run.call(*given)
    assert loss.requires_grad
    return sum(s.nbytes() for s in kept.values())


PLANS = {
    "naive": [],
    "flash": ["flash_attention"],
    "lora": ["lora:rank=4"],
    "lora-o-down": ["lora:rank=4,targets=o_proj+down_proj"],
    "lora-flash": ["lora:rank=4", "flash_attention"],
    "lora-o-flash": ["lora:rank=4,targets=o_proj", "flash_attention"],
    "lora-rtn": ["lora:rank=4", "rtn"],
    "lora-all": ["lora:rank=4,targets=all-linear"],
    "lora-layer": ["lora:rank=4,targets=layers.1.*"],
    "lora-dropout": ["lora:rank=4,targets=all-linear,dropout=0.1"],
    "dora": ["lora:rank=4,targets=all-linear,dora=true"],
    "bitfit": ["bitfit"],
    "bottleneck-down": ["bottleneck_adapter:size=4"],
    "diff": ["diff_pruning"],
    "mask": ["mask_tuning"],
    "eagle": ["eagle"],
}


@pytest.mark.parametrize(("spec", "plan"), crossed(PLANS, "naive"), indirect=["spec"])
def test_saved_activations(spec, twins, plan):
    if spec.num_experts and "down" in plan:
        pytest.skip("experts are no plain linear layers")
    if plan == "eagle" and (not spec.causal or spec.is_encoder_decoder):
        pytest.skip("no decoder")
    both = twins(spec, fitting(spec, PLANS[plan]), seq_len=48)
    g, plain = both.graph(), twins(spec, seq_len=48).graph()
    saved = sum(b.saved_bytes * b.repeat for b in g.blocks) + g.buffers - plain.buffers
    if not ((spec.sliding_window or spec.score_changes) and "flash" in plan):  # a mask is a buffer, one for all layers
        assert g.buffers == plain.buffers
    # The scaled queries of the unfused backend, and a router's small tensors, are all that may differ.
    assert saved == pytest.approx(really_saved(both), rel=0.03 if spec.num_experts else 0.005)


MIXED = {"naive": [], "flash": ["flash_attention"], "lora-flash": ["lora:rank=4", "flash_attention"]}


@pytest.mark.parametrize("plan", MIXED)
def test_saved_activations_in_mixed_precision(spec, twins, plan):
    """Here the low copies of the weights are among what autograd keeps; the graph lists them beside the parameters. A
    GPU would compute changed scores by another kernel."""
    on = "xeon" if spec.score_changes else "a100"
    both = twins(spec, ["mixed_precision", *fitting(spec, MIXED[plan])], on, seq_len=48)
    g = both.graph()
    kept = sum(b.saved_bytes * b.repeat for b in g.blocks) + sum(p.numel * p.working_bytes * n for p, n in g.params)
    kept += g.buffers - twins(spec, (), on, seq_len=48).graph().buffers
    assert kept == pytest.approx(really_saved(both), rel=0.1 if spec.num_experts else 0.05)


def test_key_value_cache(spec):
    if not spec.causal:
        pytest.skip("an encoder has no cache")
    workload = {"kind": "generate", "prompt_len": 10, "output_len": 6, "batch_size": 3, "dtype": "bf16"}
    g = prefill_graph(experiments.make(spec.model_dump(), "a100", workload, []))
    each = 2 * spec.num_kv_heads * spec.head_dim if spec.kv_lora_rank is None else spec.kv_lora_rank + spec.rotary_dim
    tokens = 16 + spec.is_encoder_decoder  # the source, then the start token and all that follow
    by_hand = spec.num_layers * each * 3 * tokens * 2
    assert g.kv_cache == kv_cache_bytes(spec, 3, tokens, "bf16") == by_hand
