"""A sampler in this process, on the model that is trained: each prompt is computed once for all of its responses.

Where a model keeps its past in another form than keys and values, transformers' `generate` is used instead.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fused_rl
from fused_rl import TokenSupport

from ..base.rounding import relative_difference
from ..base.screen import bar, print_rank0
from ..base.text import in_a_line
from ..data.batch import on_device, pad
from .options import ROLLOUT_BATCH_SIZE
from .sampling import NoDistribution, Record, Sampling, processed_scores
from .types import Response, Sampler

# Tokens of each response between two polls on an accelerator: a poll waits for the device, which costs as much as some
# tokens of a small model, and a row that has ended is computed in vain until the next one.
POLL_EVERY = 16
# Bytes of kept sets that may be noted between two polls; a single token may need more.
SUPPORT_BYTES = 1 << 28
# Steps by a CUDA graph that was captured in an earlier one, which are compared with steps without one.
CHECKED_STEPS = 3


class Sampled(NamedTuple):
    """B responses."""

    ids: list[list[int]]
    supports: list[TokenSupport] | None
    """The kept sets of each; None for the whole vocabulary."""
    broken: torch.Tensor
    """(B,) bool: logits that are NaN or infinite."""
    logprobs: list[list[float | None]] | None = None
    """Log-probability of each token, in nats; None if not requested."""


class TransformersSampler(Sampler):
    """Samples from the policy itself, so nothing needs to be published, and records kept sets.

    Args:
        lm: a transformers causal LM; where it is trained, the one inside of the engine.
        pad_id: fills batches; may equal a stop token.
        batch_size: responses generated together, of similar length; None is 64 on a CPU and 256 on a GPU.
        synced_gpus: ranks keep in step though their responses end at different lengths (needed under ZeRO 3).
        poll_every: tokens between two polls of which responses have ended; None is 1 on a CPU, and 16 where the host
            would wait for the device.
    """

    records_support = True
    reports_logprobs = False  # the trainer would compute the same
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
        # Tried here, where under ZeRO 3 all ranks run the model together.
        self.is_in_place = keeps_keys_and_values(lm)
        self.graphs = _Graphs(self.is_in_place and lm.device.type == "cuda")
        if synced_gpus:
            self.graphs.drop(lm, "under ZeRO 3 every step gathers the weights anew")

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt, in their order; neighbours that are equal are computed once.

        Raises:
            NoDistribution: logits that are NaN or infinite, when the batch has been sampled.
        """
        # Prompts of similar length go together, because a batch is padded to its longest one; equal prompts stay
        # neighbours, because their keys and values are computed once.
        runs = [list(run) for _, run in groupby(range(len(prompts)), key=prompts.__getitem__)]
        runs.sort(key=lambda run: len(prompts[run[0]]))
        by_length = list(chain.from_iterable(runs))

        default = ROLLOUT_BATCH_SIZE * (1 if self.lm.device.type == "cpu" else 4)
        batch_size = self.batch_size or default

        # Kept sets stay on the device between two polls, so where they would fill its memory the polls come sooner.
        every = self.poll_every
        if sampling.truncates:
            bytes_per_token = batch_size * self.lm.config.get_text_config().vocab_size
            every = max(1, min(every, SUPPORT_BYTES // bytes_per_token))

        # Batch by batch; a response of a batch that is broken ends all of it.
        self.lm.eval()
        generator = self.generator(prompts, sampling)
        decode = self._decode if self.is_in_place else self._generate
        responses = {}
        for start in bar(range(0, len(by_length), batch_size), "sampling"):
            indices = by_length[start : start + batch_size]
            batch = [prompts[i] for i in indices]
            sampled = decode(batch, sampling, every, generator)
            if sampled.broken.any():
                numbers = sampled.broken.nonzero()[:, 0].tolist()
                raise NoDistribution([indices[number] for number in numbers], self.step)
            none = [None] * len(indices)
            logprobs_of = sampled.logprobs or none
            supports = sampled.supports or none
            rows = zip(indices, sampled.ids, logprobs_of, supports, strict=True)
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
        # What is sampled stays on the device until the end, since each copy to the host would wait for it: token ids by
        # step and response, and which responses are broken.
        rows = _Rows(self.lm, prompts, sampling, self.pad_id, self.graphs)
        device = self.lm.device
        count = len(prompts)
        ids = torch.zeros(sampling.max_new_tokens, count, dtype=torch.int64, device=device)
        logprobs = torch.zeros(ids.shape, device=device) if self.reports_logprobs else None
        broken = torch.zeros(count, dtype=torch.bool, device=device)
        ended = broken.clone()  # by row, of which there is one for each response at first
        stop_ids = on_device(torch.tensor(sampling.stop_ids), device)
        record = Record(count) if sampling.truncates else None
        philox_state = None
        if device.type != "cpu":
            # A seed, and an offset of which every step takes another one.
            philox_state = torch.randint(2**62, (2,), device=device, generator=generator)

        # Token by token. A row goes on after its stop token until it is left out, and what it samples then is ignored.
        for step in range(sampling.max_new_tokens):
            scores = processed_scores(rows.logits, sampling)
            token, bad = _draw(scores, sampling, generator, philox_state)
            ids[step].scatter_(0, rows.response_index, token)
            # Greedy tokens too have the log-probability of a softmax, the one at temperature 1.
            if logprobs is not None:
                all_logprobs = scores.float().log_softmax(-1)
                token_logprobs = all_logprobs.gather(1, token[:, None])[:, 0]
                logprobs[step].scatter_(0, rows.response_index, token_logprobs)
            broken[rows.response_index] |= bad & ~ended
            if record is not None:
                record.note(scores, ended, rows.responses)
            ended = ended | (token[:, None] == stop_ids).any(1)
            if step + 1 == sampling.max_new_tokens:
                break

            # Now and then the rows that have ended are left out. Where all of this rank's have, but another rank that
            # must be kept in step with goes on, one of them stays.
            if (step + 1) % every == 0:
                unfinished, any_unfinished = _poll_finished(ended, record, self.synced_gpus)
                if not any_unfinished:
                    break
                if _worth_compacting(len(unfinished), len(ended), every):
                    index = rows.keep(unfinished or [0])
                    token = token[index]
                    ended = ended[index]
            rows.feed(token)
        return _fetched(ids, broken, logprobs, record, sampling)

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, _every, _generator
    ) -> Sampled:
        """Return what `_decode` would, for any model that transformers can generate with."""
        from transformers import GenerationConfig, LogitsProcessorList

        # All options of sampling are named, because a model's own generation config has other defaults.
        truncation = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        broken = torch.zeros(len(prompts), dtype=torch.bool, device=self.lm.device)

        def note_broken(_, scores: torch.Tensor) -> torch.Tensor:
            """Note which rows have logits that are NaN or infinite, and return others, which can be sampled from."""
            bad = ~scores.amax(-1).isfinite()
            broken.logical_or_(bad)
            return torch.where(bad[:, None], 0, scores)

        options = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_ids),
            pad_token_id=self.pad_id,
            use_cache=True,
            output_scores=sampling.truncates,
            return_dict_in_generate=True,
            **(truncation if sampling.temperature else {}),
        )
        input_ids, mask = _left_padded(prompts, self.pad_id, self.lm.device)
        output = self.lm.generate(
            input_ids=input_ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([note_broken]),
            generation_config=options,
            synced_gpus=self.synced_gpus,
        )
        tokens = output.sequences[:, input_ids.shape[1] :].cpu()
        responses = until_stop(tokens, sampling.stop_ids)
        if not sampling.truncates or broken.any():
            return Sampled(responses, None, broken)

        # The scores have a row for every token of the batch, padding after a stop token included, which has no set.
        lengths = torch.tensor([len(response) for response in responses])
        support = TokenSupport.from_scores(output.scores).to("cpu")
        is_response = torch.arange(tokens.shape[1]) < lengths[:, None]
        supports = support.select(is_response.flatten()).split(lengths.tolist())
        return Sampled(responses, supports, broken)

    def generator(self, prompts: list[list[int]], sampling: Sampling) -> torch.Generator | None:
        """Return the generator of tokens; None is the process's own."""
        return None

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Note the step, for errors: the weights are the policy's."""
        self.step = step


