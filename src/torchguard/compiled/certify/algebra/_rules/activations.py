"""Rules of activations and of their derivatives.

The formulas call only methods of their operands, so that the tests can run them on symbols as well.
"""

import math
from collections.abc import Callable
from typing import Any

_ROOT_HALF = math.sqrt(0.5)
_ROOT_2_OVER_PI = math.sqrt(2) / math.sqrt(math.pi)
_CUBIC = 0.044715


def _hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
    return x.le(low).where(low, x.ge(high).where(high, x))


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return x.gt(0).where(x * scale, ((x * input_scale).exp() - 1) * alpha * scale)


def _elu_backward(g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any) -> Any:
    low = (x + alpha * scale) if is_result else (x * input_scale).exp() * alpha * scale
    return x.le(0).where(g * low * input_scale, g * scale)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    return (x * beta).gt(threshold).where(x, (1 + (x * beta).exp()).log() / beta)


def _softplus_backward(g: Any, x: Any, beta: float, threshold: float) -> Any:
    z = (x * beta).exp()
    return (x * beta).gt(threshold).where(g, g * z / (z + 1))


def _hardsigmoid(x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(1, (x + 3) / 6))


def _hardsigmoid_backward(g: Any, x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(0, g / 6))


def _hardswish(x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(x, x * (x + 3) / 6))


def _hardswish_backward(g: Any, x: Any) -> Any:
    return x.le(-3).where(0, x.ge(3).where(g, g * (x / 3 + 0.5)))


def _softshrink(x: Any, bound: float = 0.5) -> Any:
    return x.gt(bound).where(x - bound, x.lt(-bound).where(x + bound, 0))


def _shrink_backward(g: Any, x: Any, bound: float) -> Any:
    return x.gt(bound).where(g, x.lt(-bound).where(g, 0))


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + _tanh_argument(x).tanh())
    return 0.5 * x * (1 + (x * _ROOT_HALF).erf())


def _gelu_backward(g: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        t = _tanh_argument(x).tanh()
        slope = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    density = (x * x * -0.5).exp() * (_ROOT_HALF / math.sqrt(math.pi))
    return g * (0.5 * (1 + (x * _ROOT_HALF).erf()) + x * density)


def _tanh_argument(x: Any) -> Any:
    return _ROOT_2_OVER_PI * (x + _CUBIC * x * x * x)


def _silu(x: Any) -> Any:
    return x * x.sigmoid()


def _silu_backward(g: Any, x: Any) -> Any:
    s = x.sigmoid()
    return g * s * (1 + x * (1 - s))


def _mish(x: Any) -> Any:
    return x * (1 + x.exp()).log().tanh()


def _mish_backward(g: Any, x: Any) -> Any:
    t = (1 + x.exp()).log().tanh()
    return g * (t + x * x.sigmoid() * (1 - t * t))


def _log_sigmoid(x: Any) -> tuple[Any, Any]:
    z = (-(x * x.sgn())).exp()
    return x.lt(0).where(x, 0) - (1 + z).log(), z


def _log_sigmoid_backward(g: Any, x: Any, z: Any) -> Any:
    ratio = z / (1 + z)
    return g * x.lt(0).where(1 - ratio, ratio)


def _leaky_relu_backward(g: Any, x: Any, slope: float, is_result: bool) -> Any:
    return x.gt(0).where(g, g * slope)


def _prelu(x: Any, weight: Any) -> Any:
    return x.gt(0).where(x, x * weight)


def _threshold(x: Any, bound: float, value: float) -> Any:
    return x.le(bound).where(value, x)


RULES: dict[str, Callable[..., Any]] = {
    "relu": lambda x: x.gt(0).where(x, 0),
    "threshold": _threshold,
    "threshold_backward": lambda g, x, bound: x.le(bound).where(0, g),
    "leaky_relu": lambda x, slope=0.01: x.gt(0).where(x, x * slope),
    "leaky_relu_backward": _leaky_relu_backward,
    "_prelu_kernel": _prelu,
    "_prelu_kernel_backward": lambda g, x, w: (x.gt(0).where(g, g * w), x.gt(0).where(0, g * x)),
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha),
    "silu": _silu,
    "silu_backward": _silu_backward,
    "mish": _mish,
    "mish_backward": _mish_backward,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "hardtanh": _hardtanh,
    "hardtanh_backward": lambda g, x, low, high: x.le(low).where(0, x.ge(high).where(0, g)),
    "hardsigmoid": _hardsigmoid,
    "hardsigmoid_backward": _hardsigmoid_backward,
    "hardswish": _hardswish,
    "hardswish_backward": _hardswish_backward,
    "softshrink": _softshrink,
    "softshrink_backward": _shrink_backward,
    "hardshrink": lambda x, bound=0.5: x.gt(bound).where(x, x.lt(-bound).where(x, 0)),
    "hardshrink_backward": _shrink_backward,
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "tanh_backward": lambda g, y: g * (1 - y * y),
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "log_sigmoid_forward": _log_sigmoid,
    "log_sigmoid_backward": _log_sigmoid_backward,
}
