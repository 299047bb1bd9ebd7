"""What hypothesis draws, where it is installed; else plain draws from the same descriptions, seeded, without shrinking.

A bare image has torch, triton, numpy and pytest: the tests of drawn inputs are those that it must not go without.
"""

import importlib.util
import random

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, Phase, example, given, settings
    from hypothesis import strategies as st

    # What fails is printed as it was drawn: looking for less would take minutes.
    REPEATED = {
        "deadline": None,
        "derandomize": True,
        "database": None,
        "suppress_health_check": list(HealthCheck),
        "phases": [Phase.generate],
    }
else:
    REPEATED = {}

    class st:  # noqa: N801 - as hypothesis calls its strategies
        """A strategy is a function of a `random.Random`."""

        class Strategy:
            def __init__(self, draw):
                self.draw = draw

            def map(self, function):
                return st.Strategy(lambda source: function(self.draw(source)))

        @staticmethod
        def integers(low, high):
            return st.Strategy(lambda source: source.randint(low, high))

        @staticmethod
        def floats(low, high):
            return st.Strategy(lambda source: source.choice([low, high, source.uniform(low, high)]))

        @staticmethod
        def booleans():
            return st.sampled_from([False, True])

        @staticmethod
        def sampled_from(values):
            return st.Strategy(lambda source: source.choice(values))

        @staticmethod
        def one_of(*strategies):
            return st.Strategy(lambda source: source.choice(strategies).draw(source))

        @staticmethod
        def tuples(*strategies):
            return st.Strategy(lambda source: tuple(one.draw(source) for one in strategies))

        @staticmethod
        def lists(strategy, max_size):
            return st.Strategy(lambda source: [strategy.draw(source) for _ in range(source.randint(0, max_size))])

        @staticmethod
        def builds(make, **fields):
            return st.Strategy(lambda source: make(**{name: one.draw(source) for name, one in fields.items()}))

    def given(*positional, **named):
        """Calls a test with values of each strategy, as often as `settings` says around or within it."""

        def decorate(test):
            def run(*fixed):
                for values in getattr(test, "listed", []):
                    test(*fixed, *values)
                for number in range(run.examples):
                    source = random.Random(number)
                    values = [one.draw(source) for one in positional]
                    test(*fixed, *values, **{name: one.draw(source) for name, one in named.items()})

            run.examples = getattr(test, "examples", 100)
            return run

        return decorate

    def settings(max_examples, **_):
        def decorate(test):
            test.examples = max_examples
            return test

        return decorate

    def example(*values):
        def decorate(test):
            test.listed = [*getattr(test, "listed", []), values]
            return test

        return decorate


__all__ = ["REPEATED", "example", "given", "settings", "st"]
