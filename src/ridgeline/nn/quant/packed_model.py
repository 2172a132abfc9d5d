"""Models whose linear layers compute from low-bit weights: loaded from a compressed checkpoint, or quantized in
place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.checkpoint.checkpoint import Reader, load_checkpoint
from ridgeline.nn.checkpoint.files import config_dtype, gguf_file
from ridgeline.nn.checkpoint.hf_names import links
from ridgeline.nn.kernels.products import choose_products
from ridgeline.nn.model.mlp import ACTIVATIONS, gated
from ridgeline.nn.model.moe import Experts, GroupableExperts
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.semi_structured import use_sparse_cores
from ridgeline.nn.quant.ternary import Ternary, TernaryLinear
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

BIASES = ("gate_bias", "up_bias", "down_bias")


def expand_expert(experts: PackedExperts, e: int, rows: Tensor) -> Tensor:
    """The last projection's input, [n, inner], of expert ``e`` from ``rows`` [n, h]."""
    up = _plus(experts.up_proj[e](rows), experts.up_bias, e)
    if experts.gate_proj is None:
        return ACTIVATIONS[experts.activation](up)
    return gated(experts.activation, _plus(experts.gate_proj[e](rows), experts.gate_bias, e), up)


def _plus(y: Tensor, biases: Tensor | None, e: int, share: float = 1.0) -> Tensor:
    return y if biases is None else y + biases[e].to(y.dtype) * share


class Together(Protocol):
    """Computes all experts of a layer at once."""

    def suits(self, experts: PackedExperts, rows: Tensor) -> bool:
        """Whether it can."""

    def most_rows(self, experts: PackedExperts) -> int:
        """The most rows for which it can."""

    def __call__(self, experts: PackedExperts, rows: Tensor, expert: Tensor) -> Tensor:
        """``rows`` [n, h] sorted by ``expert`` [n] → [n, h]."""


class PackedExperts(GroupableExperts):
    """A mixture's experts as :class:`~ridgeline.nn.model.moe.Experts`, each projection a :class:`PackedLinear`."""

    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self, activation: str, gate: list[nn.Module] | None, up: list[nn.Module], down: list[nn.Module],
        biases: Mapping[str, nn.Parameter | None] | None = None,
    ) -> None:  # fmt: skip
        """``biases``: gate_bias, up_bias and down_bias, stacked, of experts that have them."""
        super().__init__()
        self.bias_share = 1.0
        for name in BIASES:
            setattr(self, name, (biases or {}).get(name))
        self.activation = activation
        self.gate_proj = None if gate is None else nn.ModuleList(gate)
        self.up_proj, self.down_proj = nn.ModuleList(up), nn.ModuleList(down)
        self.expand = expand_expert
        """Everything of an expert up to the activation; may be replaced by a fused function."""
        self.grouped: Together | None = None

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """``rows`` [n, h] sorted by expert, ``counts[e]`` of them for expert e → [n, h] in the same order."""
        parts = torch.split(rows, counts)
        return torch.cat([rows[:0], *(self.one(e, part) for e, part in enumerate(parts) if counts[e])])

    def groupable(self, rows: Tensor) -> bool:
        """See :class:`GroupableExperts`."""
        return self.grouped is not None and self.grouped.suits(self, rows)

    def most_rows(self) -> float:
        """See :class:`GroupableExperts`."""
        return super().most_rows() if self.grouped is None else self.grouped.most_rows(self)

    def together(self, rows: Tensor, expert: Tensor) -> Tensor:
        """See :class:`GroupableExperts`."""
        assert self.grouped is not None
        return self.grouped(self, rows, expert)

    def one(self, e: int, rows: Tensor) -> Tensor:
        """Expert ``e`` of ``rows`` [n, h] → [n, h]."""
        return _plus(self.down_proj[e](self.expand(self, e, rows)), self.down_bias, e, self.bias_share)

    def modules_of(self, e: int) -> dict[str, nn.Module]:
        """Expert ``e``'s projections by name."""
        kinds = {"gate_proj": self.gate_proj, "up_proj": self.up_proj, "down_proj": self.down_proj}
        return {kind: linears[e] for kind, linears in kinds.items() if linears is not None}


