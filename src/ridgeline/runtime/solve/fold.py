"""Per-channel scales of a site's input, folded into what produces it: x → x / s, columns of the readers · s.

The block's function stays the same; the range of the site's input and of its weights changes, and with it the
quantization error (SmoothQuant, arXiv:2211.10438; AWQ, arXiv:2306.00978; FPTQ, arXiv:2308.15987).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.model.norm import NoNorm, RMSNorm
from ridgeline.nn.model.transformer import TransformerBlock


def readers(block: TransformerBlock, site: str) -> list[nn.Linear]:
    """The linear layers that read the site's input. A mixture's experts are not in the block, so it has no ``mlp``
    sites."""
    attention, mlp = block.attention, block.mlp
    if site == "attention.qkv":
        return [attention.get_submodule(name) for name in attention.entrances]  # type: ignore[misc]
    if site == "attention.o":
        return [attention.o_proj]
    if site.startswith("attention."):  # between the entrances and the heads
        return [attention.get_submodule(attention.inner_inputs()[site.partition(".")[2]][0])]  # type: ignore[list-item]
    assert isinstance(mlp, MLP)
    if site == "mlp.down":
        return [mlp.down_proj]
    return [mlp.up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]


def unfoldable(block: TransformerBlock, site: str) -> str:
    """Why nothing in the block can absorb the site's scale; empty if something can."""
    mlp = block.mlp
    if site.startswith("mlp") and not isinstance(mlp, MLP):
        return "the norm before a mixture is read by its router too, and its experts are not available here"
    if site in ("attention.qkv", "mlp.up"):
        if block.shared_norm:
            return "the norm before it is read by attention and MLP"
        none = block.post_norm or isinstance(block.attention_norm, NoNorm)
        return "no norm stands before it" if none else ""
    if site == "attention.o":
        attention = block.attention
        if not isinstance(attention, Attention):
            return "its input is computed from latents"
        shared = attention.v_proj.out_features != attention.o_proj.in_features
        return "query heads share value channels" if shared else ""
    if site.startswith("attention."):
        return ""
    assert isinstance(mlp, MLP)
    if mlp.gate_proj is None and mlp.activation != "relu":
        return f"{mlp.activation} does not let scales through"
    return ""


def _norm(block: TransformerBlock, site: str) -> nn.Module | None:
    """The norm whose result the site reads; None where it reads a projection's."""
    if site in ("attention.qkv", "mlp.up"):
        return block.attention_norm if site == "attention.qkv" else block.mlp_norm
    latent = site in ("attention.q", "attention.kv")
    return block.attention.get_submodule(f"{site.partition('.')[2]}_a_norm") if latent else None


def sources(block: TransformerBlock, site: str) -> list[Tensor]:
    """Parameters whose rows (or entries) each produce one channel of the site's input, and scale with it."""
    if (norm := _norm(block, site)) is not None:
        module: nn.Module = norm
    elif site == "attention.o":
        assert isinstance(block.attention, Attention)
        module = block.attention.v_proj
    else:
        assert isinstance(block.mlp, MLP)
        module = block.mlp.up_proj
    bias = getattr(module, "bias", None)
    assert isinstance(module.weight, Tensor)
    return [module.weight] if bias is None else [module.weight, bias]


@torch.no_grad()
def fold(block: TransformerBlock, site: str, scale: Tensor) -> None:
    """Divide the site's input by ``scale`` [in] > 0 and multiply what reads it. The site must be foldable."""
    assert not unfoldable(block, site)
    norm = _norm(block, site)
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    for source in sources(block, site):
        source.add_(offset).div_(scale if source.dim() == 1 else scale.unsqueeze(1)).sub_(offset)
    for linear in readers(block, site):
        linear.weight.mul_(scale)
