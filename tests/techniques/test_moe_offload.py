"""Expert offloading: the same tokens, the predicted memory, a cache that does what a plain list does, and predictions
that follow from what is missing."""

import os
import random

import pytest
import torch
from tests.compressing import MIXTRAL, checkpoint, squeeze
from tests.techniques.test_zero_inference import HERE, built, tokens

from ridgeline import catalog, experiments
from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.cells.generation_cell import generation_cell
from ridgeline.nn.memory.expert_cache import ExpertCache
from ridgeline.nn.memory.layer_stream import HostSource, LayerTensor, layer_tensors
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import packed_layers
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster, Link
from ridgeline.spec.errors import Incompatible, UserError

DEEP = {**MIXTRAL, "num_layers": 3, "num_experts": 6}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("mixture") / "m", DEEP)


@pytest.mark.parametrize("options", [
    "experts=2", "experts=1,staging=1,guess=0", "experts=1,staging=1,guess=2", "experts=6,staging=1",
    "experts=3,policy=lfu", "experts=2,parameters=nvme", "experts=1,staging=8,guess=6,parameters=nvme",
])  # fmt: skip
def test_the_same_tokens_and_logits(mixture, tmp_path, options):
    want = tokens(built(mixture)[1], 8)
    got = tokens(built(mixture, f"moe_offload:{options},path={tmp_path / 'scratch'}")[1], 8)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)  # their addresses may choose other kernels
    assert not (tmp_path / "scratch").exists()  # a Mixtral's files hold each expert as it is used


def test_quantized_experts_move_as_they_are_stored(tmp_path):
    source = checkpoint(tmp_path / "m", {**MIXTRAL, "hidden_size": 64, "intermediate_size": 64})
    squeeze(source, tmp_path / "small", "rtn:bits=4,group_size=32")
    want = tokens(built(tmp_path / "small")[1])
    for tier in ("cpu", "nvme"):
        _, model = built(tmp_path / "small", f"moe_offload:experts=1,parameters={tier},path={tmp_path / 'scratch'}")
        torch.testing.assert_close(tokens(model)[1], want[1], rtol=1e-5, atol=1e-6)
        assert os.listdir(tmp_path / "scratch") == [] if tier == "nvme" else not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(("keep", "staging"), [(1, 1), (2, 4), (6, 2)])
def test_no_more_weights_on_the_device_than_predicted(mixture, keep, staging):
    e, model = built(mixture, f"moe_offload:experts={keep},staging={staging}")
    meter = Meter(model)
    meter.register(model.parameters(), "parameters")
    with meter:
        tokens(model)
    predicted = next(m.bytes for m in predict(e).memory if m.category == "parameters")
    rest = sum(layer_tensors(layer)[-1].nbytes for layer in model.layers.values())
    assert meter.peak.categories["parameters"] <= predicted + rest + 4096 * (3 * keep + staging)
    if keep < 6:
        assert predicted < sum(p.numel() * 4 for p in built(mixture)[1].parameters())


def test_a_file_that_shrinks_is_told(tmp_path):
    source = checkpoint(tmp_path / "m", DEEP)
    _, model = built(source, "moe_offload:experts=1,parameters=nvme,guess=0")
    os.truncate(source / "model.safetensors", 4096)
    with pytest.raises(UserError, match=r"model\.safetensors ends after byte"):
        tokens(model)


def test_what_a_generation_tells(mixture):
    w = {"kind": "generate", "checkpoint": str(mixture), "prompt_len": 8, "output_len": 8}
    e = experiments.make(str(mixture), HERE, w, ["moe_offload:experts=6"])
    metrics = generation_cell(e, CellOptions(), RankContext(torch.device("cpu")))["metrics"]
    assert metrics["expert_hit_share"]["value"] > 0.8  # each expert is missed once
    e = experiments.make(str(mixture), HERE, w, ["moe_offload:experts=1,guess=0"])
    metrics = generation_cell(e, CellOptions(), RankContext(torch.device("cpu")))["metrics"]
    assert 0 < metrics["expert_hit_share"]["value"] < 0.8
    assert metrics["expert_guess_recall"]["value"] == 0


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache(layers, experts, keep, staging, policy="lru"):
    """Experts whose weight is their number, and a cache of them."""
    owners = [[torch.nn.Module() for _ in range(experts)] for _ in range(layers)]
    tensors, sources = [], []
    for layer, row in enumerate(owners):
        tensors.append([])
        sources.append([])
        for e, owner in enumerate(row):
            value = torch.full((4,), float(10 * layer + e))
            owner.weight = torch.nn.Parameter(value.clone(), requires_grad=False)
            tensors[-1].append([LayerTensor(owner, "weight", torch.float32, torch.Size([4]))])
            sources[-1].append(HostSource(value.view(torch.uint8)))
            tensors[-1][-1][0].unbind(torch.device("cpu"))
    return ExpertCache(tensors, sources, torch.device("cpu"), keep, staging, policy), owners


