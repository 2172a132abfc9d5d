"""Automatic parallelization: strategies for every operator and every stage, found on the predictor's costs."""
