"""A guarded or watched model as an ONNX file."""

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._extras import require_extra
from torchguard._files import replaced_whole
from torchguard._progress import progress_line
from torchguard._pytrees import tensors_in
from torchguard.exceptions import ExportError
from torchguard.export._example import Dims
from torchguard.export._program import Traced, trace
from torchguard.export._signature import KEY, Signature, signature
from torchguard.export._verify import verify_outputs


def to_onnx(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    batch: tuple[int, int | None] = (1, None),
    dims: Dims | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    verify: bool = True,
) -> Signature:
    """Write a guarded or watched model to an ONNX file. The flags are its last output, "flags".

    Args:
        model: in eval mode: a watched model, or one that returns flags last.
        example: one tensor, a tuple of positional arguments, or a mapping of keyword arguments, of two samples or more.
        batch: the least and the most samples of a call, None for no limit. `(8, 8)`: always 8.
        dims: other dims that vary: `{"input_ids": {1: "length"}}`; dims of one name have one size.
        input_names: by default the names of the arguments.
        output_names: by default the names of what the model returns, the last one being "flags".
        opset: the version of ONNX's operators; None for torch's default.
        verify: run the file in onnxruntime, and compare it with the model on the example, on other batch sizes and with
            NaN and Inf in the inputs. Flags have to be equal bit for bit.
    """
    require_extra("to_onnx", "onnx", "onnx", "onnxscript", *(["onnxruntime"] if verify else []))
    with progress_line() as show:
        show(f"to_onnx: exporting {type(model).__name__}")
        traced = trace(model, example, batch, dims or {})
        found = traced.signature
        inputs = _checked("input_names", input_names, found.inputs)
        outputs = _checked("output_names", output_names, found.outputs)
        _require_integer_flags(traced)
        show("to_onnx: translating to ONNX")
        with _quiet():
            try:
                made = torch.onnx.export(
                    traced.program, input_names=inputs, output_names=outputs, opset_version=opset, verbose=False
                )
            except Exception as error:
                raise ExportError(f"to_onnx: torch.onnx fails on this {type(model).__name__}: {error}") from error
        assert made is not None
        graph = made.model.graph
        varying = traced.example.varying(batch, dims or {})
        _name_dims(graph, {name: varying.get(own, {}) for name, own in zip(inputs, found.inputs, strict=True)})
        _enforce(graph, batch)
        # What the file itself says: an argument that the model does not use is no input.
        names = [one.name or "" for one in graph.inputs]
        written = signature(model, names, [one.name or "" for one in graph.outputs], batch)
        made.model.metadata_props[KEY] = written.to_json()
        with replaced_whole(path) as new:
            made.save(os.fspath(new))
            if verify:
                show("to_onnx: comparing the file with the model")
                _verify(traced, model, new, inputs, batch)
    return written


def _checked(what: str, given: Sequence[str] | None, names: tuple[str, ...]) -> list[str]:
    if given is not None and len(given) != len(names):
        raise ExportError(f"to_onnx: {what} has {len(given)} names, but there are {len(names)}: {', '.join(names)}.")
    chosen = [*(names if given is None else given)]
    if len({*chosen}) < len(chosen):
        raise ExportError(f"to_onnx: {what} are not distinct: {', '.join(chosen)}.")
    return chosen


def _require_integer_flags(traced: Traced) -> None:
    (output,) = traced.program.graph.find_nodes(op="output")
    last = output.args[0][-1].meta["val"]
    if last.dtype.is_floating_point:
        raise ExportError(
            f"to_onnx: the last output is {last.dtype}, of {last.ndim} dims. If it has the flags: ONNX cannot read "
            "floats as bits, use ErrorConfig(flag_dtype=torch.int64). If not: give watch(model), or return flags last."
        )


def _name_dims(graph: Any, varying: Mapping[str, Mapping[int, Any]]) -> None:
    """Give dims the names that the user gave, "batch" that of the samples: `torch.onnx` calls them "s77" and so on."""
    from onnxscript import ir

    names: dict[str, str] = {}
    for value in graph.inputs:
        for at, dim in varying.get(value.name, {}).items():
            symbol, name = getattr(value.shape[at], "value", None), getattr(dim, "__name__", None)
            if symbol and name:
                names.setdefault(symbol, name)
    if not names:
        return
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")

    def named(dim: Any) -> Any:
        symbol = getattr(dim, "value", None)  # None also if nothing is known of the dim
        return symbols.sub(lambda found: names[found[0]], symbol) if symbol else dim

    for value in (*graph.inputs, *[one for node in graph.all_nodes() for one in node.outputs]):
        if value.shape is not None:
            value.shape = ir.Shape([named(dim) for dim in value.shape])


def _enforce(graph: Any, batch: tuple[int, int | None]) -> None:
    """Have onnxruntime fail on a batch beyond its limits: ONNX has no assertion, and no limits of a dim.

    The flags have one row a sample. How many samples there are too many or too few is used as an index into a list of
    one zero, which is then added to the flags: any index but 0 is an error.
    """
    low, high = batch
    if low == high or (low <= 1 and high is None):  # a fixed size is a part of the file
        return
    from onnxscript import ir

    flags, name = graph.outputs[-1], graph.outputs[-1].name
    limits = f"batch_of_{low}_to_{'any' if high is None else high}"

    def constant(label: str, values: list[int]) -> Any:
        value = ir.val(f"{limits}.{label}", ir.DataType.INT64, [len(values)])
        value.const_value = ir.tensor(values, dtype=ir.DataType.INT64)
        graph.register_initializer(value)
        return value

    def add(op: str, *inputs: Any, label: str = "", **attributes: Any) -> Any:
        node = ir.node(op, inputs=[*inputs], attributes=attributes, name=f"{limits}.{label or op}")
        graph.append(node)
        return node.outputs[0]

    zero = constant("zero", [0])
    size = add("Gather", add("Shape", flags), zero, label="size")
    beyond = add("Max", add("Sub", constant("least", [low]), size, label="too_few"), zero, label="missing")
    if high is not None:
        over = add("Max", add("Sub", size, constant("most", [high]), label="too_many"), zero, label="surplus")
        beyond = add("Add", beyond, over, label="beyond")
    checked = add("Gather", zero, beyond, label="is_within_limits")
    flags.name = f"{name}.unchecked"
    result = add("Add", flags, add("Cast", checked, to=flags.dtype), label="flags")
    result.name, result.dtype, result.shape = name, flags.dtype, flags.shape
    graph.outputs[-1] = result


def _verify(traced: Traced, model: nn.Module, path: Any, inputs: list[str], batch: tuple[int, int | None]) -> None:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"to_onnx: onnxruntime cannot load {path}: {error}") from error
    used = {one.name for one in session.get_inputs()}

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        tensors = [z.cpu() for _, z in tensors_in((args, kwargs))]
        feeds = {name: z.numpy() for name, z in zip(inputs, tensors, strict=True) if name in used}
        return [torch.from_numpy(one) for one in session.run(None, feeds)]

    verify_outputs(traced.example, model, run, batch, "onnxruntime")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's messages about itself, such as that torchvision is not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
