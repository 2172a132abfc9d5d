"""Other people's clients against ``ridgeline serve``: do they get through, and do they say what ours says?

    python benchmarks/serve_clients.py [--guidellm PATH] [--rates 2,8] [--json benchmarks/results/serve_clients.json]

The server runs in a process of its own, over a small model of random weights. lm-eval's local-completions model (where
lm-eval is installed) asks for log-likelihoods, which are held to whole passes of the model in this process. guidellm
(its program: the one on the path) sends requests at constant rates to both routes, and so does `ridgeline load`; both
clients' medians stand side by side. guidellm's inter-token latency is a request's mean: our TPOT. Exit code 1 if a
request failed or a log-likelihood is off.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_generator import run_guidellm
from tests.serve.running import TEMPLATE, process

from ridgeline.data.batches import train_tokenizer
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.load.ask import EVEN
from ridgeline.measure.load.endpoint import find_endpoint
from ridgeline.measure.load.prompts import TextIds
from ridgeline.measure.load.run_load import Settings, measure_load
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Serve

VOCABULARY, CONTEXT, PROMPT, TOKENS = 2048, 512, 64, 16
MODEL = {"family": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "num_layers": 4, "num_heads": 4,
         "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 256, "max_positions": CONTEXT}  # fmt: skip
CLOSE = 1e-2
"""Log-likelihoods of some hundred tokens in fp32, summed in another order."""


def small(folder: Path) -> Path:
    """A checkpoint with a tokenizer most of whose tokens are text."""
    save_checkpoint(build(ModelSpec(**MODEL), seed=0), folder)
    text = [p.read_text() for p in sorted(Path(json.__file__).parent.glob("*.py"))]
    train_tokenizer(text, VOCABULARY).save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def lm_eval(url: str, folder: Path, count: int) -> dict[str, Any]:
    """``count`` log-likelihoods of contexts with continuations, in concurrent batches, beside whole passes."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    words = Path(json.__file__).read_text().split()
    pairs = [
        (" ".join(words[i : i + 20 + i % 30]), " " + " ".join(words[i + 60 : i + 61 + i % 9])) for i in range(count)
    ]
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=p, idx=i) for i, p in enumerate(pairs)]
    client = LocalCompletionsAPI(model=folder.name, base_url=f"{url}/v1/completions", max_length=CONTEXT, batch_size=4,
                                 num_concurrent=4, max_retries=1)  # fmt: skip
    got = client.loglikelihood(asked, disable_tqdm=True)
    model, tokenizer, off, greedy = load_checkpoint(folder), load_tokenizer(str(folder)), 0.0, 0
    for (context, continuation), (found, likeliest) in zip(pairs, got, strict=True):
        first, rest = (tokenizer.encode(t, add_special_tokens=False).ids for t in (context, continuation))
        with torch.inference_mode():
            logp = model(torch.tensor([first + rest]))[0].log_softmax(-1)[len(first) - 1 : -1]
        wanted = torch.tensor(rest)
        off = max(off, abs(float(logp.gather(1, wanted[:, None]).sum()) - found))
        greedy += likeliest != bool((logp.argmax(-1) == wanted).all())
    return {"loglikelihoods": count, "most_difference": off, "greedy_flags_that_differ": greedy}


def loads(url: str, name: str, program: str, folder: Path, route: str, rate: float, count: int,
          number: int) -> dict[str, Any]:  # fmt: skip
    """Load ``number`` of the server, by guidellm and by `ridgeline load`: errors, and medians in seconds."""
    api = "chat" if "chat" in route else "completions"
    until = f"kind=max_requests,count={count}"
    theirs = run_guidellm(program, url, name, folder, rate, until, PROMPT, TOKENS, folder / "guidellm.json", route)
    totals = theirs["request_totals"]
    w = Serve(rate=rate, burstiness=EVEN, requests=count, prompt_len=PROMPT, output_len=TOKENS)
    prompts = TextIds(Path(json.__file__).read_text(), load_tokenizer(str(folder)), decoded=True)
    ours, d = measure_load(find_endpoint(url, api=api), w, prompts.at_rate(number), Settings())
    found = {"ttft_p50_s": "time_to_first_token_ms", "tpot_p50_s": "inter_token_latency_ms"}
    return {
        "route": route, "rate": rate, "requests": count, "load_average": load_average(),
        "guidellm": {"answered": totals["successful"], "errors": totals["errored"] + totals["incomplete"],
                     **{k: theirs[v]["successful"]["median"] / 1e3 for k, v in found.items()}},
        "ridgeline": {"answered": sum(r.ok for r in d.records), "errors": sum(bool(r.error) for r in d.records),
                      **{k: ours.metric(k) for k in found}},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), help="its program")
    parser.add_argument("--rates", default="2,8")
    parser.add_argument("--requests", type=int, default=60, help="per rate and route")
    parser.add_argument("--loglikelihoods", type=int, default=200)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "serve_clients.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "tokens": TOKENS, "loads": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = small(Path(scratch) / "small")
        with process(folder, "--kv-cache", "16MB") as server:
            if find_spec("lm_eval"):
                report["lm_eval"] = lm_eval(server.url, folder, args.loglikelihoods)
                print(json.dumps(report["lm_eval"]), flush=True)
            rates = [float(r) for r in args.rates.split(",")] if args.guidellm else []
            for rate in rates:
                for route in ("/v1/completions", "/v1/chat/completions"):
                    row = loads(server.url, folder.name, args.guidellm, folder, route, rate, args.requests,
                                len(report["loads"]))  # fmt: skip
                    report["loads"].append(row)
                    print(json.dumps(row), flush=True)
    args.json.write_text(json.dumps({**report, "environment": fingerprint()}, indent=1) + "\n")
    said = report.get("lm_eval", {"most_difference": 0.0, "greedy_flags_that_differ": 0})
    broke = sum(row[client]["errors"] for row in report["loads"] for client in ("guidellm", "ridgeline"))
    return int(broke > 0 or said["most_difference"] > CLOSE or said["greedy_flags_that_differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
