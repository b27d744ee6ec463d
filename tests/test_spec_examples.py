"""The examples of the specification, in its order."""

import logging

import pytest
import torch
from torch import nn

import torchguard as tg
from torchguard import (
    AccumulationConfig,
    Dedupe,
    Err,
    ErrorConfig,
    ErrorDomain,
    ErrorFlags,
    ErrorLocation,
    Ok,
    Order,
    Priority,
    Severity,
    UnpackedError,
    as_exception,
    as_result,
    err,
    find,
    fix,
    flag_inf,
    flag_nan,
    flag_nan_and_inf,
    flag_oob_indices,
    flags,
    get_config,
    has_err,
    push,
    set_config,
    tracked,
    unwrap,
)
from torchguard.exceptions import CorruptFlagsError
from torchguard.locations import WeightedLocationTree

NAN, INF = float("nan"), float("inf")


def traced(fn):
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def rows(n, *bad):
    """True at the given rows."""
    return torch.isin(torch.arange(n), torch.tensor(bad))


def errors_of(f):
    return [[(error.code, error.location_name) for error in sample] for sample in flags.unpack_all(f)]


def codes_of(f):
    return [[error.code for error in sample] for sample in flags.unpack_all(f)]


def test_a_report_names_nested_submodules():
    @tracked
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Module()
            self.encoder.ffn = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
            self.classifier = nn.Linear(4, 4)
            for parameter in self.parameters():
                nn.init.ones_(parameter)

        def forward(self, x):
            f = err.new(x)
            x = self.encoder.ffn(x)
            f = flag_nan(x, self.encoder.ffn[2], f)
            x = self.classifier(x)
            f = flag_inf(x, self.classifier, f)
            return x, f

    model = traced(Model())
    x = torch.ones(32, 4)
    x[:3], x[3] = NAN, 1e37
    output, f = model(x)
    assert has_err(f)
    assert "3xNAN @ encoder.ffn.2, 1xINF @ classifier" in flags.repr(f)
    assert output.shape == (32, 4)


class TestBeforeAndAfter:
    BAD_TOKEN = 7

    def ids(self):
        ids = torch.arange(32).unsqueeze(-1).expand(32, 5) % self.BAD_TOKEN
        return torch.where(rows(32, 4, 11, 30).unsqueeze(-1), self.BAD_TOKEN, ids)

    def parts(self, model):
        model.embedding = nn.Embedding(10, 8)
        model.classifier = nn.Linear(8, 3)
        with torch.no_grad():
            model.embedding.weight[self.BAD_TOKEN] = NAN

    def test_without_torchguard_nan_propagates(self, compiled):
        class Model(nn.Module):
            @compiled
            def forward(self, ids):
                embed = self.embedding(ids)
                return self.classifier(embed)

        model = Model()
        self.parts(model)
        out = model(self.ids())
        assert torch.equal(out.isnan().flatten(1).any(-1), rows(32, 4, 11, 30))

    def test_without_torchguard_reacting_to_nan_breaks_the_graph(self, compiled):
        class Model(nn.Module):
            @compiled
            def forward(self, ids):
                out = self.classifier(self.embedding(ids))
                if out.isnan().any():
                    raise RuntimeError("NaN")
                return out

        model = Model()
        self.parts(model)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model(self.ids())

    def test_with_torchguard_only_bad_samples_are_flagged(self, compiled):
        parts = self.parts

        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                parts(self)

            @compiled
            def forward(self, ids):
                f = err.new(ids)
                embed = self.embedding(ids)
                f = flag_nan(embed, self.embedding, f)
                out = self.classifier(embed)
                f = flag_nan(out, self.classifier, f)
                return out, f

        out, f = Model()(self.ids())
        assert out.shape == (32, 5, 3)
        ok_output = err.take_ok(f, out)
        err_output = err.take_err(f, out)
        assert ok_output.shape == (29, 5, 3)
        assert err_output.shape == (3, 5, 3)
        assert ok_output.isfinite().all()
        assert flags.unpack(f, 4)[0].location_name == "embedding"


def test_quick_start(compiled):
    @tracked
    class MyModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Linear(512, 256)
            self.layer2 = nn.Linear(256, 128)

        def forward(self, x):
            f = err.new(x)
            x = self.layer1(x)
            f = flag_nan(x, self.layer1, f)
            x = self.layer2(x)
            f = flag_nan(x, self.layer2, f)
            return x, f

    model = compiled(MyModel())
    x = torch.randn(32, 512)
    out, f = model(x)
    assert out.shape == (32, 128)
    assert (f.shape, f.dtype) == ((32, 4), torch.int64)
    assert not has_err(f)

    # One Inf in each row: layer1 makes every unit Inf or -Inf, and layer2 adds Inf and -Inf.
    x[:4, 0] = INF
    out, f = model(x)
    assert has_err(f)
    assert flags.repr(f) == "ErrorFlags(32 samples, 4 errors: 4xNAN @ layer2)"


