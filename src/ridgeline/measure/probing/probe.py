"""``ridgeline probe``: measure this machine and keep the profile as device ``local``. No torch here; ranks measure."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from ridgeline import catalog
from ridgeline.jobs.job import LaunchJob, ProbeOptions
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.measure.environment import cores, cpu_model, fingerprint
from ridgeline.paths import cache_dir
from ridgeline.predict import predict
from ridgeline.predict.calibrate import calibrate
from ridgeline.predict.serving.engine_costs import own_engine
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.report.files import write_atomic
from ridgeline.spec.device import PROMPT_ROWS, STEP_ROWS, Cluster, Device, Link, Rate
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.json_file import read_json
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Generate, Pretrain, Serve
from ridgeline.techniques.registry import bringing, default_plan, resolve
from ridgeline.validate.samples import as_samples


def probe(
    max_ranks: int = 2, quick: bool = False, progress: Callable[[str], None] | None = None, inference: bool = True
) -> tuple[Device, Path]:
    """Measure with 1 … ``max_ranks`` processes sharing the machine (powers of two); returns the device and its file.

    ``inference``: also what generating and serving need; without, the device is ``training_only``. Parts that an
    interrupted probe finished within the last hour are not measured again. Raises :class:`UserError` when a
    measurement cannot run.
    """
    say = progress or (lambda _: None)
    found: dict[int, dict[str, Any]] = {}
    most = max_ranks if max_ranks > 2 else min(max_ranks, cores())  # more than the usual two: even on fewer cores
    ranks = 1
    while ranks <= max(1, most):
        found[ranks] = _run(
            ProbeOptions(quick=quick, inference=inference), ranks, f"{ranks} process{'es' if ranks > 1 else ''}", say
        )
        ranks *= 2
    if found[1]["kind"] == "cpu" and inference:
        found[1] |= _run(ProbeOptions(quick=quick, serving=True), 1, "serving", say)
    try:
        device = device_of(found)
    except Exception:  # of which no device can be made: the next probe measures anew
        shutil.rmtree(_parts(), ignore_errors=True)
        raise
    file = catalog.save_device(device, "probe")
    shutil.rmtree(_parts(), ignore_errors=True)
    return device, file


KEPT = 3600.0
"""Seconds for which a finished part of an interrupted probe is still taken as the machine's state."""
_SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Of the environment, on which what is measured depends."""


def _parts() -> Path:
    """Where the finished parts of a probe lie until it is done."""
    return cache_dir() / "probe"


def _run(options: ProbeOptions, ranks: int, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The results of the ranks of one measurement."""

    def watch(message: dict[str, Any]) -> None:
        say(f"{name}: {message.get('stage', '')}")

    of = [asdict(options), ranks, fingerprint(), [os.environ.get(name) for name in _SETTINGS]]
    part = _parts() / f"{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]}.json"
    if part.is_file() and time.time() - part.stat().st_mtime < KEPT:
        say(f"{name}: measured before")
        return dict(read_json(part))
    try:
        found = run_job(LaunchJob("probe", None, options, ranks=ranks), watch, timeout=1200)
    except JobFailed as failure:
        raise UserError(f"the probe with {ranks} processes failed: {failure.reason}", failure.log) from None
    write_atomic(part, json.dumps(found))
    return found


BLANK = Device(name="local", kind="cpu", peak_flops={"fp32": 1.0}, memory_bytes=1.0, memory_bandwidth=1.0)
"""This machine before it is measured."""
REFERENCE = "llama-tiny"
"""The model whose real step is compared with the sum of its operators."""


def reference_experiment(device: Device = BLANK) -> Experiment:
    """A plain training step of the reference model in one process."""
    return Experiment(
        model=catalog.model(REFERENCE), cluster=Cluster(device=device), workload=Pretrain(seq_len=256, batch_size=4)
    )


WIDE_REFERENCE = ModelSpec(
    name="decode-wide", family="llama", vocab_size=256, hidden_size=1024, num_layers=4, num_heads=16, num_kv_heads=4,
    head_dim=64, intermediate_size=4096, max_positions=256,
)  # fmt: skip
"""A model whose products are of the sizes that are timed alone, so that what its decode steps take beyond them is not
what rates of products are wrong by. Its weights exceed the caches: operators between products find them empty."""
_STEPS = 20
DECODE_BITS = (8, 32)
"""Bits of its weights, by rising bytes."""


