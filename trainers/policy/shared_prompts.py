"""How many responses to a prompt share a row, and the tokens that the model then computes."""

import itertools

import torch

from ..data.batch import Batch
from ..data.micro_batches import TokensOf
from ..models.packing import Costs


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


def shared_tokens(batch: Batch, costs: Costs) -> TokensOf:
    """Return the tokens of neighbours in `batch` whose prompts are shared, as many in a row as is cheapest."""
    prompts = batch.prompts.tolist()
    prompt_lengths = batch.prompt_lengths.tolist()
    response_lengths = batch.response_lengths.tolist()

    def tokens_of(indices: list[int]) -> int:
        in_row = len(indices) if costs.in_blocks else in_row_of(batch, costs, torch.tensor(indices))
        widths = []
        for _, group in itertools.groupby(indices, lambda i: prompts[i]):
            responses = list(group)
            for begin in range(0, len(responses), in_row):
                row = responses[begin : begin + in_row]
                widths.append(prompt_lengths[row[0]] + sum(response_lengths[i] for i in row))
        return sum(widths) if costs.in_blocks else len(widths) * max(widths)

    return tokens_of
