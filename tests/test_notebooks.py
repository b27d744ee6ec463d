"""Notebooks: autoreload, and objects that show themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchguard import artifacts, guards
from torchguard.lint import check_paths


@pytest.mark.long
def test_a_module_with_a_watched_model_can_be_edited_under_autoreload(tmp_path):
    worker = Path(__file__).with_name("notebook_worker.py")
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, worker], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "autoreload of" not in ran.stdout + ran.stderr  # which is how a failure begins
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["is_new_code"] == [True, True]
    assert found["edited"] == ["sample 2: NAN at input x, position 0, seen at 4 locations"]
    assert found["errors"] == 1
    assert found["reloaded"] == []
    assert found["html"]


def captured(root):
    model = torch.compile(nn.Linear(4, 4), backend="aot_eager", dynamic=False)
    with artifacts.capture(root) as found:
        for size in (2, 3):
            model(torch.randn(size, 4))
    return found.artifacts


@pytest.mark.long
def test_certificates_suggestions_differences_and_findings_show_themselves(tmp_path):
    def double(x):
        return x * 2

    (tmp_path / "model.py").write_text("import torch\n\ndef f(x):\n    return x.cuda()\n")
    first, second = captured(tmp_path / "artifacts")
    certificate = guards.certify(double, torch.ones(3), guards.skip_all(), backend="eager")
    suggestion = guards.suggest(double, torch.ones(3), backend="eager")
    shown = {
        "another batch size": certificate,
        "us before": suggestion,
        "not the same": artifacts.diff(first, second),
        "1 file": check_paths([tmp_path / "model.py"]),
    }
    for text, one in shown.items():
        assert text in one._repr_html_()
