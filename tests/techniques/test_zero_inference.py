"""ZeRO-Inference: the same tokens from weights that rest elsewhere, within the predicted memory, with what goes wrong
told; its prediction; and the placement that `--device-memory` asks for."""

import gc
import os
import re
import resource
import signal

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL, checkpoint, squeeze
from tests.forked import Fork
from torch import nn

from ridgeline import catalog, experiments
from ridgeline.cli import app
from ridgeline.measure.cells import generation_cell
from ridgeline.measure.cells.generation_cell import build_generation
from ridgeline.nn.memory.layer_stream import FileSource, layer_tensors
from ridgeline.nn.memory.meter import Meter, process_memory
from ridgeline.nn.model import fused
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.predict import predict
from ridgeline.runtime import resting_weights
from ridgeline.runtime.resting_weights import RestingWeights
from ridgeline.search.placement import MemoryLimits, place
from ridgeline.spec.device import Cluster, Host
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.sizes import parse_size
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.memory import moe_offload_torch
from ridgeline.techniques.memory.zero_inference import ZeroInference
from ridgeline.techniques.registry import resolve

HERE = Cluster(device=CPU)
DEEP = {**LLAMA, "num_layers": 6}
GPT2 = {**{k: v for k, v in LLAMA.items() if k != "num_kv_heads"}, "family": "gpt2", "num_layers": 3,
        "num_kv_heads": 4, "position": "learned", "norm": "layernorm", "activation": "gelu_tanh", "gated": False,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True}  # fmt: skip


def built(source, *plan, **work):
    """An experiment of task generate on a checkpoint, and its model as measurements build it."""
    w = {"kind": "generate", "checkpoint": str(source), "batch_size": 2, "prompt_len": 8, "output_len": 6, **work}
    e, techniques = resolve(experiments.make(str(source), HERE, w, list(plan)))
    return e, build_generation(e, torch.device("cpu"), techniques).model


@torch.inference_mode()
def tokens(model, count=6, batch=2):
    """Greedy tokens [count, batch] after a fixed prompt, and the last logits."""
    prompt = torch.randint(258, (batch, 8), generator=torch.Generator().manual_seed(1))
    cache = make_cache(model, batch, 8 + count)
    found = [prefill(model, prompt, cache)]
    for _ in range(count - 1):
        found.append(decode(model, found[-1].argmax(-1), cache))
    return torch.stack([logits.argmax(-1) for logits in found]), found[-1]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("deep") / "m", DEEP)


@pytest.mark.parametrize("fields", [DEEP, GPT2, {**MIXTRAL, "num_layers": 3}], ids=["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("options", ["parameters=cpu", "parameters=nvme", "parameters=nvme,prefetch=0",
                                     "parameters=cpu,prefetch=2,resident=1", "parameters=nvme,prefetch=9",
                                     "parameters=nvme,fetch=modules,prefetch=0.5",
                                     "parameters=nvme,fetch=modules,prefetch=0",
                                     "parameters=cpu,fetch=modules,prefetch=2,resident=1"])  # fmt: skip
def test_the_same_tokens_and_logits(tmp_path, fields, options):
    source = checkpoint(tmp_path / "m", fields)
    want = tokens(built(source)[1])
    got = tokens(built(source, f"zero_inference:{options},path={tmp_path / 'scratch'}")[1])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    if "nvme" in options:  # Llama's files hold every tensor as it is used, GPT-2's and Mixtral's do not
        assert (tmp_path / "scratch").exists() == (fields is not DEEP)
        assert not (tmp_path / "scratch").exists() or not os.listdir(tmp_path / "scratch")


@pytest.mark.parametrize("resident", [0, 2, 6])
@pytest.mark.parametrize(("fetch", "prefetch"), [("layers", 0), ("layers", 1), ("layers", 3), ("modules", 0),
                                                 ("modules", 0.5), ("modules", 2)])  # fmt: skip
