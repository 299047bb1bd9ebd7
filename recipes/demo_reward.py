"""`make demo-reward`, `fused-rl demo-reward`: a small reward model learns to tell right sums from wrong ones.

The problems are reasoning-gym's. The right answer is paired with each of several kinds of wrong answers, if
reasoning-gym's own `score_answer` confirms which of the two is better. No problem of a held-out pair is trained on.
"""

import random
import time
from pathlib import Path

from fused_rl.recipes import demo, gym, tiny_model
from fused_rl.trainers import reward
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_rows
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer
from fused_rl.trainers.run.command import LOST, around
from fused_rl.trainers.run.parse import parse

NUM_TRAIN, NUM_EVAL = 3000, 256


def evaluate(terms: list[str]) -> int:
    """Return the value of a chain such as `["3", "-", "4", "+", "1"]`, evaluated from the left."""
    value = int(terms[0])
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        value += int(term) if sign == "+" else -int(term)
    return value


def wrong_answers(entry: dict, rng: random.Random) -> dict[str, str]:
    """Return wrong answers that a careless pupil might give, by the kind of mistake.

    A mistake whose result happens to be right is left out.
    """
    terms = entry["metadata"]["expression"].split()
    right = int(entry["answer"])

    # One sign is read the other way round; signs are at the odd positions.
    misread = list(terms)
    position = rng.randrange(1, len(terms), 2)
    misread[position] = "+" if terms[position] == "-" else "-"

    # The chain is evaluated from the right, as if there were brackets around its last two terms, and so on.
    grouped = int(terms[-1])
    for sign, term in zip(terms[-2::-2], terms[-3::-2], strict=True):
        grouped = int(term) + grouped if sign == "+" else int(term) - grouped
    wrong = {
        "off by one": right + rng.choice([-1, 1]),
        "a sign misread": evaluate(misread),
        "last term forgotten": evaluate(terms[:-2]),
        "grouped from the right": grouped,
        "minus lost or added": -right,
        "a guess": rng.randint(-16, 27),
    }
    return {kind: str(answer) for kind, answer in wrong.items() if answer != right}


def make_pairs(problems: list[dict], seed: int) -> dict[str, list[dict]]:
    """Return preference pairs: "train" about the first `NUM_TRAIN` problems, and "eval" about the others."""
    rng = random.Random(seed)
    pairs = {"train": [], "eval": []}
    for i, entry in enumerate(problems):
        for kind, answer in wrong_answers(entry, rng).items():
            right = entry["answer"]
            # The gym has the last word on which answer is better, so that no pair is the wrong way round.
            if gym.score(right, entry) > gym.score(answer, entry):
                row = {
                    "question": entry["question"],
                    "chosen": right,
                    "rejected": answer,
                    "kind": kind,
                }
                pairs["train" if i < NUM_TRAIN else "eval"].append(row)
    return pairs


def prepare(folder: Path, seed: int) -> None:
    """Write the preference pairs, and the untrained model with its tokenizer, into a folder."""
    made = demo.problems(seed, NUM_TRAIN + NUM_EVAL)
    pairs = make_pairs(made, seed)
    for split, rows in pairs.items():
        write_rows(folder / "data" / f"{split}.jsonl", rows)
    demo.build_model(folder / "init", [entry["question"] + entry["answer"] for entry in made], seed)
    print(
        f"{len(pairs['train'])} pairs about {NUM_TRAIN} problems; {len(pairs['eval'])} about {NUM_EVAL} held out"
    )


def accuracy_by_kind(config: reward.RewardConfig) -> dict[str, float]:
    """Return how often the right answer has the higher score, by the kind of wrong answer, on held-out pairs."""
    rows = load_rows(config.eval_dataset)
    encoder = encode.Encoder.of(config, encode.load_tokenizer(config.model))
    pairs = preferences.pairs_of(config, rows, encoder)
    # The saved model scores here, in the way in which it would score responses in PPO.
    scorer = RewardScorer(RewardModel.from_pretrained(f"{config.output_dir}/model"), 256)
    chosen = scorer([pair.chosen[0] for pair in pairs], [pair.chosen[1] for pair in pairs])
    rejected = scorer([pair.rejected[0] for pair in pairs], [pair.rejected[1] for pair in pairs])
    won = {"all": (chosen > rejected).tolist()}
    for row, hit in zip(rows, won["all"], strict=True):
        won.setdefault(row["kind"], []).append(hit)
    return {kind: sum(hits) / len(hits) for kind, hits in won.items()}


def run(folder: Path, seed: int) -> dict[str, float]:
    """Train one reward model from nothing, and return its held-out accuracy by the kind of wrong answer."""
    prepare(folder, seed)
    paths = {
        "model": folder / "init",
        "dataset": folder / "data/train.jsonl",
        "eval_dataset": folder / "data/eval.jsonl",
        "output_dir": folder / "reward",
    }
    config = parse(reward.RewardConfig, demo.arguments("demo_reward.yaml", seed, paths))
    reward.train(config)
    return accuracy_by_kind(config)


@around("fused-rl demo-reward", LOST)
def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl demo-reward`, which `make demo-reward` calls."""
    import rich
    import rich.table

    parser = tiny_model.Parser(
        prog="fused-rl demo-reward", description=str(__doc__).split("\n", 1)[0]
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="one run per seed, of everything in it"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo_reward"))
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    # Several seeds get a folder each, so that none replaces the files of another.
    several = len(arguments.seeds) > 1
    found = {}
    engine.silence_libraries()
    for seed in arguments.seeds:
        folder = arguments.output_dir / f"seed-{seed}" if several else arguments.output_dir
        found[f"seed {seed}"] = run(folder, seed)
    table = rich.table.Table(
        "held-out accuracy", *found, title="how often the right answer scores higher"
    )
    for kind in next(iter(found.values())):
        table.add_row(kind, *(f"{100 * accuracy[kind]:.1f} %" for accuracy in found.values()))
    rich.print(table)
    print(f"{time.monotonic() - began:.0f} seconds. Curves: {folder}/reward/curves.png")
    print(f"Model: {folder}/reward/model")


if __name__ == "__main__":
    main()
