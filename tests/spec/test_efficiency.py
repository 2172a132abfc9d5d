from ridgeline import catalog
from ridgeline.spec.efficiency import DecodeConstants, Efficiency, GemmConstants, PrefillConstants


def test_device_files_of_before_still_load():
    old = {"quantise_latency": 1e-6, "quantise_share": 0.8, "dequantise_share": 0.9, "tile_128": 0.8}
    assert GemmConstants(**old) == GemmConstants(quantize_latency=1e-6, quantize_share=0.8, dequantize_share=0.9)
    assert PrefillConstants(narrow=True, tail=0.4) == PrefillConstants(narrow="cache")
    assert DecodeConstants(pull=1.2, split_unshared=True) == DecodeConstants()


def test_8_bit_kernels_take_what_they_do_not_give_from_the_16_bit_ones():
    e = Efficiency.model_validate({
        "gemm": {"bf16": {"share": 0.8, "latency": 2e-6}, "fp8": {"share": 0.7}},
        "decode": {"flash": {"tile": 64.0, "block": 1e-6}, "flash.fp8": {"block": 2e-6}},
    })  # fmt: skip
    assert e.gemm["fp8"] == GemmConstants(share=0.7, latency=2e-6)
    assert e.decode["flash.fp8"] == DecodeConstants(tile=64.0, block=2e-6)


def test_an_architecture_like_another_says_only_what_differs():
    blackwell, hopper = catalog.architecture("blackwell"), catalog.architecture("hopper")
    own = blackwell.collective.nvls_share
    assert own != hopper.collective.nvls_share
    assert blackwell.collective == hopper.collective.model_copy(update={"nvls_share": own})
    assert blackwell.gemm["bf16"].load_bytes_per_clock > hopper.gemm["bf16"].load_bytes_per_clock
    assert blackwell.gemm["fp8"].share == hopper.gemm["fp8"].share
    assert hopper.fitted_on
    assert not blackwell.fitted_on
    assert not blackwell.spread
