"""Whether a response's final answer equals the ground truth, by math-verify: the judge of verifiers.MathVerifier.

Run by workers.py in a process that knows nothing of this project and has its own limits: math-verify's are signals that
C code does not see.
"""

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
    ("\\boxed{2\\pi}", "\\frac{4\\pi}{2}", True),
]


def load():
    """The judge: (response, answer) -> 1 or 0. Raises where math-verify is missing, or judges other than it should."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nobody keeps the time
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]

    def equal(response: str, answer: str) -> bool:
        gold = parse(f"${answer}$", configs, parsing_timeout=None) or [answer]
        found = parse(response.rsplit("####", 1)[-1], configs, parsing_timeout=None)
        return verify(gold, found, timeout_seconds=None)

    for response, answer, expected in KNOWN:
        if equal(response, answer) != expected:
            raise RuntimeError(f"math_verify says {not expected} where {response!r} is compared with {answer!r}")

    def judge(response: str, answer: str) -> bool:
        try:
            return equal(response, answer)
        except MemoryError:
            raise
        except Exception:  # of sympy, on nonsense: that is a wrong answer
            return False

    return judge
