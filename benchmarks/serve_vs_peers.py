"""What the serving engine gives against what one would use otherwise, as ratios measured in turns in one run.

    python benchmarks/serve_vs_peers.py [CHECKPOINT] [--only offline,…] [--json benchmarks/results/serve_vs_peers.json]

Parts:
    offline    requests of log-normal lengths: ours, ``transformers`` generate with padded static batches, and its
               continuous batching; equal greedy tokens are asserted
    decode     one stream in int8 and int4 against fp32, against llama.cpp's same bits (where llama-cpp-python is
               installed), and against the memory's bandwidth
    packed     BERT-base on batches of average over maximal length 0.4 to 1: packed rows, padded, padded by length_dp
    prefix     time to the first token by the share of the prompt that is cached
    pages      requests that run at once in equal memory: pages, and room for the longest possible output
    topk       two-level search of a large vocabulary against ``torch.topk``
    adapters   16 adapters in one batch against one after the other

Without CHECKPOINT random weights of a small Llama are used. Threads are PyTorch's (set OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beyond_memory import vocabulary

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.serve import topk
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine, make_engine
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve

Times = dict[str, list[float]]


def in_turns(contestants: dict[str, Callable[[], Any]], rounds: int, warm: int = 1) -> Times:
    """Seconds of each contestant, which take turns; the first ``warm`` rounds do not count."""
    times: Times = {name: [] for name in contestants}
    for round_ in range(rounds + warm):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_ >= warm:
                times[name].append(time.perf_counter() - start)
    return times


def ratios(times: Times, of: str) -> dict[str, dict[str, float]]:
    """How many times faster ``of`` is than each of the others, round by round: median and extremes."""
    out = {}
    for name, seconds in times.items():
        if name != of:
            each = sorted(s / own for s, own in zip(seconds, times[of], strict=True))
            out[name] = {"median": statistics.median(each), "low": each[0], "high": each[-1]}
    return out


def serve(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Serve to the end → tokens by request."""
    for r in requests:
        engine.add(r)
    out: dict[str, list[int]] = {r.id: [] for r in requests}
    while engine.has_work():
        for e in engine.step():
            assert not e.error, e.error
            out[e.request] += e.tokens
    return out


def greedy(name: str, prompt: list[int], new: int) -> EngineRequest:
    return EngineRequest(name, prompt, Sampling(max_tokens=new, temperature=0.0, ignore_eos=True))


def trace(count: int, vocab: int, longest: int, seed: int = 0) -> list[EngineRequest]:
    """Requests of log-normal lengths, as conversations have (medians 64 in, 48 out, sigma 0.9)."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        prompt = max(4, min(longest // 2, round(rng.lognormvariate(4.16, 0.9))))
        new = max(4, min(longest // 2, round(rng.lognormvariate(3.87, 0.9))))
        out.append(greedy(str(i), [rng.randrange(vocab) for _ in range(prompt)], new))
    return out


def offline(checkpoint: Path, rounds: int, count: int = 200, batch: int = 32) -> dict[str, Any]:
    """Throughput of a whole trace."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    spec = ModelSpec.from_path(checkpoint)
    requests = trace(count, spec.vocab_size, min(512, spec.max_positions))
    tokens = sum(r.sampling.max_tokens for r in requests)
    said: dict[str, dict[str, list[int]]] = {}

    def ours() -> None:
        engine = load_engine(checkpoint, dtype="fp32", max_num_seqs=batch)
        said["ours"] = serve(engine, requests)

    @torch.inference_mode()
    def padded() -> None:
        out = {}
        for at in range(0, count, batch):
            some = requests[at : at + batch]
            longest = max(len(r.prompt) for r in some)
            ids = torch.tensor([[0] * (longest - len(r.prompt)) + list(r.prompt) for r in some])
            mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in some])
            new = max(r.sampling.max_tokens for r in some)
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                                  pad_token_id=0)  # fmt: skip
            for r, row in zip(some, made, strict=True):
                out[r.id] = row[longest : longest + r.sampling.max_tokens].tolist()
        said["generate"] = out

    contestants: dict[str, Callable[[], Any]] = {"ours": ours, "generate": padded}
    result: dict[str, Any] = {"requests": count, "batch": batch, "generated_tokens": tokens}
    times = in_turns(contestants, rounds)
    result["seconds"] = times
    result["tokens_per_s"] = {n: tokens / statistics.median(s) for n, s in times.items()}
    result["speedup_over"] = ratios(times, "ours")
    same = sum(said["ours"][r.id] == said["generate"][r.id] for r in requests)
    result["requests_with_equal_tokens"] = same
    try:
        result["continuous"] = continuous(model, requests, batch)
        result["continuous"]["speedup"] = result["continuous"]["seconds"] / statistics.median(times["ours"])
    except Exception as e:  # a peer's failure is a result, not ours
        result["continuous"] = {"failed": f"{type(e).__name__}: {e}"[:300]}
    return result


