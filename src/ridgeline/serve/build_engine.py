"""From an experiment or a checkpoint to an engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ridgeline import catalog
from ridgeline.nn.adapters.lora_slots import LoraSlots
from ridgeline.nn.checkpoint.files import config_dtype, read_config
from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.memory.decoder import find_decoder
from ridgeline.nn.model.init import DTYPES, build
from ridgeline.nn.model.own_kernels import settle_lora
from ridgeline.nn.model.served import fuse_served
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.nn.quant.torch_codes import multiplies_bf16
from ridgeline.runtime.batch_order import CostOrderedBatches, free
from ridgeline.runtime.mesh import Mesh
from ridgeline.runtime.serve_build import Drafts, ServeBuild
from ridgeline.serve import ranks
from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.agreed_capture import AgreedCapture, CannotCapture, host_group, require_same
from ridgeline.serve.batching import measure_costs, measure_task
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.draft_tree import Draft
from ridgeline.serve.drafting import Drafting, ModelDrafter, NGrams
from ridgeline.serve.engine import Engine
from ridgeline.serve.head_drafter import HeadDrafter
from ridgeline.serve.ranks import RankedRunner
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.sequence import Sequence as QueuedSequence
from ridgeline.serve.sequence import Sequence as Row
from ridgeline.serve.step_graphs import CudaCapture, StepGraphs
from ridgeline.serve.transfer.exports import Exports
from ridgeline.serve.transfer.imports import Imports
from ridgeline.serve.transfer.layout import fingerprint
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.json_file import read_json
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.scheduling import context
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import default_plan, make, mesh_axes, require_runnable, resolve, techniques_of

DEFAULT_PLAN = default_plan("serve")
"""Techniques that ``ridgeline serve`` enables by default."""


def make_engine(e: Experiment, device: torch.device, model: Transformer | None = None) -> Engine:
    """The engine that a serving experiment describes. ``model``: already loaded, instead of the checkpoint's.

    A plan that divides the model starts the other ranks' processes, unless they are there (a job of several ranks).
    """
    run = _built(e, device, model)
    e, w = run.experiment, run.experiment.workload
    assert isinstance(w, Serve)
    blocks, longest, each = _pool(run)
    runner = _runner(run, blocks)
    run.kernels.require_used()
    run.note_products()
    table = Blocks(blocks, run.block_size, run.share_prefixes)
    drafter = None if run.drafts is None else _drafting(run, run.drafts, longest, runner, table)
    if run.block_store is not None:  # of all that is in a block, a draft head's too
        table.store = run.block_store(runner.pool(), run.block_size)
    engine = Engine(runner, table, Sampler(ends_of(w.checkpoint), run.hierarchical), run.limits, longest, w.seed)
    if run.adapters:
        engine.adapters = AdapterTable(run.model, table, each, longest, runner.slots)
        runner.route = engine.adapters.route
    if run.role:
        engine.role = run.role
        lossy = [str(call) for call in e.plan.calls if not make(call).card.lossless]
        engine.fingerprint = partial(fingerprint, runner, w.checkpoint, lossy)
        engine.exports, engine.imports = Exports(engine, run.whole_below), Imports(engine)
    engine.drafter = drafter
    if run.cut is not None:
        measure = partial(measure_costs, runner, table, run.limits, longest)
        shared = measure()
        tasks = engine.adapters if run.per_task else None
        own = free if tasks is None else measure_task(tasks, shared, measure)
        engine.scheduler.order = CostOrderedBatches[QueuedSequence](
            run.cut, run.limits, shared, own, lambda s: (s.total, s.group.request.adapter or "")
        )
    if device.type == "cuda":  # on a CPU, where the host computes, it gains nothing
        engine.go_ahead()
    return engine


def make_follower(e: Experiment, device: torch.device) -> RankedRunner:
    """The part of an engine that runs on a rank other than the first."""
    run = _built(e, device, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without CUDA graphs")  # of which rank 0 warns
        runner = _runner(run, _pool(run)[0])
    assert isinstance(runner, RankedRunner)
    return runner


def _built(e: Experiment, device: torch.device, model: Transformer | None) -> ServeBuild:
    """The model with every technique's changes; on several ranks, this one's part of it."""
    e, techniques = resolve(e)
    w = e.workload
    if not isinstance(w, Serve):
        raise UserError(f"task {e.task!r} is not served", "use a workload of kind serve")
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
        if w.checkpoint:
            later = tuple(prefix for t in techniques for prefix in t.reads_itself(e))
            model = load_packed(Path(w.checkpoint), dtype, device, later=later, mapped=True)
        else:
            model = build(e.model, device, dtype, w.seed)
    model.requires_grad_(False)
    model.set_attention("naive")
    run = ServeBuild(e, model, device, kv_heads=e.model.cached_heads, followers=followers)
    run.mesh = Mesh.make(e, device.type, e.parallel.get("ep", 1)) if e.world > 1 else None
    run.captured = all(technique.captured for technique in techniques)
    for technique in techniques:
        technique.scheduling(run)
        technique.serve(run)
    if run.memory is None:
        fuse_served(model, run.kernels)
    run.take_workload(w)
    return run


def _pool(run: ServeBuild) -> tuple[int, int, float]:
    """Blocks of the pool, the longest prompt and output together, and bytes of a block on this rank.

    Each of several ranks knows its own memory and layers; all take the smallest pool. Raises :class:`UserError`, on all
    ranks, where one has no room.
    """
    e, w, model = run.experiment, run.experiment.workload, run.model
    assert isinstance(w, Serve)
    width = next(model.parameters()).element_size()
    each = run.block_bytes(e.model, len(model.layers), run.kv_heads, width)
    if not e.model.causal:
        return 0, context(e.model, w), each
    kind = "gpu" if run.device.type == "cuda" else "cpu"
    if run.mesh is not None:  # NCCL's buffers, hundreds of megabytes, are not the pool's
        for group in (run.mesh.group("inner", "tp"), dist.group.WORLD):  # messages are of the latter
            dist.all_reduce(torch.zeros(1, device=run.device), group=group)
    own, refusal = (0, 0), None
    try:
        own = run.pool(e.model, w, each, _free(run), kind, width, e.parallel.get("tp", 1))
    except UserError as why:
        if run.mesh is None:
            raise
        refusal = why
    found = [(own, refusal)] if run.mesh is None else ranks.gathered((own, refusal))
    for rank, (_, one) in enumerate(found):
        if one is not None:
            raise UserError(f"rank {rank}: {one.what}", one.fix)
    return min(blocks for (blocks, _), _ in found), min(longest for (_, longest), _ in found), each


def _runner(run: ServeBuild, blocks: int) -> Runner:
    """This rank's runner, with a pool of ``blocks``."""
    w = run.experiment.workload
    assert isinstance(w, Serve)
    longest, padded = context(run.experiment.model, w), run.limits.padded
    graphs = run.captured and run.device.type == "cuda" and blocks > 0
    slots = (blocks + graphs) * run.block_size  # a block for padding of captured steps
    given = run.model, slots, run.block_size, longest, run.cache_kind
    runner: Runner
    if run.mesh is not None:
        runner = RankedRunner(run.mesh, *given, kv_heads=run.kv_heads, padded=padded, kernels=run.kernels)
        runner.followers = run.followers
    else:
        runner = Runner(*given, padded=padded, kernels=run.kernels)
        runner.slots = _slots(run) if run.adapters else None
    if run.memory is not None and run.mesh is None:
        runner.compute = run.memory(runner.compute, runner.layout, run.device)
    elif not run.adapters:
        runner.decoder = find_decoder(run.model)
    captures = graphs and runner.layout.whole is not None
    if run.mesh is not None:  # one of several GPUs may be too old for it
        captures = all(ranks.gathered(captures))
    if captures:
        drafts = 0 if run.drafts is None else run.drafts.tokens
        captured = StepGraphs(runner, blocks, run.limits, longest, CudaCapture, drafts)
        group = None
        if run.mesh is not None:
            group, summing = host_group(), run.mesh.group("tp")
            captured.make = lambda: AgreedCapture(CudaCapture(), group, summing)
            captured.failure = CannotCapture
        _capture(runner, captured, group)
        if isinstance(runner, RankedRunner) and runner.graphs is not None:
            runner.watch()
    return runner


