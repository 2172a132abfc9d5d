"""Serving on one device: decode steps as a share of the memory's bandwidth, prompts, a load over HTTP, and others."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from campaign.cells import Cell, Figures, NotInstalled, Setting
from ridgeline.experiments import make
from ridgeline.measure.ablate import measure_plan
from ridgeline.predict import predict
from ridgeline.predict.serving.arrivals import requests
from ridgeline.predict.serving.engine_costs import find_engine
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.serving.simulate import surface_of
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.scheduling import OWN
from ridgeline.techniques.registry import default_plan, resolve

PLANS = {
    "bf16": (), "int8": ("rtn:bits=8,group_size=128",), "int4": ("rtn:bits=4,group_size=128",), "fp8": ("fp8",),
    "mxfp4": ("mxfp4:layers=all",),
}  # fmt: skip
CACHES = {"int8 cache": ("kv_quant:dtype=int8",), "int4 cache": ("kv_quant:dtype=int4",),
          "fp8 cache": ("kv_quant:dtype=fp8",)}  # fmt: skip
BATCHES = (1, 8, 64)
PROMPT, NEW = 512, 64
LONGEST = 2048
"""The longest prompt of decode steps: engines are made for it, so that one serves the cells of a model and plan."""
LIMIT = 200.0


def cells(setting: Setting) -> list[Cell]:
    """Decode steps by dtype and batch; caches, drafts, experts; prompts; a load; peers."""
    if setting.small:
        return [_decode(setting, "llama-mini", "fp32", (), 2, dtype="fp32", prompt=8, new=6),
                _prompt(setting, "llama-mini", 48, "fp32")]  # fmt: skip
    large, small = "llama3.1-8b", "llama3.2-1b"
    found = [_decode(setting, large, n, p, b) for n, p in PLANS.items() for b in BATCHES]
    found += [_decode(setting, small, n, PLANS[n], b) for n in ("bf16", "int4") for b in BATCHES]
    found += [_decode(setting, small, "bf16, without graphs", (), b, graphs=False) for b in (1, 64)]
    found += [_decode(setting, large, n, p, 64, prompt=2048) for n, p in {"bf16": (), **CACHES}.items()]
    found += [_decode(setting, large, "drafts", ("speculative",), b) for b in (1, 8)]
    lora = "multi_adapter:adapters=16,rank=16"
    found += [_decode(setting, large, "16 adapters", (lora,), b) for b in BATCHES]
    found += [_decode(setting, large, "int4, 16 adapters", (*PLANS["int4"], lora), 8)]
    found += [_decode(setting, "qwen3-30b-a3b", "bf16", (), b) for b in (1, 64)]
    found += [_prompt(setting, large, n) for n in (512, 4096)]
    found += [_load(setting, m, n) for m, n in ((small, 8), (small, 64), (large, 8), (large, 64))]
    peers = (("transformers", small, transformers_decode, "gpt-fast"), ("vLLM", small, vllm_decode, "vllm"),
             ("vLLM", large, vllm_decode, "vllm"))  # fmt: skip
    for who, model, ask, engine in peers:
        for b in BATCHES:
            given = partial(experiment, setting, model, (), b, PROMPT, NEW, engine=engine)
            found.append(Cell(f"{model}, {who}, decode, batch {b}", partial(ask, setting, model, b),
                              partial(decode_said, given), limit=300.0))  # fmt: skip
    return found


def experiment(
    setting: Setting, model: str, plan: tuple[str, ...], batch: int, prompt: int, new: int, dtype: str = "bf16",
    engine: str = OWN,
) -> Experiment:  # fmt: skip
    """``batch`` clients, each with one request. ``engine``: what is predicted; transformers' compiled `generate` with a
    static cache does what gpt-fast does."""
    from ridgeline.spec.device import Cluster

    w = {"kind": "serve", "prompt_len": prompt, "output_len": new, "concurrency": batch, "requests": batch,
         "max_num_seqs": max(batch, *BATCHES), "max_num_batched_tokens": 8192,
         "max_model_len": max(prompt, LONGEST) + new + 1, "dtype": dtype, "engine": engine}  # fmt: skip
    return make(model, Cluster(device=setting.device), w, [*default_plan("serve"), *plan])


def _decode(
    setting: Setting, model: str, name: str, plan: tuple[str, ...], batch: int, dtype: str = "bf16",
    prompt: int = PROMPT, new: int = NEW, graphs: bool = True,
) -> Cell:  # fmt: skip
    shares = {"bf16": 0.75, "int4": 0.65}
    goals = {"share_of_bandwidth": (">=", shares[name])} if name in shares else {}
    given = partial(experiment, setting, model, plan, batch, prompt, new, dtype)
    return Cell(f"{model}, {name}, decode, batch {batch}, {prompt} tokens", partial(decode, setting, given, graphs),
                partial(decode_said if graphs else launched_said, given), goals, LIMIT)  # fmt: skip


def decode_said(given: partial[Experiment]) -> Figures:
    """The median time between tokens."""
    said = predict(given())
    return {"step_s": said.metrics["itl_p50_s"].value} if said.status == "ok" else {"status": said.status}


def launched_said(given: partial[Experiment]) -> Figures:
    """The step in the middle of the answers, of an engine that captures none."""
    e, techniques = resolve(given())
    w: Any = e.workload
    s = surface_of(e, techniques, requests(w))
    eager = Iterations(e, techniques, s.cluster, replace(s.engine, graphs=False), s.contexts)
    return {"step_s": eager.mixed([], w.concurrency, w.concurrency * (w.prompt_len + w.output_len // 2))}


def decode(setting: Setting, given: partial[Experiment], graphs: bool) -> Figures:
    """Median decode step of the engine, with what it must read over the time."""
    from campaign.engine import steps

    e = given()
    w: Any = e.workload
    start = time.perf_counter()
    engine = _engine(e)
    ready = time.perf_counter() - start
    captured = engine.runner.graphs
    if not graphs:
        engine.runner.graphs = None
    spec, batch = engine.spec, w.concurrency
    steps(engine, [w.prompt_len] * batch, min(w.output_len, 8), "warm ")
    _, taken, tokens = steps(engine, [w.prompt_len] * batch, w.output_len)
    used, engine.runner.graphs = engine.runner.graphs is not None, captured
    second = statistics.median(taken)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in engine.model.state_dict().values()}
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size * next(engine.model.parameters()).itemsize
    slots = engine.blocks.count * engine.runner.block_size
    pool = sum(t.nbytes for layer in engine.runner.pool() for t in layer)
    cached = pool / slots * (w.prompt_len + w.output_len / 2) * batch
    weights = sum(held.values()) - table
    ordered = sorted(taken)
    found: Figures = {
        "step_s": second, "tokens_per_s": tokens / sum(taken), "captured": used,
        "start_s": ready, "weights_bytes": weights,
        "quartiles_s": [ordered[len(taken) // 4], ordered[3 * len(taken) // 4]],
    }  # fmt: skip
    if not spec.num_experts:  # of which a step reads some
        found["share_of_bandwidth"] = (weights + cached) / second / setting.device.memory_bandwidth
    return found


_made: dict[str, Any] = {}


def _engine(e: Experiment) -> Any:
    """An engine for the experiment, however many clients it has: the last one if it is like that."""
    from campaign.engine import random_model
    from ridgeline.jobs.worker import setup
    from ridgeline.measure.made_adapters import add_stated
    from ridgeline.serve.build_engine import make_engine

    any_load = {"concurrency": 1, "requests": 1, "prompt_len": 1, "output_len": 1}
    given = e.model_copy(update={"workload": e.workload.model_copy(update=any_load)})
    key = given.model_dump_json()
    if key not in _made:
        _free()
        device = setup(1)
        _made[key] = make_engine(e, device, random_model(e, device))
        add_stated(e.plan, _made[key])
        _made[key].warm_up_adapters()
    return _made[key]


def _free() -> None:
    """Give back what the last engine held."""
    import torch

    _made.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prompt(setting: Setting, model: str, length: int, dtype: str = "bf16") -> Cell:
    given = partial(experiment, setting, model, (), 1, length, 2, dtype)
    return Cell(f"{model}, prompt of {length} tokens", partial(prompt, given), partial(prompt_said, given), {}, LIMIT)


def prompt_said(given: partial[Experiment]) -> Figures:
    """Time to the first token, without what HTTP adds."""
    e = given()
    said, costs = predict(e), find_engine(OWN, e.cluster.device)
    return {"seconds": said.metrics["ttft_s"].value - costs.request_s - costs.admission_s}


def prompt(given: partial[Experiment]) -> Figures:
    """Median time of a prompt's steps; every prompt is another, so that none is cached."""
    from campaign.engine import clock
    from ridgeline.serve.request import EngineRequest, Sampling

    e = given()
    w: Any = e.workload
    engine, taken = _engine(e), []
    for i in range(6):
        ids = [(7 * j + 13 * i) % (engine.spec.vocab_size - 2) + 2 for j in range(w.prompt_len)]
        engine.add(EngineRequest(f"{w.prompt_len}-{i}", ids, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)))
        start = clock()
        while engine.has_work():
            engine.step()
        taken.append(clock() - start)
    seconds = statistics.median(taken[1:])
    return {"seconds": seconds, "tokens_per_s": w.prompt_len / seconds}


