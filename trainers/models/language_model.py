"""The causal language model that the trainers share: loading, scoring its own input, saving in the Hub format."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import fused_rl
from fused_rl import tiles
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.written import listed_folder
from fused_rl.trainers.data.sources import find_adapters
from fused_rl.trainers.models import four_bit, lora
from fused_rl.trainers.models.packing import inputs_of
from fused_rl.trainers.options.config import InputError, RunConfig
from fused_rl.trainers.options.text import in_a_line

NOT_A_MODEL = "neither a local folder with a model nor on the Hub, or it is damaged"


class LanguageModel(nn.Module):
    """A causal LM whose forward scores its own input; the root module given to DeepSpeed.

    The head's weight is read inside this forward, so that ZeRO 3 gathers it there and again in the backward pass.
    """

    def __init__(self, lm: nn.Module, loss_from: str, *, lora: bool = False, head_dtype: torch.dtype | None = None):
        super().__init__()
        self.lm, self.loss_from, self.lora, self.head_dtype = lm, loss_from, lora, head_dtype
        self.softcap = getattr(self.base.config.get_text_config(), "final_logit_softcapping", None)
        if loss_from == "linear":
            _check_plain_head(self.base)
            head = self.base.get_output_embeddings()
            of_logits = head_dtype or tiles.default_logits_dtype(head.weight.dtype, head.weight.device)
            if of_logits != head.weight.dtype:  # what is drawn, and measured from whole logits, is what is trained
                self.base.set_output_embeddings(WideHead(head))

    @property
    def base(self) -> nn.Module:
        """The transformers model, without the wrapper that LoRA puts around it."""
        return self.lm.get_base_model() if self.lora else self.lm

    @property
    def head_options(self) -> dict[str, object]:
        """How the head's logits are formed, as the linear ops take it."""
        return {"softcap": self.softcap, "logits_dtype": self.head_dtype}

    def forward(
        self,
        input_ids,
        mask,
        temperature=1.0,
        token_loss=None,
        per_token=(),
        want_logits=False,
        packed=None,
        support=None,
    ):
        """Score each token by those before it: row t of (B, T - 1) is token t + 1.

        Args:
            input_ids: (B, T) int64, padded on the right: a causal model never sees a pad, so there is no other mask.
            mask: (B, T - 1) bool, True where token t + 1 counts.
            temperature: of the softmax.
            token_loss: a loss of single tokens, as `fused_rl.linear_token_loss` takes it.
            per_token: (B, T - 1) tensors that `token_loss` takes.
            want_logits: also return the logits (mask.sum(), V) of the rows that count.
            packed: the same sequences with shared prompts (packing.py): what the model is run on instead.
            support: what each of the mask.sum() tokens was drawn from; all that is returned is over these sets, but
                for the logits.

        Returns:
            (logprobs, entropy, lse), each (B, T - 1) fp32; with `token_loss` (its sum, logprobs, entropy), the last two
            without gradient; with `want_logits` the pair of the first and the logits.
        """
        if self.loss_from == "logits":
            rows, logits = self._from_logits(input_ids, mask, temperature, packed, support, want_logits)
            if token_loss is not None:
                return _summed(token_loss, per_token, rows, mask)
            return (rows, logits) if want_logits else rows

        # From hidden states: those that predict a token that counts, and only they, meet the head.
        hidden = self._states(self.base.base_model, "last_hidden_state", input_ids, mask, packed)
        head, targets = self.base.get_output_embeddings(), input_ids[:, 1:][mask]
        options = {"temperature": temperature, "bias": head.bias, **self.head_options}
        if token_loss is not None and support is None:
            per_token = [tensor[mask] for tensor in per_token]
            found = fused_rl.linear_token_loss(hidden, head.weight, targets, token_loss, *per_token, **options)
            return found._replace(logprobs=_at(mask, found.logprobs), entropy=_at(mask, found.entropy))
        rows = fused_rl.linear_token_logprobs(hidden, head.weight, targets, support=support, **options)
        rows = fused_rl.TokenLogprobs(*(_at(mask, values) for values in rows))
        if token_loss is not None:  # over the kept rows of the head alone, with nothing to save in the forward pass
            return _summed(token_loss, per_token, rows, mask)
        if not want_logits:
            return rows
        logits = head(hidden)
        return rows, logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _from_logits(self, input_ids, mask, temperature, packed, support, want_logits):
        """(logprobs, entropy, lse), each (B, T - 1), and the logits of the rows that count if they are wanted."""
        if packed is None:
            logits = self.base(input_ids=input_ids, use_cache=False).logits  # soft-capped, where the model is so
            options = {"temperature": temperature, "mask": mask}
            if support is not None:  # a row for every target, the first of each sequence too
                options["support"] = support.spread(nn.functional.pad(mask, (1, 0)))
            rows = fused_rl.token_logprobs(logits, input_ids, shift=True, **options)
            return rows, logits[:, :-1][mask] if want_logits else None
        logits = self._states(self.base, "logits", input_ids, mask, packed)
        rows = fused_rl.token_logprobs(logits, input_ids[:, 1:][mask], temperature=temperature, support=support)
        return fused_rl.TokenLogprobs(*(_at(mask, values) for values in rows)), logits

    def _states(self, module, output: str, input_ids, mask, packed):
        """(N, ·): what `module` puts out at the positions that predict the tokens that count."""
        if packed is None:
            return module(input_ids=input_ids, use_cache=False)[output][:, :-1][mask]
        found = module(**inputs_of(self.base, packed), use_cache=False)[output]
        return found.flatten(0, 1)[packed.states]


