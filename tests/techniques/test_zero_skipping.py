import pytest

from ridgeline import experiments
from ridgeline.graph import decode_graph, prefill_graph
from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.cells.generation_cell import generation_cell
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.matrix import CPU, TINY
from ridgeline.techniques.registry import techniques_of

OPT = TINY.changed(activation="relu", gated=False)


def plan(*calls, model=OPT, **workload):
    e = experiments.make("llama-tiny", "a100", {"kind": "generate", "prompt_len": 20, "output_len": 4, **workload}, [])
    from ridgeline.spec.device import Cluster
    from ridgeline.spec.plan import Plan
    from ridgeline.techniques.registry import check, normalize

    e = e.model_copy(update={"model": model, "cluster": Cluster(device=CPU), "plan": Plan.parse(list(calls))})
    e = normalize(e)
    check(e)
    return e


def test_share_of_flops_is_reported():
    import torch

    found = generation_cell(
        plan("zero_skipping:attention=true,block=4,most=1"), CellOptions(), RankContext(torch.device("cpu"))
    )
    metrics = found["metrics"]
    # 4 rounds and the memory run: prompts of 20 tokens are dense, every later token skips about half.
    assert 0.05 < metrics["skipped_inner_flops"]["value"] < 0.2
    assert 0 <= metrics["skipped_attention_flops"]["value"] < 1


def test_prediction_shrinks_decoding_only():
    e = plan("zero_skipping:zeros=0.75")
    (t,) = techniques_of(e.plan)
    for build, changes in ((prefill_graph, False), (decode_graph, True)):
        before = build(e)
        after = t.rewrite(build(e), e)
        old = {o.name: o for b in before.blocks for o in b.forward}
        new = {o.name: o for b in after.blocks for o in b.forward}
        assert {n for n in old if new[n] != old[n]} == ({"mlp.down_proj"} if changes else set())
        if changes:
            down, was = new["mlp.down_proj"], old["mlp.down_proj"]
            assert down.flops == was.flops / 4
            assert was.bytes - down.bytes == 0.75 * 32 * 64 * 4


def test_nothing_shrinks_where_skipping_does_not_pay():
    for call, size in (("zero_skipping:zeros=0.5", 1), ("zero_skipping:rows=2", 3)):
        e = plan(call, batch_size=size)
        (t,) = techniques_of(e.plan)
        assert t.rewrite(decode_graph(e), e).flops == decode_graph(e).flops


def test_refusals():
    with pytest.raises(Incompatible, match="no ReLU"):
        plan("zero_skipping", model=TINY)
    assert plan("zero_skipping:attention=true", model=TINY).plan.has("zero_skipping")
    with pytest.raises(Incompatible, match="fused kernel"):
        plan("zero_skipping:attention=true", "flash_attention")
    with pytest.raises(Incompatible, match="in codes"):
        plan("zero_skipping", "rtn")
