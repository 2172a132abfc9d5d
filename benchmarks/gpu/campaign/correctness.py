"""Whether what runs on this device is right: the tests of the kernels on it, training and serving beside the CPU's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from campaign.cells import Cell, Figures, NotInstalled, Setting

ROOT = Path(__file__).resolve().parents[3]
TESTS = ("nn/test_triton.py", "nn/test_float8_triton.py", "nn/test_lowbit_triton.py", "nn/test_paged_triton.py",
         "nn/test_ternary_triton.py", "nn/test_packed_linear.py", "nn/test_folding.py", "nn/test_semi_structured.py",
         "nn/test_varlen.py", "nn/test_flash_triton.py", "nn/test_liger.py", "nn/test_gemv.py",
         "nn/test_skinny.py", "nn/test_grouped_lora.py", "gpu/test_graphs.py")  # fmt: skip
"""What has kernels of its own on a GPU."""
PLANS = {
    "plain": [], "fused_layers": ["fused_layers"], "flash_attention": ["flash_attention"],
    "bf16": ["mixed_precision"], "fp8": ["mixed_precision", "fp8"],
    "fp8 by rows": ["mixed_precision", "fp8:scaling=rowwise"], "recompute": ["recompute"],
    "zero_offload": ["zero_offload"], "activation_offload": ["activation_offload"], "adamw8bit": ["adamw8bit"],
    "torch_compile": ["torch_compile"],
}  # fmt: skip
"""What is trained for a few steps, and the largest relative difference of its losses in :data:`BOUNDS`."""
BOUNDS = {"bf16": 5e-3, "fp8": 3e-2, "fp8 by rows": 3e-2, "adamw8bit": 2e-2}
EXACT = 1e-4
SERVED = {"plain": [], "int4": ["rtn:bits=4,group_size=32"], "int8 cache": ["kv_quant:dtype=int8"],
          "drafts": ["speculative"], "adapters": ["multi_adapter:adapters=3,rank=8"],
          "adapters, int4": ["multi_adapter:adapters=3,rank=20", "rtn:bits=4,group_size=32"]}  # fmt: skip


def cells(setting: Setting) -> list[Cell]:
    """Tests, then losses, then served tokens."""
    none = {"failed": ("<=", 0.0)}
    tests = TESTS[:1] if setting.small else TESTS
    plans = {k: PLANS[k] for k in ("plain", "fused_layers")} if setting.small else PLANS
    served = {"plain": []} if setting.small else SERVED
    return [
        *(Cell(f"tests/{t}", partial(tested, t), goals=none, limit=420.0) for t in tests),
        *(Cell(f"losses, {n}", partial(losses, setting, p), limit=240.0,
               goals={"difference": ("<=", BOUNDS.get(n, EXACT))}) for n, p in plans.items()),
        *(Cell(f"tokens, {n}", partial(tokens, setting, p), goals={"equal": (">=", 0.99)}, limit=240.0)
          for n, p in served.items()),
    ]  # fmt: skip


def tested(name: str) -> Figures:
    """Outcomes of a file of tests, which run natively where there is a GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"RIDGELINE_TESTS_ON_GPU": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests" / name)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    if "No module named pytest" in done.stderr:
        raise NotInstalled("pytest is not installed")
    if done.returncode not in (0, 1, 5):
        raise RuntimeError((done.stdout + done.stderr).strip()[-1500:])
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    found: Figures = {"passed": counts.get("passed", 0), "failed": failed, "skipped": counts.get("skipped", 0)}
    if failed:
        found["failures"] = re.findall(r"^FAILED (.*)$|^ERROR (.*)$", done.stdout, re.M)[:20]
        found["log"] = done.stdout[-3000:]
    return found


def losses(setting: Setting, plan: list[str]) -> Figures:
    """Four steps of a tiny model with a plan on the device, and without one on the CPU: their losses."""
    import torch

    from ridgeline.experiments import make
    from ridgeline.jobs.worker import setup
    from ridgeline.train.trainer import Trainer

    workload = {"kind": "pretrain", "seq_len": 128, "batch_size": 4, "steps": 4}
    device = setup(1)
    ours = [Trainer(make("llama-mini", setting.on, workload, plan), device)]
    ours.append(Trainer(make("llama-mini", setting.on, workload, []), torch.device("cpu")))
    mine, theirs = ([float(t.step().loss) for _ in range(4)] for t in ours)
    return {"difference": max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)), "losses": mine}


def tokens(setting: Setting, plan: list[str]) -> Figures:
    """Greedy tokens of prompts of several lengths in fp32, on the device and on the CPU: the share that is equal until
    a prompt's first difference."""
    import torch

    from campaign.engine import finished
    from ridgeline import catalog
    from ridgeline.experiments import make
    from ridgeline.jobs.worker import setup
    from ridgeline.measure.made_adapters import add_stated
    from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
    from ridgeline.nn.model.init import build
    from ridgeline.serve.build_engine import DEFAULT_PLAN, make_engine

    catalog.allow_unprobed()
    torch.backends.cuda.matmul.allow_tf32 = False
    device, spec = setup(1), catalog.model("llama-mini")
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(build(spec), Path(folder))
        said = []
        for where in (device, torch.device("cpu")):
            w = {"kind": "serve", "checkpoint": folder, "prompt_len": 8, "output_len": 24, "dtype": "fp32"}
            e = make(spec, setting.on, w, [*DEFAULT_PLAN, *plan])
            engine = make_engine(e, where)
            add_stated(e.plan, engine, drawn=True)
            said.append(finished(engine, [3, 17, 40, 64], 24))
    same = [next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(*said, strict=True)]  # fmt: skip
    return {"equal": sum(same) / sum(map(len, said[0])), "until": same}
