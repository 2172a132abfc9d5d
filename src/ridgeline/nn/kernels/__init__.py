"""Fused kernels: compiled C++ on the CPU (:mod:`native`), and the autograd functions over them (:mod:`functions`)."""
