"""A sampler in this process: transformers' `generate` on the model that is trained."""

import torch

from fused_rl.trainers.data import pad
from fused_rl.trainers.rollout import Response, Sampling


class TransformersSampler:
    """Draws from the policy itself, so nothing needs to be published.

    Args:
        model: the DeepSpeed engine around a `LanguageModel`.
        pad_id: fills batches; may equal a stop token.
        batch_size: prompts generated together, of similar length.
        synced_gpus: ranks keep in step though their responses end at different lengths (needed under ZeRO 3).
    """

    def __init__(self, model, *, pad_id: int, batch_size: int, synced_gpus: bool):
        self.model, self.pad_id, self.batch_size, self.synced_gpus = model, pad_id, batch_size, synced_gpus

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """One response per prompt, in their order."""
        self.model.eval()
        options = {"pad_id": self.pad_id, "batch_size": self.batch_size, "synced_gpus": self.synced_gpus}
        responses = generate(self.model.module.lm, prompts, sampling, **options)
        return [Response(ids, "stop" if ids and ids[-1] in sampling.stop_ids else "length") for ids in responses]

    def publish(self, step: int) -> None:
        """Nothing to do: the weights are the policy's."""


@torch.no_grad()
def generate(
    lm, prompts: list[list[int]], sampling: Sampling, *, pad_id: int, batch_size: int, synced_gpus: bool = False
) -> list[list[int]]:
    """Token ids of one response per prompt, in their order, its stop token included.

    Args:
        lm: a transformers causal LM.
        prompts: token ids.
        sampling: the whole softmax at a temperature, or greedy at 0.
        pad_id, batch_size, synced_gpus: as `TransformersSampler`.
    """
    from transformers import GenerationConfig

    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    options = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_ids),
        pad_token_id=pad_id,
        use_cache=True,
        **(drawn if sampling.temperature else {}),
    )
    device, responses = next(lm.parameters()).device, [[]] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        # Padded on the left, so that every response begins in the same column.
        batch = [prompts[i] for i in indices]
        input_ids = pad(batch, pad_id, left=True).to(device)
        attention_mask = pad([[1] * len(prompt) for prompt in batch], 0, left=True).to(device)
        output = lm.generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=options, synced_gpus=synced_gpus
        )
        for i, tokens in zip(indices, output[:, input_ids.shape[1] :].tolist(), strict=True):
            responses[i] = until_stop(tokens, sampling.stop_ids)
    return responses


def until_stop(response: list[int], stop_ids) -> list[int]:
    """The response up to and including its first stop token; what follows it in the row is padding."""
    end = next((i for i, token in enumerate(response) if token in stop_ids), len(response) - 1)
    return response[: end + 1]
