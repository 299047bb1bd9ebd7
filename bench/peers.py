"""The other implementations that rows stand beside: each optional, each with its version, or with why it cannot run.

A peer is called as we call our own op, `call(logits (..., V), targets (...), mask (...) | None)`, and returns
`(logprobs, entropy or None)`, so that an answer can be checked against fp64 before its time counts for anything.
"""

import importlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench.measure import version


class Peer(NamedTuple):
    name: str
    version: str | None
    call: Callable
    note: str = ""  # what it does not do
    overwrites: bool = False  # its gradient takes the logits' storage
    compiles: bool = False  # a first call on new shapes may compile


class Unavailable(Exception):
    """Why a peer cannot run here."""


def _gpu_only(device: str, interpreted: bool):
    if device == "cpu" and not interpreted:
        raise Unavailable("its Triton kernels need a GPU")


# ------------------------------------------------------------------ log-probabilities and entropy


def plain_logprobs(logits, targets, mask=None):
    """The formula as one writes it: fp32 log-softmax, gather, -sum p log p."""
    logp = torch.log_softmax(logits.float(), -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return _masked((logp.gather(-1, targets[..., None])[..., 0], entropy), mask)


def _masked(outputs, mask):
    return outputs if mask is None else tuple(None if o is None else torch.where(mask, o, 0) for o in outputs)


def _plain(device, interpreted):
    return Peer("plain torch", version("torch"), plain_logprobs)


def _compiled(device, interpreted):
    if interpreted:
        raise Unavailable("Inductor's kernels are not interpreted")
    if device == "cpu" and not shutil.which("g++"):
        raise Unavailable("Inductor needs a C++ compiler (g++)")
    return Peer("torch.compile", version("torch"), torch.compile(plain_logprobs, dynamic=True), compiles=True)


def _cross_entropy(device, interpreted):
    def call(logits, targets, mask=None):
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return _masked((-loss.view(targets.shape), None), mask)

    return Peer("F.cross_entropy", version("torch"), call, "no entropy; result in the logits' dtype")


def _trl(device, interpreted):
    utils = import_peer("trl.trainer.utils")

    def call(logits, targets, mask=None):
        return _masked((utils.selective_log_softmax(logits, targets), utils.entropy_from_logits(logits)), mask)

    return Peer("TRL", version("trl"), call, "two functions" if device == "cpu" else "two functions, each its kernel")


def _trl_kernel(device, interpreted):
    _gpu_only(device, interpreted)
    fused = import_peer("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy

    def call(logits, targets, mask=None):
        return fused(logits, targets, 1.0, mask)

    return Peer("TRL kernel", version("trl"), call)


def _liger_grpo(device, interpreted):
    _gpu_only(device, interpreted)
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

    return Peer("Liger GRPO loss", version("liger-kernel"), call, "no entropy")


def _liger_ce(device, interpreted):
    _gpu_only(device, interpreted)
    function = import_peer("liger_kernel.ops").LigerCrossEntropyFunction

    def call(logits, targets, mask=None):
        targets = targets.flatten() if mask is None else torch.where(mask, targets, -100).flatten()
        loss = function.apply(logits.flatten(0, -2), targets, None, -100, 0.0, 0.0, "none", None, False)[0]
        return -loss.view(logits.shape[:-1]), None

    note = "no entropy; result in the logits' dtype; overwrites the logits"
    return Peer("Liger cross-entropy", version("liger-kernel"), call, note, overwrites=True)


def _flash(device, interpreted):
    _gpu_only(device, False)
    function = import_peer("flash_attn.ops.triton.cross_entropy").cross_entropy_loss

    def call(logits, targets, mask=None):
        targets = targets.flatten() if mask is None else torch.where(mask, targets, -100).flatten()
        return -function(logits.flatten(0, -2), targets)[0].view(logits.shape[:-1]), None

    return Peer("flash-attn cross-entropy", version("flash-attn"), call, "no entropy")


def _quack(device, interpreted):
    _gpu_only(device, False)
    function = import_peer("quack.cross_entropy").cross_entropy

    def call(logits, targets, mask=None):
        targets = targets.flatten() if mask is None else torch.where(mask, targets, -100).flatten()
        return -function(logits.flatten(0, -2), targets, reduction="none").view(logits.shape[:-1]), None

    return Peer("quack cross-entropy", version("quack-kernels"), call, "no entropy")


def _verl(device, interpreted):
    functional = import_peer("verl.utils.torch_functional")

    def call(logits, targets, mask=None):
        # As its actors do with an entropy: flash-attn's gradient in place would corrupt the logits that it needs.
        logprobs = functional.logprobs_from_logits(logits, targets, inplace_backward=False)
        return _masked((logprobs, functional.entropy_from_logits(logits)), mask)

    return Peer("verl", version("verl"), call, "two functions")


# ------------------------------------------------------------------ KL of two logits tensors


def plain_kl(logits, ref_logits, mask=None):
    """Reverse KL per row, from two fp32 log-softmaxes."""
    logp, ref = torch.log_softmax(logits.float(), -1), torch.log_softmax(ref_logits.float(), -1)
    return _masked(((logp.exp() * (logp - ref)).sum(-1),), mask)[0]


def _plain_kl(device, interpreted):
    return Peer("plain torch", version("torch"), plain_kl)


def _compiled_kl(device, interpreted):
    version = _compiled(device, interpreted).version
    return Peer("torch.compile", version, torch.compile(plain_kl, dynamic=True), compiles=True)


def _liger_kl(device, interpreted):
    _gpu_only(device, interpreted)
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
        now = rewards[:, t] + gamma * following - values[:, t] + gamma * gae_lambda * last
        last, following = torch.where(keep, now, last), torch.where(keep, values[:, t], following)
        columns.append(torch.where(keep, now, 0))
    advantages = torch.stack(columns[::-1], 1)
    return advantages, torch.where(mask, advantages + values, 0)


def _loop_gae(device, interpreted):
    return Peer("loop over T", version("torch"), loop_gae)


# ------------------------------------------------------------------ choosing


def import_peer(module: str):
    """The module, or Unavailable with the reason why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.split(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == top
        raise Unavailable("not installed" if missing else f"{type(error).__name__}: {error}") from error


# in this order they run, and where time is short the last are left out
LOGPROBS = {
    "TRL": _trl,
    "plain torch": _plain,
    "torch.compile": _compiled,
    "F.cross_entropy": _cross_entropy,
    "TRL kernel": _trl_kernel,
    "Liger GRPO loss": _liger_grpo,
    "Liger cross-entropy": _liger_ce,
    "flash-attn cross-entropy": _flash,
    "quack cross-entropy": _quack,
    "verl": _verl,
}
KL = {"plain torch": _plain_kl, "torch.compile": _compiled_kl, "Liger JSD": _liger_kl}
GAE = {"loop over T": _loop_gae}


def find(known: dict, device: str, wanted: str = "all", interpreted: bool = False) -> tuple[list[Peer], dict[str, str]]:
    """The peers of `known` that can run here, and for each of the others the reason why not."""
    names = list(known) if wanted == "all" else [n for n in known if n in wanted.split(",")]
    peers, missing = [], {}
    for name in names:
        try:
            peers.append(known[name](device, interpreted))
        except Unavailable as reason:
            missing[name] = str(reason)
    return peers, missing
