"""The error for an option that does not exist, with the option that is meant: after a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

from fused_rl.trainers.options.trl import NAMES

# What is the same thing in another command, and what that one has none of.
SAME = {"answer_column": "completion_column", "completion_column": "answer_column", "epochs": "num_train_epochs"}
NONE = {("eval", "eval_size"): "all rows of --dataset are evaluated: give a file of fewer"}


def unknown(name: str, known: Collection[str], command: str | None = None) -> str:
    """Return the message for an option that is not among those known, with the one that is meant if that is clear."""
    meant = name.replace("-", "_")
    nearest = difflib.get_close_matches(meant, [*known, *NAMES], n=1)
    if (command, meant) in NONE:
        told = NONE[command, meant]
    elif SAME.get(meant) in known:
        told = f"did you mean --{SAME[meant]}?"
    elif meant in NAMES:
        told = f"its name here is {NAMES[meant]}"
    elif nearest and nearest[0] in NAMES:
        told = f"did you mean {nearest[0]}, as in TRL? its name here is {NAMES[nearest[0]]}"
    else:
        told = f"did you mean --{nearest[0]}?" if nearest else "--help lists the options"
    return f"unknown option --{name}; {told}"
