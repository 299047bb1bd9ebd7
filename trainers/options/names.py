"""What an option is called here that somebody spelled otherwise: by a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

from fused_rl.trainers.options.trl import NAMES, Here, of_trl

# What is the same thing in another command, and what that one has none of.
SAME = {"answer_column": "completion_column", "completion_column": "answer_column", "epochs": "num_train_epochs"}
NONE = {("eval", "eval_size"): "all rows of --dataset are evaluated: give a file of fewer"}


def unknown(name: str, known: Collection[str], command: str | None = None) -> str:
    """What is said of an option that is none of those known, with the one that is meant where that can be told.

    `command` has the words of its own config in TRL.
    """
    meant = name.replace("-", "_")
    near = difflib.get_close_matches(meant, known, n=1) + difflib.get_close_matches(meant, NAMES, n=1, cutoff=0.8)
    nearest = meant if meant in NAMES else next(iter(difflib.get_close_matches(meant, near, n=1)), None)
    if (command, meant) in NONE:
        told = NONE[command, meant]
    elif SAME.get(meant) in known:
        told = f"did you mean --{SAME[meant]}?"
    elif nearest is None:
        told = "--help lists the options"
    elif nearest in known:
        told = f"did you mean --{nearest}?"
    else:
        slip = "" if nearest == meant else f"did you mean {nearest}, as in TRL? "
        told = slip + _of_trl(of_trl(nearest, command), known)
    return f"unknown option --{name}; {told}"


def _of_trl(answers: list[Here], known: Collection[str]) -> str:
    """What there is for an option of TRL's, first of all what this command has; never an option that looks alike."""
    here = next((one for one in answers if set(one.names.split()) & set(known)), answers[0])
    names = [option for option in here.names.split() if option in known] or here.names.split()
    if not names:
        return f"TRL has it, and here there is none: {here.note}"
    elsewhere = "" if names[0] in known else ", of another command"
    return f"its name here is --{' and --'.join(names)}{elsewhere}{f': {here.note}' if here.note else ''}"
