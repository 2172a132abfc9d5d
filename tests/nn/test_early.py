"""What kernels that start early fetch ahead, and which do, in Triton's interpreter."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.test_lowbit_triton import e2m1_record
from tests.nn.test_packed_linear import record, rows
from tests.nn.test_paged_triton import step

from ridgeline.nn.kernels import (
    gemv,
    gpu,
    gpu_norms,
    lowbit_matmul,
    paged_attention,
    paged_rows,
    paged_store,
    skinny,
    target,
)
from ridgeline.nn.quant.codes import Stripes, counters

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="addresses are recorded in Triton's interpreter")


class Early:
    """A kernel as it is launched where kernels start early."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return partial(self.kernel[grid], EARLY=True)


@pytest.fixture
def fetched(monkeypatch):
    """Addresses that are fetched ahead, as (first, last) of each call; all kernels start early."""
    found = []

    def prefetch(place):
        found.append((int(place.handle.data.min()), int(place.handle.data.max())))

    for module, names in (
        (gemv, ["_product_of_row"]), (gpu_norms, ["_add_norm"]), (lowbit_matmul, ["_few", "_tiles"]),
        (paged_attention, ["_attend", "_attend_few"]), (paged_rows, []), (paged_store, ["_write"]),
        (skinny, ["_product_of_rows"]),
    ):  # fmt: skip
        if module is not paged_attention:  # whose kernels fetch by what they share
            monkeypatch.setattr(module, "prefetch", prefetch)
        monkeypatch.setattr(module, "wait", lambda early: None)
        for name in names:
            monkeypatch.setattr(module, name, Early(getattr(module, name)))
    return found


@contextmanager
def within(found, *tensors):
    """What is fetched lies in these tensors, and something of each of them is fetched."""
    yield
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    reached = {next((i for i, (a, b) in enumerate(spans) if a <= x and y < b), None) for x, y in found}
    assert reached == {*range(len(spans))}


@pytest.mark.parametrize(("n", "k"), [(13, 8), (3, 1544), (17, 520)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_fetches_lines_of_the_weight(fetched, n, k, gated):
    x, w = torch.randn(1, k).bfloat16(), torch.randn(2 * n if gated else n, k).bfloat16()
    with within(fetched, w):
        gemv.product_of_row(x, w, gated=gated)


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("out", "width", "group"), [(33, 96, 32), (16, 80, 80), (70, 2048, 128), (24, 512, 512)])
def test_low_bit_products_fetch_words_and_scales(fetched, m, bits, out, width, group):
    codes = Stripes(record(out, width, bits, group, True))
    with within(fetched, codes.words, codes.scale):
        lowbit_matmul.lowbit_product(rows(m, width).half(), codes.words, codes.scale, None, codes.bits, codes.center,
                                     codes.group, codes.stripe, codes.arrived)  # fmt: skip


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize(("out", "width"), [(33, 96), (24, 512)])
def test_products_with_e2m1_codes_fetch_words_and_scales(fetched, m, out, width):
    codes = Stripes(e2m1_record(out, width))
    with within(fetched, codes.words, codes.scale):
        lowbit_matmul.lowbit_product(rows(m, width).half(), codes.words, codes.scale, None, codes.bits, codes.center,
                                     codes.group, codes.stripe, codes.arrived)  # fmt: skip


@pytest.mark.parametrize("m", [2, 9])
@pytest.mark.parametrize(("n", "k"), [(33, 16), (70, 2048)])
def test_products_with_float8_codes_fetch_codes_and_scales(fetched, m, n, k):
    codes, scales = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n, 1)
    with within(fetched, codes, scales):
        lowbit_matmul.float8_product(rows(m, k).half(), codes, scales, counters(n, codes.device))


@pytest.mark.parametrize(("n", "k"), [(33, 16), (70, 2048)])
def test_products_of_codes_with_codes_fetch_lines_of_the_weight(fetched, n, k):
    x, codes = (torch.randn(rows, k).to(torch.float8_e4m3fn) for rows in (9, n))
    with within(fetched, codes):
        skinny.product_of_coded_rows(x, torch.ones(9, 1), codes, torch.ones(n, 1), counters(n, codes.device),
                                     torch.bfloat16)  # fmt: skip


@pytest.mark.parametrize("n", [5, 64, 520])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_fetch_their_weight(fetched, n, dtype):
    x, w = torch.randn(3, n), torch.ones(n, dtype=dtype)
    with within(fetched, w):
        gpu.rl_add_norm(False, x, 0, None, 0, w, 0, None, x, torch.empty_like(x), 0, None, torch.empty(3), 3, n, 1e-5)


@pytest.mark.parametrize("turned", [0, 2, 16])
def test_writes_fetch_slots_and_angles(fetched, turned):
    stores = [torch.zeros(1, 2, 32, 16) for _ in range(2)]
    k, v, q = (torch.randn(1, heads, 3, 16) for heads in (2, 2, 6))
    slots = torch.tensor([4, 9, 31])
    rope = tuple(torch.ones(3, 1, turned) for _ in range(2))
    with within(fetched, slots, *(rope if turned else ())):
        paged_store.store_tokens(*stores, slots, k, v, *((q, rope) if turned else ()))


@pytest.mark.parametrize("kind", ["", "int8"])
def test_attention_fetches_where_keys_are(fetched, kind):
    q, stores, _, _, pages = step(4, 1, 16, 16, kind)
    with within(fetched, *(w.items for w in pages.work), pages.lengths, pages.starts, pages.table):
        paged_attention.paged_attention(q, *stores, pages)


@pytest.mark.parametrize(("backend", "arch", "capability"), [("cuda", 90, 90), ("hip", "gfx942", 0)])
def test_only_nvidias_gpus_have_a_capability(backend, arch, capability):
    from triton.backends.compiler import GPUTarget

    class Driver:
        """Says which device there is."""

        def get_current_target(self):
            return GPUTarget(backend, arch, 64)

    assert target._of(Driver(), 0) == capability
