"""The owners of what products, convolutions, attention, norms, recurrent layers and losses return."""

from typing import Any

from torch import Tensor

from torchguard._watch.sample_intervals import Call, Owners, Rule, everything, union

# Products.


def product(*names: str) -> Rule:
    """A matrix product of two arguments, perhaps added to a third."""
    *added, left, right = names

    def rule(call: Call) -> Owners | None:
        a, b = call.of(left), call.of(right)
        rows = None if a is None else a.over([-1])
        if b is None or len(b.shape) < 2:
            columns = None if b is None else b.all()
            if a is not None and len(call.arguments[right].shape) < 2:
                rows = a.over([-1]).apply(lambda z: z.squeeze(-1))
        else:
            columns = b.over([-2])
        return union([rows, columns, *map(call.of, added)])

    return rule


def linear(call: Call) -> Owners | None:
    x, weight = call.of("input"), call.of("weight")
    rows = None if x is None else x.over([-1])
    return union([rows, None if weight is None else weight.over([-1]).apply(lambda z: z.squeeze(-1)), call.of("bias")])


def convolution(call: Call) -> Owners | None:
    """An output depends on the channels of its group, everywhere in the image; samples may be groups."""
    a = call.arguments
    x, out, groups = a["input"], call.outputs[0], a.get("groups", 1)
    found = []
    owners = call.owner(x)
    if owners is not None:
        if x.ndim != out.ndim or x.ndim < 3:
            return everything(call)
        spread = owners.over(range(2, x.ndim)).expand([*x.shape[:2], *[1] * (x.ndim - 2)])
        of_groups = spread.reshape([x.shape[0], groups, -1]).over([2]).expand([x.shape[0], groups, 1])
        channels = of_groups.expand([x.shape[0], groups, out.shape[1] // groups]).reshape([x.shape[0], -1])
        found.append(channels.reshape([*channels.shape, *[1] * (x.ndim - 2)]))
    weight = call.of("weight")
    if weight is not None:
        if a.get("transposed"):
            found.append(weight.all())
        else:
            found.append(weight.over(range(1, len(weight.shape))).reshape([1, -1, *[1] * (out.ndim - 2)]))
    bias = call.of("bias")
    found.append(None if bias is None else bias.reshape([1, -1, *[1] * (out.ndim - 2)]))
    return union(found)


def attention(call: Call) -> Any:
    """A query's output depends on the query, and on all keys and values of its sample and head."""
    query, key, value = (call.of(name) for name in ("query", "key", "value"))
    heads = {call.arguments[name].shape[1] for name in ("query", "key", "value")}
    dims = [2, 3] if len(heads) == 1 else [1, 2, 3]
    found = [None if query is None else query.over([3])]
    found += [None if one is None else one.over(dims) for one in (key, value)]
    for name in ("attn_mask", "attn_bias"):
        mask = call.of(name)
        found.append(None if mask is None else mask.over([-1]))
    row, out = union(found), call.outputs[0]
    if row is None:
        return None
    row = row.expand([*out.shape[:3], 1])
    return [row, *(_beside_attention(z, row, out) for z in call.outputs[1:])]


def _beside_attention(z: Tensor, row: Owners, out: Tensor) -> Owners | None:
    """The owners of a further result: numbers for each head, or integers, which are sizes and seeds."""
    if not z.is_floating_point() or z.numel() == 0:
        return None
    if z.shape[:2] != out.shape[:2]:
        return row.all()
    heads = row.over([2]).apply(lambda one: one[:, :, :1, :1].reshape([*out.shape[:2], *[1] * (z.ndim - 2)]))
    return heads.expand(z.shape)


def grouped_product(call: Call) -> Owners | None:
    x, offsets = call.of("self"), call.of("offs")
    if len(call.arguments["self"].shape) != 2:
        return everything(call)
    mat = call.of("mat2")
    return union([None if x is None else x.over([1]), *(None if one is None else one.all() for one in (offsets, mat))])


def distances(call: Call) -> Owners | None:
    one, two = call.of("x1"), call.of("x2")
    columns = None if two is None else two.over([-1]).apply(lambda z: z.transpose(-1, -2))
    return union([None if one is None else one.over([-1]), columns])


# Norms.


def layer_norm(call: Call) -> Any:
    x = call.arguments["input"]
    count = len(call.arguments["normalized_shape"])
    owners = call.of("input")
    kept = None if owners is None else owners.over(range(x.ndim - count, x.ndim))
    return union([kept, call.of("weight"), call.of("bias")])


def group_norm(call: Call) -> Any:
    x = call.arguments["input"]
    owners = union([call.of("input"), *(o.all() for n in ("weight", "bias") if (o := call.of(n)) is not None)])
    if owners is None:
        return None
    row = owners.expand(x.shape).over(range(1, x.ndim))
    return [row, *(row.reshape([x.shape[0], 1]) for _ in call.outputs[1:])]


def batch_norm(call: Call) -> Any:
    """While training, a channel depends on all samples in it. Instance norms give each sample channels of its own."""
    x = call.arguments["input"]
    owners = call.of("input")
    is_training = call.arguments.get("training", call.arguments.get("train", call.name != "_batch_norm_no_update"))
    others = [o for n in ("weight", "bias", "running_mean", "running_var") if (o := call.of(n)) is not None]
    shaped = [o.reshape([1, -1, *[1] * (x.ndim - 2)]) for o in others]
    if owners is not None and is_training:
        owners = owners.over([i for i in range(x.ndim) if i != 1])
    owners = union([owners, *shaped])
    if owners is None:
        return None
    channel = owners.expand([owners.shape[0], x.shape[1], *owners.shape[2:]])
    channel = channel.over([i for i in range(x.ndim) if i != 1]).reshape([x.shape[1]])
    return [owners, *(channel if out.shape == (x.shape[1],) else channel.all() for out in call.outputs[1:])]


# Recurrent layers, `(time, batch, width)`.


def recurrent(call: Call) -> Any:
    x = call.tensors()[0]
    if x.ndim != 3 or call.arguments.get("batch_sizes"):
        return everything(call)
    # oneDNN's operator gets its input time first in either case.
    dim = 0 if call.arguments.get("batch_first") and call.name != "mkldnn_rnn_layer" else 1
    found = []
    for z in call.tensors():
        owners = call.owner(z)
        if owners is None:
            continue
        its = dim if z is x else z.ndim - 2
        if z.ndim < 2 or z.shape[its] != x.shape[dim]:
            return everything(call)
        found.append(owners.over([i for i in range(z.ndim) if i != its]).reshape([-1]))
    owners = union(found)
    if owners is None:
        return None
    results = []
    for i, out in enumerate(call.outputs):
        its = dim if i == 0 else out.ndim - 2
        fits = out.ndim >= 2 and out.shape[its] == x.shape[dim]
        results.append(owners.reshape([-1 if j == its else 1 for j in range(out.ndim)]) if fits else owners.all())
    return results


def loss_by_class(call: Call) -> Any:
    x, target, owners = call.arguments["self"], call.of("target"), call.of("self")
    if call.arguments["reduction"] != 0 or x.ndim < 2:
        return everything(call)
    kept = None if owners is None else owners.over([1]).apply(lambda z: z.squeeze(1))
    both = union([kept, target, (w := call.of("weight")) and w.all()])
    return both and [both, both.all()]
