"""Training loops of many kinds, each as it would be written without `Retry`."""

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

B = 6
nan, inf = float("nan"), float("inf")


@dataclass
class Loop:
    """A model with its closure and optimizers.

    Args:
        modules: whose parameters and buffers are compared.
        closure: of one batch.
        optimizers: of all parameters.
        options: of `Retry`.
        state: other values that a step changes.
    """

    modules: list[nn.Module]
    closure: Callable[[Any], Any]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    state: Callable[[], list[Any]] = list

    def __post_init__(self):
        trained = [one for module in self.modules for one in module.parameters() if one.requires_grad]
        self.optimizers = self.optimizers or [torch.optim.SGD(trained, lr=0.05)]

    def values(self):
        tensors = {f"{i}.{key}": value for i, one in enumerate(self.modules) for key, value in one.state_dict().items()}
        return tensors | {f"state {i}": torch.as_tensor(value) for i, value in enumerate(self.state())}


def vectors():
    return {"x": torch.randn(B, 4), "y": torch.randint(3, (B,))}


def images():
    return {"x": torch.randn(B, 3, 8, 8), "y": torch.randint(3, (B,))}


def sequences():
    return {"x": torch.randn(B, 5, 4), "y": torch.randint(3, (B,))}


def with_nan(batch, rows):
    """NaN in the input of some samples."""
    batch["x"][rows] = nan


def with_nan_in_other_view(batch, rows):
    batch["z"][rows] = nan


def with_huge(batch, rows):
    """Finite inputs that overflow in the middle of the model, or in its loss."""
    batch["x"][rows] = batch["x"][rows].sign() * 1e300


def with_zeros(batch, rows):
    """Inputs whose forward pass is finite."""
    batch["x"][rows] = 0


def by_class(outputs, batch):
    return F.cross_entropy(outputs, batch["y"], reduction="none")


def squares(outputs):
    return outputs.square().flatten(1).mean(1)


# The models that the first prototype was tried on.


class Queries(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o, self.n = nn.Embedding(B, 8), nn.Linear(4, 8), nn.Linear(8, 2), nn.LayerNorm(8)

    def forward(self, x):
        a = torch.softmax(self.n(self.q.weight) @ self.k(x).mT, -1) @ x
        return self.o(torch.cat([a, a], -1)).mean(1)


class Rolled(nn.Module):
    def __init__(self, is_rolled_back=True):
        super().__init__()
        self.a, self.b, self.is_rolled_back = nn.Linear(4, 8), nn.Linear(8, 2), is_rolled_back

    def forward(self, x):
        out = self.b(self.a(x.roll(2, 0)).tanh().exp())
        return out.roll(-2, 0) if self.is_rolled_back else out


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.m, self.o = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Linear(2, 3), nn.Linear(4, 2)

    def forward(self, x):
        n, z = len(x), x[:, 0, :2, 0]
        w = self.w[None] * self.m(z).exp()[:, None, :, None, None]
        return self.o(F.conv2d(x.reshape(1, n * 3, 8, 8), w.flatten(0, 1), groups=n).view(n, 4, 6, 6).mean((2, 3)))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.n(self.a(x)).relu())


