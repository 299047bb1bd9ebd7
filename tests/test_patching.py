"""`integrations.patching` and its self-test on a host of three small modules."""

import contextlib
import inspect
import sys
import types
import warnings

import pytest
import torch

from fused_rl import integrations
from fused_rl.integrations import patching

NAME = "toyhost.utils.function"


def original(x, scale=2.0):
    return (x * scale).exp(), x.sum(-1)


def replacement(x, scale=2.0, shift=0.0):
    return (x * scale + shift).exp(), x.sum(-1)


def wrong_value(x, scale=2.0):
    return (x * scale).exp() * 1.1, x.sum(-1)


def wrong_gradient(x, scale=2.0):
    return (x.detach() * scale).exp(), x.sum(-1)


def wrong_shape(x, scale=2.0):
    return (x * scale).exp(), x.sum()


def minus_infinity(x, scale=2.0):
    return original(x, scale)[0].mul(2).masked_fill(first_of(x), -torch.inf), x.sum(-1)


def equal_infinity(x, scale=2.0):
    return original(x, scale)[0].masked_fill(first_of(x), -torch.inf), x.sum(-1)


def equal_infinity_again(x, scale=2.0):
    return equal_infinity(x, scale)


def almost_equal_infinity(x, scale=2.0):
    return equal_infinity(x, scale)[0] * 1.1, x.sum(-1)


def nan(x, scale=2.0):
    return original(x, scale)[0].masked_fill(first_of(x), torch.nan), x.sum(-1)


def first_of(x):
    return torch.arange(x.numel(), device=x.device).reshape(x.shape) == 0


def fewer_outputs(x, scale=2.0):
    return ((x * scale).exp(),)


def raises(x, scale=2.0):
    raise RuntimeError("no")


def another_default(x, scale=3.0):
    return original(x, scale)


def another_name(y, scale=2.0):
    return original(y, scale)


def takes_less(x):
    return original(x)


def always_scaled(x, scale):
    return original(x, scale)


def takes_the_rest(x, *options):
    return original(x, *options)


class AutogradOriginal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale=2.0):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale * (ctx.saved_tensors[0] * ctx.scale).exp(), None


class Apply:
    @staticmethod
    def apply(x, scale=2.0):
        return (x * scale).exp()


def samples(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator, device="cpu").to(dtype)
    yield {"x": x.requires_grad_(), "y": x, "scale": 0.5}


