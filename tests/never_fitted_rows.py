"""Public kernel and collective measurements on which no constant was fitted, as facts with their pages.

Whole tables, as far as they were to be had; what is left out of one is said beside it. Of a kernel a table gives
TFLOP/s, seconds or bytes/s; here all are seconds.
"""

from typing import NamedTuple


class Product(NamedTuple):
    """C[m, n] = A[m, k] B[k, n], in 8 bits without conversion of A; ``m`` rows in each of ``groups`` in one kernel."""

    device: str
    dtype: str
    shape: tuple[int, int, int]
    seconds: float
    groups: int = 1
    warm: bool = False
    """Whether the same weights are multiplied again and again, without the cache being flushed."""
    watts: float = 0
    """The power limit, if it is not the device's own."""


class Attention(NamedTuple):
    """One kernel, forward; ``shape``: batch, heads, key heads, queries, keys, dimension."""

    device: str
    shape: tuple[int, int, int, int, int, int]
    seconds: float
    causal: bool = False
    kernel: str = "flash"


class Collective(NamedTuple):
    """One of ``size`` bytes (nccl-tests' total) in 32-bit floats, over ``nodes`` of ``local`` devices."""

    device: str
    kind: str
    local: int
    nodes: int
    size: float
    seconds: float


def _tera(device, dtype, table, groups=1, **more):
    """Products by their TFLOP/s."""
    return [Product(device, dtype, (m, n, k), 2e-12 * groups * m * n * k / rate, groups, **more)
            for m, n, k, rate in table]  # fmt: skip


# github.com/deepseek-ai/DeepGEMM, README at 78cacf7 (February 2025): H800 SXM5, NVCC 12.8, blocks of 128 scaled; its
# benchmark flushes the cache. Normal, grouped by contiguous rows, grouped with a mask.
H800_PRODUCTS = _tera(
    "h800", "fp8",
    [(64, 2112, 7168, 206), (64, 24576, 1536, 289), (64, 32768, 512, 219), (64, 7168, 16384, 336),
     (64, 4096, 7168, 287), (64, 7168, 2048, 295), (128, 2112, 7168, 352), (128, 24576, 1536, 535),
     (128, 32768, 512, 358), (128, 7168, 16384, 645), (128, 4096, 7168, 533), (128, 7168, 2048, 510),
     (4096, 2112, 7168, 1058), (4096, 24576, 1536, 990), (4096, 32768, 512, 590), (4096, 7168, 16384, 1358),
     (4096, 4096, 7168, 1304), (4096, 7168, 2048, 1025)],
)  # fmt: skip
H800_GROUPED = [
    product
    for groups, table in (
        (4, [(8192, 4096, 7168, 1297), (8192, 7168, 2048, 1099)]),
        (8, [(4096, 4096, 7168, 1288), (4096, 7168, 2048, 1093)]),
        (1, [(1024, 4096, 7168, 1233), (1024, 7168, 2048, 925)]),
        (2, [(512, 4096, 7168, 1040), (512, 7168, 2048, 916)]),
        (4, [(256, 4096, 7168, 932), (256, 7168, 2048, 815)]),
    )
    for product in _tera("h800", "fp8", table, groups)
]
# The same repository, pull requests 74 and 81 (March and April 2025): the faster of its tiles for each shape.
H800_LATER = [
    *_tera("h800", "fp8", [(4096, 24576, 1536, 1204), (4096, 32768, 512, 801), (4096, 7168, 16384, 1500),
                           (4096, 4096, 7168, 1377), (4096, 7168, 2048, 1204)]),
    *_tera("h800", "fp8", [(8192, 4096, 7168, 1381), (8192, 7168, 2048, 1262)], 4),
]  # fmt: skip
# github.com/Azure/AI-benchmarking-guide, Azure_Results at 8fd0c6e: cuBLASLt in fp8, random data, 10 000 warm runs.
_AZURE = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384),
          (32768, 32768, 32768), (1024, 2145, 1024), (6144, 12288, 12288), (802816, 192, 768)]  # fmt: skip
