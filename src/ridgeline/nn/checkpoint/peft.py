"""Adapter files: low-rank ones as the ``peft`` library writes and reads them, other kinds in a format of our own.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. Names in it are those of the Hugging Face
model; options and tensors in this module's interface are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ridgeline.nn.checkpoint.files import write_tensors
from ridgeline.nn.checkpoint.hf_names import links, spellings
from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Part
from ridgeline.spec.json_file import read_json
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.targets import linears, shortest

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
OWN = "RIDGELINE_"
"""Prefix of ``peft_type`` for adapters that have no ``peft`` format."""
_PREFIX = "base_model.model."
_NOT_READ = ("modules_to_save", "lora_bias", "layer_replication", "target_parameters", "use_qalora",
             "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config")  # fmt: skip


class PeftTensor(NamedTuple):
    """Location of one of our linear layers in the Hugging Face model: its module, its rows among all ``whole`` of that
    module's output, and their number."""

    theirs: str
    rows: Tensor
    height: int
    whole: int


def places(spec: ModelSpec) -> dict[str, PeftTensor]:
    """Every linear layer of the blocks by our name."""
    known = linears(spec)
    out = {}
    for link in links(spec):
        name = link.ours.removesuffix(".weight")
        if name in known and link.ours.endswith(".weight"):
            part = link.part or Part(0, 1, 1)
            height = known[name][0]
            whole = height // part.taken * part.of
            rows = torch.arange(whole).view(part.groups, part.of, -1)[:, part.first : part.first + part.taken]
            out[name] = PeftTensor(link.theirs.removesuffix(".weight"), rows.flatten(), height, whole)
    return out


# ---- low-rank adapters, as peft has them ----------------------------------------------------------------------------


def save_lora(folder: Path, spec: ModelSpec, options: Mapping[str, Any], state: Mapping[str, Tensor],
              base: str = "") -> None:  # fmt: skip
    """Write ``state`` (``<our linear>.lora_a`` [rank, in], ``.lora_b`` [out, rank], with DoRA ``.lora_m`` [out]).

    ``options``: rank, alpha, dropout, rslora, dora. GPT-2's query, key and value are one module there: their adapters
    become one whose rank is the sum, with a block-diagonal B.
    """
    where = places(spec)
    groups: dict[str, list[str]] = {}
    for name in where:
        if f"{name}.lora_a" in state:
            groups.setdefault(where[name].theirs, []).append(name)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for theirs, names in groups.items():
        whole = where[names[0]].whole
        a = [state[f"{n}.lora_a"] for n in names]
        b = [state[f"{n}.lora_b"] for n in names]
        key = f"{_PREFIX}{theirs}"
        if whole == where[names[0]].height:
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a[0], b[0]
        else:
            rank = a[0].shape[0]
            joined = b[0].new_zeros(whole, rank * len(names))
            for i, name in enumerate(names):
                joined[where[name].rows, i * rank : (i + 1) * rank] = b[i]
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = torch.cat(a), joined
            ranks[theirs] = len(names)
        if options.get("dora"):
            if sum(where[n].height for n in names) < whole:
                together = " and ".join(n.rpartition(".")[2] for n, p in where.items() if p.theirs == theirs)
                raise UserError(f"DoRA on a part of {theirs} has no form that peft reads",
                                f"adapt {together} together")  # fmt: skip
            vector = a[0].new_empty(whole)
            for name in names:
                vector[where[name].rows] = state[f"{name}.lora_m"].to(vector.dtype)
            tensors[f"{key}.lora_magnitude_vector"] = vector
    alpha, rank = float(options["alpha"]), int(options["rank"])
    grow = math.sqrt if options.get("rslora") else float
    one = {} if len(set(ranks.values())) != 1 else {next(iter(ranks)).rpartition(".")[2]: next(iter(ranks.values()))}
    patterns = one or ranks
    modules = sorted({p.theirs for p in where.values()} | _others(spec))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if spec.causal else None,
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": float(options.get("dropout", 0.0)),
        "use_rslora": bool(options.get("rslora")),
        "use_dora": bool(options.get("dora")),
        "rank_pattern": {k: n * rank for k, n in patterns.items() if n > 1},
        "alpha_pattern": {k: alpha * grow(n) for k, n in patterns.items() if n > 1},
        "target_modules": shortest(groups, modules),
        "fan_in_fan_out": spec.family == "gpt2",
        "bias": "none",
        "init_lora_weights": True,
    }
    _write(folder, config, tensors)


