"""Key/value caches in codes: their error, their bytes, and generation with them."""

import pytest
import torch
from tests.nn.test_packed_model import SPEC

from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.init import build
from ridgeline.nn.quant.quantized_kv import CodedCache
from ridgeline.predict import predict
from ridgeline.runtime.build import Build
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import check, normalize

CPU = Device(name="cpu", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=1e10, memory_bandwidth=1e10)
KINDS = ["fp8", "int8", "int4"]


def experiment(spec, dtype, **workload):
    return normalize(Experiment(model=spec, cluster=Cluster(device=CPU), workload=Generate(**workload),
                                plan=Plan.parse([f"kv_quant:dtype={dtype}"])))  # fmt: skip


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_at_most_half_a_step(kind, dim):
    g = torch.Generator().manual_seed(dim)
    cache = CodedCache(kind, (2, 3, 9, dim), torch.device("cpu"))
    k, v = (torch.randn(2, 3, 9, dim, generator=g) * 3 + 1 for _ in range(2))
    for part in (slice(0, 6), slice(6, 7), slice(7, 9)):
        keys, values = cache.append(k[:, :, part], v[:, :, part])
        assert keys.shape[2] == part.stop
    for got, want in ((keys, k), (values, v)):
        if kind == "fp8":
            step = want.abs() * 2**-3 + 2**-9
        elif kind == "int8":
            step = want.abs().amax(-1, keepdim=True) / 127
        else:
            group = {16: 16, 64: 64, 96: 48, 128: 64}[dim]
            parts = want.unflatten(-1, (-1, group))
            span = parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)
            step = (span / 15 + 2e-2).expand_as(parts).flatten(-2)  # and what fp16 loses of the minimum
        assert bool(((got - want).abs() <= 0.55 * step).all())


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_stay_finite(kind):
    x = torch.zeros(1, 1, 3, 16)
    x[0, 0, 1] = 1e4
    x[0, 0, 2, 3] = -1e-6
    cache = CodedCache(kind, (1, 1, 3, 16), torch.device("cpu"))
    keys, _ = cache.append(x, x)
    assert bool(torch.isfinite(keys).all())
    assert float(keys[0, 0, 0].abs().max()) == 0.0


@pytest.mark.parametrize("spec", [SPEC, SPEC.model_copy(update={"head_dim": 96})])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_predicted(kind, spec):
    e = experiment(spec, kind, prompt_len=6, output_len=5, batch_size=3)
    model = build(spec)
    run = Build(e, model, torch.device("cpu"))
    for technique in check(e):
        technique.build(run)
    held = sum(layer.nbytes for layer in make_cache(model, 3, 11).values())
    assert {m.category: m.bytes for m in predict(e).memory}["kv_cache"] == pytest.approx(held, rel=1e-12)
    assert held == pytest.approx(2 * 2 * 3 * spec.num_kv_heads * 11 * spec.head_dim * kv_bytes(kind, spec.head_dim))


@torch.inference_mode()
def test_logits_stay_close():
    model = build(SPEC, seed=5)
    for p in model.parameters():
        p.mul_(4.0 if p.dim() > 1 else 1.0)  # so that attention prefers some tokens
    ids = torch.arange(60).view(2, 30)

    def logits():
        cache = make_cache(model, 2, 30)
        out = [prefill(model, ids[:, :20], cache)]
        return torch.stack([*out, *(decode(model, ids[:, i], cache) for i in range(20, 30))])

    want, errors = logits(), {}
    for kind in KINDS:
        model.cache_of = lambda shape, dtype, device, kind=kind: CodedCache(kind, shape, device)
        errors[kind] = float((logits() - want).norm() / want.norm())
    assert 0 < errors["int8"] < 0.01
    assert errors["int8"] < errors["fp8"] < 0.05
    assert errors["int8"] < errors["int4"] < 0.1


def test_odd_heads_do_not_pack():
    spec = SPEC.model_copy(update={"head_dim": 15, "position": "none"})
    with pytest.raises(Incompatible, match="odd width 15"):
        check(experiment(spec, "int4", prompt_len=4, output_len=4))
