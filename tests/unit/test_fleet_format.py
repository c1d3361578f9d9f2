"""Numbers as people read them."""

from datetime import UTC

import pytest

from dflash_tui.fleet import format as fmt


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fmt.size(None), "N/A"),
        (fmt.size(0), "0 B"),
        (fmt.size(1023), "1023 B"),
        (fmt.size(1536), "1.5 KiB"),
        (fmt.size(150 * 2**30), "150 GiB"),
        (fmt.size_of(12 * 2**30, 80 * 2**30), "12.0/80.0 GiB"),
        (fmt.size_of(None, 80 * 2**30), "N/A of 80.0 GiB"),
        (fmt.size_of(1, None), "N/A"),
        (fmt.count(None), "N/A"),
        (fmt.count(0), "0"),
        (fmt.count(7.25), "7.2"),
        (fmt.count(9812), "9,812"),
        (fmt.count(38_700), "38.7k"),
        (fmt.count(2_500_000), "2.5M"),
        (fmt.megabytes_per_s(4_200), "0.00"),
        (fmt.megabytes_per_s(1_500_000_000), "1500"),
        (fmt.percent(0.0), "0%"),
        (fmt.percent(None), "N/A"),
        (fmt.watts(312.4, 700), "312/700 W"),
        (fmt.watts(312.4, None), "312/N/A W"),
        (fmt.watts(None, None), "N/A"),
        (fmt.duration(None), "N/A"),
        (fmt.duration(0), "0s"),
        (fmt.duration(59.6), "1m"),
        (fmt.duration(190), "3m 10s"),
        (fmt.duration(18_120), "5h 2m"),
        (fmt.duration(86400 * 12 + 10_800), "12d 3h"),
        (fmt.duration(-3), "0s"),
        (fmt.one_line("a\x1b[31mb\r\nc"), "a [31mb  c"),
    ],
)
def test_a_value_is_shown_with_its_unit_and_na_is_not_zero(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_time_of_another_day_carries_its_day() -> None:
    now = 1_796_000_000.0
    assert fmt.clock(now - 60, now=now, zone=UTC) == "00:52:20"
    assert fmt.clock(now - 3 * 86400, now=now, zone=UTC) == "2026-11-27 00:53"
