"""Print the lower bound of each package that pyproject.toml requires, as pip's constraints for `make test-versions`.

python3 -m tests.tools.lowest > lowest.txt
"""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main() -> None:
    """Print `name==bound` for the package itself and for training."""
    # Python 3.10 has no parser of TOML.
    text = PROJECT.read_text()
    dependencies = re.findall(r"^dependencies = \[(.*?)\]", text, re.M | re.S)
    training = re.findall(r"^train = \[(.*?)\]", text, re.M | re.S)
    for requirement in re.findall(r'"([^"]+)"', dependencies[0] + training[0]):
        print(requirement.replace(">=", "=="))


if __name__ == "__main__":
    main()
