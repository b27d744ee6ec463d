"""ONNX files of guarded and watched models, run in onnxruntime."""

import subprocess
import sys

import pytest
import torch
from tests.models import bert, gpt2
from torch import nn

from torchguard import ErrorConfig, err, export, fix, flag_nan_and_inf, flags, unwatch, watch
from torchguard.exceptions import ExportError, MissingExtraError
from torchguard.locations._registry import registry

onnxruntime = pytest.importorskip("onnxruntime")


class Exponential(nn.Module):
    """Overflows between its layers for large inputs."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x).exp()))


class Guarded(Exponential):
    """The same with checks by hand."""

    def forward(self, x):
        f = flag_nan_and_inf(x, "features", err.new(x))
        x, f = fix(x, f, "features")
        h = self.inner(x).exp()
        f = flag_nan_and_inf(h, "exp", f)
        h, f = fix(h, f, "exp")
        return self.outer(self.norm(h)), f


class TimeMajor(nn.Module):
    """Samples lie along the second dim between its layers, and one after the other in rows at the end."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.inner(x.transpose(0, 1).contiguous())  # (time, batch, 4)
        return self.outer(h.flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def run(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})


def shapes_of(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return {one.name: one.shape for one in (*session.get_inputs(), *session.get_outputs())}


def with_faults(x, generator):
    """A single NaN, Inf, -Inf or huge value in some samples."""
    for sample in range(len(x)):
        if torch.rand((), generator=generator) < 0.4:
            at = tuple(int(torch.randint(side, (), generator=generator)) for side in x.shape[1:])
            x[sample][at] = (torch.nan, torch.inf, -torch.inf, 1e6)[int(torch.randint(4, (), generator=generator))]
    return x


def assert_same_flags(path, model, shape, rounds=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    codes = set()
    with torch.no_grad():
        for _ in range(rounds):
            size = int(torch.randint(1, 40, (), generator=generator))
            x = with_faults(torch.randn(size, *shape, generator=generator).to(dtype), generator)
            want = model(x)[1]
            got = run(path, x)[-1]
            assert torch.equal(torch.from_numpy(got), want)
            codes |= {error.code_name for errors in flags.unpack_all(want) for error in errors}
    assert {"NAN", "INF"} <= codes


def test_the_flags_of_a_watched_model_are_those_of_eager_mode_bit_for_bit(tmp_path):
    model, path = watch(Exponential()).eval(), str(tmp_path / "m.onnx")
    found = export.to_onnx(model, torch.randn(3, 4), path, batch=(1, 64))
    assert (found.inputs, found.outputs, found.batch) == (("x",), ("output", "flags"), (1, 64))
    assert shapes_of(path) == {"x": ["batch", 4], "output": ["batch", 2], "flags": ["batch", 4]}
    assert_same_flags(path, model, (4,))
    x = torch.randn(3, 4)
    x[1] = torch.nan
    output = run(path, x)
    want = [[str(error) for error in errors] for errors in flags.unpack_all(model(x)[1])]
    registry.clear()  # nothing but the file has the names
    assert [[str(error) for error in errors] for errors in export.flags_of(path, output)] == want
    assert export.signature_of(path) == found
    assert model.run_report().calls == 51  # those of this test: the export's own are not counted


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [Guarded, lambda: watch(Exponential(), quarantine=True)], ids=["by hand", "quarantine"]
)
def test_flags_by_hand_and_of_quarantine_are_those_of_eager_mode(make, tmp_path):
    model, path = make().eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, torch.randn(3, 4), path)
    assert_same_flags(path, model, (4,))


