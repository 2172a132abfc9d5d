import re
from copy import deepcopy

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL, checkpoint, squeeze
from torch.func import functional_call

from ridgeline import experiments
from ridgeline.graph import decode_graph
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import token_loss
from ridgeline.runtime.structure import smaller
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.pruning.sheared_llama_torch import BETA, HIGH, LOW, Gates, Shearing, _finished, masked, shear
from ridgeline.techniques.registry import techniques_of

DEEP = {**LLAMA, "num_layers": 3}


def gates(rows=2, units=6, left=4, seed=0):
    made = Gates(rows, units, left, torch.Generator().manual_seed(seed))
    made.log_alpha.data = torch.randn(rows, units, generator=torch.Generator().manual_seed(seed + 1)) * 2
    return made


def test_open_share_is_what_draws_show():
    made = gates()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.stack([made.draw(generator) for _ in range(4000)])
    assert drawn.min() == 0
    assert drawn.max() == 1
    torch.testing.assert_close((drawn > 0).float().mean((0, 2)), made.open_share(), atol=0.01, rtol=0)


def test_draw_is_the_stretched_sigmoid():
    made = gates()
    drawn = made.draw(torch.Generator().manual_seed(3))
    noise = torch.rand(2, 6, generator=torch.Generator().manual_seed(3)).double()
    inner = torch.sigmoid(((noise / (1 - noise)).log() + made.log_alpha.double()) / BETA)
    torch.testing.assert_close(drawn.double(), (inner * (HIGH - LOW) + LOW).clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_penalty():
    made = gates()
    made.multipliers.data = torch.tensor([[0.5, -1.0], [2.0, 3.0]])
    for progress, target in ((0.0, 1.0), (0.5, 1 - 1 / 6), (1.0, 4 / 6)):
        excess = [s - target for s in made.open_share().tolist()]
        expected = 0.5 * excess[0] + 2 * excess[0] ** 2 - excess[1] + 3 * excess[1] ** 2
        assert made.penalty(progress).item() == pytest.approx(expected, abs=1e-6)


def test_exactly_so_many_stay():
    stay, z = gates(left=3).final()
    alpha = gates(left=3).log_alpha
    for row in range(2):
        best = sorted(range(6), key=lambda j: -alpha[row, j].item())[:3]
        assert stay[row].tolist() == sorted(best)
        assert {j for j in range(6) if z[row, j] > 0} <= set(best)


@pytest.mark.parametrize("fields", [DEEP, {**DEEP, "tie_embeddings": True}, {**MIXTRAL, "num_layers": 3}])
def test_cut_model_computes_what_the_gates_left(fields):
    """Layers, heads, hidden and inner channels at once; gates between 0 and 1 are folded in."""
    model = build(ModelSpec(**fields), dtype=torch.float64).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    sizes = {"layers": (1, 3, 2), "hidden": (1, 32, 24), "heads": (3, 2, 1), "inner": (3, 48, 20)}
    made = {kind: Gates(*size, generator).double() for kind, size in sizes.items()}
    for g in made.values():
        g.log_alpha.data = torch.randn(g.log_alpha.shape, generator=generator, dtype=torch.float64)
    z = {kind: g.final()[1].detach() for kind, g in made.items()}
    assert any(((value > 0) & (value < 1)).any() for value in z.values())
    ids = torch.randint(0, 258, (2, 10), generator=generator)
    expected = functional_call(model, masked(model.spec, dict(model.named_parameters()), z), (ids,))
    small = _finished(model, made)
    assert small.spec == smaller(ModelSpec(**fields), {"hidden": 24, "heads": 1, "inner": 20}, 2)
    torch.testing.assert_close(small(ids), expected, rtol=1e-9, atol=1e-9)


def mean_loss(model, windows):
    hidden = model(windows[:, :-1], return_hidden=True)
    return token_loss(hidden, model.head, windows[:, 1:])[0] / windows[:, 1:].numel()


@pytest.fixture(scope="module")
def trained():
    """A model that knows which letters follow which, half of whose inner channels only add noise."""
    model = build(ModelSpec(**LLAMA))
    generator = torch.Generator().manual_seed(2)
    windows = torch.randint(1, 4, (64, 17), generator=generator).cumsum(1) % 26
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        mean_loss(model, windows).backward()
        optimizer.step()
    clean = mean_loss(model, windows).item()
    for block in model.layers.values():
        block.mlp.down_proj.weight.data[:, ::2] = torch.randn(32, 24, generator=generator)
    return model.requires_grad_(False), windows, clean


def test_multipliers_drive_the_shape_and_noise_goes(trained):
    """The open share ends near the target, and most of what stays is of use."""
    model, windows, clean = trained
    noisy = mean_loss(model, windows).item()
    kept = model.layers["0"].mlp.up_proj.weight.data[1::2].clone()
    said = []
    how = Shearing(steps=160, batch=16, warmup=0.2, lr=0.0, mask_lr=0.3)
    small = shear(deepcopy(model), windows, model.spec.changed(intermediate_size=24), how, said.append)
    assert small.spec.intermediate_size == 24
    shares = [int(re.search(r"inner (\d+)%", m["stage"]).group(1)) for m in said]
    assert shares[0] > 95
    assert shares[-1] == pytest.approx(50, abs=10)
    stayed = sum(bool((row == kept).all(1).any()) for row in small.layers["0"].mlp.up_proj.weight)
    assert stayed >= 18
    assert mean_loss(small, windows).item() < (clean + noisy) / 2


def test_through_the_driver(tmp_path):
    transformers = pytest.importorskip("transformers")
    source = checkpoint(tmp_path / "m", DEEP)
    call = "sheared_llama:layers=2,heads=2,hidden=24,intermediate=16,steps=4,batch=4"
    stages = []
    report = squeeze(source, tmp_path / "out", call, form="dense", report=stages.append)
    ours = load_checkpoint(tmp_path / "out")
    s = ours.spec
    assert (s.num_layers, s.num_heads, s.num_kv_heads, s.hidden_size, s.intermediate_size) == (2, 2, 1, 24, 16)
    assert any("step 4 of 4" in m.get("stage", "") for m in stages)
    e = experiments.make(str(source), "a100", {"kind": "generate", "prompt_len": 8, "output_len": 4}, [call])
    (t,) = techniques_of(e.plan)
    assert sum(p.numel * n for p, n in t.rewrite(decode_graph(e), e).params) == s.num_parameters
    assert report["parameters"] == s.num_parameters
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


REFUSED = [
    ("llama-tiny", "sheared_llama", "shape of llama-tiny already"),
    ("llama-tiny", "sheared_llama:layers=9", "exceeds the 4"),
    ("llama-tiny", "sheared_llama:heads=2", "whole groups of 3"),
    ("llama-tiny", "sheared_llama:hidden=100", "multiple of the number of heads"),
    ("gpt2-tiny", "sheared_llama:hidden=96", "LayerNorm"),
    ("gpt2-tiny", "sheared_llama:heads=3", "cannot have"),
]


@pytest.mark.parametrize(("model", "call", "says"), REFUSED)
def test_refusals(model, call, says):
    with pytest.raises(Incompatible, match=says) as caught:
        experiments.make(model, "a100", {"kind": "generate"}, [call])
    assert caught.value.fix
