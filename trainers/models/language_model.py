"""The causal language model that the trainers share: loading, scoring its own input, saving in the Hub format."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import fused_rl
from fused_rl import tiles
from fused_rl.trainers.base import engine
from fused_rl.trainers.data.fingerprints import find_adapters
from fused_rl.trainers.models import four_bit, lora
from fused_rl.trainers.models.pretrained import (
    check_causal,
    check_dtypes,
    check_weights,
    readable,
    save,
    switch_off_dropout,
)
from fused_rl.trainers.options import EngineConfig, InputError, ModelConfig


class Scored(NamedTuple):
    """The scores of tokens: (B, T - 1) fp32 in nats, 0 where masked; None if not requested.

    Logits and hidden states are of the N = mask.sum() tokens that count, in the order of the mask.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss: torch.Tensor | None = None
    """() the sum of `token_loss`; beside it the two above have no gradient."""
    logits: torch.Tensor | None = None
    """(N, V) of the whole vocabulary, at temperature 1."""
    hidden: torch.Tensor | None = None
    """(N, H) that the head meets: with those of another model the arguments of `fused_rl.linear_token_kl`."""


class LanguageModel(nn.Module):
    """A causal LM whose forward scores its own input; the root module given to DeepSpeed.

    The head's weight is read inside this forward, so that ZeRO 3 gathers it there and again in the backward pass.
    Outside of it (`head`, for the hidden states of two models) `engine.whole` does.
    """

    def __init__(
        self,
        lm: nn.Module,
        loss_from: str,
        *,
        lora: bool = False,
        head_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.lm = lm
        self.loss_from = loss_from
        self.lora = lora
        self.head_dtype = head_dtype
        self.softcap = getattr(self.base.config.get_text_config(), "final_logit_softcapping", None)
        if loss_from == "linear":
            _check_plain_head(self.base)
            of_logits = head_dtype or tiles.default_logits_dtype(self.head.weight.dtype, self.head.weight.device)
            if of_logits != self.head.weight.dtype:  # sampling and measuring use the distribution that is trained
                self.base.set_output_embeddings(WideHead(self.head))

    @property
    def base(self) -> nn.Module:
        """The transformers model without LoRA's wrapper."""
        return self.lm.get_base_model() if self.lora else self.lm

    @property
    def head(self) -> nn.Linear:
        """The linear layer from hidden states to logits."""
        return self.base.get_output_embeddings()

    @property
    def head_options(self) -> dict[str, object]:
        """The options of the linear ops that form the head's logits."""
        return {"softcap": self.softcap, "logits_dtype": self.head_dtype}

    def forward(
        self,
        input_ids,
        mask,
        temperature=1.0,
        *,
        packed=None,
        places=None,
        support=None,
        token_loss=None,
        per_token=(),
        want_logits=False,
        want_hidden=False,
    ) -> Scored:
        """Score each token by those before it: row t of (B, T - 1) is token t + 1.

        Args:
            input_ids: (B, T) int64, padded on the right: a causal model never sees a pad, so there is no other mask.
            mask: (B, T - 1) bool, True where token t + 1 counts.
            temperature: of the softmax.
            packed: the same sequences with shared prompts (packing.py): what the model is run on instead.
            places: (N,) int64, the tokens that count in the flattened mask; giving them spares a wait for the device.
            support: the set that each of the mask.sum() tokens was sampled from; the softmax is over these sets.
            token_loss: a loss of single tokens, as `fused_rl.linear_token_loss` takes it; requests `loss`.
            per_token: (B, T - 1) tensors that `token_loss` takes.
            want_logits, want_hidden: request `logits` and `hidden`.
        """
        if self.loss_from == "logits":
            if want_hidden:
                raise ValueError("hidden states are read with loss_from=linear alone")
            scored = self._from_logits(input_ids, mask, temperature, packed, places, support, want_logits)
            return scored if token_loss is None else _summed(scored, token_loss, per_token, mask)

        # From hidden states: those that predict a token that counts, and only they, meet the head.
        places = places_of(mask) if places is None else places
        hidden = self._states(self.base.base_model, "last_hidden_state", input_ids, places, packed)
        head = self.head
        targets = input_ids[:, 1:].flatten()[places]
        options = {"temperature": temperature, "bias": head.bias, **self.head_options}
        if token_loss is not None and support is None:
            per_token = [tensor.flatten()[places] for tensor in per_token]
            rows = fused_rl.linear_token_loss(hidden, head.weight, targets, token_loss, *per_token, **options)
            loss = rows.loss
        else:
            rows = fused_rl.linear_token_logprobs(hidden, head.weight, targets, support=support, **options)
            loss = None
        logprobs = at_places(rows.logprobs, mask, places)
        entropy = at_places(rows.entropy, mask, places)
        scored = Scored(logprobs, entropy, loss)
        if token_loss is not None and loss is None:  # over kept sets alone there is nothing to save by a fused loss
            scored = _summed(scored, token_loss, per_token, mask)

        # What else was requested.
        logits = self.head(hidden) if want_logits else None
        if want_logits and self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return scored._replace(logits=logits, hidden=hidden if want_hidden else None)

    def _from_logits(self, input_ids, mask, temperature, packed, places, support, want_logits) -> Scored:
        """Score by the model's own logits: all of them, or with shared prompts those of the rows that count."""
        if packed is None:
            logits = self.base(input_ids=input_ids, use_cache=False).logits  # soft-capped, where the model is so
            options = {"temperature": temperature, "mask": mask}
            if support is not None:  # a row for every target, the first of each sequence too
                options["support"] = support.spread(nn.functional.pad(mask, (1, 0)))
            rows = fused_rl.token_logprobs(logits, input_ids, shift=True, **options)
            if not want_logits:
                return Scored(rows.logprobs, rows.entropy)
            places = places_of(mask) if places is None else places
            return Scored(rows.logprobs, rows.entropy, logits=_predicting(logits, places))

        # With shared prompts.
        places = places_of(mask) if places is None else places
        logits = self._states(self.base, "logits", input_ids, places, packed)
        targets = input_ids[:, 1:]
        rows = fused_rl.token_logprobs(logits, targets.flatten()[places], temperature=temperature, support=support)
        logprobs, entropy = (at_places(values, mask, places) for values in rows[:2])
        return Scored(logprobs, entropy, logits=logits if want_logits else None)

    def _states(self, module, output: str, input_ids, places, packed):
        """Return the module's output (N, ·) at the positions that predict the tokens that count."""
        if packed is None:
            return _predicting(module(input_ids=input_ids, use_cache=False)[output], places)
        return packed.states_of(self.base, module, output)


class WideHead(nn.Linear):
    """An LM head of 16-bit weights whose logits are fp32, for sampling and measuring: it has no gradient."""

    def __init__(self, head: nn.Linear):
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V) fp32."""
        rows = hidden.reshape(-1, self.in_features)
        out = rows.new_empty(len(rows), self.out_features, dtype=torch.float32)
        logits = tiles.product(rows, self.weight, out)
        logits = logits if self.bias is None else logits.add_(self.bias)
        return logits.view(*hidden.shape[:-1], self.out_features)


def places_of(mask):
    """Return the True places of the flattened mask, (N,) int64; waits for its device."""
    return mask.flatten().nonzero()[:, 0]


def _predicting(states, places):
    """Return the states (N, ·) of the positions before the tokens at `places` of (B, T - 1)."""
    return states.flatten(0, 1)[places + places // max(1, states.shape[1] - 1)]


def at_places(values, mask, places):
    """Return (B, T - 1) with values (N,) at `places` and 0 elsewhere; differentiable."""
    return values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)


def keep_only(logits: torch.Tensor, support: fused_rl.TokenSupport | None) -> None:
    """Set logits (N, V) outside of the kept sets to -inf, in place: a softmax is then one over the sets."""
    if support is None:
        return
    lengths = support.offsets.diff()
    row = torch.repeat_interleave(lengths, output_size=len(support.ids))
    kept = logits[row, support.ids]
    logits[lengths > 0] = -torch.inf
    logits[row, support.ids] = kept


def _summed(scored: Scored, token_loss, per_token, mask) -> Scored:
    """Return `scored` with the sum of `token_loss` over its log-probabilities, which lose their gradient."""
    loss = fused_rl.masked_sum(token_loss(scored.logprobs, scored.entropy, *per_token), mask)
    return scored._replace(loss=loss, logprobs=scored.logprobs.detach(), entropy=scored.entropy.detach())


def _check_plain_head(lm) -> None:
    """Check that the head is a plain linear layer: the linear path multiplies by its weight and nothing more."""
    if lm.base_model is lm:
        raise InputError(f"{type(lm).__name__} has no backbone apart from its head; use --loss_from logits")
    text = lm.config.get_text_config()
    scales = []
    for name in ("logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1, 1.0):
            scales.append(name)
    if scales or type(lm.get_output_embeddings()) not in (nn.Linear, WideHead):
        what = f"config.{scales[0]}" if scales else f"an LM head of type {type(lm.get_output_embeddings()).__name__}"
        raise InputError(f"{type(lm).__name__} has {what}, which the linear loss leaves out; use --loss_from logits")


def _read_lm(name: str, revision: str | None, what: str, device: torch.device, **options) -> nn.Module:
    """Return a causal LM on its device, without its own sampling defaults; refuse weights that are missing."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    # All of its weights.
    reading = {"output_loading_info": True, "trust_remote_code": False, **options}
    with readable(what, options["attn_implementation"]):
        check_dtypes(name, what)
        lm, report = AutoModelForCausalLM.from_pretrained(name, revision=revision, **reading)
    hint = "; it is a reward model: a causal LM is needed" if "score.weight" in report["unexpected_keys"] else ""
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(map(str, report[f"{kind}_keys"])):
            shown = ", ".join(keys[:5]) + (", …" if len(keys) > 5 else "")
            raise InputError(f"{what} has {len(keys)} {kind} weights for {type(lm).__name__}: {shown}{hint}")
    check_weights(lm, what)
    if "quantization_config" in options:
        four_bit.keep_trainable(lm)
    check_causal(lm.to(device), what)  # there: some attention runs on a GPU alone

    # The Hub's sampling defaults (top_k, repetition_penalty, ...) would bias the rollout: `save_lm` puts them back.
    lm.saved_generation_config = lm.generation_config
    lm.generation_config = GenerationConfig()
    return lm


