"""`make demo-distill`, `fused-rl demo-distill`: the model of `make demo` teaches its own warm start.

1. Run `make demo` unless its models are there: a warm start that miscounts, and the same model after GRPO.
2. In `fused-rl distill` the warm start samples answers, and the model after GRPO, as the teacher, gives its own
   distribution at every token of them.
"""

import time
from pathlib import Path

import torch

from fused_rl.recipes import demo, tiny_model
from fused_rl.trainers import distill, grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse


def run(teacher: Path, folder: Path, seed: int) -> None:
    """Make the demo's models in `teacher` if they are missing, and distil one into the other, in `folder`."""
    # Student and teacher have the same tokenizer, because both began as the demo's untrained model.
    print(f"1/2 student and teacher: {teacher}/sft/model, {teacher}/grpo/model (of `make demo`)")
    if not (teacher / "grpo" / "model").is_dir():
        demo.warm_start(teacher, seed)
        grpo.train(demo.grpo_config(teacher, seed))
    print("2/2 distillation: fused-rl distill --config recipes/demo_distill.yaml")
    paths = {
        "model": teacher / "sft" / "model",
        "teacher": teacher / "grpo" / "model",
        "dataset": teacher / "data" / "train.jsonl",
        "eval_dataset": teacher / "data" / "eval.jsonl",
        "output_dir": folder,
    }
    distill.train(parse(distill.DistillConfig, demo.arguments("demo_distill.yaml", seed, paths)))


def report(teacher: Path, folder: Path) -> None:
    """Print the table at the end: the held-out figures of the student before and after, and of the teacher."""
    import rich
    import rich.table

    def evaluations(of: Path) -> list[dict]:
        """Return the metrics of the steps of a run that evaluated."""
        return [
            metrics
            for metrics in read_metrics(of / "metrics.jsonl")
            if "eval/accuracy_greedy" in metrics
        ]

    # The first evaluation of a run is before training, and the last one is after it.
    before, *_, after = evaluations(folder)
    *_, taught = evaluations(teacher / "grpo")
    columns = ("", "student before", "student after", "teacher")
    table = rich.table.Table(*columns, title=f"{demo.NUM_EVAL} held-out problems")
    for name, key in (
        ("accuracy, greedy", "eval/accuracy_greedy"),
        ("accuracy, sampled", "eval/accuracy_sampled"),
    ):
        table.add_row(name, *(f"{100 * metrics[key]:.1f} %" for metrics in (before, after, taught)))
    kl = [f"{metrics['eval/distill/kl']:.3f} nats" for metrics in (before, after)]
    table.add_row("KL to the teacher, per token", *kl, "")
    rich.print(table)


@around("fused-rl demo-distill", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl demo-distill`, which `make demo-distill` calls."""
    parser = tiny_model.Parser(
        prog="fused-rl demo-distill", description=str(__doc__).split("\n", 1)[0]
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of data order and sampling, and of a demo that is missing",
    )
    parser.add_argument(
        "--demo_dir", type=Path, default=Path("runs/demo"), help="folder of `make demo`"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo_distill"))
    options = parser.parse_args(argv)
    began = time.monotonic()
    engine.silence_libraries()
    torch.set_num_threads(1)  # for so small a model a second thread is of little use
    run(options.demo_dir, options.output_dir, options.seed)
    report(options.demo_dir, options.output_dir)
    seconds = time.monotonic() - began
    print(
        f"{seconds:.0f} seconds. Model: {options.output_dir / 'model'}  curves: {options.output_dir / 'curves.png'}"
    )


if __name__ == "__main__":
    main()
