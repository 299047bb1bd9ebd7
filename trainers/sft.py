"""Supervised fine-tuning: the negative log-likelihood of completions, averaged over the tokens of a whole step.

    fused-rl sft --config recipes/demo_sft.yaml
    torchrun --nproc-per-node 2 -m fused_rl.trainers.sft --model ... --dataset ... --output_dir ...

Rows of unequal length are packed where that is cheaper, each seeing itself alone. Left out: loss on prompts, and
sampled responses, which `fused-rl eval` measures.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from .base import engine, ranks
from .base.options import PositiveInt
from .base.ranks import divide_over
from .base.screen import phase
from .data import encode
from .data.batch import Batch, make_batch
from .data.examples import Examples, Record, encode_rows
from .data.forms import RowReader
from .data.micro_batches import (
    Padding,
    as_many_on_all_ranks,
)
from .data.reading import RowsLike
from .data.rows import Rows
from .models import language_model
from .models.packing import Costs, InRows, packing_costs, unpad
from .models.scoring import by_length
from .options import MAIN, EngineConfig, RunConfig
from .run import command
from .run.hooks import OnStep
from .run.loop import Run
from .run.metrics import Evaluation, Sums


class SFTConfig(RunConfig):
    """Supervised fine-tuning of a causal language model on prompts and completions."""

    command: ClassVar = "sft"
    batch_option: ClassVar = "batch_size"
    main: ClassVar = (*MAIN, "batch_size", "max_length", "completion_column")

    prompt_column: str | None = None
    """Text or messages; None takes the first of prompt, messages, conversations, question, instruction and problem that
    a row has."""
    completion_column: str = "completion"
    """Text of the completion, or messages, in which each turn of the assistant is trained; not needed if a conversation
    ends with the assistant's turn."""
    assistant_turns: Literal["last", "all"] = "last"
    """Train the last turn of the assistant in a conversation, or each of its turns with all that came before it."""
    text_column: str | None = None
    """A column of whole texts, whose tokens are trained; None takes text of rows that have no prompt."""
    max_length: PositiveInt = 1024
    """Longer rows (prompt and completion, in tokens) are dropped, counted and reported."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step, over all ranks."""
    packing: bool | None = None
    """Put several demonstrations into one row of the model's input, where that is cheaper than padding; none sees
    another. None packs if the model's attention allows it."""

    @property
    def longest_sequence(self) -> int:
        return self.max_length