def decode_experiment(device: Device, bits: int) -> Experiment:
    """Decode steps of :data:`WIDE_REFERENCE`, of one sequence."""
    w = Generate(prompt_len=16, output_len=1 + _STEPS)
    plan = Plan.parse([f"rtn:bits={bits}"] if bits < 32 else [])
    return Experiment(model=WIDE_REFERENCE, cluster=Cluster(device=device), workload=w, plan=plan)


def decode_latency(device: Device, found: dict[str, float]) -> list[list[float]]:
    """``Device.decode_latency`` from the seconds of decode steps of :func:`decode_experiment` beyond their products, by
    bits."""
    lines = []
    for bits in DECODE_BITS:
        alone = predict(decode_experiment(device.model_copy(update={"decode_latency": []}), bits))
        rows = [row for row in alone.breakdown if row.phase == "decode"]
        others = sum(row.seconds for row in rows if row.kind != "gemm") / _STEPS
        beside = max(0.0, found[str(bits)] - others) / (sum(row.count for row in rows) / _STEPS)
        lines.append([sum(p.numel for p in WIDE_REFERENCE.block_parameters(0)) * bits / 8, beside])
    return lines


DECODE_REFERENCE = ModelSpec(
    name="decode-reference", family="llama", vocab_size=256, hidden_size=384, num_layers=20, num_heads=6,
    num_kv_heads=2, head_dim=64, intermediate_size=1024, max_positions=256,
)  # fmt: skip
"""A deep model whose weights exceed the caches, for steps of the serving engine."""
_LEAST = 1e-7
"""Seconds of an operator's latency at least: differences of noisy times may be less."""
STEP_DEPTHS = (6, 12, 20)
"""Layers of the model, otherwise :data:`DECODE_REFERENCE`, whose steps in the serving engine ``probe`` times: weights
that caches hold, and that they do not."""


def deep(layers: int) -> ModelSpec:
    """The decode reference with this many layers."""
    changes = {"name": f"decode-{layers}", "num_layers": layers, "max_positions": 2 * PROMPT_ROWS[-1]}
    return DECODE_REFERENCE.model_copy(update=changes)


NARROW_STEPS = ((2, 1), (2, 24), (8, 1), (8, 24))
"""(layers, sequences) of the decode steps of :func:`narrow` models that ``probe`` times."""
SERVED = tuple(name for name in default_plan("serve") if name not in bringing("packed_rows"))
"""The plan under which serving is probed: the engine's own, with pads."""


def narrow(layers: int) -> ModelSpec:
    """A model whose operators cost little except launching."""
    return ModelSpec(
        name=f"narrow-{layers}", family="llama", vocab_size=256, hidden_size=64, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=16, intermediate_size=128, max_positions=256,
    )  # fmt: skip


def serving_experiment(model: ModelSpec, sequences: int, device: Device = BLANK, **work: Any) -> Experiment:
    """Concurrent sequences in our own engine."""
    w = Serve(**{"prompt_len": 8, "output_len": 2, "concurrency": sequences, "kv_cache_bytes": 1 << 25, **work})
    return Experiment(model=model, cluster=Cluster(device=device), workload=w, plan=Plan.parse(list(SERVED)))


