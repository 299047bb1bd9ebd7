"""Several sequences in one row of a model's input, so that what they begin with is computed once, and pads are few.

A row is a prompt with responses to it (`pack`), or whole sequences (masked_rows.py). A token sees its prompt and
response, at the positions of a row of its own: the same hidden states, from fewer tokens. Attention is computed over
all of a row's (L, L) mask, so a long row can cost more than it saves: `Costs` weighs that.

On a GPU all of a micro-batch are one row without pads (`unpad`): flex_attention computes the blocks of pairs that see
each other alone, with shared prompts. Flash attention takes no mask, but the lengths of the sequences in a row.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from ..base import engine, ranks
from ..base.rounding import relative_difference
from ..base.screen import print_rank0
from ..base.text import InputError
from ..data.batch import Batch, make_batch, on_device
from ..data.micro_batches import TokensOf, padded_tokens

# Settings of a config by which attention ends before the row does.
WINDOWS = ("sliding_window", "attention_chunk_size")
# Attention that takes a mask of its own for every row.
MASKED = ("sdpa", "eager")
# Devices for which torch compiles flex_attention, forward and backward.
BLOCK_DEVICES = ("cuda",)
# Tokens of a block, flex_attention's own.
BLOCK = 128


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
    attention: Mapping[str, Any] = {}
    """Instead of a mask, what keeps the sequences of the one row apart: arguments of the model's forward."""

    def states_of(self, lm: Any, module: Any, output: str) -> torch.Tensor:
        """(N, ·): what `module` of a transformers model puts out at `states`."""
        attention = self.attention
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
    in_blocks: bool = False
    """True if flex_attention keeps the sequences of such a row apart, which may share prompts."""

    @property
    def form(self) -> tuple[bool, bool]:
        """Return what decides the form of rows: two models that read the same rows have the same."""
        return self.masked, self.in_blocks

    def flop(self, rows: int, width: float) -> float:
        """Return the cost of rows of `width` tokens, with attention over whole rows: a mask saves none of it."""
        return rows * width * (self.token + self.pair * width)

    def causal_flop(self, rows: int, width: int) -> float:
        """Return the cost without a mask: what follows a token is not computed."""
        return rows * width * (self.token + self.pair * width / 2)


def costs_of(lm: Any) -> Costs:
    """Return the costs of a transformers model without its head."""
    text = lm.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # Embeddings are looked up, and the head meets the tokens that count alone, packed or not.
    outside = {lm.get_input_embeddings().weight}
    head = lm.get_output_embeddings()
    # A classifier has no such head, and a tied one is the weight of the embeddings.
    if head is not None:
        outside.add(head.weight)
    weights = 0
    for weight in lm.parameters():
        if weight not in outside:
            # Of weights of 4 bits there are two in a byte.
            per_element = 2 if weight.dtype == torch.uint8 else 1
            weights += ranks.whole_shape(weight).numel() * per_element

    # 2 FLOP per weight and token; scores and their sum of values are 2 FLOP each per element of a
    # head.
    heads = text.num_hidden_layers * text.num_attention_heads
    return Costs(token=2 * weights, pair=4 * heads * width)


def tokens_by(lengths: Sequence[int], costs: Costs | None) -> TokensOf:
    """Return the tokens of sequences of these lengths, with their pads if there are any."""
    if costs is None or costs.masked:
        return padded_tokens(lengths)
    return lambda indices: sum(lengths[i] for i in indices)


def input_lengths(batch: Batch) -> torch.Tensor:
    """Return the tokens of each sequence but the last, which predicts nothing, (B,) int64 on the CPU."""
    prompts = batch.prompt_lengths.clamp(1, batch.input_ids.shape[1])
    return prompts + (batch.response_lengths - 1).clamp(min=0)


