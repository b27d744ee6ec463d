"""`torchguard doctor`."""

import json

import pytest
import torch

from torchguard.cli._doctor import Finding, finding_lines


def test_doctor_finds_that_torchguard_works_here(command):
    ran = command("doctor", "--json")
    assert ran.returncode == 0
    output = json.loads(ran.stdout)
    found = {one["name"]: one for one in output["findings"]}
    assert output["is_fine"]
    assert torch.__version__.startswith(found["torch"]["found"])  # the metadata may lack the build
    assert {"python", "C++ compiler", "graphviz", "GPU", "triton"} <= found.keys()
    assert found["hooks of guards"]["is_fine"]
    assert found["hooks of artifacts"]["is_fine"]
    assert found["compile aot_eager"]["found"].endswith(" s")
    assert "compile inductor" in found


@pytest.mark.long
def test_a_missing_compiler_is_printed_with_a_remedy(command):
    ran = command("doctor", PATH="/nowhere", CXX="", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert ran.returncode == 0
    assert "missing C++ compiler" in ran.stdout
    assert "backend='aot_eager'" in ran.stdout
    assert "missing compile inductor" in ran.stdout


def test_what_is_needed_and_missing_is_printed_as_broken():
    broken = Finding("torch", False, "not installed", "Install torch.")
    assert broken.is_broken
    line, remedy = finding_lines(broken)
    assert str(line).startswith("broken  torch")
    assert "Install torch." in str(remedy.renderable)
    assert not Finding("graphviz", False, "dot not found", needed=False).is_broken


def test_doctor_exits_with_1_if_torch_is_too_old(invoke, tmp_path, monkeypatch):
    about = tmp_path / "torch-2.4.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "broken  torch                2.4.0" in result.stdout
    assert "Install torch 2.11, 2.12 or 2.13" in result.stdout
