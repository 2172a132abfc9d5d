"""Side by side with other predictors: the same measured rows through each of them and through Ridgeline.

    python benchmarks/vs_predictors.py DATA_DIR --peer-python PATH [--json benchmarks/results/vs_predictors.json]

``--peer-python`` is an interpreter in whose environment the peers are installed (``pip install aiconfigurator==0.12.0
genz-llm``). Each peer answers through its public functions, in a process of its own (``benchmarks/peers``), with its
defaults. Calculon and LLMCompass are not on the package index and are left out.

Errors are over the rows that every tool with an answer to that file has answered; rows that a tool refuses are counted
apart. What the comparison is not: independent. See ``NOTES``, which go into the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = ("aiconfigurator", "genz")
WORKERS = Path(__file__).parent / "peers"
TIMEOUT_S = 900
SERVED = {"meta-llama/Llama-3.1-70B": "vllm", "Qwen/Qwen3-32B": "trtllm"}
"""Model and backend of the serving rows that are asked."""
PER_LAYOUT = 5
"""Rows of each model and tensor-parallel degree, evenly spaced in the file."""
QUANTITIES = ("ttft_s", "tpot_s")
NOTES = (
    "Ridgeline's constants of operators were fitted on the kernel measurements that aiconfigurator ships and looks up.",
    "Ridgeline's host constants were fitted on these very serving and generation rows: its errors here are in sample.",
    "The serving rows come from aiconfigurator's own sample of measurements; no other source of them was at hand.",
    "The generation rows are vLLM of 2023, whose host overhead no peer models: they are asked for kernels alone.",
    "Peers are asked with their defaults: aiconfigurator with its newest tables of each backend, not the rows' own.",
)


@dataclass
class Answers:
    """What one tool said about the rows, in their order: None where it refused."""

    tool: str
    version: str
    start_s: float
    """Seconds to import it."""
    found: list[dict[str, float] | None] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def take(self, found: dict[str, Any]) -> None:
        """Take in the next answer."""
        if "refused" in found:
            self.refused[found["refused"]] = self.refused.get(found["refused"], 0) + 1
        self.found.append(None if "refused" in found else found)


def serving_rows(path: Path) -> list[Any]:
    """Some rows of each asked model and layout."""
    from ridgeline.validate.csv_table import read_table

    groups = defaultdict(list)
    for row in read_table(path):
        if SERVED.get(row.text("model")) == row.text("backend", ""):
            groups[row.text("model"), row.count("tp")].append(row)
    return [r for g in groups.values() for r in spaced(g, PER_LAYOUT)]


def generation_rows(path: Path) -> list[Any]:
    """One repeat of every third configuration."""
    from ridgeline.validate.csv_table import read_table

    groups = defaultdict(list)
    for row in read_table(path):
        groups[tuple(row.count(k) for k in ("tp", "prompt_len", "batch", "output_len"))].append(row)
    return [g[len(g) // 2] for g in list(groups.values())[::3]]


def spaced(rows: list[Any], n: int) -> list[Any]:
    """``n`` of the rows at even distances, the first and the last among them."""
    if len(rows) <= n:
        return rows
    return [rows[round(i * (len(rows) - 1) / (n - 1))] for i in range(n)]


def question(row: Any, served: bool) -> dict[str, Any]:
    """The row as the peers' workers read it."""
    from ridgeline import catalog

    m = catalog.model(row.text("model"))
    asked = {
        "kind": "serve" if served else "generate",
        "model": row.text("model"),
        "device": row.text("device"),
        "backend": row.text("backend", "vllm"),
        "precision": row.text("precision", "bf16"),
        "tp": row.count("tp"),
        "prompt": row.count("input_len" if served else "prompt_len"),
        "output": row.count("output_len"),
        "batch": row.count("concurrency" if served else "batch"),
    }
    if not served:  # a model that a peer may not know by name
        asked["config"] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "torch_dtype": "bfloat16", "tie_word_embeddings": m.tie_embeddings, "rms_norm_eps": 1e-5,
            "hidden_size": m.hidden_size, "num_hidden_layers": m.num_layers, "intermediate_size": m.intermediate_size,
            "num_attention_heads": m.num_heads, "num_key_value_heads": m.num_kv_heads, "vocab_size": m.vocab_size,
            "max_position_embeddings": 16384,
        }  # fmt: skip
    return asked