H200_PRODUCTS = _tera(
    "h200-sxm", "fp8",
    [(*s, rate) for s, rate in
     zip(_AZURE, (290.8, 1013.4, 1249.1, 1300.6, 1366.3, 1349.5, 407.9, 1318.0, 717.5), strict=True)], warm=True,
)  # fmt: skip
# github.com/stas00/ml-engineering, compute/accelerator: the best shape that a search found on each, torch.
BEST_SHAPES = [
    *_tera("b200", "bf16", [(1792, 16128, 3072, 1745.0)]), *_tera("b200", "fp8", [(15360, 4096, 3072, 3432.5)]),
    *_tera("gb200", "bf16", [(4096, 9728, 2048, 1822.0)]), *_tera("gb200", "fp8", [(19456, 5120, 1536, 3615.6)]),
]  # fmt: skip
BEST_ON_HOPPER = _tera("h200-sxm", "fp8", [(1280, 4096, 12032, 1453.4)])
# github.com/vllm-project/vllm, pull requests 19566 (the first shape, after tuning) and 20071: CUDA graphs of PyTorch's
# bf16 and CUTLASS' fp8 kernels of tensors scaled already, on B200.
_ROWS = (1, 16, 64, 128, 256, 512, 1024)
B200_LINEAR = [
    *_tera("b200", "bf16", [(m, 4096, 4096, rate) for m, rate in zip(
        _ROWS, (2.735701, 72.857795, 286.303008, 561.330810, 892.904450, 1335.789318, 1362.674710), strict=True)],
        warm=True),
    *_tera("b200", "fp8", [(m, 4096, 4096, rate) for m, rate in zip(
        _ROWS, (5.857841, 93.357504, 367.518648, 610.759122, 992.838121, 1832.046345, 2076.664305), strict=True)],
        warm=True),
    *_tera("b200", "bf16", [(m, 8192, 2048, rate) for m, rate in zip(
        (1, 16, 32, 64, 128, 192, 256),
        (4.886522, 92.691298, 183.956786, 357.481226, 654.879700, 896.451572, 1058.266034), strict=True)], warm=True),
    *_tera("b200", "fp8", [(m, 8192, 2048, rate) for m, rate in zip(
        (1, 16, 32, 64, 128, 192, 256),
        (5.650769, 90.376268, 178.046352, 345.924649, 654.817899, 943.381190, 1238.137168), strict=True)], warm=True),
]  # fmt: skip
# github.com/facebookexperimental/triton, pull requests 180 and 854 (the last three): cuBLAS in fp16 on B200 limited to
# 750 W, n x n x n, the cache flushed. Above 2304 the first page's table was not to be had.
B200_SQUARE = [
    Product("b200", "fp16", (n, n, n), 2.0 * n**3 / rate / 1e12, watts=750)
    for n, rate in (
        (256, 4.112063), (384, 13.770210), (512, 29.433714), (640, 57.487722), (768, 98.991442), (896, 140.933210),
        (1024, 207.126128), (1152, 273.786491), (1280, 344.021006), (1408, 420.377921), (1536, 548.407785),
        (1664, 531.301083), (1792, 702.464002), (1920, 728.777566), (2048, 838.860821), (2176, 914.711266),
        (2304, 1042.853903), (2048, 798.915054), (4096, 1110.097549), (8192, 1087.746585),
    )
]  # fmt: skip

