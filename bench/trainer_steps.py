"""The group `trainers`: steps beside TRL's on a CPU (trainers.py), or of a larger model on a GPU (gpu_trainers.py)."""

from bench import gpu_trainers, options, trainers


def command(group: str, words: list[str] | None = None) -> int:
    """Run the group by its command line; 1 where one of ours fails."""
    parser = options.parser(trainers.__doc__)
    parser.add_argument(
        "--steps", type=int, help="of each run, the first uncounted (default: 3 to 8)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = options.checked(parser, parser.parse_args(words))
    args.group = group
    return trainers.command(args) if args.device == "cpu" else gpu_trainers.command(args)
