"""Functions and environments that the policy calls while it speaks, by the signatures that TRL's users have.

transformers writes the schema of a function and reads calls. A turn of all responses that still speak is one batch of
the sampler that the options describe, and the calls that they make in it run at once, in threads.
"""

import asyncio
import inspect
import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from ..base import ranks
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

# Calls that run at once.
THREADS = 64
# Of a result at most so many characters are read per token that is left, and a longer one says that it was cut.
CHARACTERS_PER_TOKEN = 16
CUT = "… (cut)"


class CallTimeout(TimeoutError):
    """A call has not ended in time."""


class ToolSampler(Sampler):
    """A sampler of responses that call functions, and its own `SamplerFactory`.

    Args:
        config: the options of the run; as an attribute, with the schemas of the tools and the environments' rewards.
        tools: functions from Python, beside those that the options name.
        environment: what makes an environment, or several by the names that rows choose.
    """

    def __init__(self, config: Any, tools: Sequence[Callable] = (), environment: Any = None):
        names = config.tools.split(",") if config.tools else []
        self.tools = [*tools, *(load_function("tools", name) for name in names)]
        if not isinstance(environment, dict):
            make = users_function("environment", config.environment, environment) or object
            environment = {None: make}
        self.factories = environment
        # The first instance of each says what its methods are. All episodes of a rollout take theirs before any ends,
        # so what they give back is for the next one.
        self.idle = {name: [make()] for name, make in environment.items()}
        self.schemas = {}
        verifiers = config.verifiers or []
        for name, (one,) in self.idle.items():
            self.schemas[name] = [*map(get_json_schema, self.functions(one).values())]
            kind = type(one)
            if hasattr(kind, "get_reward") and {kind, import_name_of(kind)}.isdisjoint(verifiers):
                verifiers = [*verifiers, kind]
        kwargs = dict(config.chat_template_kwargs or {}, tools=sum(self.schemas.values(), []))
        self.config = config.replace(verifiers=verifiers or None, chat_template_kwargs=kwargs)

    def functions(self, environment: Any) -> dict[str, Callable]:
        """Return the tools and the public methods of an environment by name."""
        functions = {tool.__name__: tool for tool in self.tools}
        for name, method in inspect.getmembers(environment, inspect.ismethod):
            if name not in ("reset", "get_reward") and not name.startswith("_"):
                functions[name] = method
        return functions

    def environment_of(self, row: dict) -> str | None:
        """Return the name of a row's environment, None if there is one for all; refuse a name that none has."""
        names = [*self.factories]
        name = None if None in names else row.get("environment")
        if name not in names:
            raise InputError(f"column 'environment' is {name!r:.80}; expected one of {names}")
        return name

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
        episodes = [self._episode(prompt, sampling.max_new_tokens) for prompt in sampling.prompts]
        wanted = [next(episode) for episode in episodes]

        def send(places: Sequence[int], outcomes: Sequence[Any]) -> None:
            for i, outcome in zip(places, outcomes, strict=True):
                wanted[i] = episodes[i].send(outcome)

        for number in itertools.count():
            # Call what is wanted, until every episode waits for the policy or is over.
            while calling := [i for i, want in enumerate(wanted) if callable(want)][:THREADS]:
                send(calling, self._outcomes([wanted[i] for i in calling]))
            speaking = [i for i, want in enumerate(wanted) if isinstance(want, tuple)]
            if not speaking:
                break
            contexts, rooms = zip(*(wanted[i] for i in speaking), strict=True)
            how = of_turn(sampling, number, speaking, max(rooms))
            send(speaking, self.built.sample([*contexts], how))
        return wanted

    def _episode(self, prompt: Prompt, most: int) -> Generator[Any, Any, None]:
        """Yield what a response of at most so many tokens waits for, and at the end the response.

        A function waits for what it returns or raises, and (token ids, the tokens that are left) for the policy's turn.
        """
        # An environment says what is added to the prompt.
        name = self.environment_of(prompt.row)
        idle, make = self.idle[name], self.factories[name]
        environment = idle.pop() if idle else make()
        functions = self.functions(environment)
        messages, logged = [], []
        extra: dict[str, Any] = {
            "prompt_ids": prompt.ids,
            "completions": messages,
            "logged": logged,
        }
        response = Response(
            [], "length", [] if self.reports_logprobs else None, trained=[], extra=extra
        )
        failure, plays = None, make is not object
        if plays:
            failure = yield partial(self._reset, prompt, name, environment, extra)

        # Turn by turn, until the policy calls nothing. A turn that was cut leaves no room for results.
        turns = itertools.count()
        while failure is None:
            room = most - len(response.ids)
            context = extra["prompt_ids"] + response.ids
            turn = _within((yield context, room), room)
            message, calls = self._read(turn, context, self.schemas[name])
            if next(turns) == self.config.max_tool_calling_iterations or turn.finish == "length":
                calls = []
            answers = []
            for call in calls:
                result = yield partial(_called, call, functions)
                failed = isinstance(result, BaseException)
                logged.append(("tools/failure_frequency", float(failed)))
                # A thread may still be in the environment.
                if plays and isinstance(result, CallTimeout):
                    failure = result
                tool = "tool" if failed else call["function"]["name"]
                text = in_a_line(result) if failed else result
                answers.append({"role": "tool", "name": tool, "content": text})
            messages += [message, *answers]
            said = [] if failure else self._said(turn, answers, room - len(turn.ids))
            response = after_turn(response, turn, said)
            if not said:
                response.finish = "length" if answers else turn.finish
                break

        # What scorers and metrics read; another environment takes the place of one that failed.
        logged.append(("tools/call_frequency", float(len(logged))))
        if hasattr(environment, "get_reward") and failure is None:
            reward = yield environment.get_reward
            if isinstance(reward, BaseException):
                failure = reward
            else:
                extra[name_of(type(environment))] = reward
        if failure is not None:
            warnings.warn(f"an environment failed: {in_a_line(failure)}", stacklevel=2)
            environment = make()
        if plays:
            logged.append(("environments/failure_frequency", float(failure is not None)))
        # The next rollout may play before scorers read this one, and another rank may read it.
        if not self.config.lag and ranks.sequence_group() is None:
            extra["environments"] = environment
        idle.append(environment)
        yield response

    def _outcomes(self, functions: list[Callable]) -> list[Any]:
        """Call functions at once; return what each returns or raises. One that hangs is left behind, in a daemon."""
        limit, futures = self.config.tool_timeout, [Future() for _ in functions]

        def call(future: Future, function: Callable) -> None:
            try:
                future.set_result(_finished(function()))
            except BaseException as error:  # one that exits too
                future.set_result(error)

        for job in zip(futures, functions, strict=True):
            Thread(target=call, args=job, daemon=True).start()
        wait(futures, limit)
        late = CallTimeout(f"over {limit:g} seconds")
        return [future.result() if future.done() else late for future in futures]

    def _reset(self, prompt: Prompt, name: str | None, environment: Any, extra: dict) -> None:
        """Reset an environment; note the token ids of a prompt with what it says, and with its tools alone."""
        row = dict(prompt.row)
        if name is not None:
            del row["environment"]
        text = environment.reset(**row) or ""
        *before, last = self.encoder.messages(prompt.prompt)
        last = last | {"content": (last["content"].strip() and last["content"]) + text}
        ids = self.encoder.prompt_ids([*before, last], self.schemas[name])
        if len(ids) > self.config.max_prompt_length:
            raise ValueError(f"a prompt of {len(ids)} tokens: max_prompt_length")
        extra["prompt_ids"] = ids

    def _read(self, turn: Response, context: list[int], tools: list[dict]) -> tuple[dict, list]:
        """Return a turn as a message, and its calls, with an error in place of what cannot be read."""
        message = {"role": "assistant", "content": ""}
        try:
            message |= self.tokenizer.parse_response(turn.ids, prefix=context, tools=tools)
            return message, message.get("tool_calls", [])
        except Exception as error:
            return message | {"content": self.conversation.text(turn)}, [error]

    def _said(self, turn: Response, answers: list[dict], room: int) -> list[int]:
        """Return the ids of results, cut until a token is left for the policy; none without results or room."""
        most = CHARACTERS_PER_TOKEN * room
        while answers and most:
            shown = []
            for answer in answers:
                text = answer["content"]
                cut = CUT if len(text) > most else ""
                shown.append((answer["name"], escaped(text[:most], "\n\t") + cut))
            said = self.conversation.replies(turn, "tool", *shown)
            if len(said) < room:
                return said
            most //= 2
        return []


def _called(call: Any, functions: dict[str, Callable]) -> str:
    """Return the result of a call as text."""
    if isinstance(call, Exception):
        raise call
    function = call["function"]
    return str(_finished(functions[function["name"]](**function["arguments"])))


def _finished(result: Any) -> Any:
    """Return a result, also one that is awaited."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _within(turn: Response, room: int) -> Response:
    """Return a turn, cut to a number of tokens."""
    more = len(turn.ids) - room
    if more <= 0:
        return turn
    support: Any = turn.support
    support = support and support.split([room, more])[0]
    return Response(turn.ids[:room], "length", turn.logprobs and turn.logprobs[:room], support)