class TestCommonPatterns:
    def logits(self):
        logits = torch.randn(8, 3)
        logits[2, 1], logits[5] = NAN, INF
        return logits

    def test_drop_bad_samples(self):
        logits, targets = self.logits(), torch.arange(8) % 3
        criterion = nn.CrossEntropyLoss()
        f = flag_nan_and_inf(logits, "head", err.new(logits))
        clean_logits = err.take_ok(f, logits)
        clean_targets = err.take_ok(f, targets)
        loss = criterion(clean_logits, clean_targets)
        assert clean_logits.shape == (6, 3)
        assert clean_targets.tolist() == [0, 1, 0, 1, 0, 1]
        assert loss.isfinite()

    def test_drop_bad_samples_inside_a_graph(self, compiled):
        @compiled
        def forward(logits):
            f = flag_nan_and_inf(logits, "head", err.new(logits))
            return err.take_ok_p(f, logits, fill=0.0)

        logits = self.logits()
        clean_logits = forward(logits)
        assert clean_logits.shape == (8, 3)
        assert clean_logits[[2, 5]].tolist() == [[0.0] * 3] * 2
        assert torch.equal(clean_logits[[0, 1, 3, 4, 6, 7]], logits[[0, 1, 3, 4, 6, 7]])

    def test_replace_bad_samples_with_a_fallback(self, compiled):
        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(3, 2)

            def forward(self, x):
                logits = self.head(x)
                f = flag_nan_and_inf(logits, self.head, err.new(x))
                logits, f = fix(logits, f, self.head, fallback=0.0)
                return logits, f

        logits, f = compiled(Model())(self.logits())
        assert logits.isfinite().all()
        assert logits[[2, 5]].tolist() == [[0.0] * 2] * 2
        assert err.has_fallback(f).tolist() == rows(8, 2, 5).tolist()

    def test_log_and_continue(self, caplog):
        logger = logging.getLogger("monitoring")
        f = push(err.new_t(8), err.NAN, "encoder", where=rows(8, 0, 1, 2))
        f = push(f, err.INF, "classifier", where=rows(8, 6))
        if has_err(f):
            logger.warning("Bad samples: %s", flags.summary(f))
        (record,) = caplog.records
        assert record.getMessage().startswith("Bad samples: {'")
        assert record.args == {"encoder": {"NAN": 3}, "classifier": {"INF": 1}}

    def test_partition_for_separate_handling(self):
        output = self.logits()
        f = flag_nan_and_inf(output, "head", err.new(output))
        ok_out, err_out = err.partition(f, output)
        bad_indices = torch.nonzero(err.is_err(f)).squeeze(-1)
        assert (ok_out.shape, err_out.shape) == ((6, 3), (2, 3))
        assert ok_out.isfinite().all()
        assert bad_indices.tolist() == [2, 5]

    def test_partition_inside_a_graph(self, compiled):
        @compiled
        def forward(output):
            f = flag_nan_and_inf(output, "head", err.new(output))
            ok_out = err.take_ok_p(f, output, fill=0.0)
            err_out = err.take_err_p(f, output, fill=0.0)
            return ok_out, err_out

        output = self.logits()
        ok_out, err_out = forward(output)
        assert ok_out.shape == err_out.shape == (8, 3)
        assert ok_out[[2, 5]].tolist() == [[0.0] * 3] * 2
        assert torch.equal(ok_out[0], output[0])
        assert err_out[0].tolist() == [0.0] * 3
        assert err_out[5].tolist() == [INF] * 3

    def test_conditional_recovery_inside_a_graph(self, compiled):
        from torchguard import fix
        from torchguard.experimental import IF, IS, err

        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x):
                z = self.layer(x)
                f = flag_nan(z, self.layer, err.new(x))
                z, f = (
                    IF(IS(err.NAN, f), lambda: fix(z, f, self.layer))
                    .ELSE(lambda: (z.clone(), f.clone()))
                )  # fmt: skip
                return z, f

        model = Model()
        x = torch.randn(4, 3)
        z, f = compiled(model)(x)
        torch.testing.assert_close(z, model.layer(x))
        assert not has_err(f)

        x[1] = NAN
        z, f = compiled(model)(x)
        assert z[1].tolist() == [0.0, 0.0]
        torch.testing.assert_close(z[[0, 2, 3]], model.layer(x)[[0, 2, 3]])
        assert errors_of(f) == [[], [(err.NAN, "layer"), (err.FALLBACK_VALUE, "layer")], [], []]


class TestCoreConcepts:
    def test_flags_have_four_slots_a_word(self):
        f = err.new(torch.zeros(3, 5))
        assert (f.shape, f.dtype) == ((3, 4), torch.int64)
        assert f.tolist() == [[0] * 4] * 3
        f = push(f, err.NAN, location=1, where=rows(3, 2))
        assert err.is_ok(f).tolist() == (f == 0).all(-1).tolist() == [True, True, False]
        assert has_err(f)

    def test_domains_are_masks(self):
        @traced
        def domains(f):
            numeric_mask = err.has_domain(f, ErrorDomain.NUMERIC)
            runtime_mask = err.has_domain(f, ErrorDomain.RUNTIME)
            return numeric_mask, runtime_mask

        f = err.push(err.new_t(4), err.OVERFLOW, location=1, where=rows(4, 0))
        f = err.push(f, err.OOB, location=1, where=rows(4, 1))
        f = err.push(f, err.VALUE_CLAMPED, location=1, where=rows(4, 2))
        numeric_mask, runtime_mask = domains(f)
        assert numeric_mask.tolist() == [True, False, False, False]
        assert runtime_mask.tolist() == [False, False, True, False]

    @pytest.mark.parametrize(
        ("domain", "codes"),
        [
            (0, [err.NAN, err.INF, err.OVERFLOW]),
            (1, [err.OUT_OF_BOUNDS, err.NEGATIVE_IDX, err.EMPTY_INPUT]),
            (2, [err.ZERO_OUTPUT, err.CONSTANT_OUTPUT, err.SATURATED]),
            (3, [err.FALLBACK_VALUE, err.VALUE_CLAMPED]),
        ],
    )
    def test_a_domain_is_the_upper_bits_of_a_code(self, domain, codes):
        assert codes == [4 * domain + subcode for subcode in range(1, len(codes) + 1)]
        for code in codes:
            assert err.has_domain(err.from_code(code, 1, n=1), domain).all()

    @pytest.mark.parametrize(
        ("severity", "codes"),
        [
            (1, [err.ZERO_OUTPUT, err.CONSTANT_OUTPUT, err.SATURATED, err.FALLBACK_VALUE]),
            (2, [err.OUT_OF_BOUNDS, err.NEGATIVE_IDX, err.OVERFLOW, err.EMPTY_INPUT]),
            (3, [err.NAN, err.INF]),
        ],
    )
    def test_a_code_has_a_default_severity(self, severity, codes):
        for code in codes:
            assert err.max_severity(err.from_code(code, 1, n=1)).tolist() == [severity]

    def test_severity_can_be_overridden(self):
        f = err.push(err.new_t(1), err.NAN, location=1, severity=err.WARN)
        assert flags.unpack(f)[0].severity_name == "WARN"
        assert not err.has_critical(f)