def test_no_more_weights_on_the_device_than_predicted(deep, resident, prefetch, fetch):
    e, model = built(deep, f"zero_inference:parameters=cpu,prefetch={prefetch},resident={resident},fetch={fetch}")
    meter = Meter(model)
    meter.register(model.parameters(), "parameters")
    with meter:
        tokens(model)
    predicted = next(m.bytes for m in predict(e).memory if m.category == "parameters")
    tensors = [t for layer in model.layers.values() for t in layer_tensors(layer)]
    assert meter.peak.categories["parameters"] == pytest.approx(predicted, abs=len(tensors) * 64 + 4 * 4096)


def test_a_checkpoint_is_never_whole_in_memory(tmp_path):
    """Weights of 67 MB; the process grows by less than half of that while it loads them and generates."""
    wide = {**DEEP, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "intermediate_size": 1024,
            "num_layers": 6}  # fmt: skip
    source = checkpoint(tmp_path / "m", wide)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    assert size > 6e7
    gc.collect()
    before = process_memory()["rss_anonymous"]
    _, model = built(source, "zero_inference:parameters=nvme")
    tokens(model)
    assert process_memory()["rss_anonymous"] - before < size / 2


SYSTEMS = [n for n in catalog.systems() if catalog.system(n).reported.workload.get("kind") == "generate"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_generating_system_runs_as_its_small_plan(name, tmp_path):
    """On a small model of the family of its paper's; of weights that it quantizes first, against those."""
    system = catalog.system(name)
    model = catalog.model(system.reported.model)
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "activation": model.activation}
    source = checkpoint(tmp_path / "m", {**(MIXTRAL if model.num_experts else GPT2), **wide, "num_layers": 4})
    small = {"experts=4": "experts=2", "hot_neurons": "hot_neurons:hot=0.25,tokens=256"}
    plan = [next((call.replace(a, b) for a, b in small.items() if a in call), call) for call in system.shrunk.plan]
    want = tokens(built(source, *plan[:-1], batch_size=24)[1], batch=24)
    got = tokens(built(source, *plan, batch_size=24)[1], batch=24)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


def test_layers_on_the_device_are_spread_evenly():
    e = experiments.make("llama2-7b", "a100", {"kind": "generate"}, ["zero_inference:resident=24"])
    (t,) = resolve(e)[1]
    assert sorted(t.streamed(32)) == list(range(3, 32, 4))


def test_another_technique_changes_the_weights_first(deep):
    want = tokens(built(deep, "rtn:bits=8")[1])
    got = tokens(built(deep, "rtn:bits=8", "zero_inference:parameters=nvme")[1])
    assert torch.equal(got[1], want[1])


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_is_told(tmp_path):
    source = checkpoint(tmp_path / "m", DEEP)
    _, model = built(source, "zero_inference:parameters=nvme,prefetch=0")
    file = source / "model.safetensors"
    os.truncate(file, 4096)
    with pytest.raises(UserError, match=r"model\.safetensors ends after byte \d+, \d+ are needed"):
        tokens(model)


def test_a_file_that_is_deleted_meanwhile_is_still_read(tmp_path):
    source = checkpoint(tmp_path / "m", DEEP)
    want = tokens(built(source)[1])
    _, model = built(source, "zero_inference:parameters=nvme")
    (source / "model.safetensors").unlink()
    assert torch.equal(tokens(model)[1], want[1])


