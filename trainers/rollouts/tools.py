"""Functions and environments that the policy calls while it speaks, by the signatures that TRL's users have.

transformers writes the schema of a function and reads calls. A turn of all responses that still speak is one batch of
the sampler that the options describe; what happens between two turns runs in threads, one for each response.
"""

import asyncio
import inspect
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from threading import Thread
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from ..base.text import (
    InputError,
    escaped,
    import_name_of,
    in_a_line,
    load_function,
    name_of,
    users_function,
)
from ..data.encode import Encoder
from .sampling import Sampling
from .turns import Conversation
from .types import Prompt, Response, Sampler, after_turn, of_turn

# Responses whose calls run at once.
THREADS = 64
# Of a result at most so many characters are read per token that is left, and a longer one says that it was cut.
CHARACTERS_PER_TOKEN = 16
CUT = "… (cut)"
# A row of a run without a dataset. What an environment says takes the place of a blank prompt.
BLANK = {"prompt": " "}


class CallTimeout(TimeoutError):
    """A call has not ended in time."""


class ToolSampler(Sampler):
    """A sampler of responses that call functions, and its own `SamplerFactory`.

    Args:
        config: the options of the run; as an attribute, with the schemas of the tools and the environments' rewards.
        tools: functions from Python, beside those that the options name.
        environment: what makes an environment, or several by the names that rows choose.
    """

    def __init__(self, config: Any, tools: Sequence[Callable] | None, environment: Any):
        self.tools = [load_function("tools", name) for name in config.tools or ()]
        self.tools += tools or ()
        if not isinstance(environment, dict):
            make = users_function("environment", config.environment, environment)
            environment = {None: make or object}
        self.factories: dict[str | None, Callable] = environment
        # The first instance of each says what its methods are. A rollout uses the instances of the one before again.
        self.idle = {name: deque([make()]) for name, make in environment.items()}
        self.lent: list[tuple[deque, Any]] = []
        self.schemas: dict[str | None, list[dict]] = {}
        functions: dict[str, Callable] = {}
        verifiers = config.verifiers or []
        for name, (one,) in self.idle.items():
            self.schemas[name] = [*map(get_json_schema, self.functions(one).values())]
            functions |= self.functions(one)
            kind = type(one)
            if hasattr(kind, "get_reward") and {kind, import_name_of(kind)}.isdisjoint(verifiers):
                verifiers = [*verifiers, kind]
        schemas = [*map(get_json_schema, functions.values())]
        kwargs = (config.chat_template_kwargs or {}) | {"tools": schemas}
        self.config = config.replace(verifiers=verifiers or None, chat_template_kwargs=kwargs)

    def rows(self, dataset: Any, eval_dataset: Any) -> tuple[Any, Any]:
        """Return the rows of Python; blank ones if there are no others, and environments make the tasks."""
        if (
            dataset is None
            and self.config.dataset is None
            and object not in self.factories.values()
        ):
            dataset = [BLANK] * (self.config.prompts_per_step + self.config.eval_size)
        return dataset, eval_dataset

    def functions(self, environment: Any) -> dict[str, Callable]:
        """Return the tools and the public methods of an environment by name."""
        functions = [*self.tools]
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
            if name not in ("reset", "get_reward") and not name.startswith("_"):
                functions.append(getattr(environment, name))
        return {function.__name__: function for function in functions}

    def __call__(self, built: Sampler, tokenizer: Any) -> Sampler:
        super().__init__(built, tokenizer)
        self.encoder = Encoder.of(self.config, tokenizer)
        self.conversation = Conversation(tokenizer, **self.config.chat_template_kwargs)
        if tokenizer.response_template is None:
            try:
                from trl.chat_template_utils import add_response_schema

                add_response_schema(tokenizer)
            except (ImportError, ValueError) as error:
                raise InputError(
                    "tools: the tokenizer reads no calls: it has no response_template, and TRL adds none "
                    f"({in_a_line(error)}); see docs/tools.md"
                ) from error
        return self

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Response]:
        """Return one response per prompt, in which what others than the policy say is not trained."""
        for idle, environment in self.lent:
            idle.append(environment)
        self.lent = []
        episodes = [self._episode(prompt, sampling.max_new_tokens) for prompt in sampling.prompts]
        responses: dict[int, Response] = {}
        turns: dict[int, Any] = dict.fromkeys(range(len(episodes)))
        for number in itertools.count():
            jobs = [partial(episodes[i].send, turn) for i, turn in turns.items()]
            with ThreadPool(min(THREADS, len(jobs))) as pool:
                steps = dict(zip(turns, pool.map(_finished, jobs, 1), strict=True))
            responses |= {i: response for i, (response, _) in steps.items()}
            going = [i for i, (_, goes_on) in steps.items() if goes_on]
            if not going:
                break
            contexts = [responses[i].extra["prompt_ids"] + responses[i].ids for i in going]
            room = sampling.max_new_tokens - min(len(responses[i].ids) for i in going)
            spoken = self.built.sample(contexts, of_turn(sampling, number, going, room))
            turns = dict(zip(going, spoken, strict=True))
        return [*responses.values()]

    def _episode(
        self, prompt: Prompt, most: int
    ) -> Generator[tuple[Response, bool], Response, None]:
        """Yield a response of at most so many tokens, and whether the policy's next turn is to be sent."""
        # An environment says what is added to the prompt.
        name = None if None in self.factories else prompt.row["environment"]
        try:
            environment: Any = self.idle[name].pop()
        except IndexError:
            environment = self.factories[name]()
        functions = self.functions(environment)
        ids = prompt.ids
        if type(environment) is not object:
            ids = self._outcome(partial(self._prompt_ids, prompt, name, environment))
        failures = [ids] if isinstance(ids, Exception) else []
        logged: list[tuple[str, float]] = []
        extra = {"prompt_ids": prompt.ids if failures else ids, "completions": [], "logged": logged}
        logprobs = [] if self.reports_logprobs else None
        response = Response([], "length", logprobs, trained=[], extra=extra)

        # Turn by turn, until the policy calls nothing.
        goes_on = not failures
        iterations = itertools.count()
        while goes_on:
            turn = yield response, True
            turn = _within(turn, most - len(response.ids))
            calls = self._calls(turn, response, self.schemas[name])
            if next(iterations) == self.config.max_tool_calling_iterations:
                calls = []
            answers = []
            for call in calls:
                result = self._outcome(partial(_called, call, functions))
                failed = isinstance(result, Exception)
                # A thread may still be in the environment.
                if isinstance(result, CallTimeout) and type(environment) is not object:
                    failures.append(result)
                tool = "tool" if failed else call["function"]["name"]
                text = in_a_line(result) if failed else result
                answers.append({"role": "tool", "name": tool, "content": text})
                logged.append(("tools/failure_frequency", float(failed)))
            extra["completions"] += answers
            said = (
                [] if failures else self._said(turn, answers, most - len(response.ids + turn.ids))
            )
            response = after_turn(response, turn, said)
            goes_on = bool(said)
            if answers and not said:
                response.finish = "length"

        # What scorers and metrics read; another environment takes the place of one that failed.
        logged.append(("tools/call_frequency", float(len(logged))))
        reward = None
        if hasattr(environment, "get_reward") and not failures:
            reward = self._outcome(environment.get_reward)
        if isinstance(reward, Exception):
            failures, reward = [reward], None
        if failures:
            warnings.warn(f"an environment failed: {in_a_line(failures[0])}", stacklevel=2)
            environment = self.factories[name]()
        logged.append(("environments/failure_frequency", float(len(failures))))
        extra |= {"environments": environment}
        extra |= {"environment_rewards": {name_of(type(environment)): reward}}
        self.lent.append((self.idle[name], environment))
        yield response, False

    def _outcome(self, function: Callable) -> Any:
        """Return what a function returns or raises; one that hangs is left behind, in a daemon."""
        outcomes: list[Any] = []
        thread = Thread(target=lambda: outcomes.append(_tried(function)), daemon=True)
        thread.start()
        thread.join(self.config.tool_timeout)
        return (
            outcomes[0] if outcomes else CallTimeout(f"over {self.config.tool_timeout:g} seconds")
        )

    def _prompt_ids(self, prompt: Prompt, name: str | None, environment: Any) -> list[int]:
        """Reset an environment; return the token ids of a prompt with what it says, and with its tools alone."""
        row = dict(prompt.row)
        if name is not None:
            del row["environment"]
        text = environment.reset(**row) or ""
        *before, last = self.encoder.messages(prompt.prompt)
        last = last | {"content": (last["content"].strip() and last["content"]) + text}
        rendered = self.encoder.render(
            [*before, last], self.schemas[name], add_generation_prompt=True
        )
        ids = self.encoder.ids(rendered)
        if len(ids) > self.config.max_prompt_length:
            raise ValueError(
                f"with what reset says the prompt has {len(ids)} tokens: max_prompt_length"
            )
        return ids

    def _calls(self, turn: Response, response: Response, schemas: list[dict]) -> list:
        """Note a turn as a message; return its calls, or an error in place of what cannot be read."""
        message: dict = {"role": "assistant", "content": ""}
        context = response.extra["prompt_ids"] + response.ids
        try:
            message |= self.tokenizer.parse_response(turn.ids, prefix=context, tools=schemas)
            calls = message.get("tool_calls", [])
        except Exception as error:
            message["content"] = self.conversation.text(turn)
            calls = [error]
        response.extra["completions"].append(message)
        # A turn that was cut has no room for results.
        return calls if turn.finish == "stop" else []

    def _said(self, turn: Response, answers: list[dict], room: int) -> list[int]:
        """Return the ids of results, cut until a token is left for the policy; none without results or room."""
        most = CHARACTERS_PER_TOKEN * room if answers else 0
        while most:
            shown = []
            for answer in answers:
                text = answer["content"]
                cut = CUT if len(text) > most else ""
                shown.append((answer["name"], escaped(text[:most], "\n\t") + cut))
            said = self.conversation.replies(turn, "tool", *shown)
            if len(said) < room:
                return said
            most = most * 3 // 4
        return []


def _called(call: Any, functions: dict[str, Callable]) -> str:
    """Return the result of a call as text."""
    if isinstance(call, Exception):
        raise call
    function = call["function"]
    return str(_finished(partial(functions[function["name"]], **function["arguments"])))


def _tried(function: Callable) -> Any:
    """Return what a function returns or raises."""
    try:
        return _finished(function)
    except Exception as error:
        return error


def _finished(function: Callable) -> Any:
    """Return what a function returns, also one that is async."""
    result = function()
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _within(turn: Response, room: int) -> Response:
    """Return a turn, cut to a number of tokens."""
    more = len(turn.ids) - room
    if more <= 0:
        return turn
    support: Any = turn.support
    support = support and support.split([room, more])[0]
    return Response(turn.ids[:room], "length", turn.logprobs and turn.logprobs[:room], support)
