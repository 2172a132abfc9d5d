"""Output of a compression: one file per block, written when the block is done, in a directory that gets its final name
at the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ridgeline.nn.checkpoint.files import INDEX, SINGLE, write_tensors
from ridgeline.nn.checkpoint.formats import Format
from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline
from ridgeline.nn.checkpoint.hf_names import NamePair, joined, links_by_part
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed
from ridgeline.runtime.compress_build import LinearLayer
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

REPORT = "ridgeline.json"
"""The report in the finished directory."""
_JOURNAL = "journal.jsonl"
"""The identity, then one line for every finished part."""


class Output:
    """The growing checkpoint in ``OUT.partial``; :meth:`finish` renames it to ``OUT``.

    Finished parts are kept if the process is killed; a new run with the same ``identity`` resumes after them.
    """

    def __init__(self, out: Path, identity: dict[str, Any], resume: bool) -> None:
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file, not a directory", "give another directory with --out")
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} exists and is not empty", "give another directory with --out, or remove it")
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
        journal = self._journal()
        if journal and journal["identity"] != digest and resume:
            raise UserError(
                f"{self.partial} holds another compression that was stopped (other plan, data or checkpoint)",
                "run that command again to finish it, or start over with --no-resume",
            )
        if not resume or not journal:
            shutil.rmtree(self.partial, ignore_errors=True)
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            if journal and resume:  # a truncated line is dropped
                lines = [{"identity": digest}, *({"part": p, **entry} for p, entry in journal["parts"].items())]
                self._replace(self.partial / _JOURNAL, "".join(json.dumps(line) + "\n" for line in lines))
        except OSError as e:
            raise UserError(f"cannot write {self.partial}: {e.strerror}", "check path and permissions") from None
        self.journal: dict[str, Any] = journal if journal and resume else {"identity": digest, "parts": {}}
        """``parts``: part → {file, bytes, layers: records, packed: module → scheme}."""

    def _journal(self) -> dict[str, Any] | None:
        try:
            first, *rest = (self.partial / _JOURNAL).read_text(encoding="utf-8").splitlines()
            found: dict[str, Any] = {"identity": json.loads(first)["identity"], "parts": {}}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for line in rest:
            try:
                entry = json.loads(line)
            except ValueError:  # it was being written when the process was killed
                break
            found["parts"][entry.pop("part")] = entry
        return found

    def done(self, part: str) -> bool:
        """Whether a part was written, now or by an earlier process."""
        return part in self.journal["parts"]

    def file(self, part: str) -> Path:
        """File in which a finished part was written."""
        return self.partial / str(self.journal["parts"][part]["file"])

    def write(self, part: str, tensors: dict[str, Tensor], **entry: Any) -> None:
        """Write one part's tensors to a file of its own, then record it as done. Raises :class:`UserError` when the
        disk is full; finished parts are kept."""
        file = self.partial / f"part-{len(self.journal['parts']):05d}.safetensors"
        try:
            write_tensors(file, tensors)
            size = sum(t.nbytes for t in tensors.values())
            self.journal["parts"][part] = {"file": file.name, "bytes": size, "tensors": sorted(tensors), **entry}
            with open(self.partial / _JOURNAL, "a", encoding="utf-8") as journal:
                if journal.tell() == 0:
                    journal.write(json.dumps({"identity": self.journal["identity"]}) + "\n")
                journal.write(json.dumps({"part": part, **self.journal["parts"][part]}) + "\n")
        except (OSError, SafetensorError) as e:
            self.journal["parts"].pop(part, None)
            why = getattr(e, "strerror", None) or str(e)
            raise UserError(
                f"cannot write {file}: {why}", "make room and run the same command again: it resumes with this block"
            ) from None

    @classmethod
    def _write_json(cls, file: Path, value: Any) -> None:
        cls._replace(file, json.dumps(value, indent=1))

    @staticmethod
    def _replace(file: Path, text: str) -> None:
        draft = file.with_name(file.name + ".draft")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, file)

    def finish(
        self,
        config: dict[str, Any],
        report: dict[str, Any],
        beside: Path,
        convert: Callable[[Path], None] | None = None,
    ) -> None:
        """Give files their final names, add index, config, report and the source's tokenizer, and move everything to
        OUT.

        ``convert`` writes the directory's model in a single-file format, which then replaces the tensors.
        """
        parts = list(self.journal["parts"].values())
        weight_map: dict[str, str] = {}
        for i, part in enumerate(parts, 1):
            name = SINGLE if len(parts) == 1 else f"model-{i:05d}-of-{len(parts):05d}.safetensors"
            if (self.partial / part["file"]).is_file():  # else renamed by an earlier, interrupted finish
                os.replace(self.partial / part["file"], self.partial / name)
            weight_map.update(dict.fromkeys(part["tensors"], name))
        if len(parts) > 1:
            index = {"metadata": {"total_size": sum(p["bytes"] for p in parts)}, "weight_map": weight_map}
            self._write_json(self.partial / INDEX, index)
        self._write_json(self.partial / "config.json", config)
        self._write_json(self.partial / REPORT, report)
        for file in sorted(beside.iterdir()):
            ours = {"config.json", INDEX, REPORT, "quantize_config.json"}
            if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and file.name not in ours:
                shutil.copy2(file, self.partial / file.name)
        if convert is not None:
            convert(self.partial)
        shutil.rmtree(self.partial / "whole", ignore_errors=True)
        (self.partial / _JOURNAL).unlink()
        if convert is not None:
            for file in (*self.partial.glob("model*.safetensors"), self.partial / INDEX):
                file.unlink(missing_ok=True)
            config = {k: v for k, v in config.items() if k != "quantization_config"}
            self._write_json(self.partial / "config.json", config)
        if self.out.is_dir():
            self.out.rmdir()
        os.replace(self.partial, self.out)


def their_tensors(
    spec: ModelSpec,
    block: str,
    ours: Mapping[str, Tensor],
    layers: Mapping[str, LinearLayer],
    form: Format | None,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors of one block by their names in the hub's files, stored weights by module name there).

    ``ours``: parameters by our names; an expert's are under ``….experts.<e>.<projection>``. ``form`` None: all dense.
    Raises :class:`UserError` for layers that the format cannot hold.
    """
    pieces: dict[str, list[NamePair]] = defaultdict(list)
    for link in links_by_part(spec).get(block, ()):
        pieces[link.theirs].append(link)
    tensors: dict[str, Tensor] = {}
    stored: dict[str, Any] = {}
    for theirs, group in pieces.items():
        experts = _experts(group[0], layers, spec.num_experts)
        layer = experts[0] if experts else layers.get(layer_of(group[0]))
        if layer is not None and layer.stored is not None and form is not None:
            if len(group) > 1 or group[0].transpose:
                lone = group[0].transpose and not experts
                how = "as Conv1D" if lone else "for several layers in one"
                raise UserError(
                    f"{spec.family} keeps {theirs} {how}, which no quantized format describes",
                    "write the rounded weights densely with --format dense, or prune instead",
                )
            if not isinstance(layer.stored, Packed) and form.name != Ridgeline.name:
                raise UserError(f"{layer.name} is stored in a code that {form.name} cannot hold",
                                "use --format ridgeline, or --format dense to expand it")  # fmt: skip
            module = theirs.removesuffix(".weight")
            tensors.update(form.write(module, layer.stored, layer.input))  # type: ignore[arg-type]
            if layer.input is not None and layer.input.scale is not None:
                tensors[f"{module}.input_scale"] = torch.tensor([layer.input.scale])
            stored[module] = layer.stored
            continue
        found = []
        for link in group:
            own, each = layers.get(layer_of(link)), _experts(link, layers, spec.num_experts)
            if each:
                piece = torch.stack([expert.weight for expert in each])
            elif own is not None:
                piece = own.weight
            else:
                piece = ours[link.ours] if link.expert is None else ours[link.ours][link.expert]
            found.append(piece.mT if link.transpose else piece)
        tensors[theirs] = joined(found, group[0].part).to(dtype)
    return tensors, stored


