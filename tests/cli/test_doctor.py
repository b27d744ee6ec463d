"""`torchguard doctor`."""

import importlib.metadata
import json

import pytest
import torch

from torchguard._torch import support
from torchguard.cli._doctor import CheckResult, _private_names, _torch, finding_lines


def test_doctor_finds_that_torchguard_works_here(command):
    ran = command("doctor", "--json")
    assert ran.returncode == 0
    output = json.loads(ran.stdout)
    found = {one["name"]: one for one in output["findings"]}
    assert output["is_fine"]
    assert torch.__version__.startswith(found["torch"]["found"])  # the metadata may lack the build
    assert {"python", "C++ compiler", "graphviz", "GPU", "triton"} <= found.keys()
    assert all(found[f"torch for {part}"]["is_fine"] for part in support.PARTS)
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
    broken = CheckResult("torch", False, "not installed", "Install torch.")
    assert broken.is_broken
    line, remedy = finding_lines(broken)
    assert str(line).startswith("broken  torch")
    assert "Install torch." in str(remedy.renderable)
    assert not CheckResult("graphviz", False, "dot not found", needed=False).is_broken


def test_doctor_exits_with_1_if_torch_is_too_old(invoke, tmp_path, monkeypatch):
    about = tmp_path / "torch-2.4.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "broken  torch                2.4.0" in result.stdout
    assert "Install torch 2.11 to 2.15." in result.stdout


def test_a_torch_that_was_not_tested_is_no_error(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.99.0")
    found = _torch()
    assert not found.is_broken
    line, remedy = finding_lines(found)
    assert str(line) == "newer   torch                2.99.0"
    assert "torchguard was tested on torch 2.11 to 2.15." in str(remedy.renderable)


def test_what_a_part_misses_is_shown_with_what_happens_without(monkeypatch):
    monkeypatch.delattr("torch._dynamo.mark_static")
    found = {one.name: finding_lines(one) for one in _private_names()}
    line, remedy = found["torch for watch"]
    without = "no torch._dynamo.mark_static (a watched model may recompile once)"
    assert str(line) == f"missing torch for watch      {without}"
    assert "Install torch 2.11 to 2.15." in str(remedy.renderable)
    assert str(found["torch for guards"][0]) == "ok      torch for guards     complete"


def test_what_a_part_needs_and_torch_lacks_is_broken(monkeypatch):
    monkeypatch.delattr("torch._dynamo.guards.get_guard_fail_reason")
    found = {one.name: one for one in _private_names()}
    assert found["torch for guards"].is_broken
    assert "torch._dynamo.guards.get_guard_fail_reason" in found["torch for guards"].found
    assert found["torch for watch"].is_fine
