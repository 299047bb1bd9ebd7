"""A host's function beside ours on a few small inputs: values and gradients, fp32 and bf16, within milliseconds."""

import contextlib
import inspect

import torch
from torch import Tensor

# Relative to the largest element, for the host's rounding: in bf16 it may round logits, products and results.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.04}
# Numbers below it are compared absolutely.
LEAST_SIZE = 1e-2


def normal(
    generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> Tensor:
    """Return a leaf of normal numbers, which are the same in both dtypes but for rounding."""
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale
    return numbers.to(dtype).requires_grad_()


def parameters_of(function) -> list[inspect.Parameter]:
    """The parameters of a function, or those of a class's `apply`, which are of an autograd function its forward's."""
    owner = getattr(function, "__self__", None)
    # A host may keep `apply` alone, by itself a function of (*args, **kwargs).
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        function = owner
    if not isinstance(function, type):
        return list(inspect.signature(function).parameters.values())
    if issubclass(function, torch.autograd.Function):
        # Without ctx.
        return list(inspect.signature(function.forward).parameters.values())[1:]
    return list(inspect.signature(function.apply).parameters.values())


def self_test(theirs, ours, samples) -> str:
    """Return "passed", or in a few words what did not agree or run."""
    if samples is None:
        return "has no inputs"
    # Once the process uses a GPU its kernels count; starting one here would forbid a later fork.
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    parameters = [
        p for p in parameters_of(theirs) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    with _plain_state(device):
        for dtype, tolerance in TOLERANCES.items():
            for sample in samples(dtype):
                arguments = [(p, sample.get(p.name, p.default)) for p in parameters]
                results = []
                for function in (theirs, ours):
                    try:
                        results.append(_run(function, arguments, device))
                    # An unknown function may fail in any way, and its caller has to go on.
                    except Exception as error:
                        whose = "the host's own" if function is theirs else "ours"
                        raised = f"{whose} raises {type(error).__name__}"
                        return f"did not run in {_name(dtype)} on {device}: {raised}"
                gap = _gap(results, tolerance, compares_flags=dtype == torch.float32)
                if gap is not None:
                    return f"failed in {_name(dtype)}: {gap}"
    return "passed"


def _name(dtype):
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _plain_state(device):
    """Gradients, fp32, this device and no autocast, whatever the caller has; its random numbers stay as they are."""
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.random.fork_rng())
        # Only where it changes anything, because it doubles the time.
        if torch.get_default_device().type != device:
            stack.enter_context(torch.device(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # A host's function may be compiled, which takes seconds.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for kind in {"cpu", device}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _run(function, arguments, device):
    """The outputs, then the gradients of the inputs under random upstream ones."""
    leaves, positional, keywords = [], [], {}
    for parameter, value in arguments:
        if isinstance(value, Tensor):
            leaf = value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
            leaves.append(leaf)
            # A host may change its inputs in place, which a leaf forbids.
            value = leaf.clone()
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = value
        else:
            positional.append(value)
    call = function.apply if isinstance(function, type) else function
    returned = call(*positional, **keywords)
    outputs = [returned] if isinstance(returned, Tensor) else list(returned)
    differentiable = [x for x in outputs if x is not None and x.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [_upstream(x) for x in differentiable])
    return outputs, [leaf.grad for leaf in leaves if leaf.requires_grad]


def _upstream(x):
    generator = torch.Generator().manual_seed(x.numel())
    return normal(generator, x.dtype, *x.shape).detach().to(x.device)


def _gap(results, tolerance, compares_flags):
    """Where two results differ, in a few words; None if they agree."""
    for kind, host, mine in zip(("output", "gradient"), *results, strict=True):
        if len(host) != len(mine):
            return f"{len(host)} {kind}s, ours {len(mine)}"
        for i, (one, other) in enumerate(zip(host, mine, strict=True)):
            if (one is None) != (other is None) or (one is not None and one.shape != other.shape):
                return f"{kind} {i} has another shape"
            if one is None or (one.dtype == torch.bool and not compares_flags):
                continue
            one, other = one.detach().double(), other.detach().double()
            # Infinities that are equal agree, and their difference is NaN.
            difference = (one - other).abs().masked_fill(one == other, 0.0).max().item()
            # An infinite size would let everything pass.
            finite = one.abs().masked_fill(~one.isfinite(), 0.0)
            size = max(finite.max().item(), LEAST_SIZE)
            # The negation, since a NaN must not pass.
            if not difference <= tolerance * size:
                return f"{kind} {i} differs by {difference:.2g} of {size:.2g}"
    return None
