"""One line of a log, without colours and without what stands before the words."""

import re
from typing import NamedTuple, Tuple

LONGEST_QUOTE = 400

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_=>78])")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# "(EngineCore pid=7) ", of Ray "(RayWorkerWrapper pid=7, ip=10.0.0.1) "; of torchrun "[rank0]: ", "[default0]:".
_PROCESS = re.compile(r"\(([A-Za-z_][\w.:-]*) pid=(\d+)[^)]*\) ?|\[(?:rank|default)(\d+)\]: ?")
# vLLM "ERROR 11-30 01:25:26 [core.py:1136] ", before 0.10 "ERROR 11-30 01:25:26 core.py:1136] ".
_VLLM = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?([\w./-]+:\d+)\] ?")
# libtorch "[W1130 01:25:23.205673532 socket.cpp:207] ".
_TORCH = re.compile(r"\[([IWEF])\d{4} [\d:.]+ (?:\d+ )?(\S+?:\d+)\] ?")
# uvicorn "INFO:     ", logging "ERROR:name:", "2026-11-30 01:25:26,123 - name - ERROR - ", loguru "… | ERROR    | ".
_LOGGER = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\]?[ |-]+(?:[\w.]+ - )?)?\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b(?=[\]: |-])"
)
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "ERROR"}
_HARMLESS = ("DEBUG", "INFO", "WARNING", "WARN")


class Line(NamedTuple):
    """number: from 1. text: the words. stream: the process that says so, "" where it is not told. site: where a logger was
    called, "" for what was printed. level: "" where it has none. quote: the whole line, as one may show it.
    """

    number: int
    text: str
    stream: str
    site: str
    level: str
    quote: str

    @property
    def harmless(self) -> bool:
        """Said to be no error by who wrote it."""
        return self.level in _HARMLESS


def parse(number: int, data: bytes) -> Line:
    if b"\x1b" in data:
        data = _ESCAPES.sub(b"", data)
    whole = data.decode("utf-8", "replace")
    if not whole.isprintable():
        whole = _CONTROLS.sub("", whole)
    text, stream = _process(whole)
    site, level = "", ""
    found = _VLLM.match(text) or _TORCH.match(text)
    if found is not None:
        level, site = _LETTERS.get(found.group(1), found.group(1)), found.group(2)
        text = text[found.end() :]
    elif text[:1] in "[0123456789DIWECF":
        found = _LOGGER.match(text)
        if found is not None:
            level, site = found.group(1), "logger"
    return Line(number, text, stream, site, level, whole)


def _process(text: str) -> Tuple[str, str]:
    stream = ""
    while text[:1] in ("(", "["):
        found = _PROCESS.match(text)
        if found is None:
            break
        stream = "%s %s" % (found.group(1), found.group(2)) if found.group(1) else "rank %s" % found.group(3)
        text = text[found.end() :]
    return text, stream


def shown(text: str, longest: int = LONGEST_QUOTE) -> str:
    """One line of it, and no longer than a line should be."""
    words = " ".join(text.split())
    return words if len(words) <= longest else words[: longest - 1] + "…"
