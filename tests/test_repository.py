"""What contributors run and read on the way to a pull request: the Makefile, the workflows and the size of the code."""

from tests.tools import size

FILE = '''"""Two lines
of a docstring."""

X = 1  # three tokens and a comment


class Point:
    y: int = 0
    """A docstring under a field."""

    def double(self):
        # a comment of its own line
        return (
            2 * self.y
        )
'''


def test_size_counts_tokens_of_code_and_neither_docstrings_nor_layout():
    measured = size.measure(FILE)
    assert measured.tokens == [3, 3, 5, 6, 2, 5, 1]
    assert (measured.lines, measured.comments, measured.functions) == (15, 2, 1)
    twice = sum([measured, measured], size.Size()).row("x").split()
    assert twice == ["x", "2", "30", "50", "3.6", "6", "28.6", "2"]
