"""The other implementations that rows stand beside: each optional, each with its version, or with why it cannot run.

A peer is called as we call our own op, so that an answer can be checked against fp64 before its time counts:

    log-probabilities   call(logits (..., V), targets (...), mask (...) | None) -> (logprobs, entropy or None)
    KL                  call(logits (..., V), ref_logits (..., V), mask (...) | None) -> KL per row, or its sum
    gae                 call(rewards (B, T), values, mask, gamma, gae_lambda) -> (advantages, returns)
    K tokens per row    call(logits (..., V), targets (..., K)) -> logprobs (..., K)
    the output head     call(hidden (N, H), weight (V, H), targets (N,), advantages (N / SEQUENCE,)) -> loss
"""

import importlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench import results
from bench.machine import version

SEQUENCE = 128  # tokens that share an advantage at the output head, and the smallest piece Liger can cut


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
    role: str = "peer"  # "ours" is checked before it is timed; "floor" is work that nobody can avoid
    backward: Callable | None = None  # (outputs, x) -> gradient, where it is not autograd's


class Unavailable(Exception):
    """Why a peer cannot run here: a reason, and the status of its row."""

    def __init__(self, reason: str, status: str = results.CANNOT_RUN):
        super().__init__(reason)
        self.status = status


def _needs_gpu(device: str, interpreted: bool):
    if device == "cpu" and not interpreted:
        raise Unavailable("its Triton kernels need a GPU")


# ------------------------------------------------------------------ log-probabilities and entropy


