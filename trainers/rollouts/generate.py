"""A sampler in this process, on the model that is trained: each prompt is computed once for all of its responses.

Where a model keeps its past in another form than keys and values, transformers' `generate` is used instead.
"""

import inspect
from collections.abc import Iterable
from itertools import chain, groupby

import torch
import torch.distributed as dist

from fused_rl import TokenSupport
from fused_rl.trainers.data.batch import pad
from fused_rl.trainers.rollouts.sampling import NoDistribution, Record, Sampling, truncated
from fused_rl.trainers.rollouts.types import Response

Drawn = tuple[list[list[int]], list[TokenSupport] | None, torch.Tensor]
"""Token ids of each response; what each token was drawn from, None for the whole vocabulary; and (B,) bool, of the
responses whose logits were NaN or infinite."""


class TransformersSampler:
    """Draws from the policy itself, so nothing needs to be published, and records what it draws from.

    Args:
        lm: a transformers causal LM; where it is trained, the one inside of the engine.
        pad_id: fills batches; may equal a stop token.
        batch_size: prompts generated together, of similar length.
        synced_gpus: ranks keep in step though their responses end at different lengths (needed under ZeRO 3).
    """

    records_support = True
    tells_logprobs = False  # the trainer would compute the same

    def __init__(self, lm, *, pad_id: int, batch_size: int, synced_gpus: bool = False):
        self.lm, self.pad_id, self.batch_size, self.synced_gpus = lm, pad_id, batch_size, synced_gpus
        self.step: int | None = None

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """One response per prompt, in their order; neighbours that are equal are computed once.

        Raises:
            NoDistribution: logits that are NaN or infinite, when the batch has been drawn.
        """
        # Those of similar length together.
        runs = [list(run) for _, run in groupby(range(len(prompts)), key=prompts.__getitem__)]
        runs.sort(key=lambda run: len(prompts[run[0]]))
        by_length = list(chain.from_iterable(runs))

        self.lm.eval()
        draw = _decode if _keeps_keys_and_values(self.lm) else _transformers_generate
        responses = {}
        for start in range(0, len(by_length), self.batch_size):
            indices = by_length[start : start + self.batch_size]
            ids_of = [prompts[i] for i in indices]
            drawn, supports, broken = draw(self.lm, ids_of, sampling, self.pad_id, self.synced_gpus)
            if broken.any():
                raise NoDistribution([indices[number] for number in broken.nonzero()[:, 0].tolist()], self.step)
            for i, ids, support in zip(indices, drawn, supports or [None] * len(drawn), strict=True):
                finish = "stop" if ids and ids[-1] in sampling.stop_ids else "length"
                responses[i] = Response(ids, finish, support=support)
        return [responses[i] for i in range(len(prompts))]

    def publish(self, step: int) -> None:
        """The weights are the policy's: only their step is noted, for errors."""
        self.step = step


def _keeps_keys_and_values(lm) -> bool:
    """Whether the past of a model is a key and a value per token, and positions can be told."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if "position_ids" not in inspect.signature(lm.forward).parameters or not lm._supports_default_dynamic_cache():
        return False
    layers = {type(layer) for layer in DynamicCache(config=lm.config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def _decode(lm, prompts: list[list[int]], sampling: Sampling, pad_id: int, synced_gpus: bool) -> Drawn:
    """One response per prompt; rows that have ended are computed no further."""
    # The distinct prompts, padded on the left, and then a row of the cache for every response.
    runs = [list(run) for _, run in groupby(prompts)]
    input_ids, mask = _left_padded([run[0] for run in runs], pad_id, lm.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    output = lm(
        input_ids=input_ids, attention_mask=mask, position_ids=position, use_cache=True, **_last_logits_alone(lm)
    )
    copies = torch.tensor([len(run) for run in runs], device=lm.device)
    row = torch.arange(len(runs), device=lm.device).repeat_interleave(copies)
    cache, logits, mask = output.past_key_values, output.logits[row, -1], mask[row]
    cache.batch_select_indices(row)
    length = mask.sum(1)

    # Token by token; `open_rows` are the responses that have not ended.
    responses, stop_ids = [[] for _ in prompts], torch.tensor(sampling.stop_ids, device=lm.device)
    record = Record(len(prompts)) if sampling.truncates else None
    open_rows, number = list(range(len(prompts))), torch.arange(len(prompts), device=lm.device)
    broken = torch.zeros(len(prompts), dtype=torch.bool, device=lm.device)  # looked at after the last token
    for step in range(1, sampling.max_new_tokens + 1):
        scores = _scores(logits, sampling)
        token, bad = _draw(scores, sampling)
        broken[number] |= bad
        if record is not None:
            if broken.any():
                return responses, None, broken
            record.note(scores[: len(open_rows)], open_rows)
        for response, drawn in zip(open_rows, token.tolist(), strict=False):
            responses[response].append(drawn)
        going = ~torch.isin(token, stop_ids) if open_rows else torch.zeros_like(token, dtype=torch.bool)
        if step == sampling.max_new_tokens or not _any_going(going, synced_gpus):
            break
        keep = going.nonzero()[:, 0]
        open_rows = [open_rows[i] for i in keep.tolist()]
        if not open_rows:  # another rank is still going: one row keeps step with it
            keep = torch.zeros(1, dtype=torch.int64, device=lm.device)
        if len(keep) < len(token):
            cache.batch_select_indices(keep)
            token, mask, length, number = token[keep], mask[keep], length[keep], number[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = lm(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=length[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        cache, logits, length = output.past_key_values, output.logits[:, -1], length + 1
    return responses, None if record is None else record.of_responses(), broken


def _scores(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(B, V) -> (B, V): at the temperature in fp32, -inf where the sampling truncates; greedy, as they are."""
    if not sampling.temperature:
        return logits
    scores = logits.float() / sampling.temperature
    return truncated(scores, sampling) if sampling.truncates else scores


