"""Published figures of hardware designs, as numbers with their source: what `ridgeline hardware check` compares with.

LLMCompass: Zhang et al., ISCA 2024, arXiv:2312.03134, and its repository. FlexFlow: Lu et al., HPCA 2017 (figure 15 is
read off, within 2 points). DFX: Hong et al., MICRO 2022, arXiv:2209.10797. NLP-Fast: Kim et al., PACT 2021.
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.predict.operators.unrolled import Layer

INPUTS = (256, 512, 1024, 2048)
OUTPUTS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048)
LATENCY_DESIGN = (
    (0.95, 0.97, 0.98, 0.99, 0.99, 0.99, 0.99, 0.99), (0.92, 0.95, 0.97, 0.98, 0.98, 0.98, 0.99, 0.99),
    (0.87, 0.92, 0.94, 0.96, 0.96, 0.97, 0.97, 0.98), (0.80, 0.87, 0.91, 0.93, 0.94, 0.95, 0.96, 0.96),
)  # fmt: skip
"""LLMCompass, figure 10: speed relative to the GA100 by input (rows) and output length."""
THROUGHPUT_DESIGN = (
    (1.23, 1.35, 1.45, 1.51, 1.56, 1.59, 1.62, 1.59), (1.29, 1.35, 1.40, 1.45, 1.49, 1.53, 1.51, 1.57),
    (1.31, 1.32, 1.35, 1.39, 1.39, 1.44, 1.47, 1.46), (1.27, 1.28, 1.31, 1.30, 1.36, 1.37, 1.40, 1.43),
)  # fmt: skip
"""LLMCompass, figure 12b: throughput relative to the GA100, each at its largest batch."""
THROUGHPUT = (
    (2453, 2295, 1978, 1713, 1505, 1325, 1183, 1067), (1557, 1564, 1437, 1305, 1175, 1067, 974, 896),
    (863, 944, 917, 868, 815, 765, 719, 677), (436, 508, 521, 515, 502, 486, 470, 453),
)  # fmt: skip
"""LLMCompass, figure 12a: the throughput design's tokens/s."""
OVERHEAD = 6 * 21e-6 + 12e-6 + 2 * 45e-6 + 45e-6
"""Seconds that LLMCompass adds to every layer of every pass: PyTorch's kernels on an A100 at size 1 (six products, a
softmax, two norms, an activation)."""


class CoreFigure(NamedTuple):
    """A chip of LLMCompass's figure 7."""

    shape: tuple[int, int, int, int, int]
    """Cores, lanes, side of the array, width of the vector unit, KB of local buffer."""
    area: float
    """Relative to GA100, as the next two."""
    prefill: float
    decode: float


CORES = {
    "A": CoreFigure((128, 4, 8, 8, 192), 0.575, 3.265, 1.008),
    "C": CoreFigure((128, 1, 32, 128, 192), 1.000, 1.020, 1.001),
    "D": CoreFigure((32, 1, 64, 512, 768), 0.960, 1.019, 1.001),
    "E": CoreFigure((8, 1, 128, 2048, 3072), 0.923, 1.102, 1.019),
}
"""LLMCompass, figure 7, from the vector graphics of its repository (ae/expected_results)."""
BANDWIDTHS = {
    400: (1.422, 3.452), 800: (1.148, 1.920), 1200: (1.063, 1.409), 1600: (1.025, 1.153), 2400: (0.985, 0.898),
    2800: (0.974, 0.826), 3200: (0.967, 0.771),
}  # fmt: skip
"""The same of figure 8: GB/s: latency of prefill and decode relative to 2000 GB/s."""
BUFFERS = {
    64: (0.946, 1.186, 1.006), 128: (0.960, 1.072, 1.004), 256: (1.026, 1.001, 1.001), 512: (1.105, 0.998, 1.001),
    1024: (1.288, 0.998, 1.001),
}  # fmt: skip
"""The same of figure 9: KB of local buffer: area, latency of prefill and decode relative to 192."""
AREAS = {"ga100": 826.0, "llmcompass-latency": 478.0, "llmcompass-throughput": 787.0}
"""LLMCompass, table IV: die area in mm²."""
DIE_DOLLARS = {"ga100": 151.0, "llmcompass-latency": 80.0, "llmcompass-throughput": 142.0}
"""The same table: dollars of the die, reconstructed from the published ratios."""
GA100_BLOCKS = {
    "cores": 476.25, "crossbar": 76.44, "global buffer": 119.31, "memory PHY": 58.0, "memory control": 31.77,
    "link PHY": 20.95,
}  # fmt: skip
"""Area of the GA100's blocks in mm², measured on a die photograph (LLMCompass's repository)."""
ALDEBARAN_BLOCKS = {
    "cores": 446.22, "crossbar": 33.0, "global buffer": 25.2, "memory PHY": 83.26, "memory control": 40.83,
    "link PHY": 45.52, "link control": 42.0,
}  # fmt: skip
"""The same of Aldebaran."""
OUT_OF_SAMPLE = {"128 x 128 bf16 array, TPU v4i": 14.0, "128 MB of scratchpad, TPU v4i": 112.0, "GH100": 814.0}
"""Published areas that the constants were not fitted on."""


