"""Generates from a GGUF file with llama.cpp, whose mapped file the system pages. Run by ``beyond_memory.py``.

Reads one JSON object on standard input; the last line of standard output is ``{"version", "seconds", "tokens"}``:
seconds of the prefill and of each further token, and the greedy tokens of the one sequence.
"""

import json
import sys
import time


def main() -> None:
    job = json.load(sys.stdin)
    import llama_cpp
    import numpy as np

    threads = job["threads"]
    model = llama_cpp.Llama(job["gguf"], n_ctx=256, n_threads=threads, n_threads_batch=threads, use_mmap=True,
                            verbose=False)  # fmt: skip
    (feed,) = job["prompt"]
    seconds, tokens = [], []
    for _ in range(job["output_len"]):
        start = time.perf_counter()
        model.eval(feed)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        feed = [int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())]
        seconds.append(time.perf_counter() - start)
        tokens.append(feed)
    print(json.dumps({"version": llama_cpp.__version__, "seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
