"""What a trainer's model is trained on: the token ids of each sequence, which of them are trained, and their scores."""

from typing import Any, NamedTuple

import torch

from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.models.reward_model import RewardModel


class Trained(NamedTuple):
    """A sequence that went through the model in a training step."""

    ids: list[int]
    trained: list[int]
    """The last of these, from the first one on that is trained."""
    logprobs: torch.Tensor
    """(n,) of `trained`, in nats; (1,) the score, of a reward model."""


class Watched:
    """The sequences of a run in their order, and the model that it trains."""

    def __init__(self, monkeypatch):
        self.rows: list[Trained] = []
        self.model: Any = None
        score, forward = LanguageModel.score, RewardModel.forward

        def noted_score(model, input_ids, mask, *args, **options):
            found = score(model, input_ids, mask, *args, **options)
            if model.training:
                self.model = model.lm
                for ids, on, logprobs in zip(input_ids, mask, found.logprobs, strict=True):
                    places = on.nonzero()[:, 0]
                    # Row t of the mask is of token t + 1.
                    first, last = places[0] + 1, places[-1] + 2
                    row = ids[:last].tolist(), ids[first:last].tolist(), logprobs[on].detach()
                    self.rows.append(Trained(*row))
            return found

        def noted_forward(model, input_ids, attention_mask, **options):
            scores = forward(model, input_ids, attention_mask, **options)
            if model.training:
                self.model = model.classifier
                for ids, on, value in zip(input_ids, attention_mask, scores, strict=True):
                    self.rows.append(Trained(ids[on.bool()].tolist(), [], value.detach()[None]))
            return scores

        monkeypatch.setattr(LanguageModel, "score", noted_score)
        monkeypatch.setattr(RewardModel, "forward", noted_forward)
