"""Latencies that LLMCompass measured on A100 (80 GB), operator by operator, beside the predictor's.

Facts from its repository (github.com/PrincetonUniversity/LLMCompass, ae/figure5). Measured times hold PyTorch's launch,
which it measured at size 1; predictions are compared with that added (see :data:`LAUNCH`).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from ridgeline import catalog
from ridgeline.graph.graph import Op
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.device import Cluster
from ridgeline.validate.claim import Claim

LAUNCH = {"product": 21e-6, "softmax": 12e-6, "layernorm": 45e-6, "GELU": 45e-6, "all-reduce": 0.0}
"""Seconds of one operator of size 1."""
THEIRS = {"product": 0.090, "softmax": 0.120, "layernorm": 0.138, "GELU": 0.050, "all-reduce": 0.149}
"""Mean error of LLMCompass's own simulator (section 4)."""
WHY = {
    "softmax": "PyTorch's reaches half of the memory's rate; the predictor's is that of a fused kernel",
    "all-reduce": "from 64 KB to 2 MB, slower here than the NCCL that the constants were fitted on",
}
PRODUCTS = (
    (64, 12288, 12288, 0.1900), (128, 12288, 12288, 0.2003), (256, 12288, 12288, 0.3185), (512, 12288, 12288, 0.6118),
    (1024, 12288, 12288, 1.1990), (2048, 12288, 12288, 2.3586), (4096, 12288, 12288, 4.4576),
    (8192, 12288, 12288, 8.6216), (16384, 12288, 12288, 17.0307), (32768, 12288, 12288, 35.4407),
    (8192, 64, 64, 0.0296), (8192, 128, 128, 0.0310), (8192, 256, 256, 0.0356), (8192, 512, 512, 0.0471),
    (8192, 1024, 1024, 0.0927), (8192, 2048, 2048, 0.2818), (8192, 4096, 4096, 1.0210), (8192, 8192, 8192, 3.9614),
    (8192, 16384, 16384, 15.0087), (8192, 32768, 32768, 61.1346),
)  # fmt: skip
"""(rows, columns, k, milliseconds), 16 bits."""
_WIDTHS = tuple(2**i for i in range(5, 16))
SOFTMAX = {
    **{(4096, n): g for n, g in zip(_WIDTHS, (
        9.996, 19.63, 37.27, 68.72, 111.3, 153.0, 167.5, 204.6, 216.5, 242.0, 240.9), strict=True)},
    **{(m, 4096): g for m, g in zip(_WIDTHS, (
        8.458, 16.66, 30.97, 57.12, 96.66, 137.4, 166.8, 204.0, 230.0, 247.1, 278.8), strict=True)},
}  # fmt: skip
"""(rows, columns): 1e9 elements per second, 16 bits."""
LAYERNORM = {
    **{(4096, n): g for n, g in zip(_WIDTHS, (
        2.476, 4.844, 10.06, 19.59, 39.27, 78.89, 139.1, 211.3, 265.3, 210.4, 199.3), strict=True)},
    **{(m, 4096): g for m, g in zip(_WIDTHS, (
        2.499, 5.021, 9.996, 20.08, 40.16, 79.60, 141.9, 211.6, 284.9, 345.8, 385.8), strict=True)},
}  # fmt: skip
"""The same."""
GELU = dict(zip(((1, 2**i) for i in range(10, 30)), (
    0.02126, 0.04338, 0.08547, 0.1701, 0.3369, 0.6889, 1.381, 2.735, 5.525, 11.19, 21.94, 43.98, 86.66, 141.9, 210.4,
    277.0, 328.3, 360.2, 379.5, 390.3), strict=True))  # fmt: skip
"""The same."""
ALL_REDUCE = dict(zip((2**i for i in range(12, 35)), (
    15.23, 15.99, 17.39, 20.00, 22.93, 28.66, 35.93, 47.27, 60.75, 66.40, 84.75, 128.8, 195.7, 279.7, 532.3, 961.7,
    1883.7, 3659.0, 7219.2, 14136.0, 27944.0, 55384.0, 110277.0), strict=True))  # fmt: skip
"""Bytes: microseconds on four devices with NVLink 3, from 4 KB on."""


def measured() -> Iterator[Claim]:
    """Every product and all-reduce, and the mean error of each kind beside LLMCompass's own."""
    device = catalog.device("a100-80g-sxm")
    for kind, rows in operators().items():
        errors = []
        for what, theirs, ours in rows:
            errors.append(abs(ours / theirs - 1))
            if kind in ("product", "all-reduce"):
                yield Claim("LLMCompass, A100", f"{kind} {what}", theirs, ours, "s", "measured")
        said = f"{kind}, mean error of {len(rows)} {device.name} latencies"
        yield Claim("LLMCompass, A100", said, 100 * THEIRS[kind], 100 * fmean(errors), "%",
                    "; ".join(("errors against measurements: its simulator's and the predictor's",
                               *filter(None, [WHY.get(kind)]))))  # fmt: skip


def operators() -> dict[str, list[tuple[str, float, float]]]:
    """By kind: (shape, measured seconds, predicted seconds)."""
    device = catalog.device("a100-80g-sxm")
    four = Cluster(device=device, devices_per_node=4)
    found: dict[str, list[tuple[str, float, float]]] = {"product": []}
    for m, n, k, ms in PRODUCTS:
        op = Op("product", "mlp", "gemm", flops=2.0 * m * n * k, bytes=2.0 * (m * k + n * k + m * n), dtype="fp16",
                shape=(m, n, k))  # fmt: skip
        found["product"].append((f"{m} x {n} x {k}", ms / 1e3, op_time(op, device).seconds + LAUNCH["product"]))
    for name, kind, rates in (("softmax", "softmax", SOFTMAX), ("layernorm", "norm", LAYERNORM),
                              ("GELU", "activation", GELU)):  # fmt: skip
        rows = found[name] = []
        for (m, n), rate in rates.items():
            op = Op(name, "mlp", kind, bytes=4.0 * m * n, dtype="fp16")
            rows.append((f"{m} x {n}", m * n / (rate * 1e9), op_time(op, device).seconds + LAUNCH[name]))
    found["all-reduce"] = [
        (f"of {size} bytes", us / 1e6, collective_time(Op("sum", "communication", "all_reduce", bytes=size,
         link_bytes=size, ranks=4, axis="tp", dtype="fp16"), four).seconds)
        for size, us in ALL_REDUCE.items()
    ]  # fmt: skip
    return found
