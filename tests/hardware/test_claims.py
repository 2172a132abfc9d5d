"""Published performance of LLMCompass's designs through the predictor."""

from statistics import fmean, geometric_mean

import pytest

from ridgeline.validate import hardware_figures as published
from ridgeline.validate.hardware_claims import bandwidths, claims_table, cores, dfx, figure_10, figure_12, nlp_fast


def errors(found, published_rows):
    flat = [x for row in published_rows for x in row]
    return [abs(a / b - 1) for a, b in zip(found, flat, strict=True)]


def test_figure_10():
    assert fmean(errors(figure_10(), published.LATENCY_DESIGN)) < 0.055
    assert fmean(errors(figure_10(published.OVERHEAD), published.LATENCY_DESIGN)) < 0.05


def test_figure_12():
    plain = [r for r, _ in figure_12()]
    with_overheads = [r for r, _ in figure_12(published.OVERHEAD)]
    assert fmean(errors(plain, published.THROUGHPUT_DESIGN)) < 0.07
    assert fmean(errors(with_overheads, published.THROUGHPUT_DESIGN)) < 0.05
    assert geometric_mean(with_overheads) == pytest.approx(1.41, rel=0.05)


def test_a_quarter_of_the_arithmetic_slows_prefill_alone():
    found = {c.what: c for c in cores()}
    assert abs(found["figure 7, prefill of A relative to the GA100"].error) < 0.06
    assert abs(found["figure 7, decode of A relative to the GA100"].error) < 0.03


def test_bandwidth_helps_decode():
    found = {c.what: c for c in bandwidths()}
    for span in ("800 to 2000", "2000 to 3200"):
        prefill, decode = (found[f"figure 8, {phase} from {span} GB/s"] for phase in ("prefill", "decode"))
        assert abs(prefill.error) < 0.06
        assert decode.ours > decode.theirs, "without overheads, bandwidth counts more"
        assert abs(found[f"figure 8, decode from {span} GB/s, with its overheads"].error) < decode.error


def test_dfx_is_no_faster_than_a_gpu_that_launches_do_not_bind():
    found = {c.what: c for c in dfx()}
    assert found["speed-up over the GPU"].ours < 1 < found["speed-up over the GPU"].theirs


def test_every_difference_has_a_reason():
    found = [*cores(), *dfx(), *nlp_fast()]
    assert all(c.why for c in found if abs(c.error) > 0.1)
    table = claims_table(found)
    assert len(table.rows) == len(found)
