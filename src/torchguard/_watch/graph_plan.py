"""Which rows belong to which sample in a graph: found while Dynamo traces the watched model.

At the end of the model's forward, Dynamo's graph holds all that was traced. It is run on fake tensors beside an
`OwnerMode`, with the samples where the arguments of the model are. That gives the row code of every status and output,
which become constants of the graph; there is nothing to do when the graph runs. What sizes suggested before is
corrected in the nodes of `replace_nonfinite`, which were recorded already.

**Quarantine that only checks.** Values are replaced at every module so that no weight gets a NaN gradient, and so that
a fault of one sample reaches no other. In inference there are no gradients. Where in addition no operation mixes
samples, a fault stays in the rows of its sample by itself. The nodes of `replace_nonfinite` are then told to check
only, and the output of the model alone is replaced. Values are replaced all the same where a fault could do more: if
samples are written into a tensor or an object that outlives the call, such as a cache; if floating-point numbers become
indices; and before decompositions of matrices, which raise errors.

The operator `mark_call` marks where the arguments, statuses and outputs of the call are. It is erased from the graph.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torchguard._operators import define
from torchguard._pytrees import OBJECTS, tensors_in
from torchguard._torch.dynamo_graph import TracedGraph, keep_writes_after_calls
from torchguard._torch.graph_run import RUN, run
from torchguard._torch.symbols import CannotRunError, Numbers, Symbols, hints
from torchguard._torch.tracing import constant_in_graphs, is_surely
from torchguard._watch.arguments import set_arguments, tensors_by_sample
from torchguard._watch.batch import FOR_ALL, MIXED, UNBATCHED, Batch, size_free
from torchguard._watch.detect import empty_status
from torchguard._watch.graph_uses import GraphUses
from torchguard._watch.owner_storages import rows_of
from torchguard._watch.owners import OwnerMode
from torchguard._watch.parameter_uses import steps_of
from torchguard._watch.warn import warn_of_mixing, warn_once_of_mixing
from torchguard.exceptions import WatchError

# Positions among the arguments of `replace_nonfinite`, and of `row_status`.
_ROWS, _KEEP_NEG_INF, _ONLY_CHECKS = 6, {"replace_nonfinite": 11, "row_status": 2}, 12

_BRANCHES = ("cond", "while_loop", "scan", "map_impl", "flex_attention")


def mark_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch) -> None:
    """Mark the arguments of a call in the graph. Calls the operator `mark_call`."""
    tensors = [z for _, z in tensors_in((args, kwargs), objects=OBJECTS)]
    _MARK_CALL(tensors, "arguments", batch.size, batch.dim)
    for number, of_sample in enumerate(tensors_by_sample(args, kwargs, batch)):
        _MARK_CALL(of_sample, "sample", batch.size, number)


def mark_results(statuses: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Mark the statuses and the outputs of a call in the graph."""
    _MARK_CALL(statuses, "statuses", 0, 0)
    _MARK_CALL(outputs, "outputs", 0, 0)


def mark_samples(z: Tensor, dim: int) -> None:
    """Say in the graph that the samples lie along a dim of a tensor."""
    _MARK_CALL([z], "samples", 0, dim)


_MARK_CALL = define("mark_call(Tensor[] tensors, str role, SymInt size, int dim) -> ()", lambda *_: None)


def codes_of_graph(watch: Any, call_record: Any, output: Any) -> Sequence[int]:
    """The row codes of the outputs of a call that is traced. Those of its statuses are set in its record."""
    outputs = [z for _, z in tensors_in(output, objects=OBJECTS)]
    if not torch.compiler.is_dynamo_compiling():  # after a graph break, Dynamo may leave the rest of a frame uncompiled
        if watch.quarantine:
            warn_once_of_mixing(watch, "the graph breaks inside the model")
        call_record.needs_finite_gradients = watch.quarantine
        call_record.set_rows([MIXED] * len(call_record.statuses))
        return [MIXED] * len(outputs)
    mark_results(call_record.statuses, outputs)
    bits, *codes = codes_in_graph(type(watch.model).__name__, watch.quarantine, call_record.is_lost)
    call_record.replaces = watch.quarantine and bits % 2 == 1
    call_record.needs_finite_gradients = watch.quarantine and bits >= 2
    count = len(call_record.statuses)
    call_record.set_rows(codes[:count])
    return codes[count:]


