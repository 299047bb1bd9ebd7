"""Which KL estimator holds a policy: value and gradient of each as a loss, exactly, by enumerating a small vocabulary.

    python bench/repro/kl_table.py

Over 5 tokens every expectation is a sum, so there is no sampling noise: what the table says of an estimator is what a
run of it converges to. On-policy the tokens come from the policy; off-policy from another one, the behaviour policy.
`fused-rl kl-report` prints the same, and measures two models.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from fused_rl.trainers.commands.kl_report import example
from fused_rl.trainers.commands.kl_report import example_rows as rows

__all__ = ["rows"]

if __name__ == "__main__":
    print(example())
