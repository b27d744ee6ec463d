"""Owners: what an element depends on, found by changing one sample at a time, lies within the claimed interval."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchguard._watch.batch import UNBATCHED, row_code
from torchguard._watch.owner_storages import rows_of
from torchguard._watch.owners import OwnerMode
from torchguard._watch.sample_intervals import Owners

BATCH = 3


def claimed(program, x):
    """The output of a program, and its owners."""
    mode = OwnerMode()
    with mode:
        mode.set_samples(x, 0)
        out = program(x)
    return out, mode.owners_of(out)


def assert_sound(program, x):
    """Changing a sample changes no element that does not count it among its owners."""
    torch.manual_seed(0)
    out, owners = claimed(program, x.clone())
    for sample in range(len(x)):
        other = x.clone()
        other[sample] = other[sample].flip(-1) * 1.7 + 0.3
        torch.manual_seed(0)
        new = program(other)
        if new.shape != out.shape:
            continue
        changed = new != out
        if owners is None:
            assert not changed.any()
        else:
            assert not (changed & ((owners.low > sample) | (owners.high < sample))).any(), sample
    return out, owners


def windows(x):
    b, t, d = x.shape
    return x.view(b, t // 2, 2, d).roll(1, 1).flatten(0, 1)


STEPS = {
    "time first": lambda x: x.transpose(0, 1).flatten(0, 1).view(x.shape[1], x.shape[0], -1),
    "twice": lambda x: torch.cat([x, x * 2]),
    "windows": windows,
    "roll samples": lambda x: x.roll(1, 0),
    "flip samples": lambda x: x.flip(0),
    "stack": lambda x: torch.stack([x, x + 1], 1).flatten(1, 2),
    "interleave": lambda x: x.repeat_interleave(2, 0),
    "softmax over tokens": lambda x: x.softmax(1),
    "softmax over samples": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(1).values,
    "sort samples": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "instance norm": lambda x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1)).squeeze(1),
    "gram": lambda x: x @ x.transpose(1, 2) @ x,
    "gram of samples": lambda x: torch.einsum("btd,ctd->bc", x, x).softmax(-1) @ x.flatten(1) * torch.ones(1),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3, dtype=x.dtype) / 3, padding=1).transpose(
        1, 2
    ),
    "samples as groups": lambda x: _samples_as_groups(x),
    "pick by constant": lambda x: x[torch.arange(len(x)).flip(0)],
    "pick by value": lambda x: x[x[:, 0, 0].argsort()],
    "pick a token": lambda x: x[torch.arange(len(x)), x[:, :, 0].argmax(1)].unsqueeze(1).expand_as(x),
    "gather tokens": lambda x: x.gather(1, x.argsort(1)),
    "gather samples": lambda x: x.gather(0, x.argsort(0)),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x),
    "add by index": lambda x: x.index_add(0, x[:, 0, 0].argsort(), x),
    "put by index": lambda x: torch.zeros_like(x).index_put((x[:, 0, 0].argsort(),), x),
    "one by one": lambda x: _one_by_one(x),
    "write in place": lambda x: _write_in_place(x),
    "write a column": lambda x: _write_a_column(x),
    "masked": lambda x: x.masked_fill(x > x.mean(), 0),
    "where": lambda x: torch.where(x > 0, x, x.flip(0)),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "pool": lambda x: F.avg_pool1d(x, 2).repeat_interleave(2, -1),
    "unfold": lambda x: x.unfold(1, 2, 1).mean(-1).repeat(1, 2, 1)[:, : x.shape[1]],
    "solve": lambda x: torch.linalg.solve(x[:, :4] + 9 * torch.eye(4), x[:, :4]).repeat(1, 1, 1),
    "lstm": lambda x: LSTM(x)[0],
    "constant": lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2).contiguous())).flatten(
        -2
    ),
}
LSTM = nn.LSTM(4, 4, batch_first=True).double().requires_grad_(False)


def _samples_as_groups(x):
    weight = torch.ones(x.shape[0] * 4, 4, 1, dtype=x.dtype)
    out = F.conv1d(x.transpose(1, 2).reshape(1, -1, x.shape[1]), weight, groups=x.shape[0])
    return out.view(x.shape[0], 4, -1).transpose(1, 2)


def _one_by_one(x):
    return torch.stack([x[i] * (i + 1) for i in range(len(x))])


def _write_in_place(x):
    out = torch.zeros(x.shape[1], x.shape[0], x.shape[2], dtype=x.dtype)
    for i in range(len(x)):
        out[:, i] = x[i]
    out.transpose(0, 1)[0].add_(1)
    return out.transpose(0, 1)


def _write_a_column(x):
    out = x.clone()
    out = out.contiguous()
    out.view(-1)[: out[0].numel()] = x.flatten()[-out[0].numel() :]
    return out


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_owners_hold_all_samples_that_an_element_depends_on(names):
    def program(x):
        for name in names:
            if x.ndim == 3 and x.shape[1] >= 4 and x.shape[1] % 2 == 0 and x.shape[2] == 4:
                x = STEPS[name](x)
        return x

    assert_sound(program, torch.randn(BATCH, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_owners_of_each_step_hold_what_it_depends_on(name):
    assert_sound(STEPS[name], torch.randn(BATCH, 4, 4, dtype=torch.float64))


KEPT_APART = (
    "time first",
    "softmax over tokens",
    "sort",
    "norm",
    "instance norm",
    "attention",
    "gram",
    "convolution",
    "samples as groups",
    "pick a token",
    "gather tokens",
    "scatter",
    "one by one",
    "write in place",
    "fft",
    "pool",
    "lstm",
    "complex",
)


@pytest.mark.parametrize("name", KEPT_APART)
def test_where_samples_are_kept_apart_each_element_has_one_owner(name):
    _, owners = claimed(STEPS[name], torch.randn(BATCH, 4, 4, dtype=torch.float64))
    assert torch.equal(owners.low, owners.high)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (lambda x: x, row_code(0)),
        (lambda x: x.flatten(0, 1), row_code(0)),
        (lambda x: torch.cat([x, x]), row_code(0, 0, 1)),
        (lambda x: x.transpose(0, 1).flatten(0, 1), row_code(0, 0, 1)),
        (lambda x: torch.cat([x.flatten(0, 1)] * 2), row_code(0, 2, 4)),
        (lambda x: x.transpose(0, 1), row_code(1)),
        (lambda x: torch.cat([x, x], -1), row_code(0)),
        (lambda x: torch.cat([x, torch.zeros(3, 2, 4), x[:, :0]], 1), row_code(0)),
        (lambda x: torch.cat([x[:1], x[1:]]), row_code(0)),
        (lambda x: torch.cat([x[1:], x[:1]]), None),
        (lambda x: torch.cat([x, x.flip(0)], -1), None),
        (lambda x: torch.ones(3), UNBATCHED),
        (lambda x: x.sum(0), None),
        (lambda x: x.roll(1, 0), None),
    ],
)
def test_row_codes(program, code):
    _, owners = claimed(program, torch.randn(BATCH, 4, 4))
    assert rows_of(owners, BATCH) == code


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.renorm(x, 2, 1, 0.5),
        lambda x: x + torch.linspace(x[0, 0, 0], x[1, 0, 0], 4),
        lambda x: x.index_fill(1, torch.tensor([0]), x[0, 0, 0]),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.where(x > 0, x, x.flip(0)).index_select(1, torch.arange(2)),
    ],
)
def test_operations_with_unusual_arguments(program):
    assert_sound(program, torch.randn(BATCH, 4, 4, dtype=torch.float64))


def test_a_constant_that_is_written_into_a_part_leaves_the_owners_of_the_rest():
    def program(x):
        x = x * 2
        x[:, 0] = 0.0
        x[:, 1].zero_()
        return x

    _, owners = assert_sound(program, torch.randn(BATCH, 4, 4, dtype=torch.float64))
    assert rows_of(owners, BATCH) == row_code(0)


def test_memory_that_no_operation_wrote_may_depend_on_everything():
    def program(x):
        out = torch.empty_like(x)
        out.numpy()[:] = x.numpy()[::-1]  # as a kernel would that is not torch's
        return out * 1

    assert_sound(program, torch.randn(BATCH, 4, 4, dtype=torch.float64))


def test_a_value_that_reaches_python_is_noticed():
    mode, x, ids = OwnerMode(), torch.randn(BATCH, 4), torch.ones(BATCH, 4, dtype=torch.long)
    with mode:
        mode.set_samples(x, 0)
        mode.set_samples(ids, 0)
        assert (ids == 1).all()
    assert not mode.is_lost
    with mode:
        bool((x > 1).any())
    assert mode.is_lost


@pytest.mark.parametrize("name", ["efficient", "flash", "cudnn"])
def test_what_attention_on_a_gpu_returns_beside_its_output_mixes_no_samples(name):
    with FakeTensorMode():
        q = torch.empty(4, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    mode = OwnerMode()
    with torch.no_grad(), mode:
        mode.set_samples(q, 0)
        attention(q, q, q, *([] if name == "flash" else [None, True]))
    assert mode.problem is None
    assert not mode.has_picked


@st.composite
def expanded_tensors(draw):
    """A tensor that stores some dims once, and another shape of as many elements."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    stored = torch.randint(9, [size if draw(st.booleans()) else 1 for size in sizes])
    factors = [2 if size == 4 and draw(st.booleans()) else size for size in sizes]
    other = [part for size, one in zip(sizes, factors, strict=True) for part in ([one] if one == size else [one, one])]
    shape: list[int] = []
    for size in other:  # join neighbours
        if shape and draw(st.booleans()):
            shape[-1] *= size
        else:
            shape.append(size)
    return stored.expand(sizes), shape


@given(expanded_tensors())
def test_owners_are_reshaped_as_tensors_are_and_dims_stored_once_stay_so(given_tensor):
    z, shape = given_tensor
    reshaped = Owners(z, z).reshape(shape).low
    assert torch.equal(reshaped, z.reshape(shape))
    if all(stride == 0 or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True)):
        assert reshaped.untyped_storage().nbytes() <= z.untyped_storage().nbytes()


def test_owners_of_the_patches_of_images_are_stored_once_for_a_sample():
    owners = torch.arange(64).view(64, 1, 1, 1).expand(64, 768, 14, 14)
    patches = Owners(owners, owners).reshape([64, 768, 196]).apply(lambda z: z.transpose(1, 2))
    assert patches.reshape([64 * 196, 768]).low.untyped_storage().nbytes() == 64 * 196 * owners.element_size()


def test_owners_that_are_equal_are_stored_once():
    every = torch.arange(4).view(4, 1, 1).repeat(1, 100, 3)
    found = Owners(every, every.clone()).stored_once()
    assert torch.equal(found.low, every)
    assert torch.equal(found.high, every)
    assert found.compact().low.shape == (4, 1, 1)
    every[1, 7, 2] = 3
    assert torch.equal(Owners(every, every).stored_once().low, every)
