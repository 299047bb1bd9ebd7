"""Several sequences in one row of a model's input, so that what they begin with is computed once, and pads are few.

A row is a prompt with responses to it (`pack`, `pack_pairs`), or whole sequences (`pack_sequences`). A token sees its
prompt and response, at the positions of a row of its own: the same hidden states, from fewer tokens. Attention is
computed over all of a row's (L, L) mask, so a long row can cost more than it saves: `Costs` weighs that.

Flash attention takes no mask, but the lengths of the sequences in a row: all of a micro-batch are one row (`unpad`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple, cast

import torch

from ..base import ranks
from ..base.rounding import relative_difference
from ..base.screen import print_rank0
from ..base.text import InputError
from ..data.batch import Batch, make_batch, on_device
from ..data.micro_batches import TokensOf, padded_tokens

# Settings of a config by which attention ends before the row does.
WINDOWS = ("sliding_window", "attention_chunk_size")
# Attention that takes a mask of its own for every row.
MASKED = ("sdpa", "eager")
# Widths of rows that are tried, as multiples of the longest sequence.
ROOM_FACTORS = (1, 1.5, 2, 4)


class InRows(NamedTuple):
    """The input of a model for b sequences in g rows of L tokens, and where their predictions are."""

    input_ids: torch.Tensor
    """(g, L) int64."""
    position_ids: torch.Tensor
    """(g, L) int64: of each token in its own sequence."""
    tokens: int
    """Those of `input_ids` that are no pads."""
    states: torch.Tensor
    """(N,) int64 in [0, g * L): the tokens that are read, which predict those that count, or end each sequence."""
    mask: torch.Tensor | None = None
    """(g, 1, L, L) bool, True where a token (third) sees another (fourth)."""
    lengths: Mapping[str, Any] = {}
    """Instead of a mask, where each sequence begins in the one row, and the longest: arguments of flash attention."""

    def states_of(self, lm: Any, module: Any, output: str) -> torch.Tensor:
        """(N, ·): what `module` of a transformers model puts out at `states`."""
        attention = self.lengths
        if self.mask is not None:
            # The mask as the model adds it, in rows aligned to 8 elements.
            rows, _, length, _ = self.mask.shape
            shape = rows, 1, length, -(-length // 8) * 8
            added = torch.full(shape, -torch.inf, dtype=lm.dtype, device=self.mask.device)
            attention = {"attention_mask": added[..., :length].masked_fill_(self.mask, 0)}
        outputs = module(
            input_ids=self.input_ids, position_ids=self.position_ids, use_cache=False, **attention
        )
        return outputs[output].flatten(0, 1)[self.states]


def padded_states(module: Any, input_ids: torch.Tensor, output: str) -> torch.Tensor:
    """Return the output of a transformers model's `module`, (B, T, ...), for sequences that have a row each."""
    import transformers.masking_utils

    masking_utils = transformers.masking_utils
    # transformers looks whether several sequences share a row, and the host would wait for the device to answer. Here
    # the answer is known to be no. Where a release has no such function, nothing reads the one that is set.
    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        return module(input_ids=input_ids, use_cache=False)[output]
    finally:
        masking_utils.find_packed_sequence_indices = cast(Any, look)


@dataclass(frozen=True)
class Costs:
    """The costs of a model's forward pass, in FLOP."""

    token: float
    """The matrix products with the weights, per token."""
    pair: float
    """Attention, per pair of tokens in a row."""
    masked: bool = True
    """False if a row needs no mask, and so costs what its sequences do: they are not padded (`unpad`)."""

    def flop(self, rows: int, width: float) -> float:
        """Return the cost of rows of `width` tokens, with attention over whole rows: a mask saves none of it."""
        return rows * width * (self.token + self.pair * width)

    def causal_flop(self, rows: int, width: int) -> float:
        """Return the cost without a mask: what follows a token is not computed."""
        return rows * width * (self.token + self.pair * width / 2)


def costs_of(lm: Any) -> Costs:
    """Return the costs of a transformers model without its head. Call before its weights are partitioned."""
    text = lm.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights = 0
    for weight in lm.parameters():
        # Of weights of 4 bits there are two in a byte.
        per_element = 2 if weight.dtype == torch.uint8 else 1
        weights += weight.numel() * per_element

    # Embeddings are looked up, and the head meets the tokens that count alone, packed or not.
    outside = {lm.get_input_embeddings().weight}
    head = lm.get_output_embeddings()
    # A classifier has no such head, and a tied one is the weight of the embeddings.
    if head is not None:
        outside.add(head.weight)
    weights -= sum(weight.numel() for weight in outside)

    # 2 FLOP per weight and token; scores and their sum of values are 2 FLOP each per element of a
    # head.
    heads = text.num_hidden_layers * text.num_attention_heads
    return Costs(token=2 * weights, pair=4 * heads * width)


