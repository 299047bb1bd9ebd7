"""A scalar reward model: a causal language model's backbone and one linear head, read at the last attended token.

Attended tokens are moved to the front of their row: in a causal model no padding can then change a score. Left out:
encoders, bidirectional models, heads of more than one layer or label.
"""

import math
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base import engine, ranks
from ..base.text import InputError
from ..data.batch import make_batch, on_device, pad
from ..data.encode import load_tokenizer
from ..options import ModelConfig, RunConfig
from . import lora
from .head import causal_states
from .language_model import prepare_layers, prepare_modules, read, readable, save
from .packing import Costs, InRows, pack, padded_states, unpad, unpadded_costs
from .scoring import by_length

if TYPE_CHECKING:
    from .sequences import SequenceParts


class RewardModel(nn.Module):
    """One score per sequence, normalised by constants in the config of the stock classifier inside."""

    def __init__(self, classifier: Any):
        super().__init__()
        self.classifier = classifier
        self.lora = False
        self.sequence_parts: SequenceParts | None = None
        """How sequences are divided over processes; None where each is whole."""
        self.unpadded_costs: Costs | None = None  # where its rows need no padding
        prepare_modules(classifier)

    @property
    def base(self) -> Any:
        """Return the stock classifier, a model of transformers as `LanguageModel.base` is."""
        return self.classifier

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype=torch.float32,
        device: torch.device | str = "cpu",
        adapters: ModelConfig | None = None,
        **options,
    ):
        """Return a reward model from a causal LM (with a new head) or from a saved reward model.

        Args:
            name: a Hub name or a local folder.
            dtype: of weights and activations; scores are fp32 in any case.
            device: where the model is read to; meta leaves out the numbers, as a dry run does.
            adapters: its `lora_rank`, `lora_alpha` and `lora_targets`; beside low-rank adapters the head is trained.
            **options: revision and attn_implementation, as transformers takes them, and `held`, as `read` does.

        Raises:
            InputError (a ValueError): several labels, weights that are missing, no causal LM, or adapters alone.
        """
        from transformers import AutoConfig, AutoModelForSequenceClassification

        # Its weights; only a language model may lack the head.
        name = str(name)
        revision = options.get("revision")
        if lora.find(name, revision) is not None:
            problem = f"{name!r} holds adapters alone, and a reward model or critic starts from whole weights"
            raise InputError(
                f"{problem}: save them with --save_merged, or name another model (PPO: --critic FOLDER)"
            )
        with readable(name, options.get("attn_implementation")):
            model_config: Any = AutoConfig.from_pretrained(
                name, revision=revision, trust_remote_code=False
            )
            trained = has_score_head(model_config)
            # A language model's config has two labels, transformers' default.
            model_config.num_labels = model_config.num_labels if trained else 1
            options |= {"revision": revision, "dtype": dtype, "config": model_config}
            classifier, report = read(AutoModelForSequenceClassification, name, device, **options)
        # With two labels a reward is a pair, and both heads would be trained.
        if model_config.num_labels != 1:
            raise InputError(
                f"{name!r} has num_labels={model_config.num_labels}; a reward is one number: give a causal LM"
            )
        # More than one layer would be left out, and what reads later tokens would read pads.
        head = getattr(classifier, "score", None)
        if type(head) is not nn.Linear or head.bias is not None:
            problem = f"{name!r} is a {type(classifier).__name__}, whose head is no single product"
            raise InputError(
                f"{problem}; expected a causal language model, or a reward model of one"
            )
        # transformers fills in whatever is missing at random, which is right for a new head alone.
        lacking = set(report["missing_keys"])
        if lacking - {"score.weight"} or (trained and lacking):
            raise InputError(
                f"{name!r} lacks weights of {type(classifier).__name__}: {sorted(lacking)[:5]}"
            )

        model = cls(classifier)
        if not engine.is_without_weights(classifier):
            causal_states(classifier)
        if lacking:
            model.reset_head()
        if adapters is not None and adapters.lora_rank:
            from .adapters import adapt_in_place

            adapt_in_place(classifier, adapters)
            model.lora = True
        return model

    @torch.no_grad()
    def reset_head(self) -> None:
        """Draw the head from N(0, 1 / sqrt(h + 1)) (arXiv:2009.01325, appendix B), partitioned by ZeRO 3 or not."""
        head = self.classifier.score
        with engine.gathered(head.weight, written=True):
            head.weight.normal_(std=1 / math.sqrt(head.in_features + 1))

    def trial_inputs(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inputs of a training pass over sequences (B, T) without pads, by which memory is measured."""
        return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        packed: InRows | None = None,
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
        if packed is not None:
            return self.score_states(
                packed.states_of(self.classifier, self.classifier.base_model, "last_hidden_state")
            )
        assert input_ids is not None and attention_mask is not None
        if attention_mask.shape != input_ids.shape:
            shapes = f"{tuple(input_ids.shape)} and {tuple(attention_mask.shape)}"
            raise ValueError(f"input_ids and attention_mask must both be (B, T), got {shapes}")
        is_attended = attention_mask != 0
        lengths = is_attended.sum(1)
        # This is the one wait for the device.
        counts = lengths.tolist()
        if not all(counts):
            raise ValueError(
                f"rows {[i for i, n in enumerate(counts) if not n]} have no attended token to score"
            )
        # Columns that are padding in every row are not computed.
        width = max(counts)
        # Attended tokens first, in their order; a pad id may lie outside the vocabulary, so pads
        # become token 0.
        front = (~is_attended).byte().argsort(dim=1, stable=True)[:, :width]
        pads = torch.arange(width, device=lengths.device) >= lengths[:, None]
        tokens = input_ids.gather(1, front).masked_fill(pads, 0)

        row = torch.arange(len(tokens), device=lengths.device)
        if self.sequence_parts is not None:
            # Places are those of tokens that predict another one, so one more pad comes after the last.
            padded = nn.functional.pad(tokens, (0, 1))
            backbone, places = self.classifier.base_model, row * width + lengths - 1
            return self.sequence_parts.score_places(backbone, padded, places, self.score_states)
        # A causal model never reads what follows, so there is no mask.
        hidden = padded_states(self.classifier.base_model, tokens, "last_hidden_state")
        return self.score_states(hidden[row, lengths - 1])

    def score_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scores (...) fp32 of hidden states (..., H), row by row, so that no score depends on the batch."""
        weight = self.classifier.score.weight.float()
        # A matrix product may sum in another order for another number of rows.
        raw = (states.float() * weight).sum(-1)
        return (raw - self.score_mean) / self.score_std

    @property
    def score_mean(self) -> float:
        """The mean that is subtracted from a raw score."""
        return getattr(self.classifier.config, "score_mean", 0.0)

    @property
    def score_std(self) -> float:
        """The deviation that a raw score is divided by."""
        return getattr(self.classifier.config, "score_std", 1.0)

    def normalize(self, scores: torch.Tensor) -> None:
        """Set the constants so that these scores (N,), which this model gave, would have mean 0 and std 1."""
        scores = scores.double()
        mean, std = scores.mean().item(), scores.std().item()
        if not 0 < std < math.inf:
            raise InputError(
                f"{len(scores)} reference scores with standard deviation {std} cannot be normalised"
            )
        # Plain numbers in the config, not buffers: an engine would round those to bf16.
        self.set_normalization(self.score_mean + self.score_std * mean, self.score_std * std)

    def set_normalization(self, mean: float, std: float) -> None:
        """Score (raw - mean) / std from now on."""
        self.classifier.config.score_mean = mean
        self.classifier.config.score_std = std

    def save_pretrained(self, folder: Path | str, state_dict: dict | None = None) -> None:
        """Write what `AutoModelForSequenceClassification` opens; `state_dict` is that of a partitioned model."""
        classifier, state = self.classifier, state_dict
        if state is not None:
            state = {key.removeprefix("classifier."): value for key, value in state.items()}
        if self.lora:
            from .adapters import merge

            # The folder holds whole weights, so adapters are merged into them.
            classifier, state = merge(classifier, state), None
        classifier.save_pretrained(folder, state_dict=state)


class Critic(RewardModel):
    """A reward model that is read before every token; a new head is zero, so that its values are 0 at first."""

    @torch.no_grad()
    def reset_head(self) -> None:
        """Set the head to zero."""
        self.classifier.score.weight.zero_()

    def trial_inputs(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the same for the values before each token."""
        mask = torch.ones_like(input_ids[:, 1:], dtype=torch.bool)
        return {"input_ids": input_ids, "mask": mask}

    def forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        packed: InRows | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the expected return (B, T - 1) fp32 before each token of `input_ids` (B, T); 0 where masked.

        `packed` are the same sequences in rows, and `places` (N,) the True places of the flattened mask.
        """
        backbone = self.classifier.base_model
        if self.sequence_parts is None and packed is None:
            # The state of the last token would be the value after it, where the episode is over.
            hidden = padded_states(backbone, input_ids, "last_hidden_state")[:, :-1]
            return torch.where(mask, self.score_states(hidden), 0)
        places = mask.flatten().nonzero()[:, 0] if places is None else places
        if self.sequence_parts is not None:
            values = self.sequence_parts.score_places(
                backbone, input_ids, places, self.score_states
            )
        else:
            assert packed is not None
            states = packed.states_of(self.classifier, backbone, "last_hidden_state")
            values = self.score_states(states)
        return values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)


def collate(sequences: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of each sequence as (input_ids, attention_mask), both (B, T) int64."""
    masks = [[1] * len(sequence) for sequence in sequences]
    return on_device(pad(sequences, 0), device), on_device(pad(masks, 0), device)


def pack_pairs(sequences: list[list[int]], costs: Costs, device) -> InRows | None:
    """Return each pair of neighbours in a row, with its common beginning once; None if a row for each costs no more."""
    prompts = []
    responses = []
    for a, b in zip(sequences[::2], sequences[1::2], strict=True):
        # A prompt has one token at least; where two have none in common, each keeps a row of its own.
        common = max(1, len(commonprefix([a, b])))
        prompts += [a[:common], b[:common]]
        # The last token predicts one that nobody reads: with it, the last state is that of the response's last token.
        responses += [[*a[common:], 0], [*b[common:], 0]]
    batch = make_batch(prompts, responses, 0, device)
    packed = pack(batch, 2) if costs.masked else unpad(batch, costs)
    # Without a mask attention costs half as much, so a row for each can be cheaper.
    alone = costs.causal_flop(len(sequences), max(map(len, sequences)))
    if costs.masked and costs.flop(*packed.input_ids.shape) >= alone:
        return None
    last = batch.response_lengths.cumsum(0) - 1
    return packed._replace(states=packed.states[on_device(last, device)])


def load_reward_model(
    config: RunConfig, device: torch.device, *, kind: type[RewardModel] = RewardModel
) -> RewardModel:
    """Return the reward model, or the critic, that a run starts from, on its device."""
    model = kind.from_pretrained(
        config.model,
        dtype=engine.torch_dtype(config),
        device=device,
        adapters=config,
        held=config,
        revision=config.revision,
        attn_implementation=config.attn_implementation,
    )
    model = model.to(device)
    model.unpadded_costs = unpadded_costs(model.classifier, config.longest_sequence)
    model.sequence_parts = prepare_layers(model.classifier, config)
    return model


def save_reward_model(trained, tokenizer, folder: Path) -> None:
    """Write the reward model in an engine and its tokenizer, complete or not at all. Call on all ranks."""
    config = trained.module.classifier.config
    # The stock classifier cannot score a batch without a pad token.
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    save(trained, tokenizer, folder, trained.module.save_pretrained)


def check_finite(scores: torch.Tensor, rows: list[str]) -> None:
    """Raise on a NaN or an Inf in scores (N,) or (N, ...), naming the rows that have one."""
    is_bad = ~scores.isfinite()
    bad = is_bad.nonzero()[:, 0].unique().tolist()
    if bad:
        scores_of_rows = "; ".join(f"{rows[i]}: {scores[i].tolist()}" for i in bad[:10])
        raise InputError(
            f"{len(bad)} of {len(scores)} rows have a score that is NaN or infinite: {scores_of_rows}"
        )


def has_score_head(config) -> bool:
    """Return True for the config of a sequence classifier: reward models and critics are saved as such."""
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def check_reads_policy(kind: str, name: str, tokenizer, policy: str) -> None:
    """Refuse a reward model, critic or teacher `name` without the policy's tokenizer: its ids are other words."""
    # What both have cancels: what is left has another id, or is missing on one side.
    differing = tokenizer.get_vocab().items() ^ load_tokenizer(name).get_vocab().items()
    if differing:
        examples = sorted(differing, key=lambda entry: (entry[1], entry[0]))[:4]
        examples = ", ".join(f"{token!r} = {i}" for token, i in examples)
        remedy = "choose one that has it"
        if kind != "teacher":
            remedy = f"train it from a model with the policy's tokenizer: fused-rl reward --model {policy}"
        raise InputError(
            f"{kind} {name!r} has another tokenizer than the policy {policy!r} ({len(differing)} entries differ: "
            f"{examples}); {remedy}"
        )


class RewardScorer:
    """Scores (prompt ids, response ids) with a reward model, batched by length: what PPO and GRPO ask for rewards."""

    def __init__(self, model: Any, batch_size: int = 16):
        """model: a `RewardModel`, or the DeepSpeed engine around one (under ZeRO 3 every rank must call together)."""
        self.model = model
        self.batch_size = batch_size
        self.in_step = not isinstance(model, RewardModel) and model.zero_optimization_stage() == 3

    def __call__(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """Return the scores (N,) of N prompts with their responses, EOS included, fp32 on the CPU; all are finite."""
        scores = self.unchecked(prompt_ids, response_ids)
        check_finite(scores, [f"row {i}" for i in range(len(scores))])
        return scores

    @torch.no_grad()
    def unchecked(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """Return the scores as `__call__` does, also those that are NaN or infinite."""
        # In order of length, so that a batch has little padding.
        device = next(self.model.parameters()).device
        sequences = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
        lengths = [*map(len, sequences)]
        batches = by_length(range(len(sequences)), lengths, self.batch_size)
        scores = torch.zeros(len(sequences))
        for indices in batches:
            scores[indices] = self.model(*collate([sequences[i] for i in indices], device)).cpu()

        # ZeRO 3 gathers weights in every forward, so all ranks need the same number of them.
        if self.in_step:
            num_batches = int(ranks.global_max(torch.tensor(float(len(batches)))))
            for _ in range(num_batches - len(batches)):
                self.model(*collate([[0]], device))
        return scores