def batch_plan(config: SFTConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    local = divide_over("batch_size", config.batch_size, world)
    return {
        "processes": world,
        "rows per step": f"{config.batch_size} = {world} processes x {local}",
        "micro-batches per process and step": config.micro_batches_of(local),
        "rows in the run": config.in_run(config.batch_size),
        "optimizer steps": config.in_run(1),
    }


class Example(NamedTuple):
    """Token ids of one demonstration, and where it came from."""

    prompt: list[int]
    completion: list[int]
    where: str
    trained: list[bool] | None = None
    """Which tokens of the completion count, where others speak in it too; None if all do."""

    def tokens(self) -> int:
        """Return the length of both."""
        return len(self.prompt) + len(self.completion)


def encoded(config: SFTConfig, rows: Rows, encoder: encode.Encoder) -> Examples:
    """Return an `Example` of every row that is short enough."""
    read = functools.partial(
        _read_example,
        encoder,
        column=config.prompt_column,
        completion_column=config.completion_column,
        turns=config.assistant_turns,
        text_column=config.text_column,
    )
    examples = encode_rows(rows, encoder.key, read, _example)
    return examples.within_limits("row", {"tokens": ("max_length", config.max_length)})


def _read_example(encoder: encode.Encoder, reader: RowReader, **options) -> list[Record]:
    demonstrations = encoder.demonstrations(reader, **options)
    flags = [[*map(int, one.trained or [])] for one in demonstrations]
    return [
        Record([one.prompt, one.response, of])
        for one, of in zip(demonstrations, flags, strict=True)
    ]


def _example(ids: list[list[int]], _, rows: Rows, i: int) -> Example:
    prompt, completion, trained = ids
    return Example(prompt, completion, rows.where(i), [*map(bool, trained)] or None)


class PackedBatch(NamedTuple):
    """Demonstrations that go through the model together."""

    batch: Batch
    packed: InRows | None
    """The same in fewer tokens; None where each has a row of its own."""


def micro_batches(
    examples: Sequence[Example],
    config: EngineConfig,
    pad_id: int,
    device,
    costs: Costs | None = None,
) -> list[PackedBatch]:
    """Return the rank's rows as micro-batches: padded at similar lengths, or packed if that `costs` less."""
    # Padded: a micro-batch holds what is of similar length.
    examples = sorted(examples, key=Example.tokens)
    tokens = [example.tokens() for example in examples]
    indices = list(range(len(examples)))
    max_tokens = config.micro_batch_tokens
    chosen = by_length(indices, tokens, config.micro_batch_size, max_tokens, costs)

    # Packed: one row without pads, or long and short ones together in rows under a mask.
    pack = None if costs is None else functools.partial(unpad, costs=costs)
    if costs is not None and costs.masked:
        from .models.masked_rows import cheaper_groups, pack_cheapest

        groups = cheaper_groups(tokens, chosen, costs, max_tokens)
        pack = functools.partial(pack_cheapest, costs=costs, max_tokens=max_tokens)
        chosen, pack = (chosen, None) if groups is None else (groups, pack)
    if max_tokens is not None:
        chosen = as_many_on_all_ranks(chosen)  # whose rows may be packed here and padded there

    micro_batches = []
    for indices in chosen:
        columns: Any = zip(*(examples[i] for i in indices), strict=True)
        prompts, completions, where, trained = columns  # as in `Example`
        batch = make_batch(prompts, completions, pad_id, device, where=where, trained=trained)
        micro_batches.append(PackedBatch(batch, None if pack is None else pack(batch)))
    return micro_batches


def held_out_share(examples: Sequence[Example]) -> list[Example]:
    """Return this rank's share of the held-out rows, as many on every rank; what fills a share up is not counted."""
    # Under ZeRO 3 every pass gathers weights from all ranks, which must run equally many.
    share = [examples[i] for i in ranks.share_of_rank(len(examples))]
    count = len(range(ranks.rank(), len(examples), ranks.world_size()))
    uncounted = [one._replace(trained=[False] * len(one.completion)) for one in share[count:]]
    return share[:count] + uncounted


def train_step(model, batches: list[PackedBatch], step: int) -> dict[str, float]:
    """One optimizer step over this rank's micro-batches; returns means over all ranks."""
    # The mean is over the tokens of the whole step on all ranks. In a mean of the micro-batches'
    # means, a token of a short completion would weigh more.
    counts = [batch.token_counts.sum() for batch, _ in batches]
    num_tokens = ranks.global_sum(torch.stack(counts).sum()).item()
    sums, padding = Sums(step), Padding()
    model.train()
    for batch, packed in batches:
        padding.add(packed or batch)
        # -log p of each token, its gradient formed in the forward pass.
        rows = model(**batch.inputs(packed), token_loss=lambda logprobs, _: -logprobs)
        # The engine averages gradients over ranks, but num_tokens is already that of all ranks.
        model.backward(rows.loss * (ranks.processes() / num_tokens))
        shares = {"loss": rows.loss / num_tokens, "entropy": rows.entropy.sum() / num_tokens}
        sums.add(shares, batch.where)
    metrics = {f"train/{name}": value for name, value in sums.over_ranks().items()}
    metrics["perf/padding"] = padding.fraction()
    return metrics | {"train/num_tokens": num_tokens} | engine.optimizer_step(model, step)


@torch.no_grad()
def evaluate(model, batches: list[PackedBatch]) -> Evaluation:
    """Return loss and token accuracy on the held-out rows, of which each rank has a share in `batches`."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    row_losses = []  # where a row is from, its loss, and its tokens
    with phase("evaluated on held-out rows") as figures:
        for batch, packed in batches:
            rows = model(**batch.inputs(packed), want_likeliest=True)
            mask = batch.response_mask
            # Row t of the mask is of token t + 1, so the targets begin with the second token.
            hit = mask & (rows.likeliest == batch.input_ids[:, 1:])
            nll = -rows.logprobs.sum()
            tokens = mask.sum()
            totals += torch.stack([nll, hit.sum(), tokens]).cpu()
            columns = torch.stack([-rows.logprobs.double().sum(1), mask.sum(1)]).cpu()
            row_losses += zip(batch.where, *columns.tolist(), strict=True)
        # Sums are added up and not means averaged, because the ranks' shares differ in length.
        loss, hits, tokens = ranks.global_sum(totals).tolist()
        figures |= {"eval/loss": loss / tokens, "eval/token_accuracy": hits / tokens}
    # In one order at every evaluation, whatever the micro-batches; what fills a share up has no tokens.
    counted = [row for row in sum(ranks.gather(row_losses), []) if row[2]]
    in_order = sorted(counted, key=lambda row: row[0])
    losses, counts = ([row[column] for row in in_order] for column in (1, 2))
    return Evaluation(dict(figures), by_row={"eval/loss": [losses, counts]})


def train(
    config: SFTConfig,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    *,
    on_step: OnStep | None = None,
) -> str:
    """Run the whole training, on rows that are given or that the config names; returns the model's folder."""
    run = Run(config, batch_plan, on_step)
    config = run.read(config, encoded, dataset, eval_dataset)
    with phase("loaded the model"):
        lm = language_model.load_lm(config, run.device)
        # This tries whether packing leaves hidden states as they are, while the weights are whole.
        otherwise = "demonstrations are padded, not packed"
        costs = packing_costs(
            lm.base, config.max_length, config.packing, option="packing", otherwise=otherwise
        )
        model = engine.initialize(lm, config, config.total_steps)
        run.fit_micro_batches(model)
    # Every evaluation is of the same rows, so they are put into micro-batches once.
    pad_id = run.tokenizer.pad_token_id
    held_out = micro_batches(held_out_share(run.held_out), config, pad_id, run.device, costs)

    run.start({"policy": model}, evaluate=lambda: evaluate(model, held_out))
    for step, indices in run:
        mine = [run.rows[i] for i in indices[ranks.rank() :: ranks.world_size()]]
        metrics = train_step(model, micro_batches(mine, config, pad_id, run.device, costs), step)
        run.log(metrics, metrics["train/num_tokens"])
    return run.finish(
        lambda folder: language_model.save_lm(
            model, run.tokenizer, folder, merged=config.save_merged
        )
    )


main = functools.partial(command.run, SFTConfig, train)

if __name__ == "__main__":
    main()