def _load(setting: Setting, model: str, clients: int) -> Cell:
    def given() -> Experiment:
        e = experiment(setting, model, (), clients, 512, 128)
        return e.model_copy(update={"workload": e.workload.model_copy(update={"requests": 4 * clients})})

    return Cell(f"{model}, {clients} clients over HTTP", partial(load, given), partial(load_said, given), {}, 300.0)


LOADED = ("tokens_per_s", "ttft_p50_s", "tpot_p50_s", "requests_per_s")


def load_said(given: Any) -> Figures:
    """Throughput and latencies of the simulated load."""
    said = predict(given())
    return {k: said.metrics[k].value for k in LOADED if k in said.metrics}


def load(given: Any) -> Figures:
    """The real server and the real client. Raises :class:`RuntimeError` with the reason of a run that fails."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise NotInstalled(f"{package} is not installed")
    _free()
    result = measure_plan(given(), memory=False, timeout=280)
    if result.status != "ok":
        raise RuntimeError(f"{result.status}: {result.reason} {' '.join(result.notes)[-500:]}")
    return {k: result.metrics[k].value for k in LOADED if k in result.metrics}


def _checkpoint(setting: Setting, model: str, folder: str) -> None:
    import torch

    from campaign.engine import random_model
    from ridgeline.nn.checkpoint.checkpoint import save_checkpoint

    _free()
    save_checkpoint(random_model(experiment(setting, model, (), 1, PROMPT, NEW), torch.device("cuda")), Path(folder))
    gc.collect()
    torch.cuda.empty_cache()


def transformers_decode(setting: Setting, model: str, batch: int) -> Figures:
    """A step of `generate` with a static cache, compiled into CUDA graphs."""
    if importlib.util.find_spec("transformers") is None:
        raise NotInstalled("transformers is not installed")
    import torch
    import transformers

    from campaign.engine import clock, prompts

    with tempfile.TemporaryDirectory() as folder:
        _checkpoint(setting, model, folder)
        auto: Any = transformers.AutoModelForCausalLM
        theirs = auto.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    ids = torch.tensor(prompts(theirs.config.vocab_size, [PROMPT] * batch), device="cuda")
    theirs.forward = torch.compile(theirs.forward, mode="reduce-overhead", fullgraph=True)

    def run(tokens: int) -> float:
        start = clock()
        with torch.inference_mode():
            theirs.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None,
                            pad_token_id=0, cache_implementation="static")  # fmt: skip
        return clock() - start

    for _ in range(2):  # compiling and capturing
        run(NEW)
    step = (run(NEW) - run(1)) / (NEW - 1)
    return {"step_s": step, "tokens_per_s": batch / step}


def vllm_decode(setting: Setting, model: str, batch: int) -> Figures:
    """A step of vLLM's offline engine."""
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalled("vLLM is not installed")
    import vllm

    from campaign.engine import prompts

    with tempfile.TemporaryDirectory() as folder:
        _checkpoint(setting, model, folder)
        llm = vllm.LLM(folder, skip_tokenizer_init=True, max_model_len=PROMPT + NEW + 1, max_num_seqs=batch,
                       gpu_memory_utilization=0.6, enable_prefix_caching=False)  # fmt: skip
        ids = prompts(llm.llm_engine.model_config.get_vocab_size(), [PROMPT] * batch)

        def run(tokens: int) -> float:
            given = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": row} for row in ids], given, use_tqdm=False)
            return time.perf_counter() - start

        run(NEW)
        step = (run(NEW) - run(1)) / (NEW - 1)
    return {"step_s": step, "tokens_per_s": batch / step}
