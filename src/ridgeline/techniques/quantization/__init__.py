"""Post-training quantization of weights, activations and the key/value cache."""
