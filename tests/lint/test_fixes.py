"""Fixes: what is rewritten, what is left alone, and that fixed code computes the same."""

import ast
import textwrap

import pytest
import torch

from torchguard.lint import RULES, Settings, check_source
from torchguard.lint._fixes import fix_source

CODES = frozenset(RULES)
IMPORTS = "import torch\nimport torch.nn.functional as F\n\n"


def fixed(source):
    return fix_source(IMPORTS + textwrap.dedent(source), CODES)[0].removeprefix(IMPORTS)


FIXED = [
    ("def f(a: torch.Tensor, b: torch.Tensor): return a * b", "-> torch.Tensor:"),
    ("def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.add(b).mul(a)", "return (a + b) * a"),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.sub(b).div(a).add(1)",
        "return (a - b) / a + 1",
    ),
    ("def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return -a.add(b).add(b)", "return -(a + b + b)"),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.mul(b - 1).mul(b).sum()",
        "return (a * (b - 1) * b).sum()",
    ),
    ("def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.add(b).add(b) ** 2", "return (a + b + b) ** 2"),
    ("def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return (a + b).relu_()", "return (a + b).relu()"),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return torch.sin(a).clamp_(0, 2).add_(b)",
        "torch.sin(a).clamp(0, 2).add_(b)",
    ),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return F.relu(a - b, inplace=True)",
        "return F.relu(a - b)",
    ),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return F.elu(a - b, inplace=True, alpha=2.0)",
        "F.elu(a - b, alpha=2.0)",
    ),
    ("def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.data.exp() + b", "return a.detach().exp() + b"),
    (
        "def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a.data * b.data",
        "return a.detach() * b.detach()",
    ),
    (
        """
        def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            x = a * b
            x  +=  2  # twice
            return x
        """,
        "    x = x + 2  # twice\n",
    ),
]


@pytest.mark.parametrize(("source", "expected"), FIXED, ids=range(len(FIXED)))
def test_fixed_code_is_as_expected_parses_stays_fixed_and_computes_the_same(source, expected):
    before = textwrap.dedent(source)
    after = fixed(before)
    assert expected in after
    assert fixed(after) == after
    a, b = torch.rand(3, 4, dtype=torch.float64) + 1, torch.rand(3, 4, dtype=torch.float64) + 1
    results = [outcome(IMPORTS + code, a.clone(), b.clone()) for code in (before, after)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def outcome(source, a, b):
    """The result of f, its gradients, and the arguments after the call."""
    names = {}
    exec(compile(source, "<fixed>", "exec"), names)
    a.requires_grad_()
    b.requires_grad_()
    result = names["f"](a, b)
    gradients = torch.autograd.grad(result.sum(), (a, b), allow_unused=True) if result.requires_grad else (None, None)
    return [result, *(torch.zeros(()) if grad is None else grad for grad in gradients), a, b]


LEFT_ALONE = [
    "def f(a: torch.Tensor, b): return a.add_(b)",  # the caller's tensor
    "def f(a: torch.Tensor, b): return (a + b).add_(b)",  # b may have a wider dtype
    "def f(a: torch.Tensor): return a.view(-1).relu_()",  # a view of the caller's
    "def f(a: torch.Tensor):\n    a += 1\n    return a",
    "def f(a: torch.Tensor):\n    x = a * 2\n    y = x\n    x += 1\n    return y",
    "def f(a: torch.Tensor):\n    x = a.view(-1)\n    x += 1\n    return x",
    "def f(a: torch.Tensor, b):\n    x = a * 2\n    x += b\n    return x",
    "def f(a: torch.Tensor): return F.relu(a, inplace=True)",
    "act = torch.nn.ReLU(inplace=True)",  # its input may be a residual
    "def f(a: torch.Tensor): a.data.zero_()",
    "def f(a: torch.Tensor): return a.data.view(-1)",
    "def f(a: torch.Tensor): return a.data",
    "def f(a: set, b, c): return a.add(b).add(c)",
    "def f(a: torch.Tensor, b, c): return a.add(b, alpha=2).add(c)",
    "def f(a: torch.Tensor, b, c): return a.add(  # why\n        b).add(c)",
    "def f(a: torch.Tensor, b, c): return a.add(b).add(c)  # noqa: TG220",
    "@torch.jit.script\ndef f(a: torch.Tensor): return a * 2",
    "def f(a: torch.Tensor, flag):\n    if flag:\n        return a * 2",
    "def f(a: torch.Tensor):\n    yield a * 2\n    return a * 2",
    "def f(torch): return torch.exp(torch)",
]


@pytest.mark.parametrize("source", LEFT_ALONE)
def test_what_might_change_results_is_left_alone(source):
    after = fix_source(IMPORTS + source + "\n", CODES - {"TG101"})[0]
    assert after == IMPORTS + source + "\n"


@pytest.mark.parametrize("source", LEFT_ALONE[-4:])
def test_no_annotation_is_added_where_it_might_be_wrong(source):
    assert " -> " not in fixed(source)


def test_an_annotation_needs_torch_to_be_imported_before():
    source = "from torch import Tensor, exp\n\n\ndef f(a: Tensor): return exp(a)\n"
    assert fix_source(source, CODES) == (source, 0)


def test_formatting_and_comments_are_kept():
    source = '''
    def  f( a : torch.Tensor,b:torch.Tensor )  :  # odd

        """Odd."""
        return  a.add( b ).add(
            b) ; pass
    class A :
        x = (1 ,
             2)\t# tab
    '''
    before = IMPORTS + textwrap.dedent(source)
    after, count = fix_source(before, CODES)
    assert count == 0 or ast.parse(after)
    unchanged = [line for line in before.splitlines() if "def" not in line and "add" not in line]
    assert [line for line in after.splitlines() if line in unchanged] == unchanged


def test_only_selected_rules_are_fixed():
    source = IMPORTS + "def f(a: torch.Tensor): return F.relu(a + 1, inplace=True)\n"
    assert fix_source(source, frozenset({"TG220"})) == (source, 0)


@pytest.mark.parametrize("source", ["def f(:", "x = '\ud800'", ""])
def test_what_cannot_be_parsed_is_left_alone(source):
    assert fix_source(source, CODES) == (source, 0)


def test_positions_count_characters():
    source = IMPORTS + "def f(é: torch.Tensor) -> torch.Tensor: 'ü'; return F.relu(é + 1, inplace=True)\n"
    assert fix_source(source, CODES)[0] == source.replace(", inplace=True", "")


def test_windows_line_ends_are_kept():
    source = "import torch\r\nx = torch.nn.functional.relu(torch.ones(3) + 1, inplace=True)\r\n"
    assert fix_source(source, CODES)[0] == source.replace(", inplace=True", "")


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.is_fixable], ids=lambda rule: rule.code)
def test_a_fix_removes_the_finding(rule):
    settings = Settings(select=(rule.code,))
    for source, _ in FIXED:
        before = check_source(IMPORTS + textwrap.dedent(source), settings=settings)
        after = check_source(IMPORTS + fixed(source), settings=settings)
        assert len(after) <= len(before)
