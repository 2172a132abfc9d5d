"""The graph's FLOPs equal what PyTorch's own counter sees in the real model, to the last one."""

from functools import cache

import pytest
import torch
from tests.graph.conftest import FAMILIES, crossed, fitting
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from ridgeline import experiments, nn
from ridgeline.graph import decode_graph, prefill_graph
from ridgeline.predict.common import rewritten
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.registry import check

aten = torch.ops.aten


def _fused(q, k, v, *_, out_shape=None, **__):
    return sdpa_flop_count(q, *_every_head(q, k, v))


def _fused_backward(grad, q, k, v, *_, out_shape=None, **__):
    return sdpa_backward_flop_count(grad, q, *_every_head(q, k, v))


def _every_head(q, k, v):
    # Before PyTorch 2.13 its formulas refuse groups of heads.
    return ((*q[:2], *shape[2:]) for shape in (k, v))


def _bmm(a, b, *_, out_shape=None, **__):
    # A matrix-vector product is aten.mv, which the counter leaves out; matmul sometimes runs one as a bmm. That of one
    # query and one key is none.
    return 0 if b[-1] == 1 < a[1] else 2 * a[0] * a[1] * a[2] * b[2]


# The counter knows CUDA's fused kernels only; on the meta device there are none, so flash runs on the CPU's.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _fused,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
    aten.bmm: _bmm,
}