def _slots(run: ServeBuild) -> LoraSlots | None:
    """Slots for plain LoRA adapters, where there are kernels for it."""
    if run.device.type != "cuda" or run.memory is not None or not has_triton():
        return None
    from ridgeline.nn.kernels.grouped_lora import add_lora

    slots = LoraSlots(run.model, add_lora)
    return slots if settle_lora(slots, run.kernels) else None


def _capture(runner: Runner, graphs: StepGraphs, group: ProcessGroup | None = None) -> None:
    """Capture steps before the engine is ready; where that cannot be, they stay as they are. ``group``: of all ranks,
    which then do the same."""
    try:
        if group is not None:
            require_same(graphs, group)
        graphs.warm_up()
    except graphs.failure as e:
        warnings.warn(f"steps run without CUDA graphs: {str(e).splitlines()[0]}", stacklevel=2)
    else:
        runner.graphs = graphs
    finally:
        if runner.graphs is None:
            graphs.graphs.clear()  # also where an exception keeps them: NCCL waits for graphs with its operations
    torch.cuda.empty_cache()  # of what was run beside the main stream before it was captured


def load_engine(
    checkpoint: Path, plan: Iterable[str] = DEFAULT_PLAN, cluster: Cluster | None = None, **workload: object
) -> Engine:
    """An engine for a checkpoint on this machine, with fields of :class:`Serve` as ``workload``. ``cluster``: this
    machine with less memory. A dtype that is left to us is :func:`default_dtype`'s."""
    catalog.allow_unprobed()
    w = Serve(**{"checkpoint": str(checkpoint), "prompt_len": 1, "output_len": 1, **workload})
    if w.dtype == "auto":
        w = w.model_copy(update={"dtype": default_dtype(checkpoint)})
    calls = Plan.parse(list(plan))
    world = math.prod(mesh_axes("serve", techniques_of(calls)).values())
    cluster = cluster or catalog.cluster(f"{world}xlocal")
    e = Experiment(model=ModelSpec.from_path(checkpoint), cluster=cluster, workload=w, plan=calls)
    return make_engine(e, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def default_dtype(checkpoint: Path) -> str:
    """The dtype that a checkpoint is served in unless the user says otherwise: "auto", which is bf16 on a GPU and fp32
    on a CPU; fp16 on GPUs without bf16, those before Ampere; bf16 for weights in bf16 on a CPU that multiplies it
    (AVX512-BF16, AMX; on others the operators that have no kernel of ours take two to four times as long as in
    fp32)."""
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "fp16"
    stored = config_dtype(checkpoint) is torch.bfloat16 and "quantization_config" not in read_config(checkpoint)
    return "bf16" if stored and not torch.cuda.is_available() and multiplies_bf16() else "auto"


def _free(run: ServeBuild) -> float:
    """Free bytes of the device's memory, or what the experiment allows the device if that is less."""
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*run.model.parameters(), *run.buffers)}
    device, limit = run.device, run.experiment.cluster.device.memory_bytes - sum(held.values())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of whole weights, where a rank keeps a part, and of those that were merged
        return min(torch.cuda.mem_get_info(device)[0], limit)
    free: float = psutil.virtual_memory().available - run.model.mapped_bytes
    return min(free, limit)


