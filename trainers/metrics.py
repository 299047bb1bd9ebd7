"""What a run shows: metrics.jsonl and TensorBoard always, a progress bar, a table of samples, curves.png at the end.

`KEYS` is the one table of metric names. `objective/*` are sums over a response, averaged over responses; `policy/*`
are means over response tokens. Rank 0 alone writes and prints.
"""

import json
import sys
import time
from pathlib import Path

from fused_rl.trainers.checkpoint import write_atomically
from fused_rl.trainers.cli import InputError
from fused_rl.trainers.engine import rank

COMMON = {
    "lr": "learning rate of the update",
    "optim/grad_norm": "norm of the gradient before clipping",
    "perf/tokens_per_second": "tokens trained on per second of the whole step",
    "time/train": "seconds in forward, backward and optimizer",
    "time/save": "seconds in writing the last checkpoint",
}
KEYS = {
    "sft": {
        **COMMON,
        "train/loss": "negative log-likelihood per completion token, nats",
        "train/entropy": "true entropy per completion token, nats",
        "train/num_tokens": "completion tokens in the step",
        "eval/loss": "train/loss on held-out rows",
        "eval/accuracy": "fraction of held-out completion tokens that are the most likely ones",
    },
    "reward": {
        **COMMON,
        "train/rm/loss": "Bradley-Terry loss of a pair, nats",
        "train/rm/accuracy": "fraction of pairs whose chosen score is higher",
        "train/rm/reward_margin": "chosen minus rejected score",
        "train/rm/chosen_rewards": "mean chosen score",
        "train/rm/rejected_rewards": "mean rejected score",
        "train/rm/min_reward": "lowest score",
        "train/rm/mean_reward": "mean score",
        "train/rm/max_reward": "highest score",
        "eval/rm/loss": "train/rm/loss on held-out pairs",
        "eval/rm/accuracy": "train/rm/accuracy on held-out pairs",
        "eval/rm/reward_margin": "train/rm/reward_margin on held-out pairs",
        "eval/rm/chosen_rewards": "train/rm/chosen_rewards on held-out pairs",
        "eval/rm/rejected_rewards": "train/rm/rejected_rewards on held-out pairs",
        "eval/rm/min_reward": "train/rm/min_reward on held-out pairs",
        "eval/rm/mean_reward": "train/rm/mean_reward on held-out pairs",
        "eval/rm/max_reward": "train/rm/max_reward on held-out pairs",
    },
    "grpo": {
        **COMMON,
        "episode": "responses sampled so far",
        "time/rollout": "seconds in sampling",
        "time/score": "seconds in the verifiers",
        "objective/kl": "log-ratio to the reference (k1)",
        "objective/kl1_avg": "KL estimate k1",
        "objective/kl2_avg": "KL estimate k2",
        "objective/kl3_avg": "KL estimate k3",
        "objective/kl4_avg": "KL estimate k4 (at the sampling policy: equals k1)",
        "objective/kl_exact": "exact KL to the reference, from both models' logits",
        "objective/entropy": "sampled negative log-likelihood of the response, nats",
        "objective/non_score_reward": "- kl_coef times objective/kl",
        "objective/rlhf_reward": "score plus non_score_reward",
        "objective/scores": "sum of the verifiers' scores",
        "objective/kl_coef": "weight of the KL in the loss",
        "policy/approxkl_avg": "(ratio - 1) - log ratio to the sampling policy, over all minibatches",
        "policy/clipfrac_avg": "fraction of tokens whose ratio is clipped",
        "policy/entropy_avg": "true entropy per token, nats",
        "loss/policy_avg": "loss, over all minibatches",
        "val/ratio": "mean ratio to the sampling policy, over all minibatches",
        "val/ratio_var": "the variance of that ratio over tokens, within a minibatch",
        "val/num_eos_tokens": "responses that ended by a stop token",
        "val/stop_rate": "the same as a fraction",
        "reward": "mean reward",
        "reward_std": "standard deviation within a group, averaged over groups",
        "frac_reward_zero_std": "fraction of groups whose rewards are all equal: they teach nothing",
        "completions/mean_length": "tokens per response",
        "completions/min_length": "tokens of the shortest response",
        "completions/max_length": "tokens of the longest response",
        "completions/clipped_ratio": "fraction of responses cut at max_new_tokens",
        "eval/accuracy_greedy": "fraction of held-out problems solved by the most likely response",
        "eval/accuracy_sampled": "fraction of sampled responses that solve theirs, at the training temperature",
        "eval/pass_at_k": "fraction of held-out problems that one of k sampled responses solves",
        "eval/entropy": "true entropy per token of the sampled responses, nats",
        "eval/kl_exact": "exact KL to the reference over a sampled response, nats",
    },
}


