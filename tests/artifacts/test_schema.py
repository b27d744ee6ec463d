"""Written files satisfy the documented schema, and problems are reported with their path."""

from pathlib import Path

import pytest
import torch

from torchguard import artifacts
from torchguard.artifacts import SCHEMA, SCHEMA_VERSION
from torchguard.artifacts._schema import problem_with

DOCS = Path(__file__).parents[2] / "docs" / "artifacts.md"


# raised by torch itself, which reads the gradient of the arguments of a resumed function
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def everything(tmp_path):
    """Artifacts that together have a graph break, a recompile, symbols and a backward graph."""

    def step(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return (y * 2).sum()

    with artifacts.capture(tmp_path) as captured:
        compiled = torch.compile(step, backend="aot_eager")
        for rows in (2, 3, 4):
            compiled(torch.ones(rows, 2, requires_grad=True)).backward()
    return captured.artifacts


def test_all_json_satisfies_its_schema(everything):
    of_file = {"dynamo": "graph", "forward": "graph", "backward": "graph"}
    seen = set()
    for one in everything:
        assert problem_with(one.manifest(), SCHEMA["manifest"]) == ""
        for name in one.files:
            stem, _, extension = name.partition(".")
            if extension == "json":
                schema = of_file.get(stem, stem)
                assert problem_with(one.read_json(name), SCHEMA[schema]) == "", name
                assert one.read_json(name)["schema"] == SCHEMA_VERSION
                seen.add(schema)
    assert seen == {"graph", "guards", "recompiles", "environment"}


def test_no_key_is_missing_from_the_schema(everything):
    for one in everything:
        assert {*one.manifest()} == {*SCHEMA["manifest"]["properties"]}
        for node in one.read_json("forward.json")["nodes"] if "forward.json" in one.files else ():
            assert {*node} <= {*SCHEMA["graph"]["properties"]["nodes"]["items"]["properties"]}


def test_every_key_is_documented():
    text = DOCS.read_text()
    node = SCHEMA["graph"]["properties"]["nodes"]["items"]["properties"]
    keys = {key for schema in SCHEMA.values() for key in schema["properties"]} | {*node}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "it is null, expected object"),
        ({"what": 1}, "'count' is missing"),
        ({"count": "3", "names": {}}, "count is string, expected integer"),
        ({"count": True, "names": {}}, "count is boolean, expected integer"),
        ({"count": -1, "names": {}}, "count is negative"),
        ({"count": 1, "names": {"../x": "a"}}, "names: '../x' is not a file name"),
        ({"count": 1, "names": {"x": 1}}, "names.x is integer, expected string"),
        ({"count": 1, "names": {"x": "c"}}, "names.x is 'c', expected one of ['a', 'b']"),
        ({"count": 1, "names": {"x": "a"}, "list": [1, 2.5]}, "list[1] is number, expected integer"),
        ({"count": 1, "names": {"x": "a"}, "list": [1, 2]}, ""),
    ],
)
def test_a_problem_names_the_path_of_the_value(value, problem):
    integer = {"type": "integer", "minimum": 0}
    names = {"type": "object", "names": "[a-z]+", "values": {"type": "string", "enum": ["a", "b"]}}
    properties = {"count": integer, "names": names, "list": {"type": "array", "items": integer}}
    assert problem_with(value, {"type": "object", "properties": properties, "required": ["count", "names"]}) == problem
