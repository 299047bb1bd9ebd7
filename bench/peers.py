"""The other implementations that rows stand beside: each optional, each with its version, or with why it cannot run.

A peer is called as we call our own op, so that an answer can be checked against fp64 before its time counts:

    log-probabilities   call(logits (..., V), targets (...), mask (...) | None) -> (logprobs, entropy or None)
    KL                  call(logits (..., V), ref_logits (..., V), mask (...) | None) -> KL per row, or its sum
    K tokens per row    call(logits (..., V), targets (..., K)) -> logprobs (..., K)
    the output head     call(hidden (N, H), weight (V, H), targets (N,), advantages (N / SEQUENCE,)) -> loss
    an exact head       call(hidden (N, H), weight (V, H), targets (N,)) -> (logprobs, entropy), by fp32 logits
"""

import importlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F

from bench import plain, results
from bench.machine import version

SEQUENCE = (
    128  # tokens that share an advantage at the output head, and the smallest piece Liger can cut
)
# name -> function (device, interpreted) that makes the peer. So they run; where time is short the last are left out.
LOGPROBS = {}
TOPK = {}
KL = {}
LINEAR = {}
EXACT = {}


class Peer(NamedTuple):
    """An implementation, ours among them."""

    name: str
    version: str | None
    call: Callable
    note: str = ""  # what it does not do
    overwrites: bool = False  # its gradient takes the logits' storage
    compiles: bool = False  # a first call on new shapes may compile
    whole: bool = False  # takes (B, T, V) logits and scores all positions but the last
    unweighted: bool = False  # takes no advantages: all are 1
    role: str = (
        "peer"  # "ours" is checked before it is timed; "floor" is work that nobody can avoid
    )
    backward: Callable | None = None  # (outputs, x) -> gradient, where it is not autograd's


class Unavailable(Exception):
    """Why a peer cannot run here: a reason, and the status of its row."""

    def __init__(self, reason: str, status: str = results.CANNOT_RUN):
        super().__init__(reason)
        self.status = status


def import_peer(module: str):
    """The module, or Unavailable with the reason why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
            raise Unavailable("not installed", results.NOT_INSTALLED) from error
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def needs_gpu(device: str, interpreted: bool):
    if device == "cpu":
        raise Unavailable("its Triton kernels need a GPU")


def needs_kernels(device: str, interpreted: bool):
    """A GPU, or Triton's interpreter."""
    if not interpreted:
        needs_gpu(device, interpreted)


def needs_inductor(device: str, interpreted: bool):
    if interpreted:
        raise Unavailable("Inductor's kernels are not interpreted")
    if device == "cpu" and not shutil.which("g++"):
        raise Unavailable("Inductor needs a C++ compiler (g++)")


def listed(table: dict, name: str, package: str = "torch", note: str = "", *, needs=None, **more):
    """Lists a function that makes a peer's call for a device."""

    def register(make: Callable) -> Callable:
        def made(device: str, interpreted: bool) -> Peer:
            if needs:
                needs(device, interpreted)
            return Peer(name, version(package), make(device), note, **more)

        table[name] = made
        return make

    return register


def find(
    known: dict, device: str, wanted: str = "all", interpreted: bool = False, op: str | None = None
) -> tuple[list[Peer], list[dict]]:
    """The peers of `known` that can run here, and a row of `op` for each of the others, with its status and reason."""
    chosen = list(known) if wanted == "all" else wanted.split(",")
    found, missing = [], []
    for name, make in known.items():
        if name not in chosen:
            continue
        try:
            found.append(make(device, interpreted))
        except Unavailable as reason:
            missing.append(results.not_run(name, reason.status, str(reason), op))
    return found, missing


# ------------------------------------------------------------------ log-probabilities and entropy


def plain_logprobs(logits, targets, mask=None):
    """The formula as one writes it: fp32 log-softmax, gather, -sum p log p."""
    logp = torch.log_softmax(logits.float(), -1)
    return masked((plain.chosen(logp, targets), plain.entropy(logp)), mask)


def masked(outputs, mask):
    """The outputs with 0 in masked rows; None stays None."""
    if mask is None:
        return outputs
    return tuple(output if output is None else torch.where(mask, output, 0) for output in outputs)


def targets_ignored(targets, mask):
    """Flat targets, with cross-entropies' -100 where the mask leaves a row out."""
    return targets.flatten() if mask is None else torch.where(mask, targets, -100).flatten()


