"""Processes one decoder block, stage by stage: each site's inputs are collected once everything before it is
compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compress.calibration import Hidden
from ridgeline.jobs.job import Progress
from ridgeline.nn.model.mask import make_mask
from ridgeline.nn.model.mlp import ACTIVATIONS, MLP, gated
from ridgeline.nn.model.moe import MoE
from ridgeline.nn.model.transformer import Transformer, TransformerBlock
from ridgeline.nn.quant.activation_quant import InputCode, fake_quantize
from ridgeline.nn.quant.sparse import Sparse
from ridgeline.runtime.compress_build import BlockJob, CompressBuild, LinearLayer, Site, Together
from ridgeline.runtime.solve.statistics import Gram, InputPeak

ReadExpert = Callable[[str, int], Tensor]
"""One expert's slice of a parameter of the block: (name in the block, expert) → [out, in] fp32."""


_HOST = torch.device("cpu")
"""Where blocks run and what they hold rests; statistics are summed and sites solved on the run's device."""


def _same(x: Tensor) -> Tensor:
    return x


def _linear(weight: Tensor, biases: Tensor | None, expert: int) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if biases is not None:
        linear.bias = nn.Parameter(biases[expert].to(weight.dtype), requires_grad=False)
    return linear


@dataclass
class _Visit:
    """A site to be visited."""

    name: str
    holder: nn.Module
    names: tuple[str, ...]
    """The linear layers that read it, inside ``holder``."""
    inputs: Iterator[Tensor]
    prefix: str
    """Prefix of the layers' names."""
    peak: Tensor | None = None

    @property
    def linears(self) -> list[nn.Linear]:
        return [self.holder.get_submodule(n) for n in self.names]  # type: ignore[misc]