def place_in_rows(
    batch: Batch,
    row: torch.Tensor,
    lead: torch.Tensor,
    shared: torch.Tensor,
    prefix: torch.Tensor,
    own: torch.Tensor,
    *,
    in_blocks: bool = False,
) -> InRows:
    """Return the sequences of `batch` in rows, without their last tokens, which predict nothing.

    Args:
        batch: b sequences.
        row: (b,) int64 on the CPU, the row of each sequence.
        lead: (b,) int64, ascending: neighbours of one number share what they begin with, which the first puts there.
        shared: (b,) int64, how many tokens that is.
        prefix: (b,) int64, where in the row these begin.
        own: (b,) int64, where in the row its other tokens begin.
        in_blocks: there is one row, for flex_attention.
    """
    columns = batch.input_ids.shape[1]
    end = input_lengths(batch)
    width = int((own + end - shared).max())

    def place(sequence: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        begin = torch.where(token < shared[sequence], prefix[sequence], (own - shared)[sequence])
        return row[sequence] * width + begin + token

    # The tokens that go into the rows: of each sequence those that no other one of its row has already put there.
    first = lead.diff(prepend=lead.new_full((1,), -1)) > 0
    position = torch.arange(columns)
    is_placed = (position >= torch.where(first, 0, shared)[:, None]) & (position < end[:, None])
    sequence, token = is_placed.nonzero(as_tuple=True)

    # Who each token belongs to, its sequence or those that share it, and what it sees beside its own.
    prefix_number = len(row) + lead[sequence]
    owner = torch.where(token < shared[sequence], prefix_number, sequence)
    rows = int(row.max()) + 1
    layout = torch.zeros(4, rows * width, dtype=torch.int64)
    layout[2:] = -1  # padding
    layout[:, place(sequence, token)] = torch.stack(
        [sequence * len(position) + token, token, owner, prefix_number]
    )

    # All of it goes to the device at once. What is computed on the CPU's copies of the lengths waits for no device.
    device = batch.input_ids.device
    source, positions, owners, prefixes = on_device(layout.view(4, -1, width), device)
    input_ids = torch.where(owners < 0, 0, batch.input_ids.flatten()[source])
    states = on_device(place(*batch.response_tokens()), device)
    packed = InRows(input_ids, positions, len(sequence), states)
    if in_blocks:
        mask = _block_mask(layout[2], layout[3], owners[0], prefixes[0])
        return packed._replace(attention={"attention_mask": mask})
    other_owners = owners[:, None, :]
    is_visible = (owners[:, :, None] == other_owners) | (prefixes[:, :, None] == other_owners)
    is_before = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return packed._replace(mask=(is_visible & is_before)[:, None])


def _block_mask(owner: torch.Tensor, prefix: torch.Tensor, owners, prefixes) -> Any:
    """Return which tokens of one row see each other, as flex_attention takes it, without forming pairs of tokens.

    `owner` and `prefix` are (L,) int64 on the CPU: a token sees its own and the prefix's, none after it; `owners` and
    `prefixes` are the same on the device.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # How many pairs of two blocks see each other. Tokens of a block are counted by owner, so it is a product.
    block = torch.arange(len(owner)) // BLOCK
    keys = torch.zeros(int(block[-1]) + 1, int(prefix.max()) + 1)
    one = torch.ones(len(owner))
    keys.index_put_((block, owner), one, accumulate=True)
    queries = keys.index_put((block, prefix), (prefix != owner).float(), accumulate=True)
    pairs = queries @ keys.T
    whole = pairs.tril(-1) == BLOCK * BLOCK
    parts = (pairs.tril() > 0) & ~whole

    # For each block of queries, the numbers of its blocks of keys: those that are masked, and those seen as a whole.
    masks = torch.stack([parts, whole]).int()
    numbers = masks.argsort(dim=2, descending=True, stable=True)
    counts = on_device(masks.sum(2).int()[:, None, None], owners.device)
    indices = on_device(numbers.int()[:, None, None], owners.device)

    def sees(_batch, _head, query, key):
        is_visible = (owners[query] == owners[key]) | (prefixes[query] == owners[key])
        return is_visible & (key <= query)

    tokens = len(owner)
    return BlockMask.from_kv_blocks(
        counts[0], indices[0], counts[1], indices[1], BLOCK, sees, seq_lengths=(tokens, tokens)
    )


def pack(batch: Batch, in_row: int | None) -> InRows:
    """Return the sequences of `batch` in rows of at most `in_row` neighbours that have the same prompt.

    With None all are in one row, for flex_attention.
    """
    _, group, sizes = torch.unique_consecutive(
        batch.prompts, return_inverse=True, return_counts=True
    )
    # A prompt is computed for each group, and again after `in_row` of its sequences, which begin a row.
    in_group = torch.arange(len(group)) - (sizes.cumsum(0) - sizes)[group]
    first = in_group % (in_row or len(group)) == 0
    lead = first.cumsum(0) - 1
    row = torch.zeros_like(lead) if in_row is None else lead

    # After the prompt, which `Batch.rows` cuts where there is no response, come the responses, one
    # after the other.
    prompt = batch.prompt_lengths.clamp(max=batch.input_ids.shape[1])
    after_prompt = input_lengths(batch) - prompt
    own = (after_prompt + torch.where(first, prompt, 0)).cumsum(0) - after_prompt
    prefix = (own - prompt)[first]
    row_begin = prefix[row]
    return place_in_rows(
        batch,
        row,
        lead,
        prompt,
        prefix[lead] - row_begin,
        own - row_begin,
        in_blocks=in_row is None,
    )


def unpad(batch: Batch, costs: Costs) -> InRows:
    """Return the sequences of `batch` in one row, without their last tokens, which predict nothing."""
    if costs.in_blocks:
        return pack(batch, None)
    lengths = input_lengths(batch)
    is_input = torch.arange(batch.input_ids.shape[1]) < lengths[:, None]
    ends = lengths.cumsum(0)
    begin = ends - lengths
    row, column = batch.response_tokens()
    device = batch.input_ids.device
    source = on_device(is_input.flatten().nonzero()[:, 0], device)
    states = on_device(begin[row] + column, device)
    positions = on_device(is_input.nonzero()[:, 1], device)
    offsets = on_device(torch.cat([ends.new_zeros(1), ends]).int(), device)
    longest = int(lengths.max())
    # Without these transformers would find the sequences by their positions, and wait for the device in every layer.
    attention = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    input_ids = batch.input_ids.flatten()[source]
    return InRows(input_ids[None], positions[None], len(input_ids), states, attention=attention)


def attention_of(lm: Any) -> str:
    """Return the name of a model's attention, for which transformers has no public name."""
    return getattr(lm.config, "_attn_implementation", None) or "unknown"


def _is_flash(lm: Any) -> bool:
    """Return True for attention that takes the lengths of sequences in a row, such as flash_attention_2."""
    # Parts of sequences over several processes are rows of one sequence each.
    return "flash" in attention_of(lm) and ranks.sequence_group() is None


def _takes_blocks(lm: Any) -> bool:
    """Return True if the mask of a row may be one of blocks: its attention is sdpa, on a device that has kernels."""
    has_kernels = lm.device.type in BLOCK_DEVICES
    return attention_of(lm) == "sdpa" and has_kernels and ranks.sequence_group() is None


@functools.cache
def _attend_by_blocks() -> None:
    """Have transformers' sdpa compute masks of blocks by its flex_attention."""
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    by_blocks = ALL_ATTENTION_FUNCTIONS["flex_attention"]

    def attention(module, query, key, value, attention_mask, **options):
        attend = by_blocks if isinstance(attention_mask, BlockMask) else sdpa
        return attend(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("sdpa", attention)


def unsupported_reason(lm: Any, longest: int, *, in_blocks: bool = False) -> str | None:
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
    return _differs(lm, lambda batch: pack(batch, None if in_blocks else 2), trains=in_blocks)


@torch.no_grad()
def _differs(
    lm: Any, rows_of: Callable[[Batch], InRows], prompt_tokens: int = 5, *, trains: bool = False
) -> str | None:
    """Return in words how two responses to one prompt differ in a row each and in the rows of `rows_of`, or None.

    With `trains` the backward pass is tried too, as its kernels are other ones.
    """
    if lm.device.type == "meta":  # a dry run, where nothing is computed
        return None
    text = lm.config.get_text_config()
    ids = [i % text.vocab_size for i in range(1, 14)]
    prompt = ids[:prompt_tokens]
    responses = [ids[5:9], ids[9:]]
    batch = make_batch([prompt, prompt], responses, 0, lm.device)
    try:
        with engine.gathered_in_turn(lm, backward=trains):
            outputs = lm.base_model(input_ids=batch.input_ids, use_cache=False)
            alone = outputs.last_hidden_state[:, :-1]
            alone = alone[batch.response_mask]
            with torch.set_grad_enabled(trains):
                together = rows_of(batch).states_of(lm, lm.base_model, "last_hidden_state")
            if together.requires_grad:
                weights = [weight for weight in lm.parameters() if weight.requires_grad]
                # The first of the smallest weights, as a rule a norm's, is below all layers.
                first_norm = min(weights, key=lambda weight: ranks.whole_shape(weight).numel())
                ones = torch.ones_like(together)
                torch.autograd.grad(together, first_norm, ones, allow_unused=True)
    # A model without position_ids, or with a mask of another form: each says so in its own way.
    except Exception as error:
        reason = f"takes no mask and positions of its own ({type(error).__name__})"
        return f"{type(lm).__name__} {reason}"
    if relative_difference(together, alone) <= 1:
        return None
    reason = "computes other states, and so other logits, in rows of several sequences"
    return f"{type(lm).__name__} {reason}"


def unpadded_costs(lm: Any, longest: int, otherwise: str = "rows are padded") -> Costs | None:
    """Return the costs of rows without padding; None where the attention cannot keep the sequences of a row apart.

    The longest sequence has `longest` tokens, and `otherwise` says what happens with None.
    """
    if not _takes_blocks(lm):
        options = {"option": "packing", "otherwise": otherwise}
        return packing_costs(lm, longest, None, **options) if _is_flash(lm) else None
    _attend_by_blocks()
    reason = unsupported_reason(lm, longest, in_blocks=True)
    if reason is None:
        return replace(costs_of(lm), masked=False, in_blocks=True)
    print_rank0(f"{otherwise}: {reason}")
    return None


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
    if _takes_blocks(lm):
        # A dense mask is kept in memory, and computed for all pairs.
        costs = unpadded_costs(lm, longest, "rows take a dense mask")
        if costs is not None:
            return costs
    # Layers that look back a few tokens leak most behind a short prompt.
    lengths = Costs(0, 0, masked=False)
    reason = (
        _differs(lm, lambda batch: unpad(batch, lengths), 1)
        if takes_lengths
        else unsupported_reason(lm, longest)
    )
    if reason is None:
        return replace(costs_of(lm), masked=not takes_lengths)
    if wanted:
        raise InputError(f"{option}: {reason}; drop --{option}")
    print_rank0(f"{otherwise}: {reason}")
    return None
