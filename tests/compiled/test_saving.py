"""Graphs as JSON files. A file names operations of ATen, and nothing else is ever looked up."""

import contextlib
import json

import pytest
import torch
import torch.nn.functional as F
from autograd_functions import Doubled
from hypothesis import given, settings
from hypothesis import strategies as st

from torchguard.compiled import CompiledScalar, SavedGraphError, compile_out, compile_scalar, load
from torchguard.compiled._encode import graph_hash


def f(batch, scale):
    h = F.layer_norm(batch["x"], (4,)).clamp(-1.0, float("inf"))
    values, order = h.sort(dim=-1)
    return {"values": values.to(torch.float64) * scale, "order": [order]}


@pytest.fixture
def point():
    return {"x": torch.randn(3, 4)}, torch.tensor(2.0)


@pytest.fixture
def saved(tmp_path, point):
    path = tmp_path / "graph.json"
    compile_out(f, *point, backend="eager").save(path)
    return path


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_loaded_is_what_was_saved(saved, point, backend):
    c = load(saved, backend=backend)
    torch.testing.assert_close(c(*point), f(*point))
    seed = {"values": torch.ones(3, 4, dtype=torch.float64), "order": [None]}
    right = compile_out(f, *point, backend="eager")
    torch.testing.assert_close(c.vjp_with_seed(point, seed), right.vjp_with_seed(point, seed))
    assert c.listing() == right.listing()
    assert c.leaves == right.leaves
    assert graph_hash(c.graphs.forward) == graph_hash(right.graphs.forward)


def test_a_scalar_function_stays_one(tmp_path):
    compile_scalar(lambda x: (x * x).sum(), torch.ones(3), backend="eager").save(tmp_path / "g.json")
    c = load(tmp_path / "g.json", backend="eager")
    assert isinstance(c, CompiledScalar)
    assert c.backward(torch.ones(3)).tolist() == [2.0] * 3


def test_the_file_is_readable(saved):
    read = json.loads(saved.read_text())
    assert read["leaves"][0]["name"] == "batch['x']"
    assert {node["op"].split(".")[0] for node in read["graph"]["nodes"]} <= {"aten", "prims", "getitem"}


def test_the_hash_does_not_count_names_and_does_count_numbers():
    one = compile_out(lambda x: x * 2, torch.ones(3), backend="eager")
    same = compile_out(lambda other: other * 2, torch.ones(3), backend="eager")
    another = compile_out(lambda x: x * 3, torch.ones(3), backend="eager")
    hashes = [graph_hash(c.graphs.forward) for c in (one, same, another)]
    assert hashes[0] == hashes[1] != hashes[2]


def with_op(name, *args, **kwargs):
    def change(read):
        read["graph"]["nodes"][0] |= {"op": name, "args": list(args), "kwargs": kwargs}

    return change


def set_at(*path, value):
    def change(read):
        for step in path[:-1]:
            read = read[step]
        read[path[-1]] = value

    return change


