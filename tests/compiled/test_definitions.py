"""Operators defined by others: each definition computes what torch does, and a call without one stays as it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compiled.zoo import graphs_of, traced

from torchguard.compiled.certify import Verdict, check_derivatives, equivalent
from torchguard.compiled.certify._complex import OPERATORS
from torchguard.compiled.certify._decompose import decompose
from torchguard.compiled.certify._definitions import DEFINITIONS

aten = torch.ops.aten


def r(*shape):
    return torch.linspace(-1.9, 2.3, math.prod(shape), dtype=torch.float64).mul(1.7).sin().reshape(shape)


def p(*shape):
    return r(*shape).abs() * 0.8 + 0.05


I = torch.tensor([2, 0, 2, 4])  # noqa: E741
MASK = torch.tensor([True, False, True, True, False, False])
SORTED = torch.tensor([-1.0, 0.1, 0.5, 2.0], dtype=torch.float64)
# A call of each operator that has a definition. Rows of one operator follow each other.
CALLS = {
    "pixel_shuffle": [lambda: (r(2, 8, 3, 2), 2)],
    "pixel_unshuffle": [lambda: (r(2, 2, 4, 6), 2)],
    "channel_shuffle": [lambda: (r(2, 6, 3), 2)],
    "native_channel_shuffle": [lambda: (r(2, 6, 3), 3)],
    "rot90": [lambda k=k: (r(2, 3, 4), k, [0, 2]) for k in range(-1, 5)],
    "block_diag": [lambda: ([r(2, 2), r(1, 3), r(2)],)],
    "reflection_pad1d": [lambda: (r(2, 3, 5), [2, 4])],
    "reflection_pad2d": [lambda: (r(2, 3, 5, 4), [1, 3, 0, 2])],
    "reflection_pad3d": [lambda: (r(1, 2, 3, 5, 4), [1, 3, 0, 2, 2, 1])],
    "replication_pad1d": [lambda: (r(2, 3, 5), [2, 7])],
    "replication_pad2d": [lambda: (r(2, 3, 5, 4), [1, 3, 0, 2])],
    "replication_pad3d": [lambda: (r(1, 2, 3, 5, 4), [1, 3, 0, 2, 2, 1])],
    "reflection_pad1d_backward": [lambda: (r(2, 3, 11), r(2, 3, 5), [2, 4])],
    "reflection_pad2d_backward": [lambda: (r(2, 3, 7, 8), r(2, 3, 5, 4), [1, 3, 0, 2])],
    "reflection_pad3d_backward": [lambda: (r(1, 2, 4, 6, 6), r(1, 2, 3, 5, 4), [1, 1, 0, 1, 1, 0])],
    "replication_pad1d_backward": [lambda: (r(2, 3, 11), r(2, 3, 5), [2, 4])],
    "replication_pad2d_backward": [lambda: (r(2, 3, 7, 8), r(2, 3, 5, 4), [1, 3, 0, 2])],
    "replication_pad3d_backward": [lambda: (r(1, 2, 4, 6, 6), r(1, 2, 3, 5, 4), [1, 1, 0, 1, 1, 0])],
    "as_strided": [lambda: (r(3, 4), [2, 3], [4, 1], 1), lambda: (r(3, 4), [3, 2], [0, 5])],
    "as_strided_scatter": [lambda: (r(3, 4), r(2, 3), [2, 3], [4, 1], 1)],
    "index_fill": [lambda: (r(3, 5), 1, I, 7.5), lambda: (r(5), 0, I, torch.tensor(7.5, dtype=torch.float64))],
    "masked_scatter": [lambda: (r(6), MASK, p(6)), lambda: (r(2, 6), MASK, p(12))],
    "masked_scatter_backward": [lambda: (r(6), MASK, [6])],
    "_neg_view": [lambda: (r(3),)],
    "zero": [lambda: (r(3),)],
    "trace": [lambda: (r(4, 3),)],
    "addr": [lambda: (r(2, 3), p(2), p(3))],
    "linalg_cross": [lambda: (r(4, 3), p(4, 3))],
    "hypot": [lambda: (r(6), p(6))],
    "xlogy": [
        lambda: (torch.cat([r(5), torch.zeros(1)]), p(6)),
        lambda: (torch.zeros(2), -p(2)),
        lambda: (r(3), 3.0),
        lambda: (0.0, r(3)),
    ],
    "special_xlog1py": [lambda: (torch.cat([r(5), torch.zeros(1)]), p(6))],
    "special_entr": [lambda: (p(6),), lambda: (torch.zeros(2),)],
    "logit": [lambda: (p(6),), lambda: (p(6), 0.3)],
    "logit_backward": [lambda: (r(6), p(6)), lambda: (r(6), p(6), 0.3)],
    "sinc": [lambda: (r(6),), lambda: (torch.zeros(2),)],
    "ldexp": [lambda: (r(4), I - 3)],
    "nan_to_num": [lambda: (r(4),), lambda: (torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]), 2.0, 3.0)],
    "nansum": [lambda: (r(3, 4), [1]), lambda: (torch.tensor([1.0, torch.nan]),)],
    "fmax": [lambda: (r(6), p(6)), lambda: (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 2.0]))],
    "fmin": [lambda: (r(6), p(6)), lambda: (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 2.0]))],
    "heaviside": [lambda: (torch.cat([r(5), torch.zeros(1)]), p(6))],
    "copysign": [lambda: (r(6), r(6).flip(0))],
    "signbit": [lambda: (r(6),)],
    "count_nonzero": [lambda: (r(3, 4).relu(), [1]), lambda: (r(3, 4).relu(),)],
    "norm": [lambda: (r(3, 4), 2.0, [1]), lambda: (r(3, 4), 3.0, [0], True), lambda: (r(3, 4), 1.0, [1])],
    "_cdist_forward": [lambda q=q: (r(3, 4), p(2, 4), q, None) for q in (1.0, 2.0, 3.0)],
    "_euclidean_dist": [lambda: (r(3, 4), p(2, 4))],
    "_cdist_backward": [
        lambda q=q: (r(3, 2), r(3, 4), p(2, 4), q, torch.cdist(r(3, 4), p(2, 4), q)) for q in (1.0, 2.0)
    ],
    "_pdist_forward": [lambda: (r(5, 3), 2.0)],
    "_trilinear": [lambda: (r(3, 2), p(5, 2, 4), r(3, 4), [1, 3], [0], [1, 2], [2, 3])],
    "scatter_reduce": [
        lambda how=how: (r(5), 0, torch.tensor([0, 1, 0, 2, 4, 1]), r(6), how)
        for how in ("sum", "mean", "amax", "amin")
    ]
    + [lambda: (r(2, 5), 1, torch.tensor([[0, 1, 0], [2, 2, 4]]), p(2, 4), "amax")],
    "searchsorted": [lambda: (SORTED, r(2, 5)), lambda: (SORTED.expand(2, 4).contiguous(), r(2, 5))],
    "bucketize": [lambda: (r(2, 5), SORTED)],
    "logcumsumexp": [lambda: (r(3, 5), 1), lambda: (r(3, 5), -2), lambda: (r(), 0)],
    "std_mean": [lambda: (r(3, 5),), lambda: (r(3, 5), [1])],
    "linalg_pinv": [lambda: (r(4, 3) + torch.eye(4, 3),), lambda: (r(3, 4) + torch.eye(3, 4),)],
}


def test_each_definition_is_called():
    assert set(CALLS) == set(DEFINITIONS)


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, rows in CALLS.items() for i in range(len(rows))])
def test_each_definition_computes_what_torch_does(name, number):
    call = CALLS[name][number]()
    found, expected = DEFINITIONS[name].function(*call), _packet(name)(*call)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _packet(name):
    return getattr(aten, name) if name != "linalg_pinv" else torch.linalg.pinv


COMPLEX = {
    "mul and conj": lambda x, y: torch.complex(x, y) * torch.complex(y, x + 1).conj(),
    "div": lambda x, y: torch.complex(x, y) / torch.complex(y + 3, x),
    "numbers": lambda x, y: (torch.complex(x, y) * 2 + 1j - x) / 3j,
    "exp and abs": lambda x, y: torch.complex(torch.complex(x, y).exp().abs(), y),
    "powers": lambda x, y: torch.complex(x, y) ** 3 + torch.complex(x, y + 3) ** -2,
    "sgn and angle": lambda x, y: torch.complex(x, y + 3).sgn() * torch.complex(x, y + 3).angle(),
    "polar": lambda x, y: torch.polar(x * x + 1, y),
    "matmul": lambda x, y: torch.complex(x, y) @ torch.complex(y, x).mT,
    "where, cat and slice": lambda x, y: torch.cat([torch.where(x > 0, torch.complex(x, y), 1j), x + 0j])[1:, ::2],
    "fft": lambda x, y: torch.fft.fft2(torch.complex(x, y), norm="ortho"),
    "ifft": lambda x, y: torch.fft.ifft(torch.complex(x, y)),
    "rfft": lambda x, y: torch.fft.rfft2(x),
    "irfft of an odd size": lambda x, y: torch.fft.irfft(torch.complex(x, y), n=5) + 0j,
    "irfft of an even size": lambda x, y: torch.fft.irfft(torch.complex(x, y), n=6) + 0j,
    "hfft": lambda x, y: torch.fft.hfft(torch.complex(x, y)) + 0j,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_become_pairs_that_compute_the_same(name):
    inputs = r(4, 6), p(4, 6)
    fn = lambda x, y: [torch.view_as_real(COMPLEX[name](x, y).resolve_conj())]  # noqa: E731
    gm = traced(fn, inputs, functional=False)
    made = decompose(gm, DEFINITIONS, with_complex=True)
    values = [node.meta.get("val") for node in made.graph.nodes]
    assert not any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)
    torch.testing.assert_close(made(*inputs)[0], fn(*inputs)[0], rtol=1e-9, atol=1e-12)


def test_complex_numbers_with_an_operator_that_has_no_definition_stay_and_are_named():
    g = graphs_of(lambda x: torch.complex(x, x).log().real, [p(3)], functional=False)
    claims = check_derivatives(g.forward, None, g.vjp, differentiable=g.differentiable)
    assert claims[0].verdict is Verdict.INCONCLUSIVE
    assert OPERATORS.keys().isdisjoint({"log"})


def test_a_call_without_a_definition_stays_and_is_named():
    gm = traced(lambda x: [torch.ops.aten._cdist_backward(x, x, x, 3.0, x)], [r(3, 3)], functional=False)
    assert decompose(gm, DEFINITIONS).graph.find_nodes(op="call_function", target=aten._cdist_backward.default)
    claim = equivalent(gm, gm)
    assert claim.verdict is Verdict.INCONCLUSIVE
    assert claim.details["unsupported"] == ["aten._cdist_backward.default"]


def test_strides_of_a_tensor_that_starts_inside_its_storage_are_not_read():
    gm = traced(lambda x: [x[1].as_strided([2], [1], 0)], [r(3, 4)], functional=False)
    assert decompose(gm, DEFINITIONS).graph.find_nodes(op="call_function", target=aten.as_strided.default)


def test_nodes_that_are_not_replaced_keep_their_names_and_sources():
    gm = traced(lambda x: [F.pixel_shuffle(x.sin(), 2).cos()], [r(1, 4, 2, 2)], functional=False)
    made = decompose(gm, DEFINITIONS)
    kept = {node.name for node in gm.graph.nodes} - {"pixel_shuffle"}
    assert kept <= {node.name for node in made.graph.nodes}