class WideHead(nn.Linear):
    """An LM head of 16-bit weights whose logits are fp32, for sampling and measuring: it has no gradient."""

    def __init__(self, head: nn.Linear):
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight, self.bias = head.weight, head.bias

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V) fp32."""
        rows = hidden.reshape(-1, self.in_features)
        logits = tiles.product(rows, self.weight, rows.new_empty(len(rows), self.out_features, dtype=torch.float32))
        logits = logits if self.bias is None else logits.add_(self.bias)
        return logits.view(*hidden.shape[:-1], self.out_features)


def _at(mask, values):
    """(N,) values at the True places of (B, T - 1), 0 elsewhere; differentiable."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _summed(token_loss, per_token, rows, mask):
    """What `linear_token_loss` returns, from log-probabilities (B, T - 1) that carry a gradient."""
    loss = fused_rl.masked_sum(token_loss(rows.logprobs, rows.entropy, *per_token), mask)
    return fused_rl.LinearTokenLoss(loss, rows.logprobs.detach(), rows.entropy.detach())


def _check_plain_head(lm) -> None:
    """The linear path multiplies by the head's weight itself, so the head must be that, apart, and nothing more."""
    if lm.base_model is lm:
        what = f"its backbone is not under base_model_prefix={lm.base_model_prefix!r}"
        raise InputError(f"{type(lm).__name__}: {what}, so that the linear loss cannot read it; use --loss_from logits")
    text = lm.config.get_text_config()
    scales = [k for k in ("logit_scale", "logits_scaling") if getattr(text, k, None) not in (None, 1, 1.0)]
    if scales or type(lm.get_output_embeddings()) not in (nn.Linear, WideHead):
        what = f"config.{scales[0]}" if scales else f"an LM head of type {type(lm.get_output_embeddings()).__name__}"
        raise InputError(f"{type(lm).__name__} has {what}, which the linear loss leaves out; use --loss_from logits")


def read_whole(auto_class, name: str, *, option: str = "model", **options) -> nn.Module:
    """The model that `name` holds, every weight read and finite; refuses what transformers would draw at random.

    Args:
        auto_class: of transformers.
        name: a Hub name or a local folder.
        option: which option named it, for errors.
        **options: of `from_pretrained`.
    """
    try:
        reading = {"output_loading_info": True, "trust_remote_code": False, **options}
        model, report = auto_class.from_pretrained(name, **reading)
    except Exception as error:  # OSError, RuntimeError, JSON and safetensors errors: as many as ways to be broken
        raise unreadable(f"{option}={name!r}", error, options.get("attn_implementation")) from error
    kind = type(model).__name__
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            keys = sorted(map(str, report[what]))
            shown = ", ".join(keys[:5]) + (", …" if len(keys) > 5 else "")
            raise InputError(
                f"{option}={name!r} has {len(keys)} {what.replace('_keys', '')} weights for {kind}: {shown}"
            )
    check_weights(model, name, option)
    return model


def unreadable(what: str, error: Exception, attention: str | None) -> InputError:
    """What to tell of a model that transformers does not read: it checks the attention that was asked for as well."""
    if attention is not None and (isinstance(error, ImportError) or "attn_implementation" in str(error)):
        return InputError(f"attn_implementation={attention} cannot be used for {what}: {in_a_line(error)}")
    return InputError(f"{what} is {NOT_A_MODEL}: {in_a_line(error)}")


def check_weights(model: nn.Module, name: str, option: str = "model") -> None:
    """Refuse weights that are not finite."""
    broken = [key for key, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        shown = ", ".join(broken[:5])
        raise InputError(f"{option}={name!r}: {len(broken)} weights hold NaN or infinite values, among them {shown}")


@torch.no_grad()
def check_causal(lm: nn.Module, name: str, option: str = "model") -> None:
    """Refuse a model in which a token sees its successors: its log-probabilities are not those of generation."""
    if lm.config.is_encoder_decoder:
        raise InputError(f"{option}={name!r} is an encoder-decoder ({lm.config.model_type}); a causal LM is needed")
    training, ids = lm.training, torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]) % lm.config.get_text_config().vocab_size
    logits = lm.eval()(input_ids=ids.to(lm.device), use_cache=False).logits[:, :3].float()
    lm.train(training)
    if (logits[0] - logits[1]).abs().max() > 0.02 * logits.std():  # rounding moves them less, a token seen far more
        what = f"({lm.config.model_type}) is not causal: a token's logits change with the tokens after it"
        raise InputError(f"{option}={name!r} {what}")