@constant_in_graphs
def codes_in_graph(model: str, warns: bool, is_lost: bool) -> tuple[int, ...]:
    """Two bits, then row codes of the marked statuses, then of the outputs. The bits: 1 if values are replaced, 2 if
    gradients of parameters need hooks.

    The marks are erased.

    Args:
        model: its name, for a warning that it mixes samples.
        warns: whether such a warning is due.
        is_lost: whether the model calls modules under a transform.
    """
    traced = TracedGraph()
    if not keep_writes_after_calls():
        _refuse_branches(traced.graph)
    marks = [node for node in traced.graph.nodes if _is_call_of(node, "mark_call")]
    finder = _Finder(traced.symbols(), traced.enables_gradients())
    try:
        in_transform = "a module is called under a transform of torch.func"
        problem = finder.follow(traced, marks, in_transform if is_lost else None)
    except CannotRunError as error:
        problem, finder.failed = str(error), True
    except Exception as error:  # whatever an operation raises that fake tensors do not support
        problem, finder.failed = f"{type(error).__name__}: {error}".split("\n")[0], True
    is_known = not finder.failed
    counts = {node.args[1]: len(node.args[0]) for node in marks}
    finder.drop_sizes()
    only_checks = finder.can_only_check(traced)
    for role, nodes in [(node.args[1], node.args[0]) for node in marks]:
        if role == "statuses" and is_known and torch.is_grad_enabled():
            finder.count_for_all(nodes)
    for node in marks:
        traced.graph.erase_node(node)
    if not is_known:
        finder.codes = {role: [MIXED] * count for role, count in counts.items()}
        finder.set_all(traced.graph, MIXED)
    if warns and MIXED in finder.codes["outputs"]:
        warn_of_mixing(model, problem)
    finder.correct(only_checks)
    if warns and torch.is_grad_enabled():
        finder.uses.protect(not is_known, finder.has_sizes)
    needs_hooks = not is_known or finder.uses.has_opaque
    bits = (0 if only_checks else 1) | (2 if needs_hooks else 0)
    return (bits, *finder.codes["statuses"], *finder.codes["outputs"])


def _refuse_branches(graph: fx.Graph) -> None:
    """Refuse operators after which Dynamo loses what is written to attributes: the flags, and that the call is over."""
    found = [str(node.target) for node in graph.nodes if node.op == "call_function" and str(node.target) in _BRANCHES]
    if found:
        raise WatchError(
            f"watch: the model calls {found[0]}, after which Dynamo loses what is written to attributes, such as "
            "the flags of the call. Call the watched model in eager mode."
        )