class TestErr:
    def test_codes_and_severities_are_attributes(self):
        assert (err.NAN, err.INF, err.OVERFLOW, err.OOB) == (1, 2, 3, 5)
        assert err.OOB == err.OUT_OF_BOUNDS
        assert (err.CRITICAL, err.ERROR, err.WARN, err.OK) == (3, 2, 1, 0)

    def test_creation(self):
        assert err.new(torch.zeros(3, 5)).tolist() == [[0] * 4] * 3
        assert err.new_t(3, torch.device("cpu"), ErrorConfig(num_slots=8)).shape == (3, 2)
        assert codes_of(err.from_code(err.INF, 1, 2)) == [[err.INF]] * 2

    def test_recording(self):
        @traced
        def record(x):
            f = err.push(err.new(x), err.NAN, location=1, severity=err.WARN, where=x.isnan())
            everywhere = err.push_scalar(err.new(x), err.SATURATED, location=2, severity=err.ERROR)
            return err.merge(f, everywhere)

        f = record(torch.tensor([1.0, NAN]))
        assert codes_of(f) == [[err.SATURATED], [err.NAN, err.SATURATED]]
        assert err.max_severity(f).tolist() == [err.ERROR, err.ERROR]

    def test_queries(self):
        @traced
        def query(f):
            return (
                err.is_ok(f),
                err.is_err(f),
                err.all_ok(f),
                err.any_err(f),
                err.has_nan(f),
                err.has_inf(f),
                err.has_code(f, err.FALLBACK_VALUE),
                err.has_critical(f),
                err.has_domain(f, 0),
                err.has_fallback(f),
                err.count_errors(f),
                err.max_severity(f),
            )

        f = err.push(err.new_t(3), err.NAN, location=1, where=rows(3, 0))
        f = err.push(f, err.FALLBACK_VALUE, location=1, where=rows(3, 0, 1))
        assert [answer.tolist() for answer in query(f)] == [
            [False, False, True],
            [True, True, False],
            False,
            True,
            [True, False, False],
            [False, False, False],
            [True, True, False],
            [True, False, False],
            [True, False, False],
            [True, True, False],
            [2, 1, 0],
            [err.CRITICAL, err.WARN, err.OK],
        ]
        assert err.count_errors(f).dtype == torch.int32
        assert err.max_severity(f).dtype == torch.int64

    def test_filters(self):
        z, ids = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([10, 20, 30])
        f = err.push(err.new(z), err.NAN, location=1, where=rows(3, 1))
        assert err.take_ok(f, z).tolist() == [[1.0], [3.0]]
        assert err.take_err(f, z).tolist() == [[2.0]]
        (ok_z, ok_ids), (err_z, err_ids) = err.partition_many(f, z, ids)
        assert (ok_z.tolist(), ok_ids.tolist()) == ([[1.0], [3.0]], [10, 30])
        assert (err_z.tolist(), err_ids.tolist()) == ([[2.0]], [20])

    def test_dynamic_filters_break_the_graph(self):
        # fullgraph=True would turn on the capture of dynamic shapes.
        @torch.compile(backend="aot_eager")
        @torch._dynamo.error_on_graph_break(True)
        def forward(x):
            return err.take_ok(err.new(x), x)

        with pytest.raises(torch._dynamo.exc.Unsupported, match="Dynamic shape operator"):
            forward(torch.randn(3, 2))

    def test_static_filters_trace(self, compiled):
        @compiled
        def forward(out):
            f = flag_nan(out, "layer", err.new(out))
            ok_out = err.take_ok_p(f, out, fill=0.0)
            err_out = err.take_err_p(f, out, fill=0.0)
            out = err.map_err(f, out, lambda z: torch.zeros_like(z))
            return ok_out, err_out, out

        ok_out, err_out, out = forward(torch.tensor([[1.0, 2.0], [NAN, 3.0]]))
        assert ok_out.tolist() == [[1.0, 2.0], [0.0, 0.0]]
        assert err_out.nan_to_num(-1.0).tolist() == [[0.0, 0.0], [-1.0, 3.0]]
        assert out.tolist() == [[1.0, 2.0], [0.0, 0.0]]

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def test_dynamic_filters_trace_when_enabled(self, compiled):
        model = nn.Identity()

        @compiled
        def forward(x):
            f = err.new(x)
            out = model(x)
            f = flag_nan(out, "model", f)
            ok_out = err.take_ok(f, out)
            return ok_out, err.take_err(f, out), err.partition(f, out)

        ok_out, err_out, parts = forward(torch.tensor([[1.0], [NAN], [3.0]]))
        assert ok_out.tolist() == parts[0].tolist() == [[1.0], [3.0]]
        assert err_out.shape == parts[1].shape == (1, 1)

    def test_dynamic_filters_at_the_boundary(self):
        model = nn.Identity()

        @traced
        def compiled_forward(x):
            f = err.new(x)
            out = model(x)
            return out, f

        x = torch.randn(3, 2)
        out, f = compiled_forward(x)
        ok_out = err.take_ok(f, out)
        assert torch.equal(ok_out, x)

    def test_slot_inspection(self):
        @traced
        def first(f):
            return err.get_first_code(f), err.get_first_location(f), err.get_first_severity(f), err.clear(f, err.NAN)

        f = err.push(err.from_code(err.NAN, 7, n=1), err.SATURATED, location=9)
        code, location, severity, cleared = first(f)
        assert (code.tolist(), location.tolist(), severity.tolist()) == ([err.NAN], [7], [err.CRITICAL])
        assert codes_of(cleared) == [[err.SATURATED]]


