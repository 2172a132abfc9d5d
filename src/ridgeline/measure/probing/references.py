"""Steps of reference models: what they take beyond their operators timed alone is the host's part of predictions."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline import catalog
from ridgeline.measure.cells.generation_cell import build_generation, timed_generation
from ridgeline.measure.probing.probe import BLANK, DECODE_BITS, REFERENCE, decode_experiment, reference_experiment
from ridgeline.measure.probing.probe_timer import Timer, steady
from ridgeline.nn.model.init import build
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.runtime.train_build import LossModel
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import resolve


def reference_step(timer: Timer, device: torch.device, rounds: int) -> float:
    """Seconds of one plain training step of the reference model, without communication."""
    w = reference_experiment().training
    assert w.batch_size is not None
    root = LossModel(build(catalog.model(REFERENCE), device))
    root.model.set_attention("naive")
    parameters = list(root.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    ids = torch.randint(root.model.spec.vocab_size, (w.batch_size, w.seq_len), device=device)
    times = []
    for _ in range(rounds):
        timer.together()
        start = time.perf_counter()
        (root(ids, ids) / ids.numel()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        timer.sync()
        times.append(time.perf_counter() - start)
    return steady(times)


def reference_decode(device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of a decode step of the reference model beyond its products, by the bits of its weights.

    The products are timed by themselves in the same moment, as the rate of a machine's memory changes.
    """
    out = {}
    for bits in DECODE_BITS:
        e, techniques = resolve(decode_experiment(BLANK, bits))
        w, model = e.workload, build_generation(e, device, techniques).model
        assert isinstance(w, Generate)
        prompt = torch.zeros(1, w.prompt_len, dtype=torch.long, device=device)
        products: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear | PackedLinear)]
        inputs = [torch.randn(1, 1, int(m.in_features), device=device) for m in products]
        beside = []
        with torch.inference_mode():
            for _ in range(rounds):
                (_, *steps) = timed_generation(model, prompt, w.output_len)
                beside.append(statistics.median(steps) - _seconds(products, inputs, len(steps)))
        out[str(bits)] = statistics.median(beside[1:])
    return out


def _seconds(layers: list[nn.Module], inputs: list[Tensor], times: int) -> float:
    """Median seconds of computing the layers one after the other."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
