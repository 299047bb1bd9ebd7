"""Inputs drawn from a description, the same in every run: hypothesis's names, over `random`, without its shrinking.

Hypothesis itself draws also from the constants of the modules that happen to be imported, so that what a test is given
depends on the tests before it; and a bare image, with torch, triton, numpy and pytest, has none.
"""

import os
import random

SEED = os.environ.get("FUSED_RL_DRAWS", "")  # of other draws than the usual ones: make test-hostile


class Strategy:
    """A function of a `random.Random`."""

    def __init__(self, draw):
        self.draw = draw

    def map(self, function):
        return Strategy(lambda source: function(self.draw(source)))


class st:  # noqa: N801 - as hypothesis calls its strategies
    @staticmethod
    def integers(low, high):
        return Strategy(lambda source: source.randint(low, high))

    @staticmethod
    def floats(low, high):
        return Strategy(lambda source: source.choice([low, high, source.uniform(low, high)]))

    @staticmethod
    def booleans():
        return st.sampled_from([False, True])

    @staticmethod
    def sampled_from(values):
        return Strategy(lambda source: source.choice(values))

    @staticmethod
    def tuples(*strategies):
        return Strategy(lambda source: tuple(one.draw(source) for one in strategies))

    @staticmethod
    def lists(strategy, max_size):
        return Strategy(
            lambda source: [strategy.draw(source) for _ in range(source.randint(0, max_size))]
        )

    @staticmethod
    def builds(make, *parts, **fields):
        def draw(source):
            return make(
                *[one.draw(source) for one in parts],
                **{name: one.draw(source) for name, one in fields.items()},
            )

        return Strategy(draw)


def given(*positional, **named):
    """Calls a test with values of each strategy, as often as `settings` says around or within it."""

    def decorate(test):
        def run(*fixed):
            for number in range(run.examples):
                source = random.Random(f"{SEED}{number}")
                values = [one.draw(source) for one in positional]
                by_name = {name: one.draw(source) for name, one in named.items()}
                try:
                    test(*fixed, *values, **by_name)
                except BaseException:
                    print("drawn:", *values, by_name or "")
                    raise

        run.examples = getattr(test, "examples", 100)
        return run

    return decorate


def settings(max_examples):
    def decorate(test):
        test.examples = max_examples
        return test

    return decorate