def test_flags_report_what_was_recorded():
    f = push(err.new_t(32), err.NAN, "encoder", where=rows(32, 0, 1, 2))
    f = push(f, err.INF, "output", where=rows(32, 0, 9))
    assert has_err(f)
    assert flags.repr(f) == "ErrorFlags(32 samples, 5 errors: 3xNAN @ encoder, 2xINF @ output)"

    summary = flags.summary(f)
    assert summary == {"encoder": {"NAN": 3}, "output": {"INF": 2}}

    errors = flags.unpack(f, sample_idx=0)
    assert [f"{e.code_name} at {e.location_name}" for e in errors] == ["NAN at encoder", "INF at output"]

    assert errors[0] == UnpackedError(3, 1, ErrorLocation.get("encoder"), "CRITICAL", "NAN", "encoder")
    assert ErrorFlags.repr(f) == flags.repr(f)


class TestHelpers:
    def test_helpers_take_the_module_as_the_location(self):
        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                nn.init.eye_(self.layer.weight)

            def forward(self, x):
                f = err.new(x)

                out = self.layer(x)
                f = flag_nan(out, self.layer, f)
                f = flag_inf(out, self.layer, f)

                bad = (out.abs() > 1e6).any(dim=-1)
                f = push(f, err.OVERFLOW, self.layer, where=bad)

                out, f = fix(out, f, self.layer, fallback=0.0)

                return out, f

        out, f = traced(Model())(torch.tensor([[1.0, 2.0], [NAN, NAN], [1e7, 1.0]]))
        assert out[1:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert out[0].isfinite().all()
        assert errors_of(f) == [
            [],
            [(err.NAN, "layer"), (err.FALLBACK_VALUE, "layer")],
            [(err.OVERFLOW, "layer"), (err.FALLBACK_VALUE, "layer")],
        ]

    def test_indices_out_of_bounds(self):
        @traced
        def check(ids):
            f = flag_oob_indices(ids, 10, "embedding", err.new(ids))
            return f, find(err.OOB, f)

        f, found = check(torch.tensor([[0, 9], [1, 10], [-1, 2]]))
        assert found.tolist() == [False, True, True]
        assert flags.summary(f) == {"embedding": {"OUT_OF_BOUNDS": 2}}


class TestCombinators:
    def test_transform_values(self, compiled):
        @compiled
        def forward(h):
            f = flag_nan(h, "h", err.new(h))
            normalised = err.map_ok(f, h, lambda z: z / z.norm(dim=-1, keepdim=True))
            zeroed = err.map_err(f, h, lambda z: torch.zeros_like(z))
            return normalised, zeroed

        normalised, zeroed = forward(torch.tensor([[3.0, 4.0], [NAN, 1.0]]))
        torch.testing.assert_close(normalised, torch.tensor([[0.6, 0.8], [NAN, 1.0]]), equal_nan=True)
        assert zeroed.tolist() == [[3.0, 4.0], [0.0, 0.0]]

    def test_replace_values(self, compiled):
        @compiled
        def forward(h):
            both = err.replace(h, value=0.0, targets=[err.NAN, err.INF])
            only_nan = err.replace(h, value=0.0, targets=[err.NAN])
            numbers = err.replace(h, value=-1.0, targets=[999, float("inf")])
            return both, only_nan, numbers

        h = torch.tensor([[1.0, NAN, INF, -INF, 999.0]], requires_grad=True)
        both, only_nan, numbers = forward(h)
        assert both.tolist() == [[1.0, 0.0, 0.0, 0.0, 999.0]]
        assert only_nan.tolist() == [[1.0, 0.0, INF, -INF, 999.0]]
        torch.testing.assert_close(numbers, torch.tensor([[1.0, NAN, -1.0, -INF, -1.0]]), equal_nan=True)
        both.sum().backward()
        assert h.grad.tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]]

    def test_transform_the_flags_of_bad_samples(self, compiled):
        def add_context(f):
            return err.push(f, err.SATURATED, location=99, severity=err.WARN)

        @compiled
        def forward(x):
            f = flag_nan(x, "x", err.new(x))
            return err.map_err_flags(f, add_context)

        updated_flags = forward(torch.tensor([[1.0], [NAN]]))
        assert codes_of(updated_flags) == [[], [err.NAN, err.SATURATED]]

    def test_chain_steps(self, compiled):
        def step(z):
            out = z + 1
            return out, flag_inf(out, 2, err.new(out))

        @compiled
        def forward(z):
            f = flag_nan(z, 1, err.new(z))
            return err.and_then(f, z, step), err.bind(f, z, step)

        (short, short_f), (every, every_f) = forward(torch.tensor([[1.0, 1.0, 1.0], [INF, 1.0, 1.0], [NAN, INF, 1.0]]))
        assert short[:, 2].tolist() == [2.0, 2.0, 1.0]
        assert every[:, 2].tolist() == [2.0, 2.0, 2.0]
        assert codes_of(short_f) == [[], [err.INF], [err.NAN]]
        assert codes_of(every_f) == [[], [err.INF], [err.NAN, err.INF]]

    def test_guard_and_recover(self, compiled):
        @compiled
        def forward(z):
            f = err.ensure_mask(err.new(z), z[:, 0] >= 0, err.NEGATIVE_IDX, 1)
            f = err.guard(f, z, lambda z: z < 100, err.OVERFLOW, 2)
            return err.recover_with_fallback(f, z, 0.5, 3)

        z, f = forward(torch.tensor([[1.0], [-1.0], [200.0]]))
        assert z.tolist() == [[1.0], [0.5], [0.5]]
        assert codes_of(f) == [[], [err.NEGATIVE_IDX, err.FALLBACK_VALUE], [err.OVERFLOW, err.FALLBACK_VALUE]]


