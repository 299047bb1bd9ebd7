"""Whether a response's final answer equals the ground truth, by math-verify: the judge of math.MathVerifier.

Run by judge_server.py in a process that knows nothing of this project and has its own limits: math-verify's are signals
that C code does not see. Only `load` imports more than the standard library.
"""

import re
from decimal import Decimal

# Judged while loading, so that what math-verify and sympy import and build at first use is there before the first fork.
KNOWN = [
    ("so it is \\boxed{\\frac{1}{2}}", "0.5", True),
    ("#### 41", "42", False),
    ("$x^2+2x+1$", "(x+1)^2", True),
    ("\\boxed{x = 3}", "3", True),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", True),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", True),
    ("\\boxed{(1, 2)}", "(1, 3)", False),
    ("\\boxed{[0, \\infty)}", "[0, \\infty)", True),
    ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}", False),
    ("\\boxed{\\sin^2 x + \\cos^2 x}", "1", True),
    ("\\boxed{50\\%}", "0.5", True),
    ("$2$", "2t", False),
    ("\\boxed{2\\pi}", "\\frac{4\\pi}{2}", True),
]

NUMBER = r"[-+]?(?:\d(?:,?\d)*(?:\.\d*)?|\.\d+)"
ITEM = r"[-+]?[\d.]+"
SCIENTIFIC = re.compile(rf"{NUMBER}[eE][-+]?\d{{1,3}}")
DATE_OR_TIME = re.compile(r"\d+(-\d+)+|\d+([/.])\d+\2\d+|\d+(\s*:\s*\d+)+|\d+(-\d+){2}[T ].*")
BASED = re.compile(r"[\dA-Z]+_(?:\d+|\{\d+\})")  # 101_2: math-verify leaves the base out
THIN_SPACE = re.compile(r"(?<=\d)\\,\s?(?=\d{3})")  # of thousands
DOLLARS = re.compile(r"^([-+]?)\$(?=[\d.]+[^$]*$)")  # money, and no formula between two signs
# Forms of an answer that math-verify reads otherwise than they are meant.
READ_OTHERWISE = (
    (re.compile(rf"(?:{DATE_OR_TIME.pattern})(?: ?[apAP]\.?[mM]\.?)?"), "a date, a time, a ratio or a range: no sum"),
    (re.compile(r"0\d/\d+|\d+/0\d|(?:19|20)\d\d/(?:[1-9]|1[0-2])"), "a month: write a fraction with \\frac"),
    (re.compile(rf"\$?{NUMBER}%?\s*[-−]+\s*\$?{NUMBER}%?"), "a range, or a difference: write that as one number"),
    (re.compile(rf"\$?{NUMBER}(?:\\?\s+|\s*(?:°|\^\\?circ)\s*)[A-Za-z]"), "a number with a unit outside of \\text{}"),
    (re.compile(r"\(?(?:[A-Za-z][).]\s*[-+]?[$\d]|\w[).]\s).*|(?!.*\{[^}]*:).*(?::|\\colon).*"), "a label, or a ratio"),
    (re.compile(r"[A-Za-z]{2,}(?:[-/][A-Za-z]{2,})+"), "words, or variables with nothing between them"),
    (re.compile(r"(?:[<>≤≥]|\\[lg](?:t|eq?|eqslant)(?![A-Za-z])).*"), "a bound without its variable"),
    (re.compile(r"\\?#.*|.*~.*|.*[^\^{][-+*/]"), "a sign that is no arithmetic"),
    (re.compile(rf"\[(?:\[.*|\s*|{ITEM}|{ITEM},\s+{ITEM}|{ITEM}(?:,\s*{ITEM}){{2,}})\]"), "a list, not an interval"),
    (re.compile(r"[\[({]*'.*|.*\".*", re.DOTALL), "quoted text"),
    (re.compile(r"[^\\]*\d\s+\d[^\\]*"), "several numbers with nothing between them"),
    (re.compile(r".*\d\.\\overline.*"), "a decimal without an end: write it as a fraction"),
    (re.compile(r".*(\*\*|\d_\d{3}|==|[-+*/%!]=).*|0[xXbBoO][\dA-Fa-f]+"), "a program's notation"),
    (re.compile(r".*(\d\.\d+\.\d|\d\.\d{3},\d|\.\.).*"), "a version, dots, or a comma before decimals"),
    (re.compile(r".*\d'.*"), "feet, minutes or thousands"),
    (re.compile(r".*\\(?:equiv|[bp]?mod)(?![A-Za-z]).*"), "a congruence, whose modulus is left out"),
    (re.compile(r".*[A-Z][a-z]?_(?:\d+|\{\d+\})[A-Z].*|O(?:-O)+"), "a formula of chemistry, or a move of chess"),
    (re.compile(r"[^A-Za-z\\]*=[^A-Za-z\\]*"), "an equation without a variable: it is true or false"),
    (re.compile(r".*[^\x00-\x7f\u0370-\u03ff°−×÷∪∩≤≥∅].*", re.DOTALL), "characters that it does not know"),
    (re.compile(r"[^\w\\∅]*"), "no number"),
)
WORDS_IN_LATEX = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}")
# The name, and its index, of what is given a value: x of "x = 5".
NAMED = re.compile(r"(?<![\\\w])(\\[A-Za-z]+|[A-Za-z])(?:_\{?(\w+)\}?)?\s*=")
COMMANDS = re.compile(r"\\(?:[a-zA-Z]+|.)")
LETTERS = re.compile(r"[A-Za-z]+")
CONNECTIVES = re.compile(r"(?<=[^A-Za-z])(?:and|or)(?=[^A-Za-z])")
# Of two or three letters, but no products of variables.
SHORT_WORDS = re.compile(
    "am|pm|km|cm|mm|kg|mg|ml|ft|lb|oz|hr|min|sec|st|nd|rd|th|mph|yes|no|not|nan|inf|nil|"
    "pi|ln|log|exp|sin|cos|tan|csc|cot|max|gcd|lcm|mod"
)


