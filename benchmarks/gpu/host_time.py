"""What a layer of a served model costs the host where steps are launched operator by operator, without a GPU.

    python benchmarks/gpu/host_time.py [--out benchmarks/results/gpu_host_time.json --as after]
    python benchmarks/gpu/host_time.py --check

The layers run on a CPU as on a GPU: with the same functions, and the same kernels launched by Triton, up to the
driver's call, which does nothing. Neither do products, which are PyTorch's on a GPU; views and allocations are. A ratio
of two versions of the package (``PYTHONPATH``) says how much of the host's work is gone, not how long a given machine
takes. Time is the processor's. ``--check``: whether launches are those of Triton's own way.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import torch.nn.functional as F
from torch import nn
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.kernels import gpu, native
from ridgeline.nn.kernels.ahead_of_time import Driver
from ridgeline.nn.model.init import build
from ridgeline.nn.model.served import fuse_served
from ridgeline.serve import runner as runners
from ridgeline.serve.runner import PackedStep, Runner
from ridgeline.spec.model import ModelSpec

FEW, MANY = 4, 16
"""Layers, whose difference is counted."""
TOKENS = 16


class Idle(Driver):
    """A driver whose launches do nothing but what is in ``called``."""

    def __init__(self) -> None:
        super().__init__(90)
        self.called: list[tuple[Any, ...]] | None = None
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
            load_binary=lambda name, *_: (name, name, 32, 0, 1024),
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """What a compiled kernel calls."""
        named = metadata.hash

        def launch(x: int, y: int, z: int, stream: int, function: str, packed: Any, *rest: Any) -> None:
            if self.called is not None:
                self.called.append((named, metadata.launch_pdl, (x, y, z), function, *rest[3:]))

        return launch


class Facade:
    """A model that says that it is on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> list[Any]:
        """None of which is elsewhere."""
        return [SimpleNamespace(is_cuda=True)]

    def modules(self) -> Any:
        """The model's."""
        return self.model.modules()


def served(layers: int, biased: bool) -> tuple[Runner, PackedStep]:
    """A model with its pool, and a prompt for it."""
    narrow = {"num_layers": layers, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
              "head_dim": 16, "vocab_size": 128, "tie_embeddings": False, "qkv_bias": biased}  # fmt: skip
    spec = ModelSpec(**{**catalog.model("llama3.2-1b").model_dump(), **narrow})
    model = build(spec, torch.device("cpu"), torch.bfloat16, seed=0).eval().requires_grad_(False)
    fuse_served(Facade(model))  # type: ignore[arg-type]
    made = Runner(model, 256, 16, 64)
    step = PackedStep([], ids=list(range(TOKENS)), at=list(range(TOKENS)))
    blocks = runners.array("i", [0])
    step.pieces.append(made.piece(SimpleNamespace(blocks=blocks), 0, 0, TOKENS, step.slots))  # type: ignore[arg-type]
    return made, step


def as_on_a_gpu() -> Idle:
    """Kernels of a GPU for tensors that are not on one."""
    from ridgeline.nn.kernels.paged_attention import paged_attention

    idle = Idle()
    driver.set_active(idle)
    native.call = lambda name, *args, **more: gpu.call(name, *args, **more)
    runners.find_kernel = lambda *_: None
    runners.find_step_kernel = lambda *_: paged_attention
    torch.cuda.empty_cache = lambda: None
    F.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))
    return idle


def microseconds(given: tuple[Runner, PackedStep], arranged: Any, times: int) -> float:
    """Of the processor: the median of some steps."""
    took = []
    for _ in range(times):
        start = time.process_time_ns()
        given[0].execute(given[1], arranged)
        took.append(time.process_time_ns() - start)
    return statistics.median(took) / 1e3


def measure(biased: bool, times: int) -> dict[str, Any]:
    """Microseconds of the host for a layer."""
    models = [served(n, biased) for n in (FEW, MANY)]
    arranged = [made.arrange(step) for made, step in models]
    rounds = []
    for _ in range(12):  # the first compiles
        few, many = (microseconds(m, a, times) for m, a in zip(models, arranged, strict=True))
        rounds.append((many - few) / (MANY - FEW))
    return {"us_per_layer": round(statistics.median(rounds[1:]), 1), "rounds": [round(r, 1) for r in rounds[1:]]}


def check(idle: Idle) -> int:
    """Launches of a step by :mod:`~ridgeline.nn.kernels.quick`, the first, the next, and by Triton alone."""
    from ridgeline.nn.kernels.quick import Quick

    torch.manual_seed(0)
    made, step = served(2, True)
    arranged = made.arrange(step)
    found = []
    plain = Quick.launch
    for way in (plain, plain, lambda self, grid, *args, **named: self.kernel[grid](*args, **self.completed(named))):
        Quick.launch = way  # type: ignore[method-assign,assignment]
        idle.called = []
        made.execute(step, arranged)
        found.append([tuple("tensor" if isinstance(a, torch.Tensor) else a for a in call) for call in idle.called])
    Quick.launch = plain  # type: ignore[method-assign]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 8
    # Behind a library's product none starts early: writes and turns, activations, and norms but for the first.
    early = [e for _, e, *_ in found[0]]
    assert early[0]
    assert 0 < sum(early) < len(early) / 2
    return len(found[0])


def main() -> None:
    """Measure and print; with ``--out`` also keep under ``--as``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60, help="steps of a round")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as", dest="key", default="after")
    given = parser.parse_args()
    torch.set_num_threads(1)
    idle = as_on_a_gpu()
    if given.check:
        print(json.dumps({"launches": check(idle), "own": JITFunction.__module__}))
        return
    rows = {"bf16": measure(False, given.times), "bf16, biases of queries, keys and values": measure(True, given.times)}
    for name, row in rows.items():
        print(f"{name}: {row['us_per_layer']} us of the host for a layer, rounds {row['rounds']}")
    if given.profile:
        model = served(MANY, False)
        arranged = model[0].arrange(model[1])
        microseconds(model, arranged, 3)
        with cProfile.Profile() as profile:
            microseconds(model, arranged, 50)
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(32)
    if given.out is not None:
        held = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
        held[given.key] = {"environment": fingerprint(), "rows": rows}
        given.out.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
