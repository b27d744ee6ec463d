"""The owners of what operations with indices return. Values are known only of constant indices, such as `arange`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._watch.sample_intervals import Call, Owners, everything, union


def embedding(call: Call) -> Owners | None:
    index, weight = call.of("indices"), call.of("weight")
    return union([None if index is None else index.apply(lambda z: z.unsqueeze(-1)), weight and weight.all()])


def gather(call: Call) -> Owners | None:
    z, index = call.arguments["self"], call.arguments["index"]
    owners = call.of("self")
    if owners is not None:
        dim = call.arguments["dim"] % max(1, z.ndim)
        owners = owners.over([dim])
        for i in range(z.ndim):
            if i != dim and index.shape[i] < z.shape[i]:
                owners = owners.apply(lambda one, i=i: one.narrow(i, 0, index.shape[i]))
    return union([owners, call.of("index")])


def scatter(call: Call) -> Owners | None:
    z = call.arguments["self"]
    dim = call.arguments["dim"] % max(1, z.ndim)
    found = [call.of("self")]
    for name in ("src", "index"):
        owners = call.of(name)
        if owners is not None:
            sizes = [size for i, size in enumerate(call.arguments["index"].shape) if i != dim]
            fits = sizes == [size for i, size in enumerate(z.shape) if i != dim]
            same = fits and [s for i, s in enumerate(owners.shape) if i != dim] == sizes
            found.append(owners.over([dim]) if same else owners.all())
    return union(found)


def index_select(call: Call) -> Any:
    index = call.arguments["index"]
    z, owners, of_index = call.arguments["self"], call.of("self"), call.of("index")
    dim = call.arguments["dim"] % max(1, z.ndim)
    if owners is not None and call.is_constant(index) and z.ndim:
        known = index.detach().cpu()
        return owners.apply(lambda one: one.index_select(dim, known))
    kept = None if owners is None else owners.over([dim])
    if of_index is not None:
        of_index = of_index.reshape([-1 if i == dim else 1 for i in range(max(1, z.ndim))])
    return union([kept, of_index])


def index_add(call: Call) -> Owners | None:
    z = call.arguments["self"]
    dim = call.arguments["dim"] % max(1, z.ndim)
    added, index = call.of("source"), call.of("index")
    value = call.of("value")
    parts = [None if added is None else added.over([dim]), index and index.all(), value and value.all()]
    return union([call.of("self"), *parts])


class _Indices(NamedTuple):
    """The tensors of an index expression, where their dims are in the result, and the dims that they replace."""

    tensors: list[Tensor]
    replaced: list[int]
    start: int
    shape: torch.Size


def _indices(indices: Sequence[Tensor | None]) -> _Indices | None:
    replaced = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    is_adjacent = replaced == [*range(replaced[0], replaced[-1] + 1)]
    shape = torch.broadcast_shapes(*[index.shape for index in tensors])
    return _Indices(tensors, replaced, replaced[0] if is_adjacent else 0, shape)


def index(call: Call) -> Owners | None:
    """`z[i, :, j]`: along a dim with a constant index, the indexed owners; along others, those of all elements."""
    given = call.arguments["indices"]
    found = _indices(given)
    if found is None:
        return everything(call)
    owners = call.of("self")
    if owners is not None:
        unknown = [i for i in found.replaced if not call.is_constant(given[i])]
        kept = owners.over(unknown)
        known = [
            None if one is None else torch.zeros(one.shape, dtype=torch.int64) if i in unknown else one.detach().cpu()
            for i, one in enumerate(given)
        ]
        full = owners.shape
        spread = kept.expand([1 if i in unknown else full[i] for i in range(len(full))])
        owners = spread.apply(lambda z: z[tuple(slice(None) if one is None else one for one in known)])
    ndim = call.outputs[0].ndim
    of_indices = []
    for one in found.tensors:
        part = call.owner(one)
        if part is not None:
            part = part.expand(found.shape)
            after = ndim - found.start - len(found.shape)
            of_indices.append(part.reshape([*[1] * found.start, *found.shape, *[1] * after]))
    return union([owners, *of_indices])


def index_put(call: Call) -> Owners | None:
    """`z[:, i] = values`: along the indexed dims an element may get any of the values."""
    z, values = call.arguments["self"], call.of("values")
    found = _indices(call.arguments["indices"])
    of_indices = [owners.all() for one in (found.tensors if found else []) if (owners := call.owner(one)) is not None]
    if found is None:
        return everything(call)
    if values is None:
        return union([call.of("self"), *of_indices])
    is_adjacent = found.replaced == [*range(found.replaced[0], found.replaced[-1] + 1)]
    before, after = found.start, z.ndim - found.replaced[-1] - 1
    full = [*z.shape[:before], *found.shape, *z.shape[z.ndim - after :]]
    if not is_adjacent or len(values.shape) > len(full):
        return union([call.of("self"), values.all(), *of_indices])
    spread = values.expand(full).over(range(before, before + len(found.shape)))
    ones = [*z.shape[:before], *[1] * len(found.replaced), *z.shape[z.ndim - after :]]
    kept = spread.expand([*z.shape[:before], *[1] * len(found.shape), *z.shape[z.ndim - after :]]).reshape(ones)
    return union([call.of("self"), kept, *of_indices])
