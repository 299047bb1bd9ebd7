"""A scalar reward model: a causal language model's backbone and one linear head, read at the last attended token.

Attended tokens are moved to the front of their row before the forward pass. For a causal model that is what position
ids `cumsum(mask) - mask` and an attention mask mean, and it holds for every kind of position and attention: nothing
that follows a token reaches it, so padding on any side, in the middle, or with a token that the text also uses cannot
change a score.

Left out: encoders, bidirectional models, heads of more than one layer or label.
"""

import math

import torch
from torch import nn

from fused_rl.trainers.data.batch import pad
from fused_rl.trainers.data.sources import base_of, find_adapters
from fused_rl.trainers.models import lora
from fused_rl.trainers.models.language_model import NOT_A_MODEL, check_weights, switch_off_dropout, unreadable
from fused_rl.trainers.models.packing import Packed, inputs_of
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.text import in_a_line


class RewardModel(nn.Module):
    """One score per sequence, normalised by constants that are saved with the model.

    The stock `...ForSequenceClassification` inside holds the weights and the config, so what is saved opens with
    `AutoModelForSequenceClassification`; its own `forward` is not used.
    """

    def __init__(self, classifier: nn.Module):
        super().__init__()
        _check_scalar(classifier.config, classifier.config.name_or_path or type(classifier).__name__)
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise InputError(
                f"{type(classifier).__name__} has no linear head `score`: a reward model needs a causal LM"
            )
        self.classifier = classifier
        switch_off_dropout(classifier)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype=torch.float32,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: str = lora.ALL_LINEAR,
        **options,
    ):
        """A reward model from a causal LM (its head new) or from a saved reward model (its head as saved).

        Args:
            name: a Hub name or a local folder.
            dtype: of weights and activations; scores are fp32 in any case.
            lora_rank: train low-rank adapters of this rank, and the head; 0 for all weights.
            lora_alpha: scale of the adapters: alpha / rank.
            lora_targets: names of linear layers that get adapters, with commas between, or all-linear.
            **options: revision and attn_implementation, as transformers takes them.

        Raises:
            InputError (a ValueError): num_labels is not 1, weights are missing, it is not a causal LM, or it holds
                adapters alone.
        """
        from transformers import AutoConfig

        name = str(name)
        revision = options.get("revision")
        if find_adapters(name, revision) is not None:
            raise InputError(
                f"{name!r} holds adapters alone, and a reward model or critic starts from whole weights: save them "
                "merged (--save_merged), or name another model (of PPO's critic: --critic FOLDER or --critic shared)"
            )
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        except Exception as error:  # OSError, ValueError, JSON errors
            raise InputError(f"{name!r} is {NOT_A_MODEL}: {in_a_line(error)}") from error
        trained = has_score_head(config)
        if trained:
            _check_scalar(config, name)
        config.num_labels = 1
        reading = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False, **options}
        try:
            classifier, report = _classifier_class(config).from_pretrained(name, config=config, dtype=dtype, **reading)
        except InputError:
            raise
        except Exception as error:  # damaged safetensors, unknown attention, …
            raise unreadable(repr(name), error, options.get("attn_implementation")) from error
        check_weights(classifier, name)
        model = cls(classifier)
        if report["mismatched_keys"]:  # a head of several labels whose config does not say so
            raise InputError(_several_labels(name, f"weights of other shapes: {sorted(report['mismatched_keys'])}"))
        lacking = set(report["missing_keys"]) - {"score.weight"}
        if lacking or (trained and report["missing_keys"]):
            raise InputError(
                f"{name!r} lacks weights of {type(classifier).__name__}: {sorted(report['missing_keys'])[:5]}"
            )
        if "score.weight" in report["missing_keys"]:
            model.reset_head()
        if lora_rank:
            lora.adapt_in_place(classifier, rank=lora_rank, alpha=lora_alpha, targets=lora_targets)
        return model

    @torch.no_grad()
    def reset_head(self) -> None:
        """Draw the head from N(0, 1 / sqrt(h + 1)) (arXiv:2009.01325, appendix B), partitioned by ZeRO 3 or not."""
        from transformers.integrations import is_deepspeed_zero3_enabled

        head = self.classifier.score
        std = 1 / math.sqrt(head.in_features + 1)
        if not is_deepspeed_zero3_enabled():
            head.weight.normal_(std=std)
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(head.weight, modifier_rank=0):
            head.weight.normal_(std=std)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        packed: Packed | None = None,
    ) -> torch.Tensor:
        """Score sequences, whatever their padding.

        Args:
            input_ids: (B, T) int64; what stands where the mask is 0 is never read.
            attention_mask: (B, T), nonzero where a token counts.
            packed: instead of both, B sequences several to a row (packing.py), read at `packed.states`.

        Returns:
            (B,) fp32: (raw score - score_mean) / score_std, differentiable in the weights.

        Raises:
            ValueError: shapes that differ, or a row without a token.
        """
        if packed is None:
            last = self._last_states(input_ids, attention_mask)
        else:
            inputs = inputs_of(self.classifier, packed)
            hidden = self.classifier.base_model(**inputs, use_cache=False).last_hidden_state
            last = hidden.flatten(0, 1)[packed.states]
        # Row by row, not as a matrix product, whose order of summation depends on the batch.
        raw = (last.float() * self.classifier.score.weight.float()).sum(1)
        return (raw - self.score_mean) / self.score_std

    def _last_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, H): the state of the last attended token of each row."""
        if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
            shapes = f"{tuple(input_ids.shape)} and {tuple(attention_mask.shape)}"
            raise ValueError(f"input_ids and attention_mask must both be (B, T), got {shapes}")
        attended = attention_mask != 0
        lengths = attended.sum(1)
        if input_ids.numel() == 0 or not lengths.all():
            raise ValueError(f"rows {(lengths == 0).nonzero().flatten().tolist()} have no attended token to score")
        width = int(lengths.max())
        front = (~attended).byte().argsort(dim=1, stable=True)[:, :width]
        pads = torch.arange(width, device=lengths.device) >= lengths[:, None]
        tokens = input_ids.gather(1, front).masked_fill(pads, 0)  # a pad id may lie outside the vocabulary
        everything = torch.ones_like(tokens)  # says so: without a mask some models warn of pads, or look for them
        backbone = self.classifier.base_model(input_ids=tokens, attention_mask=everything, use_cache=False)
        hidden = backbone.last_hidden_state
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]

    @property
    def score_mean(self) -> float:
        """What is subtracted from a raw score."""
        return getattr(self.classifier.config, "score_mean", 0.0)

    @property
    def score_std(self) -> float:
        """What a raw score is divided by, after the mean is subtracted."""
        return getattr(self.classifier.config, "score_std", 1.0)

    def normalize(self, scores: torch.Tensor) -> None:
        """Set the constants so that these scores (N,), which this model gave, would have mean 0 and std 1."""
        scores = scores.double()
        mean, std = scores.mean().item(), scores.std().item()
        if len(scores) < 2 or not 0 < std < math.inf:
            raise InputError(f"{len(scores)} reference scores with standard deviation {std} cannot be normalised")
        # Plain numbers in the config, not buffers: an engine would round those to bf16.
        self.set_normalization(self.score_mean + self.score_std * mean, self.score_std * std)

    def set_normalization(self, mean: float, std: float) -> None:
        """Score (raw - mean) / std from now on."""
        self.classifier.config.score_mean, self.classifier.config.score_std = mean, std

    def save_pretrained(self, folder: str, state_dict: dict | None = None) -> None:
        """Write config and weights so that `AutoModelForSequenceClassification` opens them; adapters are merged.

        Args:
            folder: where to.
            state_dict: this module's, where its own weights are partitioned.
        """
        state = self.state_dict() if state_dict is None else state_dict
        state = {key.removeprefix("classifier."): value for key, value in state.items()}
        self.classifier.save_pretrained(folder, state_dict=lora.merged(state, self.classifier))


def collate(sequences: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of each sequence as (input_ids, attention_mask), both (B, T) int64."""
    attended = [[1] * len(sequence) for sequence in sequences]
    return pad(sequences, 0).to(device), pad(attended, 0).to(device)


