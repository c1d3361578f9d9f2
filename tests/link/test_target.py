"""What may stand after `--host`."""

from __future__ import annotations

import pytest

from dflash_tui.link import LinkError, parse_target


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("local", None, "local", None),
        ("gpu-box", None, "gpu-box", None),
        ("me@gpu-box", "me", "gpu-box", None),
        ("gpu.example.org:2222", None, "gpu.example.org", 2222),
        ("me@10.0.0.7:22280", "me", "10.0.0.7", 22280),
        ("[fe80::1]:22", None, "fe80::1", 22),
        ("me@[::1]", "me", "::1", None),
        ("::1", None, "::1", None),
        ("first.last@corp@gpu:22", "first.last@corp", "gpu", 22),
    ],
)
def test_every_way_to_name_a_node_is_understood(text: str, user: str | None, host: str, port: int | None) -> None:
    target = parse_target(text)
    assert (target.user, target.host, target.port) == (user, host, port)
    assert target.name == text
    assert target.is_local == (text == "local")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "@host",
        "me@",
        "host:",
        "host:0",
        "host:65536",
        "host:ssh",
        "[::1",
        "[::1]22",
        "-oProxyCommand=x",
        "a b",
        "me@-x",
        "-l@host",
        "a;b",
        "a$(b)",
        "a\nb",
        "a'b",
        "host:２２",
    ],
)
def test_what_names_no_node_is_refused_with_the_text_and_what_may_be_written(text: str) -> None:
    with pytest.raises(LinkError) as caught:
        parse_target(text)
    assert caught.value.code == "bad-target"
    assert repr(text) in caught.value.message
    assert "user@host:port" in caught.value.remedy
    assert "\n" not in str(caught.value)
