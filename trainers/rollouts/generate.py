"""A sampler in this process, on the model that is trained: each prompt is computed once for all of its responses.

Where a model keeps its past in another form than keys and values, transformers' `generate` is used instead.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fused_rl import TokenSupport
from fused_rl.trainers.base.screen import bar
from fused_rl.trainers.data.batch import on_device, pad
from fused_rl.trainers.rollouts.options import ROLLOUT_BATCH_SIZE
from fused_rl.trainers.rollouts.sampling import NoDistribution, Record, Sampling, processed_scores
from fused_rl.trainers.rollouts.types import Response, Sampler

POLL_EVERY = 16  # tokens of each response, on an accelerator
SUPPORT_BYTES = (
    1 << 28
)  # bytes of kept sets that are noted between two polls, at most where one token's are fewer


class Sampled(NamedTuple):
    """B responses."""

    ids: list[list[int]]
    supports: list[TokenSupport] | None
    """The kept sets of each; None for the whole vocabulary."""
    broken: torch.Tensor
    """(B,) bool: logits that are NaN or infinite."""
    logprobs: list[list[float]] | None = None
    """Log-probability of each token, in nats; None if not requested."""


class TransformersSampler(Sampler):
    """Samples from the policy itself, so nothing needs to be published, and records kept sets.

    Args:
        lm: a transformers causal LM; where it is trained, the one inside of the engine.
        pad_id: fills batches; may equal a stop token.
        batch_size: responses generated together, of similar length; None is what `responses_together` returns.
        synced_gpus: ranks keep in step though their responses end at different lengths (needed under ZeRO 3).
        poll_every: tokens between two polls of which responses have ended; None is 1 on a CPU, and 16 where the host
            would wait for the device.
    """

    records_support = True
    tells_logprobs = False  # the trainer would compute the same
    is_checked = False

    def __init__(
        self,
        lm,
        *,
        pad_id: int,
        batch_size: int | None,
        synced_gpus: bool = False,
        poll_every: int | None = None,
    ):
        self.lm = lm
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.synced_gpus = synced_gpus
        self.poll_every = poll_every or (1 if lm.device.type == "cpu" else POLL_EVERY)
        self.step: int | None = None

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt, in their order; neighbours that are equal are computed once.

        Raises:
            NoDistribution: logits that are NaN or infinite, when the batch has been sampled.
        """
        # Those of similar length together.
        runs = [list(run) for _, run in groupby(range(len(prompts)), key=prompts.__getitem__)]
        runs.sort(key=lambda run: len(prompts[run[0]]))
        by_length = list(chain.from_iterable(runs))

        longest = max(map(len, prompts), default=0)
        batch_size = self.batch_size or responses_together(
            self.lm, longest + sampling.max_new_tokens
        )

        # Kept sets are noted between two polls: fewer tokens, where they would fill a device's memory.
        every = self.poll_every
        if sampling.truncates:
            noted = batch_size * self.lm.config.get_text_config().vocab_size
            every = max(1, min(every, SUPPORT_BYTES // noted))
        self.lm.eval()
        generator = self.generator(prompts, sampling)
        decode = self._decode if keeps_keys_and_values(self.lm) else self._generate
        responses = {}
        for start in bar(range(0, len(by_length), batch_size), "sampling"):
            indices = by_length[start : start + batch_size]
            batch = [prompts[i] for i in indices]
            found = decode(batch, sampling, every, generator)
            if found.broken.any():
                numbers = found.broken.nonzero()[:, 0].tolist()
                raise NoDistribution([indices[number] for number in numbers], self.step)
            nothing = [None] * len(indices)
            rows = zip(
                indices,
                found.ids,
                found.logprobs or nothing,
                found.supports or nothing,
                strict=True,
            )
            for i, ids, logprobs, support in rows:
                finish = "stop" if ids and ids[-1] in sampling.stop_ids else "length"
                responses[i] = Response(ids, finish, logprobs, support)
        return [responses[i] for i in range(len(prompts))]

    def _decode(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        every: int,
        generator: torch.Generator | None,
    ) -> Sampled:
        """Return one response per prompt; after `every` steps the host waits for the device and polls which ended."""
        # On the device until the end: token ids by step and response, and which responses are broken.
        rows = _Rows(self.lm, prompts, sampling, self.pad_id)
        device = self.lm.device
        count = len(prompts)
        ids = torch.zeros(sampling.max_new_tokens, count, dtype=torch.int64, device=device)
        logprobs = torch.zeros(ids.shape, device=device) if self.tells_logprobs else None
        broken = torch.zeros(count, dtype=torch.bool, device=device)
        ended = broken.clone()  # by row, of which there is one for each response at first
        stop_ids = on_device(torch.tensor(sampling.stop_ids), device)
        record = Record(count) if sampling.truncates else None

        # Token by token. Tokens of a row after its stop token count for nothing.
        for step in range(sampling.max_new_tokens):
            scores = processed_scores(rows.logits, sampling)
            token, bad = _draw(scores, sampling, generator)
            ids[step].scatter_(0, rows.number, token)
            if logprobs is not None:  # greedy ones are of the softmax at temperature 1
                of_all = scores.float().log_softmax(-1)
                chosen = of_all.gather(1, token[:, None])[:, 0]
                logprobs[step].scatter_(0, rows.number, chosen)
            broken[rows.number] |= bad & ~ended
            if record is not None:
                record.note(scores, ended, rows.numbers)
            ended = ended | (token[:, None] == stop_ids).any(1)
            if step + 1 == sampling.max_new_tokens:
                break
            if (step + 1) % every == 0:
                going, anywhere = _poll_finished(ended, record, self.synced_gpus)
                if not anywhere:
                    break
                if _worth_compacting(len(going), len(ended), every):
                    index = rows.keep(
                        going or [0]
                    )  # another rank is still going: one row keeps step with it
                    token = token[index]
                    ended = ended[index]
            rows.feed(token)
        return _fetched(ids, broken, logprobs, record, sampling)

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, _every, _generator
    ) -> Sampled:
        """Return what `_decode` would, for any model that transformers can generate with."""
        from transformers import GenerationConfig, LogitsProcessorList

        chosen = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        watch = _Watch()
        options = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_ids),
            pad_token_id=self.pad_id,
            use_cache=True,
            output_scores=sampling.truncates,
            return_dict_in_generate=True,
            **(chosen if sampling.temperature else {}),
        )
        input_ids, mask = _left_padded(prompts, self.pad_id, self.lm.device)
        given = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "logits_processor": LogitsProcessorList([watch]),
        }
        output = self.lm.generate(**given, generation_config=options, synced_gpus=self.synced_gpus)
        tokens = output.sequences[:, input_ids.shape[1] :].cpu()
        responses = until_stop(tokens, sampling.stop_ids)
        if not sampling.truncates or watch.broken.any():
            return Sampled(responses, None, watch.broken)
        lengths = torch.tensor([len(response) for response in responses])
        support = TokenSupport.from_scores(output.scores).to("cpu")  # a row for padding, too
        own = torch.arange(tokens.shape[1]) < lengths[:, None]
        supports = support.select(own.flatten()).split(lengths.tolist())
        return Sampled(responses, supports, watch.broken)

    def generator(self, prompts: list[list[int]], sampling: Sampling) -> torch.Generator | None:
        """Return the generator of tokens; None is the process's own."""
        return None

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Note the step, for errors: the weights are the policy's."""
        self.step = step