class TestControlFlow:
    def test_predicates(self, compiled):
        from torchguard.experimental import AND, HAS, IS, NOT, OR, err

        @compiled
        def query(x):
            f = flag_nan_and_inf(x, "x", err.new(x))
            nan, inf = IS(err.NAN, f), IS(err.INF, f)
            return HAS(f), nan, inf, OR(nan, inf), AND(nan, inf), NOT(inf)

        answers = query(torch.tensor([[1.0], [NAN]]))
        assert [bool(answer) for answer in answers] == [True, True, False, True, False, True]
        answers = query(torch.tensor([[1.0], [2.0]]))
        assert [bool(answer) for answer in answers] == [False, False, False, False, False, True]

    def test_simple_conditional(self, compiled):
        from torchguard.experimental import IF, IS, err

        @compiled
        def forward(z):
            f = flag_nan(z, "z", err.new(z))
            z, f = (
                IF(IS(err.NAN, f), lambda: (torch.zeros_like(z), f.clone()))
                .ELSE(lambda: (z.clone(), f.clone()))
            )  # fmt: skip
            return z, f

        z, f = forward(torch.tensor([[1.0], [NAN]]))
        assert z.tolist() == [[0.0], [0.0]]
        assert err.is_err(f).tolist() == [False, True]
        z, f = forward(torch.tensor([[1.0], [2.0]]))
        assert z.tolist() == [[1.0], [2.0]]
        assert err.all_ok(f)

    def test_multiple_conditions(self, compiled):
        from torchguard.experimental import IF, IS, err

        def handle_nan(z, f):
            return torch.full_like(z, -1.0), f.clone()

        def handle_inf(z, f):
            return torch.full_like(z, -2.0), f.clone()

        @compiled
        def forward(z):
            f = flag_nan_and_inf(z, "z", err.new(z))
            z, f = (
                IF(IS(err.NAN, f), lambda: handle_nan(z, f))
                .ELIF(IS(err.INF, f), lambda: handle_inf(z, f))
                .ELSE(lambda: (z.clone(), f.clone()))
            )
            return z, f

        assert forward(torch.tensor([[1.0], [NAN]]))[0].tolist() == [[-1.0], [-1.0]]
        assert forward(torch.tensor([[1.0], [INF]]))[0].tolist() == [[-2.0], [-2.0]]
        assert forward(torch.tensor([[NAN], [INF]]))[0].tolist() == [[-1.0], [-1.0]]
        assert forward(torch.tensor([[1.0], [2.0]]))[0].tolist() == [[1.0], [2.0]]

    def test_compound_predicates(self, compiled):
        from torchguard.experimental import IF, IS, OR, err

        @compiled
        def forward(z):
            f = flag_nan_and_inf(z, "z", err.new(z))
            z, f = (
                IF(OR(IS(err.NAN, f), IS(err.INF, f)), lambda: (torch.zeros_like(z), f.clone()))
                .ELSE(lambda: (z.clone(), f.clone()))
            )  # fmt: skip
            return z, f

        assert forward(torch.tensor([[1.0], [NAN]]))[0].tolist() == [[0.0], [0.0]]
        assert forward(torch.tensor([[1.0], [INF]]))[0].tolist() == [[0.0], [0.0]]
        assert forward(torch.tensor([[1.0], [2.0]]))[0].tolist() == [[1.0], [2.0]]


@tracked
class TransformerBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.ffn = nn.Sequential(
            nn.Linear(dim, dim * 4),
            nn.GELU(),
            nn.Linear(dim * 4, dim),
        )

    def forward(self, x):
        f = err.new(x)
        x, _ = self.attention(x, x, x)
        f = flag_nan(x, self.attention, f)
        x = self.ffn[0](x)
        f = flag_nan(x, self.ffn[0], f)
        return x, f


