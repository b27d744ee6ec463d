"""What a rule is."""

import abc
from collections.abc import Iterable

from torch import fx

from torchguard._graphs.source_lines import source_line_of
from torchguard.device._device import Device
from torchguard.device._graph import Graph, op_name
from torchguard.device._violations import Violation, module_of


class Constraint(abc.ABC):
    """A rule. Give yours a `code` of its own, and have `check` yield a `self.violation(...)` for all that break it."""

    code: str

    @abc.abstractmethod
    def check(self, graph: Graph, device: Device) -> Iterable[Violation]:
        """What in a graph breaks the rule. Sizes may be symbols: `if size > 8` asks for the size at hand."""

    def violation(
        self,
        graph: Graph,
        message: str,
        *,
        by: fx.Node,
        tensor: fx.Node | None = None,
        remedy: str = "",
        condition: str = "",
        holds_now: bool = False,
    ) -> Violation:
        """Something that does not fit.

        Args:
            by: the node that cannot run.
            tensor: the node that made the tensor in question, if it is about one.
        """
        # An input has no line of its own, so the op that takes it is shown.
        at = by if tensor is None or tensor.op != "call_function" else tensor
        return Violation(
            code=self.code,
            message=message,
            graph=graph.name,
            op=op_name(at),
            source_line=source_line_of(at, by, *by.all_input_nodes),
            remedy=remedy,
            condition=condition,
            holds_now=holds_now,
            nodes=(by.name,),
            tensors=() if tensor is None else (graph.name_of(tensor),),
            modules=tuple(filter(None, [module_of(at) or module_of(by)])),
        )