class Lengths(nn.Module):
    """Divides by the length of a vector: without one, the backward pass alone is not finite."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x).pow(2).sum(-1, keepdim=True) ** 0.5 + self.a(x))


def loop_of(model, losses=by_class, **options):
    return Loop([model], lambda b: losses(model(b["x"]), b), **options)


def contrast(outputs, batch):
    return -torch.log_softmax(outputs @ outputs.mT, -1).diagonal()


def of_squares(outputs, batch):
    return squares(outputs)


def dropped():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 3))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.n, self.m = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return (x + self.m(self.b(self.n(self.a(x)).relu()))).relu()


def resnet():
    return nn.Sequential(nn.Conv2d(3, 6, 3), Block(6), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


# Models of other shapes.


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, b):
        source, target = b["edges"]
        h = self.a(b["x"])
        h = h + torch.zeros_like(h).index_add(0, target, h[source]).tanh()
        count = len(b["y"])
        return self.b(torch.zeros(count, 8).index_add(0, b["graph"], h))


def graphs():
    nodes = [3, 1, 4, 2, 5, 3]
    graph = torch.repeat_interleave(torch.arange(B), torch.tensor(nodes))
    edges = [(i, j) for i in range(len(graph)) for j in range(len(graph)) if i != j and graph[i] == graph[j]]
    return {
        "x": torch.randn(len(graph), 4),
        "edges": torch.tensor(edges).T,
        "graph": graph,
        "y": torch.randint(3, (B,)),
    }


def some_graphs(b, rows):
    kept = torch.cat([(b["graph"] == row).nonzero().flatten() for row in rows])
    place = torch.full((len(b["graph"]),), -1)
    place[kept] = torch.arange(len(kept))
    edges = place[b["edges"]]
    graph = torch.repeat_interleave(
        torch.arange(len(rows)), torch.tensor([int((b["graph"] == row).sum()) for row in rows])
    )
    return {"x": b["x"][kept], "edges": edges[:, (edges >= 0).all(0)], "graph": graph, "y": b["y"][rows]}


def bad_graphs(batch, rows):
    for row in rows:
        batch["x"][batch["graph"] == row] = nan


def gnn():
    model = Graphs()
    return Loop(
        [model], lambda b: by_class(model(b), b), options={"select": some_graphs, "size": lambda b: len(b["y"])}
    )


def packed():
    model, head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def closure(b):
        out, _ = model(pack_padded_sequence(b["x"], b["length"], batch_first=True, enforce_sorted=False))
        out, _ = pad_packed_sequence(out, batch_first=True)
        return by_class(head(out.sum(1)), b)

    return Loop([model, head], closure)


def with_lengths():
    return sequences() | {"length": torch.randint(1, 6, (B,))}


def first_step_nan(batch, rows):
    batch["x"][rows, 0] = nan


# Losses that couple samples.


def views():
    return {
        "x": torch.randn(B, 4),
        "z": torch.randn(B, 4),
        "n": torch.randn(B, 4),
        "y": torch.tensor([0, 0, 1, 0, 1, 1]),
    }


def info_nce():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def closure(b):
        one, other = F.normalize(model(b["x"])), F.normalize(model(b["z"]))
        return F.cross_entropy(one @ other.mT / 0.1, torch.arange(len(one)), reduction="none")

    return Loop([model], closure)


def triplet():
    model = nn.Linear(4, 8)
    return Loop(
        [model],
        lambda b: F.triplet_margin_loss(model(b["x"]), model(b["z"]), model(b["n"]), margin=5.0, reduction="none"),
    )


def supervised_contrastive():
    """NaN for a sample without another one of its class."""
    model = nn.Linear(4, 8)

    def closure(b):
        z = F.normalize(model(b["x"]))
        other = ~torch.eye(len(z), dtype=torch.bool)
        positive = (b["y"][:, None] == b["y"]) & other
        logs = torch.log_softmax((z @ z.mT / 0.1).masked_fill(~other, -1e9), -1)
        return -(logs * positive).sum(1) / positive.sum(1)

    return Loop([model], closure)


def mixup():
    model = Norms()

    def closure(b):
        order, share = torch.randperm(len(b["x"])), np.random.beta(1.0, 1.0) * random.uniform(0.5, 1)
        out = model(share * b["x"] + (1 - share) * b["x"][order])
        return share * by_class(out, b) + (1 - share) * by_class(out, {"y": b["y"][order]})

    return Loop([model], closure)


# State that a step changes.


class Momentum(nn.Module):
    """A student, a teacher that follows it, and a queue of the teacher's keys."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.steps, self.keys = 0, deque(maxlen=3)

    def forward(self, x, z):
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data = mine.data * 0.9 + theirs.data * 0.1
        with torch.no_grad():
            key = F.normalize(self.teacher(z))
        query = F.normalize(self.student(x))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().mT], 1) / 0.1
        place = (int(self.pointer) + torch.arange(len(key))) % len(self.queue)
        self.queue[place] = key
        self.pointer[0] = (int(self.pointer) + len(key)) % len(self.queue)
        self.steps += 1
        self.keys.append(key.mean())
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long), reduction="none")


