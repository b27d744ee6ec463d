"""A function with rules of its own: the right ones, or a gradient that is off."""

import torch


class Doubled(torch.autograd.Function):
    """Twice its argument."""

    factor = 2.0  # of the gradient

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @classmethod
    def backward(cls, ctx, gradient):
        return gradient * cls.factor

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2


class WronglyDoubled(Doubled):
    """The same, with the gradient of another function."""

    factor = 3.0
