"""Answers rows with GenZ's ``prefill_moddeling`` and ``decode_moddeling``. Run by ``vs_predictors.py``.

Runs in the peer's own interpreter. Reads ``{"rows": [...]}`` on standard input; writes ``{"version", "start_s",
"answers"}`` as the last line of standard output. Milliseconds become seconds here. GenZ estimates one prefill or one
decode step and no engine under concurrency, so that serving rows are refused. Everything but model, system, batch,
lengths, bits and tensor parallelism is left at its defaults; the decode step stands at the mean context.
"""

import json
import sys
import time
import warnings
from importlib.metadata import version

SYSTEMS = {"h100-sxm": "H100_GPU", "a100-80g-sxm": "A100_80GB_GPU"}


def model_config(row: dict):
    from GenZ import ModelConfig

    c = row["config"]
    return ModelConfig(
        model=row["model"],
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_ffi=2,  # gate and up
        num_decoder_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        hidden_act="silu",
    )


def answer(row: dict) -> dict:
    from GenZ import decode_moddeling, prefill_moddeling

    if row["kind"] == "serve":
        return {"refused": "no estimate of an engine under concurrency"}
    start = time.perf_counter()
    try:
        common = {
            "model": model_config(row),
            "batch_size": row["batch"],
            "system_name": SYSTEMS[row["device"]],
            "bits": row["precision"],
            "tensor_parallel": row["tp"],
            "parallelism_heirarchy": f"TP{{{row['tp']}}}_EP{{1}}_PP{{1}}",
        }
        first = prefill_moddeling(input_tokens=row["prompt"], **common)["Latency"]
        each = decode_moddeling(input_tokens=row["prompt"] + row["output"] // 2, output_tokens=0, Bb=1, **common)
    except Exception as problem:
        return {"refused": f"{type(problem).__name__}: {problem}".split(". ")[0][:160]}
    seconds = time.perf_counter() - start
    return {"ttft_s": float(first) / 1e3, "tpot_s": float(each["Latency"]) / 1e3, "seconds": seconds}


def main() -> None:
    warnings.filterwarnings("ignore")
    rows = json.load(sys.stdin)["rows"]
    start = time.perf_counter()
    import GenZ  # noqa: F401

    imported = time.perf_counter() - start
    answers = [answer(r) for r in rows]
    print(json.dumps({"version": version("genz-llm"), "start_s": imported, "answers": answers}))


if __name__ == "__main__":
    main()