def test_a_disk_that_fills_is_told_and_nothing_is_left(tmp_path):
    source = checkpoint(tmp_path / "m", GPT2)
    folder = tmp_path / "scratch"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match="while weights were written there"):
            built(source, f"zero_inference:parameters=nvme,path={folder}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(folder) == []


def killed(send, source, folder):
    _, model = built(source, f"zero_inference:parameters=nvme,path={folder}", dtype="bf16")
    tokens(model)
    send(os.listdir(folder))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing(deep, tmp_path):
    """With weights in another dtype than the checkpoint's, which are written to ``path``."""
    process = Fork(killed, deep, tmp_path)
    assert process.answer() == []
    assert process.wait(60) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    source = checkpoint(tmp_path / "m", GPT2)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        built(source, f"zero_inference:parameters=nvme,path={tmp_path / 'file'}")


def test_more_resident_layers_than_there_are():
    with pytest.raises(Incompatible, match="33 resident layers of 32"):
        experiments.make("llama2-7b", "a100", {"kind": "generate"}, ["zero_inference:resident=33"])


# ---- prediction ------------------------------------------------------------------------------------------------------


def predicted(*plan, batch=1, on="rtx4090", model="llama2-13b"):
    w = {"kind": "generate", "batch_size": batch, "prompt_len": 128, "output_len": 16}
    return predict(experiments.make(model, on, w, ["flash_attention", *plan]))


def test_a_decode_step_takes_as_long_as_its_slowest_stream():
    """13B in fp16 over PCIe 4.0 x16 at 80 % of its 32 GB/s, against the same step with all weights on the device."""
    device, layers = catalog.device("rtx4090"), 40
    bare = predicted().metrics["tpot_s"].value
    weights = layers * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) * 2
    copies = weights / (0.8 * device.host_link.bandwidth) + layers * device.host_link.latency
    assert predicted("zero_inference").metrics["tpot_s"].value == pytest.approx(copies, rel=1e-3)
    serial = predicted("zero_inference:prefetch=0").metrics["tpot_s"].value
    assert serial == pytest.approx(copies + bare, rel=1e-3)
    half = predicted("zero_inference:resident=20").metrics["tpot_s"].value
    assert half == pytest.approx(copies / 2, rel=1e-3)
    disk = predicted("zero_inference:parameters=nvme").metrics["tpot_s"].value
    assert disk == pytest.approx(weights / 6e9, rel=1e-3)


def test_modules_overlap_where_two_of_the_largest_have_room():
    """Feed-forward projections are 27 % of a layer of Llama 3 8B: half a layer holds one of them and three quarters
    hold two, which hides all that can be. A layer of Mixtral holds its experts beside its attention, which takes longer
    to come than experts compute."""

    def tpot(model, prefetch):
        plan = f"zero_inference:fetch=modules,prefetch={prefetch}"
        return predicted(plan, model=model).metrics["tpot_s"].value

    for model, half, enough in (("llama3-8b", 0.5, 0.75), ("mixtral-8x7b", 0.75, 1)):
        assert tpot(model, 0) > tpot(model, half) > tpot(model, enough) == tpot(model, 2)
    for model, prefetch in (("llama2-13b", 0.5), ("llama3-8b", 0.75), ("gpt2", 0.75)):
        e = experiments.make(model, "rtx4090", {"kind": "generate"}, [])
        assert {t.prefetch for t in ZeroInference.choices(e)} == {1, prefetch}


@pytest.mark.parametrize(("prefetch", "says"), [
    ("0.3", "prefetch=0.3 of whole layers"), ("-0.5", "prefetch = -0.5 is not valid: Input should be greater than"),
    ("inf", "prefetch = inf is not valid: Input should be a finite number"),
])  # fmt: skip
def test_how_far_ahead_is_a_number_of_layers(prefetch, says):
    with pytest.raises(UserError, match=re.escape(says)):
        predicted(f"zero_inference:prefetch={prefetch}")


def test_weights_that_are_elsewhere_are_not_laid_together():
    """A served model's projections are merged after its weights have moved: no memory is taken for them."""
    layers = [nn.Linear(16, 8, bias=False).requires_grad_(False) for _ in range(2)]
    for layer in layers:
        for t in layer_tensors(layer):
            t.unbind(torch.device("cpu"))
    assert fused.lay_together(layers)
    assert all(layer.weight.untyped_storage().nbytes() == 4 for layer in layers)


def test_throughput_rises_with_the_batch_until_computation_is_the_slowest():
    rates = [predicted("zero_inference", batch=b, model="llama2-70b", on="a100").metrics["tokens_per_s"].value
             for b in (1, 8, 64, 4096)]  # fmt: skip
    assert rates[1] / rates[0] > 7
    assert rates[2] / rates[0] > 40
    assert rates[3] / rates[2] < 64


