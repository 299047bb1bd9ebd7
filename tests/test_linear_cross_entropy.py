"""`linear_cross_entropy` against its reference in fp64, and that against PyTorch's own function."""

import pytest
import torch

import fused_rl
from fused_rl import reference
from tests.heads import BF16, FP16, FP32, FP64, MORE_TOKENS, call, in_dtype, make

pytestmark = pytest.mark.usefixtures("cpu")

VOCAB = 131
CLASS_WEIGHT = torch.linspace(0, 2, VOCAB)
ALL = {"label_smoothing": 0.3, "z_loss": 0.1, "class_weight": CLASS_WEIGHT}


def test_exact_logits_of_16_bit_operands():
    """Which lack, on a CPU, what all columns of a row have in common."""
    leaves, targets, mask = make(MORE_TOKENS[0], BF16)
    options = ALL | {"mask": mask, "logits_dtype": FP32}
    exact = call(reference.linear_cross_entropy, in_dtype(leaves, FP64), targets, **options)
    found = call(fused_rl.linear_cross_entropy, leaves, targets, **options)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_it_is_torchs_cross_entropy():
    leaves, targets, _ = make(MORE_TOKENS[0], FP32)
    targets[3] = -100
    logits = torch.nn.functional.linear(*leaves)
    for class_weight in (None, CLASS_WEIGHT):
        for label_smoothing in (0.0, 0.1, 1.0):
            want = torch.nn.functional.cross_entropy(
                logits, targets, class_weight, label_smoothing=label_smoothing
            )
            found = call(
                fused_rl.linear_cross_entropy,
                leaves,
                targets,
                class_weight=class_weight,
                label_smoothing=label_smoothing,
            )
            torch.testing.assert_close(found, want)
            gradients = [
                torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (found, want)
            ]
            torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_banned_classes(label_smoothing):
    """The loss is torch's, infinite where smoothing reaches them, and the gradients are, too: finite."""
    leaves, targets, _ = make(MORE_TOKENS[0], FP32)
    with torch.no_grad():
        leaves[2][:5] = -torch.inf
    targets = targets.clamp(min=5)
    logits = torch.nn.functional.linear(*leaves)
    want = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    options = {"label_smoothing": label_smoothing}
    found = call(fused_rl.linear_cross_entropy, leaves, targets, **options)
    torch.testing.assert_close(found, want)
    gradients = [torch.autograd.grad(loss, leaves) for loss in (found, want)]
    assert all(d.isfinite().all() for d in gradients[0])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
    # unless they have no weight
    class_weight = (torch.arange(VOCAB) >= 5).float()
    options["class_weight"] = class_weight
    assert call(fused_rl.linear_cross_entropy, leaves, targets, **options).isfinite()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_no_token_counts(dtype):
    leaves, targets, _ = make(MORE_TOKENS[0], dtype)
    options = ALL
    for num_tokens in (None, 0, 3, torch.tensor([0])):
        loss = call(
            fused_rl.linear_cross_entropy,
            leaves,
            torch.full_like(targets, -100),
            num_tokens=num_tokens,
            **options,
        )
        empty = num_tokens != 3
        assert loss.isnan().all() if empty else loss == 0
        gradients = torch.autograd.grad(loss.sum(), leaves)
        assert not any(d.any() for d in gradients)


def assert_gradients_near(leaves, targets, factor, allowed, **options):
    """Those of `factor` times the loss, by their norms."""
    exact_leaves = in_dtype(leaves, FP64)
    workspace = {"workspace_mb": options.pop("workspace_mb", None)}
    loss = call(fused_rl.linear_cross_entropy, leaves, targets, **options, **workspace)
    exact = call(reference.linear_cross_entropy, exact_leaves, targets, **options)
    found = torch.autograd.grad(factor * loss, leaves)
    wanted = torch.autograd.grad(factor * exact, exact_leaves)
    for d, truth in zip(found, wanted, strict=True):
        assert (d.double() - truth).norm() <= allowed * truth.norm()


def test_fp16_gradients_of_a_large_batch_survive():
    leaves, targets, _ = make(MORE_TOKENS[0], FP16)
    options = {"num_tokens": 10**6, "label_smoothing": 0.1}
    assert_gradients_near(leaves, targets, 2.0**20, 2e-3, **options)


@pytest.mark.parametrize("workspace_mb", [None, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_fp16_sums_over_many_tokens_do_not_overflow(workspace_mb, weighted):
    """Of one target and states that agree, so that no two gradients cancel; those of the bias are whole numbers."""
    n, vocab = 70_000, 32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 16, generator=generator) / 10 + 10
    weight = torch.randn(vocab, 16, generator=generator) / 10
    leaves = [x.half().requires_grad_() for x in (hidden, weight, torch.zeros(vocab))]
    class_weight = torch.linspace(0, 300, vocab) if weighted else None
    options = {"class_weight": class_weight, "label_smoothing": 0.1, "workspace_mb": workspace_mb}
    assert_gradients_near(leaves, torch.full((n,), 3), 2.0**8, 5e-3, **options)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_number_of_tokens(dtype):
    """A tensor counts as the number in it, in any dtype, and the loss is fp32 and no view."""
    leaves, targets, _ = make(MORE_TOKENS[0], dtype)
    for number_dtype in (BF16, FP16, FP64, torch.int64):
        for shape in ((), (1,)):
            number = torch.full(shape, 1000, dtype=number_dtype)
            want, found = (
                call(fused_rl.linear_cross_entropy, leaves, targets, num_tokens=num_tokens)
                for num_tokens in (1000, number)
            )
            assert found.dtype == FP32
            assert not found._is_view()
            torch.testing.assert_close(found, want.expand(shape), rtol=0, atol=0)


@pytest.mark.parametrize("shift", [False, True])
def test_narrow_targets_are_compared_as_numbers(shift):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 4, 8, generator=generator)
    weight = torch.randn(256, 8, generator=generator)
    targets = torch.tensor([[3, 156, 4, 156], [200, 5, 156, 255]])
    want, found = (
        fused_rl.linear_cross_entropy(hidden, weight, labels, shift=shift)
        for labels in (targets, targets.byte())
    )
    assert torch.equal(found, want)


def test_without_a_gradient():
    leaves, targets, mask = make(MORE_TOKENS[0], FP32)
    with_gradient = call(fused_rl.linear_cross_entropy, leaves, targets, **ALL, mask=mask)
    with torch.no_grad():
        alone = call(fused_rl.linear_cross_entropy, leaves, targets, **ALL, mask=mask)
    torch.testing.assert_close(alone, with_gradient)