def check_finite(scores: torch.Tensor, rows: list[str]) -> None:
    """Raise on a NaN or an Inf in scores (N,) or (N, ...), naming the rows that have one."""
    bad = (~scores.isfinite()).nonzero()[:, 0].unique().tolist()
    if bad:
        found = "; ".join(f"{rows[i]}: {scores[i].tolist()}" for i in bad[:10])
        raise InputError(f"{len(bad)} of {len(scores)} rows have a score that is NaN or infinite: {found}")


def has_score_head(config) -> bool:
    """Whether a saved model's config is that of a sequence classifier: reward models and critics are saved as such."""
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def check_reads_policy(
    what: str, name: str, model: RewardModel, tokenizer, policy: str, revision: str | None = None
) -> None:
    """Refuse a reward model or critic that reads other words in the policy's token ids, or has no row for them.

    Args:
        what: "reward model" or "critic", for the error.
        name: its folder or Hub name, where its tokenizer is too.
        model: it, loaded.
        tokenizer: the policy's.
        policy: the policy's folder or Hub name.
        revision: of the policy.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{what} {name!r} has no tokenizer to compare with that of the policy {policy!r}: save the one it was "
            f"trained with beside its weights ({type(error).__name__}: {error})"
        ) from error
    ours = tokenizer.get_vocab()
    if theirs != ours:
        differing = sorted(ours.items() ^ theirs.items(), key=lambda pair: (pair[1], pair[0]))
        examples = ", ".join(f"{token!r} = {i}" for token, i in differing[:4])
        raise InputError(
            f"{what} {name!r} has another tokenizer than the policy {policy!r} ({len(differing)} entries differ: "
            f"{examples}), so it would read other words in the policy's token ids; train it from a model with the "
            f"policy's tokenizer: fused-rl reward --model {policy}"
        )
    weights, revision = base_of(policy, revision)
    needed = AutoConfig.from_pretrained(weights, revision=revision).get_text_config().vocab_size
    there = model.classifier.get_input_embeddings().num_embeddings
    if there < needed:
        raise InputError(
            f"{what} {name!r} has {there} token embeddings, the policy {policy!r} samples from {needed} tokens; train "
            f"it from a model of the policy's vocabulary: fused-rl reward --model {policy}"
        )


def _check_scalar(config, name: str) -> None:
    if config.num_labels != 1:
        raise InputError(_several_labels(name, f"num_labels={config.num_labels}"))


def _several_labels(name: str, found: str) -> str:
    return (
        f"{name!r} has {found}; a reward is one number, so num_labels must be 1 (the default of "
        "AutoModelForSequenceClassification is 2). Start from the causal language model, or give it a new head: "
        f"AutoModelForSequenceClassification.from_pretrained({name!r}, num_labels=1, ignore_mismatched_sizes=True)"
        ".save_pretrained(folder), and train that"
    )


def _classifier_class(config):
    """The stock sequence classifier of the architecture, or one made the stock way where transformers has none."""
    from transformers import AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise InputError(f"{config.model_type!r} is not a causal language model that transformers knows")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    base = next(c for c in causal.__mro__ if c.__name__.endswith("PreTrainedModel"))
    classifier = type(
        causal.__name__.removesuffix("ForCausalLM") + "ForSequenceClassification",
        (GenericForSequenceClassification, base),
        {"base_model_prefix": base.base_model_prefix},
    )
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)  # else it skips stock configs
    return classifier
