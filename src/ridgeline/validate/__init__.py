"""Validation of the predictor against measured data sets: one file per schema, one error table for all."""
