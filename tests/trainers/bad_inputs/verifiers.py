"""Verifiers that a command must refuse: functions of judges.py, which stands in the folder of each case."""

from tests.trainers.bad_inputs.cases import Case, of
from tests.trainers.bad_inputs.data import cell

JUDGES = """
import asyncio, os, sys, time
import torch

def even(responses, rows): return [len(r) % 2 for r in responses]
def raises(responses, rows): return [1 / 0 for r in responses]
def raises_lines(responses, rows): raise ValueError("one\\ntwo")
def raises_key(responses, rows): return [row["nothing"] for row in rows]
def exits(responses, rows): sys.exit(0)
def quits(responses, rows): raise SystemExit("told to")
def interrupts(responses, rows): raise KeyboardInterrupt
def recurs(responses, rows): return recurs(responses, rows)
def sleeps(responses, rows): time.sleep(3600)
def nothing(responses, rows): return None
def text(responses, rows): return "1" * len(responses)
def number(responses, rows): return 1.0
def dictionary(responses, rows): return dict.fromkeys(responses, 1.0)
def few(responses, rows): return [1.0]
def many(responses, rows): return [1.0] * 99
def words(responses, rows): return ["1"] * len(responses)
def nan(responses, rows): return [float("nan")] * len(responses)
def inf(responses, rows): return [-float("inf")] * len(responses)
def large(responses, rows): return [1e39] * len(responses)
def huge(responses, rows): return [10 ** 400] * len(responses)
def almost(responses, rows): return [3e38] * len(responses)
def lists(responses, rows): return [[1.0]] * len(responses)
def complexes(responses, rows): return [1j] * len(responses)
def generator(responses, rows):
    yield 1.0
    raise ValueError("half way")
def trl(completions, answers, **columns): return [1.0]
def one(response, row): return 1 / 0
async def awaited(response, row): return 1 / 0
async def waits(response, row): await asyncio.sleep(3600)
def zero_d(responses, rows): return torch.tensor(1.0)
def long(responses, rows): raise ValueError("m" * 100_000)
class Base(BaseException): pass
def base(responses, rows): raise Base("one\\ntwo")
class Mute(Exception):
    def __str__(self): raise KeyError("no text")
def mute(responses, rows): raise Mute
def loss_none(log_ratio, advantages, logprobs, sequences, options): return None
def loss_sum(log_ratio, advantages, logprobs, sequences, options): return (-log_ratio * advantages).sum()
def loss_raises(log_ratio, advantages, logprobs, sequences, options): raise ValueError("m" * 100_000)
def three(texts, rows, answers): return [1.0]
def none(): return []
def example(response, example): return 1.0
def other_text(text, row): return 1.0
def swapped(row, response): return 1.0
def keywords(*, responses, rows): return []
class Called: pass
three_is = 3
"""
MODULES = {
    "broken_syntax": "def f(:",
    "broken_import": "import no_such_module",
    "broken_raise": "raise RuntimeError('a key\\nis missing')",
    "broken_exit": "import sys; sys.exit(0)",
    "broken_bytes": "\udcff",
}


def judge(name: str, message: str, **fields) -> list[Case]:
    """A function of judges.py as the verifier: what it does is found when the first responses are scored."""
    return of("grpo", f"verifier {name}", message, "--verifiers", f"judges:{name}", begins=True, **fields)


def verifiers(spelled: str, message: str, *more: str) -> list[Case]:
    """What is refused before the run."""
    return of("grpo", f"verifiers {spelled!r}", message, "--verifiers", spelled, *more)


