"""What a plan says of the node's vLLM and the model: can it, why, with which options, and the very command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from textual.content import Content

from dflash_tui.app.widgets.job_detail import plain
from dflash_tui.app.widgets.labelled import labelled
from dflash_tui.fleet import format as fmt

_ANSWERS = {
    True: ("yes", "$text-success"),
    False: ("no", "bold $text-error"),
    None: ("not known", "$text-warning"),
}


def vllm_lines(plan: Mapping[str, Any], *, label_width: int, width: int) -> list[Content]:
    """The lines of a plan's `vllm`, without its command; none where the plan has nothing to do with it."""
    return [
        labelled(label, text, label_width=label_width, width=width, style=style)
        for label, text, style in _facts(plan, _vllm(plan))
    ]


def server_lines(plan: Mapping[str, Any], *, width: int) -> list[Content]:
    """The command of the plan's server, for `width` columns; none where none is started."""
    command = _vllm(plan).get("command")
    if not isinstance(command, list) or not command:
        return []
    head = Content.assemble(("its vLLM command", "dim"), f"  {_port(command)}")
    return [head, *(Content(line) for line in command_lines([str(word) for word in command], width))]


def _vllm(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    vllm = plan.get("vllm")
    return vllm if isinstance(vllm, Mapping) else {}


def _facts(plan: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if not vllm:
        return
    if vllm.get("server_url"):
        yield "server", _server(vllm), ""
        return
    beside = [f"{name} {plain(vllm[key])}" for key, name in _BESIDE.items() if vllm.get(key)]
    where = f" in {vllm['python']}" if vllm.get("python") else ""
    yield "vLLM", f"{plain(vllm.get('version'))}{where}" + (f" with {', '.join(beside)}" if beside else ""), ""
    if "ok" in vllm:
        answer, style = _ANSWERS.get(vllm["ok"], _ANSWERS[None])
        tried = vllm["ok"] is True and "tried" in vllm
        how = (", this version was tried" if vllm["tried"] else ", though this version was not tried") if tried else ""
        yield "it can", answer + how, style
    # What stands above as the refusal or a warning is not said again.
    said = [str(plan.get(name)) for name in ("error", "remedy")] + [str(line) for line in plan.get("warnings") or ()]
    for label, text in (("for", vllm.get("why")), ("better", vllm.get("remedy"))):
        if text and not any(str(text) in line for line in said):
            yield label, str(text), ""
    if vllm.get("instead"):
        instead = str(vllm["instead"])
        yield "what can", instead if instead.startswith("the ") else f"vLLM {instead}", ""
    if vllm.get("flags"):
        yield "it needs", shlex.join(str(flag) for flag in vllm["flags"]), ""
    for warning in vllm.get("warnings") or ():
        if not any(str(warning) in line for line in said):
            yield "known fault", str(warning), ""


def _server(vllm: Mapping[str, Any]) -> str:
    """One that runs already."""
    version = f"vLLM {vllm['version']}" if vllm.get("version") else "vLLM of a version that it does not tell"
    most = vllm.get("max_model_len")
    limit = f", requests of at most {most:,} tokens" if isinstance(most, int) else ""
    return f"{vllm['server_url']}: {version}, serves {plain(vllm.get('model'))}{limit}"


_BESIDE = {"torch": "torch", "cuda": "CUDA", "transformers": "transformers"}


def _port(command: Sequence[Any]) -> str:
    """What the command does not say: its port is chosen when it is started."""
    pairs = pairwise(command)
    return "(a free port is chosen in place of 0)" if ("--port", "0") in {(str(a), str(b)) for a, b in pairs} else ""


def command_lines(command: Sequence[str], width: int) -> list[str]:
    """A command over as many lines as it needs, which a shell takes as they stand.

    An option and its value stay together where they fit; JSON goes on after a comma or a brace, where a line's end means
    nothing. What is no JSON and longer than a line stays on one.
    """
    groups: list[list[str]] = []
    for word in command:
        if groups and not word.startswith("-") and groups[-1][0].startswith("--") and len(groups[-1]) == 1:
            groups[-1].append(word)
        else:
            groups.append([word])
    room = max(width - 4, 16)  # two blanks before, and " \\" after
    lines: list[str] = []
    for group in groups:
        text = fmt.one_line(shlex.join(group))
        if lines and len(lines[-1]) + 1 + len(text) <= room:
            lines[-1] += f" {text}"
            continue
        if lines:
            lines[-1] += " \\"
        lines += [text] if len(text) <= room else _after_commas(text, room)
    return [f"  {line}" for line in lines]


def _after_commas(text: str, room: int) -> list[str]:
    # JSON's strings are passed over whole: a comma in one of them is no place to go on.
    pieces = re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^",{])*[,{]|(?:"(?:[^"\\]|\\.)*"|[^",{])+', text)
    if not re.fullmatch(r"(?:\S+ )?'\{[^']*\}'", text) or "".join(pieces) != text:
        return [text]
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > room:
            lines.append("")
        lines[-1] += piece
    return lines
