"""The torch model: one transformer for every family, its loss, generation and checkpoints."""

from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, load_into, save_checkpoint
from ridgeline.nn.model.attention import BACKENDS, AttentionBackend, LayerCache
from ridgeline.nn.model.generate import decode, generate, make_cache, prefill
from ridgeline.nn.model.init import build, init_weights, materialize
from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.transformer import Transformer, TransformerBlock

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "LayerCache",
    "Mask",
    "Transformer",
    "TransformerBlock",
    "build",
    "decode",
    "generate",
    "init_weights",
    "load_checkpoint",
    "load_into",
    "make_cache",
    "materialize",
    "prefill",
    "save_checkpoint",
    "token_loss",
]
