"""Solvers of layer-wise compression: a weight and its inputs' second moments in, a cheaper weight out.

Notation: a linear layer y = x Wᵀ with W [out, in]; H = (2/n) Xᵀ X [in, in] over n calibration inputs X [n, in]. What is
minimized is the layer error tr((W - Q) H (W - Q)ᵀ) = 2/n · |X (W - Q)ᵀ|².
"""
