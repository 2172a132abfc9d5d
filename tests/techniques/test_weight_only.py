"""Weight-only rows in generation: what is predicted to be held and stored is what is."""

import pytest
import torch
from tests.nn.test_packed_model import SPEC, write

from ridgeline import catalog, experiments
from ridgeline.nn.kernels import native
from ridgeline.nn.model.init import build
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import load_packed, packed_layers
from ridgeline.predict import predict
from ridgeline.runtime.build import Build
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Compress, Generate, Pretrain
from ridgeline.techniques.quantization.weight_only import WeightOnly
from ridgeline.techniques.registry import check, normalize, registry

CPU = Device(name="cpu", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=1e10, memory_bandwidth=1e10)
WIDE = SPEC.model_copy(update={"hidden_size": 128, "head_dim": 32, "intermediate_size": 256})
MOE = WIDE.model_copy(update={"family": "mixtral", "num_experts": 4, "experts_per_token": 2})


def generation(spec, *plan, **workload):
    w = Generate(prompt_len=8, output_len=4, **workload)
    return Experiment(model=spec, cluster=Cluster(device=CPU), workload=w, plan=Plan.parse(plan))


def built(e, model):
    run = Build(normalize(e), model, torch.device("cpu"))
    for technique in check(run.experiment):
        technique.build(run)
    return run.model


def parameter_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


CASES = ["bits=4,group_size=64", "bits=3,group_size=32,symmetric=false", "bits=8,group_size=0", "bits=2,group_size=16",
         "bits=8,group_size=0,symmetric=false", "bits=6,group_size=64"]  # fmt: skip


@pytest.mark.skipif(native.library() is None, reason="memory is predicted for the compiled kernels")
@pytest.mark.parametrize("spec", [WIDE, WIDE.model_copy(update={"tie_embeddings": True}), MOE])
@pytest.mark.parametrize("options", CASES)
def test_held_bytes_are_predicted_exactly(spec, options):
    e = generation(spec, f"gptq:{options}")
    model = built(e, build(spec))
    assert len(packed_layers(model)) == 2 * (4 + 3 * max(1, spec.num_experts))
    predicted = {m.category: m.bytes for m in predict(normalize(e)).memory}
    assert predicted["parameters"] == pytest.approx(parameter_bytes(model), rel=1e-12)


@pytest.mark.skipif(native.library() is None, reason="memory is predicted for the compiled kernels")
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_heads_codes_give_its_logits_and_are_predicted(tied):
    """Logits are those of the codes; a tied head's are held beside the table of tokens, which stays as it is."""
    spec = WIDE.model_copy(update={"tie_embeddings": tied})
    e = generation(spec, "rtn:bits=4,group_size=32,head_bits=8")
    whole, plain = build(spec), built(generation(spec, "rtn:bits=4,group_size=32"), build(spec))
    model = built(e, build(spec))
    layer = model.head.out
    assert isinstance(layer, PackedLinear)
    assert (layer.bits, layer.group_size) == (8, 32)
    assert torch.equal(model.embed.tokens.weight, whole.embed.tokens.weight)
    predicted, dense = (predict(normalize(x)) for x in (e, generation(spec, "rtn:bits=4,group_size=32")))
    held = {m.category: m.bytes for m in predicted.memory}["parameters"]
    assert held == pytest.approx(parameter_bytes(model), rel=1e-12)
    read = [next(r.bytes for r in x.breakdown if r.phase == "decode" and r.operator == "head.out") / 3
            for x in (predicted, dense)]  # fmt: skip
    assert read[1] - read[0] == pytest.approx(4 * spec.vocab_size * spec.hidden_size - parameter_bytes(layer))
    ids = torch.arange(24).view(2, 12)
    hidden = model(ids, return_hidden=True)
    assert torch.equal(hidden, plain(ids, return_hidden=True))
    weight = whole.head.out.weight
    grouped = weight.view(len(weight), -1, 32)
    scale = (grouped.abs().amax(-1, keepdim=True) * 2 / 255).half().float()
    rounded = ((grouped / scale).round().clamp(-128, 127) * scale).view_as(weight)
    torch.testing.assert_close(model(ids), hidden @ rounded.T, rtol=1e-4, atol=1e-4)
    model.tie()
    assert model.head.out is layer


