"""Words in the memory of torch's tensors: what a guard on a tensor compares, where torch has it in memory.

`TensorGuards.check` reads a tensor through four or five pointers, one after the other: for the parameters of a large
model, which are not in the caches, it takes as long as all else in a check. The same words read in one gather take a
tenth of that. They are in the tensor's C++ object (sizes, strides, dtype, device, dispatch keys) and in the object for
autograd that it points to (`requires_grad`). A tensor in Python keeps the first alive and the first the second; both
pointers can be replaced (`torch.utils.swap_tensors`), so they are read in stages (`words.Words`).

What a guard compares are the dispatch keys as the state of the thread modifies them. That is the same for all tensors
with the same keys: for one of each, `TensorGuards` is still asked.

Degraded where tensors are not laid out as in torch 2.13 (`can_read_tensors`): `TensorGuards`, which torch 2.11 to 2.15
have, checks all of them.
"""

import functools

import torch
from torch import nn

from torchguard._torch.words import TYPE, Words, can_read_words, read_word

_IMPL = TYPE + 8  # in the Python object
_AUTOGRAD, _DIM, _SIZES, _STRIDES, _DTYPE, _KEYS = 24, 56, 64, 104, 160, 168  # in the C++ object
_INLINE = 5  # more dimensions are stored elsewhere
_GRAD_FN, _REQUIRES_GRAD = 48, 128  # in the object for autograd


def add_tensors(words: Words, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Add the words of all tensors to `words`.

    Returns:
        The tensors that are to be checked beside the words; None if something has changed meanwhile.
    """
    readable = [one for one in tensors if one.dim() <= _INLINE and one.is_leaf] if can_read_tensors() else []
    at = words.add({id(one) + TYPE for one in readable}, in_pairs=True)
    if at is None:
        return None
    impls = {at[id(one) + _IMPL]: one for one in readable}
    at = words.add({impl + offset for impl, one in impls.items() for offset in _offsets(one.dim())}, in_pairs=True)
    if at is None:
        return None
    autograd = {at[impl + _AUTOGRAD] for impl in impls} - {0}  # a buffer has none
    if words.add({one + offset for one in autograd for offset in (_GRAD_FN, _REQUIRES_GRAD)}, in_pairs=False) is None:
        return None
    one_of_each = {at[impl + _KEYS]: one for impl, one in impls.items()}
    are_read = set(map(id, readable))
    return [*(one for one in tensors if id(one) not in are_read), *one_of_each.values()]


def _offsets(dim: int) -> list[int]:
    """Of the pairs to read: with the pointer for autograd and the dtype come the word after each, with `dim` a size."""
    sizes, strides = range(_DIM, _SIZES + 8 * dim, 16), range(_STRIDES, _STRIDES + 8 * dim, 16)
    return [_AUTOGRAD, _DTYPE, *sizes, *strides]


@functools.cache
def can_read_tensors() -> bool:
    """Whether tensors are laid out as expected, and changes to them change the words."""
    has_names = hasattr(torch._C, "_dispatch_keys") and hasattr(torch.Tensor, "_cdata")
    with torch.inference_mode(False), torch.enable_grad():
        return can_read_words() and has_names and _tensors_are_as_expected()


def _tensors_are_as_expected() -> bool:
    one = nn.Parameter(torch.empty_strided((3, 5, 7), (2, 11, 70)))
    impl: int = one._cdata  # pyright: ignore[reportAttributeAccessIssue]
    expected = {_DIM: 3, _SIZES: 3, _SIZES + 8: 5, _SIZES + 16: 7, _STRIDES: 2, _STRIDES + 8: 11, _STRIDES + 16: 70}
    expected |= {_AUTOGRAD + 8: 0, _KEYS: torch._C._dispatch_keys(one).raw_repr()}
    if read_word(id(one) + _IMPL) != impl or any(read_word(impl + at) != word for at, word in expected.items()):
        return False
    autograd, dtype = read_word(impl + _AUTOGRAD), read_word(impl + _DTYPE)
    result = one * 2
    of_result = read_word(result._cdata + _AUTOGRAD)  # pyright: ignore[reportAttributeAccessIssue]
    if not (autograd and of_result) or read_word(autograd + _GRAD_FN) or not read_word(of_result + _GRAD_FN):
        return False
    flags = [read_word(autograd + _REQUIRES_GRAD)]
    flags.append(read_word(one.requires_grad_(False) is one and autograd + _REQUIRES_GRAD))
    one.data = one.data.double()  # noqa: TG221 (this is what a user may do, and what has to be seen)
    is_same_object = one._cdata == impl and read_word(impl + _AUTOGRAD) == autograd  # pyright: ignore[reportAttributeAccessIssue]
    return is_same_object and [flag & 1 for flag in flags] == [1, 0] and read_word(impl + _DTYPE) != dtype
