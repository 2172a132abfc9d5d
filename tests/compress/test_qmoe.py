import json

import pytest
import torch
from safetensors.torch import load_file
from tests.compressing import LLAMA, MIXTRAL, checkpoint, squeeze, text

from ridgeline.compress import walk
from ridgeline.nn.checkpoint.checkpoint import Reader, load_checkpoint
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.model.generate import generate
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.nn.quant.ternary import Ternary as Code
from ridgeline.nn.quant.ternary import TernaryLinear
from ridgeline.runtime.compress_build import Together
from ridgeline.runtime.solve.grid import TernaryGrid, nearest
from ridgeline.runtime.solve.sweep import relative_error, sweep
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.quantization.qmoe import BATCH_ELEMENTS, QMoE

WIDE = {**MIXTRAL, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("wide") / "model", WIDE)


def correlated(out, width, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=g) * 0.02
    x = torch.randn(4 * width, width, generator=g) @ torch.randn(width, width, generator=g)
    return weight, x.t() @ x / len(x)


@pytest.mark.parametrize("seed", range(3))
def test_sweep_on_the_ternary_grid_beats_rounding(seed):
    weight, gram = correlated(48, 96, seed)
    fitted = TernaryGrid().fit(weight)
    plain = nearest(weight, fitted)
    solved = sweep(weight, gram, fitted, act_order=True, damp=0.1).weight
    assert relative_error(weight, solved, gram) < relative_error(weight, plain, gram)
    for row, low, high in zip(solved, fitted.low.float(), fitted.high.float(), strict=True):
        assert set(row.tolist()) <= {0.0, low.item(), high.item()}
    assert torch.equal(fitted.pack(solved).dense(), solved)