def check_fits(lm: nn.Module, tokenizer, rows: Iterable[tuple[list[int], str]], more: int, remedy: str) -> None:
    """Refuse token ids that have no embedding, and sequences longer than the model has positions.

    Args:
        lm: a transformers causal LM.
        tokenizer: what made the token ids.
        rows: (token ids, where they are from) of everything that the run reads.
        more: how many tokens may follow each.
        remedy: the options that make sequences shorter.
    """
    embedded = lm.get_input_embeddings().num_embeddings
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if tokenizer.vocab_size > embedded:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model embeds {embedded}: they do not belong "
            "together, or model.resize_token_embeddings was forgotten"
        )
    for ids, where in rows:
        if max(ids) >= embedded:
            token = tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(
                f"{where}: token {token!r} has id {max(ids)}, but the model embeds ids 0 to {embedded - 1}; after "
                "adding tokens use model.resize_token_embeddings"
            )
        if limit is not None and len(ids) + more > limit:
            tokens = f"up to {len(ids) + more}" if more else len(ids)
            raise InputError(f"{where}: {tokens} tokens, but the model has {limit} positions; lower {remedy}")


def load_lm(config: RunConfig, device: torch.device, *, trainable: bool = True) -> LanguageModel:
    """The causal LM that `config.model` names, without dropout; frozen, and without its adapters, unless trainable."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    # Its weights: where `model` holds adapters, those that they belong to.
    head_dtype = engine.head_dtype(config)
    adapters = find_adapters(config.model, config.revision)
    lora.check_options(config, adapters)
    four_bit.check(config, adapters=adapters is not None or config.lora_rank > 0)
    name, revision = (config.model, config.revision) if adapters is None else adapters.base
    options = {"dtype": engine.torch_dtype(config), "attn_implementation": config.attn_implementation}
    options |= four_bit.reading_options(config, device)
    lm = read_whole(AutoModelForCausalLM, name, revision=revision, **options)
    if config.load_in_4bit:
        four_bit.keep_trainable(lm)
    check_causal(lm, name)
    lm = lm.to(device)

    # The Hub's sampling defaults (top_k, repetition_penalty, ...) would bias the rollout: `save_lm` puts them back.
    lm.saved_generation_config, lm.generation_config = lm.generation_config, GenerationConfig()

    # What of it is trained.
    with_adapters = trainable and (adapters is not None or config.lora_rank > 0)
    if not trainable:
        lm.requires_grad_(False).eval()
    elif with_adapters:
        lm = lora.adapted(lm, config) if adapters is None else lora.continued(lm, adapters)
    switch_off_dropout(lm)
    if trainable and config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return LanguageModel(lm, config.loss_from, lora=with_adapters, head_dtype=head_dtype)


def load_to_sample(
    name: str,
    *,
    option: str = "model",
    revision: str | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options,
) -> nn.Module:
    """A transformers causal LM to sample from and score with, without its own sampling defaults; adapters merged in.

    Args:
        name: a Hub name or a local folder.
        option: which option named it, for errors.
        device: None is the GPU where there is one.
        dtype: None is bf16 on a GPU, fp32 on a CPU.
        revision: of `name` on the Hub.
        **options: of `from_pretrained`: attn_implementation.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    # Whole weights, or those that adapters belong to.
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    adapters = find_adapters(name, revision)
    base, of_base = (name, revision) if adapters is None else adapters.base
    lm = read_whole(AutoModelForCausalLM, base, option=option, dtype=dtype, revision=of_base, **options)
    check_causal(lm, base, option)
    lm = lm if adapters is None else lora.continued(lm, adapters).merge_and_unload()

    # The Hub's sampling defaults stand aside: a caller may want its stop tokens.
    lm.saved_generation_config, lm.generation_config = lm.generation_config, GenerationConfig()
    return lm.to(device).eval()


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout and layer-drop probability in a model to 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def save_lm(trained, tokenizer, folder: Path, *, merged: bool = False) -> None:
    """Write model, tokenizer, chat template and generation config in the Hub format; complete or not at all.

    Args:
        trained: the engine around a `LanguageModel`.
        tokenizer: written beside it.
        folder: where to.
        merged: write whole weights where there are adapters, instead of the adapters alone.
    """
    state = trained._zero3_consolidated_16bit_state_dict() if trained.zero_optimization_stage() == 3 else None
    if ranks.rank() == 0:
        lm = trained.module.lm
        base = trained.module.base
        if state is not None:
            # Without what a trainer has added to the language model, such as a value head.
            state = {name.removeprefix("lm."): state[name] for name in state if name.startswith("lm.")}
        if merged and trained.module.lora:
            whole = lm.state_dict() if state is None else state
            whole = {name.removeprefix("base_model.model."): value for name, value in whole.items()}
            lm, state = base, lora.merged(whole, base)
        training_config, base.generation_config = base.generation_config, base.saved_generation_config
        with listed_folder(folder) as unfinished:
            lm.save_pretrained(unfinished, state_dict=state)
            tokenizer.save_pretrained(unfinished)
        base.generation_config = training_config
    ranks.barrier()
