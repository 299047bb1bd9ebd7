"""Sequences of which every process of a group holds a part, for long ones: DeepSpeed's Ulysses, given no `mpu`.

A part is a run of neighbouring tokens. Around attention the processes exchange tokens for heads (arXiv:2309.14509,
arXiv:2506.13996): each has all tokens of some heads, and no part sees less than a whole sequence would. What is
computed of single tokens is then summed over the parts, so that losses and metrics see whole sequences. Left out: rows
that hold several sequences, which attention by `sdpa` would not keep apart here.
"""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from ..base import engine, ranks
from ..base.rounding import relative_difference
from ..base.text import InputError
from .packing import WINDOWS, attention_of

# The attention functions of transformers by name, as they were before `_register`.
_originals: dict[str, Callable] = {}


class _Sum(torch.autograd.Function):
    """The sum over a group, whose processes all go on with it; the gradient of each one's part is that of the sum."""

    @staticmethod
    def forward(ctx, values, group):
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return dtotal, None


def _register(name: str) -> None:
    """Have transformers' attention `name` exchange tokens for heads, in passes that say how sequences are divided."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in _originals:
        return
    original = _originals[name] = ALL_ATTENTION_FUNCTIONS[name]

    # Sampling, and models that see whole sequences, do not say so.
    def attention(module, query, key, value, attention_mask, sequence_parts=None, **options):
        if sequence_parts is None:
            return original(module, query, key, value, attention_mask, **options)
        return sequence_parts.attention(module, query, key, value, **options)

    AttentionInterface.register(name, attention)


def _changing_ropes(text: Any) -> dict[str, int]:
    """Return the kinds of rope that turn otherwise in a longer sequence, and from which length on each does."""
    parameters = getattr(text, "rope_parameters", None) or {}
    lengths = {}
    # There is one of all layers, or one of each kind of layer.
    for rope in (parameters, *parameters.values()):
        kind = rope.get("rope_type", "") if isinstance(rope, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            max_positions = text.max_position_embeddings
            lengths[kind] = min(
                max_positions, rope.get("original_max_position_embeddings", max_positions)
            )
    return lengths


class SequenceParts:
    """The division of a transformers model's sequences over the processes of this rank."""

    def __init__(self, lm: Any, longest: int):
        """Try it, while the weights of `lm` are whole; the longest sequence has `longest` tokens."""
        self.group = ranks.sequence_group()
        self.num_parts = dist.get_world_size(self.group)
        self.part_index = dist.get_rank(self.group)
        reason = self._prepare(lm, longest) or self._compare(lm)
        if reason is not None:
            raise InputError(f"sequence_parallel={self.num_parts}: {reason}")

    def _prepare(self, lm: Any, longest: int) -> str | None:
        """Make the exchange; return what the model's config says against it."""
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(verbose=False)  # where somebody else made the process group
        name = attention_of(lm)
        text = lm.config.get_text_config()
        if name != "sdpa" and "flash" not in name:
            remedy = "give --attn_implementation sdpa or flash_attention_2"
            return f"attn_implementation={name} needs a mask of all pairs of tokens; {remedy}"
        for window in WINDOWS:
            # Flash attention is given a sliding window; the others have it in their mask.
            by_mask = name == "sdpa" or window != "sliding_window"
            if by_mask and 0 < (getattr(text, window, None) or 0) < longest:
                problem = f"{window}={getattr(text, window)} is shorter than the longest sequence ({longest} tokens)"
                return f"{problem}, and attn_implementation={name} has it in a mask"
        # transformers looks at the last position that it is given, which only the last part has.
        ropes = _changing_ropes(text)
        for rope, length in ropes.items():
            if length < longest:
                problem = f"the longest sequence has {longest} tokens"
                return f"{problem}, and beyond {length} rope_type={rope} depends on its length"
        # How many positions the model knows: those of a table, where it has no ropes.
        self.positions = min(ropes.values(), default=sys.maxsize)
        if not getattr(text, "rope_parameters", None):
            table = getattr(text, "max_position_embeddings", None)
            self.positions = table or self.positions
        _register(name)
        heads = text.num_attention_heads
        key_heads = 1 if getattr(text, "multi_query", False) else heads
        try:
            self.ulysses = UlyssesSPAttentionHF(
                attn=_originals[name],
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
                kv_head_count=getattr(text, "num_key_value_heads", None) or key_heads,
                num_hidden_layers=text.num_hidden_layers,
                process_group=cast(Any, self.group),  # torch's, which DeepSpeed's annotation is not
                seq_length_is_variable=True,
            )
        except ValueError as error:
            return str(error)
        return None

    @torch.no_grad()
    def _compare(self, lm: Any) -> str | None:
        """Return what is wrong with the states of a model's parts, compared with those of whole sequences."""
        # A number of tokens that the parts do not divide, in two rows.
        text = lm.config.get_text_config()
        width = 4 * self.num_parts + 1
        ids = torch.arange(1, 2 * width + 1, device=lm.device).remainder(text.vocab_size)
        ids = ids.view(2, width)
        places = torch.arange(2 * (width - 1), device=lm.device)
        mine = self.my_places(places, width)
        name = type(lm).__name__
        self.calls = 0
        try:
            with engine.gathered_in_turn(lm):
                states = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
                options = "last_hidden_state", ids, places[mine]
                states_of_parts = self.states_of(lm.base_model, *options)
        # A model without position_ids, or whose queries and keys differ in size: each says so in its own way.
        except Exception as error:
            return f"{name} does not take parts of a sequence ({type(error).__name__})"
        if not self.calls:
            return f"{name} does not pass on to its attention how sequences are divided"
        if self.calls < text.num_hidden_layers:
            return f"{name} has layers in which tokens meet outside of attention"
        difference = relative_difference(states_of_parts, states.flatten(0, 1)[mine])
        largest = difference.cpu()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        if largest > 1:
            return f"{name} computes other states from parts of a sequence than from the whole"
        return None

    def attention(self, module, query, key, value, **options) -> Any:
        """Attention of this process's heads over whole sequences; pads are at the end, so that no mask is needed."""
        self.calls += 1
        # It was made for batches of one size.
        ulysses = self.ulysses
        ulysses.batch_size = len(query)
        for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
            tokens, _, *rest = getattr(ulysses, name)
            setattr(ulysses, name, torch.Size([tokens, len(query), *rest]))
        # It asks for positions, which GPT-2 keeps from its attention; of pads, too, they must be in order, or flash
        # attention sees several sequences.
        options["position_ids"] = self._positions(len(query), query.shape[2], query.device)
        # Where it repeats heads of keys, it leaves the module with another number of queries to each.
        groups = getattr(module, "num_key_value_groups", None)
        try:
            states, weights = ulysses(module, query, key, value, None, **options)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        # It joins the heads, which GPT-2 does itself.
        return states.unflatten(-1, (query.shape[1], -1)), weights

    def my_places(self, places: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return which of the places of a flattened (B, tokens - 1) mask this part predicts, (n,) int64."""
        column = places % (tokens - 1)
        return (column // self._width(tokens) == self.part_index).nonzero()[:, 0]

    def _width(self, tokens: int) -> int:
        """Return the tokens of a part of sequences of so many."""
        return -(-tokens // self.num_parts)

    def _positions(self, rows: int, width: int, device: torch.device) -> torch.Tensor:
        """Return the positions (rows, width) of this part's tokens in their sequences."""
        begin = self.part_index * width
        return torch.arange(begin, begin + width, device=device).repeat(rows, 1)

    def states_of(self, module: Any, output: str, input_ids, places) -> torch.Tensor:
        """(n, ·): what `module` of a transformers model puts out at n places of the flattened mask, this part's own."""
        # The parts are equally wide, so the last one may end in more pads.
        tokens = input_ids.shape[1]
        width = self._width(tokens)
        padded = torch.nn.functional.pad(input_ids, (0, width * self.num_parts - tokens))
        begin = self.part_index * width
        # Pads have no positions past those that the model knows. The last token predicts none, so it may be a pad.
        last = max(self.positions, tokens - 1) - 1
        positions = self._positions(len(input_ids), width, input_ids.device)
        outputs = module(
            input_ids=padded[:, begin : begin + width],
            position_ids=positions.clamp(max=last),
            use_cache=False,
            sequence_parts=self,
        )
        row = places // (tokens - 1)
        column = places % (tokens - 1)
        return outputs[output].flatten(0, 1)[row * width + column - begin]

    def score_places(
        self, module: Any, input_ids, places, score: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the score (N,) of the hidden states of `module` at N places, each computed by the part that has it."""
        mine = self.my_places(places, input_ids.shape[1])
        scores = score(self.states_of(module, "last_hidden_state", input_ids, places[mine]))
        return self.sum(scores.new_zeros(len(places)).index_copy(0, mine, scores))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the parts' values, of one shape; the gradient of each part is that of its own."""
        return _Sum.apply(values, self.group)