def plain_logprobs(logits, targets, mask=None):
    """The formula as one writes it: fp32 log-softmax, gather, -sum p log p."""
    logp = torch.log_softmax(logits.float(), -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return _masked((logp.gather(-1, targets[..., None])[..., 0], entropy), mask)


def _masked(outputs, mask):
    """The outputs with 0 in masked rows; None stays None."""
    if mask is None:
        return outputs
    return tuple(output if output is None else torch.where(mask, output, 0) for output in outputs)


def _targets_ignored(targets, mask):
    """Flat targets, with cross-entropies' -100 where the mask leaves a row out."""
    return targets.flatten() if mask is None else torch.where(mask, targets, -100).flatten()


def _plain(device, interpreted):
    return Peer("plain torch", version("torch"), plain_logprobs)


def _needs_inductor(device: str, interpreted: bool):
    if interpreted:
        raise Unavailable("Inductor's kernels are not interpreted")
    if device == "cpu" and not shutil.which("g++"):
        raise Unavailable("Inductor needs a C++ compiler (g++)")


def _compiled(device, interpreted):
    _needs_inductor(device, interpreted)
    return Peer("torch.compile", version("torch"), torch.compile(plain_logprobs, dynamic=True), compiles=True)


def _logprob_alone(device, interpreted):
    def call(logits, targets, mask=None):
        logp = torch.log_softmax(logits.float(), -1)
        return _masked((logp.gather(-1, targets[..., None])[..., 0], None), mask)

    return Peer("log_softmax + gather", version("torch"), call, "no entropy")


def _cross_entropy(device, interpreted):
    def call(logits, targets, mask=None):
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return _masked((-loss.view(targets.shape), None), mask)

    return Peer("F.cross_entropy", version("torch"), call, "no entropy; result in the logits' dtype")


def _trl(device, interpreted):
    utils = import_peer("trl.trainer.utils")

    def call(logits, targets, mask=None):
        logprobs = utils.selective_log_softmax(logits, targets)
        return _masked((logprobs, utils.entropy_from_logits(logits)), mask)

    note = "two functions" if device == "cpu" else "two functions, each its kernel"
    return Peer("TRL", version("trl"), call, note)


def _trl_kernel(device, interpreted):
    _needs_gpu(device, interpreted)
    fused = import_peer("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy

    def call(logits, targets, mask=None):
        return fused(logits, targets, 1.0, mask)

    return Peer("TRL kernel", version("trl"), call)


def _liger_grpo(device, interpreted):
    _needs_gpu(device, interpreted)
    loss = import_peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def call(logits, targets, mask=None):
        # CISPO's loss on-policy with advantage 1 is -logprob, so the loss kernel can be checked like the others.
        # It takes (B, L + 1, V) and never scores the last position.
        if logits.dim() != 3 or logits.shape[1] != targets.shape[1] + 1:
            raise Unavailable("takes whole (B, T, V) logits alone")
        ones = torch.ones(len(logits), device=logits.device)
        per_token, _, _ = loss(
            logits,
            None,
            None,
            targets.contiguous(),
            ones,
            None if mask is None else mask.contiguous(),
            temperature=1.0,
            beta=0.0,
            eps_high=2.0,
            inplace=False,
            loss_type="cispo",
        )
        return -per_token, None

    return Peer("Liger GRPO loss", version("liger-kernel"), call, "no entropy", whole=True)


def _liger_ce(device, interpreted):
    _needs_gpu(device, interpreted)
    function = import_peer("liger_kernel.ops").LigerCrossEntropyFunction

    def call(logits, targets, mask=None):
        targets = _targets_ignored(targets, mask)
        loss = function.apply(logits.flatten(0, -2), targets, None, -100, 0.0, 0.0, "none", None, False)[0]
        return -loss.view(logits.shape[:-1]), None

    note = "no entropy; result in the logits' dtype; overwrites the logits"
    return Peer("Liger cross-entropy", version("liger-kernel"), call, note, overwrites=True)


def _flash(device, interpreted):
    _needs_gpu(device, False)
    function = import_peer("flash_attn.ops.triton.cross_entropy").cross_entropy_loss

    def call(logits, targets, mask=None):
        loss = function(logits.flatten(0, -2), _targets_ignored(targets, mask))[0]
        return -loss.view(logits.shape[:-1]), None

    return Peer("flash-attn cross-entropy", version("flash-attn"), call, "no entropy")


def _quack(device, interpreted):
    _needs_gpu(device, False)
    function = import_peer("quack.cross_entropy").cross_entropy

    def call(logits, targets, mask=None):
        loss = function(logits.flatten(0, -2), _targets_ignored(targets, mask), reduction="none")
        return -loss.view(logits.shape[:-1]), None

    return Peer("quack cross-entropy", version("quack-kernels"), call, "no entropy")


def _verl(device, interpreted):
    functional = import_peer("verl.utils.torch_functional")

    def call(logits, targets, mask=None):
        # As its actors do with an entropy: flash-attn's gradient in place would corrupt the logits that it needs.
        logprobs = functional.logprobs_from_logits(logits, targets, inplace_backward=False)
        return _masked((logprobs, functional.entropy_from_logits(logits)), mask)

    return Peer("verl", version("verl"), call, "two functions")


# ------------------------------------------------------------------ log-probabilities of K tokens per row


def plain_topk(logits, targets):
    """The formula as one writes it; targets (..., K)."""
    return torch.log_softmax(logits.float(), -1).gather(-1, targets)


def gathered_topk(logits, targets):
    """The K logits less the log-sum-exp: no (..., V) result where a compiler fuses the cast into the reduction."""
    lse = torch.logsumexp(logits.float(), -1, keepdim=True)
    return logits.gather(-1, targets).float() - lse


def _plain_topk(device, interpreted):
    return Peer("plain torch", version("torch"), plain_topk, "no entropy")


def _compiled_topk(device, interpreted):
    _needs_inductor(device, interpreted)
    call = torch.compile(gathered_topk, dynamic=True)
    return Peer("gather + logsumexp compiled", version("torch"), call, "no entropy", compiles=True)


# ------------------------------------------------------------------ KL of two logits tensors


def plain_kl(logits, ref_logits, mask=None):
    """Reverse KL per row, from two fp32 log-softmaxes."""
    logp = torch.log_softmax(logits.float(), -1)
    ref = torch.log_softmax(ref_logits.float(), -1)
    kl = (logp.exp() * (logp - ref)).sum(-1)
    return _masked((kl,), mask)[0]


def _plain_kl(device, interpreted):
    return Peer("plain torch", version("torch"), plain_kl)


def _compiled_kl(device, interpreted):
    _needs_inductor(device, interpreted)
    return Peer("torch.compile", version("torch"), torch.compile(plain_kl, dynamic=True), compiles=True)


def _liger_kl(device, interpreted):
    _needs_gpu(device, interpreted)
    function = import_peer("liger_kernel.ops").LigerJSDFunction

    def call(logits, ref_logits, mask=None):
        # beta = 1 is the reverse KL; the mean over rows is all it returns.
        logp, ref = (torch.log_softmax(x.float(), -1).flatten(0, -2) for x in (logits, ref_logits))
        return function.apply(logp, ref, None, 1.0, -100) * logp.shape[0]

    return Peer("Liger JSD", version("liger-kernel"), call, "takes log-probabilities; one number for all rows")


# ------------------------------------------------------------------ generalised advantage estimation


def loop_gae(rewards, values, mask, gamma, gae_lambda):
    """The loop over T that PPO trainers run on the device; (B, T) -> advantages, returns."""
    last = torch.zeros_like(rewards[:, 0])
    following = torch.zeros_like(last)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        keep = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        now = delta + gamma * gae_lambda * last
        last = torch.where(keep, now, last)
        following = torch.where(keep, values[:, t], following)
        columns.append(torch.where(keep, now, 0))
    advantages = torch.stack(columns[::-1], 1)
    return advantages, torch.where(mask, advantages + values, 0)


def _loop_gae(device, interpreted):
    return Peer("loop over T", version("torch"), loop_gae)


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
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    return policy_gradient(logprobs, None, per_row(advantages)).mean()


def _plain_head(device, interpreted):
    return Peer("plain torch", version("torch"), plain_head, "no entropy")


def _compiled_head(device, interpreted):
    _needs_inductor(device, interpreted)
    call = torch.compile(plain_head, dynamic=True)
    return Peer("torch.compile", version("torch"), call, "no entropy", compiles=True)


def _liger_head(device, interpreted):
    loss_class = import_peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    loss = loss_class(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=device != "cpu")

    def call(hidden, weight, targets, advantages):
        targets = targets.view(-1, SEQUENCE)
        states = hidden.view(*targets.shape, -1)
        return loss(states, weight, targets, torch.ones_like(targets), advantages)[0]

    note = "no entropy" + ("; compiled=False, its default fails on CPU" if device == "cpu" else "")
    return Peer("Liger GRPO", version("liger-kernel"), call, note)


def _trl_head(device, interpreted):
    function = import_peer("trl.kernels").ChunkedLogProbFunction
    columns = import_peer("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def call(hidden, weight, targets, advantages):
        outputs = function.apply(hidden, weight, None, targets, 1.0, columns, None, 1.0, ("entropy",))
        return policy_gradient(outputs[0], None, per_row(advantages)).mean()

    return Peer("TRL chunked head", version("trl"), call)


def _torch_linear_cross_entropy(device, interpreted):
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Unavailable(f"torch {torch.__version__} has none")

    def call(hidden, weight, targets, advantages):
        # Its documentation: chunks pay from as many rows as hidden units on; below, the whole logits are cheaper.
        chunked = torch.nn.LinearCrossEntropyOptions() if len(hidden) >= hidden.shape[1] else None
        return function(hidden, weight, targets, options=chunked)

    note = "all advantages 1, no entropy"
    return Peer("F.linear_cross_entropy", version("torch"), call, note, unweighted=True)


def _cut_cross_entropy(device, interpreted):
    function = import_peer("cut_cross_entropy").linear_cross_entropy
    cpu = device == "cpu"
    if cpu:
        _needs_inductor(device, interpreted)

    def call(hidden, weight, targets, advantages):
        loss = function(hidden, weight, targets, reduction="none", impl="torch_compile" if cpu else "cce")
        return policy_gradient(-loss, None, per_row(advantages)).mean()

    note = "no entropy" + ("; its torch_compile: its kernels need a GPU" if cpu else "")
    return Peer("cut-cross-entropy", version("cut-cross-entropy"), call, note, compiles=cpu)


def _verl_head(device, interpreted):
    _needs_gpu(device, False)
    function = import_peer("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def call(hidden, weight, targets, advantages):
        logprobs, entropy = function(hidden, weight, targets, 1.0, "none")
        return policy_gradient(logprobs, entropy, per_row(advantages)).mean()

    return Peer("verl fused head", version("verl"), call)


# ------------------------------------------------------------------ choosing


def import_peer(module: str):
    """The module, or Unavailable with the reason why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.split(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == top
        if missing:
            raise Unavailable("not installed", results.NOT_INSTALLED) from error
        raise Unavailable(f"{type(error).__name__}: {error}") from error


# In this order they run, and where time is short the last are left out.
LOGPROBS = {
    "TRL": _trl,
    "plain torch": _plain,
    "torch.compile": _compiled,
    "log_softmax + gather": _logprob_alone,
    "F.cross_entropy": _cross_entropy,
    "TRL kernel": _trl_kernel,
    "Liger GRPO loss": _liger_grpo,
    "Liger cross-entropy": _liger_ce,
    "flash-attn cross-entropy": _flash,
    "quack cross-entropy": _quack,
    "verl": _verl,
}
KL = {"plain torch": _plain_kl, "torch.compile": _compiled_kl, "Liger JSD": _liger_kl}
TOPK = {"plain torch": _plain_topk, "gather + logsumexp compiled": _compiled_topk}
GAE = {"loop over T": _loop_gae}
LINEAR = {
    "plain torch": _plain_head,
    "torch.compile": _compiled_head,
    "Liger GRPO": _liger_head,
    "TRL chunked head": _trl_head,
    "cut-cross-entropy": _cut_cross_entropy,
    "verl": _verl_head,
    "F.linear_cross_entropy": _torch_linear_cross_entropy,
}
TRAINERS = ["TRL GRPOTrainer"]  # bench/trainer_peers.py


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
