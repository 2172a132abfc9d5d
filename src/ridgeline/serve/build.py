"""From an experiment or a checkpoint to an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ridgeline import catalog
from ridgeline.nn.init import build
from ridgeline.nn.packed_model import load_packed
from ridgeline.nn.transformer import Transformer
from ridgeline.runtime.mesh import Mesh
from ridgeline.runtime.serving import Drafts, ServeBuild
from ridgeline.serve import ranks
from ridgeline.serve.adapters import AdapterTable
from ridgeline.serve.blocks import Blocks
from ridgeline.serve.drafting import Drafting, ModelDrafter, lookup
from ridgeline.serve.engine import Engine
from ridgeline.serve.ranks import RankedRunner
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.sequence import Sequence as Row
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import check, normalise, require_runnable, techniques

DEFAULT_PLAN = ("paged_kv", "continuous_batching", "chunked_prefill", "hierarchical_search")
"""What ``ridgeline serve`` switches on by itself."""
CACHE_SHARE = 0.25
"""Of the memory that is free, what the key/value pool takes at most where nothing is said."""
DRAFTED = 16
"""Sequences of full length that a drafting model's cache has room for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_engine(e: Experiment, device: torch.device, model: Transformer | None = None) -> Engine:
    """The engine that a serving experiment describes. ``model``: at hand already, instead of the checkpoint's.

    A plan that divides the model starts the other ranks' processes, unless they are there (a job of several ranks).
    """
    run = _built(e, device, model)
    e, w = run.experiment, run.experiment.workload
    assert isinstance(w, Serve)
    limits = run.limits
    limits.max_num_seqs = w.max_num_seqs or limits.max_num_seqs
    limits.max_num_batched_tokens = w.max_num_batched_tokens or limits.max_num_batched_tokens
    longest = longest_of(e)
    blocks = _blocks(run, longest) if e.model.causal else 0
    runner = _runner(run, blocks)
    table = Blocks(blocks, run.block_size, run.share_prefixes)
    longest = min(longest, blocks * run.block_size) if e.model.causal else longest
    engine = Engine(runner, table, Sampler(ends_of(w.checkpoint), run.hierarchical), limits, longest, w.seed)
    if run.adapters:
        engine.adapters = AdapterTable(run.model, table, _block_bytes(run))
    if run.drafts is not None:
        engine.drafter = _drafting(run, run.drafts, longest)
    return engine


def make_follower(e: Experiment, device: torch.device) -> RankedRunner:
    """The part of an engine that a rank other than the first is."""
    run = _built(e, device, None)
    runner = _runner(run, 0)
    assert isinstance(runner, RankedRunner)
    return runner


def longest_of(e: Experiment) -> int:
    """Longest prompt and output together."""
    assert isinstance(e.workload, Serve)
    return min(e.workload.max_model_len or e.model.max_positions, e.model.max_positions)


def _built(e: Experiment, device: torch.device, model: Transformer | None) -> ServeBuild:
    """The model with every technique's changes; on several ranks, this one's part of it."""
    e = normalise(e)
    w = e.workload
    if not isinstance(w, Serve):
        raise UserError(f"task {e.task!r} is not served", "use a workload of kind serve")
    made = check(e)
    require_runnable(e)
    if e.data_parallel > 1:
        raise Incompatible(
            f"{e.world} devices are {e.data_parallel} replicas, and an engine is one",
            "start a server for each, or divide the model with tensor_parallel or pipeline",
        )
    followers = ranks.start(e) if e.world > 1 and not dist.is_initialized() else []
    if followers:
        device = torch.device("cuda", 0) if dist.get_backend() == "nccl" else torch.device("cpu")
    if model is None:
        dtype = DTYPES[e.dtype]
        model = (
            load_packed(Path(w.checkpoint), dtype, device) if w.checkpoint else build(e.model, device, dtype, w.seed)
        )
    model.requires_grad_(False)
    run = ServeBuild(e, model, device, kv_heads=e.model.num_kv_heads, followers=followers)
    run.mesh = Mesh.make(e, device.type) if e.world > 1 else None
    for technique in made:
        technique.serve(run)
    return run


def _runner(run: ServeBuild, blocks: int) -> Runner:
    """This rank's runner; all have as many ``blocks`` as the first."""
    longest = longest_of(run.experiment)
    if run.mesh is None:
        return Runner(run.model, blocks * run.block_size, run.block_size, longest, run.cache_kind)
    said = [blocks]
    dist.broadcast_object_list(said)
    runner = RankedRunner(run.mesh, run.model, said[0] * run.block_size, run.block_size, longest, run.cache_kind,
                          kv_heads=run.kv_heads)  # fmt: skip
    runner.followers = run.followers
    return runner


def load_engine(checkpoint: Path, plan: Iterable[str] = DEFAULT_PLAN, **workload: object) -> Engine:
    """An engine for a checkpoint on this machine, with fields of :class:`Serve` as ``workload``."""
    catalog.allow_unprobed()
    w = Serve(**{"checkpoint": str(checkpoint), "prompt_len": 1, "output_len": 1, **workload})
    calls = Plan.parse(list(plan))
    world = math.prod(n for t in techniques(calls) for n in t.axes().values())
    e = Experiment(model=ModelSpec.from_path(checkpoint), cluster=catalog.cluster(f"{world}xlocal"), workload=w,
                   plan=calls)  # fmt: skip
    return make_engine(e, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _blocks(run: ServeBuild, longest: int) -> int:
    """Blocks of the pool: what was asked for, or what the running sequences could use, within a share of memory."""
    w = run.experiment.workload
    assert isinstance(w, Serve)
    per_block = _block_bytes(run)
    most = run.limits.max_num_seqs * -(-longest // run.block_size)
    if w.kv_cache_bytes is not None:
        found = int(w.kv_cache_bytes / per_block)
    else:
        free = (
            torch.cuda.mem_get_info(run.device)[0] if run.device.type == "cuda" else psutil.virtual_memory().available
        )
        found = min(most, int(CACHE_SHARE * free / per_block))
    if found < 2:
        raise UserError(
            f"the key/value pool has room for {max(0, found)} blocks of {per_block:.0f} bytes",
            "give it more memory, or use kv_quant",
        )
    return found


def _drafting(run: ServeBuild, drafts: Drafts, longest: int) -> Drafting:
    if drafts.model is not None:
        longest = min(longest, drafts.model.spec.max_positions)
        blocks = DRAFTED * -(-longest // run.block_size)
        return Drafting(ModelDrafter(drafts.model, blocks, run.block_size, longest), drafts.tokens)

    def propose(seqs: Sequence[Row], most: list[int]) -> list[list[int]]:
        return [lookup(s.tokens, drafts.ngram, n) for s, n in zip(seqs, most, strict=True)]

    return Drafting(propose, drafts.tokens)


def _block_bytes(run: ServeBuild) -> float:
    """Memory of one block of the pool."""
    head, wide = run.experiment.model.head_dim, next(run.model.parameters()).element_size()
    each = kv_bytes(run.cache_kind, head) if run.cache_kind else wide
    return run.block_size * 2 * len(run.model.layers) * run.kv_heads * head * each


def ends_of(checkpoint: str | None) -> frozenset[int]:
    """The end-of-sequence tokens that a checkpoint's ``generation_config.json`` or ``config.json`` names."""
    for name in ("generation_config.json", "config.json"):
        file = Path(checkpoint or "", name)
        if checkpoint and file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
