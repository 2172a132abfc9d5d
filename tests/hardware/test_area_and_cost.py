"""Area, yield, cost and verdicts against published figures (LLMCompass, arXiv:2312.03134) and against arithmetic."""

import math

import pytest

from ridgeline.catalog import chips
from ridgeline.hardware.area import die_mm2, sram_mm2, total_mm2, transistors
from ridgeline.hardware.cost import clean, cost, dies_per_wafer, verdict, yielded
from ridgeline.hardware.device import energy, power, watts
from ridgeline.spec.errors import UserError
from ridgeline.validate import hardware_figures as published

PAPER, CORRECTED = chips.prices("paper"), chips.prices("2023-10")


@pytest.mark.parametrize("name", published.AREAS)
def test_table_iv(name):
    c = chips.chip(name)
    assert total_mm2(c) == pytest.approx(published.AREAS[name], rel=0.005)
    assert cost(c, PAPER, "none").die == pytest.approx(published.DIE_DOLLARS[name], rel=0.01)


def test_both_verdicts_on_the_throughput_design():
    base, design = chips.chip("ga100"), chips.chip("llmcompass-throughput")
    then = verdict(1.42, cost(design, PAPER, "none"), cost(base, PAPER, "none"))
    now = verdict(1.42, cost(design, CORRECTED, "none"), cost(base, CORRECTED, "none"))
    assert then.ratio == pytest.approx(3.41, rel=0.01)
    assert now.ratio == pytest.approx(0.74, rel=0.01)
    assert now.break_even["ddr5"] * 2.4 == pytest.approx(1.69, rel=0.01)  # $/GB at which it is worth the GA100
    assert not now.stands, "half the DDR5 price turns it"


def test_break_even_is_where_both_are_worth_the_same():
    base, design = (cost(chips.chip(n), CORRECTED) for n in ("a100-80g-sxm", "llmcompass-throughput"))
    found = verdict(1.5, design, base)
    assert set(found.halved) == {"wafer", "ddr5", "hbm2e"}
    for kind, factor in found.break_even.items():
        at = {kind: factor}
        assert 1.5 * base.at(**at).total == pytest.approx(design.at(**at).total)
    for kind, value in found.doubled.items():
        at = {kind: 2.0}
        assert value == pytest.approx(1.5 * base.at(**at).total / design.at(**at).total)


def test_buffers_grow_as_published():
    base = chips.chip("ga100")

    def local(kib):
        return total_mm2(base.model_copy(update={"core": base.core.model_copy(update={"sram_bytes": kib * 1024})}))

    def shared(mib):
        return total_mm2(base.model_copy(update={"cache_bytes": mib * 2**20}))

    assert local(192) / local(64) - 1 == pytest.approx(0.058, abs=0.003)
    assert local(1024) / local(192) - 1 == pytest.approx(0.288, abs=0.003)
    assert shared(40) / shared(10) - 1 == pytest.approx(0.096, abs=0.003)
    assert shared(80) / shared(40) - 1 == pytest.approx(0.117, abs=0.003)
    assert sum(die_mm2(base).values()) == total_mm2(base)


def test_no_buffer_is_smaller_than_one_of_fewer_bytes():
    process = chips.process("n7")
    areas = [sram_mm2(1024 * size, process) for size in range(1, 1100)]
    assert areas == sorted(areas)


def test_units_scale_with_the_square_of_the_mantissa():
    assert transistors("fp64") / transistors("fp16") == pytest.approx((52 / 10) ** 2)


def test_memory_is_built_of_blocks_of_512_kib():
    p = chips.process("n7")
    assert sram_mm2(2**21, p) == pytest.approx(4 * sram_mm2(2**19, p))
    assert sram_mm2(1000, p) == sram_mm2(4096, p), "no smaller block"


def test_dies_per_wafer_by_hand():
    assert dies_per_wafer(100.0) == math.floor(math.pi * 150**2 / 100 - math.pi * 300 / math.sqrt(200))


def test_yields():
    c = chips.chip("a100-80g-sxm")
    p, area = chips.process("n7"), total_mm2(c)
    assert clean(area, p) == pytest.approx((1 + area * 0.0015 / 3) ** -3)
    assert yielded(c, "none") == 1.0
    assert yielded(c, "plain") == pytest.approx(0.354, abs=0.002)
    assert yielded(c, "spare") == pytest.approx(0.71, abs=0.01), (
        "20 spare cores of 128 repair nearly all of their defects"
    )
    whole = c.model_copy(update={"cores": 128})
    assert yielded(whole, "spare") == yielded(whole, "plain"), "no spares"
    spares = [yielded(c.model_copy(update={"cores": n}), "spare") for n in (128, 126, 124, 120, 108)]
    assert spares == sorted(spares)
    with pytest.raises(UserError, match="yield model 'best'"):
        yielded(c, "best")


def test_a_price_that_nobody_gave_is_not_zero():
    found = cost(chips.chip("h100-sxm"), CORRECTED)
    assert found.die > 0
    with pytest.raises(UserError, match="no price of hbm3"):
        _ = found.memory


def test_energy_of_operations_is_the_powers():
    for name in chips.chips():
        c = chips.chip(name)
        joules, parts = energy(c), power(c)
        assert parts["memory"] == pytest.approx(joules["byte of memory"] * c.memory.bandwidth)
        assert parts["arithmetic"] == pytest.approx(
            joules["16-bit FLOP"] * max(c.peak_flops.get("bf16", 0), c.peak_flops.get("fp32", 0))
        )
        if c.links is not None:
            both = 2 * c.links.count * c.links.bandwidth
            assert parts["links"] == pytest.approx(joules["byte over a link"] * both)
        # a byte from memory costs tens of FLOPs: why a roofline is one of energy, too
        assert 10 < joules["byte of memory"] / joules["16-bit FLOP"] < 1000


def test_power_is_calibrated_on_rated_chips():
    for name in ("a100-80g-sxm", "h100-sxm"):
        c = chips.chip(name)
        assert watts(c) == c.watts
        assert sum(power(c).values()) == pytest.approx(c.watts, rel=0.02)
    half = chips.chip("llmcompass-latency")
    assert power(half)["arithmetic"] == pytest.approx(power(chips.chip("ga100"))["arithmetic"] / 2)
