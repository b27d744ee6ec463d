"""`autograd.Function`s with right and wrong rules, shared by several test files."""

import torch


class Doubled(torch.autograd.Function):
    """Twice its argument."""

    gradient_factor = 2.0

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @classmethod
    def backward(cls, ctx, gradient):
        return gradient * cls.gradient_factor

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2


class WronglyDoubled(Doubled):
    """The same with a wrong gradient."""

    gradient_factor = 3.0


class SavesInputs(torch.autograd.Function):
    """Saves its arguments for its rules, as `ctx.saved_tensors`."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
