"""Hidden states and a head, what an op makes of them, its work, its memory, and how far it may be from fp64."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fused_rl
from fused_rl import reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (N, H, V) and workspace in MiB for each way to cut the logits; test_tiles checks that they are cut so.
ONE_TILE = ((22, 16, 131), 512)
MORE_TOKENS = ((22, 16, 131), 0.008)  # N < V: bf16 takes blocks of columns, the last one narrower
MORE_ROWS = ((70, 16, 37), 0.008)  # N > V: bf16 takes blocks of rows; fp32 always does


def make(shape, dtype, device="cpu", bias=True, leading=None, seed=0):
    """hidden, weight, bias, targets, mask of N rows: weights large enough that some rows are nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    n, width, vocab = shape
    hidden = torch.randn(n, width, generator=generator) * torch.linspace(0.1, 2, n)[:, None]
    weight = torch.randn(vocab, width, generator=generator)
    head = torch.randn(vocab, generator=generator)
    targets = torch.randint(vocab, (n,), generator=generator)
    mask = torch.rand(n, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    leaves = [
        t.to(device, dtype).requires_grad_()
        for t in ([hidden, weight, head] if bias else [hidden, weight])
    ]
    return leaves, targets.to(device), mask.to(device)


def in_dtype(leaves, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in leaves]


def call(function, leaves, targets, *args, **options):
    return function(
        leaves[0], leaves[1], targets, *args, bias=leaves[2] if len(leaves) > 2 else None, **options
    )


def token_loss(logprobs, entropy, advantages, weights):
    """Clipped ratio and entropy bonus; weights (n, 2) to have a per-token tensor of more than one dimension."""
    ratio = (logprobs + 3).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.2, 4) * advantages)
    return weights[:, 0] * clipped - weights[:, 1] * entropy.square()


def per_token(targets, seed=1):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(targets.shape, generator=generator)
    return [
        advantages.to(targets.device),
        torch.rand(*targets.shape, 2, generator=generator).to(targets.device),
    ]


def logprobs_and_gradients(module, leaves, targets, upstream, **options):
    outputs = call(module.linear_token_logprobs, leaves, targets, **options)
    grads = torch.autograd.grad(
        outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)]
    )
    return [*outputs, *grads]


def loss_and_gradients(module, leaves, targets, factor=0.37, **options):
    values = [v.to(FP64 if leaves[0].dtype == FP64 else FP32) for v in per_token(targets)]
    loss, logprobs, entropy = call(
        module.linear_token_loss, leaves, targets, token_loss, *values, **options
    )
    # The error of a sum is luck: it is checked as the sum of what is checked below.
    if module is fused_rl:
        kept = (
            torch.ones_like(targets, dtype=torch.bool)
            if options.get("mask") is None
            else options["mask"]
        )
        terms = token_loss(
            logprobs[kept].double(), entropy[kept].double(), *(v[kept] for v in values)
        )
        assert (loss.double() - terms.sum()).abs() <= 1e-6 * terms.abs().sum()
    return [logprobs, entropy, *torch.autograd.grad(loss * factor, leaves)]


def assert_as_good(results, exact, same_dtype, atol=0.0):
    """Error against fp64 at most twice that of the reference in the inputs' dtype plus two fp32 ulps of its largest."""
    for i, (result, truth, reference_result) in enumerate(
        zip(results, exact, same_dtype, strict=True)
    ):
        assert result.isfinite().all()
        error = (result.double() - truth).abs().max()
        allowed = (
            2 * (reference_result.double() - truth).abs().max() + atol + 2**-22 * truth.abs().max()
        )
        assert error <= allowed, f"result {i}: error {error:.2e}, allowed {allowed:.2e}"


def compare(run, leaves, targets, *args, atol=0.0, **options):
    """`run` on fused_rl against the reference in fp64 and in the inputs' dtype."""
    results = run(fused_rl, leaves, targets, *args, **options)
    for ours in ("workspace_mb", "logits_dtype"):
        options.pop(ours, None)
    exact = run(reference, in_dtype(leaves, FP64), targets, *args, **options)
    same = run(reference, in_dtype(leaves, leaves[0].dtype), targets, *args, **options)
    assert_as_good(results, exact, same, atol)
    return results


def upstream_of(targets, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(targets.shape, generator=generator).to(targets.device) for _ in range(3)]


class Work(TorchDispatchMode):
    """FLOP of the matrix products that run inside."""

    flop = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:]
            assert a.dtype == b.dtype
            self.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            self.dtypes = {*getattr(self, "dtypes", ()), a.dtype}
        return function(*args, **(kwargs or {}))


def peak_bytes(run):
    """The most that `run` holds at once beyond the start, by every allocation of torch's; it returns what it keeps."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del kept
    return most


def reference_head(shape, dtype, device="cpu"):
    """A reference of another width whose distributions differ from the policy's by a little in some rows."""
    n, width, vocab = shape
    leaves, _, _ = make((n, width + 8, vocab), dtype, device, seed=5)
    ref_hidden, ref_weight, ref_bias = (x.detach() for x in leaves)
    return {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}


def kl_and_gradients(module, leaves, targets, ref, **options):
    hidden, weight, bias = leaves
    ref = {name: x.to(hidden.dtype) for name, x in ref.items()}
    kl = module.linear_token_kl(hidden, weight, bias=bias, **ref, **options)
    return [kl, *torch.autograd.grad(kl, leaves, upstream_of(targets)[0].to(kl.dtype))]