def _experts(link: NamePair, layers: Mapping[str, LinearLayer], count: int) -> list[LinearLayer]:
    """The layers that a link maps together: those of all experts, where they are one tensor; else none."""
    if link.expert is not None:
        return []
    names = (layer_of(link._replace(expert=e)) for e in range(count))
    return [layers[name] for name in names if name in layers]


def layer_of(link: NamePair) -> str:
    """The name under which the driver keeps a link's linear layer."""
    if link.expert is not None:
        stem, _, kind = link.ours.rpartition(".")
        return f"{stem}.{link.expert}.{kind}"
    return link.ours.removesuffix(".weight")


def config_of(
    source: dict[str, Any],
    old: ModelSpec,
    new: ModelSpec,
    dtype: torch.dtype,
    form: Format | None,
    stored: Mapping[str, Any],
    dense: list[str],
    inputs: Mapping[str, InputCode],
) -> dict[str, Any]:
    """``config.json``: the source's, with the new sizes and the weights' storage format."""
    config = {k: v for k, v in source.items() if k not in ("quantization_config", "torch_dtype")}
    if new != old:
        config.update(to_hf_config(new))
    config["dtype"] = str(dtype).removeprefix("torch.")
    if form is not None and stored:
        config["quantization_config"] = form.config(stored, dense, inputs)
    return config