def test_what_rests_in_host_memory_must_fit_there():
    device = catalog.device("rtx4090")
    small = Host(name="small", cores=8, memory_bytes=16e9, memory_bandwidth=5e10)
    on = Cluster(device=device.model_copy(update={"host": small}))
    r = predicted("zero_inference", on=on)
    assert r.status == "infeasible"
    assert "GiB of host memory per node" in r.reason


def test_auto_keeps_as_many_layers_as_fit():
    w = {"kind": "generate", "batch_size": 1, "prompt_len": 128, "output_len": 16}
    e = experiments.make("llama2-13b", "rtx4090", w, ["flash_attention", "zero_inference:resident=auto"])
    chosen = next(c for c in e.plan.calls if c.name == "zero_inference").options["resident"]
    assert predicted(f"zero_inference:resident={chosen}").status == "ok"
    assert predicted(f"zero_inference:resident={chosen + 1}").status == "infeasible"


# ---- --device-memory -------------------------------------------------------------------------------------------------


def test_a_placement_within_its_limits(deep):
    catalog.allow_unprobed()
    size = sum(f.stat().st_size for f in deep.glob("*.safetensors"))
    work = {"max_num_batched_tokens": 16, "max_model_len": 32}
    roomy = place(deep, ["continuous_batching"], MemoryLimits(device=64 * size), sequences=2, **work)
    assert roomy.graph.resident_bytes == sum(p.stored_bytes * n for p, n in roomy.graph.params)
    tight = place(deep, ["continuous_batching"], MemoryLimits(device=int(size * 0.9)), sequences=2, **work)
    assert any(p.resident < 1 for p, _ in tight.graph.params)
    assert sum(m.bytes for m in tight.result.memory) <= size * 0.9
    on_device = sum(n for _, where, n in tight.rows if where == "device")
    assert tight.cache < on_device <= size * 0.9
    assert sum(n for what, _, n in tight.rows if what.startswith("weights of")) == pytest.approx(
        sum(p.stored_bytes * n for p, n in tight.graph.params)
    )


def test_nothing_fits(deep, tmp_path):
    catalog.allow_unprobed()
    with pytest.raises(UserError, match="does not fit into") as e:
        place(deep, [], MemoryLimits(device=10_000, host=10_000))
    assert "--disk PATH" in e.value.fix
    with pytest.raises(UserError, match="there is no folder"):  # and none is made of a name that was mistyped
        place(deep, [], MemoryLimits(device=10_000, disk=tmp_path / "mistyped"))
    assert not (tmp_path / "mistyped").exists()
    with pytest.raises(UserError, match="does not fit into") as e:
        place(deep, [], MemoryLimits(device=1_000_000))
    enough = parse_size(re.search(r"give (\S+ \w+) of device memory", e.value.fix)[1])
    place(deep, [], MemoryLimits(device=enough))
    with pytest.raises(UserError, match="does not fit into"):
        place(deep, [], MemoryLimits(device=int(0.97 * enough)))


def test_a_placement_that_is_asked_for_is_the_one(deep):
    """No other is added to it."""
    catalog.allow_unprobed()
    work = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "fp32"}
    found = place(deep, ["zero_inference:resident=1"], MemoryLimits(device=10_000_000), sequences=2, **work)
    assert [found.experiment.plan.option("zero_inference", k) for k in ("fetch", "resident")] == ["layers", 1]
    assert ("weights of layers", "host memory") in {row[:2] for row in found.rows}


def test_generate_names_what_its_engine_does_not_have(deep):
    with pytest.raises(UserError, match="flexgen is not in the serving engine, which `generate` and `serve` use"):
        app(["generate", str(deep), "--prompt", "abc", "--with", "flexgen"], standalone_mode=False)


