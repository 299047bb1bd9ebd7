"""What an option is called here that somebody spelled otherwise: by a slip, or by its name in TRL."""

import difflib
from collections.abc import Collection

from fused_rl.trainers.options.trl import Here, of_trl


def unknown(name: str, known: Collection[str]) -> str:
    """What is said of an option that is none of those known, with the one that is meant where that can be told."""
    meant = name.replace("-", "_")
    answers = of_trl(meant)
    if answers and meant not in known:
        return f"unknown option --{name}; {_of_trl(answers, known)}"
    near = difflib.get_close_matches(meant, known, n=1)
    return f"unknown option --{name}; {f'did you mean --{near[0]}?' if near else '--help lists the options'}"


def _of_trl(answers: list[Here], known: Collection[str]) -> str:
    """What there is for an option of TRL's, first of all what this command has; never an option that looks alike."""
    for here in answers:
        names = [option for option in here.names.split() if option in known]
        if names:
            return f"its name here is --{' and --'.join(names)}"
    others = [option for option in answers[0].names.split() if option not in known]
    if others:
        return f"its name here is --{' and --'.join(others)}, of another command"
    return f"TRL has it, and here there is none: {answers[0].note}"
