r"""The accuracy of a model with greedy decoding and over several samples, with every response written to a file.

    fused-rl eval --model runs/demo/grpo/model --dataset runs/demo/data/eval.jsonl --output_dir runs/eval
    torchrun --nproc-per-node 8 -m fused_rl.trainers.commands.eval \
        --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k

The prompts, the sampler and the scorers are those of GRPO and PPO; docs/doctor.md defines the figures. Left out:
ZeRO (the model must fit on one device), inference servers, and samplers of your own.
"""

import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
import yaml

from ..base import engine, ranks
from ..base.engine import EngineConfig
from ..base.files import as_json, hash_of, write_atomically, write_rows
from ..base.options import PositiveInt, Requirement, Seed, without
from ..base.screen import phase, print_line, print_rank0
from ..base.text import InputError
from ..data import encode
from ..data.examples import Examples
from ..data.reading import RowReport, RowsLike, chosen_rows
from ..models import language_model
from ..options import PromptConfig
from ..policy.evaluate import HeldOut, held_out_share, results_of, say_signal
from ..rollouts.generate import TransformersSampler
from ..rollouts.options import SamplingConfig, ToolConfig
from ..rollouts.roll_out import prompts_of, roll_out
from ..rollouts.solved import has_verdict
from ..rollouts.types import Rollout, Scorer
from ..run import command
from ..run.parse import parse
from ..run.positions import check_fits
from ..scorers.load import load_scorers
from ..scorers.options import ScorerConfig, ScorersLike, with_scorers

MAX_NEW_TOKENS = 512
# Options that are taken from the run of a model if they are not given. Those of the scorers are taken all together or
# not at all, because weights and thresholds belong to their verifiers; those of the prompts are taken one by one.
SCORING = ("verifiers", "verifier_weights", "solved_at")
PROMPTING = (
    "prompt_column",
    "answer_column",
    "raw_prompt",
    "system_prompt",
    "chat_template_kwargs",
    "max_new_tokens",
    *ToolConfig.model_fields,
)


class EvalConfig(ScorerConfig, SamplingConfig, ToolConfig, PromptConfig):
    """Score a causal language model's responses to the rows of a dataset: pass@k, lengths, and every response.

    Scorers, and options of prompts, that are not given are those of the run that made the model.
    """

    command: ClassVar = "eval"
    main: ClassVar = (
        "model",
        "dataset",
        "dataset_split",
        "output_dir",
        "verifiers",
        "samples",
        "max_new_tokens",
        "overwrite",
    )
    lag: ClassVar = 0  # an environment is read by scorers before it plays again
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations: auto is bfloat16 on a GPU and float32 on a CPU."""
    dataset_split: str = "test"
    """The Hub dataset's split."""
    max_rows: PositiveInt | None = None
    """Number of rows to evaluate on, beginning with the first; None takes all."""
    prompt_column: str | None = None
    """Text or messages; None is the run's if `model` is from a run, else the first of prompt, messages, conversations,
    question, instruction and problem that a row has."""
    max_prompt_length: PositiveInt = 2048
    """Longer prompts (in tokens) are dropped, counted and reported."""
    samples: PositiveInt = 4
    """Sampled responses per problem, beside the greedy one."""
    max_new_tokens: PositiveInt | None = None
    """Maximum response length in tokens; None is the run's, else as many as fit into the model, at most 512."""
    batch_size: PositiveInt = 64
    """Responses generated together; changes speed and memory, and which responses are sampled."""
    seed: Seed = 1
    """Random seed. Equal seeds, batch sizes and numbers of processes give equal responses, on a CPU."""
    output_dir: str | None = None
    """Folder for responses.jsonl and summary.json; None writes nothing."""
    overwrite: bool = False
    """Replace responses.jsonl and summary.json in output_dir."""

    needs: ClassVar = tuple(
        Requirement(name, lambda config: config.verifiers is not None, without("--verifiers"))
        for name in SCORING[1:]
    )


def with_run_options(config: EvalConfig) -> EvalConfig:
    """Return the config with options from the run that made the model, for those that were not given."""
    # A run saves its model as RUN/model, beside its config.yaml.
    run_config = Path(config.model).parent / "config.yaml"
    if Path(config.model).name != "model" or not run_config.is_file():
        return config
    run = yaml.safe_load(run_config.read_text(encoding="utf-8"))

    # Options that are given win, so a model can be evaluated with other prompts or other scorers than those of its run.
    names = [name for name in PROMPTING if name not in config.model_fields_set]
    names += SCORING if config.verifiers is None else ()
    taken_over = {name: run[name] for name in names if run.get(name) is not None}
    shown = ", ".join(f"{name} {value}" for name, value in taken_over.items())
    print_rank0(f"as in {run_config}, where not given here: {shown}")
    return config.replace(**taken_over)