@pytest.mark.parametrize("size", ["", "0", "1e400GiB"])
def test_no_amount_of_memory(deep, size):
    with pytest.raises(UserError, match="no amount of memory"):
        app(["generate", str(deep), "--prompt", "abc", "--device-memory", size], standalone_mode=False)


def test_generate_within_a_device_memory(deep, tmp_path, capfd):
    args = ["generate", str(deep), "--prompt", "abc", "--max-tokens", "6", "--ignore-eos", "--max-num-seqs", "2",
            "--max-model-len", "32", "--max-num-batched-tokens", "16"]  # fmt: skip
    app(args, standalone_mode=False)
    want = capfd.readouterr().out
    size = sum(f.stat().st_size for f in deep.glob("*.safetensors"))
    for more in (["--device-memory", str(size)], ["--device-memory", str(size), "--host-memory", "1kB",
                                                "--disk", str(tmp_path)]):  # fmt: skip
        app([*args, *more], standalone_mode=False)
        got = capfd.readouterr()
        assert got.out == want
        assert ("disk" if "--disk" in more else "host memory") in got.err
        assert "bound by" in got.err


def test_a_source_is_a_range_of_whole_pages(deep):
    """Reads are aligned as O_DIRECT wants it, whatever the place of a tensor in its file."""
    _, model = built(deep, "zero_inference:parameters=nvme")
    hook = next(iter(next(iter(model.layers.values()))._forward_pre_hooks.values()))
    found = hook.func.__self__
    assert all(isinstance(s, FileSource) for s in found.sources)
    for s in found.sources:
        for r in s.ranges:
            assert r.start % 4096 == r.length % 4096 == r.place % 4096 == 0
            assert r.needed <= r.length


@pytest.mark.parametrize(("model", "plan"), [
    (LLAMA, "zero_inference:parameters=nvme"), (LLAMA, "zero_inference:parameters=cpu"),
    (LLAMA, "flexgen:batches=1,weights_device=0,weights_host=50,cache_device=100,cache_host=0"),
    (MIXTRAL, "moe_offload:experts=1,parameters=nvme"),
], ids=["disk", "host", "flexgen", "experts"])  # fmt: skip
def test_a_compressed_checkpoint_is_read_a_layer_at_a_time(tmp_path, monkeypatch, model, plan):
    """Its codes are never in memory as a whole, so that it may be larger than that."""
    source = checkpoint(tmp_path / "m", {**model, "hidden_size": 64, "intermediate_size": 64, "num_layers": 4})
    squeeze(source, tmp_path / "small", "rtn:bits=4,group_size=32")
    want = tokens(built(tmp_path / "small")[1])
    held: list[int] = []
    put = RestingWeights.put

    def load(*args, **options):
        made = load_packed(*args, **options)
        models.append(made)
        return made

    def counted(self, tensors, names):
        coded = {n: m for n, m in models[0].named_modules() if isinstance(m, PackedLinear)
                 and (".experts." in n or "moe" not in plan)}  # fmt: skip
        layers = {n.split(".")[1] for n, m in coded.items()
                  if any(t.untyped_storage().nbytes() > 8 for t in m.parameters())}  # fmt: skip
        held.append(len(layers))
        return put(self, tensors, names)

    models: list = []
    freed: list[int] = []  # layers of which memory was given back to the system: malloc keeps what is freed
    monkeypatch.setattr(generation_cell, "load_packed", load)
    monkeypatch.setattr(RestingWeights, "put", counted)
    for module in (resting_weights, moe_offload_torch):
        monkeypatch.setattr(module, "return_freed_memory", lambda: freed.append(len(held)))
    _, moved = built(tmp_path / "small", f"{plan},path={tmp_path / 'scratch'}")
    assert max(held) == 1
    assert len(set(freed)) == (8 if "flexgen" in plan else 4)  # which stores attention and feed-forward part apart
    torch.testing.assert_close(tokens(moved)[1], want[1], rtol=1e-5, atol=1e-6)
    if (tmp_path / "scratch").exists():
        assert os.listdir(tmp_path / "scratch") == []
