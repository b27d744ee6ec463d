"""Uses of parameters in a graph: see `parameter_uses.py`. They are found while the graph is followed, and protected by
nodes that are added to it.

A node is a use if a tensor of samples meets one that belongs to no sample and requires a gradient. What the added
operators need of the call (its gradient probes, the last location, the batch) is taken from the check before it.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx

from torchguard._operators import define
from torchguard._torch.graph_run import is_operation
from torchguard._torch.symbols import CannotRunError
from torchguard._torch.tensors import flatten, mutation_count, storage_of
from torchguard._torch.tracing import is_shape_only, is_wrapped
from torchguard._watch.batch import MIXED, UNBATCHED, Batch, size_free
from torchguard._watch.detect import empty_status
from torchguard._watch.magnitudes import REVISION
from torchguard._watch.parameter_uses import (
    LINEAR,
    NOT_OPERATIONS,
    RECURRENT,
    SAFE_NORM,
    Protection,
    bad_of,
    is_by_vector_name,
    is_in_place,
    protected,
)
from torchguard._watch.replace import replaced_with_status


class _Found(NamedTuple):
    """A use: the row codes of arguments that may be non-finite, and of what it returns; and the check before it."""

    arguments: dict[fx.Node, int]
    outputs: dict[fx.Node, int]
    check: fx.Node


class GraphUses:
    """Collects the uses of parameters while a graph runs on fake tensors, and protects them afterwards.

    Args:
        code_of: the row code of a tensor.
        may_have_neg_inf: whether a tensor may hold -Inf on purpose.
    """

    def __init__(self, code_of: Callable[[Tensor], int], may_have_neg_inf: Callable[[Tensor], bool]) -> None:
        self._code_of, self._may_have_neg_inf = code_of, may_have_neg_inf
        self.begin()
        self._found: dict[fx.Node, _Found] = {}
        self._needed: dict[fx.Node, None] = {}
        self._neg_inf: set[fx.Node] = set()
        self.for_all: set[fx.Node] = set()  # checks of what an opaque use returned
        self.has_opaque = False

    def begin(self) -> None:
        """The graph is run from its first node."""
        self._checks: dict[fx.Graph, fx.Node] = {}  # the last one in each graph
        self._clean: dict[int, tuple[Tensor, int]] = {}
        self._unmet: dict[int, tuple[Tensor, fx.Node]] = {}

    def checked(self, node: fx.Node, z: Tensor, new: Tensor) -> None:
        """A check makes a tensor finite, and masks its gradient."""
        self._checks[node.graph] = node
        _, use = self._unmet.pop(storage_of(z) or 0, (None, None))
        if use is not None and use not in self._found:
            self.for_all.add(node)
        self._clean[storage_of(new) or 0] = (new, mutation_count(new))

    def ran(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A node other than a check was run.

        Raises:
            CannotRunError: it is part of a transform of `torch.func`, where dims of tensors are hidden.
        """
        wrapped = [one for one in flatten((args, kwargs, result))[0] if isinstance(one, Tensor) and is_wrapped(one)]
        if any(one.is_floating_point() or one.is_complex() for one in wrapped):
            raise CannotRunError("the model calls a transform of torch.func while gradients are enabled")
        if wrapped:  # integers, such as the blocks of FlexAttention's mask
            return
        given = [one for one in flatten((args, kwargs))[0] if _has_storage(one)]
        results = [one for one in flatten(result)[0] if _has_storage(one)]
        is_view = bool(results) and all(any(storage_of(z) == storage_of(one) for one in given) for z in results)
        if not is_view or is_in_place(_name(node)):
            for z in given:
                _, use = self._unmet.pop(storage_of(z) or 0, (None, None))
                if use is not None:
                    self._needed[use] = None
        if is_operation(node):
            self._find(node, args, kwargs, results)

    def _find(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        check = self._checks.get(node.graph)
        if check is None or _name(node) in NOT_OPERATIONS or _is_in_layer(node):
            return
        samples: dict[fx.Node, tuple[Tensor, int]] = {}
        has_weight = False
        for one, z in _values((node.args, node.kwargs), (args, kwargs)):
            if not isinstance(z, Tensor):  # several tensors of one node cannot be protected by themselves
                self.has_opaque = self.has_opaque or any(map(_has_storage, flatten(z)[0]))
                continue
            if not _has_storage(z) or not (z.is_floating_point() or z.is_complex()):
                continue
            code = self._code_of(z)
            if code != UNBATCHED:
                samples[one] = (z, code)
            else:
                has_weight = has_weight or _requires_grad(one)
        if not samples or not has_weight or not _requires_grad(node):
            return
        if node.target is F.multi_head_attention_forward or _name(node) in RECURRENT:
            self.has_opaque = True
            self._unmet |= {storage_of(z) or 0: (z, node) for z in results}
            return
        unknown = {one: code for one, (z, code) in samples.items() if not self._is_clean(z)}
        unknown = {} if _name(node) in LINEAR else unknown
        self._neg_inf |= {one for one, (z, _) in samples.items() if self._may_have_neg_inf(z)}
        outputs = {node: self._code_of(results[0])} if isinstance(results, list) and len(results) == 1 else {}
        if not outputs:
            parts = {one.args[1]: one for one in node.users if one.target is operator.getitem}
            outputs = {parts[i]: self._code_of(z) for i, z in enumerate(results) if i in parts}
        if node in self._found:  # a graph that is called several times
            outputs = _agreed(self._found[node].outputs, outputs)
            unknown = _agreed(self._found[node].arguments, unknown)
        self._found[node] = _Found(unknown, outputs, check)
        if unknown:
            self._needed[node] = None
        for z in results:
            self._unmet[storage_of(z) or 0] = (z, node)

    def _is_clean(self, z: Tensor) -> bool:
        _, changes = self._clean.get(storage_of(z) or 0, (None, None))
        return changes == mutation_count(z)

    def protect(self, is_lost: bool, has_symbols: bool) -> None:
        """Add the nodes that protect the uses.

        Args:
            is_lost: whether row codes are not known: then all samples count as mixed.
            has_symbols: whether sizes vary, and row codes that hold for those of this trace alone are given up.
        """

        def code(rows: int) -> int:
            return MIXED if is_lost else size_free(rows) if has_symbols else rows

        new_nodes: dict[fx.Node, fx.Node] = {}
        for node in [node for node in self._found if node in self._needed]:  # in the order of the graph
            found = self._found[node]
            graph, (_, probes, location, size, lengths, along, *_) = node.graph, found.check.args
            statuses, codes = [], []
            for before, rows in found.arguments.items():
                one = new_nodes.get(before, before)
                with graph.inserting_before(node):
                    pair = graph.call_function(
                        _CLEAN, (one, size, lengths, along, code(rows), before in self._neg_inf, REVISION)
                    )
                    clean, status = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
                    clean.meta |= one.meta
                    if is_in_place(_name(node)) and node.args[0] is one:
                        graph.call_method("copy_", (one, clean)).meta |= one.meta
                    else:
                        node.replace_input_with(one, clean)
                statuses.append(status)
                codes.append(code(rows))
            by_vector = is_by_vector_name(_name(node), _is_matrix_product(node))
            for one, rows in found.outputs.items():
                how = (probes, location, size, lengths, along, code(rows), by_vector, REVISION)
                with graph.inserting_after(one):
                    new = graph.call_function(_PROTECT, (one, statuses, codes, *how))
                new.meta |= one.meta
                if is_in_place(_name(node)):
                    with graph.inserting_after(new):
                        graph.call_method("copy_", (one, new)).meta |= one.meta
                else:
                    one.replace_all_uses_with(new, lambda user, new=new: user is not new)
                    new_nodes[one] = new


def _agreed(one: dict[fx.Node, int], two: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Row codes of two calls of one graph: `MIXED` where they differ."""
    return one | {node: code if one.get(node, code) == code else MIXED for node, code in two.items()}


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _values(given: Any, value: Any) -> Iterator[tuple[fx.Node, Any]]:
    """The nodes among the arguments of a node, each with its value, which may be a tuple such as a size."""
    if isinstance(given, fx.Node):
        yield given, value
    elif isinstance(given, slice):
        yield from _values((given.start, given.stop, given.step), (value.start, value.stop, value.step))
    elif isinstance(given, Mapping):
        for name, one in given.items():
            yield from _values(one, value[name])
    elif isinstance(given, (tuple, list)):
        for one, of_one in zip(given, value, strict=True):
            yield from _values(one, of_one)


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and storage_of(value) is not None


def _requires_grad(node: fx.Node) -> bool:
    found = flatten(node.meta.get("example_value"))[0]
    return any(isinstance(one, Tensor) and one.requires_grad for one in found)


def _is_matrix_product(node: fx.Node) -> bool:
    """Whether a node multiplies vectors by a matrix that belongs to no sample."""
    if _name(node) not in ("matmul", "__matmul__") or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
        return False
    matrix = node.args[1].meta.get("example_value")
    return isinstance(matrix, Tensor) and matrix.ndim == 2


def _is_in_layer(node: fx.Node) -> bool:
    """Whether a node belongs to one of torch's own layers, or to a norm: see `hooks.is_layer`."""
    stack = [*node.meta.get("nn_module_stack", {}).values()]
    if not stack:
        return False
    kind = stack[-1][1]
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return (name.startswith("torch.nn.") and not _HOLDS_OTHERS.search(name)) or bool(
        re.search(SAFE_NORM, name.rsplit(".", 1)[-1])
    )


# Modules of torch with modules inside: their own code takes several steps.
_HOLDS_OTHERS = re.compile(r"MultiheadAttention|Transformer|Parametrized|AdaptiveLogSoftmax|torch\.nn\.utils|container")


def _clean_op(
    z: Tensor, size: int, lengths: Sequence[int], along: int | None, rows: int, keep_neg_inf: bool, revision: int
) -> tuple[Tensor, Tensor]:
    batch = Batch(size, tuple(lengths), along or 0, z.device)
    is_last = batch.is_last(z.shape, rows)
    vectors = z.unsqueeze(-1) if is_last else z
    if is_shape_only(z):
        return z.clone(), empty_status(vectors)
    clean, status = replaced_with_status(vectors, keep_neg_inf)
    return clean.squeeze(-1) if is_last else clean, status


_CLEAN = define(
    "clean_argument(Tensor z, SymInt size, SymInt[] lengths, int? along, int rows, bool keep_neg_inf, int revision) -> "
    "(Tensor, Tensor)",
    _clean_op,
)


def _protect_op(
    z: Tensor,
    statuses: list[Tensor],
    codes: list[int],
    probes: Tensor | None,
    location: int,
    size: int,
    lengths: Sequence[int],
    along: int | None,
    rows: int,
    by_vector: bool,
    revision: int,
) -> Tensor:
    if is_shape_only(z):
        return z.clone()
    batch = Batch(size, tuple(lengths), along or 0, z.device)
    bad = None
    for status, code in zip(statuses, codes, strict=True):
        mask = bad_of(status, code, z, rows, batch, by_vector)
        bad = mask if bad is None else bad | mask
    return protected(z, bad, rows, Protection(batch, probes, location))


_PROTECT = define(
    "protect_result(Tensor z, Tensor[] statuses, int[] codes, Tensor? probes, int location, SymInt size, "
    "SymInt[] lengths, int? along, int rows, bool by_vector, int revision) -> Tensor",
    _protect_op,
)