class Dense(nn.Module):
    """One expert's projection that is uncompressed in the checkpoint."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        return F.linear(x, self.weight)


Code = Callable[[str, int | None], tuple[Packed | Ternary, InputCode | None] | None]
"""What a parameter, by our name (of a mixture's experts: and the expert), is stored as; None: it stays dense."""


def load_packed(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", fast: bool = True,
    later: tuple[str, ...] = (), mapped: bool = False,
) -> Transformer:  # fmt: skip
    """The model in a checkpoint directory; layers that it has in integer codes hold these, and never were dense.

    ``dtype`` of everything else (default: as the config says). ``fast``: see :mod:`ridgeline.nn.quant.packed_linear`;
    2:4 weights then run on sparse tensor cores. ``later``: how the names of parameters begin that stay on the meta
    device, for what reads them by itself; codes among them are read by the model's ``complete``. ``mapped``: on a CPU,
    weights that the files hold as they are used stay there, in memory that is mapped (privately: what changes them
    changes no file) and read when it is first used. GGUF files are expanded. Raises :class:`UserError` for whatever is
    wrong with the directory.
    """
    path = Path(path)
    if gguf_file(path) is not None:
        return load_checkpoint(path, dtype, device)
    spec = ModelSpec.from_path(path)
    reader, device, dtype = Reader(path, spec), torch.device(device), dtype or config_dtype(path)
    with torch.device("meta"):
        model = Transformer(spec)

    def code(name: str, expert: int | None) -> tuple[Packed | Ternary, InputCode | None] | None:
        packed = reader.packed(name, expert)
        return (packed, reader.input(name, expert)) if isinstance(packed, (Packed, Ternary)) else None

    def pack(chosen: Callable[[str], bool]) -> None:
        pack_layers(model, code, device, fast, lambda name, e: reader.read(name, e).to(device, dtype), chosen)

    pack(lambda name: not name.startswith(later))
    if device.type == "cpu":
        choose_products(model)
    model.complete = lambda block: pack(lambda name: name.startswith(later) and name.startswith(f"layers.{block}."))
    fresh = {n for n, p in model.named_parameters() if p.is_meta}
    mapped = mapped and device.type == "cpu"
    if mapped:
        reader.read_ahead()
    read = dict.fromkeys(ours for ours, _ in groupby(links(spec), key=lambda link: link.ours))
    with torch.no_grad():
        for name in [n for n in read if n in fresh]:
            owner, _, leaf = name.rpartition(".")
            empty = model.get_parameter(name)
            if name.startswith(later):
                weight = torch.empty(empty.shape, dtype=dtype, device="meta")
            else:
                whole = reader.read(name)
                stays = mapped and whole.dtype == dtype and whole.is_contiguous()
                if stays:
                    model.mapped[name] = whole.nbytes
                weight = whole if stays else torch.empty(empty.shape, dtype=dtype, device=device).copy_(whole)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=weight.is_floating_point()))
    model.tie()
    if fast:
        use_sparse_cores(model)
    return model


def pack_layers(
    model: Transformer, code: Code, device: torch.device, fast: bool = True,
    dense: Callable[[str, int], Tensor] | None = None, chosen: Callable[[str], bool] = lambda _: True,
) -> int:  # fmt: skip
    """Put packed layers in the place of all linears of the blocks that ``code`` has codes for; returns how many.

    ``dense`` reads an expert's projection that has none beside others that do. ``chosen``: whether to do so, by the
    layer's name with a dot behind it.
    """
    count = 0
    for prefix, module in list(model.layers.named_modules(prefix="layers")):
        for leaf, child in list(module.named_children()):
            name = f"{prefix}.{leaf}"
            if not chosen(f"{name}."):
                continue
            if isinstance(child, nn.Linear) and leaf.endswith("_proj"):
                found = code(f"{name}.weight", None)
                if found is not None:
                    _fits(found[0], (child.out_features, child.in_features), name)
                    layer = _layer(found, fast, device)
                    layer.bias = child.bias  # read with all that is dense
                    setattr(module, leaf, layer)
                    count += 1
            elif isinstance(child, Experts):
                packed = _experts(child, name, code, device, fast, dense)
                if packed is not None:
                    setattr(module, leaf, packed)
                    count += 1
    return count


def pack_head(model: Transformer, packed: Packed, device: torch.device) -> None:
    """Let the head compute logits from quantized weights [V, H]."""
    assert model.head is not None
    bias = model.head.out.bias
    model.head.add_module("out", PackedLinear(packed, bias, device=device))


def _experts(
    old: Experts, name: str, code: Code, device: torch.device, fast: bool, dense: Callable[[str, int], Tensor] | None
) -> PackedExperts | None:
    kinds = [k for k in ("gate_proj", "up_proj", "down_proj") if getattr(old, k) is not None]
    linears: dict[str, list[nn.Module]] = {}
    missing: list[tuple[str, int]] = []
    any_packed = False
    for kind in kinds:
        linears[kind] = []
        for e in range(len(old.up_proj)):
            found = code(f"{name}.{kind}", e)
            if found is not None:
                _fits(found[0], tuple(getattr(old, kind).shape[1:]), f"{name}.{kind}.{e}")
                linears[kind].append(_layer(found, fast, device))
                any_packed = True
            else:
                missing.append((kind, e))
                linears[kind].append(nn.Identity())
    if not any_packed:
        return None
    for kind, e in missing:
        weight = getattr(old, kind).detach()[e] if dense is None else dense(f"{name}.{kind}", e)
        linears[kind][e] = Dense(weight)
    biases = {name: getattr(old, name) for name in BIASES}
    return PackedExperts(old.activation, linears.get("gate_proj"), linears["up_proj"], linears["down_proj"], biases)


def _layer(found: tuple[Packed | Ternary, InputCode | None], fast: bool, device: torch.device) -> nn.Module:
    code, inputs = found
    return TernaryLinear(code, device) if isinstance(code, Ternary) else PackedLinear(code, None, inputs, fast, device)


def _fits(packed: Packed | Ternary, shape: tuple[int, ...], name: str) -> None:
    if packed.shape != shape:
        raise UserError(f"{name} holds codes of shape {list(packed.shape)}, config.json asks for {list(shape)}",
                        "check that config.json belongs to these files")  # fmt: skip


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The layers of a model that compute from quantized weights, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
