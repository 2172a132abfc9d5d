"""The pool as it is sent: which tensors each layer has, and what one token takes of them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.serve.block_manager import runs
from ridgeline.serve.runner import Runner
from ridgeline.serve.transfer.frames import BadPeer


class KVLayout:
    """The pool of a runner: L layers of a few tensors [1, G, slots, …] each (keys and values, or their codes and
    scales)."""

    def __init__(self, runner: Runner) -> None:
        self.device, self.block_size = runner.device, runner.block_size
        self.layers: list[list[Tensor]] = [cache.tensors() for cache in runner.cache.values()]  # type: ignore[attr-defined]
        self.token_bytes = [sum(t.nbytes // t.shape[2] for t in layer) for layer in self.layers]
        """Bytes of one token in each layer."""

    def slots(self, blocks: array[int], start: int, stop: int) -> Tensor:
        """Slots of tokens ``start`` to ``stop`` of a block table."""
        extents = runs(blocks, self.block_size, start, stop)
        return torch.cat([torch.arange(first, first + n, device=self.device) for first, n in extents])

    def take(self, layer: int, slots: Tensor) -> dict[str, Tensor]:
        """Copies of what a layer has in ``slots`` [N], [G, N, …] each."""
        return {
            f"{layer}.{i}": _bits(t)[0].index_select(1, slots).view(t.dtype) for i, t in enumerate(self.layers[layer])
        }

    def put(self, layer: int, slots: Tensor, tensors: dict[str, Tensor]) -> None:
        """Write what :meth:`take` gave into other slots."""
        for i, t in enumerate(self.layers[layer]):
            _bits(t)[0].index_copy_(1, slots, _bits(tensors[f"{layer}.{i}"].to(self.device)))

    def require(self, layers: range, tokens: int, tensors: dict[str, Tensor]) -> None:
        """Raise :class:`BadPeer` unless ``tensors`` are those of ``tokens`` tokens in ``layers``, all finite."""
        expected = {f"{layer}.{i}": t for layer in layers for i, t in enumerate(self.layers[layer])}
        if tensors.keys() != expected.keys():
            raise BadPeer(f"it sent tensors {sorted(tensors)[:4]} where {sorted(expected)[:4]} were due")
        for name, t in tensors.items():
            pool = expected[name]
            shape = (pool.shape[1], tokens, *pool.shape[3:])
            if t.dtype != pool.dtype or tuple(t.shape) != shape:
                what = f"{list(t.shape)} of {t.dtype} where {list(shape)} of {pool.dtype}"
                raise BadPeer(f"it sent a tensor {what} was due")
            if t.is_floating_point() and not torch.isfinite(t if t.element_size() > 1 else t.float()).all():
                raise BadPeer("it sent values that are not finite")


def _bits(t: Tensor) -> Tensor:
    """fp8 as bytes: it has no operators that copy by index."""
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def fingerprint(runner: Runner, checkpoint: str | None = None, lossy: Iterable[str] = ()) -> str:
    """What two servers must agree on for their caches to be the same: architecture, every weight (of the
    ``checkpoint``'s files, if there is one: in memory they may rest elsewhere), the dtype of computation, techniques
    that change results, and the cache's format."""
    spec = runner.model.spec.model_dump(mode="json", exclude={"name"})  # a folder's name, often
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    for file in sorted(Path(checkpoint).glob("*.safetensors")) if checkpoint else ():
        with file.open("rb") as f:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            while data := f.read(1 << 24):
                digest.update(data)
    for name, t in () if checkpoint else sorted(runner.model.state_dict().items()):
        digest.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    pools = [[str(t.dtype), t.shape[1], list(t.shape[3:])] for layer in KVLayout(runner).layers for t in layer]
    dtype = str(next(runner.model.parameters()).dtype)  # the codes of kv_quant do not tell
    digest.update(json.dumps([sorted(lossy), pools, dtype]).encode())
    return digest.hexdigest()
