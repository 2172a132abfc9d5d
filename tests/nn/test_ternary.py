import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from ridgeline.nn.quant import ternary
from ridgeline.nn.quant.ternary import PAIRS, WORDS, ZEROS, Ternary, dictionary


def drawn(out, width, zeros, seed=0):
    u = torch.rand(out, width, generator=torch.Generator().manual_seed(seed))
    return torch.where(u < zeros, 0, torch.where(u < (1 + zeros) / 2, 1, 2)).to(torch.uint8)


def coded(symbols, seed=0, dtype=torch.float16):
    g = torch.Generator().manual_seed(seed)
    low, high = -torch.rand(len(symbols), generator=g), torch.rand(len(symbols), generator=g)
    return Ternary.encode(symbols, low.to(dtype), high.to(dtype))


def words():
    book = dictionary()
    return [tuple(s[:n].tolist()) for s, n in zip(book.symbols, book.lengths, strict=True)]


def probability(word):
    return math.prod(ZEROS if s == 0 else (1 - ZEROS) / 2 for s in word)


def test_dictionary_holds_the_most_probable_sequences():
    all_words = words()
    known = set(all_words)
    assert len(known) == WORDS
    assert max(map(len, all_words)) == 2 * PAIRS
    chances = [probability(w) for w in all_words]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(chances))
    pairs = [(a, b) for a in range(3) for b in range(3)]
    for word in all_words[:: WORDS // 500]:  # a word's beginnings are words; what is left out is less probable
        assert len(word) == 2 or word[:-2] in known
        if len(word) < 2 * PAIRS:
            outside = [probability(word + p) for p in pairs if word + p not in known]
            assert all(p <= chances[-1] * (1 + 1e-9) for p in outside)


def test_words_are_the_longest_that_fit():
    all_words = words()
    known = set(all_words)
    symbols = drawn(3, 60, 0.8)
    code = coded(symbols)
    for row in range(3):
        at, found = 0, []
        while at < 60:
            at_end = at + 2
            while at_end + 2 <= min(60, at + 2 * PAIRS) and tuple(symbols[row, at : at_end + 2].tolist()) in known:
                at_end += 2
            found.append(tuple(symbols[row, at:at_end].tolist()))
            at = at_end
        start, stop = code.offsets[row : row + 2].tolist()
        numbers = code.codes[start:stop].int() & 0xFFFF
        assert [all_words[n] for n in numbers] == found


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.885, 1.0])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (5, 7), (3, 28), (4, 29), (9, 300)])
def test_lossless(out, width, zeros):
    symbols = drawn(out, width, zeros)
    code = coded(symbols)
    assert torch.equal(code.symbols(), symbols)
    values = [(0.0, low, high) for low, high in zip(code.low.tolist(), code.high.tolist(), strict=True)]
    expected = torch.tensor([[values[i][s] for s in row] for i, row in enumerate(symbols.tolist())])
    assert torch.equal(code.dense(), expected)
    middle = code.rows(out // 2, out)
    assert torch.equal(middle.dense(), expected[out // 2 :])


def test_rows_are_encoded_in_pieces_alike(monkeypatch):
    symbols = drawn(40, 50, 0.8)
    whole = coded(symbols)
    monkeypatch.setattr(ternary, "EXPANDED", 70)
    pieces = coded(symbols)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.offsets, pieces.offsets)


@pytest.mark.parametrize(("zeros", "most"), [(0.95, 0.65), (0.885, 0.78), (0.83, 1.0)])
def test_bits(zeros, most):
    """Below one bit from about 83 % zeros on; within a fifth of the entropy where the dictionary was made for."""
    code = coded(drawn(64, 4096, zeros))
    share = torch.tensor([zeros, (1 - zeros) / 2, (1 - zeros) / 2])
    entropy = -(share * share.log2()).sum().item()
    assert entropy < code.bits_per_weight < most
    stored = code.codes.nbytes + code.offsets.nbytes + 2 * 64 * 2
    assert code.bits_per_weight == 8 * stored / (64 * 4096)
    if zeros == ZEROS:
        assert 16 * len(code.codes) / (64 * 4096) < 1.2 * entropy


def test_rows_of_at_least_288_stay_below_a_bit():
    assert coded(drawn(256, 288, ZEROS)).bits_per_weight < 1
    assert coded(drawn(256, 256, ZEROS)).bits_per_weight > 1  # a row's offset and values weigh a quarter of a bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_decodes_a_block_of_rows_at_a_time(monkeypatch, dtype):
    code = coded(drawn(37, 64, 0.8))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    most = 0
    inner = Ternary.dense

    def dense(self, to):
        nonlocal most
        most = max(most, len(self.low))
        return inner(self, to)

    monkeypatch.setattr(ternary, "EXPANDED", 64 * 8)
    expected = F.linear(x, code.dense(dtype))
    monkeypatch.setattr(Ternary, "dense", dense)
    torch.testing.assert_close(code.product(x), expected)
    assert most == 8