def unfit(answer: str) -> str | None:
    """What an answer is that mathematics cannot judge, in words; None for numbers and mathematics.

    A word is no product of its letters, and a date no difference: what could be either is not judged.
    """
    answer = bare(answer)
    if SCIENTIFIC.fullmatch(answer):
        return None
    for form, what in READ_OTHERWISE:
        if form.fullmatch(answer):
            return what
    latex = WORDS_IN_LATEX.sub(" \\\\ ", answer)
    formula = CONNECTIVES.sub(",", COMMANDS.sub(" ", latex))
    if not re.search(r"[\d+\-*/^=<>|!_π]|[^\x00-\x7f\u0370-\u03ff]", formula) and "\\" not in latex:
        return "a word, or the letter of a choice, not a formula"
    words = [run for run in LETTERS.findall(formula) if _is_word(run)] + re.findall(r"[\u0370-\u03ff]{3,}", formula)
    if words or re.fullmatch(r"(?i)n/a", answer):
        return f"the word {(words or [answer])[0]!r}, not a product of its letters"
    if re.search(r"[A-Za-z]\d|\d\s+[A-Za-z]{2}", formula):
        return "a number beside letters that are no variables"
    return None


def has_variables(answer: str) -> bool:
    """Whether letters of a formula stand for values, beside the name that is given one, and no unit is written."""
    formula = CONNECTIVES.sub(",", COMMANDS.sub(" ", NAMED.sub("", answer)))
    return WORDS_IN_LATEX.search(answer) is None and LETTERS.search(formula) is not None


def _is_word(letters: str) -> bool:
    known = not letters.islower() or SHORT_WORDS.fullmatch(letters)
    return len(letters) > 3 or (len(letters) > 1 and bool(known))


