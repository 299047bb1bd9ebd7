"""What the ways of doing the same thing cost, in turns."""

from collections.abc import Callable

from bench import machine, timing


def cost(what: str, ways: dict[str, Callable[[], object]], rounds: int) -> dict:
    """A row: CPU seconds of each way, those of the others over the first's, and what each holds at its peak in MiB."""
    seconds = timing.cpu_seconds(ways, rounds)
    first, *others = ways
    row = {"what": what}
    for name in ways:
        row[f"{name}, CPU s"] = seconds[name]
    for name in others:
        row[f"{name} / {first}"] = seconds[name] / seconds[first]
    for name, run in ways.items():
        row[f"{name}, MiB"] = machine.peak_extra_bytes(run, "cpu") / 2**20
    return row


def both(host: str, integration, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """The ways of a host that is patched as a whole: without and with ours."""

    def patched():
        with integration.patch():
            return run()

    return {host: run, "ours": patched}


def with_gradients(function: Callable, leaves: tuple) -> Callable[[], None]:
    """`function(*leaves)`, which runs backward; its gradients are gone afterwards, so that memory counts them."""

    def run():
        function(*leaves)
        for leaf in leaves:
            leaf.grad = None

    return run