# Of TRL 1.16's trainers the experimental ones alone (A2PO, CPO, ORPO, SDFT, SDPO, TPO) call these two; GRPO, RLOO, DPO,
# KTO and SFT call the chunked head.
@listed(LOGPROBS, "TRL", "trl", "two functions, of its experimental trainers")
def trl(device):
    utils = import_peer("trl.trainer.utils")

    def call(logits, targets, mask=None):
        logprobs = utils.selective_log_softmax(logits, targets)
        return masked((logprobs, utils.entropy_from_logits(logits)), mask)

    return call


@listed(LOGPROBS, "plain torch")
def plain_torch(device):
    return plain_logprobs


def by_inductor(function):
    """Compile a function so that its graph may be kept: on a GPU, backward passes are timed alone, again and again."""
    functorch_config.donated_buffer = False
    return torch.compile(function, dynamic=True)


@listed(LOGPROBS, "torch.compile", needs=needs_inductor, compiles=True)
def compiled(device):
    return by_inductor(plain_logprobs)


@listed(LOGPROBS, "F.cross_entropy", note="no entropy; result in the logits' dtype")
def cross_entropy(device):
    def call(logits, targets, mask=None):
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return masked((-loss.view(targets.shape), None), mask)

    return call


@listed(LOGPROBS, "TRL kernel", "trl", needs=needs_kernels)
def trl_kernel(device):
    fused = import_peer("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
    return lambda logits, targets, mask=None: fused(logits, targets, 1.0, mask)


@listed(LOGPROBS, "Liger GRPO loss", "liger-kernel", "no entropy", needs=needs_kernels, whole=True)
def liger_grpo(device):
    loss = import_peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss
    # On-policy with advantage 1, CISPO's loss is -logprob, so the loss kernel can be checked like the others.
    fixed = {
        "temperature": 1.0,
        "beta": 0.0,
        "eps_high": 2.0,
        "inplace": False,
        "loss_type": "cispo",
    }

    def call(logits, targets, mask=None):
        # It takes (B, L + 1, V) and never scores the last position.
        if logits.dim() != 3 or logits.shape[1] != targets.shape[1] + 1:
            raise Unavailable("takes whole (B, T, V) logits alone")
        ones = torch.ones(len(logits), device=logits.device)
        mask = None if mask is None else mask.contiguous()
        targets = targets.contiguous()
        per_token, _, _ = loss(logits, None, None, targets, ones, mask, **fixed)
        return -per_token, None

    return call


LIGER = "no entropy; result in the logits' dtype; overwrites the logits"


@listed(
    LOGPROBS, "Liger cross-entropy", "liger-kernel", LIGER, needs=needs_kernels, overwrites=True
)
def liger_cross_entropy(device):
    function = import_peer("liger_kernel.ops").LigerCrossEntropyFunction

    def call(logits, targets, mask=None):
        targets = targets_ignored(targets, mask)
        rest = (None, -100, 0.0, 0.0, "none", None, False)
        loss = function.apply(logits.flatten(0, -2), targets, *rest)[0]
        return -loss.view(logits.shape[:-1]), None

    return call


# ------------------------------------------------------------------ log-probabilities of K tokens per row


@listed(TOPK, "plain torch", note="no entropy")
def plain_topk(device):
    def call(logits, targets):
        logp = torch.log_softmax(logits.float(), -1)
        return logp.gather(-1, targets)

    return call


# ------------------------------------------------------------------ KL of two logits tensors


def plain_kl(logits, ref_logits, mask=None):
    """Reverse KL per row, from two fp32 log-softmaxes."""
    logp = torch.log_softmax(logits.float(), -1)
    ref = torch.log_softmax(ref_logits.float(), -1)
    kl = (logp.exp() * (logp - ref)).sum(-1)
    return masked((kl,), mask)[0]


@listed(KL, "plain torch")
def kl_of_plain_torch(device):
    return plain_kl


@listed(KL, "torch.compile", needs=needs_inductor, compiles=True)
def compiled_kl(device):
    return by_inductor(plain_kl)


@listed(
    KL,
    "Liger JSD",
    "liger-kernel",
    "takes log-probabilities; one number for all rows",
    needs=needs_kernels,
)
def liger_kl(device):
    function = import_peer("liger_kernel.ops").LigerJSDFunction

    def call(logits, ref_logits, mask=None):
        # beta = 1 is the reverse KL; the mean over rows is all it returns.
        logp = torch.log_softmax(logits.float(), -1).flatten(0, -2)
        ref = torch.log_softmax(ref_logits.float(), -1).flatten(0, -2)
        return function.apply(logp, ref, None, 1.0, -100) * logp.shape[0]

    return call


# ------------------------------------------------------------------ a policy-gradient step through the output head


def per_row(advantages):
    """(N / SEQUENCE,) advantages of sequences -> (N,) of rows."""
    return advantages.repeat_interleave(SEQUENCE)


def policy_gradient(logprobs, entropy, advantages):
    """On-policy GRPO's loss per row: its ratio is 1, with the gradient of the log-probability."""
    ratio = (logprobs - logprobs.detach()).exp()
    return -ratio * advantages


def plain_head(hidden, weight, targets, advantages):
    """The step as one writes it: fp32 logits, log-softmax, gather."""
    logits = F.linear(hidden, weight).float()
    logprobs = plain.chosen(torch.log_softmax(logits, -1), targets)
    return policy_gradient(logprobs, None, per_row(advantages)).mean()


@listed(LINEAR, "plain torch", note="no entropy")
def head_of_plain_torch(device):
    return plain_head


@listed(LINEAR, "torch.compile", note="no entropy", needs=needs_inductor, compiles=True)
def compiled_head(device):
    return by_inductor(plain_head)


@listed(
    LINEAR,
    "Liger GRPO",
    "liger-kernel",
    "no entropy; not compiled on a CPU, where its default fails",
)
def liger_head(device):
    loss_class = import_peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    loss = loss_class(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=device != "cpu")

    def call(hidden, weight, targets, advantages):
        targets = targets.view(-1, SEQUENCE)
        states = hidden.view(*targets.shape, -1)
        return loss(states, weight, targets, torch.ones_like(targets), advantages)[0]

    return call


def step_of(head: Callable) -> Callable:
    """A step's loss by a head of (hidden, weight, targets) -> (logprobs, entropy)."""

    def call(hidden, weight, targets, advantages):
        logprobs, entropy = head(hidden, weight, targets)
        return policy_gradient(logprobs, entropy, per_row(advantages)).mean()

    return call


@listed(
    LINEAR,
    "Liger scaled cross-entropy",
    "liger-kernel",
    "its own kernels on Hopper alone, else verl's formulas",
)
def liger_scaled(device):
    function = import_peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def head(hidden, weight, targets):
        loss, entropy = function.apply(hidden, weight, targets, 1.0, -100, 1, True)
        return -loss, entropy

    return step_of(head)


def trl_chunks():
    """TRL's head as its trainers call it, (hidden, weight, targets) -> (logprobs, entropy)."""
    function = import_peer("trl.kernels").ChunkedLogProbFunction
    columns = import_peer("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def head(hidden, weight, targets):
        return function.apply(hidden, weight, None, targets, 1.0, columns, None, 1.0, ("entropy",))[
            :2
        ]

    return head


@listed(LINEAR, "TRL chunked head", "trl", "of its GRPO, RLOO, DPO, KTO and SFT trainers")
def trl_head(device):
    return step_of(trl_chunks())


@listed(LINEAR, "F.linear_cross_entropy", note="all advantages 1, no entropy", unweighted=True)
def torch_head(device):
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has none")

    def call(hidden, weight, targets, advantages):
        # Its documentation: chunks pay from as many rows as hidden units on; below, the whole logits are cheaper.
        chunked = torch.nn.LinearCrossEntropyOptions() if len(hidden) >= hidden.shape[1] else None
        return function(hidden, weight, targets, options=chunked)

    return call


# ------------------------------------------------------------------ fp32 logits of 16-bit operands


def plain_exact(hidden, weight, targets):
    """An fp32 head as it is most often written: cast, project, log-softmax."""
    logits = hidden.float() @ weight.float().t()
    return plain_logprobs(logits, targets)


@listed(EXACT, "plain torch")
def exact_of_plain_torch(device):
    return plain_exact


@listed(EXACT, "torch.compile", needs=needs_inductor, compiles=True)
def compiled_exact(device):
    return by_inductor(plain_exact)


@listed(
    EXACT,
    "TRL chunked head",
    "trl",
    "casts the head in each call; its trainers keep it so: cast_lm_head_to_fp32",
)
def trl_exact(device):
    head = trl_chunks()
    return lambda hidden, weight, targets: head(hidden.float(), weight.float(), targets)
