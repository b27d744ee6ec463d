"""Simulated devices: check the graphs that torch.compile makes of a model against what a target supports."""

from torchguard.device._backend import MockBackend, mock_backend
from torchguard.device._check import check
from torchguard.device._device import Device, examples
from torchguard.device._graph import Graph, Use
from torchguard.device._memory import LiveTensor, MemoryPlan, plan_memory
from torchguard.device._partitions import Coverage, Partition, Transfer
from torchguard.device._report import DeviceReport, GraphReport
from torchguard.device._rules.base import Constraint
from torchguard.device._rules.registry import register, unregister
from torchguard.device._violations import DeviceViolation
from torchguard.exceptions import DeviceError, DeviceRejectionError

__all__ = [
    "Constraint",
    "Coverage",
    "Device",
    "DeviceError",
    "DeviceRejectionError",
    "DeviceReport",
    "DeviceViolation",
    "Graph",
    "GraphReport",
    "LiveTensor",
    "MemoryPlan",
    "MockBackend",
    "Partition",
    "Transfer",
    "Use",
    "check",
    "examples",
    "mock_backend",
    "plan_memory",
    "register",
    "unregister",
]
