"""Small models and slow, obvious references for the tests of serving."""

from __future__ import annotations

import torch

from ridgeline import catalog
from ridgeline.nn.adapters.lora_slots import LoraSlots
from ridgeline.nn.checkpoint.peft import save_lora, save_own, state_of
from ridgeline.nn.model.init import build
from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.build_engine import DEFAULT_PLAN, make_engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import make
from ridgeline.train.adapter_folder import attach, load_adapter

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


ADAPTERS = {
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
    "dora": {"rank": 2, "targets": ["q_proj", "up_proj"], "dora": True},
    "bitfit": {},
    "bottleneck_adapter": {"size": 4},
    "diff_pruning": {"density": 0.05},
    "mask_tuning": {},
}
"""Every kind of adapter, with options."""


LORAS = {
    "lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
    "wide": {"rank": 20, "targets": ["all-linear"]},
    "other": {"rank": 3, "targets": ["k_proj", "o_proj", "up_proj"], "rslora": True},
}
"""LoRA adapters of several ranks around several layers."""


def adapters_in(folder, base="llama-mini", kinds=ADAPTERS):
    """A trained-looking adapter of each kind for :func:`model`, saved as training saves them: folders by kind."""
    made, out = model(base), {}
    for i, (name, options) in enumerate(kinds.items()):
        kind = "lora" if "rank" in options else name
        technique = make(Call(name=kind, options=options))
        generator, state = torch.Generator().manual_seed(i), {}
        for at, layer in list(made.named_modules()):
            everywhere = kind not in ("lora", "bottleneck_adapter")
            everywhere = everywhere or technique.targets == ("all-linear",)
            if not at.endswith("_proj") or not (everywhere or at.rpartition(".")[2] in technique.targets):
                continue
            for leaf, t in technique.around(layer).state().items():
                spread = torch.randn(t.shape, generator=generator, dtype=t.dtype)
                state[f"{at}.{leaf}"] = t.detach() + spread * (0.5 if leaf != "adapter_scores" else 0.02)
        out[name] = folder / name
        out[name].mkdir()
        plain = technique.model_dump(mode="json")
        if kind == "lora":
            save_lora(out[name], made.spec, plain, state_of(state, (*technique.leaves, "lora_m")), "")
        else:
            save_own(out[name], made.spec, kind, plain, technique.compact(state), "")
    return out


def adapted(folder, base="llama-mini"):
    """:func:`model` with the adapter in ``folder``."""
    made = model(base)
    attach(made, load_adapter(folder, made.spec))
    return made


def add_lora(x, y, items, stack):
    """:func:`ridgeline.nn.kernels.grouped_lora.add_lora` by PyTorch's operators, which look at no number on the
    host."""
    row, (slot, first, end) = torch.arange(len(x), device=x.device), items.t()[:, :, None]
    mine = (row >= first) & (row < end)
    of = (mine * slot).sum(0)
    mid = torch.einsum("mk,mrk->mr", x, stack.a[of]).unflatten(1, (len(stack.widths), -1))
    held = torch.arange(stack.capacity, device=x.device) < stack.ranks[of][:, :, None]
    mid = (mid * stack.scales[of][:, :, None]).where(held, 0.0).to(x.dtype)
    parts = zip(mid.unbind(1), stack.b[of].split(stack.widths, 2), strict=True)
    added = torch.cat([torch.einsum("mr,mrn->mn", m, b) for m, b in parts], 1)
    y.add_(added.where(mine.any(0)[:, None], 0.0))


def in_slots(eng, block_bytes=4096.0, add=add_lora):
    """Have an engine keep its LoRA adapters in slots, as on a GPU."""
    eng.runner.slots = LoraSlots(eng.model, add)
    eng.adapters = AdapterTable(eng.model, eng.blocks, block_bytes, eng.max_model_len, eng.runner.slots)
    eng.runner.route = eng.adapters.route
    return eng


def experiment(model_spec, plan, **fields):
    """Serving of a model on this machine."""
    catalog.allow_unprobed()
    w = Serve(**{"kv_cache_bytes": 1 << 22, "prompt_len": 1, "output_len": 1, **fields})
    return Experiment(model=model_spec, cluster=catalog.cluster("local"), workload=w, plan=Plan.parse(list(plan)))


def engine(made, *plan, ends=(), **fields):
    """An engine of the default plan and ``plan`` over ``made``."""
    calls = {c.split(":")[0]: c for c in (*DEFAULT_PLAN, *plan)}
    calls = [c for c in calls.values() if not c.startswith("-")]
    calls = [c for c in calls if f"-{c.split(':')[0]}" not in plan]
    out = make_engine(experiment(made.spec, calls, **fields), torch.device("cpu"), made)
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
        tokens.append(int(made(torch.tensor([tokens], device=next(made.parameters()).device))[0, -1].argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def ask(name, prompt, new=8, **fields):
    """A request, greedy if nothing else is said."""
    return EngineRequest(name, prompt, Sampling(**{"max_tokens": new, "temperature": 0.0, **fields}))


@torch.inference_mode()
def alone(made, request, ends=()):
    """What a request must give, from whole forward passes without a cache: tokens by output."""
    import random

    from ridgeline.serve.sampler import Sampler
    from ridgeline.serve.sequence import Sequence, SequenceGroup

    s = request.sampling
    sampler = Sampler(frozenset(ends), hierarchical=False)
    out = {}
    for index in range(s.n):
        seq = Sequence(
            SequenceGroup(request, s.seed or 0), index, list(request.prompt), rng=random.Random(f"{s.seed}/{index}")
        )
        while True:
            logits = made(torch.tensor([seq.tokens]))[:, -1].clone()
            (token,) = sampler(logits, [seq])
            seq.tokens.append(token)
            seq.counts[token] = seq.counts.get(token, 0) + 1
            stops = token in s.stop_token_ids or (token in ends and not s.ignore_eos)
            if (stops and seq.generated > s.min_tokens) or seq.generated >= s.max_tokens:
                break
        out[index] = seq.tokens[len(request.prompt) :]
    return out


@torch.inference_mode()
def beams_alone(made, request, ends=()):
    """Beam search by whole forward passes over plain lists: the best outputs' tokens, best first."""
    s = request.sampling
    width, prompt = s.beam_width, list(request.prompt)
    live, done = [(0.0, prompt)], []
    for length in range(1, s.max_tokens + 1):
        found = []
        for total, tokens in live:
            logp = made(torch.tensor([tokens]))[0, -1].log_softmax(-1)
            found += [(total + float(p), [*tokens, t]) for t, p in enumerate(logp)]
        found = sorted(found, key=lambda f: -f[0])[: max(2, 1 + len(ends)) * width]
        for rank, (total, tokens) in enumerate(found):
            if rank < width and (tokens[-1] in ends or length == s.max_tokens):
                done = sorted([*done, (total / length**s.length_penalty, tokens)], key=lambda f: -f[0])[:width]
        live = [f for f in found if f[1][-1] not in ends][:width]
        if len(done) == width and (s.early_stopping or live[0][0] / length**s.length_penalty <= done[-1][0]):
            break
    return [tokens[len(prompt) :] for _, tokens in done[: s.n]]
