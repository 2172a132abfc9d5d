"""A model divided over processes serves the tokens of the whole one, and a rank that dies is told of."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from tests.forked import Fork
from tests.serving import greedy, model

from ridgeline import catalog
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.serve import ranks
from ridgeline.serve.build_engine import load_engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.techniques.registry import default_plan

PROMPTS = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 9 * i)] for i in range(4)]


def serving(send, folder, plan, kill):
    """Send what an engine with the plan says; with ``kill`` a rank is killed after the first tokens."""
    plan = dict.fromkeys([*default_plan("serve"), *plan.split("+")])
    engine = load_engine(folder, plan, max_num_batched_tokens=16, kv_cache_bytes=1 << 20)
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, Sampling(max_tokens=8, temperature=0.0)))
    out = {}
    try:
        while engine.has_work():
            for e in engine.step():
                out.setdefault(e.request, []).extend(e.tokens)
            engine.check()
            if kill and out:
                os.kill(engine.runner.followers[0].pid, signal.SIGKILL)
    except RuntimeError as e:
        out = {"lost": str(e)}
    engine.close()
    send(out)


def serve(folder, plan, kill=False):
    """What a process with the plan says."""
    fork = Fork(serving, folder, plan, kill)
    said = fork.answer()
    assert fork.wait(300) == 0
    return said


def test_every_serving_system_runs_as_its_small_plan(tmp_path):
    save_checkpoint(model(dtype=torch.float32), tmp_path)
    whole = load_checkpoint(tmp_path, torch.float32).requires_grad_(False)
    expected = {str(i): greedy(whole, p, 8) for i, p in enumerate(PROMPTS)}
    systems = [s for n in catalog.systems() if (s := catalog.system(n)).reported.workload.get("kind") == "serve"]
    assert systems
    for system in systems:
        assert serve(tmp_path, "+".join(system.shrunk.plan)) == expected


@pytest.mark.parametrize(
    ("plan", "base"),
    [("tensor_parallel:degree=2", "llama-mini"), ("expert_parallel:degree=2", "mixtral-tiny"),
     pytest.param("tensor_parallel:degree=2+pipeline:degree=2", "llama-mini", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_divided_models_serve_the_same_tokens(tmp_path, plan, base):
    save_checkpoint(model(base, torch.float32), tmp_path)
    whole = load_checkpoint(tmp_path, torch.float32).requires_grad_(False)
    assert serve(tmp_path, plan) == {str(i): greedy(whole, p, 8) for i, p in enumerate(PROMPTS)}


def test_a_rank_that_is_killed_is_told_of(tmp_path):
    save_checkpoint(model(dtype=torch.float32), tmp_path)
    said = serve(tmp_path, "tensor_parallel:degree=2", kill=True)
    assert "rank 1 died" in said["lost"]


def waiting(send, folder):
    """Wait in a step for a rank that has died, as for a sum in a CUDA graph: its engine's process must end."""
    ranks.WAIT, waits = timedelta(seconds=1), []
    engine = load_engine(folder, [*default_plan("serve"), "tensor_parallel:degree=2"], kv_cache_bytes=1 << 20)
    engine.runner.graphs = SimpleNamespace(graphs={})
    engine.runner._last = SimpleNamespace(query=lambda: not waits)
    engine.runner.watch()
    waits.append("for a slow step")
    time.sleep(3)
    send("goes on")
    waits.clear()
    os.kill(engine.runner.followers[0].pid, signal.SIGKILL)
    time.sleep(3)
    send("has no step to wait for")
    waits.append("for the dead rank")
    time.sleep(60)
    send("has waited")


def test_a_step_that_waits_for_a_dead_rank_ends_the_process(tmp_path):
    save_checkpoint(model(dtype=torch.float32), tmp_path)
    fork = Fork(waiting, tmp_path)
    assert [fork.answer(), fork.answer()] == ["goes on", "has no step to wait for"]
    assert fork.wait(60) == 1
    assert "rank 1 died: the engine ends" in fork.errors()