class TestLocationTracking:
    def test_submodules_with_parameters_have_a_path(self):
        block = TransformerBlock(8, 2)
        assert block.attention._fx_path == "attention"
        assert block.ffn._fx_path == "ffn"
        assert block.ffn[0]._fx_path == "ffn.0"
        assert not hasattr(block.ffn[1], "_fx_path")
        assert block.ffn[2]._fx_path == "ffn.2"

    def test_paths_are_resolved_in_a_graph(self):
        x = torch.randn(3, 5, 8)
        x[1, 2] = NAN
        _, f = traced(TransformerBlock(8, 2))(x)
        assert errors_of(f) == [[], [(err.NAN, "attention"), (err.NAN, "ffn.0")], []]

    def test_deeper_modules_share_the_id_of_their_ancestor(self):
        tree = WeightedLocationTree(max_locations=5)
        for path in ["encoder", "encoder.layer", "encoder.layer.0"]:
            tree.add_path(path)
        tree.add_path("encoder.layer.0.attn.q")
        tree.add_path("encoder.layer.0.attn.k")
        tree.build_ids()
        shared = tree.get_location("encoder.layer.0")
        assert tree.get_location("encoder.layer.0.attn.q") == tree.get_location("encoder.layer.0.attn.k") == shared

    def test_weights_preserve_important_paths(self):
        tree = WeightedLocationTree(max_locations=1024)
        tree.set_weight("head.*", 10.0)
        tree.set_weight("encoder.layer*", 1.0)
        for layer in range(2000):
            tree.add_path(f"encoder.layer{layer}")
        tree.add_path("head")
        tree.add_path("head.deep.down.out")
        tree.build_ids()
        assert tree.name(tree.get_location("head.deep.down.out")) == "head.deep.down.out"
        ids = {tree.get_location(f"encoder.layer{layer}") for layer in range(2000)}
        assert len(ids) < 1024
        assert max(ids) < 1024

    def test_a_location_can_be_given_by_number(self):
        @traced
        def forward(x):
            f = err.new(x)
            return push(f, err.NAN, location=42, where=torch.isnan(x).any(dim=-1))

        f = forward(torch.tensor([[1.0, 2.0], [NAN, 2.0]]))
        assert err.get_first_location(f).tolist() == [0, 42]


class TestResult:
    def test_errors_are_returned_rather_than_raised(self):
        @as_result
        def might_fail(x):
            """Returns Result[T, Exception] instead of raising."""
            if x < 0:
                raise ValueError("Negative input")
            return x * 2

        result = might_fail(-5)
        assert result.is_err()
        assert f"Failed: {result.unwrap_err()}" == "Failed: Negative input"
        result = might_fail(5)
        assert result.is_ok()
        assert f"Success: {result.unwrap()}" == "Success: 10"

    def test_results_are_chained(self):
        @as_result
        def safe_divide(a, b):
            if b == 0:
                raise ZeroDivisionError("Division by zero")
            return a / b

        result = safe_divide(10, 0)
        assert result.is_err()

        def process(x):
            result = safe_divide(x, 2)
            if result.is_err():
                return result
            return Ok(result.unwrap() + 1)

        assert process(10) == Ok(6.0)
        assert isinstance(process("ten").unwrap_err(), TypeError)

    @pytest.mark.parametrize("decorator", [as_exception, unwrap])
    def test_a_result_is_unwrapped_by_a_decorator(self, decorator):
        @decorator
        def checked(x):
            return Ok(x) if x >= 0 else Err(ValueError("Negative"))

        assert checked(3) == 3
        with pytest.raises(ValueError, match="Negative"):
            checked(-3)

    def test_the_methods_of_a_result(self):
        success, failure = Ok(2), Err("no")
        assert (success.is_ok(), success.is_err(), failure.is_ok(), failure.is_err()) == (True, False, False, True)
        assert (success.unwrap(), failure.unwrap_err()) == (2, "no")
        assert (success.unwrap_or(7), failure.unwrap_or(7)) == (2, 7)
        assert (success.map(str), failure.map(str)) == (Ok("2"), failure)
        assert (success.map_err(len), failure.map_err(len)) == (success, Err(2))
        with pytest.raises(RuntimeError):
            success.unwrap_err()
        with pytest.raises(RuntimeError):
            failure.unwrap()


class TestConfiguration:
    def test_global_config(self):
        assert tg.CONFIG.flag_dtype == torch.int64
        assert tg.CONFIG.num_slots == 16

        tg.CONFIG.flag_dtype = torch.float32
        tg.CONFIG.num_slots = 32

        x = torch.randn(4, 8)
        f = tg.err.new(x)
        assert (f.dtype, f.shape) == (torch.float32, (4, 16))

        original = get_config()
        set_config(ErrorConfig(flag_dtype=torch.float32, num_slots=64))
        try:
            assert tg.err.new(x).shape == (4, 32)
        finally:
            set_config(original)
        assert tg.CONFIG is original
        assert tg.err.new(x).shape == (4, 16)

    def test_config_defaults(self):
        assert get_config() == ErrorConfig(
            flag_dtype=torch.int64,
            num_slots=16,
            accumulation=AccumulationConfig(Priority.CHRONO, Order.FIRST, Dedupe.UNIQUE),
            default_severity=Severity.ERROR,
            strict_validation=False,
            use_transposed_layout=False,
            transpose_threshold=10000,
        )

    @pytest.mark.parametrize(
        ("dtype", "words"), [(torch.int64, 4), (torch.int32, 8), (torch.float32, 8), (torch.float64, 4)], ids=str
    )
    def test_backend_selection(self, dtype, words):
        tg.CONFIG.flag_dtype = dtype

        @traced
        def forward(x):
            return flag_nan(x, "x", err.new(x))

        f = forward(torch.tensor([[1.0], [NAN]]))
        assert (f.dtype, f.shape) == (dtype, (2, words))
        assert flags.repr(f) == "ErrorFlags(2 samples, 1 errors: 1xNAN @ x)"

    def test_config_of_one_operation(self):
        x = torch.randn(5, 2)
        f = tg.err.new(x)
        assert (f.dtype, f.shape) == (torch.int64, (5, 4))

        custom = tg.ErrorConfig(flag_dtype=torch.float64, num_slots=8)
        f = tg.err.new_t(5, config=custom)
        assert (f.dtype, f.shape) == (torch.float64, (5, 2))