def keeps_keys_and_values(lm) -> bool:
    """Return True if a model's past is a key and a value per token, which `_decode` continues; say why if it cannot."""
    import transformers

    if "position_ids" not in inspect.signature(lm.forward).parameters:
        return False
    # Another release may have another cache, and another model may use this one in another way.
    training = lm.training
    lm.eval()
    try:
        from . import past

        if not past.is_writable(transformers.DynamicCache(config=lm.config)):
            return False
        if lm.device.type == "meta":  # a dry run, where nothing is computed
            return True
        difference = _stepwise_difference(lm)
        problem = "a model that computes other logits token by token"
    except Exception as error:
        difference, problem = math.inf, in_a_line(error)
    finally:
        lm.train(training)
    if difference <= 1:
        return True
    slower = f"{type(lm).__name__} is sampled by transformers' generate, which is slower"
    print_rank0(f"{slower}: {problem} (transformers {transformers.__version__})")
    return False


@torch.no_grad()
def _stepwise_difference(lm) -> float:
    """Return by how much logits differ that a past gives and those of whole texts; 1 is what rounding explains."""
    texts = [[1, 2, 3, 4], [5, 6]]
    sampling = Sampling(max_new_tokens=2, temperature=1.0, stop_ids=())
    rows = _Rows(lm, [text[:-1] for text in texts], sampling, 0, _Graphs(is_on=False))
    rows.feed(torch.tensor([text[-1] for text in texts], device=lm.device))
    ids, mask = _left_padded(texts, 0, lm.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    whole = lm(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False)
    return relative_difference(rows.logits, whole.logits[:, -1]).item()


def _fetched(ids, broken, logprobs, record: Record | None, sampling: Sampling) -> Sampled:
    """Return what was sampled, token ids and log-probabilities (T, B), each response up to its stop token."""
    # One copy from the device has all of it: each would wait for the device anew.
    values = torch.cat([broken, ids.flatten()])
    values = values.cpu() if record is None else record.fetch(values)
    count = len(broken)
    broken = values[:count].bool()
    ids = values[count:].view(ids.shape)
    responses = until_stop(ids.t(), sampling.stop_ids)
    lengths = [len(response) for response in responses]
    if logprobs is not None:
        rows_of = zip(logprobs.t().tolist(), lengths, strict=True)
        logprobs = [row[:length] for row, length in rows_of]
    supports = None if record is None or broken.any() else record.by_response(lengths)
    return Sampled(responses, supports, broken, logprobs)


@dataclass
class _Graphs:
    """Whether steps are captured as CUDA graphs, which launch all kernels of a step at once.

    Draws are no part of them: the host launches their few kernels while the device still computes the step.
    """

    is_on: bool
    is_compiled: bool = False
    """These steps run layers as they are compiled."""
    unchecked: int = CHECKED_STEPS

    def drop(self, lm, reason: str) -> None:
        """Capture layers as they are from now on, or nothing if they were captured so, and say why."""
        if self.is_on:
            without = "compiled layers" if self.is_compiled else "CUDA graphs"
            slower = f"{type(lm).__name__} is sampled without {without}, which is slower"
            print_rank0(f"{slower}: {reason}")
        self.is_on &= self.is_compiled
        self.is_compiled = False


def _captured(compute: Callable[[], torch.Tensor]):
    """Return a CUDA graph of a function, and its result, which every replay computes anew."""
    # The first call loads kernels. What waits for the device cannot be captured, so it raises here: a capture that
    # fails may leave the generator of the process unusable.
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Other threads may call CUDA meanwhile, such as that of a data loader.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = compute()
    return graph, result


class _Rows:
    """The responses that are computed: those that go on, and until the next poll those that have ended since."""

    def __init__(
        self,
        lm,
        prompts: list[list[int]],
        sampling: Sampling,
        pad_id: int,
        graphs: _Graphs,
    ):
        from .past import Past, WritableCache

        # The distinct prompts, padded on the left.
        runs = [list(run) for _, run in groupby(prompts)]
        distinct = [run[0] for run in runs]
        input_ids, mask = _left_padded(distinct, pad_id, lm.device)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        # Logits of the whole prompt would be the largest tensor by far, where a model can leave them out.
        can_skip_logits = "logits_to_keep" in inspect.signature(lm.forward).parameters
        last_only = {"logits_to_keep": 1} if can_skip_logits else {}
        output = lm(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **last_only,
        )

        # A row for every response. Where no prompt is padded, no mask is needed: attention may be the fastest.
        copies = torch.tensor([*map(len, runs)])
        row = torch.arange(len(runs)).repeat_interleave(copies)
        row = on_device(row, lm.device)
        self.lm = lm
        self.logits = output.logits[row, -1]
        width = input_ids.shape[1]
        self.position = mask[row].sum(1, keepdim=True)
        self.mask = None
        if len(set(map(len, distinct))) > 1:
            response_columns = (0, sampling.max_new_tokens)
            self.mask = nn.functional.pad(mask[row], response_columns, value=1)
        self.cache = WritableCache(output.past_key_values.layers)
        self.past = Past(
            width,
            width + sampling.max_new_tokens,
            is_maskable=self.mask is not None and lm.device.type != "cpu",
            device=lm.device,
        )
        self.first_layer = self.past.take_over(self.cache, row)
        self.graphs = graphs
        self.graph = None
        self.token = torch.empty_like(self.position)
        self.responses = list(range(len(prompts)))  # the number of each row's response
        self.response_index = torch.arange(len(prompts), device=lm.device)

    def feed(self, token: torch.Tensor) -> None:
        """Compute the logits after the next token (b,) of each row."""
        if self.past.make_room(self.cache):
            self.graph = None
        self.token.copy_(token[:, None])
        logits = self._by_graph() if self.graphs.is_on else None
        self.logits = self._next_logits(is_fixed=False) if logits is None else logits
        self.past.width += 1
        self.past.column += 1
        self.position += 1

    def _next_logits(self, *, is_fixed: bool) -> torch.Tensor:
        """Return the logits (b, V) after `token`, and write its keys and values; a second call does the same again."""
        self.past.is_fixed = is_fixed
        self.cache.turn = self.first_layer
        width = self.past.max_tokens if is_fixed else self.past.width + 1
        output = self.lm(
            input_ids=self.token,
            attention_mask=None if self.mask is None else self.mask[:, :width],
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _by_graph(self) -> torch.Tensor | None:
        """Return the logits by a CUDA graph; None, with a line, if it cannot be captured or computes other ones."""
        graphs = self.graphs
        try:
            # Compared or not, the graph is the last to write the past, so a resumed run continues with the same bits.
            expected = self._next_logits(is_fixed=False) if graphs.unchecked else None
            if self.graph is None:
                with torch.compiler.set_stance("default" if graphs.is_compiled else "force_eager"):
                    self.graph = _captured(lambda: self._next_logits(is_fixed=True))
            elif graphs.unchecked:
                graphs.unchecked -= 1
            graph, logits = self.graph
            graph.replay()
            if expected is not None and not relative_difference(logits[0], expected[0]) <= 1:
                raise ValueError("they compute other logits")
            return logits
        except Exception as error:
            graphs.drop(self.lm, in_a_line(error))
            self.graph = None
            return None

    def keep(self, unfinished: list[int]) -> torch.Tensor:
        """Continue with these rows alone, with a copy of their past; return their indices, on the device."""
        index = on_device(torch.tensor(unfinished), self.response_index.device)
        self.cache.batch_select_indices(index)
        self.graph = None
        self.token = self.token[index]
        self.position = self.position[index]
        self.response_index = self.response_index[index]
        self.mask = None if self.mask is None else self.mask[index]
        self.responses = [self.responses[i] for i in unfinished]
        return index


def _poll_finished(
    ended: torch.Tensor, record: Record | None, synced_gpus: bool
) -> tuple[list[int], bool]:
    """Wait for the device; return the rows that go on, and whether any does, on any rank if ranks must keep in step."""
    # One tensor goes to the host: which rows have ended, and at its end whether all have, on all ranks.
    all_ended = ended.all()[None]
    if synced_gpus:
        all_ended = all_ended.int()
        dist.all_reduce(all_ended, op=dist.ReduceOp.MIN)
    flags = torch.cat([ended, all_ended.bool()])
    fetched = flags if record is None else record.fetch(flags)
    *has_ended, is_over = fetched.tolist()
    unfinished = [i for i, row_ended in enumerate(has_ended) if not row_ended]
    return unfinished, not is_over


def _worth_compacting(unfinished: int, rows: int, every: int) -> bool:
    """Return True if leaving out the rows that have ended is cheaper than computing them.

    On an accelerator, where polls are rare, a row costs little but the reading of its past. Fewer rows are a copy of
    theirs and another graph, which takes as long as tens of steps: half of the rows pay for that.
    """
    left = max(unfinished, 1)
    return left < rows if every == 1 else left * 2 <= rows


def _draw(
    scores: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    philox_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token (B,) int64 of each row of scores (B, V), and (B,) bool: True where they are NaN or infinite."""
    if not sampling.temperature:
        token = scores.argmax(-1)
        largest = scores.gather(1, token[:, None])[:, 0]
        return token, ~largest.isfinite()
    # On an accelerator the scores are read once.
    if philox_state is not None:
        token, _, bad = fused_rl.sample_token(scores, philox_state)
        philox_state[1] += 1
        return token, bad

    # A row with any score that is NaN or +inf is NaN throughout, so one column tells.
    probabilities = torch.softmax(scores, -1)
    bad = probabilities[:, 0].isnan()
    # On a CPU multinomial needs a random number for every token of the vocabulary; a quantile needs one per row. A row
    # of NaN has no token there, and any will do, since it is broken.
    quantile = torch.rand(len(probabilities), dtype=torch.float64, generator=generator)
    token = token_at(probabilities, quantile)
    return token.clamp(max=scores.shape[1] - 1), bad


def token_at(probabilities: torch.Tensor, quantile: torch.Tensor) -> torch.Tensor:
    """Return the token (B,) int64 at a quantile (B,) fp64 in [0, 1) of each row (B, V), none of probability 0."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # The product may be rounded up to the total, after which there is no token.
    total = cumulative[:, -1]
    largest_quantile = total.nextafter(torch.zeros_like(total))
    below = torch.minimum(quantile * total, largest_quantile)
    return torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]


def _left_padded(
    prompts: list[list[int]], pad_id: int, device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask, each (B, P), such that every response begins in the same column."""
    mask = [[1] * len(prompt) for prompt in prompts]
    input_ids = pad(prompts, pad_id, left=True)
    padded_mask = pad(mask, 0, left=True)
    return on_device(input_ids, device), on_device(padded_mask, device)


def until_stop(tokens: torch.Tensor, stop_ids: Sequence[int]) -> list[list[int]]:
    """Return each row of (B, n) on the CPU up to and including its first stop token; padding follows it."""
    stops = torch.isin(tokens, torch.tensor(stop_ids))
    # A token counts where no stop token stands before it.
    lengths = (stops.cumsum(1) - stops.int() == 0).sum(1)
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]