def _others(spec: ModelSpec) -> set[str]:
    """Their modules that are not linear layers of a block, so that no suffix matches them by accident."""
    found = {link.theirs.rpartition(".")[0] for link in links(spec) if link.theirs.endswith(".weight")}
    return found | ({"bert.pooler.dense"} if spec.family == "bert" else set())


def load_lora(folder: Path, spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(options, state) as :func:`save_lora` takes them, with ``targets`` among the options, from what ``peft`` saved.

    Modules with different ranks or scales are converted to the largest rank, padded with zeros, and one scale. Raises
    :class:`UserError` for anything that does not match ``spec``, naming the first mismatch.
    """
    config, tensors = read(folder)
    kind = str(config.get("peft_type", ""))
    if kind != "LORA":
        raise UserError(f"{folder} holds an adapter of type {kind or 'unknown'}, not LORA",
                        "give a folder that was saved with LoRA")  # fmt: skip
    for key in _NOT_READ:
        if config.get(key):
            raise UserError(f"{folder / CONFIG} sets {key}, which is not read here", f"save the adapter without {key}")
    if config.get("bias", "none") != "none":
        raise UserError(f"{folder / CONFIG} trains biases (bias = {config['bias']!r}), which is not read here",
                        'save the adapter with bias = "none"')  # fmt: skip
    grow = math.sqrt if config.get("use_rslora") else float
    found = _ours(folder, spec, config, tensors, bool(config.get("use_dora")))
    rank = max(f.a.shape[0] for f in found.values())
    scales = {f.alpha / grow(f.rank) for f in found.values()}
    same = len({(f.alpha, f.rank) for f in found.values()}) == 1 and rank == next(iter(found.values())).rank
    scale = max(scales)
    alpha = next(iter(found.values())).alpha if same else scale * grow(rank)
    state: dict[str, Tensor] = {}
    for name, f in found.items():
        short = rank - f.a.shape[0]
        own = f.alpha / grow(f.rank)
        state[f"{name}.lora_a"] = torch.nn.functional.pad(f.a, (0, 0, 0, short)).contiguous()
        b = f.b if own == scale else f.b * (own / scale)
        state[f"{name}.lora_b"] = torch.nn.functional.pad(b, (0, short)).contiguous()
        if f.m is not None:
            state[f"{name}.lora_m"] = f.m.contiguous()
    options: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "dropout": float(config.get("lora_dropout") or 0.0),
        "rslora": bool(config.get("use_rslora")),
        "targets": shortest(found, linears(spec)),
    }
    if config.get("use_dora"):
        options["dora"] = True
    return options, state


class _Found(NamedTuple):
    a: Tensor
    b: Tensor
    m: Tensor | None
    rank: int
    alpha: float


def _ours(folder: Path, spec: ModelSpec, config: Mapping[str, Any], tensors: dict[str, Tensor],
          dora: bool) -> dict[str, _Found]:  # fmt: skip
    known = linears(spec)
    spelled: dict[str, list[tuple[str, PeftTensor]]] = {}
    for name, place in places(spec).items():
        for theirs in spellings(f"{place.theirs}.weight"):
            spelled.setdefault(theirs.removesuffix(".weight"), []).append((name, place))
    base = config.get("base_model_name_or_path") or "the base that it was trained on"
    fix = f"give {base} as the model"
    left = dict(tensors)
    out: dict[str, _Found] = {}
    order = {theirs: i for i, theirs in enumerate(spelled)}
    keys = [k for k in tensors if k.endswith(".lora_A.weight")]
    for key in sorted(keys, key=lambda k: order.get(k.removesuffix(".lora_A.weight").removeprefix(_PREFIX), -1)):
        stem = key.removesuffix(".lora_A.weight")
        theirs = stem.removeprefix(_PREFIX)
        if theirs not in spelled:
            raise UserError(f"{folder} adapts {theirs}, which {spec.name} does not have as a linear layer", fix)
        a, b = left.pop(key), left.pop(f"{stem}.lora_B.weight", None)
        if b is None:
            raise UserError(f"{folder / TENSORS} has {key}, but no {stem}.lora_B.weight", "save the adapter again")
        vector = f"{stem}.lora_magnitude_vector"
        m = left.pop(vector, left.pop(f"{vector}.weight", None)) if dora else None
        rank, whole = a.shape[0], spelled[theirs][0][1].whole
        width = known[spelled[theirs][0][0]][1]
        wanted = ((rank, width), (whole, rank))
        for tensor, shape, leaf in zip((a, b), wanted, "AB", strict=True):
            if tuple(tensor.shape) != shape:
                raise UserError(f"{theirs}.lora_{leaf} of {folder} is {tuple(tensor.shape)}, where {spec.name}"
                                f" needs {shape}", fix)  # fmt: skip
        if dora and (m is None or m.numel() != whole):
            raise UserError(f"{theirs} of {folder} has no magnitude vector of {whole} numbers", fix)
        rank = int(_pattern(config, "rank_pattern", theirs, config.get("r", rank)))
        if rank != a.shape[0]:
            raise UserError(f"{folder / CONFIG} says rank {rank} of {theirs}, whose tensors have rank {a.shape[0]}",
                            "its scale would be wrong: save the adapter again")  # fmt: skip
        alpha = float(_pattern(config, "alpha_pattern", theirs, config.get("lora_alpha", rank)))
        trained = bool(b.any())
        for name, place in spelled[theirs]:
            piece = b[place.rows]
            used = piece.any(0).nonzero().flatten()
            if (
                whole > place.height and trained and not dora
            ):  # of several in one, a part may have fewer columns, or none
                if not len(used):
                    continue
                piece, own = piece[:, used], a[used]
            else:
                own = a
            row = None if m is None else m.flatten()[place.rows]
            out[name] = _Found(own.clone(), piece.clone(), row, rank, alpha)
    if left:
        raise UserError(f"{folder / TENSORS} holds {next(iter(left))}, which is not read here", "save LoRA alone")
    if not out:
        raise UserError(f"{folder / TENSORS} holds no low-rank adapter", "save the adapter again")
    return out


def _pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    import re

    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


# ---- other kinds ----------------------------------------------------------------------------------------------------


def save_own(folder: Path, spec: ModelSpec, kind: str, options: Mapping[str, Any], state: Mapping[str, Tensor],
             base: str = "") -> None:  # fmt: skip
    """Write an adapter that has no ``peft`` format: under our names, with our own ``peft_type``."""
    config = {
        "peft_type": f"{OWN}{kind.upper()}",
        "library": "ridgeline: peft does not read this kind",
        "model": {"family": spec.family, "linears": {n: list(s) for n, s in linears(spec).items()}},
        "base_model_name_or_path": base or None,
        "options": dict(options),
    }
    _write(folder, config, dict(state))


def load_own(folder: Path, spec: ModelSpec) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """(kind, options, state) of what :func:`save_own` wrote. Raises :class:`UserError` if it is of another base."""
    config, tensors = read(folder)
    fix = f"give {config.get('base_model_name_or_path') or 'the base that it was trained on'} as the model"
    try:
        kind = str(config["peft_type"]).removeprefix(OWN).lower()
        shapes = {str(n): tuple(s) for n, s in config["model"]["linears"].items()}
        options = dict(config["options"])
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{folder / CONFIG} is not usable: {e}", "save the adapter again") from None
    known = linears(spec)
    for name in dict.fromkeys(n.rpartition(".")[0] for n in tensors):
        if known.get(name) != shapes.get(name):
            has = f"{known[name]} there" if name in known else f"no layer of {spec.name}"
            raise UserError(f"{folder} adapts {name} of shape {shapes.get(name)}, which is {has}", fix)
    return kind, options, tensors


# ---- files ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of an adapter's folder. Raises :class:`UserError` when they cannot be read."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"no {CONFIG} in {folder}", "give the folder of an adapter")
    config = read_json(file, "save the adapter again")
    if not (folder / TENSORS).is_file():
        raise UserError(f"no {TENSORS} in {folder}", "only safetensors are read: save the adapter in that format")
    try:
        return config, load_file(folder / TENSORS)
    except (SafetensorError, OSError) as e:
        raise UserError(f"{folder / TENSORS} is damaged: {e}", "save the adapter again") from None


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / TENSORS, tensors)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as e:
        raise UserError(
            f"cannot write {folder}: {getattr(e, 'strerror', None) or e}", "check the free space and the permissions"
        ) from None


def state_of(state: Mapping[str, Tensor], leaves: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a model's state whose last name is among ``leaves``."""
    wanted = set(leaves)
    return {n: t for n, t in state.items() if n.rpartition(".")[2] in wanted}
