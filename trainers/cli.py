"""`fused-rl <command> --config recipes/x.yaml --key value`: the commands, and what every trainer's `main` does."""

import importlib
import os
import sys
from collections.abc import Callable

import fused_rl
from fused_rl.trainers import engine, epochs, lock
from fused_rl.trainers.config import InputError, RunConfig, parse, to_yaml
from fused_rl.trainers.loop import Stopped

COMMANDS = {
    "sft": "fused_rl.trainers.sft",
    "reward": "fused_rl.trainers.reward",
    "ppo": "fused_rl.trainers.ppo",
    "grpo": "fused_rl.trainers.grpo",
    "eval": "fused_rl.trainers.eval",
    "kl-report": "fused_rl.trainers.kl_report",
    "demo": "fused_rl.recipes.demo",
    "demo-reward": "fused_rl.recipes.demo_reward",
    "demo-ppo": "fused_rl.recipes.demo_ppo",
}
INTERRUPTED = 130  # the usual status of a command that Ctrl-C ended


def run(
    config_class: type[RunConfig],
    arithmetic: Callable[[RunConfig, int], dict[str, object]],
    train: Callable[[RunConfig], str],
    argv: list[str] | None = None,
) -> None:
    """`main` of every trainer: parse, then either describe the run or train.

    Args:
        config_class: the trainer's options.
        arithmetic: (config, number of processes) -> how the batch divides; raises InputError on what does not.
        train: runs the whole training.
        argv: the command line after the command; None takes the process's.
    """
    prog = f"fused-rl {config_class.command}"
    config = parse(config_class, sys.argv[1:] if argv is None else argv, prog)
    orderly = False
    try:
        counted, steps = epochs.foresee(config) if config.dry_run else (config, {})
        divided = arithmetic(counted, int(os.environ.get("WORLD_SIZE", "1"))) | steps
        if config.dry_run:
            print(describe(config, divided))
        else:
            train(config)
        orderly = True
    except InputError as error:
        sys.exit(f"{prog}: error: {error}")
    except Stopped:
        orderly = True
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        print(f"{prog}: stopped at once; what was done since the last checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    finally:
        if not config.dry_run:  # which has set nothing up
            lock.release()
            engine.teardown(orderly)


def describe(config: RunConfig, arithmetic: dict[str, object]) -> str:
    """The resolved configuration and, as comments, the batch arithmetic: YAML that `--config` reads back."""
    lines = [f"# {key}: {value}" for key, value in arithmetic.items()]
    return "\n".join([to_yaml(config), "# batch arithmetic", *lines])


def main() -> None:
    """Entry point of the `fused-rl` command."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "--version":
        print(f"fused-rl {fused_rl.__version__}")
    elif command in ("-h", "--help"):
        print(f"usage: fused-rl {{{','.join(COMMANDS)}}} [--config FILE] [--key value ...]")
        print("       fused-rl COMMAND --help lists the keys of a command; fused-rl --version")
    elif command not in COMMANDS:
        sys.exit(f"fused-rl: error: unknown command {command!r}; there are {', '.join(COMMANDS)}")
    else:
        importlib.import_module(COMMANDS[command]).main(sys.argv[2:])
