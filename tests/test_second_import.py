"""The package is imported again in one process, or its modules are reloaded: old and new objects work side by side.

The scenarios share a process, and so a test, because starting a process and loading torch takes most of the time.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("second_import_worker.py")


def failures(scenarios: str) -> list[str]:
    """The name and the traceback of each scenario that failed."""
    command = [sys.executable, "-W", "ignore", WORKER, scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    return [f"{name}:\n{error}" for name, error in found.items() if error]


@pytest.mark.inductor
@pytest.mark.long
def test_imported_again():
    failed = failures("again")
    assert not failed, "\n".join(failed)


@pytest.mark.long
def test_reloaded():
    failed = failures("reloaded")
    assert not failed, "\n".join(failed)
