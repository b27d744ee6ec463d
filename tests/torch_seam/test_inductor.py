"""Ops that Inductor compiles in place: they change no memory that anything else reads."""

from pathlib import Path

import pytest
import torch
from torch import library
from torch._inductor.utils import run_and_get_code

from torchguard._operators import source_checksum
from torchguard._torch import inductor
from torchguard._torch.inductor import compile_in_place, compile_to_call

# torch's caches do not compare how an op is compiled, but its arguments.
REVISION = source_checksum(Path(inductor.__file__).parent)


def defined(name, **options):
    """An op that returns what the op `<name>_` leaves in its argument: zeros in place of negative numbers."""
    ops = library.Library("torchguard_test", "FRAGMENT")
    ops.define(f"{name}_(Tensor(a!) z) -> ()")
    ops.impl(f"{name}_", _relu_, "CPU")
    ops.define(f"{name}(Tensor z, int revision) -> Tensor")
    ops.impl(name, lambda z, revision: z.clamp(min=0).contiguous(), "CPU")
    library.register_fake(f"torchguard_test::{name}_", lambda z: None, lib=ops)
    library.register_fake(f"torchguard_test::{name}", lambda z, revision: z.new_empty(z.shape), lib=ops)
    op = getattr(torch.ops.torchguard_test, name)
    compile_in_place(op, getattr(torch.ops.torchguard_test, f"{name}_"), "torch:relu_", **options)
    yield lambda z: op(z, REVISION)
    ops._destroy()


@pytest.fixture(scope="module")
def relu():
    yield from defined("relu")


@pytest.fixture(scope="module")
def masked():
    """An op whose result the later uses of its argument may read, too."""
    yield from defined("mask", for_all_uses=True)


def _relu_(z):
    z.clamp_(min=0)


def results(relu, x, w):
    """The op where its argument is in memory or not, has another use or none, and shares memory or not."""
    product, parts, half = x @ w, (x @ w).split(4, -1), x @ w
    seen, viewed, kept, reread = x @ w, x @ w, x @ w, x @ w
    before, lazy, view, flat = seen.sum() + seen.view(-1).amax(), viewed * 2, kept.t(), reread.view(-1)
    both = torch.cat([half, half + 1])
    return {
        "the only use": relu(x @ w) + 1,
        "a graph input": relu(x) + 1,
        "a view of a graph input": relu(x.t()) + 1,
        "another use before": product.sum() + relu(product),
        "other uses before, not in the result": relu(seen) * before,
        "another use before, computed after": lazy.cos() + relu(viewed) + lazy,
        "a view from before, used after": relu(kept) + view.t(),
        "a view from before, used before and after": flat.sum() + relu(reread).sum() + flat,
        "another use after": relu(product + 1).sum() + (product + 1),
        "a view of what is not in memory": relu((x * 2).reshape(3, 2, 2, 4).transpose(1, 2).reshape(3, 2, 8)) + 1,
        "a view of what is in memory": relu((x @ w).view(3, 2, 8)) + 1,
        "a view in another order": relu((x @ w).t()) + 1,
        "parts of one tensor": relu(parts[0]) + parts[1] + relu(parts[1]),
        "a part that is joined": relu(both).sum() + half,
        "elements that share memory": relu((x @ w)[:, :1].expand(6, 8)) + 1,
        "a cast to the same dtype": relu((x @ w).to(torch.float32)) + product,
        "twice": relu(relu(x @ w) - 1),
        "what is returned, too": product,
    }


def test_an_op_is_compiled_in_place(relu):
    def step(x, w):
        product, other = x @ w, x @ w
        return relu(product), relu(other), other

    x, w = torch.randn(6, 8), torch.randn(8, 8)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    assert code.count("torchguard_relu_(") == 2
    assert "torch.ops.torchguard_test" not in code.split("def call")[-1]
    torch.testing.assert_close(got, step(x, w))


