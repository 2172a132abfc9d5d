"""The driver: what it writes, what it survives, what it refuses."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.nn.conftest import CONFIGS

from ridgeline.compress import driver as driving
from ridgeline.compress.calibration import Hidden, calibration_windows, held_out_windows, load_text, own_windows
from ridgeline.compress.driver import compress
from ridgeline.jobs.job import CompressOptions, RankContext
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.quant.packed import unpack_bits
from ridgeline.runtime.solve.grid import Affine, nearest
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.targets import linears

GPTQ = "gptq:bits=4,group_size=32"
CPU = torch.device("cpu")


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_files(a, b):
    names = sorted(f.name for f in a.iterdir() if f.suffix == ".safetensors")
    assert names == sorted(f.name for f in b.iterdir() if f.suffix == ".safetensors")
    return all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


def slow_gptq(weight, gram, bits, group, damp=0.01):
    """Algorithm 1 of the paper without blocks, order or factor: the inverse of what is left of H, column by column."""
    w, h = weight.double().clone(), gram.double().clone()
    h += damp * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    top = 2 ** (bits - 1)
    peak = weight.view(len(w), -1, group).abs().amax(-1)
    scale = (2 * peak / (2**bits - 1)).half().double().repeat_interleave(group, 1)
    for j in range(w.shape[1]):
        inverse = torch.linalg.inv(h[j:, j:])
        q = (w[:, j] / scale[:, j]).round().clamp(-top, top - 1) * scale[:, j]
        error = (w[:, j] - q) / inverse[0, 0]
        w[:, j + 1 :] -= error[:, None] * inverse[0, 1:]
        w[:, j] = q
    return w


def test_block_by_block_is_what_a_whole_model_would_give(bench, tmp_path):
    """Against the model in memory: each site's H from hooks, each layer solved by the slow reference."""
    path = bench.checkpoint(20)
    report = bench.compress(path, tmp_path / "out", f"{GPTQ},act_order=false")
    model = load_checkpoint(path, dtype=torch.float32)
    e = bench.experiment(path, GPTQ)
    windows = calibration_windows(e.workload, load_text(e.workload, 300))
    sites = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    close = total = 0
    for i in range(2):
        for names in sites:
            linears = {n: m for n, m in model.layers[str(i)].named_modules() if n.rpartition(".")[2] in names}
            seen = []
            first = next(iter(linears.values()))
            hook = first.register_forward_pre_hook(
                lambda m, x, seen=seen: seen.append(x[0].reshape(-1, x[0].shape[-1]))
            )
            with torch.no_grad():
                model(windows)
            hook.remove()
            x = torch.cat(seen).double()
            gram = 2 * x.t() @ x / len(x)
            for linear in linears.values():
                q = slow_gptq(linear.weight.detach(), gram, 4, 32)
                linear.weight.data = q.float()
    written = load_checkpoint(tmp_path / "out", dtype=torch.float32)
    for (name, a), (_, b) in zip(model.named_parameters(), written.named_parameters(), strict=True):
        if "_proj" in name:
            close += int(torch.isclose(a, b, rtol=1e-4, atol=1e-6).sum())
            total += a.numel()
        else:
            assert torch.equal(a, b), name
    assert close / total > 0.995  # a rounding that falls the other way is felt in what comes after
    assert [la["layer"] for la in report["layers"]][:2] == ["layers.0.attention.q_proj", "layers.0.attention.k_proj"]
    assert report["bits_per_weight"] == 4 + 16 / 32
    assert all(0 < la["error"] < 0.05 and la["tokens"] == 4 * 32 for la in report["layers"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("experts", [0, 4])
def test_resumes_where_it_was_stopped(bench, tmp_path, experts):
    changes = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2} if experts else {}
    path = bench.checkpoint(20, **changes)
    bench.compress(path, tmp_path / "whole", GPTQ)
    blocks = []

    def stop(message):
        if "step" in message:
            blocks.append(message["step"])
            if message["step"] == 1:
                raise KeyboardInterrupt

    e, options = bench.experiment(path, GPTQ), CompressOptions(out=str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        compress(e, options, RankContext(CPU, report=stop))
    assert not (tmp_path / "out").exists()
    visited = []
    compress(e, options, RankContext(CPU, report=lambda m: visited.append(m.get("layer", ""))))
    assert {name.split(".")[1] for name in visited if name} == {"1"}  # block 0 was only passed through
    assert same_files(tmp_path / "whole", tmp_path / "out")
    layers = json.loads((tmp_path / "out" / "ridgeline.json").read_text())["layers"]
    assert len(layers) == 2 * (4 + 3 * (experts or 1))
    assert not (tmp_path / "out.partial").exists()


def test_another_plan_does_not_go_on_with_what_lies_there(bench, tmp_path):
    path = bench.checkpoint(20)

    def stop(message):
        if message.get("step") == 1:
            raise KeyboardInterrupt

    options = CompressOptions(out=str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        compress(bench.experiment(path, GPTQ), options, RankContext(CPU, report=stop))
    other = bench.experiment(path, "gptq:bits=3,group_size=32")
    with pytest.raises(UserError, match="another compression that was stopped"):
        compress(other, options, RankContext(CPU))
    report = compress(other, replace(options, resume=False), RankContext(CPU))
    assert report["bits_per_weight"] == 3.5


def test_full_disk_leaves_what_is_done(bench, tmp_path, monkeypatch):
    path = bench.checkpoint(20)
    real, room = driving.Output.write, [2]

    def full(self, part, tensors, **said):
        from ridgeline.compress import output

        def no_room(*args, **kwargs):
            raise OSError(28, "No space left on device")

        if room[0] == 0:
            monkeypatch.setattr(output, "write_tensors", no_room)
        room[0] -= 1
        return real(self, part, tensors, **said)

    monkeypatch.setattr(driving.Output, "write", full)
    with pytest.raises(UserError, match="No space left on device") as caught:
        bench.compress(path, tmp_path / "out", GPTQ)
    assert "run the same command again" in caught.value.fix
    assert not (tmp_path / "out").exists()
    journal = tmp_path / "out.partial" / "journal.jsonl"
    assert [json.loads(line).get("part") for line in journal.read_text().splitlines()] == [None, "embed", "layers.0"]
    monkeypatch.undo()
    with journal.open("a") as cut:  # as if the process had died while it wrote
        cut.write('{"part": "layers.1", "file": "part-')
    bench.compress(path, tmp_path / "out", GPTQ)
    bench.compress(path, tmp_path / "whole", GPTQ)
    assert same_files(tmp_path / "whole", tmp_path / "out")


def test_bad_weights_are_named(bench, tmp_path):
    broken = shutil.copytree(bench.checkpoint(), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values that are NaN"):
        bench.compress(broken, tmp_path / "out", GPTQ)


@pytest.mark.parametrize(
    ("plan", "changes", "workload", "match"),
    [
        ((), {}, {}, "the plan compresses nothing"),
        (("gptq:group_size=48",), {}, {}, "group_size 48 does not divide"),
        (("gptq:bits=9",), {}, {}, "less than or equal to 8"),
        (("gptq", "rtn"), {}, {}, "keep one of"),
        ((GPTQ,), {}, {"samples": 100_000}, "too few for 100000 windows"),
        ((GPTQ,), {}, {"seq_len": 65}, "longer than the 64 positions"),
    ],
)
def test_refusals(bench, tmp_path, plan, changes, workload, match):
    with pytest.raises(UserError, match=match):
        bench.compress(bench.checkpoint(**changes), tmp_path / "out", *plan, **workload)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(bench, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        bench.compress(bench.checkpoint(), tmp_path / "out", GPTQ)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a file, not a directory"):
        bench.compress(bench.checkpoint(), tmp_path / "out" / "thesis.txt", GPTQ)


def test_conv1d_models_are_written_densely_or_not_at_all(bench, tmp_path):
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    path = bench.checkpoint(family="gpt2", norm="layernorm", activation="gelu_tanh", gated=False, position="learned",
                            num_kv_heads=4, tie_embeddings=True, **biases)  # fmt: skip
    with pytest.raises(UserError, match="Conv1D"):
        bench.compress(path, tmp_path / "out", GPTQ)
    bench.compress(path, tmp_path / "dense", GPTQ, format="dense")
    weight = load_checkpoint(tmp_path / "dense").layers["1"].mlp.down_proj.weight
    assert max(len(group.unique()) for row in weight for group in row.view(-1, 32)) <= 16


def test_fused_projections_are_written_densely_or_not_at_all(bench, tmp_path):
    path = bench.checkpoint(family="phi3")
    with pytest.raises(UserError, match=r"qkv_proj\.weight for several layers in one"):
        bench.compress(path, tmp_path / "out", GPTQ)
    bench.compress(path, tmp_path / "dense", GPTQ, format="dense")
    for name in ("attention.k_proj", "mlp.up_proj"):
        weight = load_checkpoint(tmp_path / "dense").layers["1"].get_submodule(name).weight
        assert max(len(group.unique()) for row in weight for group in row.view(-1, 32)) <= 16


COMPRESSED = {name: config for name, config in CONFIGS.items() if name != "bert"}
DENSELY = {"phi3": "several layers in one", "gpt2": "as Conv1D", "gpt_neox": "several layers in one",
           "falcon": "several layers in one", "bloom": "several layers in one", "gpt_oss": "several layers in one",
           "llama4_text": "several layers in one"}  # fmt: skip
"""Families whose files hold several layers in one tensor, for which no format has a form."""


@pytest.mark.parametrize("name", COMPRESSED)
def test_families(bench, tmp_path, name):
    """At 8 bits no more is lost than by rounding every weight by itself: the walk's hidden states are the model's."""
    spec = ModelSpec.from_config({**COMPRESSED[name], "vocab_size": 300}, name=name)
    path, plan, form = bench.checkpoint(**spec.model_dump()), "gptq:bits=8,group_size=0", "compressed-tensors"
    if spec.family in DENSELY:
        with pytest.raises(UserError, match=DENSELY[spec.family]):
            bench.compress(path, tmp_path / "codes", plan)
        form = "dense"
    report = bench.compress(path, tmp_path / "out", plan, format=form)
    a, b = (load_checkpoint(p, dtype=torch.float32) for p in (path, tmp_path / "out"))
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x, y = a(ids), b(ids)
        for name, p in a.named_parameters():
            if "_proj" in name and p.dim() > 1:
                step = p.abs().amax(-1, keepdim=True) / 127
                p.copy_((p / step).round() * step)
        rounded = (a(ids) - x).abs().mean()
    assert 0 < (x - y).abs().mean() < 1.5 * rounded
    experts = sum(len(p.shape) == 3 for p in spec.parameters())
    assert len(report["layers"]) == len(linears(spec)) + experts * spec.num_experts


def test_a_mixtures_tokens_reach_their_experts_only(bench, tmp_path):
    path = bench.checkpoint(family="mixtral", num_experts=4, experts_per_token=2)
    report = bench.compress(path, tmp_path / "out", GPTQ)
    per_layer = [sum(n for name, n in report["experts"].items() if name.startswith(f"layers.{i}.")) for i in (0, 1)]
    assert per_layer == [2 * 4 * 32] * 2  # every token goes to two


def test_stored_dtype_is_the_checkpoints(bench, tmp_path):
    path = bench.checkpoint(dtype=torch.bfloat16)
    bench.compress(path, tmp_path / "out", GPTQ)
    tensors = tensors_of(tmp_path / "out")
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].dtype == torch.bfloat16
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    packed = tensors["model.layers.0.self_attn.q_proj.weight_packed"]
    assert packed.dtype == torch.int32
    assert int(unpack_bits(packed, 4, 64).max()) <= 15


@pytest.mark.parametrize("changes", [{}, {"family": "mixtral", "num_experts": 4, "experts_per_token": 2}])
def test_weights_alone_need_no_text(bench, tmp_path, changes):
    path = bench.checkpoint(20, **changes)
    report = bench.compress(path, tmp_path / "out", "rtn:bits=4,group_size=32", samples=10**9)
    assert all(la["error"] is None and la["tokens"] == 0 for la in report["layers"])
    before, after = (dict(load_checkpoint(p, dtype=torch.float32).named_parameters()) for p in (path, tmp_path / "out"))
    for name, weight in before.items():
        if "_proj" in name:
            grid = Affine(4, 32)
            for w, q in zip(*(p.data.view(-1, *p.shape[-2:]) for p in (weight, after[name])), strict=True):
                assert torch.equal(nearest(w, grid.fit(w)), q), name


def test_pruned_weights_are_archived_by_a_bitmask(bench, tmp_path):
    path = bench.checkpoint(20)
    plain, archive = (bench.compress(path, tmp_path / f, "magnitude:sparsity=0.5", format=f)
                      for f in ("compressed-tensors", "ridgeline"))  # fmt: skip
    assert (plain["bits_per_weight"], archive["bits_per_weight"]) == (32, 17)
    a, b = (dict(load_checkpoint(tmp_path / f).named_parameters()) for f in ("compressed-tensors", "ridgeline"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "quantization_config" not in json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())


def test_the_format_is_ours_where_others_cannot_hold_it(bench, tmp_path):
    path = bench.checkpoint(20)
    plain = bench.compress(path, tmp_path / "a", GPTQ, format=None)
    aside = bench.compress(path, tmp_path / "b", "quantease:bits=4,group_size=32,outliers=0.01", format=None)
    assert (plain["format"], aside["format"]) == ("compressed-tensors", "ridgeline")


def test_a_model_may_write_its_own_calibration_text(bench, tmp_path):
    path = bench.checkpoint(20)
    w = bench.experiment(path, GPTQ, samples=6).workload
    windows = own_windows(w)
    assert windows.shape == (6, 32)
    assert torch.equal(windows, own_windows(w))
    assert len(windows[:, 0].unique()) > 1
    e = bench.experiment(path, GPTQ, samples=6)
    e = e.model_copy(update={"workload": e.workload.model_copy(update={"data": "self"})})
    report = compress(e, CompressOptions(out=str(tmp_path / "out")), RankContext(CPU))
    assert all(la["tokens"] == 6 * 32 for la in report["layers"])


def test_held_out_text_is_never_calibrated_on(bench):
    w = bench.experiment(bench.checkpoint(), GPTQ, samples=64).workload
    tokens = load_text(w, 300)
    end = int(len(tokens.ids) * 0.9)
    marked = tokens.__class__(torch.arange(len(tokens.ids)).numpy(), tokens.tokenizer, tokens.source)
    assert int(calibration_windows(w, marked).max()) < end <= int(held_out_windows(w, marked).min())


def test_hidden_states_may_lie_in_a_file(tmp_path):
    small, large = (Hidden(3, 4, 5, tmp_path, f"h{i}", limit) for i, limit in enumerate((1e9, 0)))
    values = torch.randn(3, 4, 5)
    for hidden in (small, large):
        hidden.data.copy_(values)
        assert torch.equal(torch.cat(list(hidden.chunks())), values)
    assert [f.name for f in tmp_path.iterdir()] == ["h1.hidden"]
    large.close()
    assert not list(tmp_path.iterdir())
