"""What the compiler makes of every Triton kernel at the shapes of real models, without a GPU: registers, spills,
tensor-core instructions, wide and asynchronous loads, instructions per loop.

    python benchmarks/gpu/compile_kernels.py [--capabilities 80 90 100] [--only NAME ...] [--quick] \
        [--out benchmarks/results/gpu_aot.json --as after]

``--quick``: one shape of each kernel, those that the tests hold to bounds. Needs PyTorch and Triton; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from compile_cases import BF16, F16, F32, I32, NAMES, Case, e
from compile_updates import updates

from ridgeline.measure.environment import fingerprint
from ridgeline.nn.kernels import (
    flash,
    float8,
    float8_gated,
    gemv,
    gpu,
    grouped_codes,
    grouped_lora,
    lowbit_matmul,
    paged_attention,
    paged_store,
    skinny,
    ternary_decode,
)
from ridgeline.nn.kernels.ahead_of_time import compiling, measured
from ridgeline.nn.kernels.gather_heads import gather_heads
from ridgeline.nn.kernels.lora_stack import LEAST_RANK, Stack, most_cut
from ridgeline.nn.kernels.peaks import GatedGradient, room
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.quant.quantized_kv import KINDS
from ridgeline.nn.quant.ternary import Ternary
from ridgeline.spec.lowbit import striped, wide_bits

ROWS = 16384
E4M3 = torch.float8_e4m3fn


def norms() -> Iterator[Case]:
    """Norms with residuals, forward and backward."""
    for n, x, add, w, layer, columns in (
        (4096, BF16, True, BF16, False, 0), (8192, BF16, True, BF16, False, 0), (2048, F32, True, F32, False, 0),
        (4096, F32, True, F32, False, 0), (8192, F32, True, F32, False, 0), (5120, F16, True, F16, True, 0),
        (16384, BF16, True, BF16, False, 1024), (4096, BF16, False, BF16, False, 0),
    ):  # fmt: skip
        kind = f"{'layer' if layer else 'rms'} n={n} {NAMES[x]}{' +add' if add else ''}{' folded' if columns else ''}"
        quick = (n, x) == (8192, F32)
        mean = e(ROWS, dtype=F32) if layer else None
        bias = e(n, dtype=w) if layer else None

        def forward(n=n, x=x, add=add, w=w, columns=columns, mean=mean, bias=bias):
            gpu.rl_add_norm(False, e(ROWS, n, dtype=x), 0, e(ROWS, n) if add else None, 0, e(n, dtype=w), 0, bias,
                            e(ROWS, n, dtype=x), e(ROWS, n), 0, mean, e(ROWS, dtype=F32), ROWS, n, 1e-5,
                            columns=columns)  # fmt: skip

        def backward(n=n, x=x, add=add, w=w, columns=columns, mean=mean, bias=bias):
            gpu.rl_add_norm_backward(False, e(ROWS, n), 0, e(ROWS, n, dtype=x) if add else None,
                                     e(ROWS, n, dtype=x), 0, e(n, dtype=w), 0, mean, e(ROWS, dtype=F32),
                                     e(ROWS, n, dtype=x), e(n, dtype=w), bias, ROWS, n, columns=columns)  # fmt: skip

        yield Case(f"norm {kind}", forward, quick)
        yield Case(f"norm backward {kind}", backward, quick)


def elementwise() -> Iterator[Case]:
    """Activations, softmax, rotary embedding, loss, AdamW."""
    for n, kind, dtype in ((14336, 0, BF16), (8192, 0, BF16), (3072, 1, BF16)):
        bias = e(n, dtype=dtype) if kind else None
        wide = e(ROWS, n * (1 if kind else 2), dtype=dtype)
        name = f"{'gelu + bias' if kind else 'swiglu'} n={n} {NAMES[dtype]}"
        yield Case(f"activation {name}", lambda n=n, kind=kind, b=bias, x=wide: gpu.rl_activation(
            False, x, 0, b, 0, e(ROWS, n), ROWS, n, kind), n == 14336)  # fmt: skip
        yield Case(f"activation backward {name}", lambda n=n, kind=kind, b=bias, x=wide: gpu.rl_activation_backward(
            False, e(ROWS, n), x, 0, b, 0, e(*x.shape), b, ROWS, n, kind), False)  # fmt: skip
    for n, dtype, columns in ((4096, BF16, 0), (8192, BF16, 0), (16384, BF16, 1024)):
        name, rows = f"n={n} {NAMES[dtype]}{' folded' if columns else ''}", 16 * n
        yield Case(f"softmax {name}", lambda n=n, c=columns, rows=rows: gpu.rl_softmax(
            False, e(rows, n), 0, e(n, n), 0, n, rows, n, 0.088, columns=c), False)  # fmt: skip
        yield Case(f"softmax backward {name}", lambda n=n, c=columns, rows=rows: gpu.rl_softmax_backward(
            False, e(rows, n), e(rows, n), 0, rows, n, 0.088, columns=c), n == 4096)  # fmt: skip
    for heads, d in ((40, 128), (40, 64), (12, 96)):
        yield Case(f"rotate heads={heads} of {d}", lambda h=heads, d=d: gpu.rl_rotate(
            False, e(16384, (h + 8) * d), 0, e(4096, d), e(4096, d), 0, 16384, (h + 8) * d, h, d, 4096, 1.0),
            d == 128)  # fmt: skip
    for vocabulary, gradient in ((128256, True), (128256, False), (50257, True)):
        name = f"cross entropy of {vocabulary}{' with gradient' if gradient else ''}"
        yield Case(name, lambda v=vocabulary, g=gradient: gpu.rl_cross_entropy(
            False, e(512, v), 0, e(512, dtype=torch.int64), 512, v, g), vocabulary == 128256 and gradient)  # fmt: skip
    n = 1_235_814_400
    yield Case(f"adamw of {n}", lambda: gpu.rl_adamw(
        e(n), 0, *(e(n, dtype=F32) for _ in range(4)), n, 0.999, 0.1, 0.95, 0.05, 1e-8, -3e-4, 0.9), False)  # fmt: skip


def encodings() -> Iterator[Case]:
    """Float8 codes, on devices that have them."""
    for rows, width, dtype in ((16384, 4096, BF16), (4096, 14336, BF16), (14336, 4096, F32), (1030, 70, F32)):
        name, given = f"of {rows}x{width} {NAMES[dtype]}", partial(e, rows, width, dtype=dtype)
        yield Case(f"float8 {name}", lambda x=given: float8.encode(x(), E4M3, 448.0), rows == 16384)
        yield Case(f"float8 also transposed {name}",
                   lambda x=given: float8.encode_transposed(x(), E4M3, 448.0), rows > 14000)  # fmt: skip
        for transpose in (True, False):
            yield Case(f"float8 by rows{' also transposed' if transpose else ''} {name}", lambda x=given, t=transpose:
                       float8.encode_rowwise(x(), E4M3, 448.0, t), rows == 16384 and transpose)  # fmt: skip


def peaks() -> Iterator[Case]:
    """Largest magnitudes for float8 codes, found by the kernels that write what is encoded."""
    meta = torch.device("meta")
    for wish, (n, inner) in product(("whole", "lines"), ((2048, 8192), (4096, 14336))):
        name = f"n={n}, {wish}"

        def forward(n=n, wish=wish):
            found = room(ROWS, n, wish, meta)
            gpu.rl_add_norm(False, e(ROWS, n, dtype=F32), 0, e(ROWS, n), 0, e(n, dtype=F32), 0, None,
                            e(ROWS, n, dtype=F32), e(ROWS, n), 0, None, e(ROWS, dtype=F32), ROWS, n, 1e-5,
                            peaks=found)  # fmt: skip

        def backward(n=n, wish=wish):
            found = room(ROWS, n, wish, meta)
            gpu.rl_add_norm_backward(False, e(ROWS, n), 0, e(ROWS, n, dtype=F32), e(ROWS, n, dtype=F32), 0,
                                     e(n, dtype=F32), 0, None, e(ROWS, dtype=F32), e(ROWS, n, dtype=F32),
                                     e(n, dtype=F32), None, ROWS, n, low=e(ROWS, n), peaks=found)  # fmt: skip

        quick = (n, wish) == (2048, "lines")
        yield Case(f"norm with peaks {name}", forward, quick)
        yield Case(f"norm backward with peaks {name}", backward, quick)
        both, dy, of = e(ROWS, 2 * inner), e(ROWS, inner), f"n={inner}, {wish}"
        yield Case(f"swiglu with peaks {of}", lambda x=both, y=dy, w=wish: float8_gated.activate(
            x, y, room(*y.shape, w, meta)), quick)  # fmt: skip
        yield Case(f"float8 of swiglu's gradient {of}", lambda x=both, y=dy, w=wish: float8_gated.encode_gated(
            GatedGradient(y, x), E4M3, 448.0, w), quick)  # fmt: skip


def gathered() -> Iterator[Case]:
    """Gradients of queries, keys and values, laid out by heads, on their way to the merged product."""
    meta = torch.device("meta")
    for d, wish in product((64, 128), ("", "whole", "lines")):

        def call(d=d, wish=wish):
            q, k, v = (e(4, heads, 4096, d).transpose(1, 2) for heads in (32, 8, 8))
            out = e(4, 4096, 48 * d)
            found = room(ROWS, 48 * d, wish, meta) if wish else None
            gather_heads(out, [q, k, v], (e(4096, 1, d), e(4096, 1, d)), 40, found)

        yield Case(f"gather heads of {d}{', ' * bool(wish)}{wish}", call, (d, wish) == (64, "lines"))


def products() -> Iterator[Case]:
    """Products of one row, with low-bit and with ternary weights."""
    for out, width, dtype, biased in (
        (28672, 4096, BF16, False), (4096, 14336, BF16, False), (6144, 4096, F16, False), (128256, 2048, BF16, False),
        (151936, 896, BF16, False), (1152, 904, BF16, True),
    ):  # fmt: skip

        def row(out=out, width=width, dtype=dtype, biased=biased):
            given = e(1, width, dtype=dtype), e(out, width, dtype=dtype), e(out, dtype=dtype) if biased else None
            gemv.product_of_row(*given)

        label = f"row {out}x{width} {NAMES[dtype]}{' + bias' if biased else ''}"
        yield Case(label, row, (out, width) in ((28672, 4096), (1152, 904)))
    yield Case("row 16384x2048 bf16 gated", lambda: gemv.product_of_row(e(1, 2048), e(16384, 2048), gated=True), True)
    for out, width, gated, biased in (
        (28672, 4096, True, False), (6144, 4096, False, False), (4096, 14336, False, False), (1152, 912, False, True),
    ):  # fmt: skip

        def coded(out=out, width=width, gated=gated, biased=biased):
            bias = e(out) if biased else None
            gemv.product_of_row(e(1, width), e(out, width, dtype=E4M3), bias, gated, e(out, 1, dtype=F32))

        label = f"row {out}x{width} fp8{' + bias' if biased else ''}{' gated' if gated else ''}"
        yield Case(label, coded, (out, width) in ((28672, 4096), (1152, 912)))
    for rows, (out, width), dtype in (
        *((m, (4096, 4096), BF16) for m in (2, 8, 16, 64, 512)), (8, (28672, 4096), BF16), (64, (14336, 4096), F16),
        (12, (1040, 912), BF16),
    ):  # fmt: skip

        def several(rows=rows, out=out, width=width, dtype=dtype):
            lowbit_matmul.float8_product(e(rows, width, dtype=dtype), e(out, width, dtype=E4M3), e(out, 1, dtype=F32),
                                         e(out, dtype=I32))  # fmt: skip

        label = f"fp8 rows={rows} {out}x{width} {NAMES[dtype]}"
        yield Case(label, several, (out, width) == (4096, 4096) and rows in (8, 16, 512))
    for bits, rows, (out, width), dtype, zero, group in (
        *((4, m, (4096, 4096), BF16, False, 128) for m in (1, 4, 16, 64, 512, 4096)),
        (4, 1, (4096, 14336), F16, True, 128), (4, 64, (14336, 4096), F16, True, 128),
        (8, 1, (4096, 4096), BF16, False, 128), (8, 64, (4096, 4096), BF16, False, 128),
        (3, 1, (4096, 4096), BF16, False, 128), (3, 64, (4096, 4096), BF16, False, 128),
        *((2, m, (4096, 4096), BF16, True, 64) for m in (1, 64)), (4, 64, (4096, 4096), BF16, False, 16),
        (8, 1, (4096, 4096), BF16, False, 4096), (5, 16, (4096, 4096), BF16, False, 32),
    ):  # fmt: skip
        label = f"int{bits} rows={rows} {out}x{width} {NAMES[dtype]} group={group}{' zero' if zero else ''}"
        quick = (bits, out, zero) == (4, 4096, False) and rows in (1, 64, 512) and group == 128

        def call(bits=bits, rows=rows, out=out, width=width, dtype=dtype, zero=zero, group=group):
            wide, stripe = wide_bits(bits), striped(width, bits, group)
            lowbit_matmul.lowbit_product(
                e(rows, width, dtype=dtype), e(out, width * wide // 32, dtype=I32), e(width // group, out, dtype=F16),
                e(width // group, out, dtype=torch.uint8) if zero else None, wide, 1 << (bits - 1), group, stripe,
                e(out, dtype=I32),
            )  # fmt: skip

        yield Case(label, call, quick)
    for rows, (out, width), dtype in (
        *((m, (4096, 4096), BF16) for m in (1, 8, 16, 64, 512)), *((m, (2880, 2880), BF16) for m in (1, 4, 64)),
        (1, (2880, 2880), F16), (64, (28672, 4096), F16), (12, (1037, 2880), BF16),
    ):  # fmt: skip

        def numbers(rows=rows, out=out, width=width, dtype=dtype):
            stripe = striped(width, 4, 32)
            words, scale = e(out, stripe * -(-width // (8 * stripe)), dtype=I32), e(width // 32, out, dtype=torch.uint8)
            lowbit_matmul.lowbit_product(e(rows, width, dtype=dtype), words, scale, None, 4, 0, 32, stripe,
                                         e(out, dtype=I32))  # fmt: skip

        yield Case(f"mxfp4 rows={rows} {out}x{width} {NAMES[dtype]}", numbers, out == 4096 and rows in (1, 16, 512))
    for tokens, kind in (
        (1, "mxfp4"),
        (64, "mxfp4"),
        (2048, "mxfp4"),
        (64, "int4"),
    ):  # gpt-oss-120b, four experts a token

        def experts(rows=4 * tokens, out=5760, width=2880, count=128, floating=kind == "mxfp4"):
            group = 32 if floating else 64
            stripe = striped(width, 4, group)
            words = e(count * out, stripe * -(-width // (8 * stripe)), dtype=I32)
            scale = e(width // group, count * out, dtype=torch.uint8 if floating else F16)
            grouped_codes.grouped_product(
                e(rows, width), e(129, dtype=I32), count, words, scale, None, 4, 0 if floating else 8, group, stripe,
                e(count * out, dtype=I32), e(count * out),
            )  # fmt: skip

        yield Case(f"experts {kind} rows={4 * tokens} of 128", experts, (tokens, kind) == (64, "mxfp4"))
    for tokens in (1, 8, 32):  # Mixtral 8x7B, two experts a token

        def eight(rows=2 * tokens, out=28672, width=4096, count=8):
            grouped_codes.grouped_float8_product(
                e(rows, width), e(9, dtype=I32), count, e(count * out, width, dtype=E4M3), e(count * out, 1, dtype=F32),
                e(count * out, dtype=I32),
            )  # fmt: skip

        yield Case(f"experts fp8 rows={2 * tokens} of 8", eight, tokens == 8)
    for lines, out, width, dtype in ((1, 4096, 4096, BF16), (4, 14336, 4096, BF16)):

        def ternary(lines=lines, out=out, width=width, dtype=dtype):
            code = Ternary(e(out * 300, dtype=torch.int16), e(out + 1, dtype=I32), e(out, dtype=F16),
                           e(out, dtype=F16), width)  # fmt: skip
            ternary_decode.ternary_product(e(lines, width, dtype=dtype), code)

        yield Case(f"ternary rows={lines} {out}x{width} {NAMES[dtype]}", ternary, False)


LORA = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate and up": (4096, (14336, 14336)),
        "down": (14336, (4096,))}  # fmt: skip
"""Inputs and outputs of what Llama 3.1 8B multiplies, slice by slice."""


def adapters() -> Iterator[Case]:
    """Low-rank adapters of a step's rows: 16 of them."""
    for (name, (width, outs)), rank, rows, dtype in (
        *((*given, BF16) for given in product(LORA.items(), (8, 16, 64), (1, 8, 64, 512))),
        (("odd", (2880, (2880, 100))), 8, 100, F16), (("fp32", (2048, (2048,))), 16, 64, F32),
    ):  # fmt: skip

        def call(width=width, outs=outs, rank=rank, rows=rows, dtype=dtype):
            slices, room = len(outs), max(rank, LEAST_RANK)
            stack = Stack(e(16, slices * room, width, dtype=dtype), e(16, room, sum(outs), dtype=dtype),
                          e(16, slices, dtype=I32), e(16, slices, dtype=F32), outs)  # fmt: skip
            items = e(most_cut(rows, 16), 3, dtype=I32)
            grouped_lora.add_lora(e(rows, width, dtype=dtype), e(rows, sum(outs), dtype=dtype), items, stack)

        quick = (name, rank) == ("qkv", 8) and rows in (8, 512)
        yield Case(f"lora {name} rank={rank} rows={rows} {NAMES[dtype]}", call, quick)


