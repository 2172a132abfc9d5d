"""Small models and slow, obvious references for the tests of serving."""

from __future__ import annotations

import torch

from ridgeline import catalog
from ridgeline.nn.init import build
from ridgeline.serve.build import DEFAULT_PLAN, make_engine
from ridgeline.serve.request import Request, Sampling
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve

FIELDS = {"vocab_size": 300, "max_positions": 128, "num_layers": 2, "tie_embeddings": False}


def spec(base="llama-mini", **fields):
    """A model of two narrow layers."""
    narrow = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelSpec(**{**catalog.model(base).model_dump(), **FIELDS, **narrow, **fields})


def model(base="llama-mini", dtype=torch.float64, seed=0, **fields):
    """One with weights from ``seed``, in fp64: no two orders of summation disagree on a token. Sharpened, so that
    random weights have opinions."""
    made = build(spec(base, **fields), torch.device("cpu"), dtype, seed)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1:
                p.mul_(4)
    return made


def engine(made, *plan, ends=(), **fields):
    """An engine of the default plan and ``plan`` over ``made``."""
    catalog.allow_unprobed()
    calls = {c.split(":")[0]: c for c in (*DEFAULT_PLAN, *plan)}
    calls = [c for c in calls.values() if not c.startswith("-")]
    calls = [c for c in calls if f"-{c.split(':')[0]}" not in plan]
    w = Serve(**{"kv_cache_bytes": 1 << 22, "prompt_len": 1, "output_len": 1, **fields})
    e = Experiment(model=made.spec, cluster=catalog.cluster("local"), workload=w, plan=Plan.parse(calls))
    out = make_engine(e, torch.device("cpu"), made)
    out.eos = out.sampler.ends = frozenset(ends)
    return out


def run(eng, *requests, check=True):
    """Serve ``requests`` to the end → tokens by (request, output), and all events."""
    for r in requests:
        eng.add(r)
    events = []
    while eng.has_work():
        events += eng.step()
        if check:
            eng.check()
    assert eng.blocks.used == 0
    return collect(events), events


def collect(events):
    """Tokens by (request, output)."""
    out = {}
    for e in events:
        out.setdefault((e.request, e.index), []).extend(e.tokens)
    return out


@torch.inference_mode()
def greedy(made, prompt, new, ends=()):
    """Greedy tokens without any cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(made(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def ask(name, prompt, new=8, **fields):
    """A request, greedy if nothing else is said."""
    return Request(name, prompt, Sampling(**{"max_tokens": new, "temperature": 0.0, **fields}))
