"""Compiled functions as JSON files, which may be hostile: only pure ATen operations are looked up."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compiled.autograd_functions import Doubled

from torchguard.compiled import CompiledScalar, SavedGraphError, compile_out, compile_scalar, load
from torchguard.compiled._save import graph_hash


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_loaded_function_equals_the_saved_one(saved, point, backend):
    c = load(saved, backend=backend)
    torch.testing.assert_close(c(*point), f(*point))
    seed = {"values": torch.ones(3, 4, dtype=torch.float64), "order": [None]}
    right = compile_out(f, *point, backend="eager")
    torch.testing.assert_close(c.vjp_with_seed(point, seed), right.vjp_with_seed(point, seed))
    assert c.listing() == right.listing()
    assert c.leaves == right.leaves
    assert graph_hash(c.graphs.forward) == graph_hash(right.graphs.forward)


def test_a_scalar_function_is_loaded_as_one(tmp_path):
    compile_scalar(lambda x: (x * x).sum(), torch.ones(3), backend="eager").save(tmp_path / "g.json")
    c = load(tmp_path / "g.json", backend="eager")
    assert isinstance(c, CompiledScalar)
    assert c.backward(torch.ones(3)).tolist() == [2.0] * 3


def test_the_file_is_readable(saved):
    read = json.loads(saved.read_text())
    assert read["leaves"][0]["name"] == "batch['x']"
    assert {node["op"].split(".")[0] for node in read["graph"]["nodes"]} <= {"aten", "prims", "getitem"}


def test_the_hash_ignores_names_but_not_constants():
    one = compile_out(lambda x: x * 2, torch.ones(3), backend="eager")
    same = compile_out(lambda other: other * 2, torch.ones(3), backend="eager")
    another = compile_out(lambda x: x * 3, torch.ones(3), backend="eager")
    hashes = [graph_hash(c.graphs.forward) for c in (one, same, another)]
    assert hashes[0] == hashes[1] != hashes[2]


# As version 1 of the format writes `lambda x: x.relu() * 2`.
VERSION_1 = {
    "format": "torchguard.compiled",
    "version": 1,
    "kind": "out",
    "name": "<lambda>",
    "leaves": [{"name": "x", "shape": [3], "stride": [1], "dtype": "float32", "device": "cpu", "differentiable": True}],
    "graph": {
        "inputs": [["x", "f32[3]"]],
        "nodes": [
            {"name": "relu", "op": "aten.relu.default", "type": "f32[3]", "args": [{"node": "x"}]},
            {"name": "mul", "op": "aten.mul.Tensor", "type": "f32[3]", "args": [{"node": "relu"}, 2]},
        ],
        "outputs": ["mul"],
    },
    "sources": {"relu": "old.py:15 in <lambda>", "mul": "old.py:15 in <lambda>"},
    "arguments": {"tuple": [0]},
    "results": 0,
}


def test_files_and_hashes_of_version_1_stay_valid(tmp_path):
    path = tmp_path / "g.json"
    path.write_text(json.dumps(VERSION_1))
    c = load(path, backend="eager")
    assert c(torch.tensor([-1.0, 0.0, 1.0])).tolist() == [0.0, 0.0, 2.0]
    assert graph_hash(c.graphs.forward) == "4cb9a2d01bcb0e838ad327ffe40045a880512351d24932f14510aa1264051174"
    c.save(path)
    assert json.loads(path.read_text()) == VERSION_1


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
    "a system call": (with_op("os.system", "touch /tmp/x"), "'os.system' is not an operation of aten or prims"),
    "an attribute of torch": (with_op("torch.load", "evil.pt"), "'torch.load' is not an operation"),
    "dunders": (with_op("aten.__class__.__init__"), "has no operation|is not an operation"),
    "another namespace": (
        with_op("prim.device.default", {"node": "batch__x"}),
        "'prim.device.default' is not an operation",
    ),
    "an unknown operation": (with_op("aten.does_not_exist.default"), "has no operation 'aten.does_not_exist.default'"),
    "reading files": (
        with_op("aten.from_file.default", "/etc/passwd", False, 10),
        "'aten.from_file.default' is refused",
    ),
    "changing in place": (with_op("aten.add_.Tensor", {"node": "batch__x"}, 1), "'aten.add_.Tensor' is refused"),
    "random numbers": (with_op("aten.rand.default", [3, 4]), "'aten.rand.default' is refused"),
    "arbitrary memory": (
        with_op("aten.as_strided.default", {"node": "batch__x"}, [100, 100], [7, 7]),
        "'aten.as_strided.default' is refused",
    ),
    "uninitialised memory": (
        with_op("aten.empty.memory_format", [3, 4]),
        "'aten.empty.memory_format' is refused",
    ),
    "uninitialised memory like a tensor": (
        with_op("aten.new_empty.default", {"node": "batch__x"}, [3, 4]),
        "'aten.new_empty.default' is refused",
    ),
    "uninitialised memory of prims": (
        with_op("prims.empty_strided.default", [3, 4], [4, 1]),
        "'prims.empty_strided.default' is refused",
    ),
    "unchecked indices": (
        with_op("aten._unsafe_index.Tensor", {"node": "batch__x"}, []),
        "'aten._unsafe_index.Tensor' is refused",
    ),
    "a view past the end": (
        with_op("aten._reshape_alias.default", {"node": "batch__x"}, [100], [1]),
        "'aten._reshape_alias.default' is refused",
    ),
    "printing": (with_op("aten._print.default", "evil"), "'aten._print.default' is refused"),
    "replacing a storage": (
        with_op("aten.set.source_Tensor", {"node": "batch__x"}, {"node": "scale"}),
        "'aten.set.source_Tensor' is refused",
    ),
    "unchecked writes": (
        with_op("aten.embedding_dense_backward.default", {"node": "batch__x"}),
        "'aten.embedding_dense_backward.default' is refused",
    ),
    "a scalar that is a tensor": (set_at("kind", value="scalar"), "expected one float of shape"),
    "arguments of another number": (
        set_at("arguments", value={"tuple": [0, 1, 2]}),
        "the arguments hold 3 tensors, but there are 2 leaves",
    ),
    "an argument twice": (set_at("arguments", value={"tuple": [0, 0]}), r"are numbered \[0, 0\]"),
    "control characters in a leaf": (set_at("leaves", 0, "name", value="x\x1b[31m"), "is not a name"),
    "control characters in a function": (set_at("name", value="\x1b]0;evil\x07"), "is not a name"),
    "two leaves of one name": (set_at("leaves", 0, "name", value="scale"), "two leaves have the same name"),
    "a complex leaf": (set_at("leaves", 0, "dtype", value="complex64"), "is complex"),
    "missing arguments": (with_op("aten.mm.default", {"node": "batch__x"}), "missing value for argument"),
    "an unknown node": (
        with_op("aten.relu.default", {"node": "nowhere"}),
        "%.*: it takes 'nowhere', which is not an earlier node",
    ),
    "another type": (with_op("aten.relu.default", {"node": "scale"}), "the file says .* but its type is"),
    "an unknown dtype": (
        with_op("aten.sum.default", {"node": "batch__x"}, dtype={"dtype": "load"}),
        "'dtype': 'load' is not a value that torchguard reads",
    ),
    "an unknown kind of value": (
        with_op("aten.relu.default", {"eval": "1"}),
        "'eval': '1' is not a value that torchguard reads",
    ),
    "code as a name": (set_at("graph", "nodes", 0, "name", value="x = 1; import os"), "is not a name"),
    "a name twice": (set_at("graph", "nodes", 0, "name", value="scale"), "two nodes are called %scale"),
    "a negative size": (set_at("leaves", 0, "shape", value=[-1, 4]), "-1 is not a size"),
    "code as a size": (set_at("leaves", 0, "shape", value=["__import__('os')", 4]), "is not a size"),
    "a stride too few": (set_at("leaves", 0, "stride", value=[1]), "has 2 sizes but 1 strides"),
    "a leaf too few": (set_at("leaves", value=[]), "has 2 inputs, but there are 0 leaves"),
    "an unknown output": (set_at("graph", "outputs", value=["nowhere"]), "KeyError: 'nowhere'"),
    "results of another number": (
        set_at("results", value={"tuple": [0]}),
        "the graph returns 2 tensors, but the results hold 1",
    ),
    "an unknown container": (set_at("results", value={"subprocess.Popen": [0]}), "KeyError: 'subprocess.Popen'"),
    "another kind": (set_at("kind", value="__class__"), "KeyError: '__class__'"),
    "another version": (set_at("version", value=99), "expected version 1 of the format, got 99"),
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
def test_a_file_without_a_graph_is_refused(tmp_path, text):
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
def test_any_value_anywhere_in_a_file_is_refused_or_loaded(saved, value, position):
    read = json.loads(saved.read_text())
    spots = []

    def collect(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            spots.append((part, key))
            if isinstance(part[key], (dict, list)):
                collect(part[key])

    collect(read)
    part, key = spots[position % len(spots)]
    part[key] = value
    changed = saved.with_name("changed.json")
    changed.write_text(json.dumps(read))
    with contextlib.suppress(SavedGraphError):  # no other exception may leave load
        assert load(changed, backend="eager").nodes


def test_dynamic_leaves_cannot_be_saved(tmp_path):
    path = tmp_path / "g.json"
    with pytest.raises(SavedGraphError, match="lifted or dynamic leaves"):
        compile_out(lambda x: x, torch.ones(3), dynamic={"x": 0}, backend="eager").save(path)
    assert not path.exists()


def test_control_characters_in_source_lines_are_dropped(saved):
    read = json.loads(saved.read_text())
    read["sources"] = dict.fromkeys(read["sources"], "f.py:1\x1b]0;evil\x07\n in f")
    saved.write_text(json.dumps(read))
    c = load(saved, backend="eager")
    assert {line.source for line in c.nodes if line.source} == {"f.py:1]0;evil in f"}
    assert "\x1b" not in str(c)


def test_a_function_with_an_autograd_function_cannot_be_saved(tmp_path):
    with pytest.raises(SavedGraphError, match=r"autograd.Function, which has rules of its own"):
        compile_out(lambda x: Doubled.apply(x), torch.ones(3), backend="eager").save(tmp_path / "g.json")


X = {"node": "batch__x"}
# Each of these crashed the process, or read memory of others, in torch itself.
CONTRADICTIONS = {
    "indices of sparse layouts": ("aten._convert_indices_from_coo_to_csr.default", [X, 100], {}, "is refused"),
    "statistics of another shape": (
        "aten.native_layer_norm_backward.default",
        [X, X, [4], X, X, None, None, [True, True, True]],
        {},
        "is refused",
    ),
    "factors with any pivots": ("aten.linalg_lu_solve.default", [X, X, X], {}, "is refused"),
    "a dtype as a number": ("aten.zeros_like.default", [X], {"dtype": 1000}, "expected dtype, got 1000"),
    "a layout as a number": ("aten.ones_like.default", [X], {"layout": 77}, "expected layout, got 77"),
    "a group norm of more samples": (
        "aten.native_group_norm.default",
        [X, None, None, 300, 4, 100, 2, 1e-5],
        {},
        "arguments of native_group_norm contradict",
    ),
    "a batch norm of other channels": (
        "aten.native_batch_norm.default",
        [X, {"node": "scale"}, None, None, None, True, 0.1, 1e-5],
        {},
        "arguments of native_batch_norm contradict",
    ),
    "a longer Fourier series": ("aten._fft_c2r.default", [X, [1], 0, 10**6], {}, "arguments of _fft_c2r contradict"),
    "factors that are not those of the sizes": (
        "aten.upsample_nearest1d.default",
        [X, [8], 1e-300],
        {},
        "arguments of upsample_nearest1d contradict",
    ),
    "attention of other shapes": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        [X, X, {"node": "scale"}],
        {},
        "contradict",
    ),
    "a sorter": ("aten.searchsorted.Tensor", [X, X], {"sorter": X}, "arguments of searchsorted contradict"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_a_kernel_does_not_check_are_refused(saved, name):
    operation, args, kwargs, message = CONTRADICTIONS[name]
    read = json.loads(saved.read_text())
    with_op(operation, *args, **kwargs)(read)
    saved.write_text(json.dumps(read))
    with pytest.raises(SavedGraphError, match=message):
        load(saved, backend="eager")


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 15), pytest.param(1, 6000, marks=pytest.mark.long)], ids=["short", "thorough"]
)
def test_no_file_crashes_the_process(seed, count):
    script = Path(__file__).with_name("fuzz_files.py")
    done = subprocess.run([sys.executable, script, str(seed), str(count)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, ran = (int(word) for word in re.findall(r"(\d+) (?:loaded|run)", done.stdout))
    assert ran > count // 20
    assert loaded >= ran


def test_what_torch_asserts_about_types_is_an_error_of_the_file(tmp_path):
    path = tmp_path / "softmax.json"
    compile_out(lambda x: x.softmax(-1), torch.randn(2, 3), backend="eager").save(path)
    path.write_text(path.read_text().replace("false", "true"))  # half_to_float of a float32 tensor
    with pytest.raises(SavedGraphError, match="half_to_float"):
        load(path, backend="eager")