class Nested(nn.Module):
    """Takes and returns nested values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, extra, *, scale):
        return {"logits": self.layer(x + extra["bias"]), "parts": {"scaled": extra["other"] * scale}}


@pytest.mark.long
def test_inputs_outputs_and_dims_have_names(tmp_path):
    model, path = watch(Nested()).eval(), str(tmp_path / "m.onnx")
    example = {"x": torch.randn(3, 4), "extra": {"bias": torch.randn(3, 4), "other": torch.randn(3, 5)}}
    example["scale"] = torch.randn(3, 1)
    wide = {"extra.other": {1: "width"}}
    found = export.to_onnx(model, example, path, dims=wide)
    assert found.outputs == ("logits", "parts.scaled", "flags")
    want = {"x": ["batch", 4], "extra.bias": ["batch", 4], "extra.other": ["batch", "width"], "scale": ["batch", 1]}
    want |= {"logits": ["batch", 2], "parts.scaled": ["batch", "width"], "flags": ["batch", 4]}
    assert shapes_of(path) == want

    names = {"input_names": ["a", "b", "c", "d"], "output_names": ["e", "f", "g"]}
    found = export.to_onnx(model, example, path, dims=wide, batch=(2, 8), **names)
    assert (found.inputs, found.outputs) == (("a", "b", "c", "d"), ("e", "f", "g"))
    assert shapes_of(path) == dict(zip("abcdefg", want.values(), strict=True))
    x, bias, other, scale = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 7), torch.randn(6, 1)
    other[4, 6] = torch.nan
    logits, scaled, f = map(torch.from_numpy, run(path, x, bias, other, scale))
    output, want_f = model(x=x, extra={"bias": bias, "other": other}, scale=scale)
    torch.testing.assert_close(logits, output["logits"])
    torch.testing.assert_close(scaled, output["parts"]["scaled"], equal_nan=True)
    assert torch.equal(f, want_f)
    assert [bool(errors) for errors in export.flags_of(path, {"g": f})] == [False] * 4 + [True, False]
    with pytest.raises(ExportError, match="input_names has 1 names, but there are 4"):
        export.to_onnx(model, example, path, input_names=["a"])


@pytest.mark.long
def test_names_of_dims_of_a_model_of_transformers(tmp_path):
    model, path = watch(bert()).eval(), str(tmp_path / "m.onnx")
    length = {1: torch.export.Dim("length", max=32)}
    example = {"input_ids": torch.randint(50, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
    export.to_onnx(model, example, path, dims={"input_ids": length, "attention_mask": length})
    shapes = shapes_of(path)
    assert shapes["input_ids"] == shapes["attention_mask"] == ["batch", "length"]
    assert shapes["last_hidden_state"][:2] == ["batch", "length"]
    ids, mask = torch.randint(50, (5, 11)), torch.ones(5, 11, dtype=torch.int64)
    ids[2, 3] = 99
    assert torch.equal(torch.from_numpy(run(path, ids, mask)[-1]), model(input_ids=ids, attention_mask=mask)[1])


class ByHand32(nn.Module):
    """Checks by hand with flags of int32."""

    CONFIG = ErrorConfig(flag_dtype=torch.int32)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        f = flag_nan_and_inf(x, "features", err.new(x, self.CONFIG), self.CONFIG)
        h = self.layer(x).exp()
        return h, flag_nan_and_inf(h, "exp", f, self.CONFIG)


@pytest.mark.long
def test_flags_of_int32_are_those_of_eager_mode(tmp_path):
    model, path = ByHand32().eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, torch.randn(3, 4), path, batch=(1, 64))
    assert_same_flags(path, model, (4,), rounds=20)
    assert run(path, torch.zeros(2, 4))[-1].dtype.name == "int32"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_flags_of_other_dtypes_are_those_of_eager_mode(dtype, tmp_path):
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    model, path = watch(net).eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, torch.randn(3, 4, dtype=dtype), path)
    assert_same_flags(path, model, (4,), rounds=20, dtype=dtype)


@pytest.mark.long
def test_bfloat16_is_refused_since_onnxruntime_has_no_kernels(tmp_path):
    model = watch(nn.Sequential(nn.Linear(4, 2)).bfloat16()).eval()
    with pytest.raises(ExportError, match="onnxruntime cannot load"):
        export.to_onnx(model, torch.randn(3, 4).bfloat16(), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


class FourErrors(nn.Module):
    """Records up to four errors of a sample, which share one word of its flags."""

    def forward(self, x):
        f = err.new(x)
        for location, column in zip(["one", "two", "three", "four"], x.unbind(1), strict=True):
            f = err.push(f, err.OVERFLOW, location, where=column > 1)
        return x.sum(-1), f


@pytest.mark.parametrize(
    ("batch", "within", "beyond"), [((2, 4), (2, 3, 4), (1, 5, 300)), ((3, None), (3, 300), (1, 2))]
)
def test_a_batch_beyond_its_limits_fails(batch, within, beyond, tmp_path):
    path = str(tmp_path / "m.onnx")
    export.to_onnx(watch(Exponential()).eval(), torch.randn(3, 4), path, batch=batch)
    for size in within:
        assert len(export.flags_of(path, run(path, torch.randn(size, 4)))) == size
    for size in beyond:
        with pytest.raises(Exception, match=f"batch_of_{batch[0]}_to_{batch[1] or 'any'}.is_within_limits"):
            run(path, torch.randn(size, 4))
        with pytest.raises(ExportError, match=f"of {size} samples, and .* is for {batch[0]} (or more|to 4)"):
            export.flags_of(path, torch.zeros(size, 4, dtype=torch.int64))


def test_four_errors_in_one_word_keep_all_their_bits(tmp_path):
    """onnxruntime sums int64 in floating point."""
    x = torch.tensor([[float(bit) * 2 for bit in f"{number:04b}"] for number in range(16)])
    model, path = FourErrors().eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, x, path)
    _, found = run(path, x)
    assert torch.equal(torch.from_numpy(found), model(x)[1])


@pytest.mark.long
def test_samples_are_followed_where_sizes_do_not_tell(tmp_path):
    model, path = watch(TimeMajor()).eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, torch.randn(3, 3, 4), path)
    assert_same_flags(path, model, (3, 4), rounds=20)


@pytest.mark.long
@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_models_of_transformers(make, quarantine, tmp_path):
    model, path = watch(make(), quarantine=quarantine).eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, {"input_ids": torch.randint(50, (3, 7))}, path)
    ids = torch.randint(50, (5, 7))
    ids[2, 3] = 99  # out of the table
    with torch.no_grad():
        (model.embeddings if hasattr(model, "embeddings") else model.transformer.wte).get_parameter(
            "word_embeddings.weight" if hasattr(model, "embeddings") else "weight"
        )[7] = torch.nan
        ids[4, 0] = 7
        export.to_onnx(model, {"input_ids": ids[:3]}, path, verify=False)
        got, want = run(path, ids)[-1], model(input_ids=ids)[1]
    assert torch.equal(torch.from_numpy(got), want)
    assert {2, 4} <= {*err.is_err(want).nonzero().flatten().tolist()}


@pytest.mark.long
def test_a_fresh_process_without_onnx_names_locations_with_nothing_but_the_file(tmp_path):
    model, path = watch(Exponential()).eval(), str(tmp_path / "m.onnx")
    export.to_onnx(model, torch.randn(3, 4), path)
    script = f"""
