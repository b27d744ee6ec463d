"""The checks of a module while Dynamo traces: what its hooks do to the graph, without Dynamo tracing the hooks.

`_torch/hook_calls.py` says why, and when this is used. It is `ModuleHooks` and `CallRecord.check` once more, for calls
in which these only call operators: the same nodes, in the same order. For any other call, `TracedChecks` raises
`CannotCall` before it changes the graph, and Dynamo traces the hooks.
"""

from typing import TYPE_CHECKING, Any

from torchguard._torch.hook_calls import CannotCall, HookCall
from torchguard._torch.tracing import in_transform
from torchguard._watch.detect import ROW_STATUS
from torchguard._watch.gradient_probes import probes_at
from torchguard._watch.magnitudes import REVISION
from torchguard._watch.origins import BY_SIZE
from torchguard._watch.replace import REPLACE_NONFINITE
from torchguard._watch.select import is_mask

if TYPE_CHECKING:
    from torchguard._watch.hooks import ModuleHooks


class TracedChecks:
    """The checks of one call of a module. Values are Dynamo's variables."""

    def __init__(self, call: HookCall, hook: "ModuleHooks") -> None:
        watch, record = hook.watch, call.written_to(hook.watch, "traced_record")
        if call.is_none(record):
            raise CannotCall
        region = call.constant(record, "region")
        is_usual = (
            call.num_regions == (0 if region is None else 1)
            and not in_transform()
            and not (hook.is_recurrent or watch.sample_of or watch.checks.others)
            and call.constant(record, "_calls_operators")
            and call.constant(record, "checks_values")
            and not call.constant(record, "in_transform")
        )
        if not is_usual:
            raise CannotCall
        self.call, self.hook, self.watch, self.region = call, hook, watch, region
        self.locations, self.rows, self.statuses, self.probes, samples = (
            call.attribute(record, name) for name in ("locations", "rows", "statuses", "probes", "_samples")
        )
        self.samples = call.items(samples) or ()

    def before(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the module, as `ModuleHooks.before` has them."""
        call, hook = self.call, self.hook
        if not hook.checks_input:
            return args, kwargs
        given = [(value, i in hook.masks) for i, value in enumerate(args)]
        given += [(value, is_mask(name)) for name, value in kwargs.items()]
        if hook.is_embedding or not all(call.is_simple(value) for value, _ in given):
            raise CannotCall
        checked: list[Any] = []
        floats = 0
        for i, (value, is_left) in enumerate(given):
            new = value
            if not is_left and call.is_float(value):
                given_before = zip(given[:i], checked, strict=True)
                same = [one for (other, _), one in given_before if call.is_same(other, value) and one is not other]
                how = (True, hook.mask_gradient, hook.num_squares, False, floats > 0)
                new = same[0] if same else self._check(value, *how)
            checked.append(new)
            floats += call.is_float(value)
        return checked[: len(args)], dict(zip(kwargs, checked[len(args) :], strict=True))

    def after(self, args: list[Any], output: Any) -> Any:
        """The output of the module, as `ModuleHooks.after` has it."""
        call, hook = self.call, self.hook
        if not hook.checks_output:
            return output
        items = call.items(output)
        if not all(map(call.is_simple, [output] if items is None else items)):
            new = call.trace("_forward_hooks", [call.new_tuple(args), output])
            return output if call.is_none(new) else new
        if items is None:
            return self._check(output, False, True, 0, hook.in_place, False)
        checked = [self._check(one, False, True, 0, False, False) for one in items]
        return call.new_tuple(checked) if self.watch.quarantine else output

    def _check(
        self, z: Any, is_argument: bool, mask_gradient: bool, num_squares: int, in_place: bool, keep_neg_inf: bool
    ) -> Any:
        call, location, paths = self.call, self.hook.location, self.watch.paths
        if not call.is_float(z):
            return z
        call.append(self.locations, location + len(paths) if is_argument else location)
        call.append(self.rows, BY_SIZE)
        if self.watch.quarantine:
            how = (mask_gradient, num_squares, is_argument, in_place, keep_neg_inf)
            probes, location = probes_at(location, self.probes, self.region)
            given = (probes, location, *self.samples, None, *how, False, self.watch.norm_widths, REVISION)
            z, status = call.call(REPLACE_NONFINITE, z, *given)
        else:
            is_end = location in (0, len(paths) - 1)
            status = call.call(ROW_STATUS, z, is_end, keep_neg_inf, self.watch.norm_widths, REVISION)
        call.append(self.statuses, status)
        return z