def with_serving(device: Device, found: dict[str, Any]) -> Device:
    """The device with what the real engine and server take beyond their operators (``Device.host_latency``), from
    what :func:`ridgeline.measure.probing.probe_serving.serving_costs` ``found``.

    What a sequence costs in each layer is in the latency of its attention: as in the engine, not as timed alone.
    """
    pools = {f"attention_pool.{k}".rstrip("."): Rate(**r) for k, r in found["attention"].items()}
    seconds: dict[tuple[int, int], float] = {}
    operators: dict[int, int] = {}
    bare = device.serving()
    bare = bare.model_copy(update={"step_latency": [], "rates": {**bare.rates, **pools}})
    for key, took in found["steps"].items():
        layers, n = (int(x) for x in key.split(","))
        seconds[layers, n], operators[layers] = _beside(narrow(layers), n, took, bare)
    few, many = sorted({layers for layers, _ in seconds})
    one, several = sorted({n for _, n in seconds})
    slope = {x: (seconds[x, several] - seconds[x, one]) / (several - one) for x in (few, many)}
    layer = max((slope[many] - slope[few]) / (many - few), -pools["attention_pool"].latency)
    sequence = max(0.0, slope[few] - few * layer)
    alone = {x: seconds[x, one] - x * layer - sequence for x in (few, many)}
    each = (alone[many] - alone[few]) / (operators[many] - operators[few])
    iteration = max(0.0, alone[few] - each * operators[few])
    least = [4.0 * narrow(many).num_parameters, *(max(0.0, each) for _ in STEP_ROWS)]

    def table(steps: dict[str, float]) -> list[list[float]]:
        """What operators cost in steps of the reference model, by its depth and the rows."""
        lines = []
        for layers in STEP_DEPTHS:
            line = [4.0 * deep(layers).num_parameters]
            for n in STEP_ROWS:
                beside, count = _beside(deep(layers), n, steps[f"{layers},{n}"], bare)
                own = sequence if n in PROMPT_ROWS else n * (sequence + layers * layer)
                line.append((beside - iteration - own) / count)
            lines.append(line)
        return lines

    known = {"serve.sequence": sequence, "serve.iteration": iteration} | http_latency(found)
    pools = {k: r.model_copy(update={"latency": max(_LEAST, r.latency + layer)}) for k, r in pools.items()}
    return device.model_copy(update={
        "rates": {**device.rates, **pools}, "host_latency": device.host_latency | known,
        "step_latency": [least, *table(found["deep"])],
        "kernel_latency": table(found["kernel"]) if found.get("kernel") else [],
    })  # fmt: skip


def _beside(model: ModelSpec, n: int, took: float, bare: Device) -> tuple[float, int]:
    """(what a step of ``n`` rows ``took`` beyond its operators, of which how many are not attention)."""
    e, techniques = resolve(serving_experiment(model, n, bare))
    surface = Iterations(e, techniques, e.cluster, own_engine(bare), (8, 64))
    blocks = surface.graph(1, 1, 1).blocks
    if n in PROMPT_ROWS:
        took -= surface.body(n) + surface.prompt_attention(n, 0) + surface.head(1)
    else:
        a, b = surface.decode(n)
        took -= a + b * n * 32
    return took, sum(x.repeat * sum(o.kind != "attention" for o in x.forward) for x in blocks)


def http_latency(found: dict[str, Any]) -> dict[str, float]:
    """What HTTP and text add to the steps of the narrow model of two layers."""
    http, (layers, several) = found["http"], NARROW_STEPS[1]
    one, many = (found["served"][f"{layers},{n}"] for n in (1, several))
    step = one + (many - one) / (several - 1) * (http["clients"] - 1)
    if http.get("apart"):
        return _http_apart(http, one, step)
    lone = max(0.0, http["lone_token_s"] - one)
    token = max(0.0, http["token_s"] - step - lone) / (http["clients"] - 1)
    reply = max(0.0, lone - token)
    admission = max(0.0, http["crowd_s"] - (step + reply) / http["clients"] - token)
    return {
        "serve.token": token,
        "serve.reply": reply,
        "serve.admission": admission,
        "serve.request": max(0.0, http["alone_s"] - one - reply - token - admission),
    }


def _http_apart(http: dict[str, Any], one: float, step: float) -> dict[str, float]:
    """The same of a server beside the engine's process: the slower of both is seen. ``one``, ``step``: seconds of a
    step of one client and of all."""
    token = max(0.0, http["token_s"] - http["lone_token_s"]) / (http["clients"] - 1)
    reply = max(0.0, http["lone_token_s"] - token)
    one, step = max(one, reply + token), max(step, reply + http["clients"] * token)
    admission = max(0.0, http["crowd_s"] - step / http["clients"])
    return {
        "serve.token": token,
        "serve.reply": reply,
        "serve.admission": admission,
        "serve.request": max(0.0, http["alone_s"] - one - admission),
        "serve.apart": 1.0,
    }


