"""The table of docs/durability.md is made from rows, and every promise in it has been tried."""

from __future__ import annotations

import pytest

from benchmarks.reliability import BEGIN, END, PAGE, PROMISES, page_table, path_of
from tests.support.places import ROOT


def test_the_table_is_the_one_that_the_rows_give_and_nothing_is_untried() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert written == page_table()
    assert "not tried" not in written


@pytest.mark.parametrize("name", PROMISES)
def test_the_tests_of_a_promise_are_there(name: str) -> None:
    for test in PROMISES[name].tests:
        path, _, function = path_of(test).partition("::")
        assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8")