def continuous(model: Any, requests: list[EngineRequest], batch: int) -> dict[str, Any]:
    """The library's continuous batching on the same trace."""
    from transformers import GenerationConfig

    longest = max(r.sampling.max_tokens for r in requests)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0,
                              max_batch_tokens=2048, num_blocks=2048)  # fmt: skip
    start = time.perf_counter()
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for r in requests:
            manager.add_request(list(r.prompt), request_id=r.id, max_new_tokens=r.sampling.max_tokens)
        done = 0
        while done < len(requests):
            answer = manager.get_result(timeout=120)
            if answer is None:
                raise TimeoutError(f"{done} of {len(requests)} requests were answered")
            done += bool(answer.is_finished())
    return {"seconds": time.perf_counter() - start}


def decode(checkpoint: Path, rounds: int, new: int = 64) -> dict[str, Any]:
    """One stream, with a model large enough that weights come from memory."""
    wide = {"hidden_size": 1024, "num_layers": 16, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64,
            "intermediate_size": 2816, "vocab_size": ModelSpec.from_path(checkpoint).vocab_size, "max_positions": 1024,
            "tie_embeddings": False}  # fmt: skip
    spec = ModelSpec(**{**catalog.model("llama-mini").model_dump(), **wide})
    result: dict[str, Any] = {"parameters": spec.num_parameters}
    rng = random.Random(1)
    prompt = [rng.randrange(spec.vocab_size) for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(build(spec), Path(folder))
        shutil.copy(checkpoint / "tokenizer.json", folder)
        forms = {"int8": "rtn:bits=8", "int4": "rtn:bits=4,group_size=32"}
        plans = {"fp32": [], **{n: [form] for n, form in forms.items()}}
        plans |= {f"{n}, head too": [f"{form},head_bits=8"] for n, form in forms.items()}
        engines = {n: load_engine(Path(folder), [*DEFAULT_PLAN, *p], dtype="fp32", max_model_len=512)
                   for n, p in plans.items()}  # fmt: skip
        runs = {n: (lambda e=e, n=n: serve(e, [greedy(n, prompt, new)])) for n, e in engines.items()}
        runs |= _llama_cpp(Path(folder), prompt, new)
        times = in_turns(runs, rounds)
    result["tokens_per_s"] = {n: new / statistics.median(s) for n, s in times.items()}
    result["speedup_over_fp32"] = {n: statistics.median(times["fp32"]) / statistics.median(s) for n, s in times.items()}
    for n in [name for name in plans if name != "fp32"]:
        theirs = {peer: seconds for peer, seconds in times.items() if peer == f"llama.cpp {n}"}
        result[f"{n} over"] = ratios({n: times[n], **theirs}, n)
    bits = {"fp32": 32, "int8": 8.0, "int4": 4.5}
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters - 2 * head
    result["gigabytes_per_s"] = {
        n: (body * b / 8 + 4 * head) * result["tokens_per_s"][n] / 1e9 for n, b in bits.items()
    }
    return result


def _llama_cpp(folder: Path, prompt: list[int], new: int) -> dict[str, Callable[[], Any]]:
    """llama.cpp on the same shapes, Q8_0 and Q4_0, where it is installed; with the head as it is, and with its own
    choice of the head's bits (8 and 6)."""
    try:
        import llama_cpp
    except ImportError:
        return {}
    from ridgeline.nn.checkpoint.formats.gguf import write_gguf

    whole = folder / "fp32.gguf"
    write_gguf(folder, whole)
    out: dict[str, Callable[[], Any]] = {}
    for bits, kind, head in ((8, "Q8_0", False), (4, "Q4_0", False), (8, "Q8_0", True), (4, "Q4_0", True)):
        name = f"llama.cpp int{bits}" + (", head too" if head else "")
        file = folder / f"{kind}{head}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.quantize_output_tensor = head
        llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), options)
        model = llama_cpp.Llama(str(file), n_ctx=512, n_threads=torch.get_num_threads(), verbose=False)

        def run(model: Any = model) -> None:
            model.reset()
            model.eval(prompt)
            for _ in range(new - 1):
                model.eval([7])

        out[name] = run
    return out