@pytest.fixture
def host(monkeypatch):
    """A host `toyhost` 1.16.2 whose module `user` has imported `utils.function` by name, under another name."""
    utils, user, package = (
        types.ModuleType(name) for name in ("toyhost.utils", "toyhost.user", "toyhost")
    )
    utils.function = original
    user.renamed = original
    for module in (package, utils, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(patching, "PATCHES", {})
    monkeypatch.setattr(patching.importlib.metadata, "version", lambda name: "1.16.2")
    return utils, user


def make_patch(
    versions=">=1.16,<1.17", name=NAME, ours=replacement, row_versions="", optional=False
):
    row = patching.Replacement(name, ours, row_versions, samples, optional)
    return patching.Patch("toyhost", versions, [row])


def test_every_place_is_replaced_and_restored_once(host, monkeypatch):
    """Also one that was imported while patched; the original is found throughout."""
    utils, user = host
    patch = make_patch()
    patch.apply(dtype=1)
    with patch.apply(dtype=1):
        assert utils.function is user.renamed is replacement
    assert utils.function is replacement, "the inner `with` has undone what it did not do"
    assert patch.original(NAME) is original
    with pytest.raises(ValueError, match="unpatch"):
        patch.apply(dtype=2)
    late = types.ModuleType("toyhost.late")
    late.function = utils.function
    monkeypatch.setitem(sys.modules, "toyhost.late", late)
    patch.remove()
    patch.remove()
    assert utils.function is user.renamed is late.function is patch.original(NAME) is original


# Releases

UNKNOWN = ["1.17.0", "1.15.9", "1.16.0rc1", "1.16.1.dev0", "1.16.2+fork", "of unknown version"]


@pytest.mark.parametrize("release", UNKNOWN)
def test_another_release_is_tried_and_strictly_refused(host, monkeypatch, release):
    utils, _ = host
    monkeypatch.setattr(patching.importlib.metadata, "version", lambda name: release)
    patch = make_patch()
    with pytest.raises(ImportError, match=r"toyhost .* is not a release .*<1\.17"):
        patch.apply(strict=True)
    assert utils.function is original
    with warnings.catch_warnings(action="error"), patch.apply():
        assert utils.function is replacement


def test_a_fork_has_the_release_that_its_package_says(host, monkeypatch):
    def absent(name):
        raise patching.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(patching.importlib.metadata, "version", absent)
    package = sys.modules["toyhost"]
    with pytest.raises(ImportError, match="toyhost of unknown version is not .* that knows it$"):
        make_patch().apply(strict=True)
    # A module that makes its attributes when they are asked for.
    monkeypatch.setattr(package, "__getattr__", {"__version__": "1.16.9"}.get, raising=False)
    assert make_patch().release() == "1.16.9"
    with pytest.raises(ImportError, match="nohost is not installed"):
        patching.Patch("nohost", "", ()).release()


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (original, wrong_value, "self-test failed in float32: output 0 differs"),
        (original, wrong_gradient, "self-test failed in float32: gradient 0 differs"),
        (original, minus_infinity, "self-test failed in float32: output 0 differs by inf"),
        (equal_infinity, almost_equal_infinity, "self-test failed in float32: output 0 differs by"),
        (nan, original, "self-test failed in float32: output 0 differs by nan"),
        (original, wrong_shape, "self-test failed in float32: output 1 has another shape"),
        (original, fewer_outputs, "self-test failed in float32: 2 outputs, ours 1"),
        (original, raises, "self-test did not run in float32 on cpu: ours raises RuntimeError"),
        (
            raises,
            original,
            "self-test did not run in float32 on cpu: the host's own raises RuntimeError",
        ),
        (original, another_default, r"parameters \(x, scale=2\.0\)"),
        (original, another_name, r"parameters \(x, scale=2\.0\)"),
        (original, takes_less, r"parameters \(x, scale=2\.0\)"),
        (original, always_scaled, r"parameters \(x, scale=2\.0\)"),
        (None, original, "no toyhost.utils.function"),
    ],
)
def test_what_does_not_agree_stays_the_hosts(host, monkeypatch, theirs, ours, reason):
    """In one line of warning; in a known release an absent name or other parameters do too, and strictly nothing."""
    utils, _ = host
    utils.function = theirs
    parameters_differ = "self-test" not in reason
    with pytest.warns(UserWarning, match=f"left to toyhost 1.16.2: function .*{reason}") as caught:
        make_patch("<1.16" if not parameters_differ else ">=1.16", ours=ours).apply()
    assert len(caught) == 1
    assert utils.function is theirs
    if parameters_differ:
        with pytest.raises(ImportError, match=reason):
            make_patch(ours=ours).apply(strict=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (original, takes_the_rest),
        (takes_less, replacement),
        (always_scaled, replacement),
        (AutogradOriginal, Apply),
        (equal_infinity, equal_infinity_again),
    ],
)
def test_what_agrees_is_replaced(host, theirs, ours):
    utils, _ = host
    utils.function = theirs
    with warnings.catch_warnings(action="error"), make_patch("<1.16", ours=ours).apply():
        assert utils.function is ours


@pytest.mark.parametrize("release", ["1.16.2", "1.16.0rc1", "banana"])
@pytest.mark.parametrize("known", [True, False])
def test_an_optional_function_that_is_another_is_named(host, release, known):
    """Where a release that should have it has it with other parameters: not where it lacks it, nor outside of those."""
    utils, _ = host
    options = {"ours": takes_less, "optional": True}
    versions = ">=1" if known else "<1.16"
    assert (
        "function" in make_patch(versions, **options, row_versions=">=1.16").agreement(release).left
    )
    if release != "banana":
        assert not make_patch(versions, **options, row_versions="<1.16").agreement(release).left
    utils.function = None
    assert not make_patch(versions, **options).agreement(release).left


