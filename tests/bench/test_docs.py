"""Pages that are made of tables in the code."""

import pytest

from bench import docs
from bench.machine import ROOT


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_page_that_stands_here_is_that_of_its_table(name, tmp_path):
    docs.written(tmp_path)
    made = (tmp_path / name).read_text()
    assert made == (ROOT / "docs" / name).read_text(), "python -m bench docs"
