"""Norm tweaking: its distance by definition, the gate, and that what was tweaked is what is written."""

import pytest
import torch

from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.quantization.norm_tweaking_torch import DISTANCES, HELD_OUT, batches, of_channels, of_outputs
from ridgeline.techniques.registry import check, normalize

PLAN = ("gptq:bits=2,group_size=32",)


def test_the_distances_are_their_definitions():
    a, b = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    wanted = 0.0
    for c in range(5):
        x, y = a[..., c].flatten().tolist(), b[..., c].flatten().tolist()
        means = sum(x) / 21, sum(y) / 21
        spreads = [(sum((v - m) ** 2 for v in vs) / 21) ** 0.5 for vs, m in zip((x, y), means, strict=True)]
        wanted += (abs(means[0] - means[1]) + abs(spreads[0] - spreads[1])) / 5
    assert float(of_channels(a, b)) == pytest.approx(wanted)
    pairs = list(zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    share = sum((v - m) ** 2 for v, m in pairs) / sum(m**2 for _, m in pairs)
    assert float(of_outputs(a, b)) == pytest.approx(share)


class Windows:
    """Numbered windows in chunks of three."""

    def __init__(self, count):
        self.data = torch.arange(count, dtype=torch.float32).view(count, 1, 1)

    def chunks(self):
        yield from self.data.split(3)


@pytest.mark.parametrize("count", [4, 7, 16])
def test_every_window_is_trained_on_or_held_out(count):
    class Job:
        inputs = target = Windows(count)

    seen = {held: [int(v) for x, _ in batches(Job, 2, held) for v in x.flatten()] for held in (False, True)}
    assert sorted(seen[False] + seen[True]) == list(range(count))
    assert seen[True] == list(range(HELD_OUT - 1, count, HELD_OUT))


def test_tweaks_that_do_not_help_are_taken_back(bench):
    source = bench.checkpoint(steps=30)
    plain, *_ = bench.walk(source, *PLAN)
    wild, _, walker, _ = bench.walk(source, *PLAN, "norm_tweaking:lr=10")
    assert all(not notes["norm_tweaking"]["kept"] for notes in walker.block_notes)
    torch.testing.assert_close(wild, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DISTANCES)
def test_tweaks_that_are_kept_bring_the_output_closer(bench, name):
    distance = DISTANCES[name]
    source = bench.checkpoint(steps=30)
    plain, target, *_ = bench.walk(source, *PLAN, samples=16)
    tweaked, _, walker, model = bench.walk(source, *PLAN, f"norm_tweaking:distance={name},lr=0.003,batch_size=4",
                                         samples=16)  # fmt: skip
    notes = [block["norm_tweaking"] for block in walker.block_notes]
    assert any(s["kept"] for s in notes)
    assert all(s["after"] < s["before"] for s in notes if s["kept"])
    assert distance(tweaked[HELD_OUT - 1 :: HELD_OUT], target[HELD_OUT - 1 :: HELD_OUT]) < distance(
        plain[HELD_OUT - 1 :: HELD_OUT], target[HELD_OUT - 1 :: HELD_OUT]
    )
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_holds_the_tweaks(bench, tmp_path, dtype):
    source = bench.checkpoint(steps=30, dtype=dtype)
    report = bench.compress(source, tmp_path / "out", *PLAN, "norm_tweaking:lr=0.01", samples=16)
    before, after = (load_checkpoint(path, dtype=torch.float32) for path in (source, tmp_path / "out"))
    for i, (old, new) in enumerate(zip(before.layers.values(), after.layers.values(), strict=True)):
        moved = not torch.equal(old.mlp_norm.weight, new.mlp_norm.weight)
        assert moved == report["blocks"][f"layers.{i}"]["norm_tweaking"]["kept"]
    assert torch.equal(before.norm.weight, after.norm.weight)


def test_mixtures_and_too_few_windows_are_refused(bench):
    mixture = bench.checkpoint(family="mixtral", num_experts=4, experts_per_token=2)
    with pytest.raises(Incompatible, match="experts"):
        check(normalize(bench.experiment(mixture, *PLAN, "norm_tweaking")))
    with pytest.raises(Incompatible, match="held out"):
        check(normalize(bench.experiment(bench.checkpoint(), *PLAN, "norm_tweaking", samples=3)))
