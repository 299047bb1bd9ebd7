"""`make demo-ppo`, `fused-rl demo-ppo`: PPO against a learned reward model, with the true score beside it.

1. The demo's problems and its warm start: `fused-rl sft` trains on the answers of a teacher who miscounts.
2. `fused-rl reward` trains a reward model on right and wrong answers to those problems, longer than `make demo-reward`.
3. `fused-rl ppo` trains the policy against that reward model, from which the critic starts, too. reasoning-gym's own
   scorer also sees each answer, with a weight of 0: it adds nothing to the reward, but it shows how far the reward
   model's score can be trusted.
"""

import time
from pathlib import Path

import torch

from fused_rl.recipes import demo, demo_reward, tiny_model
from fused_rl.trainers import ppo, reward, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

# The metrics of the score that PPO maximises, and of the true one.
PROXY, TRUTH = "objective/scores", "rewards/fused_rl.recipes.gym:score/mean"


def run(folder: Path, seed: int) -> list[dict]:
    """Run warm start, reward model and PPO with one seed, and return the metrics of PPO, one dict per step."""
    print(
        "1/3 problems, an untrained model, and a warm start: fused-rl sft --config recipes/demo_sft.yaml"
    )
    demo.prepare(folder, seed)
    data = folder / "data"
    paths = {
        "model": folder / "init",
        "dataset": data / "demonstrations.jsonl",
        "output_dir": folder / "sft",
    }
    sft.train(parse(sft.SFTConfig, demo.arguments("demo_sft.yaml", seed, paths)))

    print("2/3 reward model: fused-rl reward --config recipes/demo_reward.yaml")
    problems = demo.problems(seed, demo.NUM_TRAIN + demo.NUM_EVAL)
    pairs = demo_reward.make_pairs(problems, seed)
    # Only training pairs are added, so the held-out accuracy is on the same pairs as in `make demo-reward`.
    pairs["train"] += miscounts(problems[: demo.NUM_TRAIN])
    # It has four layers, because with two, as in the policy, it too rarely tells sums apart that differ by one.
    texts = [entry["question"] + entry["answer"] for entry in problems]
    untrained = demo.build_model(folder / "judge", texts, seed, layers=4)
    paths = {"model": untrained, "output_dir": folder / "reward"}
    for split, option in (("train", "dataset"), ("eval", "eval_dataset")):
        paths[option] = write_rows(data / f"pairs-{split}.jsonl", pairs[split])
    reward.train(parse(reward.RewardConfig, demo.arguments("demo_reward.yaml", seed, paths)))

    print("3/3 PPO: fused-rl ppo --config recipes/demo_ppo.yaml")
    # The reward model scores the responses, and the critic starts from it, too.
    judge = folder / "reward" / "model"
    paths = {
        "model": folder / "sft" / "model",
        "dataset": data / "train.jsonl",
        "eval_dataset": data / "eval.jsonl",
        "output_dir": folder / "ppo",
        "critic": judge,
        "verifiers": f"[reward_model:{judge}, fused_rl.recipes.gym:score]",
    }
    ppo.train(parse(ppo.PPOConfig, demo.arguments("demo_ppo.yaml", seed, paths)))
    return read_metrics(folder / "ppo" / "metrics.jsonl")


def miscounts(problems: list[dict]) -> list[dict]:
    """Return pairs of the right answer and one next to it.

    The warm-started policy makes these mistakes, so the reward model must recognise them.
    """
    rows = []
    for entry in problems:
        right = int(entry["answer"])
        for wrong in (right - 1, right + 1, right + 2):
            row = {
                "question": entry["question"],
                "chosen": str(right),
                "rejected": str(wrong),
                "kind": "a miscount",
            }
            rows.append(row)
    return rows


def row_of(history: list[dict]) -> list[str]:
    """Return a seed's row of the table: the figures on held-out problems before and after PPO, and the KL of that."""
    evaluations = [metrics for metrics in history if "eval/score" in metrics]
    before = evaluations[0]
    after = evaluations[-1]
    cells = [f"{before['eval/score']:.2f} -> {after['eval/score']:.2f}"]
    for key in ("eval/accuracy_greedy", "eval/accuracy_sampled"):
        cells.append(f"{100 * before[key]:.1f} -> {100 * after[key]:.1f} %")
    # With an adaptive weight the KL may have been larger on the way than at the end.
    highest = max(metrics["eval/kl_exact"] for metrics in evaluations)
    return [*cells, f"{after['eval/kl_exact']:.2f} (at most {highest:.2f})"]


def draw(histories: dict[str, list[dict]], path: Path) -> None:
    """Draw three panels over the steps of PPO: score and true accuracy by KL, score by length, and win rate by KL."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    proxy, length, wins = figure.subplots(1, 3)

    # Each seed has a colour. If score and truth part as the KL grows, or the score grows with the length, the policy
    # exploits the reward model.
    for name, history in histories.items():
        steps = [metrics for metrics in history if PROXY in metrics]
        kl = [metrics["objective/kl_exact"] for metrics in steps]
        scores = [m[PROXY] for m in steps]
        truth = [m[TRUTH] for m in steps]
        (line,) = proxy.plot(kl, scores, ".", markersize=3, label=f"score, {name}")
        colour = line.get_color()
        proxy.plot(kl, truth, "x", markersize=3, color=colour, label=f"true accuracy, {name}")
        lengths = [m["completions/mean_length"] for m in steps]
        length.plot(lengths, scores, ".", markersize=3, color=colour, label=name)
        paired = [m for m in steps if "val/win_rate" in m]
        rates = [m["val/win_rate"] for m in paired]
        kl = [m["objective/kl_exact"] for m in paired]
        wins.plot(kl, rates, ".", markersize=3, color=colour, label=name)
    proxy.set(
        title="score and true accuracy of sampled answers",
        xlabel="KL to the reference (nats per response)",
    )
    length.set(title="score against length", xlabel="tokens per response", ylabel="score")
    wins.set(
        title="right scores above wrong, same prompt",
        xlabel="KL to the reference (nats per response)",
    )
    for axes in (proxy, length, wins):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


@around("fused-rl demo-ppo", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl demo-ppo`, which `make demo-ppo` calls."""
    import rich
    import rich.table

    parser = tiny_model.Parser(prog="fused-rl demo-ppo", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="one run per seed, of everything in it"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo_ppo"))
    options = parser.parse_args(argv)
    began = time.monotonic()
    folder = options.output_dir
    histories = {}
    engine.silence_libraries()
    torch.set_num_threads(1)  # for so small a model a second thread is of little use
    # Several seeds get a folder each, so that none replaces the files of another.
    for seed in options.seeds:
        place = folder if len(options.seeds) == 1 else folder / f"seed-{seed}"
        histories[f"seed {seed}"] = run(place, seed)
    columns = (
        "held out",
        "score",
        "accuracy, greedy",
        "accuracy, sampled",
        "exact KL, nats per response",
    )
    table = rich.table.Table(*columns, title="before PPO -> after: what is paid, and what is true")
    for name, history in histories.items():
        table.add_row(name, *row_of(history))
    rich.print(table)
    draw(histories, folder / "panel.png")
    seconds = time.monotonic() - began
    used = time.process_time()
    ppo_folder = place / "ppo"
    print(f"{seconds:.0f} seconds ({used:.0f} of CPU). Score against truth: {folder / 'panel.png'}")
    print(
        f"Model: {ppo_folder / 'model'}  critic: {ppo_folder / 'critic'}  curves: {ppo_folder / 'curves.png'}"
    )


if __name__ == "__main__":
    main()