# github.com/Dao-AILab/flash-attention, issue 1310: FlashAttention-3 on H20, batch 2, fp16; 1438: the same in bf16.
HOPPER_PREFILL = [
    Attention("h20", (2, 32, 32, 2048, 2048, 64), 0.572e-3),
    Attention("h20", (2, 32, 32, 2048, 2048, 64), 0.342e-3, True),
    Attention("h20", (2, 16, 16, 2048, 2048, 128), 0.545e-3),
    Attention("h20", (2, 16, 16, 2048, 2048, 128), 0.319e-3, True),
    Attention("h200-sxm", (1, 8, 8, 32768, 32768, 64), 4.51709e-3),
]
# github.com/Dao-AILab/flash-attention, pull request 2605: FlashAttention-4 on B200, bf16, 32 heads of 64 or 16 of 128
# (from its FLOP). By TFLOP/s, which have more digits; the last two causal rows of 128 were not to be had.
_LENGTHS = ((32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16384))
B200_PREFILL = [
    Attention("b200", (batch, 2048 // dim, 2048 // dim, length, length, dim),
              (2 if causal else 4) * batch * 2048.0 * length**2 / rate / 1e12, causal)
    for dim, causal, rates in (
        (64, False, (657, 682, 695, 701, 706)), (64, True, (425, 580, 713, 794, 836)),
        (128, False, (1196, 1266, 1309, 1357, 1401)), (128, True, (704, 944, 1114)),
    )
    for (batch, length), rate in zip(_LENGTHS, rates, strict=False)
]  # fmt: skip
# github.com/deepseek-ai/FlashMLA, issue 30: the kernel of February 2025 on H20, bf16; 128 sequences of one length, one
# to four new tokens of 16 heads. github.com/ai-bot-pro/achatbot, pull request 123: the same kernel on H100.
H20_LATENT = [
    Attention("h20", (128, 16, 1, q, 4096, 576), ms / 1e3, True, "latent")
    for q, ms in ((1, 0.601), (2, 0.606), (3, 0.609), (4, 0.614), (5, 1.168), (6, 1.172))
]
H20_LATENT_LONG = [
    Attention("h20", (128, 64, 1, q, 8192, 576), ms / 1e3, True, "latent")
    for q, ms in ((3, 3.407), (4, 4.641), (5, 5.852), (6, 6.748), (7, 7.965), (8, 9.711))
]
H100_LATENT = [
    Attention("h100-sxm", (128, heads, 1, q, 4096, 576), ms / 1e3, True, "latent")
    for heads, q, ms in ((16, 1, 0.215), (16, 2, 0.218), (32, 1, 0.218), (32, 2, 0.223), (64, 1, 0.223))
]
# github.com/Dao-AILab/flash-attention, issue 1572: FlashAttention-3 on H20, pages of 128; 128 sequences (from its
# GB/s). The same issue's pages of 8 tokens, which that kernel reads without the copy engine, are left out.
H20_SHARED = [Attention("h20", (128, 128, 16, 1, 1024, 128), 1067.0e-6)]
# github.com/flashinfer-ai/flashinfer, pull request 1415: TensorRT-LLM's decode on B200, bf16, pages of 16. The two rows
# of 128 sequences of 8192 and 16384 are left out: there it takes 10 and 31 times as long as with 4096.
B200_DECODE = [
    Attention("b200", (batch, 64, 8, 1, length, 64), ms / 1e3, True, "trtllm")
    for batch, length, ms in (
        (4, 1024, 0.0082464), (4, 4096, 0.0114336), (4, 8192, 0.0154368), (4, 16384, 0.030592),
        (128, 1024, 0.0522848), (128, 4096, 0.1757888),
    )
]  # fmt: skip

_KIB = 1024.0


def _bus(device, local, nodes, table, kind="all_reduce"):
    """Collectives by their bus bandwidth in GB/s."""
    ranks, rounds = local * nodes, 2 if kind == "all_reduce" else 1
    return [
        Collective(device, kind, local, nodes, size, rounds * (ranks - 1) / ranks * size / rate / 1e9)
        for size, rate in table
    ]


def _doubled(first, rates):
    return [(first * 2**i, rate) for i, rate in enumerate(rates)]


# github.com/stas00/ml-engineering, network: PyTorch 2.9.1, NCCL 2.27.7, one and four P6-B200 nodes with 8 x 50 GB/s of
# EFA v4 each; from 128 KiB on four nodes (below, the page has one digit). One p5en node of H200.
B200_NODE = _bus("b200", 8, 1, _doubled(
    32 * _KIB, (1.20, 2.17, 4.86, 9.54, 18.71, 36.06, 63.09, 76.48, 126.49, 254.96, 325.97, 400.60, 568.38, 646.11,
                688.99, 723.34, 734.97, 740.64, 839.07, 845.67)))  # fmt: skip
B200_FOUR_NODES = _bus("b200", 8, 4, _doubled(
    128 * _KIB, (0.45, 1.33, 2.84, 5.37, 10.38, 18.90, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.90, 361.99,
                 372.42, 377.34, 380.39, 381.80)))  # fmt: skip
H200_NODE = _bus("h200-sxm", 8, 1, _doubled(
    32 * _KIB, (1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15,
                450.29, 463.58, 469.17, 473.10, 477.45, 482.26)))  # fmt: skip
H200_RINGS = [
    *_bus("h200-sxm", 8, 1, [(16 * _KIB**3, 361.4)], "all_gather"),
    *_bus("h200-sxm", 8, 1, [(16 * _KIB**3, 362.9)], "reduce_scatter"),
]
# The same page: four p5en nodes (8 x 50 GB/s of EFA v3), 4 GiB.
H200_FOUR_NODES = _bus("h200-sxm", 8, 4, [(4 * _KIB**3, 364.87)])
# github.com/Azure/AI-benchmarking-guide, Azure_Results at 8fd0c6e: H200, NCCL 2.20.5; from 32 KiB (below, two digits).
H200_AZURE = _bus("h200-sxm", 8, 1, _doubled(
    32 * _KIB, (1.84, 3.72, 7.39, 14.75, 29.38, 52.96, 88.78, 138.44, 181.94, 240.41, 300.91, 368.11, 412.45, 432.24,
                442.72, 467.58, 472.57, 477.41, 479.98)))  # fmt: skip
# github.com/coreweave/nccl-tests, README: NCCL 2.26.2 on one rack of 72 GB200 and on two.
GB200_RACK = [
    Collective("gb200", "all_reduce", 72, 1, size, us / 1e6)
    for size, us in zip((2**29, 2**30, 2**31, 2**32, 2**33), (1806.7, 3108.8, 5589.1, 10094, 20299), strict=True)
]
GB200_TWO_RACKS = [
    Collective("gb200", "all_reduce", 72, 2, size, us / 1e6) for size, us in zip(
        (2**29, 2**30, 2**31, 2**32, 2**33, 2**34), (2156.8, 3574.4, 6264.0, 11469, 21493, 42067), strict=True)
]  # fmt: skip
# The same README: 64 H100 in 8 nodes with 8 cards of 400 Gb/s, whose InfiniBand switches may add up too (SHARP).
H100_EIGHT_NODES = [
    Collective("h100-sxm", "all_reduce", 8, 8, size, us / 1e6)
    for size, us in zip((2**29, 2**30, 2**31, 2**32, 2**33), (2984.6, 5808.0, 11163, 22181, 43980), strict=True)
]
# github.com/NVIDIA/nccl, issue 1244: 16 H20 in two nodes with 16 cards of 400 Gb/s, NCCL 2.21.5, 512 bytes.
H20_TWO_NODES = [Collective("h20", "all_reduce", 8, 2, 512.0, 46.58e-6)]
