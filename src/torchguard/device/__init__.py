"""Devices that are not there: check what torch.compile makes of a model against what a target can do."""

from torchguard.device.backend import MockBackend, mock_backend
from torchguard.device.checking import check
from torchguard.device.constraints.base import Constraint
from torchguard.device.constraints.registry import register, unregister
from torchguard.device.coverage import Coverage
from torchguard.device.description import Device, examples
from torchguard.device.graphs import Graph, Use
from torchguard.device.memory import LiveTensor, MemoryPlan, plan_memory
from torchguard.device.partitions import Partition, Transfer
from torchguard.device.report import DeviceReport, GraphReport
from torchguard.device.violations import Violation
from torchguard.exceptions import DeviceError, DeviceRejectionError

__all__ = [
    "Constraint",
    "Coverage",
    "Device",
    "DeviceError",
    "DeviceRejectionError",
    "DeviceReport",
    "Graph",
    "GraphReport",
    "LiveTensor",
    "MemoryPlan",
    "MockBackend",
    "Partition",
    "Transfer",
    "Use",
    "Violation",
    "check",
    "examples",
    "mock_backend",
    "plan_memory",
    "register",
    "unregister",
]
