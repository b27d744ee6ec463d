"""Where the benchmarks write their results, and what every result states about its run."""

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def environment(device: str = "cpu") -> dict[str, str]:
    """Date, machine and versions of a run."""
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else f"{_cpu_name()}, 1 thread"
    return {
        "date": date.today().isoformat(),
        "machine": machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(found: dict[str, Any], result: Path) -> None:
    """Write a result as JSON, and print where."""
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nwritten to {result}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