def test_wide_rows_take_less_than_a_bit():
    """Making up for errors costs zeros, so rows must be wider than for the code alone."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(1))
    fitted = TernaryGrid().fit(weight)
    solved = sweep(weight, x.t() @ x / 1024, fitted, act_order=True, damp=0.1).weight
    assert fitted.pack(nearest(weight, fitted)).bits_per_weight < fitted.pack(solved).bits_per_weight < 1


def test_thresholds_lie_at_half_of_each_extreme():
    weight = torch.tensor([[-4.0, -2.1, -1.9, 0.0, 0.9, 1.1, 2.0], [0.0, 1.0, 0.4, 0.6, 0.5, 0.2, 0.0]])
    found = nearest(weight, TernaryGrid(torch.float32).fit(weight))
    assert found.tolist() == [[-4, -4, 0, 0, 0, 2, 2], [0, 1, 0, 1, 0, 0, 0]]


def test_end_to_end(source, tmp_path):
    """Experts in words, attention by another technique, bits counted as the file has them."""
    out = tmp_path / "out"
    report = squeeze(source, out, "qmoe", "gptq:bits=4,group_size=32")
    layers = {la["layer"]: la for la in report["layers"]}
    experts = [la for name, la in layers.items() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    files = {}
    for file in out.glob("*.safetensors"):
        files.update(load_file(file))
    stored = sum(8 * t.nbytes for n, t in files.items() if ".experts." in n and not n.endswith("layout"))
    assert sum(la["bits"] for la in experts) * 64 * 96 == stored
    assert all(la["zeros"] > 0.6 for la in experts)
    assert all(la["tokens"] > 0 and not la["rounded"] for la in experts)
    attention = [la for name, la in layers.items() if ".attention." in name]
    assert {la["bits"] for la in attention} == {4.5}
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["modules"] == {"4-bit": 8, "ternary": 24}

    model = load_checkpoint(out)
    original = load_checkpoint(source)
    reader = Reader(out, ModelSpec.from_path(out))
    name = "layers.1.mlp.experts.up_proj"
    assert torch.equal(reader.read(name, 2), dict(model.named_parameters())[name][2])
    assert all(len(row.unique()) <= 3 for row in reader.read(name, 2))
    ids = torch.randint(0, 258, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert not torch.equal(model(ids), original(ids))


def test_reloaded_model_computes_what_the_driver_had(source, tmp_path, monkeypatch):
    seen = {}
    inner = walk.Walker.block

    def block(self, index, block, hidden, target, expert):
        kept = inner(self, index, block, hidden, target, expert)
        seen["hidden"] = hidden.data.clone()
        return kept

    monkeypatch.setattr(walk.Walker, "block", block)
    out = tmp_path / "out"
    squeeze(source, out, "qmoe")
    from tests.compressing import workload

    from ridgeline import experiments
    from ridgeline.compress.calibration import calibration_windows, load_text

    e = experiments.make(str(source), "a100", workload(source, text(tmp_path)), ["qmoe"])
    windows = calibration_windows(e.workload, load_text(e.workload, 258))
    model = load_checkpoint(out)
    model.norm = model.head = None
    with torch.no_grad():
        torch.testing.assert_close(model(windows), seen["hidden"], rtol=1e-4, atol=1e-4)


def test_no_expert_stays_dense_in_memory(source, tmp_path, monkeypatch):
    """When a block is done, its experts are there as words only."""
    kept = []
    inner = walk.Walker._experts

    def experts(self, *args):
        inner(self, *args)
        kept.extend(self.kept.values())

    monkeypatch.setattr(walk.Walker, "_experts", experts)
    squeeze(source, tmp_path / "out", "qmoe")
    coded = [la for la in kept if ".experts." in la.name]
    assert len(coded) == 24
    assert all(la.weight.is_meta and la.original.is_meta and isinstance(la.stored, Code) for la in coded)


def test_experts_without_tokens_are_rounded(tmp_path):
    def shut(model):
        for block in model.layers.values():
            block.mlp.router.weight.data.zero_()  # ties go to the first experts

    report = squeeze(checkpoint(tmp_path / "m", MIXTRAL, change=shut), tmp_path / "out", "qmoe:min_tokens=2")
    tokens = report["experts"]
    reached = {name for name, count in tokens.items() if count}
    assert len(tokens) == 8
    assert len(reached) == 4
    for la in report["layers"]:
        if ".experts." in la["layer"]:
            assert la["rounded"] == (la["layer"].rpartition(".")[0] not in reached)
    assert all(tokens[name] == 8 * 32 for name in reached)


def test_two_bits(tmp_path):
    out = tmp_path / "out"
    squeeze(checkpoint(tmp_path / "m", MIXTRAL), out, "qmoe:grid=2bit", form="compressed-tensors")
    reader = Reader(out, ModelSpec.from_path(out))
    found = reader.read("layers.0.mlp.experts.down_proj", 1)
    assert max(len(row.unique()) for row in found) == 4
    packed = reader._files.packed(reader._links["layers.0.mlp.experts.down_proj"][1])
    assert isinstance(packed, Packed)
    assert packed.bits == 2


def test_refusals(tmp_path):
    dense = checkpoint(tmp_path / "dense", LLAMA)
    with pytest.raises(Incompatible, match="has no experts"):
        squeeze(dense, tmp_path / "a", "qmoe")
    mixture = checkpoint(tmp_path / "mixture", MIXTRAL)
    with pytest.raises(UserError, match="--format ridgeline"):
        squeeze(mixture, tmp_path / "b", "qmoe", form="compressed-tensors")


def test_predicted_bytes_of_experts(source):
    """What ``rewrite`` expects of Gaussian rows is what the code takes."""
    from ridgeline import experiments
    from ridgeline.graph import decode_graph
    from ridgeline.techniques.registry import techniques_of

    e = experiments.make(str(source), "a100", {"kind": "generate", "prompt_len": 8, "output_len": 4}, ["qmoe"])
    (t,) = techniques_of(e.plan)
    g = t.rewrite(decode_graph(e), e)
    p = next(p for p, _ in g.params if p.name.endswith("up_proj") and ".experts." in p.name)
    symbols = torch.rand(512, p.shape[-1], generator=torch.Generator().manual_seed(0))
    symbols = torch.where(symbols < 0.885, 0, torch.where(symbols < 0.9425, 1, 2)).to(torch.uint8)
    code = Code.encode(symbols, torch.zeros(512, dtype=torch.float16), torch.zeros(512, dtype=torch.float16))
    assert 8 * p.bytes_per_element == pytest.approx(code.bits_per_weight, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_computes_from_words(tmp_path, dtype):
    """Loaded to run, experts stay in words; their products are those of the expanded weights."""
    out = tmp_path / "out"
    squeeze(checkpoint(tmp_path / "m", MIXTRAL, dtype=dtype), out, "qmoe")
    packed, expanded = load_packed(out, torch.float32), load_checkpoint(out, torch.float32)
    experts = [m for m in packed.modules() if isinstance(m, TernaryLinear)]
    assert len(experts) == 2 * 4 * 3
    ids = torch.randint(0, 258, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(packed(ids), expanded(ids), rtol=1e-4, atol=1e-4)
        prompt = ids[:, :8]
        assert torch.equal(generate(packed, prompt, 6), generate(expanded, prompt, 6))


def test_a_batch_of_experts_is_one_by_one(source, tmp_path):
    """Also where the last batch is smaller. The sums' order differs, so a weight in a thousand may be rounded to the
    other side, and what comes behind it moves with it."""
    reports = {batch: squeeze(source, tmp_path / str(batch), f"qmoe:batch={batch}") for batch in (1, 3, 16)}
    names = [f"layers.{i}.mlp.experts.{kind}_proj" for i in range(2) for kind in ("gate", "up", "down")]
    readers = {b: Reader(tmp_path / str(b), ModelSpec.from_path(tmp_path / str(b))) for b in reports}
    alone = {la["layer"]: la for la in reports[1]["layers"]}
    for batch in (3, 16):
        assert reports[batch]["experts"] == reports[1]["experts"]
        for la in reports[batch]["layers"]:
            assert la["error"] == pytest.approx(alone[la["layer"]]["error"], rel=1e-2)
        for name in names:
            for e in range(4):
                differ = (readers[batch].read(name, e) != readers[1].read(name, e)).float().mean()
                assert differ < (1e-3 if name.startswith("layers.0") else 1e-2)


def test_steps_see_what_they_take(source, tmp_path, monkeypatch):
    """Experts come in batches to the step that takes them so, what prunes them before sees one site at a time, and both
    get what the other left."""
    sizes = []
    inner = QMoE._solve
    monkeypatch.setattr(QMoE, "_solve", lambda self, run, sites: (sizes.append(len(sites)), inner(self, run, sites))[1])
    report = squeeze(source, tmp_path / "out", "magnitude:sparsity=0.9", "qmoe:batch=3")
    assert sizes == 2 * [1, 1, 3, 3, 1, 1]  # attention's two, up and down of three, of the last
    experts = [la for la in report["layers"] if ".experts." in la["layer"]]
    assert len(experts) == 24
    assert all(la["zeros"] >= 0.9 and la["bits"] < 8 for la in experts)


def test_wide_experts_make_small_batches():
    step = Together(lambda sites: None, 16, BATCH_ELEMENTS)
    assert step.at_once(3 * 256 * 128 + 256**2 + 128**2) == 16
    assert step.at_once(3 * 1024 * 512 + 1024**2 + 512**2) == 5
    assert step.at_once(3 * 4096 * 14336 + 4096**2 + 14336**2) == 0


def test_memory_is_that_of_a_batch(tmp_path):
    """Twice the experts take no more than their words more; a larger batch does."""

    def peak(experts, batch):
        model = tmp_path / str(experts)
        if not model.exists():
            checkpoint(model, {**WIDE, "num_experts": experts, "num_layers": 1})
        with Meter(torch.nn.Module()) as meter:
            squeeze(model, tmp_path / f"{experts}-{batch}", f"qmoe:batch={batch}", samples=2)
        return meter.peak.total

    dense = 4 * 3 * 64 * 96
    few = peak(4, 2)
    assert peak(8, 2) - few < 0.25 * 4 * dense
    assert peak(8, 6) - few > 4 * dense


def test_a_stopped_compression_goes_on_to_the_same_bytes(source, tmp_path):
    def stop(message):
        if message.get("layer", "").startswith("layers.1."):
            raise KeyboardInterrupt

    squeeze(source, tmp_path / "whole", "qmoe:batch=3")
    with pytest.raises(KeyboardInterrupt):
        squeeze(source, tmp_path / "again", "qmoe:batch=3", report=stop)
    squeeze(source, tmp_path / "again", "qmoe:batch=3")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
