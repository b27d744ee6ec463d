"""The table of facts about ATen operators: every row is about an operator that exists, and torch agrees with it."""

import torch

from torchguard._graphs.op_facts import FACTS, facts_of
from torchguard._torch.support import torch_is_at_least
from torchguard.compiled.certify import ALGEBRAIC_OPS, ENCLOSURE_OPS, TYPED_OPS

aten = torch.ops.aten


def with_fact(has):
    return {name for name, facts in FACTS.items() if has(facts)}


def is_tagged_pointwise(name):
    packet = getattr(aten, name)
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def test_each_row_is_of_an_aten_operator():
    assert {name for name in FACTS if not hasattr(aten, name)} == set()


def test_torch_tags_pointwise_operators_as_such_with_three_exceptions():
    pointwise = with_fact(lambda facts: facts.pointwise)
    untagged = {"_prelu_kernel", "fill", "hardswish"} | (set() if torch_is_at_least(2, 12) else {"leaky_relu"})
    assert {name for name in pointwise if not is_tagged_pointwise(name)} == untagged


def test_each_pointwise_operator_has_a_type():
    assert with_fact(lambda facts: facts.pointwise or facts.identity) <= TYPED_OPS


def test_operators_that_create_tensors_have_rules_in_both_numeric_layers():
    assert with_fact(lambda facts: facts.creates in ("filled", "like")) <= ALGEBRAIC_OPS & ENCLOSURE_OPS


def test_an_operator_without_a_row_has_no_facts():
    assert facts_of("mm") == facts_of("my_library.add")
    assert facts_of("aten.add") == facts_of("add")