def reference(kept, counts, needed, keep, policy):
    """What a layer keeps after a pass, by a plain list of experts (those used longest ago first); and the hits."""
    here = [e for e in needed if e in kept]
    for e in here + [e for e in needed if e not in here]:
        if e in kept:
            kept.remove(e)
        elif len(kept) == keep:
            kept.remove(kept[0] if policy == "lru" else min(kept, key=lambda k: counts[k]))
        kept.append(e)
        counts[e] += 1
    return len(here)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("keep", "staging"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_against_a_plain_list(policy, keep, staging):
    """Random needs and random guesses, right and wrong: what is kept and hit never depends on guesses."""
    draw = random.Random(keep * 10 + staging)
    found, owners = cache(3, 8, keep, staging, policy)
    kept, counts, hits, uses = [[] for _ in range(3)], [[0] * 8 for _ in range(3)], 0, 0
    for _ in range(60):
        for layer in range(3):
            needed = sorted(draw.sample(range(8), draw.randint(0, 4)))
            before = {e for e in needed if e in kept[layer]}
            order = []
            for e in found.use(layer, needed):
                assert torch.equal(owners[layer][e].weight, torch.full((4,), 10.0 * layer + e))
                order.append(e)
            assert sorted(order) == needed
            assert set(order[: len(before)]) == before
            missing = [e for e in order if e not in before]
            hits += reference(kept[layer], counts[layer], [*order[: len(before)], *missing], keep, policy)
            uses += len(needed)
            assert list(found.kept[layer]) == kept[layer]
            if draw.random() < 0.7:
                found.guess((layer + 1) % 3, draw.sample(range(8), draw.randint(1, 6)))
    assert (found.uses, found.hits) == (uses, hits)
    held = [b for layer in found.kept for b in layer.values()] + found._free + [b for b, _ in found._coming.values()]
    assert len(held) == len({id(b) for b in held}) == 3 * keep + staging
    assert len(found._coming) <= staging


def test_right_guesses_are_counted_and_cost_nothing_more():
    found, _ = cache(2, 4, 1, 2)
    list(found.use(0, [0]))
    found.guess(1, [2, 3])
    list(found.use(0, [0]))  # leaves both buffers free
    list(found.use(1, [2, 3]))
    assert (found.uses, found.hits, found.guessed) == (4, 1, 2)
    assert found.bytes == 3 * 16


# ---- prediction ------------------------------------------------------------------------------------------------------


def predicted(*plan, batch=1, on="rtx4090"):
    w = {"kind": "generate", "batch_size": batch, "prompt_len": 64, "output_len": 16}
    return predict(experiments.make("mixtral-8x7b", on, w, ["flash_attention", *plan]))


def test_missing_experts_cross_the_host_link():
    """One token of Mixtral needs 2 of 8 experts per layer, each of which is a transfer of its own."""
    link = catalog.device("rtx4090").host_link
    expert = 3 * 4096 * 14336 * 2
    needed, one = 2, expert / (0.8 * link.bandwidth) + link.latency
    none = predicted("moe_offload:experts=4,guess=0,hit_rate=0")
    some = predicted("moe_offload:experts=4,guess=0,hit_rate=0.5")
    assert none.metrics["tpot_s"].value - some.metrics["tpot_s"].value == pytest.approx(32 * 0.5 * needed * one)
    guessed = predicted("moe_offload:experts=4,guess=2,hit_rate=0.5,recall=1")
    assert guessed.metrics["tpot_s"].value == pytest.approx(32 * 0.5 * needed * one, rel=1e-2)
    assert some.metrics["tpot_s"].value > guessed.metrics["tpot_s"].value


@pytest.mark.parametrize("engine", ["vllm", "ridgeline"])
def test_an_iteration_fetches_the_experts_of_all_its_tokens(engine):
    """A prompt needs all eight, one token two; served alone, both arrive as in a pass of the model."""
    w = {"kind": "serve", "engine": engine, "concurrency": 1, "requests": 4, "prompt_len": 64, "output_len": 16}
    served = predict(experiments.make("mixtral-8x7b", "h100-sxm", w, ["moe_offload"])).metrics
    alone = predicted("moe_offload", on="h100-sxm").metrics
    assert served["ttft_s"].value == pytest.approx(alone["ttft_s"].value, rel=0.05)
    assert served["tpot_s"].value == pytest.approx(alone["tpot_s"].value, rel=0.05)
    assert served["ttft_s"].value > 3 * served["tpot_s"].value


def test_small_experts_wait_for_the_disk_to_begin():
    """As many requests as experts are missing, each with the disk's latency, guessed or not."""
    local = catalog.device("rtx4090")

    def tpot(plan, latency):
        disk = Link(name="disk", bandwidth=1e15, latency=latency)
        on = Cluster(device=local.model_copy(update={"disk": disk}))
        return predicted(f"moe_offload:parameters=nvme,{plan}", on=on).metrics["tpot_s"].value

    for plan, missing in (("guess=0,hit_rate=0", 2), ("guess=0,hit_rate=0.9", 0.2),
                          ("guess=2,hit_rate=0,recall=0.5", 2)):  # fmt: skip
        slow, fast = tpot(plan, 0.2), tpot(plan, 0.1)
        assert slow - fast == pytest.approx(32 * missing * 0.1, rel=0.02)


def test_kept_experts_take_memory_and_save_time():
    few, more = (predicted(f"moe_offload:experts={n}", on="a100") for n in (1, 4))
    held = [next(m.bytes for m in r.memory if m.category == "parameters") for r in (few, more)]
    assert held[1] - held[0] == pytest.approx(32 * 3 * 3 * 4096 * 14336 * 2, rel=1e-6)
    assert more.metrics["tpot_s"].value < few.metrics["tpot_s"].value


def test_refusals():
    with pytest.raises(Incompatible, match="has no experts"):
        experiments.make("llama2-7b", "a100", {"kind": "generate"}, ["moe_offload"])
    with pytest.raises(Incompatible, match="experts=9 of 8"):
        experiments.make("mixtral-8x7b", "a100", {"kind": "generate"}, ["moe_offload:experts=9"])


@pytest.mark.parametrize("how", ["gptq:bits=4,group_size=32,expert_bits=3", "rtn:bits=4,group_size=32,expert_bits=2"])
def test_attention_and_experts_in_different_bits(tmp_path, how):
    """The mixed quantization of the paper: its files hold both widths, and experts move in the smaller one."""
    source = checkpoint(tmp_path / "m", {**MIXTRAL, "hidden_size": 64, "intermediate_size": 64})
    squeeze(source, tmp_path / "small", how)
    narrow = int(how[-1])
    _, model = built(tmp_path / "small")
    assert {layer.bits for layer in packed_layers(model).values()} == {4, narrow}
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            assert layer.bits == (narrow if ".experts." in name else 4), name
    for wrong in ("bits=4", f"bits={narrow}", f"bits={narrow},expert_bits=4"):  # the plan says what is there
        with pytest.raises(UserError, match="holds codes of") as e:
            built(tmp_path / "small", f"rtn:{wrong},group_size=32")
        assert f"use rtn:bits=4,expert_bits={narrow}" in str(e.value)
    built(tmp_path / "small", f"rtn:bits=4,group_size=32,expert_bits={narrow}")
    want = tokens(model)
    for tier in ("cpu", "nvme"):
        _, moved = built(tmp_path / "small", f"moe_offload:experts=1,parameters={tier},path={tmp_path / 'scratch'}")
        torch.testing.assert_close(tokens(moved)[1], want[1], rtol=1e-5, atol=1e-6)


def test_bits_of_experts_are_predicted():
    w = {"kind": "generate", "batch_size": 1, "prompt_len": 64, "output_len": 8}

    def parameters(plan):
        r = predict(experiments.make("mixtral-8x7b", "a100-80g-sxm", w, [plan]))
        return next(m.bytes for m in r.memory if m.category == "parameters"), r.metrics["bits_per_weight"].value

    four, two, mixed = (parameters(f"gptq:group_size=64,{x}") for x in ("bits=4", "bits=2", "bits=4,expert_bits=2"))
    assert two[0] <= mixed[0] < four[0]
    assert two[1] < mixed[1] < four[1]
    experts = 32 * 8 * 3 * 4096 * 14336
    others = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    assert mixed[1] == pytest.approx((two[1] * experts + four[1] * others) / (experts + others))
    with pytest.raises(Incompatible, match="no experts"):
        experiments.make("llama2-7b", "a100", w, ["rtn:bits=4,expert_bits=3"])


def test_a_step_of_a_decoder_fetches_no_experts_of_the_encoder():
    """Half of the mixtures of Switch Transformers are in the encoder."""
    work = {"kind": "generate", "prompt_len": 64, "output_len": 4, "batch_size": 2}
    whole, offloaded = (
        predict(experiments.make("switch-base-8", "h100", work, plan)) for plan in ([], ["moe_offload:experts=1"])
    )
    held, less = (next(m.bytes for m in r.memory if m.category == "parameters") for r in (whole, offloaded))
    assert less < 0.6 * held
    slower = {k: offloaded.metrics[k].value / whole.metrics[k].value for k in ("ttft_s", "tpot_s")}
    assert slower["tpot_s"] > 1
    assert slower["ttft_s"] > 1