class TestAccumulation:
    def pushed(self, *records):
        f = err.new_t(1)
        for code, location in records:
            f = err.push(f, code, location)
        return [(error.code, error.location) for error in flags.unpack(f)]

    def test_global_accumulation(self):
        tg.CONFIG.num_slots = 2
        tg.CONFIG.accumulation = AccumulationConfig(
            priority=Priority.CHRONO,
            order=Order.FIRST,
            dedupe=Dedupe.UNIQUE,
        )
        recorded = self.pushed((err.NAN, 1), (err.NAN, 1), (err.INF, 2), (err.INF, 3))
        assert recorded == [(err.NAN, 1), (err.INF, 2)]

    @pytest.mark.parametrize(
        ("policy", "recorded"),
        [
            (
                AccumulationConfig(priority=Priority.CHRONO, order=Order.FIRST, dedupe=Dedupe.UNIQUE),
                {(err.SATURATED, 1), (err.NAN, 2)},
            ),
            (
                AccumulationConfig(priority=Priority.CHRONO, order=Order.LAST, dedupe=Dedupe.UNIQUE),
                {(err.OOB, 3), (err.ZERO_OUTPUT, 4)},
            ),
            (
                AccumulationConfig(priority=Priority.SEVERITY, order=Order.LAST, dedupe=Dedupe.UNIQUE),
                {(err.NAN, 2), (err.OOB, 3)},
            ),
        ],
        ids=["FIFO", "LIFO", "severity"],
    )
    def test_common_configurations(self, policy, recorded):
        tg.CONFIG.num_slots = 2
        tg.CONFIG.accumulation = policy
        records = [(err.SATURATED, 1), (err.NAN, 2), (err.OOB, 3), (err.ZERO_OUTPUT, 4)]
        assert set(self.pushed(*records)) == recorded

    @pytest.mark.parametrize(
        ("order", "recorded"),
        [(Order.FIRST, range(16)), pytest.param(Order.LAST, range(4, 20), marks=pytest.mark.long)],
        ids=["FIFO", "LIFO"],
    )
    def test_only_fifo_records_where_a_nan_originated(self, order, recorded):
        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))

            def forward(self, x):
                f = err.new(x)
                for layer in self.layers:
                    x = layer(x)
                    f = flag_nan(x, layer, f)
                return x, f

        tg.CONFIG.accumulation = AccumulationConfig(priority=Priority.CHRONO, order=order, dedupe=Dedupe.UNIQUE)
        _, f = traced(Model())(torch.tensor([[NAN, 1.0], [1.0, 1.0]]))
        assert {error.location_name for error in flags.unpack(f, 0)} == {f"layers.{layer}" for layer in recorded}
        assert flags.unpack(f, 1) == []


def test_bits_of_a_slot():
    from torchguard import (
        CODE_BITS,
        CODE_MASK,
        CODE_SHIFT,
        LOCATION_BITS,
        LOCATION_MASK,
        LOCATION_SHIFT,
        SEVERITY_BITS,
        SEVERITY_MASK,
        SEVERITY_SHIFT,
        SLOT_BITS,
        SLOT_MASK,
        SLOTS_PER_WORD,
    )

    assert (SLOT_BITS, SLOTS_PER_WORD, SLOT_MASK) == (16, 4, 0xFFFF)
    assert (SEVERITY_SHIFT, SEVERITY_BITS, SEVERITY_MASK) == (0, 2, 0x3)
    assert (CODE_SHIFT, CODE_BITS, CODE_MASK) == (2, 4, 0xF)
    assert (LOCATION_SHIFT, LOCATION_BITS, LOCATION_MASK) == (6, 10, 0x3FF)

    def unpack_slot(slot_value):
        severity = (slot_value >> SEVERITY_SHIFT) & SEVERITY_MASK
        code = (slot_value >> CODE_SHIFT) & CODE_MASK
        location = (slot_value >> LOCATION_SHIFT) & LOCATION_MASK
        return severity, code, location

    f = err.push(err.from_code(err.NAN, 1023, n=1), err.SATURATED, location=42)
    word = f[0, 0].item()
    assert unpack_slot(word & SLOT_MASK) == (err.CRITICAL, err.NAN, 1023)
    assert unpack_slot((word >> SLOT_BITS) & SLOT_MASK) == (err.WARN, err.SATURATED, 42)


