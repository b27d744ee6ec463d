"""Wrong derivative graphs, of ten kinds of wrong: each is rejected by a layer, or proved to be none."""

import functools
from collections import Counter

import pytest
from tests.compiled.mutants import MUTATIONS, mutants_of
from tests.compiled.normal_form import have_same_normal_form
from tests.compiled.zoo import ZOO, graphs

from torchguard.compiled.certify import Verdict, check_derivatives, check_types

# Its gradient needs that a determinant is the product of the singular values.
INCONCLUSIVE = {"determinant"}

# Every mutant that survives. All but two are the original by laws that always hold. One puts zero for what flows back
# into the shift of a stable loss, which is zero: see `test_the_shift_in_a_stable_loss_has_no_derivative`. The other
# transposes the product of eigenvectors, a diagonal matrix and the transposed eigenvectors.
EQUIVALENT = {
    ("conv_times_its_pool", "wrong operand"): "the gradient of a pool reads only the shape of its input",
    ("gather", "factor 1+1e-3"): "zeros are scaled",
    ("index_select", "sign"): "zeros change their sign",
    ("index_select", "wrong operand"): "zeros are made like another tensor of the same type",
    ("topk", "factor 1+1e-3"): "zeros are scaled",
    ("topk", "wrong operand"): "the first power of a tensor and the tensor",
    ("sort", "factor 1+1e-3"): "zeros are scaled",
    ("bce_with_logits", "wrong operand"): "ones are made like another tensor of the same type",
    ("bce_with_logits", "zeroed branch"): "what flows back into the shift is zero",
    ("inverse", "wrong operand"): "two copies of one tensor",
    ("eigenvalues", "other dim"): "a symmetric matrix is transposed",
    ("hessian_vector", "sign"): "ones are made like a tensor, whose elements are not read",
    ("hessian_vector", "factor 1+1e-7"): "ones are made like a tensor, whose elements are not read",
    ("glu_chunk_stack", "factor 1+1e-3"): "zeros are scaled",
}
BY_ALGEBRA = {("bce_with_logits", "zeroed branch"), ("eigenvalues", "other dim")}

# Wrong only where two numbers are equal: the field shows it, but real numbers, which have to confirm it, need not.
AT_TIES = {("clamp_minmax", "factor 1+1e-3")}

NAMES = [name for name in ZOO if name not in INCONCLUSIVE]


@functools.cache
def mutants(name):
    return list(mutants_of(graphs(name).vjp, name))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_mutant_is_rejected_or_proved_equivalent(name):
    g = graphs(name)
    leaves = [node.meta["val"] for node in g.vjp.graph.find_nodes(op="placeholder")]
    for mutant in mutants(name):
        which = (name, mutant.kind)
        found = [
            check_types(mutant.gm, leaves, subject="vjp").verdict,
            *(c.verdict for c in check_derivatives(g.forward, None, mutant.gm, differentiable=g.differentiable)),
        ]
        if which in EQUIVALENT:
            assert which in BY_ALGEBRA or have_same_normal_form(g.vjp, mutant.gm)
            assert Verdict.FAIL not in found
        elif which in AT_TIES:
            assert {Verdict.FAIL, Verdict.INCONCLUSIVE} & {*found}
        else:
            assert Verdict.FAIL in found, mutant


@pytest.mark.long
def test_there_are_enough_of_every_kind():
    count: Counter[str] = Counter(m.kind for name in NAMES for m in mutants(name))
    assert set(count) == set(MUTATIONS)
    assert sum(count.values()) - len(EQUIVALENT) >= 400
