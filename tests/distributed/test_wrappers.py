"""Watched and guarded models under DDP, FSDP2, tensor parallelism and a 2-D mesh: what one process does without the bad
samples, and reports that name rank, global sample and module."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchguard import Retry, distributed, err, watch
from torchguard.exceptions import DistributedError, MixedRowsWarning
from torchguard.testing import run_ranks

SIZES = [3, 4, 2, 5]
BAD = {0: [1], 1: [0, 1, 2, 3], 3: [4]}  # rank 1 has no good sample
BIG = 50.0  # a sample that starts with it overflows in `act`, in the last of its features only


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(4), nn.Linear(4, 8), Exponential(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.act(self.up(x))))


class Exponential(nn.Module):
    """Overflows for large numbers; for very small ones its derivative is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sqrt()


class BlocksAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network() -> BlocksAndHead:
    torch.manual_seed(0)
    net = BlocksAndHead().double()
    with torch.no_grad():
        net.blocks[0].up.weight[7, 0] = 100.0  # the last rank of tensor parallelism has this row
        net.blocks[0].up.weight[:7, 0] = 0.0
    return net


def batch(number: int, fault: float) -> Tensor:
    x = 0.1 * torch.randn(SIZES[number], 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    x[:, 0] = 0.0
    for row in BAD.get(number, []):
        x[row, 0] = fault
    return x


def good_batches(count: int) -> Tensor:
    return torch.cat([batch(n, 0.0)[[i for i in range(SIZES[n]) if i not in BAD.get(n, [])]] for n in range(count)])


def sharded(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def built(kind: str, model: nn.Module):
    """The model, this rank's number among those with different samples, their group, and that of tensor parallelism."""
    rank = dist.get_rank()
    if kind == "ddp":
        return DistributedDataParallel(model), rank, None, None
    if kind == "fsdp2":
        return sharded(model, dist.init_device_mesh("cpu", (4,))), rank, None, None
    if kind == "hsdp":
        return (
            sharded(model, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))),
            rank,
            None,
            None,
        )
    if kind == "tp":
        mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        return split(model, mesh), 0, dist.new_group([rank], use_local_synchronization=True), mesh["tp"]
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sharded(split(model, mesh["tp"]), mesh["dp"]), rank // 2, mesh["dp"].get_group(), mesh["tp"]


def whole(tensors) -> list[Tensor]:
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors]


def per_sample(out: Tensor) -> Tensor:
    return out.square().mean(-1)


KINDS = {"ddp": 4, "fsdp2": 4, "hsdp": 4, "tp": 1, "2d": 2}  # how many different batches there are
FAULTS = {"nan": float("nan"), "overflow": BIG}


def check(kind: str, found: list[tuple[float, list[Tensor]]]) -> None:
    single = network()
    loss = per_sample(single(good_batches(KINDS[kind]))).mean()
    loss.backward()
    for value, grads in found:
        assert value == pytest.approx(loss.item(), rel=1e-9)
        for got, want in zip(grads, [one.grad for one in single.parameters()], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def train_watched(kind: str, fault: float):
    inner = watch(network(), quarantine=True) if kind in ("ddp", "fsdp2", "hsdp") else None
    model, number, group, same_samples = built(kind, inner or network())
    guarded = inner or watch(model, quarantine=True)
    call = model if inner is not None else guarded
    out, f = call(batch(number, fault))
    if same_samples is not None:
        f = distributed.merge_flags(f, same_samples)
    loss = distributed.mean_ok(f, per_sample(out), group)
    loss.backward()
    incidents = distributed.gather_report(guarded, group)
    return loss.item(), whole(one.grad for one in call.parameters()), [(one[:3], str(one)) for one in incidents]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("fsdp2", "overflow"),
        *(pytest.param(kind, fault, marks=LONG) for kind in ("ddp", "hsdp", "fsdp2") for fault in FAULTS),
    ],
)
def test_watched(kind, fault):
    found = run_ranks(train_watched, kind, FAULTS[fault], size=4, timeout=200)
    check(kind, [one[:2] for one in found])
    starts = [sum(SIZES[:rank]) for rank in range(4)]
    where = [(rank, starts[rank] + row) for rank, rows in BAD.items() for row in rows]
    for *_, incidents in found:
        assert [one[:2] for one, _ in incidents] == where
        path = "input" if fault == "nan" else "blocks.0.down"  # Inf at the input of it
        assert {one[2] for one, _ in incidents} == {path}
        assert incidents[0][1].startswith("rank 0, global sample 1: sample 1: ")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tp", "2d"])
