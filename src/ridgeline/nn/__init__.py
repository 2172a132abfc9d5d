"""The torch twin: one real transformer for every family, its loss, its generation and its checkpoints."""

from ridgeline.nn.attention import BACKENDS, Backend, LayerCache, Mask
from ridgeline.nn.checkpoint import load_checkpoint, load_into, save_checkpoint
from ridgeline.nn.generate import decode, generate, make_cache, prefill
from ridgeline.nn.init import build, init_weights, materialise
from ridgeline.nn.loss import token_loss
from ridgeline.nn.transformer import Block, Transformer

__all__ = [
    "BACKENDS",
    "Backend",
    "Block",
    "LayerCache",
    "Mask",
    "Transformer",
    "build",
    "decode",
    "generate",
    "init_weights",
    "load_checkpoint",
    "load_into",
    "make_cache",
    "materialise",
    "prefill",
    "save_checkpoint",
    "token_loss",
]
