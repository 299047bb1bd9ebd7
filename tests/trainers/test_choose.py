"""Who judges where `--verifiers` is not given: chosen by the answers, and right about each of them, both ways."""

from pathlib import Path

import pytest
import yaml

from fused_rl.trainers import grpo
from fused_rl.trainers.commands import eval
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.types import Response, Sample
from fused_rl.trainers.scorers.choose import choose
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.options import ScorerConfig
from tests.trainers import figures, runs, tiny

# Of each an answer, a response that is right, and one that is wrong: numbers, units, fractions, intervals, sets.
MATHEMATICS = r"""
42 | so it is \boxed{42} | \boxed{24}
-3 | #### -3 | #### 3
1,234 | \boxed{1234} | \boxed{1.234}
0.5 | $\frac{1}{2}$ | $\frac{1}{5}$
1e-05 | \boxed{0.00001} | \boxed{0.0001}
10^5 | \boxed{100000} | \boxed{50}
50% | \boxed{50\%} | \boxed{5\%}
−3 | \boxed{-3} | \boxed{3}
5! | \boxed{120} | \boxed{5}
$5.00 | \boxed{5} | \boxed{500}
90° | \boxed{90} | \boxed{9}
5 \text{ cm} | \boxed{5} | \boxed{6}
1/2 | \boxed{0.5} | \boxed{2}
\frac{3}{4} | \boxed{0.75} | \boxed{0.34}
3/4 | \boxed{6/8} | \boxed{4/3}
3\frac{1}{2} | \boxed{3.5} | \boxed{1.5}
(1, 2) | \boxed{(1, 2)} | \boxed{(2, 1)}
[-2,7] | \boxed{[-2, 7]} | \boxed{(-2, 7)}
[0, \infty) | \boxed{[0, \infty)} | \boxed{(0, \infty)}
x < 3 | \boxed{x < 3} | \boxed{x > 3}
{1, 2} | \boxed{\{2, 1\}} | \boxed{\{1, 3\}}
\{1, 2\} | \boxed{\{2, 1\}} | \boxed{\{1, 2, 3\}}
3 and 4 | \boxed{3, 4} | \boxed{3, 5}
x = 3 | \boxed{3} | \boxed{4}
2xy | \boxed{2yx} | \boxed{2x}
(x+1)^2 | \boxed{x^2+2x+1} | \boxed{x^2+1}
x=5 | Since y = 2, x = 5 | y=5
a=1 | \boxed{1} | b=1
x_1 = 5 | $x_{1} = 5$ | so x_2 = 5
\theta = 5 | $\theta = 5$ | \alpha = 5
3t | \boxed{t \cdot 3} | \boxed{3}
2\pi h | $h \cdot 2\pi$ | $2\pi$
y = 2x + 3t | $y = 3t + 2x$ | $y = 2x + 3$
5 \text{ m} | 5 m | 6 m
5\,\mathrm{m} | 5 | 6
4343_6 | in base six $4343_{6}$ | \boxed{4343_7}
101_{2} | \boxed{101_2} | \boxed{101}
1.6e-19 | \boxed{1.6 \times 10^{-19}} | \boxed{9.1 \times 10^{-31}}
1.6 \times 10^{-19} | \boxed{0.16 \times 10^{-18}} | \boxed{1.7 \times 10^{-19}}
6.02e23 | \boxed{6.02 \times 10^{23}} | \boxed{6.02e22}
0.0000001 | \boxed{10^{-7}} | \boxed{0.0000002}
A \cap B | \boxed{A\cap B} | \boxed{A \cup B}
12,\!345 | 12345 | 12
10\,000 | \boxed{10000} | 10
\langle 1, 2 \rangle | \boxed{\langle 1,2 \rangle} | \boxed{\langle 2, 1 \rangle}
π | $\pi$ | $\rho$
"""
# Dates, times, words, letters of multiple choice, code, lists, units in words.
OTHERS = r"""
2024-01-05 | 2024-01-05 | 2018
5/1/2024 | 5/1/2024 | 5/2024
5 May 2024 |  5  May 2024 | May 2024
2024-01 | 2024-01 | 2023
12:30 | 12:30 | 0.4
9:05 PM | 9:05 PM | 9:05 AM
10:15:00 | 10:15:00 | 10:15
3 PM | 3 PM | 3
Paris | Paris | Siarp
yes | yes | no
no | no | on
New York | New York | York New
北京 | 北京 | 京北
True | True | 1
B | B | A
(A) | (A) | A)
A, C | A, C | C, A
x | x | y
b. | b. | b
print(1) | print(1) | 1
x**2 | x**2 | x*2
0x1F | 0x1F | 31
v1.0 | v1.0 | v1
a_list = [] | a_list = [] | a_list
[1, 2] | [1, 2] | [2, 1]
['a'] | ['a'] | ['b']
[1,2,3] | [1,2,3] | [3,2,1]
[] | [] | [0]
4 4 6 9 | 4 4 6 9 | 23
5 dollars | 5 dollars | dollars 5
80 miles | 80 miles | 80
1.5 million | 1.5 million | 1.5
n/a | n/a | 0
3:1 | 3:1 | 3:2
1 : 2 | 1 : 2 | 1
A:5 | A:5 | B:5
B) 15 | B) 15 | A) 15
A. 5 | A. 5 | B. 5
(A) 5 | (A) 5 | 5
1) 5 | 1) 5 | 2) 5
5 m | 5 m | 5 km
2.5 h | 2.5 h | 2.5
25 C | 25 C | 25 F
25 °C | 25 °C | 25
3 - 5 | 3 - 5 | 7 - 9
1.5-2.5 | 1.5-2.5 | -1
>=3 | >=3 | 3
\ge 3 | \ge 3 | 3
5+ | 5+ | 5
2020/05 | 2020/05 | 404
05/2020 | 05/2020 | 5/2020
on/off | on/off | $\frac{n}{f^2}$
he/she | he/she | $1/s$
#5 | #5 | 5
~5 | ~5 | 5
0xff | 0xff | 0xfe
5'11 | 5'11 | 511
1'000 | 1'000 | 1
x == 1 | x == 1 | 1
x+=1 | x+=1 | x=1
1..10 | 1..10 | 1
0.333... | 0.333... | 0.333
2+3=5 | 2+3=5 | 2+2=4
1.234,56 | 1.234,56 | 56, 1.234
H_2O | H_2O | OH_2
O-O | O-O | 0
γ | γ | Γ
ναι | ναι | ιαν
x \equiv 2 \pmod 5 | x \equiv 2 \pmod 5 | x \equiv 3 \pmod 5
10³ | 10^3 | 103
x² | x² | x2
2½ | 2 ½ | 21⁄2
４２ 元 | 42 元 | 24 元
"""
# What mathematics and exact_match would judge differently, and either may be meant.
DOUBTFUL = r"""
007 | a number, or digits of a code
0110 | a number, or digits of a code
080442957X | a number, or digits of a code
+15551234567 | a number, or a telephone's
12A | a product, or a seat or a card
2 * 3 * 5 | a calculation, or its value
2^3 \cdot 3 | a calculation, or its value
(1+2)*3 | a calculation, or its value
6/8 | a fraction, or two numbers
120/80 | a fraction, or two numbers
3, 2, 1 | a set, or a list whose order matters, or a decimal comma
$\frac{1}{2}, 3$ | a set, or a list whose order matters
1,-2 | a set, or a list whose order matters
12,5 | a set, or a list whose order matters, or a decimal comma
1,00,000 | a set, or a list whose order matters, or a decimal comma
(1, 2), (3, 4) | a set, or a list
"""


