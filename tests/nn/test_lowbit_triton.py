"""Products with low-bit codes in Triton (its interpreter, where there is no GPU), against the expanded weight."""

from itertools import product as product_of

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.nn.test_packed_linear import record, rows

from ridgeline.nn.kernels import e2m1, e4m3, lowbit_matmul
from ridgeline.nn.kernels.lowbit_matmul import MANY_ROWS, float8_product, lowbit_product
from ridgeline.nn.quant.codec import E4M3
from ridgeline.nn.quant.codes import Stripes, counters
from ridgeline.nn.quant.packed import E2M1, Packed


def product(x, codes, bias=None, dtype=None):
    c = codes.to(DEVICE)
    return lowbit_product(x.to(DEVICE), c.words, c.scale, c.zero, c.bits, c.center, c.group, c.stripe, c.arrived,
                          None if bias is None else bias.to(DEVICE), dtype).cpu()  # fmt: skip


def off(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("out", "width", "group"), [(40, 512, 64), (33, 96, 32), (16, 80, 80), (70, 256, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_product(bits, out, width, group, symmetric):
    p = record(out, width, bits, group, symmetric)
    codes, bias = Stripes(p), torch.randn(out, generator=torch.Generator().manual_seed(2))
    assert torch.equal(codes.rows(0, out, torch.float32), p.dense())
    dtypes = (torch.bfloat16, torch.float16) if symmetric else (torch.float16, torch.bfloat16)
    for m, dtype in product_of((1, 18), dtypes) if DEVICE == "cuda" else zip((1, 18), dtypes, strict=True):
        x = rows(m, width).to(dtype)
        want = F.linear(x.double(), p.dense(torch.float64), bias.double())
        assert off(product(x, codes, bias, torch.float32), want) < 1e-5  # sums and weights are not rounded
        if m > 1 or DEVICE == "cuda":  # the interpreter, which has only fp32 inside, truncates the results to bf16
            assert off(product(x, codes, bias), want) < 2**-7
    x = rows(3, width)  # fp32: expanded
    close = 1e-5 if DEVICE == "cpu" else 2e-3  # tensor cores round fp32 operands
    assert off(product(x, codes), F.linear(x.double(), p.dense(torch.float64))) < close


def test_many_rows_take_the_expanded_weight():
    p = record(40, 512, 4, 64, False)
    x = rows(MANY_ROWS + 1, 512).bfloat16()
    assert off(product(x, Stripes(p)), F.linear(x.double(), p.dense(torch.float64))) < 1e-2


def test_splits_of_the_inputs_are_added_and_counters_return_to_zero(monkeypatch):
    p = record(70, 2048, 4, 128, True)
    codes, x = Stripes(p), rows(lowbit_matmul.FEW_ROWS + 1, 2048).bfloat16()
    want = F.linear(x.double(), p.dense(torch.float64))
    first = product(x, codes, dtype=torch.float32)
    assert off(first, want) < 1e-5
    assert not codes.arrived.any()
    assert torch.equal(product(x, codes, dtype=torch.float32), first)
    monkeypatch.setattr(lowbit_matmul, "processors", lambda device: 0)  # not split
    assert off(product(x, codes, dtype=torch.float32), want) < 1e-5


def test_parts_of_stripes(monkeypatch):
    """Half of a stripe's words at a time, with more rows than fit one program of few."""
    p = record(40, 1024, 4, 128, False)
    x = rows(9, 1024).bfloat16()
    want = F.linear(x.double(), p.dense(torch.float64))
    for words in (32, 64):
        how = lowbit_matmul.Launch(128, 16, 64, 4, 2, 1, words)
        monkeypatch.setitem(lowbit_matmul.LAUNCHES, 64, (how,))
        assert off(product(x, Stripes(p), dtype=torch.float32), want) < 1e-5


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_parts_are_those_of_the_weight(bits, symmetric):
    p = record(64, 512, bits, 64, symmetric)
    codes, dense = Stripes(p), p.dense()
    assert torch.equal(codes.part(0, 16, 48).rows(0, 32, torch.float32), dense[16:48])
    half = codes.part(1, 256, 512)
    assert torch.equal(half.rows(0, 64, torch.float32), dense[:, 256:])
    x = rows(2, 256).bfloat16()
    assert off(product(x, half, dtype=torch.float32), F.linear(x.double(), dense[:, 256:].double())) < 1e-5
    assert torch.equal(codes.part(1, 32, 96).rows(0, 64, torch.float32), dense[:, 32:96])  # within groups


@pytest.mark.parametrize("m", [2, MANY_ROWS + 1])
def test_scales_that_are_columns_of_wider_matrices(m):
    """As merged projections have them."""
    codes, x = Stripes(record(40, 64, 4, 32, False)), rows(m, 64).bfloat16()
    want = product(x, codes)
    scale, zero = (torch.cat([t, t, t], 1)[:, 40:80] for t in (codes.scale, codes.zero))
    for held in (zero, codes.zero):  # the latter of another stride
        got = lowbit_product(x.to(DEVICE), codes.words.to(DEVICE), scale.to(DEVICE), held.to(DEVICE), codes.bits,
                             codes.center, codes.group, codes.stripe, codes.arrived.to(DEVICE)).cpu()  # fmt: skip
        assert torch.equal(got, want)
    assert product(x[:0], codes).shape == (0, 40)


def test_few_outputs_with_many_rows():
    p = record(16, 64, 2, 32, True)
    x = rows(100, 64).bfloat16()
    assert off(product(x, Stripes(p), dtype=torch.float32), F.linear(x.double(), p.dense(torch.float64))) < 1e-5


def test_whole_numbers_are_multiplied_exactly():
    p = record(24, 64, 8, 32, True)
    q = torch.randint(-127, 128, (MANY_ROWS + 1, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    close = 1e-5 if DEVICE == "cpu" else 2e-3
    assert off(product(q, Stripes(p), dtype=torch.float32), F.linear(q.double(), p.dense(torch.float64))) < close


@pytest.mark.parametrize(("assembly", "dtype"), [(e4m3.TO_BF16, torch.bfloat16), (e4m3.TO_F16, torch.float16)])
def test_assembly_widens_all_float8_codes_exactly(assembly, dtype):
    """What Triton's interpreter does not run: the instructions one by one (PTX ISA), from every place in a word. NaN
    becomes the number beyond the largest."""
    codes = torch.arange(256, dtype=torch.uint8)
    for place in range(4):
        given = torch.stack([codes.roll(i - place) for i in range(4)], 1).contiguous()
        assert torch.equal(given[:, place], codes)
        held = carried_out(assembly.value, {"$2": given.view(torch.int32).flatten().long() & ONES}, dtype)
        got = torch.stack([held["$0"], held["$1"]], 1).to(torch.int32).view(dtype).float()
        want = given.view(E4M3).float()
        want = torch.where((given & 127) == 127, torch.where(given == 127, 480.0, -480.0), want)
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), want.signbit())


ONES = (1 << 32) - 1


def carried_out(assembly, given, dtype):
    """Registers, as int64 tensors of one length, behind some of PTX's instructions on those that are ``given``."""
    held, word = dict(given), next(iter(given.values()))
    plain = {"shr.u32": torch.bitwise_right_shift, "and.b32": torch.bitwise_and, "mov.b32": torch.clone}

    def value(name):
        return held[name] if name in held else torch.full_like(word, int(name, 0))

    for line in filter(None, (part.strip(" {}\n") for part in assembly.split(";"))):
        op, _, rest = line.partition(" ")
        if op == ".reg":
            continue
        to, *names = (name.strip() for name in rest.split(","))
        given = [value(name) for name in names]
        if op == "prmt.b32":
            sources = [(g >> 8 * i) & 255 for g in given[:2] for i in range(4)]
            held[to] = sum(sources[(int(given[2][0]) >> 4 * i) & 7] << 8 * i for i in range(4))
        elif op.startswith("fma.rn."):
            a, b, c = (g.to(torch.int32).unsqueeze(1).view(dtype).double() for g in given)
            held[to] = (a * b + c).to(dtype).view(torch.int32).flatten().long() & ONES
        elif op == "lop3.b32":
            assert names[3] == "0xea"
            held[to] = given[0] & given[1] | given[2]
        else:
            held[to] = plain[op](*given)
    return held


@pytest.mark.parametrize(("assembly", "dtype"), [(e2m1.TO_BF16, torch.bfloat16), (e2m1.TO_F16, torch.float16)])
def test_assembly_widens_all_e2m1_codes_exactly(assembly, dtype):
    """Of every place in two words, whatever the other codes are."""
    g = torch.Generator().manual_seed(0)
    words = torch.randint(1 << 32, (2, 512), generator=g)
    for at in range(8):
        codes = (words >> 4 * at) & 15
        assert codes.unique().numel() == 16
        upper = (words << 4) & ONES if at % 2 == 0 else words
        given = {"$1": upper[0], "$2": upper[1], "$3": torch.full_like(upper[0], 0x4400 + 0x1111 * (at // 2))}
        got = carried_out(assembly.value, given, dtype)["$0"].to(torch.int32).view(dtype).view(-1, 2).t().float()
        want = E2M1[codes]
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), want.signbit())


def test_all_float8_codes_are_widened_exactly():
    """NaN apart, which no weight is: each code times each of eight unit vectors."""
    for dtype in (torch.bfloat16, torch.float16):
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16).to(DEVICE)
        codes[127], codes[255] = 0, 0
        x = torch.eye(16, dtype=dtype)[:8].to(DEVICE)
        arrived = counters(256, codes.device)
        got = float8_product(x, codes.view(E4M3), torch.ones(256, 1, device=DEVICE), arrived)
        assert torch.equal(got.float(), codes.view(E4M3).float().T[:8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 70, 272), (8, 16, 1024), (9, 200, 528), (40, 33, 128), (129, 24, 144)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_float8_codes(dtype, m, n, k, biased):
    """Few rows, more, whose inputs are divided, and those of an expanded weight, which is rounded; odd sizes, and each
    output with a scale of its own, from 2^-12 to 1."""
    codes, scales, bias = float8(n, k)
    x, arrived = rows(m, k).to(DEVICE, dtype), counters(n, codes.device)
    got = float8_product(x, codes, scales, arrived, bias.to(dtype) if biased else None)
    assert (got.shape, got.dtype) == ((m, n), dtype)
    assert not arrived.any()
    w = codes.double() * scales.double()
    want = F.linear(x.double(), w, bias.to(dtype).double() if biased else None)
    added = F.linear(x.double().abs(), w.abs(), bias.abs().double())
    eps = torch.finfo(dtype).eps  # of the result, which the interpreter truncates; and half of it of each weight
    most = eps * want.abs() + (2.0**-20 + (eps / 2 if m > MANY_ROWS else 0)) * added
    assert ((got.double() - want).abs() <= most).all()


def test_nan_among_float8_codes_stays_in_its_output():
    """Such a code is no weight: what it makes is a number, and of its own output alone."""
    codes, scales, _ = float8(20, 64)
    x = rows(5, 64).to(DEVICE, torch.bfloat16)
    want = float8_product(x, codes, scales, counters(20, codes.device))
    codes.view(torch.uint8)[3, 5] = 127
    got = float8_product(x, codes, scales, counters(20, codes.device))
    assert torch.equal(got[:, [0, 1, 2, *range(4, 20)]], want[:, [0, 1, 2, *range(4, 20)]])
    assert got.isfinite().all()


def float8(n, k):
    """Codes of a weight [n, k], a scale for each row, and a bias."""
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    scales = torch.logspace(-12, 0, n, 2.0).view(n, 1)
    return codes.view(E4M3).to(DEVICE), scales.to(DEVICE), torch.randn(n, generator=g).to(DEVICE)


def e2m1_record(out, width, least=118, most=132):
    """Codes of 4-bit floating point with exponents from ``least`` to ``most``."""
    g = torch.Generator().manual_seed(out)
    codes = torch.randint(16, (out, width), generator=g, dtype=torch.int32).to(torch.uint8)
    scale = torch.randint(least, most + 1, (out, width // 32), generator=g, dtype=torch.int32).to(torch.uint8)
    return Packed(codes, scale, None, 4, 32, floating=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "width"), [(40, 512), (33, 96), (20, 1440)])
def test_products_of_e2m1_codes(dtype, out, width):
    """One row, a few, more, whose inputs are divided, and those of an expanded weight, which is exact; blocks that are
    filled up, and scales that are read as words or, of odd numbers of outputs, as bytes."""
    p = e2m1_record(out, width)
    codes, bias = Stripes(p), torch.randn(out, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(codes.rows(0, out, torch.float32), p.dense())
    w = p.dense(torch.float64)
    for m in (1, 5, 18, MANY_ROWS + 1):
        x = rows(m, width).to(dtype)
        got = product(x, codes, bias, torch.float32)
        want, added = F.linear(x.double(), w, bias.double()), F.linear(x.double().abs(), w.abs(), bias.double().abs())
        close = 2.0**-20 if DEVICE == "cpu" or m <= MANY_ROWS else 2.0**-9  # tensor cores round fp32 operands
        assert ((got.double() - want).abs() <= close * added).all()
        assert not codes.arrived.any()
    assert product(x[:0], codes).shape == (0, out)


@pytest.mark.parametrize("out", [255, 508])
def test_every_scale_of_e2m1_codes_is_exact(out):
    """Each exponent but that of NaN, read as a byte and as a part of a word; sums of one product are not rounded."""
    p = e2m1_record(out, 32)
    p.scale[:, 0] = torch.arange(out) % 255
    p.codes[p.scale[:, 0] > 252] = 2  # 1: larger numbers times the largest scales would be infinite
    x = torch.eye(32)[[1, 30]].bfloat16()
    want = p.dense(torch.float64).t()[[1, 30]].float()
    assert want.isfinite().all()
    assert torch.equal(product(x, Stripes(p), dtype=torch.float32), want)


def test_parts_of_e2m1_codes_are_those_of_the_weight():
    p = e2m1_record(64, 512)
    codes, dense = Stripes(p), p.dense()
    assert torch.equal(codes.part(0, 16, 48).rows(0, 32, torch.float32), dense[16:48])
    for start, stop in ((256, 512), (32, 96), (16, 64)):  # the last one within a block
        part, x = codes.part(1, start, stop), rows(2, stop - start).bfloat16()
        assert torch.equal(part.rows(0, 64, torch.float32), dense[:, start:stop])
        want = F.linear(x.double(), dense[:, start:stop].double())
        assert off(product(x, part, dtype=torch.float32), want) < 1e-5
