"""A store for the blocks that the serving engine's pool drops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from ridgeline.nn.memory.block_store import BlockStore
from ridgeline.runtime.serve_build import ServeBuild
from ridgeline.spec.experiment import Experiment


def give_store(run: ServeBuild, host: int, disk: int, folder: Path, persistent: bool) -> None:
    """Have the engine make the store once the pool exists."""

    def make(pool: Iterable[Tensor], block_size: int) -> BlockStore:
        return BlockStore(list(pool), block_size, fingerprint(run.experiment), host, disk, folder, persistent)

    run.block_store = make


def fingerprint(e: Experiment) -> str:
    """What the contents of a block depend on beside its tokens: model, weights, dtype and plan."""
    w = e.workload
    files = sorted(Path(w.checkpoint or "").glob("*.safetensors")) if w.checkpoint else []
    weights = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files] or w.seed
    facts = [e.model.model_dump(mode="json"), weights, e.dtype, sorted(e.plan.strings())]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
