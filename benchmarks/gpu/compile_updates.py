"""Cases of ``compile_kernels.py``: optimizers, and weights that are made at every use."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compile_cases import BF16, F16, F32, I32, NAMES, Case, e

from ridgeline.nn.kernels import coded_adamw, gated_difference, integer_rows, nf4_codes, relative_update


def updates() -> Iterator[Case]:
    """Optimizers' steps, and weights that are made at every use."""
    tables = [e(n, dtype=t) for n, t in ((256, F32), (65536, torch.uint8), (256, F32))] * 2
    for (rows, width), block, dtype in (((4096, 14336), 256, F32), ((2048, 2048), 256, BF16), ((320, 320), 160, F32)):

        def coded(rows=rows, width=width, block=block, dtype=dtype):
            held = e(rows, width, dtype=torch.uint8), e(rows, width // block, dtype=F32)
            coded_adamw.coded_adamw(e(rows, width, dtype=dtype), e(rows, width, dtype=dtype), held, held, tables, block,
                                    (0.999, 0.1, 0.95, 0.05, 1e-8, -3e-4, 0.9))  # fmt: skip

        yield Case(f"8-bit adamw {rows}x{width} {NAMES[dtype]}", coded, width == 14336)
    for shape, dtype in (((4096, 14336), BF16), ((2048, 8192), F32), ((8, 1408, 2048), BF16), ((320, 848), F32)):

        def relative(shape=shape, dtype=dtype):
            r, c = e(*shape[:-1], dtype=F32), e(*shape[:-2], shape[-1], dtype=F32)
            relative_update.update_matrix(e(*shape, dtype=dtype), e(*shape, dtype=dtype), r, c, 0.3, 1e-30, 1e-3, 1e-3)

        name = "x".join(map(str, shape))
        yield Case(f"adalomo {name} {NAMES[dtype]}", relative, shape == (4096, 14336))
    for (n, width), dtype in (((4096, 14336), BF16), ((2048, 2048), F32), ((320, 848), BF16)):

        def integers(n=n, width=width, dtype=dtype):
            count, noise = max(1, round(0.01 * width)), e(n, width, dtype=F32)
            codes = e(n, width, dtype=torch.int8)
            rows = integer_rows.Rows(codes, e(n, 1, dtype=F32), e(n, count, dtype=I32), e(n, count, dtype=F32))
            integer_rows.expand_rows(rows, e(n, width, dtype=dtype))
            integer_rows.lion_rows(rows, e(n, width, dtype=dtype), codes, e(n, 1, dtype=F32), (noise, noise),
                                   (1e-4, 0.999, 0.1, 0.01, 1.0625))  # fmt: skip

        yield Case(f"integer rows {n}x{width} {NAMES[dtype]}", integers, width == 14336)
    for dtype in (F32, BF16):
        given = [e(4096, 14336, dtype=dtype) for _ in range(4)]

        def gated(given=given):
            gated_difference.gated_weight(*given, e(4096, 14336), (-0.1, 1.1))
            gated_difference.gated_gradients(e(4096, 14336), *given[1:], tuple(given[:2]), (-0.1, 1.1))
            gated_difference.shut_gates(given[0], -2.4, 1e-4)

        yield Case(f"gated difference {NAMES[dtype]}", gated, dtype == F32)
    for n, dtype in ((4096, BF16), (16384, F32)):
        yield Case(f"adalomo {n} {NAMES[dtype]}", lambda n=n, dtype=dtype: relative_update.update_vector(
            e(n, dtype=dtype), e(n, dtype=dtype), e(n, dtype=F32), 0.3, 1e-30, 1e-3, 1e-3), n == 4096)  # fmt: skip
    for (rows, width), dtype in (((4096, 14336), BF16), ((4096, 14336), F32), ((320, 864), F16)):

        def nf4(rows=rows, width=width, dtype=dtype):
            codes, scales = (e(rows, n, dtype=torch.uint8) for n in (width // 2, -(-width // 64)))
            nf4_codes.expand_nf4(codes, scales, e(rows, 2, dtype=F32), e(16, dtype=F32), e(256, dtype=F32),
                                 e(rows, width, dtype=dtype), 64)  # fmt: skip

        yield Case(f"nf4 {rows}x{width} {NAMES[dtype]}", nf4, dtype == BF16)
