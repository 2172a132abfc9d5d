"""The layer-wise driver: a checkpoint in, block by block through a plan's techniques, a smaller checkpoint out.

One decoder block (of a mixture: one expert, or those that a technique takes together) is in memory at a time, beside
the calibration windows' hidden states.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compress.calibration import SELF, Hidden, calibration_windows, load_text, own_windows
from ridgeline.compress.output import Output, config_of, layer_of, their_tensors
from ridgeline.compress.walk import ReadExpert, Walker
from ridgeline.nn.checkpoint.checkpoint import Reader, config_dtype, load_checkpoint, save_checkpoint
from ridgeline.nn.checkpoint.formats import Format, writer
from ridgeline.nn.checkpoint.formats.compressed_tensors import CompressedTensors
from ridgeline.nn.checkpoint.formats.gguf import require_gguf, write_gguf
from ridgeline.nn.checkpoint.formats.gptq import GPTQFormat
from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline
from ridgeline.nn.checkpoint.hf_names import links, require_twin
from ridgeline.nn.model.init import assign
from ridgeline.nn.model.transformer import Block, Transformer
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Outliers, Packed, Stored
from ridgeline.nn.quant.sparse import Sparse
from ridgeline.nn.quant.ternary import Ternary
from ridgeline.runtime.compress_build import CompressBuild, ModelJob
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Compress
from ridgeline.techniques.registry import check, normalize

DENSE = "dense"
"""Format in which codes are expanded before they are written."""
GGUF = "gguf"
"""Format that is one file beside the checkpoint, converted from it at the end."""


def compress(e: Experiment, device: torch.device, options: dict[str, Any], report: Any) -> dict[str, Any]:
    """Compress ``workload.checkpoint`` by the plan into the folder ``options["out"]``; returns the report.

    Options: ``out``, ``format`` (see :mod:`ridgeline.nn.checkpoint.formats`, or "dense", "gguf"; None:
    compressed-tensors, or our own where that cannot hold what the plan makes), ``resume``. Raises :class:`UserError`.
    """
    e = normalize(e)
    made = check(e)
    started = time.perf_counter()
    w = e.workload
    assert isinstance(w, Compress)
    assert w.checkpoint is not None
    source, dtype = Path(w.checkpoint), config_dtype(Path(w.checkpoint))
    spec = ModelSpec.from_path(source)
    require_twin(spec)
    own = any(t.own_format for t in made)
    name = options.get("format") or (Ridgeline.name if own else CompressedTensors.name)
    form = None if name == DENSE else writer(CompressedTensors.name if name == GGUF else name)
    if name == GGUF:
        require_gguf(spec)
    wide = dtype == torch.bfloat16 and name not in (GPTQFormat.name, GGUF)
    scale_dtype = torch.bfloat16 if wide else torch.float16  # what the format stores, or the checkpoint
    run = CompressBuild(e, spec, device, scale_dtype)
    for technique in made:
        technique.compress(run)
    if not (run.whole or run.at_site or run.before_block or run.after_block):
        raise UserError("the plan compresses nothing", "switch a technique on: --with gptq:bits=4,group_size=128")
    windows = torch.empty(0, w.seq_len, dtype=torch.int64)  # weights alone: nothing passes through the model
    reading = time.perf_counter()
    if run.wants or run.whole or run.before_block or run.after_block:
        report({"stage": "calibration text"})
        windows = own_windows(w) if w.data == SELF else calibration_windows(w, load_text(w, spec.vocab_size))
    reading = time.perf_counter() - reading
    output = Output(Path(options["out"]), _identity(e, source, windows, options), options.get("resume", True))
    if run.whole:
        source = _whole(run, output, source, windows, report)
        spec = run.spec
    reader = Reader(source, spec)
    records, coverage = _stream(run, spec, reader, dtype, form, windows, output, report)
    stored, inputs = _gathered(output)
    quantized = set(stored)
    dense = sorted(m for m in _linear_modules(spec) if m not in quantized)
    original = Path(w.checkpoint)
    config = config_of(json.loads((original / "config.json").read_text(encoding="utf-8")), e.model, spec, dtype, form,
                       stored, dense, inputs)  # fmt: skip
    total = sum(part["bytes"] for part in output.journal["parts"].values())
    weights = {r["layer"]: r for r in records}
    numel = {name: r.pop("numel") for name, r in weights.items()}
    result = {
        "schema": "ridgeline.compression/1", "plan": e.plan.strings(), "source": w.checkpoint,
        "format": name, "out": str(options["out"]),
        "calibration": {"data": w.data, "samples": w.samples, "seq_len": w.seq_len, "seed": w.seed,
                        "seconds": reading},
        "bits_per_weight": sum(weights[n]["bits"] * k for n, k in numel.items()) / max(1, sum(numel.values())),
        "zeros": sum(weights[n]["zeros"] * k for n, k in numel.items()) / max(1, sum(numel.values())),
        "checkpoint_bytes": total, "parameters": spec.num_parameters, "layers": list(weights.values()),
        "blocks": {name: part["said"] for name, part in output.journal["parts"].items() if part.get("said")},
        "experts": coverage, "seconds": time.perf_counter() - started, "peak_rss_bytes": peak_rss(),
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads()},
    }  # fmt: skip
    if name == GGUF:
        output.finish(config, result, original, lambda folder: write_gguf(folder, folder / "model.gguf"))
    else:
        output.finish(config, result, original)
    return result


def _identity(e: Experiment, source: Path, windows: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in source.glob("*.safetensors"))
    text = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
    return {"plan": e.plan.strings(), "files": files, "windows": text, "format": options.get("format")}


def _whole(run: CompressBuild, output: Output, source: Path, windows: Tensor, report: Any) -> Path:
    """Techniques that need the whole model at once; what they made is a checkpoint of its own from then on."""
    place = output.partial / "whole"
    if not (place / "config.json").is_file():
        job = ModelJob(load_checkpoint(source, dtype=torch.float32), windows, report)
        for step in run.whole:
            step(job)
        save_checkpoint(job.model, place)
    run.spec = ModelSpec.from_path(place)
    return place


def _stream(
    run: CompressBuild, spec: ModelSpec, reader: Reader, dtype: torch.dtype, form: Format | None, windows: Tensor,
    output: Output, report: Any,
) -> tuple[list[dict[str, Any]], dict[str, int]]:  # fmt: skip
    """All parts through the techniques; (records of layers, calibration rows of every expert)."""
    with torch.device("meta"):
        skeleton = Transformer(spec)
    blocks = dict(skeleton.layers.items())
    skeleton.layers = nn.ModuleDict()
    assert skeleton.embed is not None
    _load(skeleton.embed, "embed", reader)
    walker = Walker(run, skeleton, dtype, report, output.partial, expands=form is None,
                    archives=isinstance(form, Ridgeline))  # fmt: skip
    hidden = Hidden(windows.shape[0], windows.shape[1], spec.hidden_size, output.partial, "hidden")
    walker.embed(windows, hidden)
    teacher = None
    if "teacher" in run.wants:
        teacher = Hidden(windows.shape[0], windows.shape[1], spec.hidden_size, output.partial, "teacher")
        teacher.data.copy_(hidden.data)
    if not output.done("embed"):
        tensors, _ = their_tensors(spec, "embed", dict(_named(skeleton.embed, "embed")), {}, form, dtype)
        output.write("embed", tensors)
    skeleton.embed = None
    for index in range(spec.num_layers):
        part = f"layers.{index}"
        report({"step": index, "steps": spec.num_layers, "stage": f"block {index + 1} of {spec.num_layers}"})
        block = blocks.pop(str(index))
        assert isinstance(block, Block)
        if teacher is not None or not output.done(part):
            _load(block, part, reader)
        if teacher is not None:
            if spec.is_moe_layer(index):
                raise UserError("a teacher's hidden states need whole blocks, which a mixture's are not here",
                                "leave norm_tweaking out")  # fmt: skip
            walker.pass_through(block, teacher)
        if output.done(part):
            written = Reader(output.partial, spec, [output.file(part)], form)
            _load(block, part, written)
            ours = _module_names(spec, part)
            codes = {ours[m]: InputCode(**c) for m, c in output.journal["parts"][part]["inputs"].items()}
            walker.plain(codes).block(index, block, hidden, None, _experts(written, part))
            continue
        at = len(walker.records)
        kept = walker.block(index, block, hidden, teacher, _experts(reader, part))
        tensors, stored = their_tensors(spec, part, dict(_named(block, part)), kept, form, dtype)
        names = {our: their for their, our in _module_names(spec, part).items()}
        output.write(
            part, tensors, layers=walker.records[at:], said=walker.said,
            packed={m: _scheme(s) for m, s in stored.items()},
            inputs={names[n]: asdict(la.input) for n, la in kept.items() if la.input is not None},
        )  # fmt: skip
        del block, kept, tensors, stored
    hidden.close()
    if not output.done("head"):
        rest = {}
        for name, module in (("norm", skeleton.norm), ("head", skeleton.head)):
            if module is None or (name == "head" and spec.tie_embeddings):
                continue
            _load(module, name, reader)
            rest.update(_named(module, name))
        tensors = {}
        for name in ("norm", "head"):
            tensors.update(their_tensors(spec, name, rest, {}, form, dtype)[0])
        output.write("head", tensors)
    report({"step": spec.num_layers, "steps": spec.num_layers, "stage": "done"})
    records = [r for part in output.journal["parts"].values() for r in part.get("layers", [])]
    coverage = {r["layer"].rpartition(".")[0]: r["tokens"] for r in records if ".experts." in r["layer"]}
    return records, coverage


def _experts(reader: Reader, part: str) -> ReadExpert:
    """What reads a block's experts one by one."""
    return lambda name, e: reader.read(f"{part}.mlp.experts.{name}", e).float()


