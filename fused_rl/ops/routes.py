"""The two routes from an op's public function to its launchers, which compute both passes of plain tensors.

- Registered operators, so that `torch.compile` sees two opaque calls with known shapes.
- An autograd function, where nobody looks at operators: their dispatch takes as long as a kernel over a hundred rows.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from fused_rl.base.checks import no_second_derivative
from fused_rl.base.outputs import unless_modified


class Op:
    """An op of (*tensors, *options) with the results (*outputs, *state).

    Args:
        names: of both operators.
        launchers: the forward and the backward pass. The latter takes upstream gradients, the output that it reads,
            tensors, state and options, and if there are several leaves, which of them want a gradient.
        shapes: what the launchers return, of tensors without values.
        tensors, leaves, outputs: their numbers; the leaves are the first tensors.
        kept: which output the backward pass reads.
    """

    def __init__(self, names, launchers, shapes, *, tensors, leaves, outputs, kept):
        self.launchers = launchers
        self.tensors, self.leaves, self.outputs, self.kept = tensors, leaves, outputs, kept
        self.operators = [*map(_registered, names, launchers, shapes)]
        self.operators[0].register_autograd(self._backward, setup_context=self._context)
        refuse = no_second_derivative(names[0].partition("::")[2])
        self.operators[1].register_autograd(refuse)
        passes = {"forward": self._forward, "backward": self._backward}
        members = {name: staticmethod(method) for name, method in passes.items()}
        function: Any = type("Unregistered", (torch.autograd.Function,), members)
        self.unregistered = function.apply

    def _save(self, ctx, inputs, results, kept):
        ctx.options = inputs[self.tensors :]
        ctx.save_for_backward(*inputs[: self.tensors], *results[self.outputs :], kept)
        ctx.set_materialize_grads(False)

    def _context(self, ctx, inputs, output):
        self._save(
            ctx, inputs, output, output[self.kept].clone()
        )  # the caller may modify the output
        ctx.mark_non_differentiable(*output[self.outputs :])

    def _forward(self, ctx, *leaves_and_inputs):
        inputs = leaves_and_inputs[-1]  # apart from the leaves, which autograd looks at
        results = self.launchers[0](*inputs)
        self._save(ctx, inputs, results, None)
        ctx.kept = results[self.kept].detach(), results[self.kept]._version
        return results[: self.outputs]

    def _backward(self, ctx, *upstream):
        needs, upstream = ctx.needs_input_grad, upstream[: self.outputs]
        if all(d is None for d in upstream):
            return (None,) * len(needs)
        *saved, kept = ctx.saved_tensors
        launch = self.operators[1]
        if kept is None:  # unregistered
            kept = unless_modified(*ctx.kept)
            if kept is None:
                kept = self.launchers[0](*saved[: self.tensors], *ctx.options)[self.kept]
            if (
                not torch.is_grad_enabled()
            ):  # else, for create_graph=True, a second derivative would go missing
                launch = self.launchers[1]
        # The one flag among options is inplace.
        if torch.is_grad_enabled() and any(option is True for option in ctx.options):
            raise RuntimeError(
                "inplace=True leaves no logits to differentiate again; leave out create_graph"
            )
        wants = needs[: self.leaves]
        arguments = *upstream, kept, *saved, *ctx.options
        gradients = launch(*arguments, *wants) if self.leaves > 1 else (launch(*arguments),)
        wanted = [d if wants_it else None for d, wants_it in zip(gradients, wants, strict=True)]
        return *wanted, *(None,) * (len(needs) - self.leaves)


def _registered(name, launcher, shapes):
    """The operator of a launcher; it may return no None, and has tensors (0,) there."""

    @functools.wraps(launcher)
    def body(*inputs):
        results = launcher(*inputs)
        if isinstance(results, Tensor):
            return results
        like = next(x for x in results if x is not None)
        return tuple(like.new_empty(0) if x is None else x for x in results)

    operator = torch.library.custom_op(name, body, mutates_args=())
    operator.register_fake(shapes)
    return operator
