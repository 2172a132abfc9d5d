"""Definitions of metrics: the "?" beside a column, and the list at the end of a report."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "tokens_per_s": "Trained (or generated) tokens per second over all ranks: tokens per step / median step time. "
    "Padding and masked tokens are not counted.",
    "tokens_per_s_per_device": "tokens/s divided by the number of ranks.",
    "step_time_s": "Wall time of one optimizer step over all ranks, device synchronized; median of the steps after "
    "warm-up.",
    "residual": "Measured / predicted − 1. Zero is a perfect prediction; +10 % means the measurement was 10 % higher.",
    "speedup": "Tokens/s over the baseline's, measured; in brackets the 95 % interval of the ratio (hierarchical "
    "bootstrap over runs, then steps).",
    "verdict": "faster or slower only when the whole 95 % interval of the speed-up lies beyond the margin (2 % unless "
    "stated); otherwise no difference was shown.",
    "interval": "95 % interval. Steps of one run are correlated, so runs are resampled first, then steps inside each.",
    "loss": "Training loss of the last step, in nats per token, after the same tokens as the baseline.",
    "perplexity": "exp of the mean loss per token on held-out text that calibration never saw.",
    "perplexity_ratio": "Perplexity against the baseline's on the same windows, with the 95 % interval of the paired "
    "ratio (bootstrap over windows).",
    "bits_per_weight": "Stored bits over weights of the linear layers in the blocks: codes, scales, zero points, "
    "outliers.",
    "checkpoint_bytes": "Bytes of all tensors in the checkpoint's files, embeddings and norms included.",
    "layer_error": "Mean over layers of |X(W - Q)ᵀ|² / |XWᵀ|² on the calibration inputs X that the layer has in the "
    "compressed model.",
    "compress_s": "Seconds that the compression took, loading and writing included.",
    "same": "Does the plan still compute the same thing? ✓ when its loss stays within the bound that its techniques "
    "state (the list of plans names it), ✗ when it does not, – when it was not tested.",
    "peak_bytes": "Largest sum of live bytes on one rank during a step: parameters, gradients, optimizer states, "
    "activations, temporaries. GiB = 2³⁰ bytes.",
    "device_used_bytes": "The device's total minus its free memory, the largest of the ranks: tensors, the allocator's "
    "cache and the CUDA context. On a CPU, the growth of the processes' resident memory. Predicted: the peak with what "
    "the framework takes.",
    "memory_ratio": "Measured peak memory over the baseline's.",
    "mfu": "Model FLOPs utilization: FLOPs that the model needs (recomputation not counted) per second, over the "
    "peak of the compute dtype.",
    "hfu": "Hardware FLOPs utilization: FLOPs executed (recomputation counted) per second, over the peak.",
    "ttft_s": "Time to first token: from the time the request was to be sent to its first text.",
    "tpot_s": "Time per output token after the first, per request: (end − first token) / (tokens − 1).",
    "itl_s": "Inter-token latency: each gap between chunks with text, all requests' together.",
    "e2e_s": "From the time the request was to be sent to its end.",
    "goodput_per_s": "Requests per second that keep the limits on TTFT and TPOT; failed ones keep none.",
    "answered_share": "First tokens per request that arrives, over the second half of the arrivals: less than one while"
    " the queue grows.",
    "slo_share": "Share of requests that keep both limits; failed ones keep none.",
    "dollars_per_hour": "Price of all replicas of a fleet, each as long as it was there, mean over the time.",
    "watts": "Rated power of all devices of a fleet, mean over the time: an upper bound.",
    "kv_transfer_exposed_s": "From a request's first token to the arrival of its cache at the replica that "
    "generates the rest, mean.",
    "recomputed_requests": "Requests whose replica was lost, and which were computed again on another.",
    "schedule_lag_s": "By how much the client sent after the intended time. It is part of every latency.",
    "exposed_communication_s": "Communication per step that is not hidden behind computation.",
    "share": "Part of the sum of all rows.",
    "roof": "Achieved share of the roof: time that the faster of peak rate and memory bandwidth would allow, over the "
    "time taken.",
    "unattributed": "Step time that no row accounts for: launch gaps, the framework's own work, idle time.",
    "intensity": "Arithmetic intensity: FLOPs per byte of memory traffic.",
    "warmup": "Steps before the step time settles (settling-time rule); they are marked and left out.",
}


def define(key: str) -> str:
    """The definition of a metric or column; empty when there is none."""
    return DEFINITIONS.get(key, "")