def bare(answer: str) -> str:
    """The answer without what stands around formulas."""
    answer = answer.strip()
    for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}")):
        if answer.startswith(begin) and answer.endswith(end) and len(answer) > len(begin) + len(end):
            answer = answer[len(begin) : -len(end)].strip()
    return answer


def written_answers(response: str) -> list[str]:
    """The texts in a response that may be its answer as a whole: all of it, its last line, the last box."""
    lines = response.strip().splitlines() or [""]
    last = re.sub(r"(?i)^\W*(?:the )?(?:final )?answer\s*(?:is|:|=)*\s*", "", lines[-1].rsplit("####", 1)[-1].strip())
    return [_normalized(text) for text in (response, last, *_last_box(response))]


def _last_box(response: str) -> list[str]:
    start = response.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return []
    depth = 1
    for end in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if not depth:
            return [response[start:end]]
    return []


def _normalized(text: str) -> str:
    """As texts are compared: white space one space; in LaTeX, where it means nothing, between any two signs."""
    text = re.sub(r"_\{(\w+)\}", r"_\1", bare(text.strip().removesuffix(".")))
    in_latex = "\\" in text and not WORDS_IN_LATEX.search(text)
    return " ".join(re.findall(r"\\[A-Za-z]+|\S", text) if in_latex else text.split())


def load():
    """The judge: (response, answer) -> 1 or 0. Raises where math-verify is missing, or judges other than it should."""
    import logging
    import math
    import random
    from dataclasses import replace

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from sympy.core import random as sympy_random

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nobody keeps the time
    latex = LatexExtractionConfig()
    with_units = [latex, ExprExtractionConfig()]  # which it leaves out: also the t of 5t
    of_latex = replace(latex.normalization_config, units=False)
    without_units = [replace(latex, normalization_config=of_latex), ExprExtractionConfig()]

    def decimals(gold) -> int:
        """That many are compared: the usual six, and of what is small four digits."""
        size = abs(float(gold)) if getattr(gold, "is_number", False) and gold.is_real else 1.0
        return max(6, 3 - math.floor(math.log10(size))) if size else 6

    def equal(response: str, answer: str) -> bool:
        response, answer = (THIN_SPACE.sub("", text) for text in (response, answer))
        configs = without_units if has_variables(answer) else with_units
        gold = parse(f"${answer}$", configs, parsing_timeout=None) or [answer]
        found = parse(response.rsplit("####", 1)[-1], configs, parsing_timeout=None)
        digits = decimals(gold[0])
        return verify(gold, found, float_rounding=digits, numeric_precision=digits + 9, timeout_seconds=None)

    for response, answer, expected in KNOWN:
        if equal(response, answer) != expected:
            raise RuntimeError(f"math_verify says {not expected} where {response!r} is compared with {answer!r}")

    def judge(response: str, answer: str) -> bool:
        random.seed(0)  # sympy's draws, by which it compares: not another number after another answer
        sympy_random.seed(0)
        written = written_answers(response)
        if _normalized(answer) in written:
            return True
        if unfit(answer) or DATE_OR_TIME.fullmatch(written[-1]):
            return False
        if BASED.fullmatch(bare(answer)):
            return _normalized(answer) == _normalized((BASED.findall(response) or [""])[-1])
        named = set(NAMED.findall(written[-1]))
        if named and named.isdisjoint(NAMED.findall(answer) or named):  # another variable has that value
            return False
        forms = [DOLLARS.sub(r"\1", answer)]
        if SCIENTIFIC.fullmatch(answer):
            number = Decimal(answer.replace(",", ""))
            forms = [f"{number:f}", f"{number:e}".replace("e", "\\times 10^{") + "}"]
        try:
            return any(equal(response, form) for form in forms)
        except MemoryError:
            raise
        except Exception:  # of sympy, on nonsense: that is a wrong answer
            return False

    return judge
