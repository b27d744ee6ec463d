"""The error channel of torchguard."""

import ast
from collections.abc import Iterator

from torchguard.lint import _values as values
from torchguard.lint._module import Function, Module
from torchguard.lint._rules.base import Problem, Rule, keyword, last_name, statement, text
from torchguard.lint._rules.numerics import operand

_BOUNDARY = frozenset(("torchguard.has_err", "torchguard.flags.ErrorFlags"))


class BoundaryInGraph(Rule):
    code = "TG160"
    name = "flags-in-graph"
    nodes = (ast.Call,)
    summary = "A function of `torchguard.flags` is called inside a compiled function or forward."
    why = """
`flags` reads values: it returns Python objects, and refuses to be traced. Inside a graph use `err`, which returns
tensors: `err.any_err(f)` instead of `flags.has_err`, `err.count_errors(f)` instead of `flags.summary(f)`.
"""
    wrong = """
import torch
from torchguard import err, flags

@torch.compile(fullgraph=True)
def step(x: torch.Tensor) -> torch.Tensor:
    f = err.new(x)
    flags.summary(f)
    return x
"""
    right = """
import torch
from torchguard import err, flags

@torch.compile(fullgraph=True)
def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f = err.new(x)
    return x, f

def report(x: torch.Tensor) -> dict:
    return flags.summary(step(x)[1])
"""
    silence = "In a forward that is never compiled."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        name = module.qualified(node.func)
        if (name.startswith("torchguard.flags.") or name in _BOUNDARY) and module.is_traced(node):
            yield Problem(node, f"{last_name(node)} reads values and cannot be traced. Return the flags, or use err.")


_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
_FLOAT_METHODS = frozenset("float double half bfloat16 mean std var sum softmax mul add div sub".split())


class FlagsArithmetic(Rule):
    code = "TG161"
    name = "flags-arithmetic"
    nodes = (ast.BinOp, ast.AugAssign, ast.Call)
    summary = "Flags are used in arithmetic."
    why = """
Flags are bits in the words of an integer tensor. Adding or averaging them gives other codes at other locations, and a
conversion to float rounds them away. Merge flags with `err.merge(f, g)`; count with `err.count_errors(f)`; select
samples with `err.is_ok(f)`.
"""
    wrong = """
import torch
from torchguard import err

def penalty(x: torch.Tensor) -> torch.Tensor:
    f = err.new(x)
    return x + f.float()
"""
    right = """
import torch
from torchguard import err

def penalty(x: torch.Tensor) -> torch.Tensor:
    f = err.new(x)
    return x + err.count_errors(f).to(x.dtype)[:, None]
"""
    silence = "In code that packs or unpacks flags itself."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if not module.imports_torchguard:
            return
        if isinstance(node, ast.BinOp):
            found = isinstance(node.op, _ARITHMETIC) and values.FLAGS in (
                module.value(node.left),
                module.value(node.right),
            )
            found = found and not any(
                isinstance(side, ast.BinOp) and module.value(side) == values.FLAGS for side in (node.left, node.right)
            )
        elif isinstance(node, ast.AugAssign):
            found = isinstance(node.op, _ARITHMETIC) and values.FLAGS in (
                module.value(node.target),
                module.value(node.value),
            )
        else:
            assert isinstance(node, ast.Call)
            func = node.func
            found = (
                isinstance(func, ast.Attribute)
                and module.value(func.value) == values.FLAGS
                and func.attr in _FLOAT_METHODS
            )
        if found:
            yield Problem(node, f"{text(node, 30)} computes with flags. Use err.merge, err.count_errors or err.is_ok.")


_CHECKS = frozenset(
    """
    flag_nan flag_inf flag_nan_and_inf flag_oob_indices push push_many push_scalar merge fix
    """.split()
)


