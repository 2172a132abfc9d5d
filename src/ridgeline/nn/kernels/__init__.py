"""Fused kernels, compiled C++ on the CPU and Triton on CUDA, and the autograd functions that use them."""
