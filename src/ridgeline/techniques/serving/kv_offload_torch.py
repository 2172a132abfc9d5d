"""A store for the blocks that the serving engine's pool drops."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ridgeline.nn.memory.block_store import BlockStore
from ridgeline.runtime.serve_build import ServeBuild
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import make


def give_store(run: ServeBuild, host: int, disk: int, folder: Path, persistent: bool) -> None:
    """Have the engine make the store once the pool exists."""

    def new(pool: Sequence[Sequence[Tensor]], block_size: int) -> BlockStore:
        return BlockStore(pool, block_size, fingerprint(run.experiment), host, disk, folder, persistent)

    run.block_store = new


def fingerprint(e: Experiment) -> str:
    """What the contents of a block depend on beside its tokens: model, weights, dtype, and the plan without the store's
    own options, so that it may be given more space."""
    w = e.workload
    plan = sorted(str(call) for call in e.plan.calls if "dropped_blocks" not in make(call).parts)
    files = sorted(Path(w.checkpoint or "").glob("*.safetensors")) if w.checkpoint else []
    weights = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files] or w.seed
    facts = [e.model.model_dump(mode="json"), weights, e.dtype, plan]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