import sys
sys.modules.update(dict.fromkeys(["onnx", "onnxscript", "onnx_ir"]))  # importing them raises
import numpy, onnxruntime, torchguard
x = numpy.zeros((2, 4), "float32"); x[1, 2] = 1e6
output = onnxruntime.InferenceSession({path!r}).run(None, {{"x": x}})
print([[str(error) for error in errors] for errors in torchguard.export.flags_of({path!r}, output)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    x = torch.zeros(2, 4)
    x[1, 2] = 1e6
    assert done.stdout.strip() == str([[str(e) for e in errors] for errors in flags.unpack_all(model(x)[1])])


def test_what_cannot_be_exported_is_refused(tmp_path):
    x, path = torch.randn(3, 4), str(tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=r"model.eval\(\)"):
        export.to_onnx(watch(Exponential()), x, path)
    with pytest.raises(ExportError, match=r"give watch\(model\)"):
        export.to_onnx(Exponential().eval(), x, path)
    with pytest.raises(ExportError, match="example of 1 sample"):
        export.to_onnx(watch(Exponential()).eval(), x[:1], path)
    with pytest.raises(ExportError, match="the inputs are x"):
        export.to_onnx(watch(Exponential()).eval(), x, path, dims={"y": {1: "width"}})
    config = ErrorConfig(flag_dtype=torch.float32)

    class FloatFlags(nn.Module):
        def forward(self, x):
            return x, flag_nan_and_inf(x, "x", err.new(x, config), config)

    with pytest.raises(ExportError, match="ONNX cannot read floats as bits"):
        export.to_onnx(FloatFlags().eval(), x, path)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torchguard\[onnx\]'"):
        export.to_onnx(watch(Exponential()).eval(), torch.randn(3, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 40, b"\x82\x01\xff\xff\xff\xff\x7f", b"PK\x03\x04", b"\x72\x02\x0a\x05"]
)
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    with pytest.raises(ExportError):
        export.signature_of(path)


def test_unwatch_after_an_export_gives_the_plain_model(tmp_path):
    model = Exponential().eval()
    guarded = watch(model, returns="output")
    export.to_program(guarded, torch.randn(3, 4))
    assert isinstance(guarded(torch.randn(2, 4)), torch.Tensor)
    assert unwatch(guarded) is model