HOSTILE = {
    "a system call": (with_op("os.system", "touch /tmp/x"), "'os.system' is no operation of aten or prims"),
    "an attribute of torch": (with_op("torch.load", "evil.pt"), "'torch.load' is no operation"),
    "dunders": (with_op("aten.__class__.__init__"), "has no operation|is no operation"),
    "another namespace": (
        with_op("prim.device.default", {"node": "batch__x"}),
        "'prim.device.default' is no operation",
    ),
    "an unknown operation": (with_op("aten.does_not_exist.default"), "has no operation 'aten.does_not_exist.default'"),
    "reading files": (
        with_op("aten.from_file.default", "/etc/passwd", False, 10),
        "'aten.from_file.default' is refused",
    ),
    "changing in place": (with_op("aten.add_.Tensor", {"node": "batch__x"}, 1), "'aten.add_.Tensor' is refused"),
    "drawing": (with_op("aten.rand.default", [3, 4]), "'aten.rand.default' is refused"),
    "memory at will": (
        with_op("aten.as_strided.default", {"node": "batch__x"}, [100, 100], [7, 7]),
        "'aten.as_strided.default' is refused",
    ),
    "what others left in memory": (
        with_op("aten.empty.memory_format", [3, 4]),
        "'aten.empty.memory_format' is refused",
    ),
    "what others left, by a tensor": (
        with_op("aten.new_empty.default", {"node": "batch__x"}, [3, 4]),
        "'aten.new_empty.default' is refused",
    ),
    "what others left, in prims": (
        with_op("prims.empty_strided.default", [3, 4], [4, 1]),
        "'prims.empty_strided.default' is refused",
    ),
    "indices nobody checks": (
        with_op("aten._unsafe_index.Tensor", {"node": "batch__x"}, []),
        "'aten._unsafe_index.Tensor' is refused",
    ),
    "more memory than there is": (
        with_op("aten._reshape_alias.default", {"node": "batch__x"}, [100], [1]),
        "'aten._reshape_alias.default' is refused",
    ),
    "printing": (with_op("aten._print.default", "evil"), "'aten._print.default' is refused"),
    "another's storage": (
        with_op("aten.set.source_Tensor", {"node": "batch__x"}, {"node": "scale"}),
        "'aten.set.source_Tensor' is refused",
    ),
    "writing where nobody checks": (
        with_op("aten.embedding_dense_backward.default", {"node": "batch__x"}),
        "'aten.embedding_dense_backward.default' is refused",
    ),
    "a scalar that is none": (set_at("kind", value="scalar"), "expected one float of shape"),
    "arguments of another number": (
        set_at("arguments", value={"tuple": [0, 1, 2]}),
        "the arguments do not hold as many tensors as there are leaves",
    ),
    "an argument twice": (set_at("arguments", value={"tuple": [0, 0]}), r"are numbered \[0, 0\]"),
    "a leaf a terminal obeys": (set_at("leaves", 0, "name", value="x\x1b[31m"), "is no name"),
    "a function a terminal obeys": (set_at("name", value="\x1b]0;evil\x07"), "is no name"),
    "two leaves of one name": (set_at("leaves", 0, "name", value="scale"), "two leaves have one name"),
    "a complex leaf": (set_at("leaves", 0, "dtype", value="complex64"), "is complex"),
    "arguments that do not fit": (with_op("aten.mm.default", {"node": "batch__x"}), "missing value for argument"),
    "a node that is not there": (with_op("aten.relu.default", {"node": "nowhere"}), "KeyError: 'nowhere'"),
    "another type than it has": (with_op("aten.relu.default", {"node": "scale"}), "and the file says"),
    "an unknown dtype": (
        with_op("aten.sum.default", {"node": "batch__x"}, dtype={"dtype": "load"}),
        "dtype 'load' is not known",
    ),
    "an unknown kind of value": (with_op("aten.relu.default", {"eval": "1"}), "eval '1' is not known"),
    "a name that is none": (set_at("graph", "nodes", 0, "name", value="x = 1; import os"), "is no name"),
    "a name twice": (set_at("graph", "nodes", 0, "name", value="scale"), "%scale is there twice"),
    "a negative size": (set_at("leaves", 0, "shape", value=[-1, 4]), "-1 is no size"),
    "a size that is no number": (set_at("leaves", 0, "shape", value=["__import__('os')", 4]), "is no size"),
    "strides that do not fit": (set_at("leaves", 0, "stride", value=[1]), "has 2 sizes and 1 strides"),
    "a leaf too few": (set_at("leaves", value=[]), "as many tensors as there are leaves"),
    "no outputs": (set_at("graph", "outputs", value=["nowhere"]), "KeyError: 'nowhere'"),
    "results of another number": (set_at("results", value={"tuple": [0]}), "as many tensors as its results hold"),
    "a container of its own": (set_at("results", value={"subprocess.Popen": [0]}), "KeyError: 'subprocess.Popen'"),
    "another kind": (set_at("kind", value="__class__"), "KeyError: '__class__'"),
    "another version": (set_at("version", value=99), "is of version 99, and 1 is known"),
    "another format": (set_at("format", value="pickle"), "was not written by save"),
    "a device that is none": (set_at("leaves", 0, "device", value="nowhere"), "RuntimeError: "),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused(saved, change, message):
    read = json.loads(saved.read_text())
    change(read)
    saved.write_text(json.dumps(read))
    with pytest.raises(SavedGraphError, match=message):
        load(saved, backend="eager")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x80\x04pickle"], ids=range(6))
def test_a_file_that_is_no_graph_is_refused(tmp_path, text):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(SavedGraphError, match="load: "):
        load(tmp_path / "g.json")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(anything, st.integers(0, 10_000))
@settings(max_examples=60)
def test_any_part_of_a_file_may_be_anything(saved, value, place):
    read = json.loads(saved.read_text())
    spots = []

    def collect(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            spots.append((part, key))
            if isinstance(part[key], (dict, list)):
                collect(part[key])

    collect(read)
    part, key = spots[place % len(spots)]
    part[key] = value
    changed = saved.with_name("changed.json")
    changed.write_text(json.dumps(read))
    with contextlib.suppress(SavedGraphError):  # refused in words, or loaded: nothing else may happen
        assert load(changed, backend="eager").nodes


def test_what_cannot_be_saved_says_why(tmp_path):
    path = tmp_path / "g.json"
    with pytest.raises(SavedGraphError, match="lifted or dynamic leaves"):
        compile_out(lambda x: x, torch.ones(3), dynamic={"x": 0}, backend="eager").save(path)
    assert not path.exists()


def test_what_a_terminal_obeys_is_left_out_of_sources(saved):
    read = json.loads(saved.read_text())
    read["sources"] = dict.fromkeys(read["sources"], "f.py:1\x1b]0;evil\x07\n in f")
    saved.write_text(json.dumps(read))
    c = load(saved, backend="eager")
    assert {line.source for line in c.nodes if line.source} == {"f.py:1]0;evil in f"}
    assert "\x1b" not in str(c)


def test_rules_of_ones_own_are_not_saved_even_where_they_agree(tmp_path):
    with pytest.raises(SavedGraphError, match=r"autograd.Function, which has rules of its own"):
        compile_out(lambda x: Doubled.apply(x), torch.ones(3), backend="eager").save(tmp_path / "g.json")