def responses_together(lm, tokens: int) -> int:
    """Return how many responses are sampled together by default, at so many `tokens` each with the prompt.

    On a GPU they take at most a quarter of what its memory holds beside a training of the model: 16 bytes of each
    trained weight for gradient and optimizer, and a copy of the model as reference. Free memory is not read, so a
    resumed run samples the same. At least 64; a power of two.
    """
    if lm.device.type == "cpu" or not keeps_keys_and_values(lm):
        return ROLLOUT_BATCH_SIZE
    config = lm.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = 2 * config.num_hidden_layers * heads * width * lm.dtype.itemsize * tokens
    drawing = 16 * config.vocab_size  # logits, scores, probabilities and random numbers in fp32
    trained = sum(
        (2 * weight.element_size() + 16 * weight.requires_grad)
        * getattr(weight, "ds_numel", weight.numel())
        for weight in lm.parameters()
    )
    left = torch.cuda.get_device_properties(lm.device).total_memory - trained
    return max(ROLLOUT_BATCH_SIZE, 1 << max(1, left // 4 // (past + drawing)).bit_length() - 1)


def keeps_keys_and_values(lm) -> bool:
    """Return True if a model's past is a key and a value per token, and it takes positions."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if (
        "position_ids" not in inspect.signature(lm.forward).parameters
        or not lm._supports_default_dynamic_cache()
    ):
        return False
    layers = {type(layer) for layer in DynamicCache(config=lm.config).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def _fetched(ids, broken, logprobs, record: Record | None, sampling: Sampling) -> Sampled:
    """Return what was sampled, token ids and log-probabilities (T, B), each response up to its stop token."""
    found = torch.cat([broken, ids.flatten()])  # from the device at once
    found = found.cpu() if record is None else record.fetch(found)
    broken, ids = found[: len(broken)].bool(), found[len(broken) :].view(ids.shape)
    responses = until_stop(ids.t(), sampling.stop_ids)
    lengths = [len(response) for response in responses]
    if logprobs is not None:
        rows_of = zip(logprobs.t().tolist(), lengths, strict=True)
        logprobs = [row[:length] for row, length in rows_of]
    supports = None if record is None or broken.any() else record.of_responses(lengths)
    return Sampled(responses, supports, broken, logprobs)


class _Rows:
    """The responses that are computed: those that go on, and until the next poll those that have ended since."""

    def __init__(self, lm, prompts: list[list[int]], sampling: Sampling, pad_id: int):
        from fused_rl.trainers.rollouts.past import in_place

        # The distinct prompts, padded on the left.
        runs = [list(run) for _, run in groupby(prompts)]
        input_ids, mask = _left_padded([run[0] for run in runs], pad_id, lm.device)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        last_alone = (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(lm.forward).parameters
            else {}
        )
        output = lm(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **last_alone,
        )

        # A row for every response. Where no prompt is padded, no mask is needed: attention may be the fastest.
        copies = torch.tensor([len(run) for run in runs])
        row = on_device(torch.arange(len(runs)).repeat_interleave(copies), lm.device)
        self.lm = lm
        self.logits = output.logits[row, -1]
        self.width = input_ids.shape[1]
        self.position = mask[row].sum(1, keepdim=True)
        self.mask = None
        if len({len(run[0]) for run in runs}) > 1:
            self.mask = nn.functional.pad(mask[row], (0, sampling.max_new_tokens), value=1)
        self.cache = output.past_key_values
        most = self.width + sampling.max_new_tokens
        waits = lm.device.type != "cpu"
        in_place(self.cache, row, most, maskable=self.mask is not None and waits)
        self.numbers = list(range(len(prompts)))  # of the response of each row
        self.number = torch.arange(len(prompts), device=lm.device)

    def feed(self, token: torch.Tensor) -> None:
        """Compute the logits after the next token (b,) of each row."""
        self.width += 1
        output = self.lm(
            input_ids=token[:, None],
            attention_mask=None if self.mask is None else self.mask[:, : self.width],
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits, self.position = output.logits[:, -1], self.position + 1

    def keep(self, going: list[int]) -> torch.Tensor:
        """Continue with these rows alone, with a copy of their past; return their indices, on the device."""
        index = on_device(torch.tensor(going), self.number.device)
        self.cache.batch_select_indices(index)
        self.position, self.number = self.position[index], self.number[index]
        self.mask = None if self.mask is None else self.mask[index]
        self.numbers = [self.numbers[i] for i in going]
        return index


def _poll_finished(
    ended: torch.Tensor, record: Record | None, synced_gpus: bool
) -> tuple[list[int], bool]:
    """Wait for the device; return the rows that go on, and whether any does, on any rank if ranks must keep in step."""
    over = ended.all()[None]
    if synced_gpus:
        over = over.int()
        dist.all_reduce(over, op=dist.ReduceOp.MIN)
    found = torch.cat([ended, over.bool()])
    *gone, over = (found if record is None else record.fetch(found)).tolist()
    return [i for i, has_ended in enumerate(gone) if not has_ended], not over


def _worth_compacting(going: int, rows: int, every: int) -> bool:
    """Return True if leaving out the rows that have ended is cheaper than computing them.

    On an accelerator, where polls are rare, a row costs little but the reading of its past, and a copy of those that go
    on costs as much as to read them twice: in the steps until the next poll an eighth of the rows pays for that.
    """
    left = max(going, 1)
    return left < rows if every == 1 else (rows - left) * 8 >= rows


def _draw(
    scores: torch.Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token (B,) int64 of each row of scores (B, V), and (B,) bool: True where they are NaN or infinite."""
    if not sampling.temperature:
        token = scores.argmax(-1)
        return token, ~scores.gather(1, token[:, None])[:, 0].isfinite()
    probabilities = torch.softmax(scores, -1)
    bad = probabilities[:, 0].isnan()  # as the whole row is then
    if probabilities.device.type != "cpu":
        # What torch.multinomial does for one token, less its look at every probability, which waits for the device.
        return (
            probabilities / torch.empty_like(probabilities).exponential_(generator=generator)
        ).argmax(-1), bad
    # There multinomial draws a random number for every token of the vocabulary.
    token = token_at(
        probabilities, torch.rand(len(probabilities), dtype=torch.float64, generator=generator)
    )
    return token.clamp(max=scores.shape[1] - 1), bad


def token_at(probabilities: torch.Tensor, quantile: torch.Tensor) -> torch.Tensor:
    """Return the token (B,) int64 at a quantile (B,) fp64 in [0, 1) of each row (B, V), none of probability 0."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.minimum(
        quantile * total, total.nextafter(torch.zeros_like(total))
    )  # the product may be rounded up
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]


class _Watch:
    """Notes which rows' logits are NaN or infinite, and gives `generate` others, which it can sample from."""

    broken: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bad = ~scores.amax(-1).isfinite()
        self.broken = bad | self.broken
        return torch.where(bad[:, None], 0, scores)


def _left_padded(
    prompts: list[list[int]], pad_id: int, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, each (B, P), such that every response begins in the same column."""
    mask = [[1] * len(prompt) for prompt in prompts]
    input_ids = pad(prompts, pad_id, left=True)
    return on_device(input_ids, device), on_device(pad(mask, 0, left=True), device)


def until_stop(tokens: torch.Tensor, stop_ids: Sequence[int]) -> list[list[int]]:
    """Return each row of (B, n) on the CPU up to and including its first stop token; padding follows it."""
    stops = torch.isin(tokens, torch.tensor(stop_ids))
    lengths = (stops.cumsum(1) - stops.int() == 0).sum(1)  # tokens that no stop token stands before
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]