class Logger:
    """Writes a run's metrics; `columns` are (header, key) pairs for the progress bar."""

    def __init__(self, config, trainer: str, columns: dict[str, str], start: int):
        self.folder, self.steps, self.columns, self.active = Path(config.output_dir), config.steps, columns, rank() == 0
        self.keys, self.last, self.line = KEYS[trainer], {}, 0.0
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.history = _kept(self.folder / "metrics.jsonl", start)
        _kept(self.folder / "samples.jsonl", start)
        self.file = (self.folder / "metrics.jsonl").open("a")
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=start + 1 if config.resume else None)
        self.wandb = _wandb_run(config)
        self.progress = _progress_bar(columns, self.steps, start)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl; the keys must be those of the table."""
        unknown = [k for k in metrics if k not in self.keys and not k.startswith("rewards/")]
        if unknown:
            raise KeyError(f"metrics {unknown} are not in the table of metrics.py")
        if not self.active:
            return
        entry = {"step": step, **{k: float(v) for k, v in metrics.items()}}
        self.history.append(entry)
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        for key, value in metrics.items():
            self.board.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        self.last.update(metrics)
        shown = "  ".join(f"{name} {self.last[key]:.4g}" for name, key in self.columns.items() if key in self.last)
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=step, shown=shown)
        elif shown and (step == self.steps or time.monotonic() - self.line > 10):  # not a terminal: a line now and then
            self.line = time.monotonic()
            print(f"step {step}/{self.steps}  {shown}", flush=True)

    def samples(self, step: int, rows: list[dict[str, object]]) -> None:
        """Show a few responses as a table, and keep them in samples.jsonl."""
        if not self.active or not rows:
            return
        import rich.table
        from rich.text import Text

        with (self.folder / "samples.jsonl").open("a") as file:
            file.write("".join(json.dumps({"step": step, **row}) + "\n" for row in rows))
        table = rich.table.Table(*rows[0], title=f"samples at step {step}", title_justify="left")
        for row in rows:
            table.add_row(*(Text(str(value)[-200:]) for value in row.values()))
        (self.progress.console.print if self.progress is not None else rich.print)(table)

    def close(self, curves: dict[str, list[str]]) -> None:
        """Flush everything and draw curves.png: one panel per title, with the keys to draw in it."""
        if not self.active:
            return
        if self.progress is not None:
            self.progress.stop()
        self.file.close()
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
        draw_curves(self.history, curves, self.folder / "curves.png")


def read_metrics(path: Path) -> list[dict]:
    """The entries of a metrics.jsonl; a last line that an interruption cut short is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def _kept(path: Path, start: int) -> list[dict]:
    """The entries up to step `start`, where the run begins; later ones are cut from the file."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= start]
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def draw_curves(history: list[dict], curves: dict[str, list[str]], path: Path) -> None:
    """Write a PNG with one panel per title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(curves), 3.2), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for key in keys:
            points = [(m["step"], m[key]) for m in history if key in m]
            axes.plot(
                *zip(*points, strict=True), label=key, marker="o" if len(points) < 20 else None
            ) if points else None
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    path.with_suffix(".tmp.png").replace(path)


def _progress_bar(columns, steps: int, start: int):
    if not sys.stdout.isatty():
        return None
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[shown]}"),
    )
    bar.add_task("train", total=steps, completed=start, shown="")
    bar.start()
    return bar


def _wandb_run(config):
    if config.wandb_project is None:
        return None
    try:
        import wandb
    except ImportError as error:
        raise InputError("wandb_project is set, but wandb is not installed: pip install wandb") from error
    import dataclasses

    return wandb.init(project=config.wandb_project, dir=config.output_dir, config=dataclasses.asdict(config))
