"""Keys and values of a prompt that go from a prefill server to a decode server (Splitwise, arXiv:2311.18677)."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.spec.device import Link
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.techniques.registry import remaining_model, techniques_of


class KVTransfer(NamedTuple):
    """The transfer of one prompt."""

    nbytes: int
    """Bytes of keys and values, as the servers count them: exact, without the frames around them."""
    seconds: float
    """On the link."""
    exposed: float
    """Seconds from the end of the prompt's computation to the arrival of the last byte."""


def kv_transfer(e: Experiment, tokens: int, link: Link, compute: float, layerwise: bool = True) -> KVTransfer:
    """The transfer of ``tokens`` tokens that one pass of ``compute`` seconds has computed.

    All L layers are sent, those with a sliding window too. Each is one message of ``t = latency + bytes / bandwidth``
    seconds, which leaves when the layer is computed, every ``c = compute / L`` seconds, and after the one before it:
    what is left after the last layer is ``max(t, L t - (L - 1) c)``. At once, the whole cache is one message after the
    pass (section 4.3 of the paper).
    """
    layers = remaining_model(e).num_layers
    layer = tokens * bytes_per_layer(e)
    nbytes = round(layers * layer)
    if not layerwise:
        seconds = link.latency + nbytes / link.bandwidth
        return KVTransfer(nbytes, seconds, seconds)
    each = link.latency + layer / link.bandwidth
    whole = layers * each
    return KVTransfer(nbytes, whole, max(each, whole - (layers - 1) / layers * compute))


def bytes_per_layer(e: Experiment) -> float:
    """Bytes of one token's keys and values in one layer, over all heads."""
    m = remaining_model(e)
    dtype = next(filter(None, (t.cache_dtype for t in techniques_of(e.plan))), e.dtype)
    return m.cached_tensors * m.cached_heads * m.cached_dim * kv_bytes(dtype, m.cached_dim)
