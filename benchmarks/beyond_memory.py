"""Generation from a checkpoint that is four times as large as the memory for it.

    python benchmarks/beyond_memory.py [--rounds 3] [--json benchmarks/results/beyond_memory.json]

Parts:
    tiers   the same model with its weights on the device, in host memory and on disk, with and without prefetch, over
            the batch: tokens/s measured and predicted (run ``ridgeline probe`` first), and the share of a step that the
            slower of transfers and computation would take alone. The disk's rate is that of the same minute
    large   some of these with a model three times as large
    flexgen the policy that is settled for a batch against others drawn at random and against ZeRO-Inference with the
            largest batch that fits, all within the same device and host memory: measured and predicted
    slow    the settled policy and ZeRO-Inference once more from a disk that is held to SLOW bytes per second, on which
            two cores wait for a byte about as a GPU does for an NVMe disk. Needs root and cgroup v1
    parts   flexgen with the weights on the device and the cache in host memory, in 2 to 32 parts: a step and the
            prefill, measured and predicted, with the probe's rates of products with few rows and with those that the
            model's own layers have in the same minute
    prefix  time to the first token of prompts that share their first 4096 tokens, and end with 64 of their own: the
            first of them, and others when the shared blocks are in the pool, in host memory, on disk, and on disk after
            a restart; the last three also with all layers' blocks brought before the first layer computes. The tokens
            are asserted to be those of a prompt that nothing is known of
    peers   in a memory cgroup that leaves a quarter of the checkpoint beside the process: ours from disk, accelerate's
            disk offload (transformers), with --llama-cpp PYTHON (one that has llama-cpp-python) llama.cpp's mapped file
            of the same fp32 weights, and with --deepspeed PYTHON ZeRO-Inference; equal greedy tokens are asserted.
            Beside them ours with the same weights in 8 bits (rtn), with the share of its tokens that are the same.
            Needs root and cgroup v1
    many    the same memory, 128 sequences of 16 + 8 tokens of a model of OPT's architecture: the policy that flexgen
            settles, accelerate with the largest batch that is not killed, and with --flexgen PYTHON (one that has
            flexgen, FMInference's) the fastest of several of its policies

Threads are PyTorch's (set OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ridgeline import catalog, experiments
from ridgeline.graph import decode_graph
from ridgeline.measure.cells.generation_cell import build_generation, timed_generation
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.disk import file_rate
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.checkpoint.formats.gguf import write_gguf
from ridgeline.nn.memory.block_store import Restoring
from ridgeline.nn.memory.layer_stream import OpenFile, aligned
from ridgeline.nn.memory.meter import Meter, process_memory
from ridgeline.nn.memory.tiered_store import PAGE
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.init import build
from ridgeline.predict import predict
from ridgeline.serve.build_engine import load_engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.device import Cluster, Host, Link
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import GEMM_ROWS
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.registry import resolve

MODEL = ModelSpec(name="beyond", family="llama", vocab_size=2048, hidden_size=1024, num_layers=16, num_heads=8,
                  num_kv_heads=8, head_dim=128, intermediate_size=2816, max_positions=256)  # fmt: skip
PROMPT, OUTPUT = 16, 6
LARGE = MODEL.changed(name="beyond-large", hidden_size=2048, num_layers=12, num_heads=16, num_kv_heads=16,
                      intermediate_size=5632)  # fmt: skip
WIDE = catalog.model("opt-1.3b").changed(name="beyond-opt", vocab_size=2048, num_layers=6, max_positions=256)
BATCHES = (1, 8, 32, 128)
SLOW = 50_000_000
"""Bytes per second of a slow disk: some 5000 operations of two cores for each; FlexGen's T4 has 30 000 at 2 GB/s."""
_REQUEST = 48 << 20
"""Bytes of a read, as of a layer."""
SHARED, OWN = 4096, 64
"""Tokens of the shared prefix, and of each prompt's own end."""
PLANS = {
    "device": [],
    "host": ["zero_inference:prefetch=1"],
    "host, no prefetch": ["zero_inference:prefetch=0"],
    "disk": ["zero_inference:parameters=nvme,prefetch=1"],
    "disk, prefetch 3": ["zero_inference:parameters=nvme,prefetch=3"],
    "disk, no prefetch": ["zero_inference:parameters=nvme,prefetch=0"],
    "disk, by modules": ["zero_inference:parameters=nvme,fetch=modules,prefetch=1"],
    "disk, by modules, half a layer": ["zero_inference:parameters=nvme,fetch=modules,prefetch=0.5"],
}
FEWER = ("device", "host", "disk", "disk, no prefetch", "disk, by modules, half a layer")
"""Those of the large model."""


