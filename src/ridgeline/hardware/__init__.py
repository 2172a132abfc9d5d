"""Chips as data: what a design gives (peaks, bandwidths) and takes (area, dollars, watts), by arithmetic.

``search.designs`` sweeps a space of designs on the predictor; ``validate.hardware`` compares with published figures.
"""
