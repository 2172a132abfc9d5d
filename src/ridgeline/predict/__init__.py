"""The analytic predictor: times the graph, computes its memory, returns a Result."""

from ridgeline.predict.predict import predict, predict_trace, without_effect

__all__ = ["predict", "predict_trace", "without_effect"]
