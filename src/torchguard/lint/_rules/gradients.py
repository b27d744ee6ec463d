"""Gradients on or off."""

import ast
from collections.abc import Iterator

from torchguard.lint._module import Module
from torchguard.lint._rules.base import FUNCTIONS, Problem, Rule, is_evaluation, is_method, last_name, text
from torchguard.lint._rules.modes import PREDICT, calls_model, mode_calls, receiver, trains


class BackwardWithoutGradients(Rule):
    code = "TG134"
    name = "backward-under-no-grad"
    nodes = (ast.Call,)
    summary = "`backward()` is called where gradients are off."
    why = """
Under `torch.no_grad()` or `torch.inference_mode()` nothing is recorded: `backward()` raises, or sees only what was
computed outside. Neither context is for training.
"""
    wrong = """
import torch
from torch import nn

def train_step(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        loss = model(x).mean()
        loss.backward()
"""
    right = """
import torch
from torch import nn

def train_step(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).mean()
    loss.backward()
"""
    silence = "Where the loss was computed outside of the context."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        if not is_method(node, "backward") or not module.has_no_grad(node):
            return
        assert isinstance(node, ast.Call)
        function = module.function_of(node)
        if function is None or any(last_name(call) in ("enable_grad", "set_grad_enabled") for call in function.calls):
            return
        loss = node.func.value if isinstance(node.func, ast.Attribute) else node
        if "loss" in last_name(loss) or module.is_tensor(loss):
            yield Problem(
                node, f"{text(loss, 20)}.backward() where gradients are off. Compute the loss with gradients on."
            )


class PreferInferenceMode(Rule):
    code = "TG230"
    name = "prefer-inference-mode"
    nodes = FUNCTIONS
    is_default = False
    summary = "`torch.no_grad()` in a function for inference, where `torch.inference_mode()` fits."
    why = """
`inference_mode` also skips version counters and view tracking, so small operations are faster, and it fails loudly if
a result is later used for training. It fits where results never meet autograd again. Weights that are changed or
trained afterwards need `no_grad`.
"""
    wrong = PREDICT.replace("inference_mode", "no_grad")
    right = PREDICT
    silence = "Where results are used in training afterwards, or where a backend does not support inference tensors."

    def check(self, node: ast.AST, module: Module) -> Iterator[Problem]:
        function = module.functions[node]
        if "no_grad" not in module.source or trains(function):
            return
        evaluated = {receiver(call) for call in mode_calls(function, "eval")}
        if not is_evaluation(function) and not any(calls_model(function, model) for model in evaluated):
            return
        assert isinstance(node, FUNCTIONS)
        marks: list[ast.expr] = [*node.decorator_list]
        blocks = [one for one in function.body if isinstance(one, ast.With) and len(one.items) == 1]
        marks += [one.items[0].context_expr for one in blocks]
        for mark in marks:
            if module.qualified(mark.func if isinstance(mark, ast.Call) else mark) == "torch.no_grad":
                yield Problem(
                    mark, f"{function.name} is for inference. Use torch.inference_mode() in place of no_grad."
                )
                return


RULES = (BackwardWithoutGradients(), PreferInferenceMode())
