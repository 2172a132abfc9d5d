"""Measured training runs: one Case for the speed of a run, one for its memory where published."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ridgeline.graph import training_graph
from ridgeline.predict.interval import Known, spread_of
from ridgeline.predict.known import reserved_by
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.predict.predict import predict
from ridgeline.predict.quick import quick
from ridgeline.predict.step.in_step import FETCH, TRAINING
from ridgeline.predict.step.training_step import communicators
from ridgeline.spec.device import Cluster, Device, Link
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Pretrain, Training
from ridgeline.techniques.memory.recompute import Recompute
from ridgeline.techniques.precision.mixed_precision import MixedPrecision
from ridgeline.techniques.registry import brief, has, of_kind, resolve, techniques_of
from ridgeline.validate.case import Case, largest_kinds
from ridgeline.validate.csv_table import MOST_DEVICES, BadCell, CsvRow
from ridgeline.validate.dtypes import precision_of
from ridgeline.validate.layouts import WHOLE, Judged, Layout, best, layouts, say, smallest_first
from ridgeline.validate.nouns import architecture, device_of

NAME = "training"
REQUIRED = ("device", "layers", "hidden", "heads", "seq_len", "n_devices", "micro_batch")
_PACKED = 512
"""Tokens of one example of packed instruction data (assumption): attention sees no more of a row than it."""
PLAIN_LLAMA = {"norm": 4.0, "rope": 2.0}
"""How much longer the eager kernels of a Llama in plain PyTorch (Hugging Face's, torchtitan's) take than one kernel of
an eager framework, by the bytes they move: an RMSNorm widens, squares, averages, scales and narrows in six (36 bytes an
element forward, 62 backward), a rotation multiplies, negates, joins, multiplies and adds (20)."""
_MEASURED = ("tokens_per_s_per_device", "step_s", "tflops_per_device", "mfu", "hfu")


def cases(
    row: CsvRow,
    workload: type[Training] = Pretrain,
    adapters: Sequence[str] = (),
    chains: Mapping[str, float] | None = None,
    hooks: bool = False,
) -> list[Case]:
    """Predict one run, of ``workload`` and with ``adapters`` before the row's own plan.

    ``chains``: how much longer kinds of operators take in the software that was measured, which runs each as a chain of
    kernels where ours runs one.

    ``hooks``: DeepSpeed's stage 3 on a single card, which shards nothing but fetches every tensor.

    Packed examples attend only to themselves, which makes attention shorter.

    Raises :class:`BadCell` for an unreadable cell, :class:`Incompatible` for an impossible run.
    """
    e, chosen = settled(row, workload, adapters)
    if not row.has("global_batch"):
        row.assumed["global_batch"] = str(e.batch_size)
    result = predict(e)
    eager = _native(row) and not row.flag("compile", False) and e.model.gated
    chains = dict(chains or (PLAIN_LLAMA if eager else {}))
    if "packed" in row.text("note", "").lower():
        chains["attention"] = min(1.0, _PACKED / e.training.seq_len)
    _lengthen(result, chains)
    if hooks:
        _wait_for_hooks(result, e)
    kept = result
    if (
        row.flag("compile", False) and has(e, "products") and not of_kind(e, Recompute)
    ):  # torchao keeps 16-bit activations, and casts them again
        calls = tuple(c for c in e.plan.calls if c.name != "fp8")
        kept = predict(resolve(e.model_copy(update={"plan": Plan(calls=calls)}))[0])
    found = [c for c in (_speed(row, e, result), _memory(row, e, kept)) if c is not None]
    if chosen:
        found = [replace(c, label=f"{c.label} ({chosen})") for c in found]
    if not found:
        raise BadCell(f"no measured quantity: all of {', '.join((*_MEASURED, 'memory_bytes'))} are empty")
    return found


# ---- the row as an experiment ---------------------------------------------------------------------------------------


def experiment(row: CsvRow) -> Experiment:
    """The run as an Experiment: its cluster with the row's own network, its layout as a plan.

    Open parts of the layout are settled as a user would: the fastest that fits.
    """
    return settled(row)[0]


def settled(row: CsvRow, workload: type[Training] = Pretrain, adapters: Sequence[str] = ()) -> tuple[Experiment, str]:
    """The run, and which open parts were chosen here; empty: none."""
    spec, cluster = architecture(row), _cluster(row)
    usual = 3 if _native(row) else 0  # FSDP2's, and Megatron-LM's

    def run(layout: Layout) -> Experiment:
        share = (cluster.size // layout.model_ranks or 1) * layout.micro_batch
        micros = max(1, round(row.count("global_batch", share) / share))  # the nearest number that divides
        work = workload(seq_len=row.count("seq_len", least=2), batch_size=micros * share,
                        micro_batch_size=layout.micro_batch)  # fmt: skip
        plan = Plan.parse([*adapters, *_plan(row, cluster, micros, layout)])
        try:
            return resolve(Experiment(model=spec, cluster=cluster, workload=work, plan=plan))[0]
        except Incompatible as problem:
            raise BadCell(f"not a possible run: {problem.what}") from None

    allowed = layouts(row, spec, cluster, usual)
    if len(allowed) == 1:
        return run(allowed[0]), say(row, allowed[0], allowed)
    judged: list[Judged] = []
    for layout in smallest_first(allowed):
        if any(not j.fits and j.layout.is_within(layout) for j in judged):
            continue  # nor does this one
        try:
            e = run(layout)
        except BadCell:
            continue
        found = quick(e, techniques_of(e.plan))
        merit = found.metrics["tokens_per_s"] if found.fits else -found.metrics["peak_bytes"]
        judged.append(Judged(layout, found.fits, merit))
    if not judged:
        run(allowed[0])  # says why
    chosen = best(judged, usual)
    return run(chosen), say(row, chosen, allowed)


def _cluster(row: CsvRow) -> Cluster:
    device, n = device_of(row), row.count("n_devices", most=MOST_DEVICES)
    each = math.gcd(n, row.count("nodes_of", 8))
    wire = network(row.text("inter_node", ""), device, each)
    return Cluster(device=device.model_copy(update={"network": wire}), devices_per_node=each, nodes=n // each)


def network(text: str, device: Device, per_node: int) -> Link | None:
    """``8x200Gb/s`` (cards × rate), ``1600Gb/s per node``, ``400Gb/s per GPU`` or ``100GbE`` → the link of one device;
    anything else: the device's own."""
    match = re.search(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(Tb|Gb|GB)(?:it)?(?:/?p?s|E)", text)
    if match is None or not float(match[2]) * int(match[1] or 1):
        return device.network
    cards, rate, unit = int(match[1] or 1), float(match[2]), match[3]
    if re.search(r"per (gpu|device|card|rank)", text.lower()):
        cards = per_node
    total = cards * rate * {"Gb": 1.25e8, "GB": 1e9, "Tb": 1.25e11}[unit]
    latency = device.network.latency if device.network else 5e-6
    return Link(name=text, bandwidth=total / per_node, latency=latency, source="the row's inter_node column")


def _native(row: CsvRow) -> bool:
    """Whether the software is PyTorch's own: FSDP2, DTensor, torch.compile and torchao, as in torchtitan."""
    return row.flag("compile", False) or "torchtitan" in row.text("source", "").lower()


def _native_plan(row: CsvRow, cluster: Cluster, micros: int, layout: Layout) -> list[str]:
    """The layout of a run in PyTorch's own software as technique calls.

    Blocks are compiled, the loss only where column ``compiled_loss`` says so. Selective recomputation is by operators,
    tensor parallelism overlaps where the row's name or note says async.
    """
    precision, compiled = precision_of(row, "precision", "bf16"), row.flag("compile", False)
    ranks = cluster.size // (layout.tp * layout.pp)  # those that share a sequence have shards too
    stage = layout.zero_stage
    sharded = stage == 3 and ranks > 1
    loss = "compiled" if compiled and row.flag("compiled_loss", False) else "copies"
    plan = [] if precision in ("fp32", "tf32") else [
        f"mixed_precision:dtype={'fp16' if precision == 'fp16' else 'bf16'},loss={loss},"
        f"weights={'gathered' if sharded else 'low'}"]  # fmt: skip
    if row.flag("flash", True):
        plan.append("flash_attention:generation=2")
    if compiled:
        plan.append("torch_compile:pieces=true")
    if precision == "fp8":
        plan.append("fp8:gathered=codes")
    if layout.tp > 1:
        beside = "async" in (row.text("id", "") + row.text("note", "")).lower()
        plan += [f"tensor_parallel:degree={layout.tp},overlap={str(beside).lower()}", "sequence_parallel"]
    if layout.pp > 1:
        plan.append(f"{_pipeline(layout.pp, layout.interleave, micros)},overlap=false,outputs=kept")
    if layout.cp > 1:
        plan.append(f"ring_attention:degree={layout.cp},exchange=gather")
    if layout.recompute in WHOLE:
        plan.append("recompute")
    elif layout.recompute.startswith(("sel", "op")):
        plan.append("recompute:every=2" if "layer" in layout.recompute else "recompute:policy=products")
    if row.flag("activation_offload", False):
        plan.append("activation_offload")
    experts = row.count("ep", 1, least=0)
    if experts > 1 and ranks > 1:
        plan.append(f"expert_parallel:degree={min(experts, ranks)}")
    if ranks > 1:
        plan.append(f"zero:stage={stage}" if stage else "data_parallel")
    return plan


def _pipeline(stages: int, chunks: int, micros: int) -> str:
    fits = chunks > 1 and micros % stages == 0
    schedule = f"schedule=interleaved,chunks={chunks}" if fits else "schedule=1f1b"
    return f"pipeline:degree={stages},{schedule}"


def _plan(row: CsvRow, cluster: Cluster, micros: int, layout: Layout) -> list[str]:
    """The row's layout as technique calls; ``micros``: micro-batches per step."""
    if _native(row):
        return _native_plan(row, cluster, micros, layout)
    policy, device = layout.recompute, cluster.device
    precision = precision_of(row, "precision", "bf16" if "bf16" in device.peak_flops else "fp16")
    plan = [] if precision in ("fp32", "tf32") else [
        f"mixed_precision:dtype={'fp16' if precision == 'fp16' else 'bf16'},weights=low"]  # fmt: skip
    if precision == "fp8":
        plan.append("fp8:scaling=delayed")  # Transformer Engine's
    flash = row.flag("flash", True)
    internevo = bool(re.search(r"internlm|internevo", row.text("source", "").lower()))
    megatron = not internevo and (row.text("family", "") in ("gpt", "megatron") or layout.tp > 1 or layout.pp > 1)
    fused = megatron or precision == "fp8"  # which means Transformer Engine's kernels
    if flash:
        # InternEvo asked for its release 1.0.5; for ALiBi, llm-foundry took the Triton kernel of that time
        first = internevo or row.text("family", "") == "mpt"
        plan.append(f"flash_attention:generation={1 if first else 3 if fused else 2}")
    fused_loss = str(row.text("family", "") == "mpt").lower()
    plan.append(f"fused_layers:elementwise={str(fused).lower()},loss={fused_loss},chunked=false")
    if layout.tp > 1:
        sequence = row.flag("sequence_parallel", False)
        beside = str(sequence and "fp8" in device.peak_flops).lower()  # as Megatron-LM runs it where it can
        plan.append(f"tensor_parallel:degree={layout.tp},overlap={beside}")
        if sequence:
            plan.append("sequence_parallel")
    if layout.pp > 1:
        waits = "" if "fp8" in device.peak_flops else ",overlap=false"  # Megatron-LM of A100's years
        plan.append(_pipeline(layout.pp, layout.interleave, micros) + waits)
    if layout.cp > 1:
        plan.append(f"ring_attention:degree={layout.cp}")
    if policy in WHOLE:
        # llm-foundry asks for PyTorch's own checkpoints, the others' are reentrant
        plan.append(f"recompute:early_stop={str(row.text('family', '') == 'mpt').lower()}")
    elif policy.startswith(("sel", "attn")):
        if not flash:
            plan.append("recompute:policy=selective")
        elif layout.zero_stage > 1:  # PyTorch's: about every second matrix product is run again
            plan.append("recompute:every=2")
        # Megatron's drops the score matrix, which flash attention never keeps.
    if row.flag("activation_offload", False):
        plan.append("activation_offload")
    ranks, stage = cluster.size // layout.model_ranks, layout.zero_stage
    experts = row.count("ep", 1, least=0)
    if experts > 1 and ranks > 1:
        plan.append(f"expert_parallel:degree={min(experts, ranks)}")
    if ranks > 1:
        trainer = "hf trainer" in row.text("note", "").lower()  # whose stages are DeepSpeed's
        deepspeed = stage == 3 and (trainer or row.text("family", "") in ("gpt", "megatron"))
        unit = ",gathered=tensor" if deepspeed or (internevo and stage < 3) else ""
        late = stage == 3 and (deepspeed or row.text("family", "") == "mpt")  # Composer's default
        unit += ",backward_prefetch=post" if late else ""
        plan.append(f"zero:stage={stage}{unit}" if stage else "data_parallel:overlap=false")
    return plan


# ---- what was published ---------------------------------------------------------------------------------------------


def flops_per_token(m: ModelSpec, length: int, formula: str = "") -> float:
    """FLOPs per token as counted by the publisher: by the row's formula, else 6 N + 12 L h s (arXiv:2204.02311).

    ``96…`` counts recomputation (arXiv:2104.04473, eq. 3), ``72…`` the model alone.
    """
    text = re.sub(r"[\s*]", "", formula.lower())
    layers, h, s, v = m.num_layers, m.hidden_size, length, m.vocab_size
    leading = re.match(r"(96|72)", text)
    if leading:
        return float(leading[1]) * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    attention = 12.0 * layers * m.q_size * s
    if "causal" in text or "lhs/2" in text:
        attention /= 2
    weights = re.search(r"([68])n", text)
    if weights and "+" not in text:
        attention = 0.0
    times = float(weights[1]) if weights else 6.0
    return times * m.num_active_parameters + attention * times / 6.0


def _lengthen(result: Result, chains: Mapping[str, float]) -> None:
    """Scales the times of a step's operators by these factors; the device has waited for the host before."""
    more = sum(r.seconds * (chains.get(r.kind, 1.0) - 1) for r in result.breakdown)
    if more > 0:
        more = max(0.0, more - sum(r.seconds for r in result.breakdown if r.kind == "dispatch"))
    step = result.metrics["step_time_s"]
    result.metrics["tokens_per_s_per_device"].value *= step.value / (step.value + more)
    step.value += more


def _wait_for_hooks(result: Result, e: Experiment) -> None:
    """The step takes at least the host's time for its operators and for fetching every tensor before each pass."""
    tensors = sum(n for _, n in training_graph(e).params)
    passes = 3 if of_kind(e, Recompute) else 2
    calls = sum(r.count for r in result.breakdown if r.phase in ("forward", "backward") and r.kind != "accumulate")
    host = calls * TRAINING.dispatch + e.accumulation * passes * tensors * FETCH
    step = result.metrics["step_time_s"]
    result.metrics["tokens_per_s_per_device"].value *= step.value / max(step.value, host)
    step.value = max(step.value, host)


def _speed(row: CsvRow, e: Experiment, result: Result) -> Case | None:
    name = next((c for c in _MEASURED if row.has(c)), None)
    if name is None:
        return None
    measured = row.number(name, above=0.0)
    m, length = e.model, e.training.seq_len
    rate = result.metrics["tokens_per_s_per_device"].value
    peak = peak_flops(e.cluster.device, _dtype(e))
    per_token = flops_per_token(m, length, row.text("flops_formula", ""))
    executed = per_token * (4 / 3 if _recomputed(e) else 1.0)
    # Published utilization counts the model's FLOPs against the dense peak.
    scale = {
        "tokens_per_s_per_device": 1.0,
        "step_s": 1.0,
        "tflops_per_device": per_token / 1e12,
        "mfu": per_token / peak,
        "hfu": executed / peak,
    }[name]
    tokens = e.batch_size * length / e.world
    predicted = tokens / rate if name == "step_s" else rate * scale
    seconds = executed * tokens / peak if name == "step_s" else executed / peak / scale
    return Case(
        group=f"{e.cluster.device.name} {row.text('family', 'llama')} {_dtype(e)}",
        quantity=name,
        measured=measured,
        predicted=predicted,
        label=f"{m.name}: {row.count('n_devices')} × {e.cluster.device.name}, {' '.join(brief(e.plan))}",
        terms=(seconds,),
        inverse=name != "step_s",
        spread=spread_of(result.breakdown, e.task),
        source=result.metrics["step_time_s"].source,
        why=largest_kinds(result.breakdown, result.metrics["step_time_s"].value),
        alternatives=_alternatives(row),
        better="lower" if name == "step_s" else "higher",
        line=row.line,
    )


def _memory(row: CsvRow, e: Experiment, result: Result) -> Case | None:
    if not row.has("memory_bytes"):
        return None
    categories = {item.category: item.bytes for item in result.memory}
    categories.pop("framework", None)  # which, like communicators, a framework's own figure leaves out
    return Case(
        group=f"{e.cluster.device.name} memory",
        quantity="memory_bytes",
        measured=row.number("memory_bytes", above=0.0),
        predicted=sum(categories.values()) - communicators(e),
        label=f"{e.model.name}: {' '.join(brief(e.plan))}",
        terms=(sum(categories.get(k, 0.0) for k in ("parameters", "gradients", "optimizer")),
               categories.get("activations", 0.0)),
        spread=Known(reserved=reserved_by(e)).memory_spread,
        why=f"largest category: {max(categories, key=lambda k: categories[k])}",
        line=row.line,
    )  # fmt: skip


def _dtype(e: Experiment) -> str:
    if has(e, "products"):
        return "fp8"
    mixed = of_kind(e, MixedPrecision)
    return mixed.dtype if mixed else "fp32"


def _recomputed(e: Experiment) -> bool:
    """Whether all blocks are computed again."""
    recompute = of_kind(e, Recompute)
    return recompute is not None and recompute.policy == "full"


def _alternatives(row: CsvRow) -> Hashable:
    """Runs of one model on one cluster over one batch differ only in their plan."""
    same = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "device", "n_devices")
    return tuple(row.text(c, "") for c in (*same, "global_batch"))


__all__ = ["NAME", "REQUIRED", "cases", "experiment", "flops_per_token", "network", "settled"]
