"""A matrix product as an ONNX model, which the peers' tools read."""

from onnx import TensorProto, helper


def product(m: int, n: int, k: int):
    """The model of inputs [m, k] by a weight [k, n]."""
    tensor, shape = helper.make_tensor_value_info, TensorProto.FLOAT
    weight = helper.make_tensor("W", shape, [k, n], bytes(4 * k * n), raw=True)
    node = helper.make_node("Gemm", ["I", "W"], ["O"], name="product")
    graph = helper.make_graph([node], "product", [tensor("I", shape, [m, k])], [tensor("O", shape, [m, n])], [weight])
    return helper.make_model(graph)
