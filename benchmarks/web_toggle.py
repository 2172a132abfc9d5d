"""How long the plan page takes to answer a change, and how large it is.

    python benchmarks/web_toggle.py --json benchmarks/results/web_toggle.json

Per model and task, techniques are switched on and off one after the other: at the API (seconds of one request), and in
chromium (from the click to the new numbers on the page, where the machine has one).
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import uvicorn

from ridgeline.jobs.launch import free_port
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.store import Store
from ridgeline.web.app import STATIC, create_app

QUESTIONS = {
    "llama2-70b, 64 A100, tensor x pipeline": {
        "model": "llama2-70b", "on": "8x8xa100-80g-sxm", "workload": {"kind": "pretrain", "batch_size": 256},
        "plan": ["tensor_parallel:degree=8", "pipeline:degree=4", "mixed_precision"],
    },
    "llama2-70b, 16 A100, ZeRO-3": {
        "model": "llama2-70b", "on": "2x8xa100-80g-sxm", "workload": {"kind": "finetune", "batch_size": 32},
        "plan": ["zero:stage=3", "mixed_precision"],
    },
    "llama2-70b, 8 A100, serving": {
        "model": "llama2-70b", "on": "8xa100-80g-sxm", "workload": {"kind": "serve", "rate": 2.0},
        "plan": ["tensor_parallel:degree=8"],
    },
}  # fmt: skip
TOGGLED = {
    "pretrain": ["flash_attention", "recompute:policy=full", "sequence_parallel", "fused_layers"],
    "finetune": ["flash_attention", "recompute:policy=full", "lora:rank=16", "fused_layers"],
    "serve": ["paged_kv", "continuous_batching", "flash_attention", "kv_quant", "chunked_prefill"],
}
ROUNDS = 10


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        app = create_app(Store(Path(folder) / "runs.sqlite"))
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        report: dict[str, Any] = {
            "load_average": load_average(),
            "api_s": {name: spread(ask(url, q)) for name, q in QUESTIONS.items()},
            "page_s": in_browser(url),
            "bytes": sizes(),
            "environment": fingerprint(),
        }
        server.should_exit = True
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


def ask(url: str, question: dict[str, Any]) -> list[float]:
    """Seconds of every request."""
    taken = []
    for _ in range(ROUNDS):
        for technique in TOGGLED[question["workload"]["kind"]]:
            for plan in ([*question["plan"], technique], question["plan"]):
                body = json.dumps({**question, "plan": plan}).encode()
                start = time.perf_counter()
                headers = {"Content-Type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(f"{url}/api/plan", body, headers)) as answer:
                    answer.read()
                taken.append(time.perf_counter() - start)
    return taken


def in_browser(url: str) -> dict[str, Any] | str:
    """Seconds from a click to the changed page."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        return "no chromium on this machine"
    from playwright.sync_api import sync_playwright

    toggle = """async () => {
      const section = document.querySelector("section[aria-label=Answer]");
      const box = document.querySelector("[data-toggled]") ?? document.querySelector(".technique input:enabled");
      box.dataset.toggled = "";
      const start = performance.now();
      box.click();
      const before = section.dataset.answers;
      while (section.dataset.answers === before) {
        if (performance.now() - start > 5000) throw new Error(`no answer to ${box.closest("label").innerText}`);
        await new Promise((r) => setTimeout(r));
      }
      return (performance.now() - start) / 1e3;
    }"""
    found = {}
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, q in QUESTIONS.items():
            work = "&".join(f"{'task' if k == 'kind' else k}={v}" for k, v in q["workload"].items())
            plan = "&".join(f"with={call}" for call in q["plan"])
            page = browser.new_page(viewport={"width": 1300, "height": 1000})
            page.goto(f"{url}/#/plan?model={q['model']}&on={q['on']}&{work}&{plan}")
            page.wait_for_selector("[data-metric=tokens_per_s]")
            page.wait_for_load_state("networkidle")
            found[name] = spread([page.evaluate(toggle) for _ in range(2 * ROUNDS)])
            page.close()
        browser.close()
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile; the first is warm-up."""
    kept = sorted(seconds[1:])
    return {"n": len(kept), "median": statistics.median(kept), "p95": kept[int(0.95 * (len(kept) - 1))]}


def sizes() -> dict[str, int]:
    """Bytes of the page's files as sent with gzip."""
    return {f.name: len(gzip.compress(f.read_bytes(), 9)) for f in sorted(STATIC.iterdir())}


if __name__ == "__main__":
    main()