SERVED_WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3072, 2048), (2048, 2048),
                  (16384, 2048), (2048, 8192))  # fmt: skip
"""[out, in] of the merged projections of models of 8B and 1B, and of a head."""


def skinny_products() -> Iterator[Case]:
    """Products of a few rows on Hopper, in 16 bits and of codes with codes, which heads are not stored in."""
    for rows, (out, width) in product((16, 64, 128), SERVED_WEIGHTS):
        quick = (out, width) == (4096, 14336)

        def coded(rows=rows, out=out, width=width):
            skinny.product_of_coded_rows(
                e(rows, width, dtype=E4M3), e(rows, 1, dtype=F32), e(out, width, dtype=E4M3), e(out, 1, dtype=F32),
                e(out, dtype=I32), BF16,
            )  # fmt: skip

        def dense(rows=rows, out=out, width=width):
            skinny.product_of_rows(e(rows, width, dtype=BF16), e(out, width, dtype=BF16), e(out, dtype=I32))

        if out < 128256:
            yield Case(f"skinny e4m3 rows={rows} {out}x{width}", coded, quick)
        yield Case(f"skinny bf16 rows={rows} {out}x{width}", dense, quick)


PAGED = (
    (1, 32, 8, 128, 4096, 0, "", 1), (64, 32, 8, 128, 4096, 0, "", 1), (256, 32, 8, 64, 1024, 0, "", 1),
    (64, 32, 32, 128, 2048, 0, "", 1), (16, 64, 8, 128, 32768, 0, "", 1), (8, 32, 8, 128, 16384, 4096, "", 1),
    (8, 16, 1, 256, 8192, 0, "", 1), (4, 12, 12, 96, 1024, 0, "", 1), (1, 32, 8, 128, 131072, 0, "", 1),
    (64, 32, 8, 128, 4096, 0, "int8", 1), (64, 32, 8, 128, 4096, 0, "int4", 1), (64, 32, 8, 128, 4096, 0, "fp8", 1),
    (8, 16, 1, 256, 8192, 0, "int4", 1), (64, 32, 8, 128, 4096, 0, "", 5), (64, 64, 8, 128, 4096, 0, "", 8),
    (4, 32, 8, 128, 4096, 0, "", 1024), (4, 64, 8, 128, 4096, 0, "int4", 1024), (4, 16, 1, 256, 4096, 0, "", 1024),
    (4, 32, 8, 64, 4096, 0, "fp8", 1024),
)  # fmt: skip
"""Sequences, heads, key heads, width of a head, tokens, window, codes of the pool, new tokens of each sequence."""