def responses_per_row(costs: Costs, prompt: int, response: float, copies: int) -> int:
    """Return how many of `copies` responses to a prompt are cheapest in one row, by their lengths in tokens."""

    def flop(in_row: int) -> float:
        rows = -(-copies // in_row)
        return costs.flop(rows, prompt + in_row * response)

    return min(range(1, copies + 1), key=flop)


def in_row_of(batch: Batch, costs: Costs, index: torch.Tensor | slice = slice(None)) -> int:
    """Return how many responses to one prompt of the sequences at `index` are cheapest in a row."""
    copies = int(batch.prompts[index].bincount().max())
    prompt = int(batch.prompt_lengths[index].max())
    response = float(batch.response_lengths[index].double().mean())
    return responses_per_row(costs, prompt, response, copies)


def tokens_by(lengths: Sequence[int], costs: Costs | None) -> TokensOf:
    """Return the tokens of sequences of these lengths, with their pads if there are any."""
    if costs is None or costs.masked:
        return padded_tokens(lengths)
    return lambda indices: sum(lengths[i] for i in indices)


def shared_tokens(batch: Batch, costs: Costs) -> TokensOf:
    """Return the tokens of neighbours in `batch` in rows with one prompt each, as many in a row as is cheapest."""
    prompts = batch.prompts.tolist()
    prompt_lengths = batch.prompt_lengths.tolist()
    response_lengths = batch.response_lengths.tolist()

    def tokens_of(indices: list[int]) -> int:
        in_row = in_row_of(batch, costs, torch.tensor(indices))
        widths = []
        for _, group in itertools.groupby(indices, lambda i: prompts[i]):
            responses = list(group)
            for begin in range(0, len(responses), in_row):
                row = responses[begin : begin + in_row]
                widths.append(prompt_lengths[row[0]] + sum(response_lengths[i] for i in row))
        return len(widths) * max(widths)

    return tokens_of


def _packed(batch: Batch, row: torch.Tensor, start: torch.Tensor, shared: torch.Tensor) -> InRows:
    """Return the sequences of `batch` in rows, without their last tokens, which predict nothing.

    Args:
        batch: b sequences.
        row: (b,) int64 on the CPU, the row of each sequence.
        start: (b,) int64, where in the row it begins.
        shared: (b,) int64, how many tokens at its beginning all sequences of the row see, and only the first has.
    """
    # The place of each token in the flattened rows. Its segment is 0 where shared, else that of its
    # sequence.
    skipped = torch.where(start > 0, shared, 0)
    columns = batch.input_ids.shape[1]
    input_lengths = (batch.response_lengths - 1).clamp(min=0)
    end = batch.prompt_lengths.clamp(max=columns) + input_lengths
    width = int((start + end - skipped).max())

    def place(sequence: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        begin = torch.where(token < skipped[sequence], 0, (start - skipped)[sequence])
        return row[sequence] * width + begin + token

    # The tokens that go into the rows: of each sequence those that no other one of its row has
    # already put there.
    position = torch.arange(columns)
    is_placed = (position >= skipped[:, None]) & (position < end[:, None])
    sequence, token = is_placed.nonzero(as_tuple=True)
    segment = torch.where(token < shared[sequence], 0, sequence + 1)
    rows = int(row.max()) + 1
    layout = torch.zeros(3, rows * width, dtype=torch.int64)
    layout[2] = -1  # padding
    layout[:, place(sequence, token)] = torch.stack(
        [sequence * len(position) + token, token, segment]
    )

    # All of it goes to the device at once. A token sees its own segment and segment 0, and none
    # after it. What is computed on the CPU's copies of the lengths waits for no device.
    device = batch.input_ids.device
    source, positions, segments = on_device(layout.view(3, -1, width), device)
    input_ids = torch.where(segments < 0, 0, batch.input_ids.flatten()[source])
    other_segments = segments[:, None, :]
    is_visible = (segments[:, :, None] == other_segments) | (other_segments == 0)
    is_before = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    states = on_device(place(*batch.response_tokens()), device)
    mask = (is_visible & is_before)[:, None]
    return InRows(input_ids, positions, len(sequence), states, mask)


def pack(batch: Batch, in_row: int) -> InRows:
    """Return the sequences of `batch` in rows of at most `in_row` neighbours that have the same prompt."""
    _, group, sizes = torch.unique_consecutive(
        batch.prompts, return_inverse=True, return_counts=True
    )
    # A row begins with each group, and again after `in_row` of its sequences.
    begin = (sizes.cumsum(0) - sizes)[group]
    first = (torch.arange(len(group)) - begin) % in_row == 0
    row = first.cumsum(0) - 1

    # After the prompt, which `Batch.rows` cuts where there is no response, come the responses, one
    # after the other.
    prompt = batch.prompt_lengths.clamp(max=batch.input_ids.shape[1])
    input_lengths = (batch.response_lengths - 1).clamp(min=0)
    before = input_lengths.cumsum(0) - input_lengths
    start = torch.where(first, 0, prompt + before - before[first][row])
    return _packed(batch, row, start, prompt)


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
    packed = pack(batch, 2)
    # Without a mask attention costs half as much, so a row for each can be cheaper.
    alone = costs.causal_flop(len(sequences), max(map(len, sequences)))
    if costs.flop(*packed.input_ids.shape) >= alone:
        return None
    last = batch.response_lengths.cumsum(0) - 1
    return packed._replace(states=packed.states[on_device(last, device)])


def unpad(batch: Batch) -> InRows:
    """Return the sequences of `batch` in one row, without their last tokens, which predict nothing."""
    columns = batch.input_ids.shape[1]
    input_lengths = batch.prompt_lengths.clamp(1, columns) + (batch.response_lengths - 1).clamp(
        min=0
    )
    is_input = torch.arange(columns) < input_lengths[:, None]
    row, column = batch.response_tokens()
    states = (input_lengths.cumsum(0) - input_lengths)[row] + column
    source = is_input.flatten().nonzero()[:, 0]
    source, states = (on_device(index, batch.input_ids.device) for index in (source, states))
    return _in_one_row(batch.input_ids.flatten()[source], input_lengths, states)


def unpad_sequences(sequences: list[list[int]], device) -> InRows:
    """Return sequences in one row, read at the last token of each."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    input_ids = torch.tensor(list(itertools.chain(*sequences)))
    states = lengths.cumsum(0) - 1
    return _in_one_row(on_device(input_ids, device), lengths, on_device(states, device))


def _in_one_row(input_ids: torch.Tensor, lengths: torch.Tensor, states: torch.Tensor) -> InRows:
    """Return the row of tokens (L,) on the device, which are of sequences of `lengths` (b,) on the CPU."""
    ends = lengths.cumsum(0)
    begin = (ends - lengths).repeat_interleave(lengths)
    positions = torch.arange(len(begin)) - begin
    device = input_ids.device
    offsets = on_device(torch.cat([ends.new_zeros(1), ends]).int(), device)
    longest = int(lengths.max())
    # Without these transformers would find the sequences by their positions, and wait for the device in every layer.
    attention = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    positions = on_device(positions, device)
    return InRows(input_ids[None], positions[None], len(begin), states, lengths=attention)


def cheapest_rows(
    lengths: list[int], costs: Costs, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the indices of sequences of these lengths, row by row: one in each, or the cheapest `best_fit`.

    Rows of more than `max_tokens` with their pads are only taken where no others are to be had.
    """
    candidates = [[[i] for i in range(len(lengths))]]
    candidates += [best_fit(lengths, int(max(lengths) * factor)) for factor in ROOM_FACTORS]
    if max_tokens is not None:
        in_one = [list(range(len(lengths)))]
        candidates = [
            rows for rows in candidates if len(rows) * row_tokens(lengths, rows) <= max_tokens
        ] or [in_one]
    return min(candidates, key=lambda rows: rows_cost(lengths, rows, costs))


def row_tokens(lengths: list[int], rows: list[list[int]]) -> int:
    """Return the tokens of the longest of these rows."""
    return max(sum(lengths[i] for i in row) for row in rows)


def rows_cost(lengths: list[int], rows: list[list[int]], costs: Costs) -> float:
    """Return the cost of sequences of these lengths in rows of these indices."""
    return costs.flop(len(rows), row_tokens(lengths, rows))


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return the indices of sequences row by row, the longest first, each in the fullest row that has room."""
    # (room left, indices), the last changed first.
    rows: list[tuple[int, list[int]]] = []
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        # Best fit: small rests stay for short sequences.
        with_room = [row for row in rows if row[0] >= lengths[i]]
        left, indices = min(with_room, key=itemgetter(0), default=(room, []))
        if with_room:
            rows.remove((left, indices))
        rows.insert(0, (left - lengths[i], [*indices, i]))
    return [indices for _, indices in sorted(rows, key=itemgetter(0))]


def pack_sequences(batch: Batch, rows: list[list[int]]) -> InRows:
    """Return the sequences of `batch` in rows, one after the other; `rows` holds indices, as from `cheapest_rows`."""
    lengths = batch.prompt_lengths + (batch.response_lengths - 1).clamp(min=0)
    row = torch.zeros_like(lengths)
    start = torch.zeros_like(lengths)
    for number, indices in enumerate(rows):
        index = torch.tensor(indices)
        in_row = lengths[index]
        row[index] = number
        start[index] = in_row.cumsum(0) - in_row
    return _packed(batch, row, start, torch.zeros_like(lengths))


def attention_of(lm: Any) -> str:
    """Return the name of a model's attention, for which transformers has no public name."""
    return getattr(lm.config, "_attn_implementation", None) or "unknown"


def _is_flash(lm: Any) -> bool:
    """Return True for attention that takes the lengths of sequences in a row, such as flash_attention_2."""
    # Parts of sequences over several processes are rows of one sequence each.
    return "flash" in attention_of(lm) and ranks.sequence_group() is None


def unsupported_reason(lm: Any, longest: int) -> str | None:
    """Return why a model's rows cannot hold several responses, or None; the longest sequence has `longest` tokens."""
    if ranks.sequence_group() is not None:
        return "sequence_parallel divides rows of one sequence each"

    # What its config says.
    text = lm.config.get_text_config()
    if attention_of(lm) not in MASKED:
        return f"attn_implementation={attention_of(lm)} takes no mask of its own; {MASKED} do"
    for name in WINDOWS:
        if 0 < (getattr(text, name, None) or 0) < longest:
            return f"{name}={getattr(text, name)} is shorter than a prompt with its response ({longest})"
    return _differs(lm, lambda batch: pack(batch, 2))


@torch.no_grad()
def _differs(lm: Any, rows_of: Callable[[Batch], InRows], prompt_tokens: int = 5) -> str | None:
    """Return in words how two responses to one prompt differ in a row each and in the rows of `rows_of`, or None."""
    if lm.device.type == "meta":  # a dry run, where nothing is computed
        return None
    text = lm.config.get_text_config()
    ids = [i % text.vocab_size for i in range(1, 14)]
    prompt = ids[:prompt_tokens]
    responses = [ids[5:9], ids[9:]]
    batch = make_batch([prompt, prompt], responses, 0, lm.device)
    training = lm.training
    lm.eval()
    try:
        outputs = lm.base_model(input_ids=batch.input_ids, use_cache=False)
        alone = outputs.last_hidden_state[:, :-1]
        alone = alone[batch.response_mask]
        together = rows_of(batch).states_of(lm, lm.base_model, "last_hidden_state")
    # A model without position_ids, or with a mask of another form: each says so in its own way.
    except Exception as error:
        reason = f"takes no mask and positions of its own ({type(error).__name__})"
        return f"{type(lm).__name__} {reason}"
    finally:
        lm.train(training)
    if relative_difference(together, alone) <= 1:
        return None
    reason = "computes other states, and so other logits, in rows of several sequences"
    return f"{type(lm).__name__} {reason}"


def unpadded_costs(lm: Any) -> Costs | None:
    """Return the costs of rows without padding; None where the attention cannot keep the sequences of a row apart."""
    options = {"option": "packing", "otherwise": "rows are padded"}
    return packing_costs(lm, 0, None, **options) if _is_flash(lm) else None


def packing_costs(
    lm: Any,
    longest: int,
    wanted: bool | None,
    *,
    option: str,
    otherwise: str,
) -> Costs | None:
    """Return the costs by which sequences are put in rows; None if `wanted` is false, or None and the model cannot.

    Flash attention pads no row, but where `packing` is not wanted; it cannot share prompts.
    """
    takes_lengths = _is_flash(lm) and not (wanted and option == "share_prompts")
    if wanted is False and (option == "packing" or not takes_lengths):
        return None
    # Layers that look back a few tokens leak most behind a short prompt.
    reason = _differs(lm, unpad, 1) if takes_lengths else unsupported_reason(lm, longest)
    if reason is None:
        return replace(costs_of(lm), masked=not takes_lengths)
    if wanted:
        raise InputError(f"{option}: {reason}; drop --{option}")
    print_rank0(f"{otherwise}: {reason}")
    return None