def test_one_function_under_several_names(host):
    """The release picks the row; an unknown one has whichever agrees, once."""
    utils, _ = host
    utils._function = original
    rows = [
        patching.Replacement("toyhost.kernels.function", replacement, ">=2", samples),
        patching.Replacement("toyhost.utils._function", replacement, ">=1.16", samples),
        patching.Replacement("toyhost.utils._function", another_name, "<1.16", samples),
        patching.Replacement("toyhost.utils.gone", replacement, "", samples, optional=True),
    ]
    for versions in (">=1.16", ">=1.18"):
        patch = patching.Patch("toyhost", versions, rows)
        with warnings.catch_warnings(action="error"), patch.apply():
            assert list(patch.agreement("1.16.2").pairs) == ["toyhost.utils._function"]
            assert utils._function is utils.function is replacement


def test_a_module_that_cannot_be_imported_is_left(host, monkeypatch):
    def broken(name):
        raise OSError("libcuda is absent\nand more")

    monkeypatch.setattr(patching.importlib, "import_module", broken)
    with pytest.warns(
        UserWarning, match=r"\(toyhost.utils.function: OSError: libcuda is absent\)$"
    ):
        make_patch().apply()


# The self-test and its caller


def contexts():
    yield "no_grad", torch.no_grad()
    yield "inference_mode", torch.inference_mode()
    yield "meta", torch.device("meta")
    yield "autocast", torch.autocast("cpu", dtype=torch.bfloat16)
    yield "interpreter", contextlib.nullcontext()


@pytest.mark.parametrize("context", [pytest.param(c, id=name) for name, c in contexts()])
def test_the_self_test_leaves_its_caller_alone(host, context):
    def draws(x, scale=2.0):
        torch.randn(3)
        assert torch.zeros(1).dtype == torch.float32
        return original(x, scale)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = torch.get_rng_state()
        with context:
            assert make_patch(ours=draws).tested() == {NAME: "passed"}
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(default)


# status


def test_status_of_hosts_that_are_not_imported(monkeypatch, capsys):
    """No host is imported for it, and none has to be installed."""
    for host in ("trl", "verl", "openrlhf", "transformers"):
        monkeypatch.delitem(sys.modules, host, raising=False)

    def version(name):
        if name == "trl":
            return "1.99"
        raise patching.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(patching.importlib.metadata, "version", version)
    rows = {row.host: row for row in integrations.status()}
    assert rows["trl"].state == "not imported"
    assert rows["trl"].release == "1.99 (not known)"
    assert {rows[name].state for name in ("verl", "openrlhf", "transformers")} == {"not installed"}
    assert "trl" not in sys.modules
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_status_of_a_host_that_is_none():
    with pytest.raises(ValueError, match="one of trl, verl, openrlhf, transformers; got 'TRL'$"):
        integrations.status("trl", "TRL")


def test_status_of_a_patched_host(host, monkeypatch, capsys):
    utils, _ = host
    utils.changed = inspect.signature
    rows = [
        patching.Replacement(NAME, replacement, "", samples),
        patching.Replacement("toyhost.utils.changed", replacement, "", samples),
    ]
    monkeypatch.setitem(sys.modules, "fused_rl.integrations.toyhost", types.ModuleType("toy"))
    patch = patching.Patch("toyhost", ">=1.16", rows)
    monkeypatch.setattr(integrations.reporting, "PATCHES", {"toyhost": patch})
    monkeypatch.setattr(integrations.reporting, "HOSTS", ("toyhost",))
    before, _ = integrations.status("toyhost")
    assert before.state == "not patched"
    with pytest.warns(UserWarning, match="changed"):
        patch.apply(dtype=1)
    replaced, left = integrations.status("toyhost")
    assert replaced[:4] == ("toyhost", "1.16.2", "patched", NAME)
    assert replaced.ours.endswith("test_patching.replacement")
    assert replaced.self_test == "passed"
    assert left[2:4] == ("left to the host", "changed")
    assert "signature" not in capsys.readouterr().out.splitlines()[0]
    assert patch.options == {"dtype": 1}
    patch.remove()
