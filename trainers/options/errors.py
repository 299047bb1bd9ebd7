"""What a user reads in a line: apart from the options, so that sampling and packing run without what parses those."""


class InputError(ValueError):
    """The user's options, data or disk cannot be used; the message says what came, what was expected and the remedy."""