ROWS_OF = r"it was called with 4 responses, to rows.jsonl, line \d+ … rows.jsonl, line \d+"
VERIFIERS = [
    *judge("raises", rf"verifier 'judges:raises' raised ZeroDivisionError: .* \(judges.py, line \d+\).*{ROWS_OF}"),
    *judge("raises", r"alone it raises on rows.jsonl, line \d+$"),
    *judge("one", r"'judges:one' raised ZeroDivisionError: .* with the response to rows.jsonl, line \d+$"),
    *judge("awaited", r"'judges:awaited' raised ZeroDivisionError: .* with the response to rows.jsonl, line \d+$"),
    *judge("waits", "'judges:waits' did not return within 0.3 s"),
    *judge("raises_lines", "'judges:raises_lines' raised ValueError: one two"),
    *judge("raises_key", "'judges:raises_key' raised KeyError: 'nothing'"),
    *judge("exits", r"'judges:exits' called sys.exit\(0\)"),
    *judge("quits", r"'judges:quits' called sys.exit\('told to'\)"),
    *judge("interrupts", "'judges:interrupts' raised KeyboardInterrupt"),
    *judge("base", "'judges:base' raised Base: one two"),
    *judge("mute", "'judges:mute' raised Mute: its message cannot be read"),
    *judge("long", "'judges:long' raised ValueError: mm"),
    *judge("zero_d", r"'judges:zero_d' returned tensor\(1.\) \(Tensor\); it must return a list"),
    *judge("recurs", "'judges:recurs' raised RecursionError"),
    *judge("sleeps", "'judges:sleeps' did not return within 0.3 s"),
    *judge("generator", "'judges:generator' raised ValueError: half way"),
    *judge("nothing", "'judges:nothing' returned None; it must return a list"),
    *judge("text", r"'judges:text' returned '1111' \(str\); it must return a list"),
    *judge("number", r"'judges:number' returned 1.0 \(float\); it must return a list"),
    *judge("dictionary", r"'judges:dictionary' returned .* \(dict\); it must return a list"),
    *judge("few", "'judges:few' returned 1 scores for 4 responses"),
    *judge("many", "'judges:many' returned 99 scores for 4 responses"),
    *judge("words", r"'judges:words' returned '1' \(str\) as the score of rows.jsonl, line \d+"),
    *judge("nan", r"'judges:nan' returned nan \(float\) as the score of rows.jsonl, line \d+"),
    *judge("inf", r"'judges:inf' returned -inf \(float\) as the score of rows.jsonl, line \d+"),
    *judge("large", r"'judges:large' returned 1e[+]39 \(float\) as the score of"),
    *judge("huge", r"'judges:huge' returned 1000+….* \(int\) as the score of"),
    *judge("lists", r"'judges:lists' returned \[1.0\] \(list\) as the score of"),
    *judge("complexes", r"'judges:complexes' returned 1j \(complex\) as the score of"),
    *of(
        "grpo",
        "scores times a weight are too large",
        r"the reward of rows.jsonl, line \d+ is inf: the weighted sum",
        *("--verifiers", "judges:almost", "--verifier_weights", "[2]"),
        begins=True,
    ),
    *verifiers("judges:trl", "rows.jsonl, line 1: verifier 'judges:trl' takes the column 'answers'; the row has"),
    *verifiers("regex:(a", r"'regex': the pattern '\(a' does not compile"),
    *verifiers("regex:(a)", "column 'a' is missing", "--answer_column", "a"),
    *verifiers("exact_match", "column 'a' is missing", "--answer_column", "a"),
    *verifiers("length", "expected length:<tokens>"),
    *verifiers("length:0", "expected a whole number above 0 after the colon, in tokens"),
    *verifiers("exact_macth", "verifier 'exact_macth': expected .*; did you mean 'exact_match'"),
    *verifiers("judges:three", r"'judges:three' must take \(responses, rows\)"),
    *verifiers("judges:none", r"'judges:none' must take \(responses, rows\)"),
    *verifiers("judges:example", r"must take .*\(response, row\) .* by these names, .*it takes \(response, example\)$"),
    *verifiers("judges:other_text", r"must take .*\(response, row\) .* it takes \(text, row\)$"),
    *verifiers("judges:swapped", r"must take .*\(response, row\) .* it takes \(row, response\)$"),
    *verifiers("judges.py:even", "verifier 'judges.py:even': a module is named as in import, 'judges:even'$"),
    *verifiers("jugdes:even", "No module named 'jugdes'; looked for in .*, the current folder, and among"),
    *verifiers(
        "math", "--verifiers: several are one word, a list: --verifiers '[[]math, judges:even[]]'$", "judges:even"
    ),
    *verifiers("math", "column 'anwser' is missing; the row has .*: --answer_column$", "--answer_column", "anwser"),
    *verifiers("judges:keywords", r"'judges:keywords' must take \(responses, rows\)"),
    *verifiers("judges:Called", r"'judges:Called' must take \(responses, rows\)"),
    *verifiers("judges:three_is", "int is not a function"),
    *verifiers("judges:none_such", "verifier 'judges:none_such': AttributeError"),
    *verifiers("judges", "verifier 'judges': expected math, reasoning_gym"),
    *verifiers("judges:", "verifier 'judges:': expected"),
    *verifiers(":even", "verifier ':even'"),
    *verifiers("", "verifier ''"),
    *verifiers(",", "verifier ',': this spelling is of before: several verifiers are a list"),
    *verifiers("math,", "verifier 'math,': this spelling is of before: several verifiers are a list"),
    *verifiers("[]", "verifiers=.. is empty"),
    *verifiers("[math", "is no list"),
    *verifiers("no_such_module:f", "verifier 'no_such_module:f': ModuleNotFoundError"),
    *verifiers("broken_syntax:f", "verifier 'broken_syntax:f': SyntaxError"),
    *verifiers("broken_import:f", "verifier 'broken_import:f': ModuleNotFoundError: No module named 'no_such_module'"),
    *verifiers("broken_raise:f", "verifier 'broken_raise:f': RuntimeError: a key is missing"),
    *verifiers("broken_exit:f", "verifier 'broken_exit:f': SystemExit: 0"),
    *verifiers("broken_bytes:f", "verifier 'broken_bytes:f': (SyntaxError|UnicodeDecodeError)"),
    *verifiers("[judges:even, judges:even]", "'judges:even' is named 2 times"),
    *verifiers("2*judges:even", "verifier '2[*]judges:even': .* weights are a list of their own"),
    *verifiers("judges:even>=1", "verifier 'judges:even>=1': .* thresholds are a list of their own"),
    *verifiers("judges:even", "verifier_weights: expected a list of finite numbers", "--verifier_weights", "[nan]"),
    *verifiers("judges:even", "verifier_weights: expected a list of finite numbers", "--verifier_weights", "[x]"),
    *verifiers("judges:even", "verifier_weights: expected a list of finite numbers", "--verifier_weights", "2"),
    *verifiers("judges:even", "solved_at: expected a list of finite numbers, or of null", "--solved_at", "[inf]"),
    *verifiers("judges:even", "has 2 numbers for 1 verifiers", "--verifier_weights", "[1, 2]"),
    *verifiers("judges:even", "has 2 numbers for 1 verifiers", "--solved_at", "[1, null]"),
    *verifiers("mth", "verifier 'mth': expected math, reasoning_gym"),
    *verifiers("reasoning_gym:chain_sums", "no dataset 'chain_sums'; did you mean 'chain_sum'"),
    *verifiers("reasoning_gym", "rows.jsonl, line 1: metadata has no source_dataset"),
    *verifiers("reward_model:./rm", "reward_model:./rm is neither there"),
    *verifiers("reward_model:nobody/a2.5-v1.0", "nobody/a2.5-v1.0"),
    *cell("grpo", "answer", "Paris", "the answer 'Paris' has the word .*exact_match", options=("--verifiers", "math")),
    *cell("eval", "answer", "?", "--verifiers is missing; .* for the answer '2': ", options=("--verifiers", "null")),
    *cell("grpo", "answer", None, "'answer' is null; mend or remove the row", options=("--verifiers", "math")),
]
