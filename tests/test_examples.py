"""The examples run, and say what they promise: each ends with an error if a claim of it does not hold."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "one_bad_sample.py": "weights and statistics differ by",
    "three_tools.py": "sample 5: NAN at norm",
    "unsafe_guards.py": "after eval(): dropout is off",
    "train_with_a_bad_sample.py": "",
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_and_keeps_its_promise(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert EXPECTED[name] in ran.stdout


@pytest.mark.long
def test_the_demo_names_the_planted_faults(tmp_path):
    options = ["--watch", "--device", "edge-npu", "--html", "demo.html"]
    command = [sys.executable, "-m", "torchguard", "run", *options, str(EXAMPLES / "gpt.py")]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert "call 3: sample 5: NAN at blocks.0.norm1" in ran.stderr  # and no other sample
    assert ran.stderr.count("NAN at") == 1
    assert "a print that was left behind" in ran.stderr
    assert "size mismatch at index 0. expected 16, actual 6" in ran.stderr
    assert "Does not fit edge-npu, because" in ran.stderr
    assert "demo.html has the report." in ran.stderr


@pytest.mark.parametrize("name", ["gpt.py", *(one for one in EXPECTED if one != "train_with_a_bad_sample.py")])
def test_a_demo_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
