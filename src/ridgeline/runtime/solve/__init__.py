"""Solvers of layer-wise compression: they map a weight and its inputs' second moments to a compressed weight.

Notation: a linear layer y = x Wᵀ with W [out, in]; H = (2/n) Xᵀ X [in, in] over n calibration inputs X [n, in]. The
objective is the layer error tr((W - Q) H (W - Q)ᵀ) = 2/n · |X (W - Q)ᵀ|².
"""
