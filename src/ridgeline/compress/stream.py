"""Streams all parts of a model through a plan's techniques, in order: embedding, blocks, head; skips finished parts."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compress.calibration import Hidden
from ridgeline.compress.output import Output, layer_of, their_tensors
from ridgeline.compress.schemes import scheme_of
from ridgeline.compress.walk import ReadExpert, Walker
from ridgeline.jobs.job import Progress
from ridgeline.nn.checkpoint.checkpoint import Reader
from ridgeline.nn.checkpoint.formats import Format
from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline
from ridgeline.nn.checkpoint.hf_names import links_by_part
from ridgeline.nn.model.init import assign
from ridgeline.nn.model.transformer import Transformer, TransformerBlock
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.runtime.compress_build import CompressBuild
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec


class ModelStream:
    """Reads a checkpoint part by part, compresses each, and writes it to ``output``.

    ``windows``: calibration text [windows, seq]; ``dtype``: dtype of dense tensors; ``form``: format of quantized
    weights, None: expanded.
    """

    def __init__(
        self, run: CompressBuild, reader: Reader, dtype: torch.dtype, form: Format | None, windows: Tensor,
        output: Output, report: Progress,
    ) -> None:  # fmt: skip
        self.run, self.spec, self.reader, self.dtype, self.form = run, run.spec, reader, dtype, form
        self.windows, self.output, self.report = windows, output, report
        with torch.device("meta"):
            self.skeleton = Transformer(self.spec)
        self.blocks = dict(self.skeleton.layers.items())
        self.skeleton.layers = nn.ModuleDict()
        self.walker = Walker(run, self.skeleton, dtype, report, output.partial, expands=form is None,
                             archives=isinstance(form, Ridgeline))  # fmt: skip
        self.hidden = self._states("hidden")
        self.teacher: Hidden | None = None
        """The original model's output, if a technique compares with it."""

    def compress(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Compress all parts → (records of layers, calibration rows of every expert)."""
        self._embedding()
        for index in range(self.spec.num_layers):
            stage = f"block {index + 1} of {self.spec.num_layers}"
            self.report({"step": index, "steps": self.spec.num_layers, "stage": stage})
            self._block(index)
        self.hidden.close()
        if not self.output.done("head"):
            self._head()
        self.report({"step": self.spec.num_layers, "steps": self.spec.num_layers, "stage": "done"})
        records = [r for part in self.output.journal["parts"].values() for r in part.get("layers", [])]
        coverage = {r["layer"].rpartition(".")[0]: r["tokens"] for r in records if ".experts." in r["layer"]}
        return records, coverage

    def _states(self, name: str) -> Hidden:
        return Hidden(len(self.windows), self.windows.shape[1], self.spec.hidden_size, self.output.partial, name)

    def _embedding(self) -> None:
        embed = self.skeleton.embed
        assert embed is not None
        _load(embed, "embed", self.reader)
        self.walker.embed(self.windows, self.hidden)
        if "teacher" in self.run.wants:
            self.teacher = self._states("teacher")
            self.teacher.data.copy_(self.hidden.data)
        if not self.output.done("embed"):
            tensors, _ = their_tensors(self.spec, "embed", dict(_named(embed, "embed")), {}, self.form, self.dtype)
            self.output.write("embed", tensors)
        self.skeleton.embed = None

    def _block(self, index: int) -> None:
        part = f"layers.{index}"
        block = self.blocks.pop(str(index))
        assert isinstance(block, TransformerBlock)
        done = self.output.done(part)
        if self.teacher is not None or not done:
            _load(block, part, self.reader)
        if self.teacher is not None:
            if self.spec.is_moe_layer(index):
                raise UserError("a teacher's hidden states need whole blocks, which a mixture's are not here",
                                "leave norm_tweaking out")  # fmt: skip
            self.walker.pass_through(block, self.teacher)
        if done:
            self._pass_written(index, block)
            return
        at = len(self.walker.records)
        kept = self.walker.block(index, block, self.hidden, self.teacher, _experts(self.reader, part))
        named = dict(_named(block, part))
        tensors, stored = their_tensors(self.spec, part, named, kept, self.form, self.dtype)
        names = {our: their for their, our in _module_names(self.spec, part).items()}
        self.output.write(
            part, tensors, layers=self.walker.records[at:], said=self.walker.notes,
            packed={m: scheme_of(s) for m, s in stored.items()},
            inputs={names[n]: asdict(la.input) for n, la in kept.items() if la.input is not None},
        )  # fmt: skip

    def _pass_written(self, index: int, block: TransformerBlock) -> None:
        """Move the hidden states through a block that an earlier run has written."""
        part = f"layers.{index}"
        written = Reader(self.output.partial, self.spec, [self.output.file(part)], self.form)
        _load(block, part, written)
        ours = _module_names(self.spec, part)
        codes = {ours[m]: InputCode(**c) for m, c in self.output.journal["parts"][part]["inputs"].items()}
        self.walker.plain(codes).block(index, block, self.hidden, None, _experts(written, part))

    def _head(self) -> None:
        rest: dict[str, Tensor] = {}
        for name, module in (("norm", self.skeleton.norm), ("head", self.skeleton.head)):
            if module is None or (name == "head" and self.spec.tie_embeddings):
                continue
            _load(module, name, self.reader)
            rest.update(_named(module, name))
        tensors: dict[str, Tensor] = {}
        for name in ("norm", "head"):
            tensors.update(their_tensors(self.spec, name, rest, {}, self.form, self.dtype)[0])
        self.output.write("head", tensors)


def _experts(reader: Reader, part: str) -> ReadExpert:
    """Returns a function that reads a block's experts one by one."""
    return lambda name, e: reader.read(f"{part}.mlp.experts.{name}", e).float()


def _load(module: nn.Module, prefix: str, reader: Reader) -> None:
    """Load fp32 weights into a module on the meta device. A mixture's experts are left out."""
    for name, parameter in list(module.named_parameters()):
        if ".experts." in name and not name.endswith("_bias"):
            continue
        owner, _, leaf = name.rpartition(".")
        full = reader.read(f"{prefix}.{name}").float()
        # The sum of finite numbers may overflow, but is otherwise finite; and it takes one pass.
        if not math.isfinite(full.sum()) and (bad := int((~torch.isfinite(full)).sum())):
            raise UserError(f"{prefix}.{name} holds {bad} values that are NaN or infinite",
                            "the checkpoint is damaged: save or download it again")  # fmt: skip
        new = nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
        assign(new, full)
        setattr(module.get_submodule(owner), leaf, new)


def _named(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": p.detach() for name, p in module.named_parameters()}


def _module_names(spec: ModelSpec, block: str) -> dict[str, str]:
    """Module name in the hub's files → the driver's, of one block's linear layers."""
    return {link.theirs.removesuffix(".weight"): layer_of(link) for link in links_by_part(spec).get(block, ())
            if "_proj" in link.ours}  # fmt: skip