def _draw(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, V) -> (B,) int64, a token of each row; (B,) bool, whether there was none to draw: scores NaN or infinite."""
    if not sampling.temperature:
        token = scores.argmax(-1)
        return token, ~scores.gather(1, token[:, None])[:, 0].isfinite()
    probabilities = torch.softmax(scores, -1)
    bad = probabilities[:, 0].isnan()  # as the whole row is then
    if probabilities.device.type != "cpu":
        # What torch.multinomial does for one token, less its look at every probability, which waits for the device.
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1), bad
    # There multinomial draws a random number for every token of the vocabulary.
    token = token_at(probabilities, torch.rand(len(probabilities), dtype=torch.float64))
    return token.clamp(max=scores.shape[1] - 1), bad


def token_at(probabilities: torch.Tensor, quantile: torch.Tensor) -> torch.Tensor:
    """(B, V), (B,) fp64 in [0, 1) -> (B,) int64: the token at a quantile of each row, none of probability 0."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.minimum(quantile * total, total.nextafter(torch.zeros_like(total)))  # the product may be rounded up
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]


def _any_going(going: torch.Tensor, synced_gpus: bool) -> bool:
    """Whether a response goes on, here or (where ranks must keep in step) on any rank."""
    some = going.any()
    if synced_gpus:
        some = some.int()
        dist.all_reduce(some, op=dist.ReduceOp.MAX)
    return bool(some)


def _last_logits_alone(lm) -> dict[str, int]:
    """For a prompt the logits of its last token alone, where the model can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(lm.forward).parameters else {}


def _transformers_generate(lm, prompts, sampling: Sampling, pad_id: int, synced_gpus: bool) -> Drawn:
    """As `_decode`, for any model that transformers can generate with."""
    from transformers import GenerationConfig, LogitsProcessorList

    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    drawn["min_p"] = sampling.min_p or None
    watch = _Watch()
    options = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_ids),
        pad_token_id=pad_id,
        use_cache=True,
        output_scores=sampling.truncates,
        return_dict_in_generate=True,
        **(drawn if sampling.temperature else {}),
    )
    input_ids, mask = _left_padded(prompts, pad_id, lm.device)
    given = {"input_ids": input_ids, "attention_mask": mask, "logits_processor": LogitsProcessorList([watch])}
    output = lm.generate(**given, generation_config=options, synced_gpus=synced_gpus)
    tokens = output.sequences[:, input_ids.shape[1] :]
    responses = [until_stop(response, sampling.stop_ids) for response in tokens.tolist()]
    if not sampling.truncates or watch.broken.any():
        return responses, None, watch.broken
    lengths = torch.tensor([len(response) for response in responses])
    drawn_from = TokenSupport.from_scores(output.scores).to("cpu")  # a row for padding, too
    own = torch.arange(tokens.shape[1]) < lengths[:, None]
    return responses, drawn_from.select(own.flatten()).split(lengths.tolist()), watch.broken


class _Watch:
    """Notes which rows' logits are NaN or infinite, and gives `generate` others, which it can draw from."""

    def __init__(self):
        self.broken = torch.zeros(())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bad = ~scores.amax(-1).isfinite()
        self.broken = bad | self.broken.bool().to(bad.device)
        return torch.where(bad[:, None], 0, scores)


def _left_padded(prompts: list[list[int]], pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, each (B, P), such that every response begins in the same column."""
    input_ids = pad(prompts, pad_id, left=True).to(device)
    mask = pad([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device)
    return input_ids, mask


def until_stop(response: list[int], stop_ids: Iterable[int]) -> list[int]:
    """The response up to and including its first stop token; what follows it in the row is padding."""
    end = next((i for i, token in enumerate(response) if token in stop_ids), len(response) - 1)
    return response[: end + 1]