class Counter(TorchDispatchMode):
    """Sums PyTorch's formulas as its own counter does, which also counts for every module, in three times the time."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        formula = _formula(func)
        if formula is None and _decomposes(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


@cache
def _formula(func):
    own = FORMULAS.get(func.overloadpacket)
    return flop_registry.get(func.overloadpacket) if own is None else shape_wrapper(own)


@cache
def _decomposes(func):
    return func._can_decompose()


def counted(work):
    with Counter() as counter:
        result = work()
    return counter.total, result


def in_graph(g, direction):
    return sum(op.flops * b.repeat for b in g.blocks for op in getattr(b, direction))


def assert_equal_flops(twins, device="cpu"):
    run, given, g = twins.real(device), twins.inputs(device), twins.graph()
    forward, loss = counted(lambda: run.call(*given))
    backward, _ = counted(loss.backward)
    assert (in_graph(g, "forward"), in_graph(g, "backward")) == (forward, backward)
    assert g.flops == forward + backward
    return forward, backward, g


@pytest.mark.parametrize("spec", ["deepseek_v3", "llama-mha", "t5"], indirect=True)
def test_the_counter_counts_as_pytorchs_own(spec, twins):
    for plan, device in (([], "meta"), ([], "cpu"), (["flash_attention"], "cpu")):
        twin = twins(spec, [] if spec.is_encoder_decoder else plan)
        run, given = twin.real(device), twin.inputs(device)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as whole:
            total, _ = counted(lambda run=run, given=given: run.call(*given).backward())
        assert whole.get_total_flops() == total > 0


def test_training_step_on_the_meta_device(spec, twins):
    forward, backward, g = assert_equal_flops(twins(spec), "meta")
    assert backward == 2 * forward
    assert g.model_flops == g.flops


def test_flash_attention(spec, twins):
    naive = twins(spec).graph()
    _, backward, g = assert_equal_flops(twins(spec, ["flash_attention"]))
    # The fused backward multiplies the scores out once more: 5 products where the unfused one needs 4. Its values are
    # as wide as its keys: narrower ones take part in one product of forward and two of backward.
    each = 2 * 2 * spec.num_heads * 24 * 24 * spec.num_layers
    narrower = each * (spec.head_dim - spec.context_size // spec.num_heads)
    assert backward - in_graph(naive, "backward") == each * spec.head_dim + 2 * narrower
    assert in_graph(g, "forward") == in_graph(naive, "forward") + narrower


def test_capped_attention_leaves_out_the_future(twins):
    spec = ModelSpec.from_config({**FAMILIES["gemma2"], "max_position_embeddings": 512}, name="gemma2")
    naive = twins(spec, seq_len=300).graph()
    forward, _, _ = assert_equal_flops(twins(spec, ["flash_attention"], seq_len=300), "meta")
    whole = 2 * 2 * 2 * spec.num_heads * spec.head_dim * 300**2  # of one of three layers: the others have a window
    left = 128 * 128 + 128 * 256 + 44 * 300
    assert forward == in_graph(naive, "forward") - whole * (1 - left / 300**2)


RECOMPUTED = ["policy=full", "policy=selective", "every=2", "every=3"]


@pytest.mark.parametrize(("spec", "options"), crossed(RECOMPUTED, "policy=full"), indirect=["spec"])
def test_recompute(spec, twins, options):
    plain = twins(spec).graph()
    _, _, g = assert_equal_flops(twins(spec, [f"recompute:{options}"]))
    assert plain.flops < g.flops < plain.flops + in_graph(plain, "forward")
    assert g.model_flops == plain.flops


def test_recompute_to_the_end_of_each_block(spec, twins):
    plain = twins(spec).graph()
    _, _, g = assert_equal_flops(twins(spec, ["recompute:early_stop=false"]))
    assert g.flops - plain.flops == sum(o.flops * b.repeat for b in plain.blocks if b.is_layer for o in b.forward)


def test_recompute_with_flash_attention(spec, twins):
    assert_equal_flops(twins(spec, ["recompute", "flash_attention"]))


TARGETS = ["q_proj+v_proj", "o_proj", "down_proj", "all-linear", "layers.1.attention.*"]
MORE_TARGETS = ["k_proj", "q_proj+k_proj+v_proj+o_proj", "up_proj", "v_proj+up_proj"]


@pytest.mark.parametrize(("spec", "targets"), [
    *crossed(TARGETS, "all-linear"),
    *(pytest.param(f, t, marks=pytest.mark.nightly, id=f"{f} {t}") for f in FAMILIES for t in MORE_TARGETS),
], indirect=["spec"])  # fmt: skip
@pytest.mark.parametrize(
    "others",
    [[], *(pytest.param(p, marks=pytest.mark.nightly) for p in (["flash_attention"], ["rtn", "recompute"]))],
    ids="+".join,
)
def test_lora_trains_nothing_below_the_first_adapter(spec, twins, targets, others):
    if spec.num_experts and ("down" in targets or "up" in targets):
        pytest.skip("experts are no plain linear layers")
    both = twins(spec, fitting(spec, [f"lora:rank=4,targets={targets}", *others]))
    _, backward, g = assert_equal_flops(both)
    weights = {p.name for p, _ in g.params if p.trainable}
    assert weights
    assert all(name.endswith((".lora_a", ".lora_b")) for name in weights)
    assert not [o.name for b in g.blocks for o in b.backward if o.name.endswith(".dw") and ".lora_" not in o.name]
    if not others:
        assert backward < in_graph(twins(spec).graph(), "backward")


@pytest.mark.parametrize(("spec", "attention"), crossed(["naive", "flash_attention"], "naive"), indirect=["spec"])
def test_a_draft_head_trains_beside_a_frozen_model(spec, twins, attention):
    """The model runs forward only; its output layer reads two hidden states of each place."""
    if not spec.causal or spec.is_encoder_decoder:
        pytest.skip("no decoder")
    others = [attention] if attention == "flash_attention" else []
    both = twins(spec, ["eagle", *others])
    forward, backward, g = assert_equal_flops(both)
    head = 2 * spec.hidden_size * spec.vocab_size * g.tokens
    plain = in_graph(twins(spec, others).graph(), "forward")
    layer = sum(o.flops for b in g.blocks if b.name == "layers.draft" for o in b.forward)
    assert forward == plain + layer + head
    trained = sum(p.numel for p, _ in g.params if p.trainable)
    assert trained == sum(p.numel() for n, p in both.real().root.named_parameters() if p.requires_grad)
    assert backward < 3 * (layer + head)


@pytest.mark.parametrize(("spec", "bits"), crossed(["4", "8"], "4"), indirect=["spec"])
def test_rtn_changes_no_arithmetic(spec, twins, bits):
    plan = fitting(spec, ["lora:rank=4"])
    lora = twins(spec, plan).graph()
    _, _, g = assert_equal_flops(twins(spec, [*plan, f"rtn:bits={bits}"]))
    assert g.flops == lora.flops


@pytest.mark.parametrize("plan", [[], ["flash_attention"], ["rtn"]], ids=lambda p: "+".join(p) or "naive")
def test_prefill_and_decode(spec, plan):
    if not spec.causal:
        pytest.skip("an encoder does not generate")
    workload = {"kind": "generate", "prompt_len": 12, "output_len": 8, "batch_size": 2, "dtype": "fp32"}
    e = experiments.make(spec.model_dump(), "a100", workload, plan)
    model = nn.build(spec)
    model.set_attention("flash" if plan == ["flash_attention"] else "naive")
    cache = nn.make_cache(model, 2, 9 if spec.is_encoder_decoder else 20)
    with torch.no_grad():
        prompt = torch.zeros(2, 12, dtype=torch.long)
        given = (prompt[:, :1], cache, prompt) if spec.is_encoder_decoder else (prompt, cache)
        prefill, _ = counted(lambda: nn.prefill(model, *given))
        decode, _ = counted(lambda: nn.decode(model, torch.zeros(2, dtype=torch.long), cache))
    made = check(e)
    first, step = rewritten(prefill_graph(e), e, made), rewritten(decode_graph(e, 13), e, made)
    assert (first.flops, step.flops) == (prefill, decode)
    assert not any(b.backward or b.saved for g in (first, step) for b in g.blocks)
    head = next(op for op in first.blocks[-1].forward if op.name == "head.out")
    assert head.shape[0] == 2  # only the last position of each sequence
    assert first.kv_cache == sum(t.nbytes for c in cache.values() for t in {c.keys, c.values, *(c.source or ())})
    assert step.decode_steps == 7  # the prefill yields the first of the eight