def head_dtype(options: ModelConfig, held: EngineConfig) -> torch.dtype | None:
    """Return the dtype of logits that the option stands for; None is the best for weights and device."""
    if options.head_dtype == "bfloat16" and engine.torch_dtype(held) == torch.float32:
        raise InputError(
            f"head_dtype=bfloat16 would round the logits of float32 weights (dtype={held.dtype}); leave it out, or "
            "give --dtype bfloat16 as well"
        )
    return None if options.head_dtype == "auto" else getattr(torch, options.head_dtype)


def load_lm(
    name: str,
    revision: str | None,
    options: ModelConfig,
    held: EngineConfig,
    device: torch.device,
    *,
    option: str = "model",
    trainable: bool = True,
) -> LanguageModel:
    """Return a causal LM without dropout; frozen, and without its adapters, unless trainable.

    `options` says how it is read and trained; errors name it by `option`.
    """
    # Its weights: where `name` holds adapters, those that they belong to.
    of_logits = head_dtype(options, held)
    adapters = find_adapters(name, revision)
    with_adapters = trainable and (adapters is not None or options.lora_rank > 0)
    reading = {"dtype": engine.torch_dtype(held), "attn_implementation": options.attn_implementation}
    if trainable:
        lora.check_options(options, adapters)
        four_bit.check(options, held, adapters=with_adapters)
        reading |= four_bit.reading_options(options, reading["dtype"], device)
    base = (name, revision) if adapters is None else adapters.base
    lm = _read_lm(*base, f"{option}={base[0]!r}", device, **reading)

    # What of it is trained.
    if not trainable:
        lm.requires_grad_(False).eval()
    elif with_adapters:
        lm = lora.adapted(lm, options) if adapters is None else lora.continued(lm, adapters)
    switch_off_dropout(lm)
    if trainable and options.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return LanguageModel(lm, options.loss_from, lora=with_adapters, head_dtype=of_logits)


