"""A certificate lists what was checked of a compiled function, and whether any check failed."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tests.compiled.autograd_functions import SavesInputs

from torchguard.compiled import Builder, Certificate, CompileError, compile_out, compile_scalar
from torchguard.compiled._executables import BACKENDS


def block(x, w, v):
    return F.layer_norm(x + torch.tanh(x @ w) @ v, (6,))


@pytest.fixture
def point():
    return torch.randn(3, 6), torch.randn(6, 4), torch.randn(4, 6)


@pytest.fixture
def c(point):
    return compile_out(block, *point, backend="eager")


class Right(SavesInputs):
    factor = 2.0

    @staticmethod
    def forward(x):
        return x * x

    @classmethod
    def backward(cls, ctx, gradient):
        return gradient * cls.factor * ctx.saved_tensors[0]

    @classmethod
    def jvp(cls, ctx, tangent):
        return tangent * cls.factor * ctx.saved_tensors[0]


class SlightlyWrong(Right):
    factor = 2.002


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_sound_function_is_certified(point, backend):
    certificate = compile_out(block, *point, backend=backend).certify(level="algebraic")
    assert certificate.ok
    assert not certificate.of("inconclusive")
    assert {claim.layer for claim in certificate.claims} == {"typed", "probe", "algebraic"}
    assert {claim.subject for claim in certificate.claims} >= {"forward", "jvp", "vjp"}


@pytest.mark.parametrize("level", ["typed", "probe", "algebraic", "enclosure"])
def test_a_level_goes_as_far_as_it_says(c, level):
    certificate = c.certify(level=level)
    assert certificate.ok
    assert certificate.claims[-1].layer == level


def test_probes_are_of_the_value_the_adjoint_the_remainder_and_linearity(c):
    messages = " ".join(claim.message for claim in c.certify(level="probe").claims)
    for part in ("eager mode", "float64", "<Jv, w>", "Taylor", "linear in the tangent", "linear in the cotangent"):
        assert part in messages


def test_a_slightly_wrong_rule_is_found_by_algebra_alone():
    c = compile_out(lambda x: SlightlyWrong.apply(x), torch.randn(8), backend="eager")
    certificate = c.certify(level="algebraic")
    assert not certificate.ok
    assert {claim.layer for claim in certificate.of("fail")} == {"algebraic"}


def test_a_right_rule_is_certified_by_algebra():
    def f(x):
        with torch.no_grad():
            scale = Right.apply(x).sum()
        return Right.apply(x) + scale * x

    certificate = compile_out(lambda x: Right.apply(x) + x, torch.randn(8), backend="eager").certify()
    assert not (*certificate.of("fail"), *certificate.of("inconclusive"))
    detached = [str(node.target) for node in compile_out(f, torch.randn(8), backend="eager").graph.nodes]
    assert "aten.detach.default" in detached, "what the user computes without grad stays a constant"


def test_a_wrong_tangent_has_a_taylor_remainder_of_slope_one():
    class Wrong(Right):
        factor = 3.0

    c = compile_out(lambda x: Wrong.apply(x), torch.randn(8), backend="eager")
    (claim,) = c.certify(level="probe").of("fail")
    assert "slope 1.0" in claim.message


class Quick(SavesInputs):
    """It oscillates ten thousand times within a unit."""

    factor = 1.0

    @staticmethod
    def forward(x):
        return (1e4 * x).sin()

    @classmethod
    def backward(cls, ctx, g):
        return cls.factor * 1e4 * (1e4 * ctx.saved_tensors[0]).cos() * g

    @classmethod
    def jvp(cls, ctx, dx):
        return cls.factor * 1e4 * (1e4 * ctx.saved_tensors[0]).cos() * dx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_function_that_changes_quickly_is_followed_in_float64(dtype, scale):
    c = compile_out(lambda x: (x * 1e4).sin() * scale, torch.randn(8, dtype=dtype), backend="eager")
    claim, _ = (claim for claim in c.certify(level="probe").claims if "Taylor" in claim.message)
    assert claim.verdict == "pass"
    assert claim.message.startswith("In float64: ")


@pytest.mark.parametrize("factor", [1.0, 1.5, 1.001])
def test_a_wrong_tangent_of_one_that_changes_quickly_is_found_in_float64(factor):
    class Chosen(Quick):
        pass

    Chosen.factor = factor
    c = compile_out(lambda x: Chosen.apply(x), torch.randn(8), backend="eager")
    failed = c.certify(level="probe").of("fail")
    assert [claim.message for claim in failed if "In float64: The Taylor remainder" in claim.message] == (
        [] if factor == 1.0 else [claim.message for claim in failed]
    )
    assert bool(failed) is (factor != 1.0)


def test_a_derivative_lost_in_rounding_is_inconclusive_however_wrong_eager_mode_is():
    f = lambda x: (x * 1e8).sin() * 1e8  # noqa: E731
    x = torch.randn(8)
    c = compile_out(f, x, backend="eager")
    slopes, exact = c.jvp(x, torch.ones(8))[1], (x.double() * 1e8).cos() * 1e16
    assert (slopes - exact).norm() > exact.norm() / 4
    certificate = c.certify(level="probe")
    for subject in ("forward", "jvp", "hvp"):
        (claim,) = (claim for claim in certificate.claims if claim.subject == subject and "float64" in claim.message)
        assert claim.verdict == "inconclusive"
        assert re.search(r"differs from float64 by \S+, that of eager mode by", claim.message)


class ForgetsASmallTerm(SavesInputs):
    """1e4 + 0.001 x, whose derivative torch is told to be zero: the value changes by less than it is rounded."""

    @staticmethod
    def forward(x):
        return 1e4 + 1e-3 * x

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)

    @staticmethod
    def jvp(ctx, tangent):
        return torch.zeros_like(tangent)


def test_a_zero_derivative_of_a_value_that_changes_by_less_than_rounding_does_not_pass():
    certificate = compile_out(lambda x: ForgetsASmallTerm.apply(x), torch.randn(8), backend="eager").certify("probe")
    (claim, *_) = (claim for claim in certificate.claims if "Taylor" in claim.message or "Rounding" in claim.message)
    assert claim.verdict in ("fail", "inconclusive")


def test_nonsmooth_points_and_missing_rules_are_not_failures():
    reflectors, tau, x = torch.randn(4, 3), torch.rand(3), torch.randn(4, 2)
    c = compile_out(lambda a, t, x: torch.ormqr(a, t, x).relu(), reflectors, tau, x, backend="eager")
    certificate = c.certify(level="algebraic")
    assert certificate.ok
    assert any("The function has no jvp" in claim.message for claim in certificate.of("inconclusive"))
    assert any("relu" in point for point in certificate.nonsmooth_points)


def test_it_is_frozen_and_goes_through_json(c):
    certificate = c.certify()
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate.level = "enclosure"
    read = json.loads(certificate.to_json())
    assert read["ok"] is True
    assert read["versions"]["torch"] == torch.__version__
    assert read["leaves"][0] == "x: f32[3, 6]"
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_text_that_is_not_a_certificate_is_refused():
    for text in ("", "{}", '{"claims": [{}]}', "[]"):
        with pytest.raises(CompileError, match="Certificate: the text is not a certificate"):
            Certificate.from_json(text)


def test_a_stored_certificate_is_checked_against_a_function(c, point):
    stored = Certificate.from_json(c.certify().to_json())
    assert stored.verify(c).ok
    changed = compile_out(lambda x, w, v: block(x, w, v) * 2, *point, backend="eager")
    found = stored.verify(changed)
    assert not found.ok
    assert "the graph has changed" in str(found)


def test_verification_says_what_changed(c):
    stored = c.certify()
    old = dataclasses.replace(stored, versions=(("python", "3.10"), ("torch", "1.0")), leaves=("x: f32[2, 6]",))
    text = str(old.verify(c))
    assert "version of torch: 1.0 then" in text
    assert "leaf x: f32[2, 6] then, f32[3, 6] now" in text
    forged = dataclasses.replace(stored, claims=stored.claims[:1])
    assert "claim probe forward 1: none then, pass now" in str(forged.verify(c))


def test_the_same_seed_gives_the_same_certificate(c):
    assert c.certify(seed=3) == c.certify(seed=3)


def test_it_can_be_checked_at_another_point(c):
    elsewhere = torch.zeros(3, 6), torch.ones(6, 4), torch.ones(4, 6)
    assert c.certify(level="probe", at=elsewhere).ok


def test_a_graph_built_by_hand_has_no_example_and_is_checked_at_random():
    b = Builder("built")
    x = b.leaf("x", (4,))
    assert b.compile_scalar((x.sin() * x).sum(), backend="eager").certify().ok


def test_an_unknown_level_is_refused(c):
    with pytest.raises(CompileError, match="level is one of typed, probe, algebraic, enclosure, not 'all'"):
        c.certify(level="all")


def test_it_is_formatted_as_text_and_as_a_table(c):
    certificate = c.certify()
    assert str(certificate).startswith("block: ok up to algebraic, graph ")
    console = Console(width=140, record=True, quiet=True)
    console.print(certificate)
    with console.capture() as captured:
        console.quiet = False
        console.print(certificate)
    assert "algebraic" in captured.get()
    assert "pass" in captured.get()


def test_a_scalar_function_is_certified():
    assert compile_scalar(lambda x: (x**2).sum(), torch.randn(5), backend="eager").certify().ok


def test_the_code_in_two_parts_is_checked_as_well(monkeypatch):
    def second_part_wrong(graph):
        wrong = not any(node.name == "x" for node in graph.graph.find_nodes(op="placeholder"))
        return lambda values: [y * 1.5 if wrong else y for y in graph(*values)]

    monkeypatch.setitem(BACKENDS, "eager", second_part_wrong)
    c = compile_out(lambda x: x.sin(), torch.randn(8), backend="eager", probe=False)
    failed = c.certify(level="probe").of("fail")
    assert {claim.subject for claim in failed} == {"jvp", "vjp"}
    assert all("In two parts it differs from one run by 5.0e-01" in claim.message for claim in failed)


def no_grad_factor(x):
    with torch.no_grad():
        scale = x.sum()
    return x * scale


def autocast_inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x).float().tanh()


RIGHT_DERIVATIVES = {
    "detach": lambda x: x * x.detach(),
    "no_grad": no_grad_factor,
    "bf16 inside": lambda x: (x.bfloat16() @ x.bfloat16()).float(),
    "autocast inside": autocast_inside,
    "f32 inside f64": lambda x: x.double().float().double().sin(),
    "cancellation": lambda x: ((x + 1e4) - 1e4).sin(),
}


@pytest.mark.parametrize("name", RIGHT_DERIVATIVES)
def test_a_right_derivative_does_not_fail_for_constants_or_rounding_inside(name):
    c = compile_out(RIGHT_DERIVATIVES[name], torch.randn(8, 8), backend="eager")
    assert not c.certify(level="probe").of("fail")


@pytest.mark.parametrize("factor", [3.0, 3.0003])
def test_the_backward_of_an_old_autograd_function_is_recorded_and_certified(factor):
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor * ctx.saved_tensors[0] ** 2

    certificate = compile_out(lambda x: Old.apply(x).sin(), torch.randn(3), backend="eager").certify(level="algebraic")
    claims = {(claim.layer, claim.subject): claim.verdict for claim in certificate.claims}
    assert claims["algebraic", "vjp"] == ("pass" if factor == 3.0 else "fail")
    assert claims["algebraic", "jvp"] == "inconclusive"


def test_verification_is_at_the_same_point(c, point):
    elsewhere = tuple(x + 1 for x in point)
    stored = c.certify(level="typed", at=elsewhere)
    assert stored.verify(c, at=elsewhere).ok
    found = stored.verify(c)
    assert not found.ok
    assert str(found) == "the point has changed: pass the point that was certified as at="


def test_verification_notices_other_strides():
    x = torch.ones(3, 4)
    stored = compile_out(torch.sin, x, backend="eager").certify(level="typed")
    transposed = compile_out(torch.sin, x.t().contiguous().t(), backend="eager")
    assert str(stored.verify(transposed)) == "leaf x0: f32[3, 4] then, f32[3, 4] of stride (1, 3) now"


def test_verification_notices_another_name_another_seed_and_other_nonsmooth_points():
    stored = compile_out(torch.relu, torch.randn(3), backend="eager").certify()
    smooth = dataclasses.replace(stored, nonsmooth_points=())
    c = compile_out(torch.relu, torch.randn(3), backend="eager")
    found = str(smooth.verify(c, at=torch.randn(3)))
    assert "nonsmooth point aten.relu: relu'(0) = 0" in found
    assert "none then, present now" in found
    renamed = dataclasses.replace(stored, function="sine")
    assert "the function is called relu, but sine was certified" in str(renamed.verify(c))
    reseeded = dataclasses.replace(stored, seed=7)
    assert "claim algebraic jvp 1: pass with seed 0 then, pass now" in str(reseeded.verify(c))


CONSTANTS_IN_TORCH = {
    "statistics of batch norm": (lambda x, m, v: F.batch_norm(x, m, v), (4, 3), (3,), (3,)),
    "class weights": (lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2]), weight=w), (3, 4), (4,)),
}


@pytest.mark.parametrize("name", CONSTANTS_IN_TORCH)
def test_what_torch_takes_as_constants_is_differentiated(name):
    f, *shapes = CONSTANTS_IN_TORCH[name]
    x = tuple(torch.rand(shape) + 0.5 for shape in shapes)
    certificate = compile_out(f, *x, backend="eager").certify(level="probe")
    assert not certificate.of("fail")
    assert {claim.verdict for claim in certificate.claims if claim.subject in ("jvp", "vjp")} == {"pass"}


def test_an_expanded_leaf_is_inconclusive():
    x = torch.randn(3, 1).expand(3, 4)
    certificate = compile_out(lambda x: x.sin().sum(), x, backend="eager").certify(level="enclosure")
    assert certificate.ok
    assert any("share memory" in claim.message for claim in certificate.of("inconclusive"))


def test_an_embedding_bag_is_certified():
    bag = torch.nn.EmbeddingBag(5, 3, mode="mean")
    certificate = compile_out(bag, torch.tensor([[0, 1], [2, 3]]), backend="eager").certify(level="probe")
    assert {claim.verdict for claim in certificate.claims if claim.subject in ("jvp", "vjp")} == {"pass"}


def test_verify_reports_each_changed_field_that_is_not_measured():
    c = compile_out(torch.relu, torch.randn(3), backend="eager")
    stored = json.loads(c.certify("typed").to_json())
    changed = {
        "leaves": stored["leaves"] * 2,
        "nonsmooth_points": stored["nonsmooth_points"] * 2,
        "claims": [{**stored["claims"][0], "message": "All is well."}],
    }
    for field, value in changed.items():
        assert not Certificate.from_json(json.dumps({**stored, field: value})).verify(c).ok, field
    with pytest.raises(CompileError, match="ok is not what its claims say"):
        Certificate.from_json(json.dumps({**stored, "ok": False}))