def paged() -> Iterator[Case]:
    """Attention of new tokens over pages."""
    for batch, heads, groups, width, length, window, kind, new in PAGED:
        more = [f"window {window}"] * (window > 0) + [kind] * bool(kind) + [f"{new} new"] * (new > 1)
        label = ", ".join([f"paged B={batch} heads={heads}/{groups} of {width}, {length} tokens", *more])

        def call(b=batch, h=heads, g=groups, d=width, n=length, window=window, kind=kind, new=new):
            shape = (1, g, b * n, d)
            meta = torch.device("meta")
            stores = [KINDS[kind](shape, meta) if kind else e(*shape) for _ in range(2)]
            given = make_pages(e(b, n // 16, dtype=I32), e(b, dtype=I32), [new] * b, 16, h // g, d, kind)
            paged_attention.paged_attention(e(b * new, h, d), *stores, given, window)

        quick = (
            (heads, groups, width) == (32, 8, 128)
            and (batch, length, window) in ((1, 4096, 0), (64, 4096, 0), (4, 4096, 0))
            and kind in ("", "int4")
            and new != 5
        )
        yield Case(label, call, quick)


FLASH = {
    "Gemma 2 9B": (16, 8, 256, 50.0, False), "Gemma 2 27B": (32, 16, 128, 50.0, False),
    "MPT 7B": (32, 32, 128, None, True), "Llama 4": (40, 8, 128, None, False),
    "Falcon-RW 1B": (32, 32, 64, None, True), "BLOOM 3B": (32, 32, 80, None, True),
    "gpt-oss": (64, 8, 64, None, False),
}  # fmt: skip
"""Heads, key heads, width of a head, soft cap, ALiBi. Windows, chunks, documents and lengths are data."""


def training() -> Iterator[Case]:
    """Attention in training that PyTorch's flash kernel does not have."""
    for name, (heads, groups, width, cap, alibi) in FLASH.items():
        q, k = e(8192, heads, width), e(8192, groups, width)
        spans, lse = e(4, 8192, dtype=I32), e(heads, 8192, dtype=F32)
        one = e(heads, dtype=F32)
        slopes, sinks = one if alibi else None, one if name == "gpt-oss" else None
        label, quick = f"flash {name}, {heads}/{groups} heads of {width}", name == "MPT 7B"
        yield Case(label, partial(flash.forward, q, k, k, spans, cap, slopes, sinks), quick)
        yield Case(label, partial(flash.backward, q, q, k, k, q, lse, spans, cap, slopes), quick)


def writes() -> Iterator[Case]:
    """A step's keys and values on their way to the pool, from a merged product whose queries and keys are turned."""
    meta = torch.device("meta")
    for kind, turned in (("", 0), ("", 128), ("int8", 128), ("int4", 128), ("fp8", 128)):
        shape = (1, 8, 65536, 128)

        def call(kind=kind, shape=shape, turned=turned):
            stores = [KINDS[kind](shape, meta) if kind else e(*shape) for _ in range(2)]
            q, k, v = (t.transpose(1, 2) for t in e(1, 64, 48, 128).split([32, 8, 8], 2))
            rope = (e(64, 1, turned), e(64, 1, turned)) if turned else None
            paged_store.store_tokens(*stores, e(64, dtype=torch.int64), k, v, q if turned else None, rope)

        label = f"write {kind or 'plain'}{' turned' if turned else ''} 64 tokens, 32/8 heads of 128"
        yield Case(label, call, turned > 0 and kind in ("", "int4"))


def main() -> None:
    """Compile, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--skip", default="\0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as", dest="name", default="after", help="the name of these rows in the file")
    args = parser.parse_args()
    every = (*norms(), *elementwise(), *updates(), *encodings(), *peaks(), *gathered(), *products(), *adapters(),
             *skinny_products(), *training(), *writes(), *paged())  # fmt: skip
    cases = [c for c in every if any(name in c.label for name in args.only)]
    cases = [c for c in cases if args.skip not in c.label and (c.quick or not args.quick)]
    rows, start = [], time.time()
    for capability in args.capabilities:
        labels: list[str] = []
        with compiling(capability) as calls:
            for case in cases:
                if case.label.startswith("float8") and capability < 89:
                    continue
                if case.label.startswith("skinny") and capability != 90:
                    continue
                case.call()
                labels += [case.label] * (len(calls) - len(labels))
        for label, kernel in zip(labels, measured(calls), strict=True):
            rows.append({"case": label, **kernel.row()})
            if not args.json:
                r = rows[-1]
                print(f"sm_{capability} {label:52s} {r['kernel']:26s} warps {r['warps']} registers "
                      f"{r['registers']:3d} spilled {r['spilled']:5d} shared {r['shared']:6d} instructions "
                      f"{r['instructions']:5d} loop {r['loop']:5d} tensor {r['tensor']:3d} async "
                      f"{r['asynchronous']:3d} loads {r['loads']} {r['seconds']} s", flush=True)  # fmt: skip
    if args.json:
        json.dump(rows, sys.stdout)
    else:
        print(f"{len(rows)} kernels in {time.time() - start:.0f} s")
    if args.out:
        write(args.out, args.name, rows)


def write(path: Path, name: str, rows: list[dict[str, object]]) -> None:
    """Put rows under ``name`` into a file, one a line, in place of those of the same cases."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    again = {(row["case"], row["capability"]) for row in rows}
    known = held.get(name, {}).get("rows", [])
    rows = [*(row for row in known if (row["case"], row["capability"]) not in again), *rows]
    held[name] = {"torch": torch.__version__, "triton": triton.__version__, "environment": fingerprint(), "rows": rows}
    parts = []
    for key, value in held.items():
        about = json.dumps({k: v for k, v in value.items() if k != "rows"})
        lines = ",\n  ".join(json.dumps(row) for row in value["rows"])
        parts.append(f'"{key}": {about[:-1]}, "rows": [\n  {lines}]}}')
    path.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