def packed(checkpoint: Path, rounds: int, batch: int = 16, longest: int = 256) -> dict[str, Any]:
    """BERT-base on batches of several shares of average over maximal length: packed, padded, padded in DP's batches,
    and transformers' own, padded."""
    import transformers

    spec = catalog.model("bert-base")
    model = build(spec).eval().requires_grad_(False)
    plain = [name for name in DEFAULT_PLAN if name != "padding_free"]
    plans = {"ours": list(DEFAULT_PLAN), "padded": plain, "length_dp": [*plain, "length_dp"]}
    w = Serve(prompt_len=1, output_len=1, dtype="fp32", max_num_batched_tokens=batch * longest)
    device, cluster = torch.device("cpu"), catalog.cluster("local")
    engines = {
        n: make_engine(Experiment(model=spec, cluster=cluster, workload=w, plan=Plan.parse(p)), device, model)
        for n, p in plans.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, Path(folder))
        theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return {f"average over longest {share}": _packed(engines, theirs, spec.vocab_size, share, rounds, batch, longest)
            for share in (0.4, 0.6, 0.8, 1.0)}  # fmt: skip


def _packed(
    engines: dict[str, Engine], theirs: Any, vocab: int, share: float, rounds: int, batch: int, longest: int
) -> Any:
    rng = random.Random(2)
    low = max(8, round((2 * share - 1) * longest))
    drawn = [rng.uniform(low, longest) for _ in range(batch - 1)]
    scale = (share * batch - 1) * longest / sum(drawn)
    lengths = [longest, *(min(longest, max(1, round(n * scale))) for n in drawn)]
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
    said: dict[str, dict[str, torch.Tensor]] = {}

    def embed(name: str) -> None:
        engine, said[name] = engines[name], {}
        for i, p in enumerate(prompts):
            engine.add(EngineRequest(str(i), p, embed=True))
        while engine.has_work():
            said[name].update({e.request: torch.tensor(e.embedding) for e in engine.step()})

    @torch.inference_mode()
    def padded() -> None:
        ids, mask = torch.zeros(2, batch, longest, dtype=torch.long)
        for i, p in enumerate(prompts):
            ids[i, : len(p)] = torch.tensor(p)
            mask[i, : len(p)] = 1
        hidden = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
        said["transformers"] = {str(i): hidden[i, : len(p)].mean(0) for i, p in enumerate(prompts)}

    times = in_turns({n: partial(embed, n) for n in engines} | {"transformers": padded}, rounds)
    for name in said:
        for i in said["ours"]:
            torch.testing.assert_close(said[name][i], said["ours"][i], rtol=1e-3, atol=1e-4)
    return {"average_over_longest": sum(lengths) / (batch * longest), "seconds": times,
            "speedup_over": ratios(times, "ours")}  # fmt: skip