class TestPerformance:
    def test_the_same_calls_give_the_same_flags(self):
        x = torch.randn(4, 2)
        once, again = (err.push(err.new(x), err.NAN, 1) for _ in range(2))
        assert torch.equal(once, again)
        assert codes_of(again) == [[err.NAN]] * 4

    def test_the_fused_check_records_what_two_checks_do(self):
        @tracked
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)

            def forward(self, x):
                out = self.layer(x)
                f = flag_nan(out, self.layer, err.new(x))
                f = flag_inf(out, self.layer, f)
                fused = flag_nan_and_inf(out, self.layer, err.new(x))
                return f, fused

        f, fused = traced(Model())(torch.tensor([[1.0, 1.0], [NAN, 1.0], [INF, 1.0]]))
        assert torch.equal(f, fused)
        assert codes_of(fused) == [[], [err.NAN], [err.INF]]

    def test_all_samples_are_unpacked_at_once(self):
        f = push(err.new_t(200), err.NAN, "encoder", where=rows(200, 0, 150))
        all_errors = flags.unpack_all(f)
        assert all_errors == [flags.unpack(f, sample) for sample in range(200)]
        assert [sample for sample, errors in enumerate(all_errors) if errors] == [0, 150]

    def test_large_batches_can_be_transposed(self):
        tg.CONFIG.use_transposed_layout = True
        tg.CONFIG.transpose_threshold = 10000

        will_transpose = tg.CONFIG.should_transpose(batch_size=15000)
        assert will_transpose
        assert not tg.CONFIG.should_transpose(batch_size=10000)

        f = push(err.new_t(15000), err.NAN, "encoder", where=rows(15000, 3, 14000))
        assert f.shape == (15000, 4)
        assert flags.repr(f) == "ErrorFlags(15000 samples, 2 errors: 2xNAN @ encoder)"


class TestExperimental:
    def test_float_flags_are_pushed_to(self):
        tg.CONFIG.flag_dtype = torch.float32

        f = tg.err.new_t(3)
        assert f.dtype == torch.float32
        f = tg.err.push(f, tg.ErrorCode.NAN, location=1)
        assert f.dtype == torch.float32
        assert codes_of(f) == [[err.NAN]] * 3

    def test_backend_selection(self):
        tg.CONFIG.flag_dtype = torch.float32
        single = tg.err.new_t(1)
        tg.CONFIG.flag_dtype = torch.float64
        double = tg.err.new_t(1)
        tg.CONFIG.flag_dtype = torch.int64
        stable = tg.err.new_t(1)
        assert [f.dtype for f in (single, double, stable)] == [torch.float32, torch.float64, torch.int64]
        assert [f.shape[1] for f in (single, double, stable)] == [8, 4, 4]

    def test_arithmetic_corrupts_flags(self):
        tg.CONFIG.flag_dtype = torch.float32
        f = tg.err.push(tg.err.new_t(2), err.NAN, location=1, where=rows(2, 1))
        f = f + 1.0
        with pytest.raises(CorruptFlagsError):
            flags.repr(f)

    def test_quick_start(self, compiled):
        from torchguard.experimental import IF, IS, err

        @compiled
        def forward(x):
            f = err.new(x)

            f = err.push(f, err.NAN, location=42, where=torch.isnan(x).any(dim=-1))

            out, f = (
                IF(IS(err.NAN, f), lambda: (torch.zeros_like(x), f.clone()))
                .ELSE(lambda: (x.clone(), f.clone()))
            )  # fmt: skip
            return out, f

        x = torch.randn(3, 4)
        out, f = forward(x)
        assert torch.equal(out, x)
        assert (f.dtype, f.shape) == (torch.float32, (3, 8))
        assert err.all_ok(f)

        x[1, 2] = NAN
        out, f = forward(x)
        assert torch.equal(out, torch.zeros(3, 4))
        assert err.get_first_location(f).tolist() == [0, 42, 0]

    def test_training(self, compiled):
        from torchguard.experimental import IF, IS, err

        class SafeModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(32, 16)

            def forward(self, x):
                f = err.new(x)
                out = self.linear(x)

                f = err.push(f, err.NAN, location=1, where=torch.isnan(out).any(dim=-1))

                out, f = (
                    IF(IS(err.NAN, f), lambda: (torch.zeros_like(out), f.clone()))
                    .ELSE(lambda: (out.clone(), f.clone()))
                )  # fmt: skip
                return out, f

        model = SafeModel()
        safe = compiled(model)

        x = torch.randn(8, 32, requires_grad=True)
        out, f = safe(x)
        loss = out.sum()
        loss.backward()

        assert not f.requires_grad
        assert err.all_ok(f)
        torch.testing.assert_close(x.grad, model.linear.weight.sum(0).expand(8, 32))
        torch.testing.assert_close(model.linear.weight.grad, x.detach().sum(0).expand(16, 32))

        for run in (model, safe):
            model.zero_grad()
            x = torch.randn(8, 32)
            x[3, 5] = NAN
            x.requires_grad_()
            out, f = run(x)
            assert torch.equal(out, torch.zeros(8, 16))
            assert codes_of(f) == [[]] * 3 + [[err.NAN]] + [[]] * 4
            out.sum().backward()
            for grad in (x.grad, model.linear.weight.grad, model.linear.bias.grad):
                assert torch.equal(grad, torch.zeros_like(grad))


def test_result_quick_reference():
    success = Ok(42)
    failure = Err("Something went wrong")
    assert (success.unwrap(), failure.unwrap_err()) == (42, "Something went wrong")

    @as_result
    def might_fail(x):
        if x < 0:
            raise ValueError("Negative")
        return x * 2

    result = might_fail(10)
    assert result == Ok(20)
    result = might_fail(-5)
    assert repr(result) == "Err(ValueError('Negative'))"