def cases(lines):
    """(answer, right, wrong) of each line."""
    return [tuple(line.split(" | ")) for line in lines.strip().splitlines()]


def rows_of(*answers):
    return Rows([{"question": "?", "answer": answer} for answer in answers], "d.jsonl")


@pytest.mark.parametrize(("lines", "chosen"), [(MATHEMATICS, "math"), (OTHERS, "exact_match")])
def test_the_scorer_that_is_chosen_is_right_about_each_answer_both_ways(lines, chosen):
    of_kind, samples = cases(lines), []
    for answer, right, wrong in of_kind:
        assert choose([rows_of(answer)], None)[0] == chosen, answer  # alone, as all of them together
        samples += [Sample({"answer": answer}, [], Response([], "stop"), text, "d") for text in (right, wrong)]
    verifier, _ = choose([rows_of(*(answer for answer, _, _ in of_kind))], None)
    (scorer,) = load_scorers(ScorerConfig(verifiers=verifier))
    scores = scorer(samples)
    judged = {case[0]: both for case, *both in zip(of_kind, scores[::2], scores[1::2], strict=True)}
    assert {answer: both for answer, both in judged.items() if both != [1, 0]} == {}


def test_there_are_as_many_answers_as_the_page_says():
    page = Path("docs/verifiers.md").read_text()
    assert f"has {len(cases(MATHEMATICS) + cases(OTHERS))} answers" in " ".join(page.split())