class _Finder:
    """Follows owners while a graph runs on fake tensors, and collects row codes.

    A graph with symbols is run for other numbers as well. What is not the same there belongs to all samples.

    Args:
        symbols: the numbers of the graph that vary.
        has_gradients: whether gradients may be enabled in a part of it, so that uses of parameters are followed, too.
    """

    def __init__(self, symbols: Symbols, has_gradients: bool) -> None:
        self.has_sizes, self._symbols, self._has_gradients = symbols.have_sizes, symbols, has_gradients
        self.codes: dict[str, list[int]] = {}
        self.has_arguments = self.failed = False
        self.mode = OwnerMode()
        self._modes: list[OwnerMode] = []
        self._size = 1
        self.uses = GraphUses(self._code, lambda z: self.mode.may_have_neg_inf(z))
        self._by_size: dict[fx.Node, int | None] = {}
        self._found: dict[fx.Node, int] = {}
        self._neg_inf: dict[fx.Node, int] = {}

    def follow(self, traced: TracedGraph, marks: Sequence[fx.Node], problem: str | None) -> str | None:
        """Run the graph. Returns why some rows belong to all samples, as far as that is known.

        Args:
            problem: why none can be followed, if that is known already.

        Raises:
            CannotRunError: the graph cannot be followed.
        """
        for number in self._numbers(marks):
            self.mode, self.has_arguments = OwnerMode(), False
            self._modes.append(self.mode)
            self.uses.begin()
            run(traced.graph, traced.attribute, self, number)
            if not self.has_arguments:
                problem = "the graph breaks inside the model, or a model inside it is watched, too"
            if problem is not None or self.mode.is_lost:
                raise CannotRunError(problem or self.mode.problem)
        here, *elsewhere = [mode.problem for mode in self._modes]
        there = next((one for one in elsewhere if one is not None), "rows lie elsewhere")
        return here or (f"{there}, for other sizes or numbers than those of this call" if self._symbols else None)

    def _numbers(self, marks: Sequence[fx.Node]) -> Iterator[Numbers]:
        yield hints
        if self._symbols:
            sizes = [node.args[2] for node in marks if node.args[1] == "arguments"]
            yield from self._symbols.others([one.meta["example_value"] for one in sizes if isinstance(one, fx.Node)])

    def __call__(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_call_of(node, "mark_call"):
            return self._mark(*args)
        if not self.has_arguments:  # before the call
            return RUN
        if _is_call_of(node, "replace_nonfinite"):
            z, _, _, size, lengths, along = args[:_ROWS]
            code = self._code(z)
            self._found[node] = code if self._found.get(node, code) == code else MIXED
            if along is not None:
                by_size = Batch(size, tuple(lengths), along, z.device).code_by_size(z.shape)
                self._by_size[node] = by_size if self._by_size.get(node, by_size) == by_size else None
            self._note_neg_inf(node, "replace_nonfinite", z)
            new = self._replaced(z)
            self.uses.checked(node, z, new)
            return new, self._status(z)
        if _is_call_of(node, "row_status"):
            self._note_neg_inf(node, "row_status", args[0])
            return self._status(args[0])
        return RUN

    def steps(self, node: fx.Node) -> Any:
        """Attention is one function of torch, in which weights and samples meet several times."""
        is_attention = self.has_arguments and not self.has_sizes and node.target is F.multi_head_attention_forward
        return steps_of(node.target) if is_attention else None

    def ran(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.has_arguments and self._has_gradients:
            with self.mode.paused():
                self.uses.ran(node, args, kwargs, result)

    def _note_neg_inf(self, node: fx.Node, name: str, z: Tensor) -> None:
        if self.mode.may_have_neg_inf(z):
            self._neg_inf[node] = _KEEP_NEG_INF[name]

    def _replaced(self, z: Tensor) -> Tensor:
        """What a check makes of a tensor: one of its own, if it belongs to samples."""
        owners = self.mode.owners_of(z)
        if owners is None:
            return z
        with self.mode.paused():
            new = torch.empty_like(z)
        self.mode.set_owners(new, owners)
        self.mode.note_copy(z, new)
        return new

    def count_for_all(self, statuses: Sequence[fx.Node]) -> None:
        """Have faults that opaque uses may have created count for all samples. Given are the nodes of all statuses."""
        for i, node in enumerate(statuses):
            if node.args and node.args[0] in self.uses.for_all:
                self.codes["statuses"][i] = FOR_ALL

    def can_only_check(self, traced: TracedGraph) -> bool:
        """Whether values need not be replaced before the end of the call: see the top of the file."""
        codes = [code for codes in self.codes.values() for code in codes]
        return (
            self.has_arguments
            and not self.failed
            and MIXED not in codes
            and not any(
                mode.problem or mode.uses_picked or mode.needs_finite or mode.changes_older for mode in self._modes
            )
            and {node.graph for node in self._found} <= {*traced.with_regions()}
            and not traced.enables_gradients()
            and not traced.stores_tensors("torchguard")
        )

    def correct(self, only_checks: bool) -> None:
        """Give the nodes of replacements the row codes that were found, where sizes suggest another."""
        for node, code in self._found.items():
            if code != self._by_size.get(node, code):
                node.update_arg(_ROWS, code)
            if only_checks:
                node.update_arg(_ONLY_CHECKS, True)
        for node, position in self._neg_inf.items():
            node.update_arg(position, True)

    def drop_sizes(self) -> None:
        """Give up row codes that hold for the sizes of this trace alone."""
        if not self.has_sizes:
            return
        self.codes = {role: [*map(size_free, codes)] for role, codes in self.codes.items()}
        self._found = {node: size_free(code) for node, code in self._found.items()}

    def set_all(self, graph: fx.Graph, code: int) -> None:
        """Have all replacements use one row code."""
        self._found = dict.fromkeys([node for node in graph.nodes if _is_call_of(node, "replace_nonfinite")], code)
        self._by_size = dict.fromkeys(self._found, UNBATCHED)

    def _mark(self, tensors: list[Tensor], role: str, size: int, dim: int) -> None:
        if role == "arguments":
            self.has_arguments, self._size = True, size
            self.mode.begin()
            set_arguments(self.mode, tensors, size, dim)
        elif role == "sample":
            for z in tensors:
                self.mode.set_sample(z, dim)
        elif role == "samples":
            if self.has_arguments and tensors[0].shape[dim] == self._size:
                self.mode.set_samples(tensors[0], dim)
        else:
            codes = [self._code(z) for z in tensors]
            before = self.codes.get(role, codes)
            self.codes[role] = [one if one == other else MIXED for one, other in zip(codes, before, strict=True)]

    def _code(self, z: Tensor) -> int:
        with self.mode.paused():
            code = rows_of(self.mode.owners_of(z), self._size)
        return MIXED if code is None else code

    def _status(self, z: Tensor) -> Tensor:
        with self.mode.paused():
            status = empty_status(z)
        owners = self.mode.owners_of(z)
        if is_surely(z.numel() == 0):
            return status
        if owners is not None and z.ndim == 1:
            self.mode.set_owners(status, owners.apply(lambda one: one.unsqueeze(-1)).expand(status.shape))
        elif owners is not None:
            spread = owners.over([-1]) if z.ndim == status.ndim else owners.all()
            self.mode.set_owners(status, spread.expand(status.shape))
        return status


def _is_call_of(node: fx.Node, name: str) -> bool:
    """Whether a node calls an operator of torchguard, of this copy of the package or an earlier one."""
    if node.op != "call_function":
        return False
    namespace, _, rest = str(node.target).partition(".")
    return namespace.startswith("torchguard") and rest.split(".")[0] == name