def load_to_sample(
    name: str,
    *,
    option: str = "model",
    revision: str | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> nn.Module:
    """Return a transformers causal LM to sample from and score with, adapters merged in, without sampling defaults.

    By default the device is the GPU if there is one, and the dtype its fastest one; errors name the model by `option`.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or engine.fastest_dtype(device)
    adapters = find_adapters(name, revision)
    base = (name, revision) if adapters is None else adapters.base
    reading = {"dtype": dtype, "attn_implementation": attn_implementation}
    lm = _read_lm(*base, f"{option}={base[0]!r}", device, **reading)
    lm = lm if adapters is None else lora.continued(lm, adapters).merge_and_unload()
    return lm.to(device).eval()


def save_lm(trained, tokenizer, folder: Path, *, merged: bool = False) -> None:
    """Save a `LanguageModel` and its generation config in the Hub format: of adapters these alone, unless merged."""
    model = trained.module

    def write(unfinished: Path, state: dict | None) -> None:
        lm = model.lm
        base = model.base
        if state is not None:
            # Without what a trainer has added to the language model, such as a value head.
            state = {name.removeprefix("lm."): state[name] for name in state if name.startswith("lm.")}
        if merged and model.lora:
            whole = lm.state_dict() if state is None else state
            whole = {name.removeprefix("base_model.model."): value for name, value in whole.items()}
            lm = base
            state = lora.merged(whole, base)
        training_config = base.generation_config
        base.generation_config = base.saved_generation_config
        lm.save_pretrained(unfinished, state_dict=state)
        base.generation_config = training_config

    save(trained, tokenizer, folder, write)