def _drafting(run: ServeBuild, drafts: Drafts, longest: int, runner: Runner, table: Blocks) -> Drafting:
    if drafts.head is not None:
        drafts.head.body.set_attention(run.model.backend)
        most = run.limits.max_num_batched_tokens  # with the last known token: larger trees are never checked
        drafter = HeadDrafter(drafts.head, runner, table, table.count * table.size, longest, drafts.branches,
                              min(drafts.nodes, most - 1), most)  # fmt: skip
        return Drafting(drafter, drafts.tokens, drafts.head)
    if drafts.model is not None:
        fuse_served(drafts.model, run.kernels)
        drafts.model.set_attention(run.model.backend)
        blocks = run.draft_blocks(longest, table.count)
        longest = min(longest, drafts.model.spec.max_positions)
        small = ModelDrafter(drafts.model, blocks, run.block_size, longest)
        if run.captured and run.device.type == "cuda" and small.runner.layout.whole is not None:
            # It reads what was accepted of the last draft, and one more token.
            most = min(run.limits.max_num_batched_tokens, run.limits.max_num_seqs * (drafts.tokens + 1))
            limits = replace(run.limits, max_num_batched_tokens=most)
            _capture(small.runner, StepGraphs(small.runner, blocks, limits, longest, CudaCapture))
        return Drafting(small, drafts.tokens, drafts.model)

    def propose(seqs: Sequence[Row], most: list[int]) -> list[Draft]:
        return [Draft(_looked_up(s, drafts.ngram, n)) for s, n in zip(seqs, most, strict=True)]

    return Drafting(propose, drafts.tokens)


def _looked_up(seq: Row, longest: int, most: int) -> list[int]:
    seq.ngrams = seq.ngrams or NGrams(longest)
    return seq.ngrams.lookup(seq.tokens, most)


def ends_of(checkpoint: str | None) -> frozenset[int]:
    """The end-of-sequence tokens that a checkpoint's ``generation_config.json`` or ``config.json`` names."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(Path(checkpoint, name)).get("eos_token_id") if checkpoint else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
