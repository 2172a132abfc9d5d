"""The process in which experiments are traced: one per line on its input, one answer per line on its output."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
import warnings
from typing import Any

from ridgeline.imports import uncollected
from ridgeline.measure.fake import guard
from ridgeline.spec.errors import UserError

_PROMPT = 64
"""Most tokens of a prompt."""


def main() -> None:
    """Trace what comes."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    try:
        guard.load()
    except UserError as e:
        print(json.dumps(told(e)), flush=True)
        return
    with uncollected():
        import torch

        import ridgeline.runtime.compress_build
        import ridgeline.serve.build_engine
        import ridgeline.train.trainer  # noqa: F401 - before the stand-ins, which replace parts of them
        from ridgeline.measure.fake import stand_ins

    stand_ins.install()
    torch.autograd.set_multithreading_enabled(False)
    for line in sys.stdin:
        try:
            found: dict[str, Any] = {"steps": traced(line)}
        except BaseException as e:
            found = told(e)
        print(json.dumps(found), flush=True)


def told(e: BaseException) -> dict[str, Any]:
    """An exception as an answer."""
    if isinstance(e, UserError):
        return {"error": e.what, "fix": e.fix}
    return {"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()}


def traced(line: str) -> dict[str, dict[str, Any]]:
    """The steps of an experiment, as counted."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ridgeline.measure.fake import stand_ins
    from ridgeline.measure.fake.tracer import TRACER
    from ridgeline.spec.experiment import Experiment

    asked = json.loads(line)
    e, device = Experiment.model_validate(asked["experiment"]), torch.device("cuda", 0)
    stand_ins.act_as(e.cluster.device.architecture)
    alone = contextlib.nullcontext() if e.world == 1 else stand_ins.first_rank(e)
    with alone, FakeTensorMode(allow_non_fake_inputs=True), TRACER:
        if e.task == "compress":
            return _compressing(e, device)
        return _training(e, device) if e.is_training else _serving(e, device, **asked["served"])


def _training(e: Any, device: Any) -> dict[str, dict[str, Any]]:
    from ridgeline.measure.fake.tracer import TRACER
    from ridgeline.train.trainer import Trainer

    trainer = Trainer(e, device)
    for _ in range(1 + trainer.ahead):  # the first makes the optimizer's states
        trainer.begin()
    list(trainer.reports())
    TRACER.reset()
    trainer.begin()
    list(trainer.reports())
    return {"step": TRACER.summary() | {"labels": trainer.run.kernels.notes()}}


def _compressing(e: Any, device: Any) -> dict[str, dict[str, Any]]:
    import torch

    from ridgeline.measure.fake.tracer import TRACER
    from ridgeline.runtime.compress_build import CompressBuild, LinearLayer, Site
    from ridgeline.techniques.registry import resolve

    e, techniques = resolve(e)
    run = CompressBuild(e, e.model, device, torch.float16)
    for technique in techniques:
        technique.compress(run)
    out, width = e.model.q_size, e.model.hidden_size
    weight = torch.empty(out, width)
    layer = LinearLayer("layers.0.attention.q_proj", weight, weight)
    site = Site("layers.0.attention.qkv", [layer], torch.empty(width, width), 4096, torch.empty(width))
    TRACER.reset()
    site.to(device)
    for step in run.at_site:
        step(site)
    site.error(layer)
    return {"site": TRACER.summary()}


def _serving(e: Any, device: Any, sampling: dict[str, Any], sequences: int) -> dict[str, dict[str, Any]]:
    from ridgeline.measure.fake.tracer import TRACER
    from ridgeline.measure.made_adapters import add_stated
    from ridgeline.serve import step_graphs
    from ridgeline.serve.build_engine import make_engine
    from ridgeline.serve.request import EngineRequest, Sampling
    from ridgeline.spec import scheduling

    step_graphs.BATCHES = (sequences,)  # others are not needed
    step_graphs.FIRST_RUNS = 1  # which makes what steps keep; there are no libraries that need memory
    scheduling.CAPTURED_TOKENS = (sequences * _PROMPT,)
    engine = make_engine(e, device)
    names = add_stated(e.plan, engine)
    sequences = min(sequences, engine.limits.max_num_seqs)
    prompt = min(_PROMPT, engine.max_model_len // 2)
    settings = Sampling(max_tokens=16, ignore_eos=True, **sampling)
    for i in range(sequences):
        ids = [(7 * i + 3 * j) % (engine.spec.vocab_size - 2) + 2 for j in range(prompt)]
        engine.add(EngineRequest(str(i), ids, settings, adapter=names[i % len(names)]))
    found = {}
    if any(names):  # as a server that starts with them
        engine.warm_up_adapters()
    TRACER.reset()
    failed = _stepped(engine)
    found["prefill"] = TRACER.summary() | {"sequences": sequences, "failed": failed}
    while any(s.n_computed + 1 < len(s.tokens) for s in engine.scheduler.running) or engine.scheduler.waiting:
        failed += _stepped(engine)
    for _ in range(2):  # tables and the like are there then, and what steps have told about those behind them
        failed += _stepped(engine)
    TRACER.reset()
    failed += _stepped(engine)
    found["decode"] = TRACER.summary() | {"sequences": sequences, "failed": failed, "labels": engine.labels()}
    return found


def _stepped(engine: Any) -> list[str]:
    return [event.error for event in engine.step() if getattr(event, "finish", None) == "error"]


if __name__ == "__main__":
    main()