def ask_peer(name: str, python: str, rows: list[dict[str, Any]]) -> Answers:
    """One peer's answers to all rows, in one process."""
    worker = WORKERS / f"{name}_worker.py"
    done = subprocess.run(
        [python, str(worker)], input=json.dumps({"rows": rows}), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{name} failed in the peers' environment:\n{done.stderr[-1500:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    out = Answers(name, found["version"], found["start_s"])
    for a in found["answers"]:
        out.take(a)
    return out


def ask_ridgeline(rows: list[tuple[Any, bool]], start_s: float) -> Answers:
    """Ridgeline's answers, through the functions that ``ridgeline validate`` uses."""
    import ridgeline
    from ridgeline.spec.errors import UserError
    from ridgeline.validate import generation_rows as generation
    from ridgeline.validate import serving_rows as serving
    from ridgeline.validate.csv_table import BadCell

    out = Answers("ridgeline", ridgeline.__version__, start_s)
    for row, served in rows:
        start = time.perf_counter()
        try:
            cases = (serving if served else generation).cases(row)
        except (BadCell, UserError) as problem:
            out.take({"refused": str(problem).splitlines()[0][:160]})
            continue
        seconds = time.perf_counter() - start
        cases = [c for c in cases if not c.group.endswith(serving.ALONE)]
        out.take({c.quantity: c.predicted for c in cases} | {"seconds": seconds})
    return out


def judge(rows: list[Any], tools: list[Answers], chosen: slice) -> list[dict[str, Any]]:
    """One line per tool: errors over the rows that all tools with any answer have answered."""
    found_of = {t.tool: t.found[chosen] for t in tools}
    able = [name for name, found in found_of.items() if any(found)]
    common = [i for i in range(len(rows)) if all(found_of[name][i] for name in able)]
    lines = []
    for name in found_of:
        answered = [a for a in found_of[name] if a]
        line: dict[str, Any] = {"tool": name, "asked": len(rows), "answered": len(answered), "common": len(common)}
        if answered:
            for q in QUANTITIES:
                errors = [abs(found_of[name][i][q] / rows[i].number(q) - 1) for i in common]
                line |= {f"{q}_mean_ape": statistics.fmean(errors), f"{q}_median_ape": statistics.median(errors)}
            seconds = [a["seconds"] for a in answered]
            line |= {"median_s": statistics.median(seconds), "first_s": seconds[0]}
        lines.append(line)
    return lines


def show(title: str, lines: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(f"{'':16}{'asked':>6}{'answ.':>6}{'common':>7}{'TTFT mean':>11}{'median':>8}{'TPOT mean':>11}{'median':>8}"
          f"{'s/estimate':>12}")  # fmt: skip
    for x in lines:
        head = f"{x['tool']:16}{x['asked']:6}{x['answered']:6}{x['common']:7}"
        if "median_s" not in x:
            print(f"{head}   no answer")
            continue
        print(f"{head}{x['ttft_s_mean_ape']:11.1%}{x['ttft_s_median_ape']:8.1%}{x['tpot_s_mean_ape']:11.1%}"
              f"{x['tpot_s_median_ape']:8.1%}{x['median_s']:12.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--peer-python", required=True, help="an interpreter where the peers are installed")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "vs_predictors.json")
    args = parser.parse_args()
    start = time.perf_counter()
    from ridgeline.validate import serving_rows as serving  # noqa: F401 (timed as an import)

    start_s = time.perf_counter() - start
    from ridgeline.measure.environment import fingerprint

    served, static = serving_rows(args.data / "serving.csv"), generation_rows(args.data / "generation.csv")
    rows = [(r, True) for r in served] + [(r, False) for r in static]
    tools = [ask_ridgeline(rows, start_s)]
    asked = [question(r, s) for r, s in rows]
    tools += [ask_peer(name, args.peer_python, asked) for name in PEERS]
    parts = {"serving.csv": (served, slice(len(served))), "generation.csv": (static, slice(len(served), None))}
    report: dict[str, Any] = {"notes": NOTES, "environment": fingerprint()}
    report["tools"] = {t.tool: {"version": t.version, "import_s": t.start_s, "refused": t.refused} for t in tools}
    report["files"] = {name: judge(some, tools, where) for name, (some, where) in parts.items()}
    for name, lines in report["files"].items():
        show(name, lines)
    print("\n" + "\n".join(f"- {n}" for n in NOTES))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
