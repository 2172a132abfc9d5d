"""Serving costs other than operators, measured on the real engine and server with models so narrow that operators cost
almost nothing. ``ridgeline probe`` keeps the results; the predictor of the engine ``ridgeline`` uses them.
"""

from __future__ import annotations

import statistics
import time
from array import array
from typing import Any

import torch

from ridgeline.measure.environment import cores
from ridgeline.measure.probing.probe import NARROW_STEPS, STEP_DEPTHS, deep, narrow, serving_experiment
from ridgeline.nn.memory.kv_pool import BatchLayout, PagedCache, Piece, singles
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.model.attention import BACKENDS
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.quant.quantized_kv import KINDS
from ridgeline.serve.build_engine import make_engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.runner import find_kernel, find_step_kernel
from ridgeline.spec.device import DECODE_ROWS, PROMPT_ROWS
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.model import ModelSpec

_HEADS, _KEY_HEADS, _WIDTH, _SEQUENCES = 16, 4, 64, 8
_SHORT, _LONG = 16, 768
_CACHED = 48 * 2**20
"""Bytes of pools that are read in turn."""
CLIENTS = 16
_RATE = 10.0
"""Requests/s at which the server of a narrow model has always gone to sleep before the next."""


def serving_costs(device: torch.device, quick: bool = False) -> dict[str, Any]:
    """``steps``: seconds of a decode step of narrow models by (layers, sequences), operator by operator; ``deep``: of
    the reference model likewise, and of its prompts by (layers, tokens); ``kernel``: the same with all layers of a
    decode step in one kernel, where there is one; ``served``: of the narrow models as the server runs them;
    ``attention``: rates of attention over the pool, by the kind of its codes; ``http``: seconds that requests take at
    the real server."""
    steps = {f"{layers},{n}": _step(device, narrow(layers), n, quick) for layers, n in NARROW_STEPS}
    attention = {kind: _attention(device, kind) for kind in ("", *KINDS)}
    depths = [(layers, n) for layers in STEP_DEPTHS for n in DECODE_ROWS]
    prompts = {f"{layers},{n}": _prompt(device, deep(layers), n, quick) for layers in STEP_DEPTHS for n in PROMPT_ROWS}
    large = {f"{layers},{n}": _step(device, deep(layers), n, quick, 30) for layers, n in depths} | prompts
    found = {"steps": steps, "deep": large, "attention": attention, "http": _http(device, quick), "served": steps}
    if make_engine(serving_experiment(narrow(2), 1), device).runner.decoder is not None:
        found["kernel"] = {f"{k},{n}": _step(device, deep(k), n, quick, 30, True) for k, n in depths} | prompts
        found["served"] = {f"{k},{n}": _step(device, narrow(k), n, quick, 80, True) for k, n in NARROW_STEPS}
    return found


def _step(
    device: torch.device, model: ModelSpec, n: int, quick: bool, rounds: int = 80, one_kernel: bool = False
) -> float:
    """Steady seconds of a decode step of ``n`` sequences, asked as the load generator asks."""
    rounds = 6 if quick else rounds
    engine = make_engine(serving_experiment(model, n), device)
    if not one_kernel:
        engine.runner.decoder = None
    for i in range(n):
        sampling = Sampling(max_tokens=rounds + 8, min_tokens=rounds + 8, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(str(i), [i + 1] * 8, sampling))
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[rounds // 4 :])


def _prompt(device: torch.device, model: ModelSpec, tokens: int, quick: bool) -> float:
    """Steady seconds of the step that computes one prompt and chooses its first token; all prompts differ."""
    engine = make_engine(serving_experiment(model, 1, prompt_len=tokens, output_len=1), device)
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    for i in range(3 if quick else 8):
        engine.add(EngineRequest(str(i), [(i + j * j) % model.vocab_size for j in range(tokens)], sampling))
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(times) // 4 :])


def _attention(device: torch.device, kind: str) -> dict[str, float]:
    """A layer's attention of single new tokens over the pool: seconds per sequence, and bytes/s of cached keys and
    values as they are stored. Layers take turns, as in a model, so that none finds its pool in a cache."""
    layout = BatchLayout()
    shape = (1, _KEY_HEADS, _SEQUENCES * _LONG, _WIDTH)
    layers = [PagedCache(layout, shape, torch.float32, device, kind)]
    layers += [PagedCache(layout, shape, torch.float32, device, kind) for _ in range(_CACHED // layers[0].nbytes)]
    q = torch.randn(1, _HEADS, _SEQUENCES, _WIDTH, device=device)
    k, v = (torch.randn(1, _KEY_HEADS, _SEQUENCES, _WIDTH, device=device) for _ in range(2))
    seconds = []
    with torch.inference_mode():
        for length in (_SHORT, _LONG):
            layout.slots = torch.arange(_SEQUENCES, device=device) * _LONG + length - 1
            layout.pieces = [Piece(i, i + 1, [(i * _LONG, length)], False, length, array("i", [i]))
                             for i in range(_SEQUENCES)]  # fmt: skip
            layout.kernel, layout.whole = find_kernel(device, torch.float32), find_step_kernel(device, _WIDTH)
            at = singles(layout.pieces, _LONG, device)
            assert at is not None
            layout.singles = at if layout.kernel is not None else None
            repeat, counts = _HEADS // _KEY_HEADS, [1] * _SEQUENCES
            layout.pages = make_pages(at.table, at.lengths, counts, _LONG, repeat, _WIDTH, kind)
            times = []
            for i in range(40):
                start = time.perf_counter()
                layers[i % len(layers)].attend(BACKENDS["flash"], q, k, v, Mask(None, False))
                times.append(time.perf_counter() - start)
            seconds.append(statistics.median(times[10:]) / _SEQUENCES)
    each = 2 * _KEY_HEADS * _WIDTH * (kv_bytes(kind, _WIDTH) if kind else 4.0)
    slope = max(seconds[1] - seconds[0], 0.05 * seconds[1]) / ((_LONG - _SHORT) * each)
    return {"latency": max(1e-7, seconds[0] - slope * _SHORT * each), "byte_rate": 1 / slope}


def _http(device: torch.device, quick: bool) -> dict[str, float]:
    """Seconds at the server of the narrow model: ``alone_s`` of a request for one token that finds it idle,
    ``crowd_s`` per request when several clients ask for one token each, ``token_s`` per further token of ``clients`` at
    once, ``lone_token_s`` of one client."""
    from ridgeline.measure.cells.serving_cell import serve_loads

    def load(clients: int, requests: int, output: int, **work: Any) -> Experiment:
        return serving_experiment(narrow(2), clients, requests=requests, prompt_len=1, output_len=output, **work)

    n = 12 if quick else 120
    loads = [load(1, n // 4, 1, rate=_RATE, concurrency=None), load(CLIENTS, 2 * n, 1), load(1, n // 4, 40),
             load(CLIENTS, n, 40)]  # fmt: skip
    results = serve_loads(loads, device, lambda _: None)
    alone, together, lone, tokens = ({name: m.value for name, m in r.metrics.items()} for r in results)
    apart = float(device.type == "cpu" and cores() > 1)  # as the server runs
    return {"clients": CLIENTS, "apart": apart, "alone_s": alone["e2e_p50_s"],
            "crowd_s": 1 / together["requests_per_s"], "token_s": tokens["tpot_p50_s"],
            "lone_token_s": lone["tpot_p50_s"]}  # fmt: skip