def _load(module: nn.Module, prefix: str, reader: Reader) -> None:
    """Give a module on the meta device its fp32 weights. A mixture's experts stay where they are."""
    for name, parameter in list(module.named_parameters()):
        if ".experts." in name:
            continue
        owner, _, leaf = name.rpartition(".")
        full = reader.read(f"{prefix}.{name}").float()
        # A sum of finite numbers may overflow, but no other is finite; and it is found in one pass.
        if not math.isfinite(full.sum()) and (bad := int((~torch.isfinite(full)).sum())):
            raise UserError(f"{prefix}.{name} holds {bad} values that are NaN or infinite",
                            "the checkpoint is damaged: save or download it again")  # fmt: skip
        made = nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
        assign(made, full)
        setattr(module.get_submodule(owner), leaf, made)


def _named(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": p.detach() for name, p in module.named_parameters()}


def _module_names(spec: ModelSpec, block: str) -> dict[str, str]:
    """Module name in the hub's files → the driver's, of one block's linear layers."""
    return {link.theirs.removesuffix(".weight"): layer_of(link) for link in links(spec)
            if link.ours.startswith(f"{block}.") and "_proj" in link.ours}  # fmt: skip


def _linear_modules(spec: ModelSpec) -> list[str]:
    """Names in the hub's files of all linear layers, the head's included."""
    kinds = ("_proj.weight", "_proj", "router.weight", "head.out.weight")
    found = {link.theirs.removesuffix(".weight") for link in links(spec) if link.ours.endswith(kinds)}
    return sorted(found | ({"lm_head"} if spec.tie_embeddings and spec.head == "lm" else set()))


def _scheme(stored: Stored) -> dict[str, Any]:
    """What the config says of a stored weight, without its numbers."""
    if isinstance(stored, Packed):
        outliers = 0 if stored.outliers is None else len(stored.outliers.index)
        return {"kind": "packed", "shape": list(stored.shape), "bits": stored.bits, "group_size": stored.group_size,
                "symmetric": stored.symmetric, "outliers": outliers}  # fmt: skip
    if isinstance(stored, Sparse):
        return {"kind": "bitmask", "shape": list(stored.shape)}
    return {"kind": "ternary", "shape": list(stored.shape)}


def _gathered(output: Output) -> tuple[dict[str, Any], dict[str, InputCode]]:
    """Schemes (as records on the meta device) and input codes of all modules, from the journal."""
    stored: dict[str, Any] = {}
    inputs: dict[str, InputCode] = {}
    for part in output.journal["parts"].values():
        for module, scheme in part.get("packed", {}).items():
            stored[module] = _meta(scheme)
        inputs.update({m: InputCode(**code) for m, code in part.get("inputs", {}).items()})
    return stored, inputs


def _meta(scheme: dict[str, Any]) -> Stored:
    """The inverse of :func:`_scheme`, its tensors on the meta device."""
    out, width = scheme["shape"]
    with torch.device("meta"):
        if scheme["kind"] == "bitmask":
            return Sparse(torch.empty(out, -(-width // 32)), torch.empty(0), width)
        if scheme["kind"] == "ternary":
            return Ternary(torch.empty(0), torch.empty(out + 1), torch.empty(out), torch.empty(out), width)
        groups, count = width // scheme["group_size"], scheme["outliers"]
        zero = None if scheme["symmetric"] else torch.empty(out, groups, dtype=torch.uint8)
        aside = Outliers(torch.empty(count, dtype=torch.int32), torch.empty(count)) if count else None
        codes = torch.empty(out, width, dtype=torch.uint8)
        return Packed(codes, torch.empty(out, groups), zero, scheme["bits"], scheme["group_size"], aside)


def peak_rss() -> int:
    """Largest resident memory of this program so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the process that started this one had
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
