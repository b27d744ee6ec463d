"""Programs of `torch.export` and packages of AOTInductor, of guarded and watched models."""

import subprocess
import sys

import pytest
import torch
from tests.export.test_onnx import Exponential, Guarded, TimeMajor, with_faults
from tests.models import gpt2

from torchguard import err, export, flags, watch
from torchguard.exceptions import ExportError, MixedRowsWarning

MODELS = {
    "by hand": Guarded,
    "watched": lambda: watch(Exponential()),
    "quarantine": lambda: watch(Exponential(), quarantine=True),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_program_has_a_batch_without_limit(make):
    model = make().eval()
    program = export.to_program(model, torch.randn(3, 4))
    x = with_faults(torch.randn(9000, 4), torch.Generator().manual_seed(0))
    out, f = program.module()(x)
    want, want_f = model(x)
    assert torch.equal(f, want_f)
    torch.testing.assert_close(out, want, equal_nan=True)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exported_by_torch_itself_the_batch_has_no_limit_and_a_fault_is_for_all(strict):
    model = watch(Exponential(), quarantine=True).eval()
    shapes = {"x": {0: torch.export.Dim("batch")}}
    with pytest.warns((MixedRowsWarning, UserWarning), match="all samples of the call are flagged|side effects"):
        program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=shapes, strict=strict)
    x = torch.randn(5000, 4)
    out, f = program.module()(x)
    assert torch.equal(f, model(x)[1])
    torch.testing.assert_close(out, model(x)[0])
    x[4999, 1] = torch.nan
    out, f = program.module()(x)
    assert err.is_err(f).all()
    assert not out.any()


def test_samples_are_followed_where_sizes_do_not_tell():
    model = watch(TimeMajor()).eval()
    program = export.to_program(model, torch.randn(3, 3, 4))
    x = torch.randn(3, 3, 4)
    x[1, 2, 0] = torch.nan
    assert torch.equal(program.module()(x)[1], model(x)[1])
    assert torch.equal(program.module()(x[:2])[1], model(x[:2])[1])


def test_a_limit_of_the_batch_is_kept():
    program = export.to_program(watch(Exponential()).eval(), torch.randn(3, 4), batch=(2, 8))
    with pytest.raises(Exception, match="<= 8"):
        program.module()(torch.randn(9, 4))


def test_several_inputs_and_dict_inputs():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x, extra, *, scale):
            return {"a": self.layer(x + extra["bias"]), "b": extra["other"] * scale}

    model = watch(Mixed()).eval()
    x = torch.randn(3, 4)
    extra = {"bias": torch.randn(3, 4), "other": torch.randn(3, 2)}
    with pytest.raises(ExportError, match=r"cannot be traced.*scale"):  # `scale` is missing
        export.to_program(model, (x, extra))
    program = export.to_program(model, {"x": x, "extra": extra, "scale": torch.randn(3, 1)})
    extra["other"][2] = torch.inf
    f = program.module()(x=x, extra=extra, scale=torch.ones(3, 1))[1]
    assert torch.equal(f, model(x=x, extra=extra, scale=torch.ones(3, 1))[1])


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_program_and_a_package_run_in_a_fresh_process(make, tmp_path):
    """On a batch far beyond the example, with and without faults."""
    model = make().eval()
    x = with_faults(torch.randn(5000, 4), torch.Generator().manual_seed(0))
    out, f = model(x)
    program, package = str(tmp_path / "program.pt2"), str(tmp_path / "package.pt2")
    export.to_program(model, torch.randn(3, 4), program)
    export.to_package(model, torch.randn(3, 4), package)
    torch.save(x, tmp_path / "x.pt")
    script = f"""
import torch
x = torch.load({str(tmp_path / "x.pt")!r})
runs = [torch.export.load({program!r}).module(), torch._inductor.aoti_load_package({package!r})]
found = [run(x) for run in runs]
import torchguard
names = [torchguard.export.flags_of(path, output) for path, output in zip([{program!r}, {package!r}], found)]
names = [[[str(error) for error in errors] for errors in one] for one in names]
torch.save((found, names), {str(tmp_path / "found.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    found, names = torch.load(tmp_path / "found.pt")
    want = [[str(error) for error in errors] for errors in flags.unpack_all(f)]
    assert names == [want, want]
    for got, got_f in found:
        assert torch.equal(got_f, f)
        torch.testing.assert_close(got, out, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert 1000 < int(err.is_err(f).sum()) < 4000


@pytest.mark.long
def test_a_model_of_transformers_as_a_program():
    model = watch(gpt2(), quarantine=True).eval()
    program = export.to_program(model, {"input_ids": torch.randint(50, (3, 7))})
    ids = torch.randint(50, (6, 7))
    ids[2, 3] = 99
    assert torch.equal(program.module()(input_ids=ids)[1], model(input_ids=ids)[1])