def prefix(checkpoint: Path, rounds: int, length: int = 448) -> dict[str, Any]:
    """Seconds to the first token of a prompt of which a part is in the cache."""
    vocab = ModelSpec.from_path(checkpoint).vocab_size
    engine = load_engine(checkpoint, dtype="fp32", max_model_len=512)
    rng = random.Random(3)
    rows: dict[int, list[float]] = {}
    for round_ in range(rounds + 1):
        base = [rng.randrange(vocab) for _ in range(length)]
        serve(engine, [greedy(f"base{round_}", base, 1)])
        for shared in (0, length // 4, length // 2, 3 * length // 4, length - 16):
            prompt = base[:shared] + [rng.randrange(vocab) for _ in range(length - shared)]
            engine.add(greedy(f"{round_}/{shared}", prompt, 1))
            start = time.perf_counter()
            while engine.has_work():
                events = engine.step()
            if round_:
                rows.setdefault(length - events[-1].cached_tokens, []).append(time.perf_counter() - start)
    return {"seconds_by_uncached_tokens": {n: statistics.median(s) for n, s in sorted(rows.items())}}


def pages(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Requests that ran at once in the same memory while others waited, and the time that the whole trace took."""
    vocab = ModelSpec.from_path(checkpoint).vocab_size
    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=256, ignore_eos=True, stop_token_ids=()))
        for r in trace(64, vocab, 512, seed=4)
    ]
    ends = {r.id: t.sampling.max_tokens for r, t in zip(requests, trace(64, vocab, 512, seed=4), strict=True)}
    result: dict[str, Any] = {}
    for name, plan in (("pages", DEFAULT_PLAN), ("reserved", [n for n in DEFAULT_PLAN if n != "paged_kv"])):
        engine = load_engine(checkpoint, plan, dtype="fp32", max_model_len=512, kv_cache_bytes=24 << 20)
        for r in requests:
            engine.add(r)
        most, made, start = [], dict.fromkeys(ends, 0), time.perf_counter()
        while engine.has_work():
            for e in engine.step():
                made[e.request] += len(e.tokens)
                if e.finish is None and made[e.request] >= ends[e.request]:
                    engine.finish(e.request, 0)  # the answer is complete before its limit, as most are
            if engine.stats().waiting:
                most.append(engine.stats().running)
        result[name] = {"seconds": time.perf_counter() - start, "mean_running": statistics.mean(most),
                        "most_running": max(most), "preemptions": engine.stats().preemptions}  # fmt: skip
    result["concurrency_ratio"] = result["pages"]["mean_running"] / result["reserved"]["mean_running"]
    result["speedup"] = result["reserved"]["seconds"] / result["pages"]["seconds"]
    return result


def search(checkpoint: Path, rounds: int, vocab: int = 128256) -> dict[str, Any]:
    """The k likeliest of a large vocabulary."""
    out: dict[str, Any] = {"vocabulary": vocab}
    for rows, k in ((1, 8), (8, 8), (8, 64), (32, 8)):
        x = torch.randn(rows, vocab)
        times = in_turns({"ours": lambda x=x, k=k: topk.top_k(x, k), "topk": lambda x=x, k=k: x.topk(k)}, 20 * rounds)
        out[f"rows {rows}, k {k}"] = ratios(times, "ours")["topk"]
    x = torch.randn(8, vocab)
    times = in_turns({"ours": lambda: topk.argmax(x), "argmax": lambda: x.argmax(1)}, 20 * rounds)
    out["argmax, rows 8"] = ratios(times, "ours")["argmax"]
    return out


def adapters(checkpoint: Path, rounds: int, count: int = 16, new: int = 24) -> dict[str, Any]:
    """One request for each of ``count`` adapters: in one batch, and one after the other."""
    from ridgeline.nn.checkpoint.peft import save_lora
    from ridgeline.spec.targets import chosen

    spec = ModelSpec.from_path(checkpoint)
    engine = load_engine(checkpoint, [*DEFAULT_PLAN, "multi_adapter"], dtype="fp32", max_model_len=256)
    model = load_checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            generator = torch.Generator().manual_seed(i)
            state = {}
            for name in chosen(spec, ("all-linear",)):
                layer = model.get_submodule(name)
                state[f"{name}.lora_a"] = torch.randn(8, layer.in_features, generator=generator) * 0.02
                state[f"{name}.lora_b"] = torch.randn(layer.out_features, 8, generator=generator) * 0.02
            options = {"rank": 8, "alpha": 16, "targets": ["all-linear"], "dropout": 0.0, "dora": False,
                       "rslora": False}  # fmt: skip
            save_lora(Path(folder) / str(i), spec, options, state, "")
            engine.load_adapter(str(i), Path(folder) / str(i))
    rng = random.Random(5)
    requests = [replace(greedy(str(i), [rng.randrange(spec.vocab_size) for _ in range(32)], new), adapter=str(i))
                for i in range(count)]  # fmt: skip
    said: dict[str, dict[str, list[int]]] = {}

    def together() -> None:
        engine.blocks.drop_cache()
        said["together"] = serve(engine, requests)

    def apart() -> None:
        engine.blocks.drop_cache()
        said["apart"] = {}
        for r in requests:
            said["apart"] |= serve(engine, [r])

    times = in_turns({"together": together, "apart": apart}, rounds)
    same = sum(said["together"][k] == said["apart"][k] for k in said["apart"])
    return {"adapters": count, "seconds": times, "speedup_over": ratios(times, "together"), "equal": same}


PARTS = {"offline": offline, "decode": decode, "packed": packed, "prefix": prefix, "pages": pages, "topk": search,
         "adapters": adapters}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="of part offline")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    catalog.allow_unprobed()
    with tempfile.TemporaryDirectory() as folder:
        if a.checkpoint is None:
            a.checkpoint = Path(folder)
            save_checkpoint(build(catalog.model("llama-mini")), a.checkpoint)
            vocabulary(a.checkpoint / "tokenizer.json", catalog.model("llama-mini").vocab_size)
        result: dict[str, Any] = {"environment": {**fingerprint(), "threads": torch.get_num_threads(),
                                                  "load": os.getloadavg()[0]}}  # fmt: skip
        for name in a.only.split(","):
            more = {"count": a.requests} if name == "offline" else {}
            result[name] = PARTS[name](a.checkpoint, a.rounds, **more)
            print(name, json.dumps(result[name], indent=1))
            if a.json:
                a.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
