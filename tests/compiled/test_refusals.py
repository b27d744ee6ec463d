"""A function that is not pure is refused when it is compiled, with the source line."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchguard.compiled import CompileError, ImpureFunctionError, compile_out, state_of

HIDDEN = torch.ones(3)
ARRAY = np.ones(3, dtype=np.float32)


def changes_its_argument(x):
    x.add_(1)  # the line
    return x


def changes_a_view_of_it(x):
    x[0].mul_(2)  # the line
    return x


def branches(x):
    if x.sum() > 0:  # the line
        return x
    return -x


def reads_a_value(x):
    return x * x.sum().item()  # the line


def reads_a_global(x):
    return x * HIDDEN  # the line


def reads_a_global_number(x):
    return x * HIDDEN.sum().item()  # the line


def draws(x):
    return x + torch.rand(3)  # the line


def drops(x):
    return F.dropout(x, 0.5)  # the line


def has_a_data_dependent_shape(x):
    return x[x > 0].sum() + torch.nonzero(x).sum()  # the line


def has_a_large_literal(x):
    return x + torch.tensor([float(i) for i in range(300)])[:3]  # the line


def fails(x):
    return x @ torch.zeros(5)  # the line


def takes_functions(x):
    return torch._higher_order_ops.map(torch.sin, x)  # the line


def records(x):
    return torch.autograd.grad(x.sin().sum(), x)[0]  # the line


def writes_out(x):
    torch.add(x, 1, out=x)  # the line
    return x * 2


def replaces_data(x):
    x.data = x.data * 0  # the line
    return x * 1


def reads_a_global_list(x):
    return x * HIDDEN.tolist()[0]  # the line


def reads_a_global_array(x):
    return x + torch.from_numpy(ARRAY)  # the line


def reads_uninitialized_memory(x):
    return x + torch.empty(3)  # the line


REASONS = {
    writes_out: "aten.add changes an argument in place",
    replaces_data: "Tensor.data is assigned. Use the new tensor itself",
    reads_a_global_list: "Tensor.tolist reads a tensor that is not an argument",
    reads_a_global_array: "reads a tensor that is not an argument",
    reads_uninitialized_memory: "aten.empty returns uninitialized memory. Use torch.zeros",
    changes_its_argument: "aten.add_ changes an argument in place. Use the out-of-place form",
    changes_a_view_of_it: "aten.mul_ changes an argument in place",
    branches: "control flow depends on the value of a tensor. Use torch.where",
    reads_a_value: "control flow depends on the value of a tensor",
    reads_a_global: "aten.mul reads a tensor that is not an argument",
    reads_a_global_number: "reads a tensor that is not an argument",
    draws: "aten.rand draws random numbers. Draw them outside",
    drops: "aten.bernoulli.* draws random numbers",
    has_a_data_dependent_shape: "the shape of the result of aten.* depends on values",
    has_a_large_literal: "expected a literal tensor of at most 64 real elements, got 300 of torch.float32",
    fails: "RuntimeError",
    takes_functions: "map_impl is a higher-order operation",
    records: "autograd does not record while a function is traced. Use torch.func.grad",
}


@pytest.mark.parametrize("f", REASONS, ids=lambda f: f.__name__)
def test_an_impure_function_is_refused_with_its_line(f):
    code = f.__code__
    with open(__file__) as source:
        lines = source.read().splitlines()
    line = next(n for n in range(code.co_firstlineno, len(lines)) if "# the line" in lines[n - 1])
    with pytest.raises(CompileError, match=rf"at test_refusals\.py:{line} in {f.__name__}: .*{REASONS[f]}") as raised:
        compile_out(f, torch.ones(3), backend="eager")
    assert "\n" not in str(raised.value)


def test_the_argument_is_left_alone_by_a_function_that_is_refused():
    x = torch.ones(3)
    with pytest.raises(ImpureFunctionError):
        compile_out(changes_its_argument, x)
    assert x.tolist() == [1.0] * 3


def test_a_module_closed_over_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(
        ImpureFunctionError, match=r"hidden constant\)\. Make it an argument, or pass the nn.Module itself"
    ):
        compile_out(lambda x: model(x), torch.ones(2, 3))


def test_batch_norm_that_trains_is_refused():
    with pytest.raises(ImpureFunctionError, match=r"in place|running statistics"):
        compile_out(nn.BatchNorm1d(3), torch.ones(2, 3), backend="eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_changing_a_tensor_made_inside_is_fine(backend):
    def f(x):
        y = torch.zeros(2, 3)
        y[0] = x * 2
        return y.relu_()

    c = compile_out(f, torch.ones(3), backend=backend)
    x = torch.tensor([1.0, -1.0, 2.0])
    torch.testing.assert_close(c(x), f(x))
    assert c.vjp_with_seed(x, torch.ones(2, 3)).tolist() == [2.0, 0.0, 2.0]
    assert c.jvp(x, torch.ones(3))[1][0].tolist() == [2.0, 0.0, 2.0]


def test_literals_are_no_hidden_constants():
    c = compile_out(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(4.0), torch.ones(3), backend="eager")
    assert c(torch.ones(3)).tolist() == [5.0, 6.0, 7.0]
    assert c.vjp_with_seed(torch.ones(3), torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
    assert all(node.op != "get_attr" for node in c.graph.nodes)


def test_lift_rng_replaces_random_numbers_by_leaves():
    c = compile_out(lambda x: F.dropout(x * x, 0.5), torch.ones(4), lift_rng=True, backend="eager")
    assert [leaf.name for leaf in c.leaves] == ["x", "bernoulli_0"]
    x, mask = torch.randn(4), torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(c(x, mask), x * x * mask * 2)
    y, pullback = c.vjp((x, mask))
    gradient, of_mask = pullback(torch.ones(4))
    torch.testing.assert_close(gradient, 4 * x * mask)
    assert of_mask is None
    torch.testing.assert_close(c.jvp((x, mask), (torch.ones(4), None)), (y, 4 * x * mask))


def test_lift_rng_replaces_random_numbers_of_a_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    c = compile_out(model, torch.ones(2, 3), lift_rng=True, backend="eager")
    state, mask = state_of(model), torch.ones(2, 3)
    torch.testing.assert_close(c(state, torch.ones(2, 3), mask), 2 * model[0](torch.ones(2, 3)).detach())


def test_spectral_norm_that_trains_is_refused():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ImpureFunctionError, match=r"at \S+:\d+ in \w+: aten.\w+ changes an argument in place"):
        compile_out(model, torch.ones(2, 4), backend="eager")
    assert compile_out(model.eval(), torch.ones(2, 4), backend="eager").leaves


def test_memory_that_is_filled_first_is_fine():
    c = compile_out(lambda x: x + torch.empty(3).fill_(2.0), torch.ones(3), backend="eager")
    assert c(torch.ones(3)).tolist() == [3.0] * 3


def test_a_closed_over_tensor_may_not_be_returned():
    with pytest.raises(
        ImpureFunctionError, match=r"at test_refusals.py:\d+ in <lambda>: result \[1\] is a tensor that"
    ):
        compile_out(lambda x: (x * 1, HIDDEN), torch.ones(3), backend="eager")


class StoresItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), None
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x):
        self.last = [self.linear(x)]
        return self.last[0] * 2


class ReplacesItsBuffer(StoresItsOutput):
    def forward(self, x):
        self.seen = self.seen + x
        return self.linear(x)


def test_a_module_that_stores_a_tensor_is_refused_and_restored():
    model = StoresItsOutput()
    with pytest.raises(ImpureFunctionError, match=r"in forward: it sets the attribute 'last' to a tensor"):
        compile_out(model, torch.ones(2, 3), backend="eager")
    assert model.last is None


class FillsAList(StoresItsOutput):
    def __init__(self):
        super().__init__()
        self.inner = {"outputs": []}

    def forward(self, x):
        self.inner["outputs"].append(self.linear(x))
        return self.inner["outputs"][-1] * 2


class Registers(StoresItsOutput):
    def forward(self, x):
        self.register_buffer("later", x * 2)
        return self.linear(x)


class Counts(StoresItsOutput):
    def forward(self, x):
        self.last = [*(self.last or []), "called"]
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(FillsAList, "puts a tensor into '0.inner'"), (Registers, "puts a tensor into '0._buffers'")],
    ids=["list", "buffer"],
)
def test_a_module_that_stores_a_tensor_in_a_container_is_refused_and_restored(kind, message):
    model = nn.Sequential(kind())
    with pytest.raises(ImpureFunctionError, match=f"in forward: it {message}"):
        compile_out(model, torch.ones(2, 3), backend="eager")
    assert getattr(model[0], "inner", {"outputs": []}) == {"outputs": []}
    assert set(dict(model.named_buffers())) == {"0.seen"}


def test_a_module_that_stores_no_tensor_is_compiled_and_restored():
    model = Counts()
    assert compile_out(model, torch.ones(2, 3), backend="eager").vjp_with_seed(
        (state_of(model), torch.ones(2, 3)), torch.ones(2, 3)
    )
    assert model.last is None


def test_a_module_that_replaces_its_buffer_is_refused():
    model = ReplacesItsBuffer()
    with pytest.raises(ImpureFunctionError, match=r"in forward: it replaces the buffer 'seen'"):
        compile_out(model, torch.ones(2, 3), backend="eager")
    assert torch.equal(model.seen, torch.zeros(2, 3))


def test_batch_norm_in_training_says_what_to_do():
    with pytest.raises(ImpureFunctionError, match=r"changes num_batches_tracked in place. Call .eval\(\) on it"):
        compile_out(torch.nn.BatchNorm1d(3), torch.randn(4, 3), backend="eager")


def test_a_sparse_tensor_inside_is_refused():
    with pytest.raises(ImpureFunctionError, match=r"_to_sparse returns a tensor of layout torch.sparse_coo"):
        compile_out(lambda x: x.to_sparse().to_dense(), torch.randn(3, 4), backend="eager")
