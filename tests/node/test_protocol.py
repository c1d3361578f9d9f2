"""Frames: what is written is what is read, however it is cut, and what is no frame is refused."""

from __future__ import annotations

import random

import pytest

from dflash_tui.node import protocol
from dflash_tui.node.protocol import FrameReader, ProtocolError

FRAMES = [
    ({"op": "ping", "id": 1}, b""),
    ({"ev": "tail", "offset": 1 << 40, "text": "ü\n\u2028\udc80"}, bytes(range(256)) * 256),
    ({"ev": "jobs", "jobs": [{"job": "j", "exit": None, "x": 0.5}] * 500}, b""),
    ({"ev": "tail"}, b"\n"),
    ({}, b"{}\n"),
]


@pytest.mark.parametrize("seed", range(5))
def test_frames_come_back_whole_however_the_bytes_are_cut(seed: int) -> None:
    data = b"".join(protocol.encode(header, payload) for header, payload in FRAMES)
    cut = random.Random(seed)
    reader = FrameReader()
    found = []
    while data:
        size = cut.choice((1, 2, 100, 65536))
        found += reader.feed(data[:size])
        data = data[size:]
    assert [frame.payload for frame in found] == [payload for _, payload in FRAMES]
    assert [frame.header.get("ev") for frame in found] == [header.get("ev") for header, _ in FRAMES]
    assert found[1].header["offset"] == 1 << 40
    assert found[2].header["jobs"] == FRAMES[2][0]["jobs"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"Welcome to the node!\n", "not a frame: b'Welcome to the node!'"),
        (b"[1, 2]\n", "no object"),
        (b'{"n": -1}\n', "cannot be: -1"),
        (b'{"n": 65537}\n', "cannot be: 65537"),
        (b'{"n": "x"}\n', "cannot be: 'x'"),
        (b"\xff\xfe\n", "not a frame"),
        (b"x" * (protocol.MAX_HEADER + 1), "longer than"),
    ],
)
def test_what_is_no_frame_is_refused_and_shown(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        FrameReader().feed(data)
    assert words in str(refused.value)


def test_a_payload_over_the_limit_is_never_sent() -> None:
    with pytest.raises(ValueError, match="65537 bytes is over 65536"):
        protocol.encode({}, bytes(protocol.MAX_PAYLOAD + 1))
