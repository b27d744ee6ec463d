"""Values that leave torch's operations (NumPy, lists, other threads) and come back: followed nowhere, so declared."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn, tensor

from torchguard import err
from torchguard._watch import watch
from torchguard.exceptions import MixedRowsWarning

NAN, ALL = float("nan"), [0, 1, 2, 3]
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()  # its thread is older than any call
TABLE = torch.linspace(0, 1, 5, dtype=torch.float64)


class WithStep(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(5, 5).double() for _ in range(3))
        self.step = step

    def forward(self, x):
        return self.last(self.step(self, self.first(x)))


def numbers(z):
    z = z.detach()
    return [z[0, 0], z[1, 1], z[2, 2], z[3, 3], z[0, 1]]


def in_a_new_thread(self, z):
    results = []
    thread = threading.Thread(target=lambda: results.append(z.roll(1, 0) * 2))
    thread.start()
    thread.join()
    return z + results[0]


def written_by_another_thread(make):
    def step(self, z):
        table = make(z)
        POOL.submit(lambda: table.copy_(z.detach().roll(1, 0))).result()
        return z + table

    return step


def written_through_numpy(self, z):
    copy = z.detach().clone()
    array = copy.numpy()
    array[:] = array[::-1].copy()
    return z + copy


def pooled(self, z):
    images = z[:, :, None, None].expand(-1, -1, 3, 3).contiguous(memory_format=torch.channels_last)
    return torch.nn.functional.adaptive_avg_pool2d(images, 1).flatten(1) * 2


MIXTURES = {
    "numpy": lambda self, z: z + torch.from_numpy(z.detach().numpy().mean(0)),
    "asarray": lambda self, z: z + torch.as_tensor(np.asarray(z.detach()).mean(0)),
    "DLPack": lambda self, z: z + torch.from_dlpack(np.from_dlpack(z.detach()).mean(0)),
    "written through NumPy": written_through_numpy,
    "tolist": lambda self, z: z + torch.tensor(np.mean(z.tolist(), 0)),
    "a method that another function calls": lambda self, z: z + torch.tensor([*map(torch.Tensor.tolist, z)]).mean(0),
    "item": lambda self, z: z + sum(one.item() for one in z[:, 0]),
    "torch.tensor of tensors": lambda self, z: z + torch.tensor(numbers(z)),
    "tensor of tensors": lambda self, z: z + tensor(numbers(z)),
    "DoubleTensor of tensors": lambda self, z: z + torch.DoubleTensor(numbers(z)),
    "rows sorted by Python": lambda self, z: z[sorted(range(len(z)), key=lambda i: z[i].sum())],
    "rows that a view in place exchanges": lambda self, z: z + torch.nn.functional.pad((z[:, :4] * 2).t_(), (0, 1)),
    "the size of nonzero": lambda self, z: z * (z > 0).nonzero().size(0),
    "the size of argwhere": lambda self, z: z * torch.argwhere(z > 0).shape[0],
    "the size of where": lambda self, z: z * len(torch.where(z > 0)[0]),
    "the size of a mask": lambda self, z: z * z[z > 0].numel(),
    "the size of masked_select": lambda self, z: z * 2 if z.masked_select(z > 0).numel() == 8 else z,
    "the size of unique": lambda self, z: z * z.unique().numel(),
    "the size of unique rows": lambda self, z: z * z.unique(dim=0).shape[0],
    "the size of unique_consecutive": lambda self, z: z * z.unique_consecutive().numel(),
    "the size of bincount": lambda self, z: z * torch.bincount((z[:, 0] > 0).long() * 3).numel(),
    "the size of repeat_interleave": lambda self, z: z * torch.repeat_interleave((z > 0).sum(1)).numel(),
    "the size of one_hot": lambda self, z: z * torch.nn.functional.one_hot(z.argmax(1)).shape[1],
    "an older thread": lambda self, z: z + POOL.submit(lambda: self.inner(z).mean(0)).result(),
    "a new thread": in_a_new_thread,
    "a thread that writes into new memory": written_by_another_thread(torch.empty_like),
    "a thread that writes into other memory": written_by_another_thread(torch.ones_like),
}
CONSTANTS = {
    "torch.tensor": lambda self, z: z * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double() + torch.tensor(0.5),
    "from_numpy": lambda self, z: z * torch.from_numpy(np.arange(5.0)),
    "a global": lambda self, z: z * TABLE,
    "a number of a shape": lambda self, z: z * float(np.prod(z.shape)),
    "torch.as_tensor of a tensor": lambda self, z: torch.as_tensor(z) * 2,
    "a mask of constants": lambda self, z: z + z[:, torch.arange(5) > 2].numel(),
    "rows in an order of their own": lambda self, z: z + z.gather(1, z.argsort(1)),
    "views in place": lambda self, z: z + (z * 2).unsqueeze_(1).transpose_(1, 2).squeeze_(2),
    "another view in place": lambda self, z: z + (z * 2).as_strided_((4, 5), (5, 1)) * 3,
    "a pooling that makes a view in place": pooled,
    "a copy": lambda self, z: z + torch.asarray(z.detach(), copy=True),
}


def bad_samples(guarded, has_gradient):
    x = torch.randn(4, 5, dtype=torch.float64)
    x[2] = NAN
    with torch.set_grad_enabled(has_gradient):
        return err.is_err(guarded(x)[1]).nonzero().flatten().tolist()


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_that_no_operation_shows_is_declared(name, has_gradient):
    guarded = watch(WithStep(MIXTURES[name]), quarantine=True)
    with pytest.warns(MixedRowsWarning, match="may mix samples"):
        assert bad_samples(guarded, has_gradient) == ALL
    assert bad_samples(guarded, has_gradient) == ALL


@pytest.mark.filterwarnings("error::torchguard.exceptions.MixedRowsWarning")
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_host_mix_nothing(name):
    guarded = watch(WithStep(CONSTANTS[name]), quarantine=True)
    for _ in range(2):
        assert bad_samples(guarded, True) == [2]


def test_the_functions_of_torch_are_put_back():
    before = {name: getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__dlpack__", "new_tensor")}
    functions = torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy
    with pytest.warns(MixedRowsWarning):
        bad_samples(watch(WithStep(MIXTURES["numpy"]), quarantine=True), True)
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy) == functions
    assert "tolist" not in torch.Tensor.__dict__