@pytest.mark.parametrize("fault", FAULTS)
def test_watched_with_tensor_parallelism(kind, fault):
    """Samples cannot be followed through DTensors. So all samples of a bad batch are flagged, and watch says so."""

    def train():
        model, number, group, same_samples = built(kind, network())
        guarded = watch(model, quarantine=True)
        with pytest.warns(MixedRowsWarning, match="may mix samples"):
            out, f = guarded(batch(number, FAULTS[fault]))
        f = distributed.merge_flags(f, same_samples)
        distributed.mean_ok(f, per_sample(out), group).backward()
        return err.is_err(f).tolist(), all(one.isfinite().all() for one in whole(p.grad for p in guarded.parameters()))

    for rank, (flagged, is_finite) in enumerate(run_ranks(train, size=4, timeout=200)):
        number = 0 if kind == "tp" else rank // 2
        assert flagged == [True] * SIZES[number]
        assert is_finite


class Scaled(nn.Module):
    """A layer that returns a DTensor, a DTensor of its own, and a square root with a derivative that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x).exp() * self.scale).sqrt())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
def test_watched_with_tensor_parallelism_in_the_model_s_own_code():
    """A fault in backward next to a DTensor that the model itself uses is recorded on the rank that has it."""

    def train():
        torch.manual_seed(0)
        model, mesh = Scaled().double(), dist.init_device_mesh("cpu", (2,))
        with torch.no_grad():
            model.up.weight[:, 0] = torch.tensor([0.0] * 7 + [100.0])
        layers = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
        parallelize_module(model, mesh, layers)
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Shard(0)]))
        guarded, found = watch(model, quarantine=True), []
        for fault in (0.0, float("nan"), BIG, -BIG):  # exp(-5000) is 0
            x = 0.1 * torch.ones(3, 4, dtype=torch.float64)
            x[1, 0] = fault
            model.zero_grad()
            out, f = guarded(x)
            f = distributed.merge_flags(f, mesh)
            err.mean_ok(f, per_sample(out).full_tensor()).backward()
            in_backward = distributed.merge_flags(guarded.backward_flags, mesh)
            is_finite = all(one.isfinite().all() for one in whole([out, *(p.grad for p in model.parameters())]))
            found.append((err.is_err(f).tolist(), err.is_err(in_backward).tolist(), is_finite))
        with pytest.raises(RuntimeError, match="Call it in eager mode"):
            torch.compile(guarded, backend="aot_eager")(x)
        return found

    none, everyone = [False] * 3, [True] * 3
    for found in run_ranks(train, size=2, timeout=200):
        assert found == [(none, none, True), (everyone, none, True), (everyone, none, True), (none, everyone, True)]


def train_guarded(kind: str, fault: float):
    model, number, group, _ = built(kind, network())
    different = {"tp": group, "2d": group, "hsdp": dist.group.WORLD}.get(kind)
    guard = Retry(model, process_group=different)
    report = guard.backward(lambda x: per_sample(model(x)), batch(number, fault))
    return report.loss, whole(one.grad for one in model.parameters()), report.bad, report.global_bad, str(report)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault", [*FAULTS.values(), -BIG], ids=[*FAULTS, "backward, on one rank of tensor parallelism"]
)
def test_guarded(kind, fault):
    found = run_ranks(train_guarded, kind, fault, size=4, timeout=200)
    check(kind, [one[:2] for one in found])
    if kind == "tp":  # all ranks have the same samples
        assert [bad for _, _, bad, _, _ in found] == [BAD[0]] * 4
        return
    everybody = [1, 3, 4, 5, 6, 13][: 6 if KINDS[kind] == 4 else 5]
    for rank, (_, _, bad, global_bad, text) in enumerate(found):
        assert bad == BAD.get(rank if kind != "2d" else rank // 2, [])
        assert global_bad == everybody
        assert f"in the batch of all ranks: samples {', '.join(map(str, everybody))}" in text


def checkpointed(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def quarantined(model: nn.Module) -> nn.Module:
    return watch(model, quarantine=True)


WRAPPINGS = {
    "watch(DDP(m))": lambda m: quarantined(DistributedDataParallel(m)),
    "DDP(watch(m))": lambda m: DistributedDataParallel(quarantined(m)),
    "watch(checkpoints)": lambda m: quarantined(checkpointed(m)),
    "checkpoints in watch(m)": lambda m: checkpointed(quarantined(m)),
    "DDP(watch(checkpoints))": lambda m: DistributedDataParallel(quarantined(checkpointed(m))),
    "compile(watch(m))": lambda m: compiled(quarantined(m)),
    "DDP(compile(watch(m)))": lambda m: DistributedDataParallel(compiled(quarantined(m))),
    "compile(DDP(watch(m)))": lambda m: compiled(DistributedDataParallel(quarantined(m))),
}


@pytest.mark.long
def test_reports_name_modules_as_the_model_does_without_wrappers():
    def train():
        found = {}
        for name, wrap in WRAPPINGS.items():
            model = wrap(network())
            out, f = model(batch(dist.get_rank(), BIG))
            distributed.mean_ok(f, per_sample(out)).backward()
            found[name] = [(one[:3], str(one)) for one in distributed.gather_report(model)]
        return found

    text = "sample {}: INF at input of blocks.0.down, position 0"
    expected = [(0, 1, 1), (1, 3, 0), (1, 4, 1), (1, 5, 2), (1, 6, 3)]
    incidents = [
        ((rank, everywhere, "blocks.0.down"), f"rank {rank}, global sample {everywhere}: {text.format(own)}")
        for rank, everywhere, own in expected
    ]
    for found in run_ranks(train, timeout=200):
        assert found == dict.fromkeys(WRAPPINGS, incidents)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.parametrize("kind", ["tp", "2d"])
def test_reports_with_tensor_parallelism_name_the_rank_among_those_with_other_samples(kind):
    def train():
        found = []
        model, number, group, _ = built(kind, network())
        guarded = watch(model, quarantine=True)
        for fault in FAULTS.values():
            guarded(batch(number, fault))
            found.append([(one[:3], str(one)) for one in distributed.gather_report(guarded, group)])
        return found

    samples = [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 3, 0), (1, 4, 1), (1, 5, 2), (1, 6, 3)][: 3 if kind == "tp" else 7]
    for of_faults in run_ranks(train, size=4, timeout=200):
        for (path, text), incidents in zip(
            [("input", "NAN at input x"), ("blocks.0.down", "INF at blocks.0.down")], of_faults, strict=True
        ):
            assert incidents == [
                ((rank, everywhere, path), f"rank {rank}, global sample {everywhere}: sample {own}: {text}, position 0")
                for rank, everywhere, own in samples
            ]


def test_a_report_of_a_model_that_is_not_watched():
    with pytest.raises(DistributedError, match="BlocksAndHead is no watched model"):
        distributed.gather_report(network())


def test_a_report_without_a_process_group():
    guarded = watch(network(), quarantine=True)
    guarded(batch(0, float("nan")))
    found = distributed.gather_report(guarded)
    assert [str(one) for one in found] == ["rank 0, global sample 1: sample 1: NAN at input x, position 0"]
    assert err.is_err(guarded.flags).tolist() == [False, True, False]