@pytest.mark.parametrize(("answer", "what"), cases(DOUBTFUL))
def test_what_may_be_a_number_or_a_text_is_refused_among_numbers(answer, what):
    with pytest.raises(InputError, match=r"^d.jsonl, line 2: the answer .*; say which with --verifiers") as refusal:
        choose([rows_of("42", answer)], None)
    assert what in str(refusal.value) and "\n" not in str(refusal.value)
    assert choose([rows_of("Paris", *["Rome"] * 9, answer)], None)[0] == "exact_match"


def test_decimals_may_be_versions_where_a_last_zero_is_one_more_digit():
    with pytest.raises(InputError, match="line 3: the answer '3.10' is a number, or a version"):
        choose([rows_of("3.9", "3.11", "3.10")], None)
    for numbers in (("3.50", "12.00"), ("0.5", "2.0", "3.14"), ("72", "1,000", "-5", "0.5", "3.50")):
        assert choose([rows_of(*numbers)], None)[0] == "math"


def test_the_reason_is_told():
    why = "since all 3 answers are numbers or formulas: '1', '1/2', '3'"
    assert choose([rows_of("1", "1/2"), rows_of("3")], None) == ("math", why)
    verifier, why = choose([rows_of("B", *"ACDACDACD", "7")], None)
    assert verifier == "exact_match"
    assert why.startswith("since 10 of 11 answers are no mathematics: 'B' (a word, or the letter of a choice, not a ")
    assert why.endswith("a response is right where it is the answer and nothing else; or name another with --verifiers")
    gym = Rows([{"question": "?", "answer": "Paris", "metadata": {"source_dataset": "chain_sum"}}], "d.jsonl")
    assert choose([gym], None)[0] == "reasoning_gym"


BOTH = r"d.jsonl, line 2: no one scorer fits all answers: 1 are mathematics \('42'\), and 1 are not \('Paris' \(a word"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["42", "Paris"], BOTH),
        (["Paris"] * 8 + ["42"], "and 8 are not"),
        (["42"] * 99 + ["12:30"], r"99 are mathematics \('42'\), and 1 are not \('12:30' \(a date, a time"),
        (["42", ""], "d.jsonl, line 2: column 'answer' has no answer: ''"),
        (["", ""], "column 'answer' has no answer: ''"),
        (["42", None], "column 'answer' is null"),
        ([None], r"nothing to judge responses by; the row has \['answer', 'question'\]; .*--verifiers"),
        ([["a"]], "expected the answer as text or a number"),
    ],
)
def test_answers_of_both_kinds_and_none_are_refused(answers, said):
    with pytest.raises(InputError, match=said) as refusal:
        choose([rows_of(*answers)], None)
    assert "\n" not in str(refusal.value)


def test_a_run_keeps_what_was_chosen_and_goes_on_with_it(files, tmp_path, capsys):
    model, _ = files
    words = tiny.jsonl(tmp_path / "words.jsonl", [{"question": f"{i}?", "answer": "abc"[i % 3]} for i in range(20)])
    config = runs.grpo_config((model, words), tmp_path / "run", verifiers=None, steps=1, save_every=1)
    with figures.drawn():
        grpo.train(config)
    assert "verifiers: exact_match, since all 20 answers are no mathematics: 'a' (a word" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["verifiers"] == ["exact_match"]
    found = eval.as_its_run(eval.EvalConfig(model=str(tmp_path / "run"), dataset=words))
    assert found.verifiers == ["exact_match"]

    # Other rows, of which another would be chosen: who judges stays.
    tiny.jsonl(tmp_path / "words.jsonl", tiny.sums(20))
    more = {"verifiers": None, "steps": 2, "save_every": 1, "resume": True, "accept_changes": True}
    grpo.train(runs.grpo_config((model, words), tmp_path / "run", **more))
    assert "verifiers: exact_match, as in the run that is resumed" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["verifiers"] == ["exact_match"]


def test_a_dry_run_says_that_the_rows_will_choose(files, tmp_path, capsys):
    model, dataset = files
    grpo.main(["--model", model, "--dataset", dataset, "--output_dir", str(tmp_path / "run"), "--dry_run"])
    assert "# reward: chosen by the answers, when the rows are read (--verifiers names it)" in capsys.readouterr().out
