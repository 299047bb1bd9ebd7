"""`fused-rl <command> --config recipes/x.yaml --key value`: the one list of commands."""

import difflib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import fused_rl


class Command(NamedTuple):
    """A command, by names, so that nothing is imported before it runs."""

    module: str
    """Its `main(argv)` runs the command."""
    summary: str
    config: str = ""
    """The class in its module that declares its options; "" for a command without a config file."""
    page: str = ""
    """The page of docs/ that describes it."""

    def config_class(self) -> Any:
        """Import the module and return the class of its options."""
        return getattr(importlib.import_module(self.module), self.config)


TRAINERS = {
    "sft": Command(
        "fused_rl.trainers.sft",
        "supervised fine-tuning on prompts and completions",
        "SFTConfig",
        "trainers/sft.md",
    ),
    "reward": Command(
        "fused_rl.trainers.reward",
        "a reward model from chosen and rejected responses",
        "RewardConfig",
        "trainers/reward.md",
    ),
    "dpo": Command(
        "fused_rl.trainers.dpo",
        "a policy from chosen and rejected responses",
        "DPOConfig",
        "trainers/dpo.md",
    ),
    "kto": Command(
        "fused_rl.trainers.kto",
        "a policy from single responses that are marked good or bad",
        "KTOConfig",
        "trainers/kto.md",
    ),
    "distill": Command(
        "fused_rl.trainers.distill",
        "a student from a teacher that corrects its responses",
        "DistillConfig",
        "trainers/distill.md",
    ),
    "ppo": Command(
        "fused_rl.trainers.ppo",
        "PPO: RL with a critic, from any scorers",
        "PPOConfig",
        "trainers/ppo.md",
    ),
    "grpo": Command(
        "fused_rl.trainers.grpo",
        "GRPO: RL by comparing the responses to one prompt",
        "GRPOConfig",
        "trainers/grpo.md",
    ),
}
COMMANDS = TRAINERS | {
    "eval": Command(
        "fused_rl.trainers.commands.eval",
        "how many problems a model solves: greedy and pass@k",
        "EvalConfig",
        "doctor.md#evaluation",
    ),
    "doctor": Command(
        "fused_rl.trainers.commands.doctor",
        "problems of a run, or of this machine",
        page="doctor.md",
    ),
    "demo": Command("fused_rl.recipes.demo", "a small model learns sums by grpo, on two CPU cores"),
    "demo-reward": Command("fused_rl.recipes.demo_reward", "a reward model for these sums"),
    "demo-ppo": Command("fused_rl.recipes.demo_ppo", "ppo against that reward model"),
    "demo-distill": Command(
        "fused_rl.recipes.demo_distill", "the demo's model teaches its own warm start"
    ),
}


def program(command: str | None) -> str:
    """Return what is typed to run a command: of a trainer that is none of ours, the name of its file."""
    return f"fused-rl {command}" if command in COMMANDS else Path(sys.argv[0]).name


def module_of(command: str) -> ModuleType:
    """Import the module of a command; end the process with one line if it needs a package that is not installed."""
    try:
        return importlib.import_module(COMMANDS[command].module)
    except ModuleNotFoundError as error:
        extras = "train,demo" if command.startswith("demo") else "train"
        install = f"pip install 'fused-rl[{extras}]'"
        sys.exit(f"fused-rl {command}: error: {error.name} is not installed: {install}")


def main() -> None:
    """Entry point of the `fused-rl` command."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "--version":
        print(f"fused-rl {fused_rl.__version__}")
    elif command in ("-h", "--help"):
        print("usage: fused-rl COMMAND [--config FILE] [--key value ...]\n")
        for name, listed in COMMANDS.items():
            print(f"  {name:<12} {listed.summary}")
        print(
            "\nfused-rl COMMAND --help lists the keys of a command; fused-rl --version prints the version."
        )
    elif command not in COMMANDS:
        near = "".join(difflib.get_close_matches(command, COMMANDS, n=1))
        meant = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}"
        sys.exit(f"fused-rl: error: unknown command {command!r}; {meant}")
    else:
        module_of(command).main(sys.argv[2:])