def host_latency(device: Device, found: dict[int, dict[str, Any]]) -> dict[str, float]:
    """By number of processes: what the reference step takes beyond its operators timed alone, per operator."""
    out: dict[str, float] = {}
    for ranks, f in found.items():
        alone = predict(reference_experiment(device.shared_by(ranks)))
        seconds = sum(row.seconds for row in alone.breakdown)
        out[str(ranks)] = max(0.0, f["reference_step_s"] - seconds) / sum(row.count for row in alone.breakdown)
    return out


def gpu_device(one: dict[str, Any]) -> Device:
    """A GPU's profile: its datasheet where the catalog has it, with constants fitted to the measured operators."""
    what = one["gpu"]
    known = datasheet(what, one["memory_bytes"])
    source = f"ridgeline probe of {what}, {date.today().isoformat()}, torch {one['torch']}"
    if known is None:
        device = Device(
            name="local", title=what, kind="gpu", peak_flops=one["peak_flops"], memory_bytes=one["memory_bytes"],
            memory_bandwidth=one["memory_bandwidth"], sm_count=one["units"],
            source=f"{source}; not in the catalog: peaks and bandwidth are the best that was measured",
        )  # fmt: skip
    else:
        device = known.model_copy(
            update={"name": "local", "title": what, "source": f"{source}; datasheet of {known.name}"}
        )
    kernels = backend_seconds(one.get("backends", []))
    device = device.model_copy(update={"disk": Link(**one["disk"]), "kernels": kernels})
    return calibrate(as_samples(one["rows"]), device).on(device)


def backend_seconds(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds by operator and back end, of those whose results are right."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if "failed" not in row:
            found.setdefault(row["operator"], {})[row["backend"]] = row["seconds"]
    return found


def datasheet(title: str, memory: float) -> Device | None:
    """The catalog's device whose title shares most words with a driver's name for it, and whose memory agrees."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z0-9]+", text.lower())) - {"nvidia", "amd", "geforce", "gpu", "tensor", "core"}

    named = words(title)
    best: tuple[float, str] | None = None
    for name in catalog.devices():
        d = catalog.device(name)
        common = words(d.title) & named
        model = {w for w in words(d.title) if re.search(r"\d", w) and not w.endswith("gb")}
        if d.kind == "gpu" and model & named and abs(d.memory_bytes / memory - 1) < 0.1:
            score = (len(common) - 0.1 * len(words(d.title) - named), name)
            best = max(best, score) if best else score
    return catalog.device(best[1]) if best else None


def device_of(found: dict[int, dict[str, Any]]) -> Device:
    """The device that :func:`~ridgeline.measure.probing.probe_worker.probe_rank` found, from its results by ranks."""
    one = found[1]
    if one["kind"] == "gpu":
        return gpu_device(one)
    rates = {r: {k: Rate(**v) for k, v in f["rates"].items()} for r, f in found.items()}
    served = {"serve": {k: Rate(**v) for k, v in one["serving"]["rates"].items()}} if "serving" in one else {}
    what = cpu_model()
    device = Device(
        name="local",
        title=what,
        kind=one["kind"],
        peak_flops=one["peak_flops"],
        memory_bytes=one["memory_bytes"],
        memory_bandwidth=one["memory_bandwidth"],
        l2_bytes=one["cache_bytes"],
        sm_count=one["units"],
        launch_latency=one["launch_latency"],
        disk=Link(**one["disk"]),
        rates=rates[1],
        ranks={str(r): v for r, v in rates.items() if r > 1} | served,
        source=f"ridgeline probe of {what}, {cores()} cores, {date.today().isoformat()}, torch {one['torch']}; "
        "peak_flops is the fastest GEMM measured, memory_bandwidth a large copy (read + write)",
    )
    known = host_latency(device, found)
    if not served:
        return device.model_copy(update={"host_latency": known, "training_only": True})
    device = device.model_copy(update={"host_latency": known})
    device = device.model_copy(update={"decode_latency": decode_latency(device, one["reference_decode_s"])})
    return with_serving(device, one["serving"])
