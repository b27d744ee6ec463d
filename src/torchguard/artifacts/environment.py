"""Where something was compiled: versions, the machine, and the settings that shape what is compiled."""

import functools
import importlib.metadata
import os
import platform
import re
from typing import Any

import torch

from torchguard.artifacts import _torch
from torchguard.artifacts.schema import SCHEMA_VERSION

_PACKAGES = ("torch", "torchguard", "triton", "numpy", "transformers", "jaxtyping")
_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|AOT|TRITON|CUDA|CUBLAS|NCCL|NVIDIA|OMP|KMP|MKL|MOCK)\w*|CXX?|(LOCAL_)?RANK|WORLD_SIZE"
)
# What people put into variables and would not put into a report.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY|AUTH", re.IGNORECASE)


def environment_to_data() -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "versions": _versions(),
        "platform": _platform(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
        "torch": {**_public_settings(), **_torch.settings()},
    }


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__, "cuda": str(torch.version.cuda), "git": str(torch.version.git_version)}


@functools.cache
def _platform() -> dict[str, str]:
    return {"system": platform.platform(), "machine": platform.machine(), "cpus": str(os.cpu_count())}


def _public_settings() -> dict[str, str]:
    found = {
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "autocast_cpu": torch.is_autocast_enabled("cpu"),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    # A machine may have a GPU that nobody uses: asking its name would start CUDA.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {"autocast_cuda": torch.is_autocast_enabled("cuda"), "gpu": torch.cuda.get_device_name()}
    return {name: str(value) for name, value in found.items()}