def _layer(inputs: int, outputs: int, size: int, kernel: int) -> Layer:
    return Layer(inputs, outputs, (size, size), kernel)


FLEXFLOW_LAYERS: dict[str, list[Layer]] = {
    "PV": [_layer(1, 8, 45, 6), _layer(8, 12, 20, 3), _layer(12, 16, 8, 3), _layer(16, 10, 6, 3), _layer(10, 6, 4, 3)],
    "FR": [_layer(1, 4, 28, 5), _layer(4, 16, 10, 4)],
    "LeNet-5": [_layer(1, 6, 28, 5), _layer(6, 16, 10, 5)],
    "HG": [_layer(1, 6, 24, 5), _layer(6, 12, 8, 4)],
    "AlexNet": [_layer(3, 48, 55, 11), _layer(48, 128, 27, 5), _layer(256, 192, 13, 3), _layer(192, 192, 13, 3),
                _layer(192, 128, 13, 3)],
    "VGG": [_layer(3, 64, 222, 3), _layer(64, 128, 109, 3), _layer(128, 256, 52, 3), _layer(256, 256, 50, 3),
            _layer(256, 512, 23, 3), _layer(512, 512, 21, 3), _layer(512, 512, 8, 3), _layer(512, 512, 6, 3)],
}  # fmt: skip
"""Convolutions of FlexFlow's networks; those of PV, FR and HG are from memory."""
FLEXFLOW_SIDE = {"AlexNet": 11}
"""Side of the systolic baseline's arrays where it is not 6."""
FLEXFLOW_UTILIZATION: dict[str, dict[str, float]] = {
    "2D mapping": {"PV": 44, "FR": 50, "LeNet-5": 47, "HG": 39, "AlexNet": 68, "VGG": 54},
    "tiling": {"PV": 5.5, "FR": 3.5, "LeNet-5": 7, "HG": 4.5, "AlexNet": 59, "VGG": 92},
    "systolic": {"PV": 32, "FR": 36, "LeNet-5": 60, "HG": 60, "AlexNet": 9.5, "VGG": 25},
    "FlexFlow": {"PV": 83, "FR": 89, "LeNet-5": 86, "HG": 83, "AlexNet": 93, "VGG": 99},
}  # fmt: skip
"""FlexFlow, figure 15, percent of 16 × 16 multipliers."""
FLEXFLOW_GOPS = {
    "FlexFlow": (408, 457, 438, 425, 477, 505), "systolic": (120, 118, 172, 160, 40, 115),
    "2D mapping": (225, 254, 240, 168, 352, 277), "tiling": (28, 18, 33, 25, 303, 470),
}  # fmt: skip
"""FlexFlow, figure 16, of a peak of 512."""

DFX_345M = ((1, 93.10), (2, 146.25), (4, 207.56))
"""DFX: (FPGAs, tokens/s) of GPT-2 345M, 64 tokens in and 64 out."""
DFX_XL, GPU_XL = 72.68, 13.01
"""tokens/s of GPT-2 1.5B on four FPGAs and on four V100, 64 in and 64 out: from memory, but they close to 5.58."""
DFX_DOLLARS, GPU_DOLLARS = 4 * 7795.0, 45832.0
"""Of four cards each, as DFX's cost comparison takes them: from memory, but they close to 8.21."""
DFX_WATTS, GPU_WATTS = 45.0, 47.5
"""Measured, of one card; from memory, but with the mean speed-up of 3.78 they close to 3.99."""

NLP_FAST = {"CPU": 2.92, "GPU": 1.59, "FPGA": 4.47}
"""NLP-Fast: speed over each platform's own baseline."""
