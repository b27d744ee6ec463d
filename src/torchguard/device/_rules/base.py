"""The base class of rules.

A rule reads fields of the device that it is given, but does not import `Device`: a device holds rules, so `_device`
imports this package.
"""

import abc
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from torchguard._graphs.source_lines import source_line_of
from torchguard.device._graph import Graph, op_name
from torchguard.device._violations import DeviceViolation, module_path

if TYPE_CHECKING:
    from torchguard.device._device import Device


class Constraint(abc.ABC):
    """A rule. A subclass sets a `code` of its own, and its `check` yields `self.violation(...)` for each violation."""

    code: str

    @abc.abstractmethod
    def check(self, graph: Graph, device: "Device") -> Iterable[DeviceViolation]:
        """The violations in a graph. Comparing a symbolic size, as in `if size > 8`, reads the concrete size."""

    def violation(
        self,
        graph: Graph,
        message: str,
        *,
        node: fx.Node,
        tensor: fx.Node | None = None,
        remedy: str = "",
        condition: str = "",
        holds_now: bool = False,
    ) -> DeviceViolation:
        """A violation of this rule, with the source line and the module of its node.

        Args:
            node: the node that cannot run.
            tensor: the node that computes the tensor in question, if the violation is about one.
        """
        # An input of the graph has no source line: use the node that takes it.
        at = node if tensor is None or tensor.op != "call_function" else tensor
        return DeviceViolation(
            code=self.code,
            message=message,
            graph=graph.name,
            op=op_name(at),
            source_line=source_line_of(at, node, *node.all_input_nodes),
            remedy=remedy,
            condition=condition,
            holds_now=holds_now,
            nodes=(node.name,),
            tensors=() if tensor is None else (graph.name_of(tensor),),
            modules=tuple(filter(None, [module_path(at) or module_path(node)])),
        )