def evaluate(
    config: EvalConfig,
    *,
    dataset: RowsLike = None,
    scorers: ScorersLike = None,
) -> dict[str, float]:
    """Run the whole evaluation, print and write its results, and return the figures by name.

    Args:
        config: the options of `fused-rl eval`.
        dataset: rows from Python, in place of those that the config names.
        scorers: scorers from Python, in place of those that the config names.

    Raises:
        InputError: an option, a row or a scorer cannot be used, or `output_dir` already has results.
    """
    config = with_scorers(config, scorers)

    # Before anything is read, compare the options of all ranks, and refuse a folder whose files would be replaced.
    device = engine.setup(config.seed, trains=False)
    ranks.check_equal(config.to_dict())
    config = with_run_options(config)
    tools = None
    if config.tools or config.environment:
        from ..rollouts.tools import ToolSampler

        tools = ToolSampler(config)
        config = tools.config
    out = None if config.output_dir is None else Path(config.output_dir).absolute()
    existing = [
        name
        for name in ("responses.jsonl", "summary.json")
        if out is not None and os.path.lexists(out / name)
    ]
    if existing and not config.overwrite:
        raise InputError(
            f"output_dir={out} already holds {existing[0]}; replace it with --overwrite"
        )

    # Tokenizer, scorers, rows, model. Reward models that score have the dtype of the model that is evaluated.
    held = EngineConfig(dtype=config.dtype)
    with phase("read tokenizer and rows"), RowReport(config.bad_rows) as reader:
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        dataset_options = (config.dataset, config.dataset_config, config.dataset_split)
        rows = chosen_rows("dataset", dataset, *dataset_options, reader.bad)
        rows = reader.add(rows.subset(range(len(rows))[: config.max_rows]))
        reading = {"tokenizer": tokenizer, "device": device, "batch_size": config.batch_size}
        judges = load_scorers(config, policy=config, held=held, **reading)
        problems = prompts_of(
            rows,
            encode.Encoder.of(config, tokenizer),
            judges,
            column=config.prompt_column,
            max_length=config.max_prompt_length,
        )
    ranks.check_equal({"rows": hash_of(problems.digests)})
    with phase("loaded the model"):
        options = {"revision": config.revision, "attn_implementation": config.attn_implementation}
        lm = language_model.load_to_sample(
            config.model, device=device, dtype=engine.torch_dtype(held), **options
        )

    # Responses are sampled as in GRPO, but from a model that is not trained.
    length = _response_length(config, lm, tokenizer, problems)
    sampling = config.sampling(
        length, tuple(encode.stop_ids(tokenizer, lm.saved_generation_config))
    )
    sampler = TransformersSampler(lm, pad_id=tokenizer.pad_token_id, batch_size=config.batch_size)
    if tools:
        sampler = tools(sampler, tokenizer)
    share = held_out_share(problems)
    # The batch stays on the CPU, because nothing is trained on it.
    greedy, sampled = (
        roll_out(sampler, judges, share.prompts, by, tokenizer, torch.device("cpu"), copies=copies)
        for by, copies in ((replace(sampling, temperature=0.0), 1), (sampling, config.samples))
    )

    # The figures of all ranks; standard errors are over problems, because the responses to one depend on each other.
    results = results_of(judges, greedy, sampled, share.count)
    figures = {"problems": len(problems)} | results.figures
    for name, (values,) in results.by_row.items():
        if name in figures:
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            figures[f"{name}_error"] = error
    print_rank0("\n".join(f"{name:<24}{value:.4g}" for name, value in figures.items()))
    if judges:
        say_signal(results, judges, sampled.samples[0], length)
    rows = _rows_of(greedy, "greedy", share, judges, tokenizer)
    rows += _rows_of(sampled, "sampled", share, judges, tokenizer)
    responses = sorted(sum(ranks.gather(rows), []), key=lambda row: row["problem"])
    if out is not None and ranks.process_index() == 0:
        write_rows(out / "responses.jsonl", responses)
        options = config.to_dict() | {"max_new_tokens": length}
        summary = figures | {"options": options, "bad_rows": [*map(vars, reader.bad)]}
        write_atomically(out / "summary.json", as_json(summary, indent=2) + "\n")
        print_line(f"responses: {out / 'responses.jsonl'}, figures: {out / 'summary.json'}")
    return figures


def _response_length(config: EvalConfig, lm, tokenizer, problems: Examples) -> int:
    """Return the maximum length of a response in tokens; raise `InputError` for a prompt that leaves no room for it."""
    # By default this is what the longest prompt leaves of the model's positions, so that no problem is refused.
    length = config.max_new_tokens
    if length is None:
        # Some models, such as those with relative positions, have no limit of their own.
        text = lm.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or sys.maxsize
        length = max(1, min(MAX_NEW_TOKENS, positions - int(problems.column("prompt").max())))
        print_rank0(f"max_new_tokens: {length}")

    # A prompt that leaves no room for a response is an error; it is not cut.
    check_fits(config, tokenizer, [problems], length)
    return length


def _rows_of(
    rollout: Rollout, kind: str, share: HeldOut, scorers: Sequence[Scorer], tokenizer
) -> list[dict]:
    """Return lines of responses.jsonl of the responses to the problems that belong to this rank.

    `kind` is "greedy" or "sampled".
    """
    # JSON has no NaN, so a score that does not apply is null, and so is `solved` where no scorer decides it.
    rows, is_judged = [], has_verdict(scorers, rollout)
    copies = len(rollout.samples) // len(share.prompts)
    for i, sample in enumerate(rollout.samples[: share.count * copies]):
        scores = {name: values[i].item() for name, values in rollout.scores.items()}
        row = {
            "decoding": kind,
            "problem": ranks.rank() + i // copies * ranks.world_size(),
            "row": sample.where,
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": sample.text,
            "score": rollout.rewards[i].item(),
            "scores": {
                name: None if math.isnan(score) else score for name, score in scores.items()
            },
            "solved": rollout.solved[i].item() if is_judged[i] else None,
            "finish": sample.response.finish,
            "tokens": len(sample.response.ids),
        }
        if sample.logged:
            row["logged"] = sample.logged
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl eval`."""
    with command.around("fused-rl eval"):
        evaluate(parse(EvalConfig, sys.argv[1:] if argv is None else argv))
        # A process that exits while another is still in a collective makes that one abort.
        ranks.barrier()


if __name__ == "__main__":
    main()