class Walker:
    """Carries hidden states through the blocks of a model; ``skeleton`` holds everything outside the blocks."""

    def __init__(
        self, run: CompressBuild, skeleton: Transformer, dtype: torch.dtype, report: Progress, folder: Path,
        expands: bool = False, archives: bool = False,
    ) -> None:  # fmt: skip
        """``dtype``: dtype of dense tensors; ``folder``: directory for hidden states that do not fit in memory;
        ``expands``: codes are expanded as they are written; ``archives``: pruned weights are written as a bitmask and
        the remaining values."""
        self.run, self.skeleton, self.dtype, self.report = run, skeleton, dtype, report
        self.folder, self.expands, self.archives = folder, expands, archives
        self.records: list[dict[str, Any]] = []
        self.kept: dict[str, LinearLayer] = {}
        """Layers of the current block, by name."""
        self.notes: dict[str, Any] = {}
        """What steps recorded about that block."""
        self.inputs: dict[str, InputCode] = {}
        """How layers' inputs are quantized, where that has already been decided."""

    def plain(self, inputs: dict[str, InputCode]) -> Walker:
        """A walker that compresses nothing, for blocks that are already compressed; ``inputs`` as decided then."""
        other = Walker(CompressBuild(self.run.experiment, self.run.spec, self.run.device), self.skeleton, self.dtype,
                       lambda message: None, self.folder)  # fmt: skip
        other.inputs = inputs
        return other

    # ---- plain forward passes ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, windows: Tensor, into: Hidden) -> None:
        """Embed token ids [windows, seq]."""
        assert self.skeleton.embed is not None
        for ids, x in zip(torch.split(windows, into.step), into.chunks(), strict=False):  # no windows: no chunks
            x.copy_(self.skeleton.embed(ids, None, None))

    def mask_and_rope(self, x: Tensor, windowed: bool) -> tuple[Any, Any]:
        """Mask and rotary tables for a chunk [windows, seq, hidden], in layers with a sliding window or the others."""
        spec, length = self.skeleton.spec, x.shape[1]
        mask = make_mask(spec, windowed, None, 0, length, False, x.device, x.dtype)
        return mask, self.skeleton.rope(windowed, None, 0, length, x.device, x.dtype)

    def forward(self, block: TransformerBlock, x: Tensor) -> Tensor:
        """Run a whole block on a chunk."""
        mask, rope = self.mask_and_rope(x, block.windowed)
        out: Tensor = block(x, mask, rope)
        return out

    @torch.no_grad()
    def pass_through(self, block: TransformerBlock, hidden: Hidden, into: Hidden | None = None) -> None:
        """Replace the hidden states by the block's output (or write it to ``into``)."""
        for x, y in zip(hidden.chunks(), (into or hidden).chunks(), strict=True):
            y.copy_(self.forward(block, x))

    # ---- the stages of a block ---------------------------------------------------------------------------------------

    def block(
        self, index: int, block: TransformerBlock, hidden: Hidden, target: Hidden | None, expert: ReadExpert | None
    ) -> dict[str, LinearLayer]:
        """Compress ``block`` in place and pass ``hidden`` through it; returns its layers by name.

        ``target``: the original block's output on the original model's hidden states. ``expert`` reads experts of a
        mixture one by one.
        """
        self.kept = {}
        run, prefix = self.run, f"layers.{index}"
        peaks = self._peaks(block, hidden) if "peak" in run.wants else {}
        entrance = hidden
        if run.after_block:  # they compute the block again
            entrance = Hidden(*hidden.shape, self.folder, "entrance")
            entrance.data.copy_(hidden.data)
        job = BlockJob(
            index, block, entrance, target, peaks, forward=lambda x: self.forward(block, x),
            observe=lambda visit: self.observe(block, entrance, visit), settle=lambda: self._round(block),
        )  # fmt: skip
        self.notes = job.notes
        for fold in run.before_block:
            fold(job)
        self._round(block)
        with torch.no_grad():
            # Where the MLP reads the same stream as attention, it still reads it without what attention adds.
            added = Hidden(*hidden.shape, self.folder, "added") if block.parallel else None
            self._attention(prefix, block, hidden, peaks, added)
            if isinstance(block.mlp, MoE):
                assert expert is not None
                self._experts(prefix, block, hidden, expert)
            else:
                self._mlp(prefix, block, hidden, peaks)
            if added is not None:
                for x, update in zip(hidden.chunks(), added.chunks(), strict=True):
                    x += update
                added.close()
        for tune in run.after_block:
            tune(job)
        self._round(block)
        if run.after_block:
            self.pass_through(block, entrance, hidden)
            entrance.close()
        return self.kept

    @torch.no_grad()
    def _round(self, block: TransformerBlock) -> None:
        """Round norms, biases and routers to the stored dtype."""
        for name, p in block.named_parameters():
            if p.is_meta or name.endswith("_proj.weight"):
                continue
            p.copy_(p.to(self.dtype))

    @torch.no_grad()
    def observe(self, block: TransformerBlock, hidden: Hidden, visit: Callable[[str, Tensor], None]) -> None:
        """Pass what each site of the block reads to ``visit``, chunk by chunk. A mixture's experts are not included."""
        attention = block.attention
        sites: dict[str, nn.Module] = {"attention.qkv": attention.get_submodule(attention.entrances[0])}
        sites |= {f"attention.{site}": attention.get_submodule(n) for site, (n, _) in attention.inner_inputs().items()}
        sites["attention.o"] = attention.o_proj
        if isinstance(block.mlp, MLP):
            sites |= {"mlp.up": block.mlp.up_proj, "mlp.down": block.mlp.down_proj}
        hooks = [m.register_forward_pre_hook(lambda _, x, name=name: visit(name, x[0])) for name, m in sites.items()]
        try:
            for x in hidden.chunks():
                if isinstance(block.mlp, MLP):
                    self.forward(block, x)
                else:
                    block.attention(block.attention_norm(x), *self.mask_and_rope(x, block.windowed))
        finally:
            for hook in hooks:
                hook.remove()

    def _peaks(self, block: TransformerBlock, hidden: Hidden) -> dict[str, Tensor]:
        """max |x| at every site, before anything changes. A mixture's experts have none."""
        found: dict[str, InputPeak] = {}

        def visit(site: str, x: Tensor) -> None:
            if site not in found:
                found[site] = InputPeak(x.shape[-1])
            found[site].add(x)

        self.observe(block, hidden, visit)
        return {name: peak.value for name, peak in found.items()}

    def _attention(self, prefix: str, block: TransformerBlock, hidden: Hidden, peaks: dict[str, Tensor],
                   added: Hidden | None) -> None:  # fmt: skip
        """``added`` takes what attention adds to the hidden states; None: they take it themselves."""
        attention = block.attention
        read = _same if block.post_norm else block.attention_norm
        self._site(f"{prefix}.attention.qkv", attention, attention.entrances, peaks,
                   (read(x) for x in hidden.chunks()))  # fmt: skip
        for site, (name, compute) in attention.inner_inputs().items():
            inputs = (compute(read(x)) for x in hidden.chunks())
            self._site(f"{prefix}.attention.{site}", attention, (name,), peaks, inputs)
        mixed = Hidden(*hidden.shape[:2], attention.o_proj.in_features, self.folder, "mixed")
        projection, attention.o_proj = attention.o_proj, nn.Identity()  # type: ignore[assignment]
        for x, m in zip(hidden.chunks(), mixed.chunks(), strict=True):
            m.copy_(attention(read(x), *self.mask_and_rope(x, block.windowed)))
        attention.o_proj = projection
        self._site(f"{prefix}.attention.o", attention, ("o_proj",), peaks, mixed.chunks())
        if added is not None:
            for y, m in zip(added.chunks(), mixed.chunks(), strict=True):
                y.copy_(block.attention_update(attention.o_proj(m)))
            mixed.close()
            return
        for x, m in zip(hidden.chunks(), mixed.chunks(), strict=True):
            x += block.attention_update(attention.o_proj(m))
            if block.post_norm:
                x.copy_(block.attention_norm(x))
        mixed.close()

    def _mlp(self, prefix: str, block: TransformerBlock, hidden: Hidden, peaks: dict[str, Tensor]) -> None:
        mlp = block.mlp
        assert isinstance(mlp, MLP)
        read = _same if block.post_norm else block.attention_norm if block.shared_norm else block.mlp_norm
        outs = self._dense(f"{prefix}.mlp", mlp, lambda: (read(x) for x in hidden.chunks()), peaks, hidden.rows)
        for x, out in zip(hidden.chunks(), outs, strict=True):
            x += block.mlp_update(out)
            if block.post_norm:
                x.copy_(block.mlp_norm(x))

    def _dense(
        self, prefix: str, mlp: MLP, inputs: Callable[[], Iterator[Tensor]], peaks: dict[str, Tensor], rows: int
    ) -> Iterator[Tensor]:
        """Compress a layer that reads ``rows`` rows in all → its outputs for each of ``inputs``."""
        names = ("up_proj",) if mlp.gate_proj is None else ("gate_proj", "up_proj")
        self._site(f"{prefix}.up", mlp, names, peaks, inputs())
        kept: list[Tensor] = []
        fits = 4 * rows * (mlp.down_proj.in_features + mlp.down_proj.out_features) <= Hidden.IN_MEMORY

        def expanded() -> Iterator[Tensor]:
            for x in inputs():
                y = mlp.expand(mlp, x)
                if fits:
                    kept.append(y)
                yield y

        self._site(f"{prefix}.down", mlp, ("down_proj",), peaks, expanded())
        if not kept:  # no step wanted to see them, or they are too many
            return (mlp(x) for x in inputs())
        return (mlp.down_proj(kept.pop(0)) for _ in range(len(kept)))

    def _experts(self, prefix: str, block: TransformerBlock, hidden: Hidden, expert: ReadExpert) -> None:
        """Each expert sees only the tokens that the router sends to it. In memory are the weights of one, or of as many
        as the plan's steps process at once."""
        moe = block.mlp
        assert isinstance(moe, MoE)
        normed = [block.mlp_norm(x).reshape(-1, x.shape[-1]) for x in hidden.chunks()]
        routed = [moe.route(rows) for rows in normed]
        spec, act = self.skeleton.spec, self.skeleton.spec.activation
        names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
        held = moe.experts
        biases = {"gate_proj": held.gate_bias, "up_proj": held.up_bias, "down_proj": held.down_bias}
        count = moe.num_experts
        size = self._at_once(spec.hidden_size, spec.intermediate_size, len(names) + 1)
        for start in range(0, count, size):
            several = range(start, min(start + size, count))
            where = [f"{prefix}.mlp.experts.{e}" for e in several]
            places = [[(chosen == e).nonzero(as_tuple=True) for _, chosen in routed] for e in several]
            rows = [
                torch.cat([torch.empty(0, spec.hidden_size), *self._read(moe, normed, routed, own)]) for own in places
            ]
            owns = [
                nn.ModuleDict({n: _linear(expert(n, e), biases[n], e) for n in (*names, "down_proj")}) for e in several
            ]
            self._sites([_Visit(f"{w}.up", own, names, iter((x,)), f"{w}.")
                         for w, own, x in zip(where, owns, rows, strict=True)])  # fmt: skip
            inner = [gated(act, own["gate_proj"](x), own["up_proj"](x)) if spec.gated else
                     ACTIVATIONS[act](own["up_proj"](x)) for own, x in zip(owns, rows, strict=True)]  # fmt: skip
            self._sites([_Visit(f"{w}.down", own, ("down_proj",), iter((x,)), f"{w}.")
                         for w, own, x in zip(where, owns, inner, strict=True)])  # fmt: skip
            for own, x, place in zip(owns, inner, places, strict=True):
                self._add(hidden, block.mlp_update(own["down_proj"](x)), None if moe.on_input else routed, place)
        if moe.shared is not None:
            outs = self._dense(f"{prefix}.mlp.shared", moe.shared, lambda: iter(normed), {}, hidden.rows)
            for x, out in zip(hidden.chunks(), outs, strict=True):
                x += block.mlp_update(out).view_as(x)

    def _at_once(self, hidden: int, inner: int, matrices: int) -> int:
        """Number of experts that all steps can process together."""
        each = matrices * hidden * inner + hidden**2 + inner**2
        return max(1, min((s.at_once(each) for s in self.run.at_site if isinstance(s, Together)), default=1))

    @staticmethod
    def _read(moe: MoE, normed: list[Tensor], routed: list[Any], places: list[Any]) -> Iterator[Tensor]:
        """What one expert reads of each chunk, [rows, hidden]."""
        for x, (weights, _), (token, slot) in zip(normed, routed, places, strict=True):
            yield x[token] * weights[token, slot].unsqueeze(1).to(x.dtype) if moe.on_input else x[token]

    @staticmethod
    def _add(hidden: Hidden, out: Tensor, routed: list[Any] | None, places: list[Any]) -> None:
        """Add one expert's output, [rows, hidden], to the tokens routed to it, weighted by the router (None: as it
        is)."""
        at = 0
        for i, (x, (token, slot)) in enumerate(zip(hidden.chunks(), places, strict=True)):
            part = out[at : at + len(token)]
            if routed is not None:
                part = part * routed[i][0][token, slot].unsqueeze(1).to(out.dtype)
            x.view(-1, x.shape[-1]).index_add_(0, token, part)
            at += len(token)

    def _site(
        self, name: str, holder: nn.Module, names: tuple[str, ...], peaks: dict[str, Tensor], inputs: Any
    ) -> None:
        """Pass one site of a block to the techniques."""
        peak = peaks.get(name.removeprefix(f"{'.'.join(name.split('.')[:2])}."))
        self._sites([_Visit(name, holder, names, inputs, f"{name.rpartition('.')[0]}.", peak)])

    def _sites(self, visits: list[_Visit]) -> None:
        """Pass sites of one kind to the techniques and store the resulting weights."""
        sites = [self._gathered(visit) for visit in visits]
        start = time.perf_counter()
        for step in self.run.at_site:
            # Layers with final codes are not quantized again.
            waiting = [site for site in sites if any(layer.stored is None for layer in site.layers)]
            if isinstance(step, Together) and waiting:
                step.together(waiting)
                continue
            for site in waiting:
                site.to(self.run.device)
                step(site)
                site.to(_HOST)
        seconds = (time.perf_counter() - start) / sum(len(site.layers) for site in sites)
        for visit, site in zip(visits, sites, strict=True):
            self._take(visit, site, seconds)

    def _gathered(self, visit: _Visit) -> Site:
        """A site with the statistics of its inputs."""
        weights = [linear.weight.detach() for linear in visit.linears]
        gram, tokens = None, 0
        if "gram" in self.run.wants:
            moments = Gram(weights[0].shape[1], self.run.device)
            for x in visit.inputs:
                moments.add(x.to(self.run.device))
            gram, tokens = moments.value.to(_HOST), moments.rows
            if tokens == 0:
                gram = torch.eye(len(gram))
        layers = [LinearLayer(visit.prefix + n, weight, weight, input=self.inputs.get(visit.prefix + n))
                  for n, weight in zip(visit.names, weights, strict=True)]  # fmt: skip
        return Site(visit.name, layers, gram, tokens, visit.peak)

    def _take(self, visit: _Visit, site: Site, seconds: float) -> None:
        """Take over the weights of a site; ``seconds`` were spent on each layer."""
        site.to(self.run.device)
        records = [self._record(site, layer, seconds) for layer in site.layers]
        site.to(_HOST)
        for layer, linear, record in zip(site.layers, visit.linears, records, strict=True):
            linear.weight = nn.Parameter(layer.weight, requires_grad=False)
            if layer.input is not None:  # from here on the hidden states are those of the model as it will run
                code = layer.input
                linear.register_forward_pre_hook(lambda _, x, code=code: (fake_quantize(x[0], code),))
            self.records.append(record)
            self.kept[layer.name] = layer
            layer.original = layer.weight
            if ".experts." in layer.name and layer.stored is not None and not self.expands:
                layer.original = layer.weight = layer.weight.to("meta")  # its code is all that is kept of an expert
            self.report({"layer": layer.name, **record})

    def _record(self, site: Site, layer: LinearLayer, seconds: float) -> dict[str, Any]:
        """Round a layer's weight as it will be stored; what the report says of it."""
        if layer.stored is None or self.expands:
            layer.weight = layer.weight.to(self.dtype).float()  # as it will be read back
            if self.archives and layer.keep is not None:
                layer.stored = Sparse.of(layer.weight.to(self.dtype))
        return {
            "layer": layer.name, "error": site.error(layer), "tokens": site.tokens, "seconds": seconds,
            "bits": layer.stored.bits_per_weight if layer.stored else 8.0 * self.dtype.itemsize,
            "numel": layer.weight.numel(),
            "zeros": 1 - float(layer.weight.sign().square_().sum()) / layer.weight.numel(), **layer.notes,
        }  # fmt: skip