def momentum():
    model = Momentum()
    return Loop([model], lambda b: model(b["x"], b["z"]), state=lambda: [model.steps, *model.keys])


class Codebook(nn.Module):
    """A VQ-VAE whose codebook follows the mean of its vectors."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x):
        z = self.encoder(x)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        quantized = self.codes[chosen]
        if self.training:
            hot = F.one_hot(chosen, 5).to(z.dtype)
            self.count.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.total = self.total * 0.9 + 0.1 * hot.mT @ z.detach()
            self.codes.data.copy_(self.total / self.count[:, None])
        out = self.decoder(z + (quantized - z).detach())
        return (out - x).square().mean(1) + 0.25 * (quantized - z).square().mean(1)


def codebook():
    model = Codebook()
    return Loop([model], lambda b: model(b["x"]))


HIDDEN = None


def recurrent(kind):
    """Truncated backpropagation through time: each step starts from the mean state that the last one left."""

    def make():
        global HIDDEN
        cell, head = nn.GRUCell(4, 8), nn.Linear(8, 3)
        HIDDEN, inner, held, spaces = (
            torch.zeros(8),
            torch.zeros(8),
            {"h": torch.zeros(8)},
            SimpleNamespace(h=torch.zeros(8)),
        )
        cell.h = torch.zeros(8)

        def step(b, hidden):
            hidden = hidden.expand(len(b["x"]), 8)
            for x in b["x"].unbind(1):
                hidden = cell(x, hidden)
            return by_class(head(hidden), b), hidden.mean(0).detach()

        def of_attribute(b):
            losses, cell.h = step(b, cell.h)
            return losses

        def of_cell(b):
            nonlocal inner
            losses, inner = step(b, inner)
            return losses

        def of_global(b):
            global HIDDEN
            losses, HIDDEN = step(b, HIDDEN)
            return losses

        def of_dict(b):
            losses, held["h"] = step(b, held["h"])
            return losses

        def of_namespace(b):
            losses, new = step(b, spaces.h.clone())
            spaces.h.copy_(new)
            return losses

        closures = {"attribute": of_attribute, "cell": of_cell, "global": of_global, "dict": of_dict}
        closure = {**closures, "namespace": of_namespace}[kind]
        kept = {
            "attribute": lambda: [cell.h],
            "cell": lambda: [inner],
            "global": lambda: [HIDDEN],
            "dict": lambda: [held["h"]],
            "namespace": lambda: [spaces.h],
        }
        return Loop([cell, head], closure, state=kept[kind])

    return make


def diffusion():
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(1)

    def closure(b):
        time = torch.randint(1, 100, (len(b["x"]), 1), generator=generator) / 100
        noise = torch.randn_like(b["x"])
        out = model(torch.cat([b["x"] * (1 - time) + noise * time, time], 1))
        return (out - noise).square().mean(1)

    return Loop([model], closure, state=lambda: [generator.get_state()])


def sparse():
    table, head = nn.EmbeddingBag(20, 8, sparse=True, mode="sum"), nn.Linear(8, 3)
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.05), torch.optim.AdamW(head.parameters(), lr=0.05)]

    def closure(b):
        return by_class(head(table(b["words"], per_sample_weights=b["x"])), b)

    return Loop([table, head], closure, optimizers)


def words():
    return {"words": torch.randint(20, (B, 4)), "x": torch.rand(B, 4), "y": torch.randint(3, (B,))}


def tokens():
    weight = (torch.rand(B, 5) < 0.6).double()
    weight[:, 0] = 1
    return {"x": torch.randn(B, 5, 4), "y": torch.randint(3, (B, 5)), "weight": weight}


def token_weighted():
    model = nn.Linear(4, 3)

    def closure(b):
        losses = F.cross_entropy(model(b["x"]).mT, b["y"], reduction="none")
        return (losses * b["weight"]).sum(1), b["weight"].sum(1)

    return Loop([model], closure)


def scalar():
    model = Norms()
    return Loop([model], lambda b: F.cross_entropy(model(b["x"]), b["y"]))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))


def checkpointed():
    model = Norms()
    return Loop([model], lambda b: by_class(checkpoint(model, b["x"], use_reentrant=False), b))


def gradient_penalty():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def closure(b):
        x = b["x"].clone().requires_grad_()
        losses = by_class(model(x), b)
        (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 0.1 * gradient.square().sum(1)

    return Loop([model], closure)


def averaged_in_the_closure():
    """A teacher that is an average of the student, buffers included."""
    model = Norms()
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True).requires_grad_(False)

    def closure(b):
        teacher.update_parameters(model)
        outputs = model(b["x"])
        return by_class(outputs, b) + squares(outputs - teacher(b["x"]))

    return Loop([model, teacher], closure)


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def low_rank():
    return nn.Sequential(LowRank(4, 8), nn.BatchNorm1d(8), nn.ReLU(), LowRank(8, 3))


# A name, how to make the loop and a batch of it, and how to make samples bad.
LOOPS: dict[str, tuple[Callable[[], Loop], Callable[[], Any], Callable[[Any, list[int]], None]]] = {
    "learned queries": (lambda: loop_of(Queries(), of_squares), sequences, with_nan),
    "rolled": (lambda: loop_of(Rolled(), of_squares), vectors, with_nan),
    "rolled, shown by others": (lambda: loop_of(Rolled(False), of_squares), vectors, with_nan),
    "samples as groups": (lambda: loop_of(Grouped(), of_squares), images, with_nan),
    "batch norm": (lambda: loop_of(Norms()), vectors, with_nan),
    "batch norm, overflow": (lambda: loop_of(Norms()), vectors, with_huge),
    "contrastive": (lambda: loop_of(Norms(), contrast), vectors, with_huge),
    "backward only": (lambda: loop_of(Lengths()), vectors, with_zeros),
    "dropout": (lambda: loop_of(dropped()), vectors, with_nan),
    "dropout, overflow": (lambda: loop_of(dropped(), of_squares), vectors, with_huge),
    "resnet": (lambda: loop_of(resnet()), images, with_nan),
    "resnet, overflow": (lambda: loop_of(resnet()), images, with_huge),
    "spectral norm": (lambda: loop_of(spectral()), vectors, with_nan),
    "gnn": (gnn, graphs, bad_graphs),
    "packed lstm": (packed, with_lengths, first_step_nan),
    "info nce": (info_nce, views, with_nan),
    "info nce, other view": (info_nce, views, with_nan_in_other_view),
    "triplet": (triplet, views, with_nan),
    "supervised contrastive": (supervised_contrastive, views, with_nan),
    "mixup": (mixup, vectors, with_nan),
    "mixup, overflow": (mixup, vectors, with_huge),
    "momentum contrast": (momentum, views, with_nan),
    "momentum contrast, overflow": (momentum, views, with_huge),
    "vq-vae": (codebook, vectors, with_nan),
    "vq-vae, overflow": (codebook, vectors, with_huge),
    **{
        f"bptt, {kind}": (recurrent(kind), sequences, with_nan)
        for kind in ("attribute", "cell", "global", "dict", "namespace")
    },
    "diffusion": (diffusion, vectors, with_nan),
    "sparse embeddings": (sparse, words, with_nan),
    "token-weighted": (token_weighted, tokens, with_nan),
    "one loss": (scalar, vectors, with_nan),
    "one loss, overflow": (scalar, vectors, with_huge),
    "checkpointing": (checkpointed, vectors, with_nan),
    "gradient penalty": (gradient_penalty, vectors, with_nan),
    "average in the closure": (averaged_in_the_closure, vectors, with_nan),
    "average in the closure, overflow": (averaged_in_the_closure, vectors, with_huge),
    "low rank": (lambda: loop_of(low_rank()), vectors, with_huge),
}