class DroppedFlags(Rule):
    code = "TG162"
    name = "dropped-flags"
    nodes = (ast.Call,)
    summary = "The result of a check is dropped."
    why = """
Flags are values: a check returns new ones and leaves the old ones as they are. If the result is not used, nothing is
recorded, and in a graph the check is dead code that the compiler removes.
"""
    wrong = """
import torch
from torchguard import err, flag_nan

def layer(x: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flag_nan(x, "layer", f)
    return x, f
"""
    right = """
import torch
from torchguard import err, flag_nan

def layer(x: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f = flag_nan(x, "layer", f)
    return x, f
"""
    silence = "In a test that only checks that a call does not raise."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        name = module.qualified(node.func)
        if not name.startswith("torchguard.") or last_name(node) not in _CHECKS or ".experimental" in name:
            return
        if not (name.startswith("torchguard.err.") or name.count(".") == 1):
            return
        stands_in = statement(node, module)
        if isinstance(stands_in, ast.Expr) and stands_in.value is node:
            if not any(isinstance(parent, ast.With) for parent, _ in module.inside(node)):
                yield Problem(
                    node, f"the result of {last_name(node)} is dropped, and with it the check. Bind it: f = ..."
                )
            return
        if isinstance(stands_in, ast.Assign) and stands_in.value is node and len(stands_in.targets) == 1:
            target = stands_in.targets[0]
            function = module.function_of(node)
            if not isinstance(target, ast.Name) or function is None or target.id in {"_", *function.not_local}:
                return
            if not self._is_read(target, stands_in, function, module):
                yield Problem(
                    node, f"{target.id} is never used after {last_name(node)}, so the check is dropped. Return it."
                )

    def _is_read(self, target: ast.Name, bound: ast.Assign, function: Function, module: Module) -> bool:
        in_loop = any(isinstance(parent, ast.For | ast.While) for parent, _ in module.inside(bound))
        inner = [one for nested in function.body if isinstance(nested, ast.FunctionDef) for one in ast.walk(nested)]
        return any(
            isinstance(one, ast.Name)
            and one.id == target.id
            and isinstance(one.ctx, ast.Load)
            and (in_loop or one.lineno > (bound.end_lineno or bound.lineno))
            for one in (*function.body, *inner)
        )


class MeanOverBadSamples(Rule):
    code = "TG175"
    name = "mean-over-bad-samples"
    nodes = (ast.Call,)
    summary = "A mean over the batch, where flags say that samples may be bad."
    why = """
One bad sample makes the mean NaN, and the whole batch is lost. The flags are at hand: `err.mean_ok(f, per_sample)` is
the mean over the good samples.
"""
    wrong = """
import torch
from torchguard import err, flag_nan

def masked_loss(z: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f = flag_nan(z, "head", f)
    return (z**2).mean(), f
"""
    right = """
import torch
from torchguard import err, flag_nan

def masked_loss(z: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f = flag_nan(z, "head", f)
    return err.mean_ok(f, (z**2).flatten(1).mean(1)), f
"""
    silence = "For means over other dimensions than the batch, or of values that were fixed before."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        assert isinstance(node, ast.Call)
        if not module.imports_torchguard:
            return
        function = module.function_of(node)
        given = operand(node, module, "mean")
        package, _, last = module.qualified(node.func).rpartition(".")
        is_loss = package == "torch.nn.functional" and (last.endswith("_loss") or "cross_entropy" in last)
        reduction = keyword(node, "reduction")
        if is_loss and isinstance(reduction, ast.Constant) and reduction.value != "mean":
            return
        is_full_mean = given is not None and not _has_dim(node, module)
        if not (is_loss or is_full_mean) or not _has_flags(node, function, module):
            return
        if function is not None and any(last_name(call) in ("fix", "mean_ok", "take_ok") for call in function.calls):
            return
        yield Problem(node, "a mean over samples that flags may mark as bad. Use err.mean_ok(f, per_sample).")


def _has_dim(call: ast.Call, module: Module) -> bool:
    positional = len(call.args) - (1 if module.qualified(call.func) else 0)
    return positional > 0 or keyword(call, "dim", "axis") is not None


def _has_flags(node: ast.AST, function: Function | None, module: Module) -> bool:
    """Whether flags are in use where a node runs: in its function, or in a script's body."""
    around = function.body if function is not None else [*ast.walk(module.tree)]
    return any(isinstance(one, ast.expr) and module.value(one) == values.FLAGS for one in around)


RULES = (BoundaryInGraph(), FlagsArithmetic(), DroppedFlags(), MeanOverBadSamples())
