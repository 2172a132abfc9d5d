from ridgeline.spec.efficiency import GemmConstants


def test_device_files_of_before_still_load():
    old = {"quantise_latency": 1e-6, "quantise_share": 0.8, "dequantise_share": 0.9}
    assert GemmConstants(**old) == GemmConstants(quantize_latency=1e-6, quantize_share=0.8, dequantize_share=0.9)
