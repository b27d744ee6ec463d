"""The operations that random programs on matrices of shape [3, 4] are made of."""

import torch
import torch.nn.functional as F

UNARY = [
    *(
        torch.tanh,
        torch.sigmoid,
        torch.sin,
        torch.cos,
        torch.exp,
        torch.relu,
        torch.abs,
        torch.neg,
        torch.square,
        torch.erf,
    ),
    *(torch.atan, F.gelu, F.silu, F.softplus, F.elu, F.leaky_relu, torch.expm1),
    lambda x: x.clamp(-0.7, 0.4),
    lambda x: x**3,
    lambda x: (x * x + 0.5).sqrt(),
    lambda x: (x * x + 0.5).rsqrt(),
    lambda x: (x * x + 0.1).log(),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1),
    lambda x: x.cumsum(-1),
    lambda x: x.transpose(0, 1).contiguous().reshape(x.shape),
    lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x + x.mean(0, keepdim=True),
    lambda x: x.sum(1, keepdim=True).expand(x.shape),
    lambda x: torch.cat([x[:1], x[1:]]).flip(1),
    lambda x: x * 0.1 - 0.3,
]
BINARY = [
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum),
    lambda a, b: a / (b * b + 0.5),
    lambda a, b: torch.where(a > b, a * b, a - b),
    lambda a, b: a @ b.t() @ b,
    lambda a, b: torch.addmm(b, a, torch.ones(a.shape[1], a.shape[1], dtype=a.dtype) * 0.3),
]
