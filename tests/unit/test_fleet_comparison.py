"""Figures of a comparison: the same in the screen and in the command, whatever a node wrote."""

from __future__ import annotations

import pytest

from backends.spec import BACKENDS
from dflash_tui.app.widgets import comparison as screen
from dflash_tui.commands import comparison as command
from dflash_tui.fleet.comparison import figure, mapping, number, pair


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "N/A"), (0.0, "0"), (0.0004, "0.0004"), (0.01234, "0.0123"), (8.7, "8.70"), (9.994, "9.99")),
        *((9.996, "10.0"), (41.23, "41.2"), (99.96, "100"), (1234.4, "1,234"), (-3.0, "-3.00"), (0.9996, "1.00")),
    ],
)
def test_a_figure_has_three_digits_or_all_before_the_point(value: float | None, shown: str) -> None:
    assert figure(value) == shown


def test_what_is_no_number_pair_or_object_is_nothing() -> None:
    assert number(True) is number("1") is number(None) is None
    assert pair([1, 2.5]) == (1.0, 2.5)
    assert pair([1]) is pair("ab") is pair([1, None]) is None
    assert mapping([1]) == {}


def test_the_screen_and_the_command_take_their_figures_and_sides_from_one_place() -> None:
    assert command.figure is figure
    assert screen.BACKENDS is command.BACKENDS is BACKENDS
