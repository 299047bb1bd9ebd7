"""Responses sampled from the policy, the verifiers' scores, and the batches of token ids made of them."""

import math
import time
from dataclasses import dataclass

import torch

from fused_rl.trainers import engine
from fused_rl.trainers.data import pad
from fused_rl.trainers.verifiers import check_scores


@dataclass
class Batch:
    """B sequences `prompt + response`, padded on the right to T tokens; per-token tensors are (B, T - 1).

    Row t of a per-token tensor belongs to token t + 1, the one that position t predicts.
    """

    input_ids: torch.Tensor
    """(B, T) int64."""
    response_mask: torch.Tensor
    """(B, T - 1) bool, True where token t + 1 is of the response, its EOS included."""

    def rows(self, index: torch.Tensor) -> "Batch":
        """The sequences at `index` (b,), padded no wider than they need."""
        mask = self.response_mask[index]
        width = int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1
        return Batch(self.input_ids[index, : width + 1], mask[:, :width])


def make_batch(prompts: list[list[int]], responses: list[list[int]], pad_id: int, device, *, width: int = 0) -> Batch:
    """Prompts and responses as one `Batch`; what a response is follows from lengths alone, never from token ids."""
    input_ids = pad([p + r for p, r in zip(prompts, responses, strict=True)], pad_id, width=width).to(device)
    position = torch.arange(1, input_ids.shape[1], device=device)
    start = torch.tensor([len(p) for p in prompts], device=device)[:, None]
    end = start + torch.tensor([len(r) for r in responses], device=device)[:, None]
    return Batch(input_ids, (position >= start) & (position < end))


def until_stop(response: list[int], stop_ids: list[int]) -> list[int]:
    """The response up to and including its first stop token; what follows it in the row is padding."""
    end = next((i for i, token in enumerate(response) if token in stop_ids), len(response) - 1)
    return response[: end + 1]


@torch.no_grad()
def generate(
    lm,
    prompts: list[list[int]],
    *,
    stop_ids: list[int],
    pad_id: int,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
    synced_gpus: bool = False,
) -> list[list[int]]:
    """One response per prompt, sampled from the whole softmax at `temperature`, or greedy at 0.

    Args:
        lm: a transformers causal LM.
        prompts: token ids.
        stop_ids: a response ends with (and includes) the first of these, or after `max_new_tokens`.
        pad_id: fills; may equal a stop token.
        batch_size: prompts per call of `lm.generate`, of similar length, padded on the left.
        synced_gpus: ranks keep in step though their responses end at different lengths (needed under ZeRO 3).

    Returns:
        Token ids of each response, in the order of the prompts.
    """
    from transformers import GenerationConfig

    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    options = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=stop_ids, pad_token_id=pad_id, use_cache=True, **sampling
    )
    device, responses = next(lm.parameters()).device, [[]] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = [prompts[i] for i in indices]
        input_ids = pad(batch, pad_id, left=True).to(device)
        attention_mask = pad([[1] * len(p) for p in batch], 0, left=True).to(device)
        output = lm.generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=options, synced_gpus=synced_gpus
        )
        for i, tokens in zip(indices, output[:, input_ids.shape[1] :].tolist(), strict=True):
            responses[i] = until_stop(tokens, stop_ids)
    return responses


@dataclass
class Run:
    """What all parts of the algorithm use."""

    config: object
    model: object
    """The DeepSpeed engine of the policy."""
    reference: object | None
    """The frozen starting model; None with LoRA, where it is the policy without its adapters."""
    tokenizer: object
    stop_ids: list[int]
    verifiers: dict[str, object]
    device: torch.device


@dataclass
class Rollout:
    """Responses to prompts, adjacent within a group, and what the verifiers say."""

    rows: list[dict]
    responses: list[list[int]]
    batch: Batch
    scores: dict[str, torch.Tensor]
    """(B,) fp32 of each verifier."""
    stopped: torch.Tensor
    """(B,) bool: ended by a stop token."""
    seconds: dict[str, float]

    @property
    def rewards(self) -> torch.Tensor:
        """(B,) fp32: the sum of the verifiers' scores."""
        return torch.stack(list(self.scores.values())).sum(0)


@torch.no_grad()
def roll_out(run: Run, prompts: list[tuple[list[int], dict]], copies: int, temperature: float) -> Rollout:
    """`copies` responses to each of this rank's (prompt ids, row)."""
    began = time.monotonic()
    prompts = [p for p in prompts for _ in range(copies)]
    ids, rows = [p for p, _ in prompts], [r for _, r in prompts]
    run.model.eval()
    responses = generate(
        run.model.module.lm,
        ids,
        stop_ids=run.stop_ids,
        pad_id=run.tokenizer.pad_token_id,
        max_new_tokens=run.config.max_new_tokens,
        temperature=temperature,
        batch_size=run.config.rollout_batch_size,
        synced_gpus=run.config.zero_stage == 3,
    )
    sampled = time.monotonic()
    stopped = [r[-1] in run.stop_ids for r in responses]
    texts = run.tokenizer.batch_decode([r[:-1] if s else r for r, s in zip(responses, stopped, strict=True)])
    scores = {k: torch.tensor(check_scores(k, v(texts, rows), len(texts))) for k, v in run.verifiers.items()}
    batch = make_batch(ids, responses, run.tokenizer.pad_token_id, run.device)
    seconds = {"time/rollout": sampled - began, "time/score": time.monotonic() - sampled}
    return Rollout(rows, responses, batch, scores, torch.tensor(stopped), seconds)


def rollout_metrics(config, rollout: Rollout, step: int) -> dict[str, float]:
    """What the responses were like, over all ranks."""
    rewards, lengths = rollout.rewards, torch.tensor([float(len(r)) for r in rollout.responses])
    groups = rewards.view(-1, config.group_size)
    columns = {
        "reward": rewards,
        "reward_std": groups.std(1).repeat_interleave(config.group_size),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(1).repeat_interleave(config.group_size),
        "completions/mean_length": lengths,
        "val/stop_rate": rollout.stopped,
    }
    for name, scores in rollout.scores.items():
        columns |= {f"rewards/{name}/mean": scores, f"rewards/{name}/std": scores.double().square()}
    count = len(rewards) * engine.world_size()
    totals = engine.global_sum(torch.stack([c.double().sum() for c in columns.values()]))
    metrics = dict(zip(columns, (totals / count).tolist(), strict=True))
    for name in rollout.scores:
        mean, square = metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"]
        metrics[f"rewards/{name}/std"] = math.sqrt(max(square - mean**2, 0))
    return (
        metrics
        | rollout.seconds
        | {
            "completions/min_length": -engine.global_max(-lengths.min()),
            "completions/max_length": engine.global_max(lengths.max()),
            "completions/clipped_ratio": 1 - metrics["val/stop_rate"],
            "val/num_eos_tokens": metrics["val/stop_rate"] * count,
            "objective/scores": metrics["reward"],
            "episode": step * count,
        }
    )