def test_what_was_used_before_is_not_copied(relu):
    def step(x, w):
        product = torch.mm(x, w)
        return product.view(-1).amax(), relu(product)

    x, w = torch.randn(6, 8), torch.randn(8, 8)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    assert code.count("empty_strided_cpu((6, 8)") == 1
    torch.testing.assert_close(got, step(x, w))


def test_later_uses_read_what_an_op_left_and_earlier_ones_what_was_there(masked):
    def step(x, w):
        in_memory, computed, viewed = x @ w, x * 2 - 1, x @ w
        before = in_memory.sum() + computed.sum(), viewed.t() * 2
        first, second, third = masked(in_memory), masked(computed), masked(viewed.view(3, 2, 8))
        return before, first, second, third, in_memory + 1, computed + 1, viewed + 1

    x, w = torch.randn(6, 8), torch.randn(8, 8)
    given = x.clone()
    (before, first, second, third, *later), (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    product, doubled = x @ w, x * 2 - 1
    torch.testing.assert_close(before, (product.sum() + doubled.sum(), product.t() * 2))
    torch.testing.assert_close((first, second, third.view(6, 8)), (product.relu(), doubled.relu(), product.relu()))
    # The argument of the third is a view: what is computed from the viewed tensor keeps its values.
    torch.testing.assert_close(later, [product.relu() + 1, doubled.relu() + 1, product + 1])
    assert torch.equal(x, given)
    assert code.count("torchguard_relu_(") == 3


def test_an_op_after_itself_is_left_out(masked):
    def step(x, w):
        return masked(masked(x @ w).view(3, 2, 8)) + 1, masked(x), x + 1

    x, w = torch.randn(6, 8), torch.randn(8, 8)
    given = x.clone()
    (twice, alone, other), (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    torch.testing.assert_close(twice, (x @ w).relu().view(3, 2, 8) + 1)
    torch.testing.assert_close((alone, other), (x.relu(), x.relu() + 1))
    assert torch.equal(x, given)  # an input of the graph is not changed
    assert code.count("torchguard_relu_(") == 2


@pytest.mark.long
def test_an_op_that_is_compiled_in_place_changes_nothing_else(relu):
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    given, want = x.clone(), results(relu, x, w)
    torch.testing.assert_close(torch.compile(lambda x, w: results(relu, x, w), fullgraph=True)(x, w), want)
    assert torch.equal(x, given)


def test_an_op_is_compiled_to_a_call_of_a_function():
    ops = library.Library("torchguard_test", "FRAGMENT")
    ops.define("sums(Tensor[] zs, int[] sizes, Tensor constant, Tensor(a!) total) -> (Tensor, Tensor)")
    ops.impl("sums", sums, "CPU")
    library.register_fake("torchguard_test::sums", lambda zs, n, c, total: (c.new_empty(()), c.new_empty(())), lib=ops)
    compile_to_call(torch.ops.torchguard_test.sums, f"{__name__}:sums")

    def step(x, total):
        constant = torch.tensor([float(i) for i in range(20)])
        one, two = (x + 1).flatten(), (x * 2).flatten()
        given = [one, two, one, (x - 1).double().flatten()]
        first, second = torch.ops.torchguard_test.sums(given, [3, 1], constant, total)
        return first + 1, second

    x, total, other = torch.randn(6, 8), torch.zeros(()), torch.zeros(())
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, total)
    torch.testing.assert_close((*got, total), (*step(x, other), other))
    body = code.split("def call")[-1]
    assert "torchguard_sums([" in body
    assert "torch.ops.torchguard_test.sums.default(" not in body
    (call,) = [line for line in body.splitlines() if "torchguard_sums([" in line]
    assert "constant" in call  # not a copy of it
    assert call.split("[")[1].count("buf") == 2  # the first three are one
    ops._destroy()


def sums(zs, sizes, constant, total):
    found = sum(z.sum().float() for z in zs)
    total += found
    return found, constant.sum()


@pytest.mark.long
def test_an_op_is_compiled_in_place_for_sizes_that_vary(relu):
    step = torch.compile(lambda x, w: results(relu, x, w), fullgraph=True, dynamic=True)
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    torch.testing.assert_close(step(x, w), results(relu, x, w))