@pytest.mark.parametrize(("spec", "options", "says"), [
    (WIDE, "bits=4,group_size=48,head_bits=8", "does not divide"),
    (WIDE.model_copy(update={"head": "classify", "num_labels": 2}), "bits=8,head_bits=8", "no head for the next token"),
])  # fmt: skip
def test_heads_that_cannot_be_quantized_are_refused(spec, options, says):
    with pytest.raises(Incompatible, match=says):
        check(normalize(generation(spec, f"rtn:{options}")))


QUANTIZERS = sorted(n for n, t in registry().items() if issubclass(t, WeightOnly) and "head_bits" in t.model_fields)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_head_stays_dense_where_it_is_stored(name):
    w, spec = Compress(checkpoint="m"), WIDE.model_copy(update={"max_positions": 4096})
    options = {**registry()[name].card.example, "head_bits": 8}
    plan = Plan(calls=(Call(name=name, options=options),))
    with pytest.raises(Incompatible, match="stays dense in task compress"):
        check(Experiment(model=spec, cluster=Cluster(device=CPU), workload=w, plan=plan))


def test_a_head_stays_dense_where_it_is_trained():
    w = Pretrain(seq_len=32, batch_size=1)
    e = Experiment(model=WIDE, cluster=Cluster(device=CPU), workload=w, plan=Plan.parse(["lora", "rtn:head_bits=8"]))
    with pytest.raises(Incompatible, match="stays dense in task pretrain"):
        check(normalize(e))


def test_a_tied_heads_codes_are_divided_with_its_words():
    """Over two ranks both the table and the codes of a head are halves, as an untied head is."""
    held = {}
    for tied in (False, True):
        for ranks, more in ((1, ()), (2, ("tensor_parallel:degree=2",))):
            model = catalog.model("llama3.2-1b").changed(name="m", tie_embeddings=tied)
            w = {"kind": "generate", "prompt_len": 8, "output_len": 4}
            e = experiments.make(model, f"{ranks}xh100-sxm", w, ["rtn:bits=8,head_bits=8", *more])
            held[tied, ranks] = {m.category: m.bytes for m in predict(e).memory}["parameters"]
    assert held[True, 1] == pytest.approx(held[False, 1], rel=1e-3)  # a table and codes both ways
    assert held[True, 2] == pytest.approx(held[False, 2], rel=1e-3)
    assert held[True, 2] < 0.51 * held[True, 1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 64, True), (3, 32, False), (8, 0, True), (5, 16, False)])
def test_checkpoint_bytes_are_predicted_exactly(tmp_path, tied, bits, group, symmetric):
    spec = WIDE.model_copy(update={"tie_embeddings": tied})
    path = write(tmp_path / "m", spec, bits, group, symmetric)
    file = path / "model.safetensors"
    with file.open("rb") as f:
        size = file.stat().st_size - 8 - int.from_bytes(f.read(8), "little")
    e = generation(spec, f"gptq:bits={bits},group_size={group},symmetric={symmetric}", checkpoint=str(path))
    metrics = predict(normalize(e)).metrics
    assert metrics["checkpoint_bytes"].value == size
    stored = [layer.bits for layer in packed_layers(built(e, load_packed(path))).values()]
    assert stored == [bits] * 14
    share = 16 + (0 if symmetric else bits)
    if group:
        assert metrics["bits_per_weight"].value == pytest.approx(bits + share / group)


def test_codes_of_other_bits_are_refused(tmp_path):
    path = write(tmp_path / "m", WIDE, 4, 32)
    e = generation(WIDE, "gptq:bits=3,group_size=32", checkpoint=str(path))
    with pytest.raises(UserError, match=r"holds codes of 4 bits in layers\.0\.attention\.q_proj, gptq asks for 3"):
        built(e, load_packed(path))


def test_a_dense_checkpoint_is_referred_to_compress(tmp_path):
    e = generation(WIDE, "gptq:bits=4,group_size=32", checkpoint=str(tmp_path))
    with pytest.raises(UserError, match="not compressed yet") as caught:
        built(e, build(WIDE))
    assert "ridgeline compress" in caught.value.fix
    rounded = built(generation(WIDE, "rtn:bits=4,group_size=32", checkpoint=str(tmp_path)), build(WIDE))
    assert len(packed_layers(rounded)) == 14  # which needs no calibration


@torch.inference_mode()
def test_rounded_weights_compute_nearly_the_same():
    ids = torch.arange(24).view(2, 12)
    want = build(WIDE)(ids)
    errors = []
    for bits in (8, 4, 2):
        got = built(generation(WIDE, f"gptq:bits={bits},group_size=32"), build(WIDE))(ids)
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[0] < 0.02 < 0.05 < errors[1] * 2 < errors[2]
