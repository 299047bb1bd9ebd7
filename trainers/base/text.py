"""Somebody else's text on one line, and on a terminal that obeys none of it."""

import unicodedata


class InputError(ValueError):
    """The user's options, data or disk cannot be used; the message says what came, what was expected and the remedy."""


def in_a_line(error: BaseException) -> str:
    """What an exception of somebody else's says, in one line of at most 300 characters, whatever its text does."""
    try:
        text = " ".join(str(error).split()) or "no reason given"
    except BaseException:  # of the class's own __str__
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text[:300]}"


def shown(text: object, keep: str = "") -> str:
    """The text with everything that a terminal would obey written out: ESC as \\x1b, a change of direction as \\u202e.

    Args:
        text: of anybody; what is none is converted.
        keep: characters to leave as they are, such as line ends.
    """
    text = str(text)
    return text if text.isprintable() else "".join(_shown(character, keep) for character in text)


def _shown(character: str, keep: str) -> str:
    harmless = character.isprintable() or character in keep or unicodedata.category(character) == "Zs"
    return character if harmless else character.encode("unicode_escape").decode()
