"""Text from others: on one line, and without control characters on the terminal."""

import unicodedata


class InputError(ValueError):
    """The user's options, data or disk cannot be used; the message says what came, what was expected and the remedy."""


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}"


def shown(text: object, keep: str = "") -> str:
    """Return the text with control characters escaped, ESC as \\x1b, but for those in `keep`."""
    characters = []
    for character in str(text):
        is_space = unicodedata.category(character) == "Zs"
        harmless = is_space or character.isprintable() or character in keep
        characters.append(character if harmless else character.encode("unicode_escape").decode())
    return "".join(characters)
