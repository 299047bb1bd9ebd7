"""`integrations.patching` on a host of three small modules."""

import sys
import types

import pytest

from fused_rl.integrations import patching


def original():
    return "theirs"


def replacement():
    return "ours"


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
    monkeypatch.setattr(patching.importlib.metadata, "version", lambda name: "1.16.2")
    return utils, user


def make_patch(versions=">=1.16,<1.17", name="toyhost.utils.function"):
    return patching.Patch("toyhost", versions, lambda: {name: replacement})


def test_every_place_is_replaced_and_restored(host):
    utils, user = host
    patch = make_patch()
    with patch.apply():
        assert utils.function is replacement
        assert user.renamed is replacement
    assert utils.function is original
    assert user.renamed is original


def test_twice_is_once(host):
    utils, _ = host
    patch = make_patch()
    patch.apply()
    with patch.apply():
        pass
    assert utils.function is replacement, "the inner `with` has undone what it did not do"
    patch.remove()
    patch.remove()
    assert utils.function is original


def test_a_module_imported_while_patched_is_restored(host, monkeypatch):
    utils, _ = host
    patch = make_patch()
    patch.apply()
    late = types.ModuleType("toyhost.late")
    late.function = utils.function
    monkeypatch.setitem(sys.modules, "toyhost.late", late)
    patch.remove()
    assert late.function is original


def test_unknown_version_names_the_known_ones(host):
    utils, _ = host
    with pytest.raises(ImportError, match=r"toyhost 1\.16\.2 is not .*<1\.16"):
        make_patch("<1.16").apply()
    assert utils.function is original


def test_absent_attribute_leaves_nothing_replaced(host):
    utils, _ = host
    patch = patching.Patch(
        "toyhost",
        ">=1.16",
        lambda: {"toyhost.utils.function": replacement, "toyhost.utils.gone": replacement},
    )
    with pytest.raises(ImportError, match=r"toyhost\.utils\.gone"):
        patch.apply()
    assert utils.function is original
    assert not patch.applied


def test_the_original_is_found_patched_and_unpatched(host):
    patch = make_patch()
    name = "toyhost.utils.function"
    assert patch.original(name) is original
    with patch.apply():
        assert patch.original(name) is original
    assert patch.original(name) is original
