"""From an experiment or a checkpoint to an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch

from ridgeline import catalog
from ridgeline.nn.init import build
from ridgeline.nn.packed_model import load_packed
from ridgeline.nn.transformer import Transformer
from ridgeline.runtime.serving import Drafts, ServeBuild
from ridgeline.serve.adapters import AdapterTable
from ridgeline.serve.blocks import Blocks
from ridgeline.serve.drafting import Drafting, ModelDrafter, lookup
from ridgeline.serve.engine import Engine
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.sequence import Sequence as Row
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.serving import context
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import check, normalise, require_runnable

DEFAULT_PLAN = ("paged_kv", "continuous_batching", "chunked_prefill", "hierarchical_search")
"""What ``ridgeline serve`` switches on by itself."""
DRAFTED = 16
"""Sequences of full length that a drafting model's cache has room for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_engine(e: Experiment, device: torch.device, model: Transformer | None = None) -> Engine:
    """The engine that a serving experiment describes. ``model``: at hand already, instead of the checkpoint's."""
    e = normalise(e)
    w = e.workload
    if not isinstance(w, Serve):
        raise UserError(f"task {e.task!r} is not served", "use a workload of kind serve")
    made = check(e)
    require_runnable(e)
    if model is None:
        dtype = DTYPES[e.dtype]
        model = (
            load_packed(Path(w.checkpoint), dtype, device) if w.checkpoint else build(e.model, device, dtype, w.seed)
        )
    model.requires_grad_(False)
    run = ServeBuild(e, model, device)
    for technique in made:
        technique.scheduling(run)
        technique.serve(run)
    run.asked(w)
    width = next(run.model.parameters()).element_size()
    blocks, longest = run.pool(e.model, w, width, _free(device)) if e.model.causal else (0, context(e.model, w))
    runner = Runner(run.model, blocks * run.block_size, run.block_size, longest, run.cache_kind)
    sampler = Sampler(ends_of(w.checkpoint), run.hierarchical)
    table = Blocks(blocks, run.block_size, run.share_prefixes)
    engine = Engine(runner, table, sampler, run.limits, longest, w.seed)
    if run.adapters:
        engine.adapters = AdapterTable(run.model, table, run.block_bytes(e.model, width))
    if run.drafts is not None:
        engine.drafter = _drafting(run, run.drafts, longest)
    return engine


def load_engine(checkpoint: Path, plan: Iterable[str] = DEFAULT_PLAN, **workload: object) -> Engine:
    """An engine for a checkpoint on this machine, with fields of :class:`Serve` as ``workload``."""
    catalog.allow_unprobed()
    w = Serve(**{"checkpoint": str(checkpoint), "prompt_len": 1, "output_len": 1, **workload})
    e = Experiment(model=ModelSpec.from_path(checkpoint), cluster=catalog.cluster("local"), workload=w,
                   plan=Plan.parse(list(plan)))  # fmt: skip
    return make_engine(e, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _free(device: torch.device) -> float:
    """Bytes of the device's memory that nobody uses."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _drafting(run: ServeBuild, drafts: Drafts, longest: int) -> Drafting:
    if drafts.model is not None:
        longest = min(longest, drafts.model.spec.max_positions)
        blocks = DRAFTED * -(-longest // run.block_size)
        return Drafting(ModelDrafter(drafts.model, blocks, run.block_size, longest), drafts.tokens)

    def propose(seqs: Sequence[Row], most: list[int]) -> list[list[int]]:
        return [lookup(s.tokens, drafts.ngram, n) for s, n in zip(seqs, most, strict=True)]

    return Drafting(propose, drafts.tokens)


def ends_of(checkpoint: str | None) -> frozenset[int]:
    """The end-of-sequence tokens that a checkpoint's ``generation_config.json`` or ``config.json`` names."""
    for name in ("generation_config.json", "config.json"):
        file = Path(checkpoint or "", name)
        if checkpoint and file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