def experiment(checkpoint: str, plan: list[str], batch: int, cluster: Cluster | None = None) -> Experiment:
    """Generation from the checkpoint."""
    w = {"kind": "generate", "checkpoint": checkpoint, "batch_size": batch, "prompt_len": PROMPT, "output_len": OUTPUT}
    return experiments.make(checkpoint, cluster or "local", w, plan)


def prompt(batch: int) -> torch.Tensor:
    """Token ids [batch, PROMPT]."""
    return torch.randint(MODEL.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0))


def model_of(e: Experiment) -> Any:
    """The model as measurements build it."""
    e, techniques = resolve(e)
    return build_generation(e, torch.device("cpu"), techniques).model


def whole_rate(checkpoint: str) -> Link:
    """The disk with the rate at which all of the checkpoint is read once, as much as a step reads: a disk that is
    throttled gives a short probe more, or less, than that."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    into = aligned(_REQUEST).zero_()  # memory that is new takes longer
    start = time.perf_counter()
    for file in map(OpenFile.of, files):
        size = file.path.stat().st_size
        for at in range(0, size, _REQUEST):
            file.read(memoryview(into.numpy())[: -(-(size - at) // PAGE) * PAGE], at, min(_REQUEST, size - at))
    rate = sum(f.stat().st_size for f in files) / (time.perf_counter() - start)
    return file_rate(files[0]).model_copy(update={"bandwidth": rate})


def tiers(checkpoint: str, rounds: int, plans: Sequence[str], batches: Sequence[int]) -> dict[str, Any]:
    """Tokens/s by tier and batch, measured in turns and predicted; before and after each is measured, the disk is."""
    links: dict[tuple[int, str], list[Link]] = {}
    steps: dict[tuple[int, str], list[float]] = {}
    held: dict[str, int] = {}
    for _ in range(rounds):
        for name in plans:
            model = model_of(experiment(checkpoint, PLANS[name], 1))
            for batch in batches:
                before = whole_rate(checkpoint)
                with torch.inference_mode():
                    timed_generation(model, prompt(batch), 2)
                    steps.setdefault((batch, name), []).extend(timed_generation(model, prompt(batch), OUTPUT)[1:])
                links.setdefault((batch, name), []).extend((before, whole_rate(checkpoint)))
            meter = Meter(model)
            meter.register(model.parameters(), "parameters")
            with meter, torch.inference_mode():
                timed_generation(model, prompt(1), 2)
            held[name] = meter.peak.categories["parameters"]
            del model, meter
    local = catalog.cluster("local")
    layers = sum(p.stored_bytes * n for p, n in decode_graph(experiment(checkpoint, [], 1)).params)
    m = catalog.model(checkpoint)
    layers -= 2 * m.vocab_size * m.hidden_size * 4
    rows: list[dict[str, Any]] = []
    for (batch, name), seconds in steps.items():
        step, found = statistics.median(seconds), sorted(links[batch, name], key=lambda link: link.bandwidth)
        rate = statistics.median(link.bandwidth for link in found)
        disk = found[0].model_copy(
            update={"bandwidth": rate, "latency": statistics.median(link.latency for link in found)}
        )
        cluster = local.model_copy(update={"device": local.device.model_copy(update={"disk": disk})})
        predicted = predict(experiment(checkpoint, PLANS[name], batch, cluster)).metrics["tpot_s"].value
        row = {"batch": batch, "weights": name, "tokens_per_s": batch / step, "step_s": step,
               "spread": statistics.pstdev(seconds) / step, "predicted_tokens_per_s": batch / predicted,
               "device_weights_bytes": held[name]}  # fmt: skip
        if name.startswith("disk"):
            row["disk_bytes_per_s"] = [found[0].bandwidth, rate, found[-1].bandwidth]
            row["share_of_slower"] = max(statistics.median(steps[batch, "device"]), layers / rate) / step
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return {"layers_bytes": layers, "rows": rows}


@contextmanager
def slow_disk(checkpoint: str) -> Iterator[None]:
    """Hold this process to reading SLOW bytes per second of the disk that has the checkpoint."""
    number = Path(checkpoint).stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    disk = disk.parent if (disk / "partition").exists() else disk
    group = Path("/sys/fs/cgroup/blkio/ridgeline-benchmark")
    group.mkdir(exist_ok=True)
    (group / "blkio.throttle.read_bps_device").write_text(f"{(disk / 'dev').read_text().strip()} {SLOW}")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def flexgen(checkpoint: str, rounds: int, others: int = 20) -> dict[str, Any]:
    """Policies within a device of a quarter, and a host of half, of the weights."""
    size = sum(f.stat().st_size for f in Path(checkpoint).glob("*.safetensors"))
    local = catalog.cluster("local")
    disk = whole_rate(checkpoint)
    host = Host(name="half", cores=os.cpu_count() or 1, memory_bytes=size / 2,
                memory_bandwidth=local.device.memory_bandwidth)  # fmt: skip
    device = local.device.model_copy(update={"memory_bytes": size / 4, "host": host, "disk": disk})
    cluster = local.model_copy(update={"device": device})
    batch = 128
    draw = random.Random(0)
    plans = {"flexgen": (["flash_attention", "flexgen"], batch)}
    while len(plans) <= others:
        wd, wh, ad = draw.randint(0, 12), draw.randint(0, 40), draw.randint(0, 100)
        shares = (f"weights_device={wd},weights_host={wh},cache_device=0,cache_host={draw.randint(0, 45 - wh)},"
                  f"activations_device={ad},activations_host={draw.randint(0, 100 - ad)}")  # fmt: skip
        plan = ["flash_attention", f"flexgen:batches={draw.choice((2, 4, 8, 16, 32))},{shares}"]
        if predict(experiment(checkpoint, plan, batch, cluster)).status == "ok":
            plans[f"random {len(plans)}"] = (plan, batch)
    for b in (128, 64, 32, 16, 8, 4, 2, 1):
        plan = ["flash_attention", "zero_inference:parameters=nvme"]
        if predict(experiment(checkpoint, plan, b, cluster)).status == "ok":
            plans["zero_inference"] = (plan, b)
            break
    rows = []
    for name, (plan, b) in plans.items():
        e = experiment(checkpoint, plan, b, cluster)
        found = predict(e)
        model = model_of(e)
        with torch.inference_mode():
            timed_generation(model, prompt(b), 2)
            times = [timed_generation(model, prompt(b), OUTPUT) for _ in range(rounds)]
        seconds = statistics.median(sum(t) for t in times)
        rows.append({"policy": name, "plan": e.plan.strings(), "batch": b, "tokens_per_s": b * OUTPUT / seconds,
                     "predicted_tokens_per_s": found.metrics["tokens_per_s"].value})  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"device_bytes": size / 4, "host_bytes": size / 2, "disk_bytes_per_s": disk.bandwidth, "rows": rows}


def parts(checkpoint: str) -> list[dict[str, Any]]:
    """Steps by the number of parts, predicted with two sets of rates."""
    local, batch = catalog.cluster("local"), 128
    rows = []
    for n in (2, 8, 16, 32):
        plan = [
            "flash_attention",
            f"flexgen:batches={n},weights_device=100,weights_host=0,cache_device=0,cache_host=100",
        ]
        model = model_of(experiment(checkpoint, plan, batch))
        others = _others()
        with torch.inference_mode():
            timed_generation(model, prompt(batch), 2)
            before = _product_rates(model)
            first, *steps = timed_generation(model, prompt(batch), 4)
            after = _product_rates(model)
        rates = dict(local.device.rates)
        for k, m in ((f"gemm_rows{m}.fp32", m) for m in GEMM_ROWS):
            rates[k] = rates[k].model_copy(update={"byte_rate": (before[m] + after[m]) / 2})
        there = local.model_copy(update={"device": local.device.model_copy(update={"rates": rates})})
        row: dict[str, Any] = {"parts": n, "prefill_s": first, "step_s": statistics.median(steps),
                               "others_cores": others(), "rates": {m: rates[f"gemm_rows{m}.fp32"].byte_rate
                                                                   for m in GEMM_ROWS}}  # fmt: skip
        for name, cluster in (("probe", local), ("same_minute", there)):
            found = predict(experiment(checkpoint, plan, batch, cluster)).metrics
            row[name] = {"prefill_s": found["ttft_s"].value, "step_s": found["tpot_s"].value}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def _product_rates(model: Any) -> dict[int, float]:
    """Bytes of weights per second of the layers' products by rows; no weight is in a cache when its turn comes."""
    linear = [m for layer in model.layers.values() for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(m.weight.numel() * m.weight.element_size() for m in linear)
    found = {}
    for rows in GEMM_ROWS:
        inputs = {width: torch.randn(rows, width) for width in {m.in_features for m in linear}}
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for m in linear:
                m(inputs[m.in_features])
            times.append(time.perf_counter() - start)
        found[rows] = size / statistics.median(times)
    return found


def _others() -> Callable[[], float]:
    """Starts to count; called, the cores that other processes had busy since."""

    def busy() -> float:
        ticks = [int(v) for v in Path("/proc/stat").read_text().split()[1:9]]
        own = resource.getrusage(resource.RUSAGE_SELF)
        return sum(ticks[i] for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime

    was, start = busy(), time.perf_counter()
    return lambda: (busy() - was) / (time.perf_counter() - start)


def prefix(checkpoint: str, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds to the first token by where the blocks of the shared prefix are."""
    draw = torch.Generator().manual_seed(1)
    shared, other = torch.randint(MODEL.vocab_size, (2, SHARED), generator=draw).tolist()
    ends = torch.randint(MODEL.vocab_size, (4, OWN), generator=draw).tolist()
    pool = 2 * 4 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * (SHARED + OWN + 40)
    base = ["paged_kv", "continuous_batching", "chunked_prefill", "padding_free", "flash_attention"]
    seconds: dict[str, list[float]] = {}
    wait = Restoring.wait

    def made(*more: str) -> Any:
        return load_engine(Path(checkpoint), [*base, *more], kv_cache_bytes=pool, max_model_len=SHARED + OWN + 40)

    def first(engine: Any, name: str, ids: list[int]) -> int:
        engine.add(EngineRequest(f"{name}{time.perf_counter()}", ids, Sampling(max_tokens=1, temperature=0.0)))
        start = time.perf_counter()
        found: list[int] = []
        while engine.has_work():
            found += [t for event in engine.step() for t in event.tokens]
        if name:
            seconds.setdefault(name, []).append(time.perf_counter() - start)
        return found[0]

    engine = made()
    want = []
    for end in ends:
        want.append(first(engine, "", shared + end))
        engine.reset_prefix_cache()
    engine.close()
    stores = {"host": "kv_offload:host=4GiB", "disk": f"kv_offload:host=1,disk=4GiB,path={folder}",
              "disk after a restart": f"prefix_store:host=1GiB,disk=4GiB,path={folder}/prefixes"}  # fmt: skip
    ways = ("", ", all layers first")
    for turn in range(rounds):
        for name, store in stores.items():
            engine = made(store)
            assert first(engine, "cold", shared + ends[0]) == want[0]
            assert first(engine, "device", shared + ends[1]) == want[1]
            for prompt in (other, shared + ends[0]):  # so that both are saved before a way is timed
                first(engine, "", prompt)
            for i, how in enumerate(ways[:: 1 - 2 * (turn % 2)]):
                if name == "disk after a restart":
                    engine.close()
                    engine = made(store)
                else:
                    first(engine, "", other)  # takes the pool
                if how:
                    Restoring.wait = lambda self, layer: wait(self, self.layers - 1)  # type: ignore[method-assign]
                assert first(engine, name + how, shared + ends[2 + i]) == want[2 + i]
                Restoring.wait = wait  # type: ignore[method-assign]
            engine.close()
            shutil.rmtree(f"{folder}/prefixes", ignore_errors=True)
    bytes_ = 2 * 4 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * SHARED
    return {"shared": SHARED, "own": OWN, "cache_bytes": bytes_,
            "ttft_s": {k: statistics.median(v) for k, v in seconds.items()},
            "spread": {k: statistics.pstdev(v) / statistics.median(v) for k, v in seconds.items()}}  # fmt: skip


def generate(e: Experiment, ids: torch.Tensor) -> dict[str, Any]:
    """Seconds of each token, and the tokens."""
    model, (batch, length), count = model_of(e), ids.shape, e.workload.output_len  # type: ignore[union-attr]
    times, tokens = [], []
    with torch.inference_mode():
        cache = make_cache(model, batch, length + count)
        for i in range(count):
            start = time.perf_counter()
            logits = decode(model, last, cache) if i else prefill(model, ids, cache)  # noqa: F821
            last = logits.argmax(-1)
            times.append(time.perf_counter() - start)
            tokens.append(last.tolist())
    return {"seconds": times, "tokens": tokens, "rss_peak_bytes": process_memory()["rss_peak"]}


def vocabulary(file: Path, size: int = MODEL.vocab_size) -> None:
    """A byte-level BPE tokenizer of ``size`` tokens, of Python's modules."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train([str(p) for p in sorted(Path(argparse.__file__).parent.glob("[a-h]*.py"))], trainer)
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(file))


def worker() -> None:
    """Ours in the cgroup: one generation of the job on standard input."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    catalog.allow_unprobed()
    ids = torch.tensor(job["prompt"])
    w = {"kind": "generate", "checkpoint": job["checkpoint"], "batch_size": len(ids), "prompt_len": ids.shape[1],
         "output_len": job["output_len"]}  # fmt: skip
    print(json.dumps(generate(experiments.make(job["checkpoint"], "local", w, job["plan"]), ids)))


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="tiers,flexgen,slow,parts,prefix,large,peers,many")
    parser.add_argument("--llama-cpp", default="", help="Python that has llama-cpp-python")
    parser.add_argument("--deepspeed", default="", help="Python that has deepspeed and transformers")
    parser.add_argument("--flexgen", default="", help="Python that has FMInference's flexgen")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    where = tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "."))
    try:
        checkpoint = str(Path(where) / "model")
        save_checkpoint(build(MODEL, "cpu", torch.float32, 0), checkpoint, max_shard_bytes=2e8)
        models = [m.model_dump(exclude_defaults=True) for m in (MODEL, LARGE, WIDE)]
        out: dict[str, Any] = {"environment": fingerprint(), "models": models,
                               "prompt": PROMPT, "output": OUTPUT, "load_average": os.getloadavg()[0]}  # fmt: skip
        if "tiers" in args.only:
            out["tiers"] = tiers(checkpoint, args.rounds, list(PLANS), BATCHES)
        if "parts" in args.only:
            out["parts"] = parts(checkpoint)
        if "prefix" in args.only:
            long = str(Path(where) / "long")
            save_checkpoint(build(MODEL.changed(max_positions=SHARED + OWN + 40), "cpu", torch.float32, 0), long)
            out["prefix"] = prefix(long, args.rounds, str(Path(where) / "blocks"))
        if "flexgen" in args.only:
            out["flexgen"] = flexgen(checkpoint, args.rounds)
        if "slow" in args.only:
            with slow_disk(checkpoint):
                out["flexgen_slow_disk"] = flexgen(checkpoint, 1, others=0)
        if "large" in args.only or "peers" in args.only:
            shutil.rmtree(checkpoint)
            save_checkpoint(build(LARGE, "cpu", torch.float32, 0), checkpoint, max_shard_bytes=5e8)
        if "large" in args.only:
            out["large"] = tiers(checkpoint, args.rounds, FEWER, BATCHES[::2])
        if "peers" in args.only:
            vocabulary(Path(checkpoint) / "tokenizer.json")  # without one, llama.cpp reads no file
            compress = [sys.executable, "-m", "ridgeline", "compress", checkpoint, "--with", "rtn:bits=8"]
            subprocess.run([*compress, "--out", f"{checkpoint}-8bits"], check=True, capture_output=True)
            if args.llama_cpp:
                write_gguf(Path(checkpoint), Path(checkpoint) / "fp32.gguf")
            from beyond_memory_peers import peers

            out["peers"] = peers(checkpoint, str(Path(where) / "offload"), args.rounds, args.llama_cpp,
                                 args.deepspeed)  # fmt: skip
        if "many" in args.only:
            shutil.rmtree(checkpoint)
            save_checkpoint(build(WIDE, "cpu", torch.float32, 0), checkpoint, max_shard_bytes=5e8)
            from beyond_memory_peers import many

            out["many"] = many(checkpoint, str(Path(where) / "offload"), args.flexgen)
    finally:
        shutil.rmtree(where)
    text = json.dumps(out, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
