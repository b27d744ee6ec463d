"""Graphs as text, from the graph itself and from its data."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchguard._graphs.codec import encode_graph
from torchguard._graphs.listing import arguments_text, line_of, lines_of, listing_of, type_text, value_text


def function(a, b):
    return (a @ b).sum(dim=[0, 1], dtype=torch.float64) * float("inf")


@pytest.fixture
def graph():
    return make_fx(function, tracing_mode="fake")(torch.ones(3, 4), torch.ones(4, 5))


def test_one_operation_a_line_with_arguments_and_type(graph):
    assert [str(line) for line in lines_of(graph)] == [
        "%mm = aten.mm.default(%a_1, %b_1) : f32[3, 5]",
        "%sum_1 = aten.sum.dim_IntList(%mm, [0, 1], dtype=f64) : f64[]",
        "%mul = aten.mul.Tensor(%sum_1, inf) : f64[]",
    ]


def test_the_line_of_a_node_is_that_of_its_data(graph):
    nodes = [node for node in encode_graph(graph)["nodes"] if node["op"] == "call_function"]
    assert [str(line_of(node)) for node in nodes] == [str(line) for line in lines_of(graph)]


def test_a_listing_has_leaves_and_results(graph):
    graph.graph.output_node().args = ([graph.graph.output_node().args[0]],)
    first, *_, last = listing_of(graph, "f").splitlines()
    assert (first, last) == ("f(%a_1: f32[3, 4], %b_1: f32[4, 5]):", "  return %mul: f64[]")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"node": "x"}, "%x"),
        ([1, None, {"float": "-inf"}], "[1, None, -inf]"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"memory_format": "channels_last"}, "torch.channels_last"),
        ({"device": "cuda:0"}, "cuda:0"),
        ({"slice": [None, 2, None]}, "slice(None, 2, None)"),
        ({"dict": {"a": {"node": "x"}}}, "{a=%x}"),
        ({"symbol": "s0 + 1"}, "s0 + 1"),
        ({"text": "<function f>"}, "<function f>"),
        ({"node": "x", "more": 1}, "..."),
        ({"node": ["x"]}, "..."),
    ],
    ids=str,
)
def test_arguments_as_text(data, text):
    assert arguments_text([data], {"key": data}) == f"{text}, key={text}"


def test_arguments_that_are_nested_too_deeply_are_cut():
    data = []
    for _ in range(900):
        data = [data]
    assert arguments_text(data, {}) == "[" * 33 + "..." + "]" * 33


def test_types_of_values():
    assert type_text((torch.ones(2, 3), 1)) == "(f32[2, 3], int)"
    assert value_text({"tensor": {"dtype": "int64", "shape": ["s0", 2]}}) == "i64[s0, 2]"
    assert value_text({"symbol": "s0"}) == "s0"
    assert value_text({}) == ""
