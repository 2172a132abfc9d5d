"""The baseline of serving: ``transformers``' ``generate`` on static batches, padded on the left, one after another.

Requests waiting when a batch ends form the next one. There is no server and no HTTP in between, which favors it. A
row's tokens count from the step that made them, though ``generate`` returns them with the whole batch: this is what the
method could give at best. The batch runs until its longest output is done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ridgeline.jobs.job import Progress
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.load.drive import Drive
from ridgeline.measure.load.prompts import RandomIds
from ridgeline.measure.load.record import Record
from ridgeline.measure.load.summary import summarize
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.memory.meter import process_memory
from ridgeline.nn.model.init import DTYPES, build
from ridgeline.predict.serving.arrivals import Arrival, requests
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Metric, Result
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import has

MOST = 16
"""Sequences per batch, unless the workload states it."""


class _Clock(StoppingCriteria):
    """A stopping criterion that never stops and records when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def hf_serving(e: Experiment, device: torch.device, report: Progress) -> Result:
    """Serve the experiment's requests in static batches; a measured Result without the engine's own counts."""
    w = e.workload
    assert isinstance(w, Serve)
    report({"stage": "loading"})
    model = _model(e, device)
    arrivals, prompts = requests(w), RandomIds(e.model.vocab_size, w.seed, w.shared_prefix)
    most = min(w.max_num_seqs or MOST, w.concurrency or len(arrivals))
    _generate(model, [prompts.make(-1, arrivals[0].prompt)], 2)
    batches = 0
    records: list[Record] = []
    began = time.perf_counter()
    freed: list[float] = []
    """When each request's batch ended: in a closed loop its client asks again then."""

    def came(k: int) -> float:
        if w.concurrency is None:
            return began + arrivals[k].arrival
        return began if k < w.concurrency else freed[k - w.concurrency]

    while len(records) < len(arrivals):
        now = time.perf_counter()
        batch = _next(arrivals, len(records), now - began, most, w.concurrency is not None)
        if not batch:
            time.sleep(max(0.0, began + arrivals[len(records)].arrival - now))
            continue
        answered = [Record(k, came(k), r.prompt, r.output, sent=came(k)) for k, r in enumerate(batch, len(records))]
        ids = [prompts.make(r.index, r.prompt_len) for r in answered]
        times = _generate(model, ids, max(r.output for r in batch))
        for r in answered:
            r.chunks = times[: r.output_len]
            r.end, r.finish, r.output_tokens, r.prompt_tokens = r.chunks[-1], "length", r.output_len, r.prompt_len
        records += answered
        freed += [time.perf_counter()] * len(batch)
        batches += 1
        report({"step": len(records), "steps": len(arrivals), "stage": f"{len(batch)} in a batch"})
    result = Result(
        source="measured", experiment_id=e.id, name=e.name, experiment=e.canonical(),
        environment={**fingerprint(), "max_batch": most, "prompts": f"random token ids below {e.model.vocab_size}"},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    summarize(Drive(records, began, time.perf_counter()), w, result)
    result.metrics["batch_mean"] = Metric(value=len(records) / batches, unit="sequences", source="rows of a batch")
    result.metrics |= {f"{k}_bytes": Metric(value=v, unit="bytes", better="lower", source="measured")
                       for k, v in process_memory().items()}  # fmt: skip
    result.notes.append("static padded batches of transformers' generate, without a server in between")
    return result


def _next(arrivals: Sequence[Arrival], done: int, now: float, most: int, closed: bool) -> Sequence[Arrival]:
    """Requests that have arrived and are not served yet, up to one batch."""
    waiting = arrivals[done : done + most]
    return waiting if closed else [r for r in waiting if r.arrival <= now]


def _model(e: Experiment, device: torch.device) -> Any:
    """The library's own model with the experiment's weights."""
    cast(Any, logging).disable_progress_bar()
    w, dtype = e.workload, DTYPES[e.dtype]
    assert isinstance(w, Serve)
    attention = "sdpa" if has(e, "fused_attention") else "eager"
    with tempfile.TemporaryDirectory() as folder:
        if not w.checkpoint:
            save_checkpoint(build(e.model, torch.device("cpu"), dtype, w.seed), Path(folder))
        model: Any = AutoModelForCausalLM.from_pretrained(
            w.checkpoint or folder, attn_implementation=attention, dtype=dtype
        )
    model.generation_config.eos_token_id = None  # outputs have the requested length
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[Any], tokens: int) -> list[float]:
    """Greedy tokens for prompts padded on the left → when each step ended."""
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    clock = _Clock()
    model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=tokens, do_sample=False,
        min_new_tokens=tokens, stopping_criteria=StoppingCriteriaList([clock]),
    )  # fmt: skip
    return clock.times
