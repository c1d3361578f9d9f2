"""The launch form for vLLM: its fields, what goes to the node, and what the node's vLLM can do, before anything is started."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Select

from backends.spec import CompareSpec, ExtractSpec, SpecError
from backends.vllm.client import Served
from backends.vllm.compat import can_extract
from backends.vllm.found import Found
from backends.vllm.other import OtherPlan
from backends.vllm.planning import ServerPlan
from dflash_tui.app.fields import ORDER, TEXTS, VERBS, fields_of
from dflash_tui.app.orders import make_order
from dflash_tui.app.widgets.vllm_view import command_lines

from .scripted import PLANNED, ScriptedLink, console, gpu_node, shown, type_text, until, until_shown
from .test_launch_screen import EXTRACT, fill, launch_button, open_form

H200 = (9, 0)
FOUND = Found("/opt/vllm/bin/python", "0.26.0", "2.11.0+cu130", "5.17.0", None, "13.0")
OLD = Found("/opt/old/bin/python", "0.20.1", "2.11.0+cu130", "5.17.0", None, "13.0")


def planned(found: Found, family: str, *, extra_args: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a node with this vLLM and one H200 answers for a model of this family: by the real table and the real command."""
    verdict = can_extract({"model_type": family}, found.version, torch=found.torch, cuda=found.cuda, gpus=[H200])
    server = ServerPlan(found, verdict)
    spec = ExtractSpec("/m/qwen", "/d/gsm8k", "/o/states", backend="vllm", extra_args=extra_args)
    vllm = server.facts(spec, PLANNED["layer_ids"], 4096)
    problem = server.problem() if verdict.ok is False else None
    return {
        **PLANNED,
        "ok": problem is None,
        "error": problem.message if problem else None,
        "remedy": problem.remedy if problem else None,
        "warnings": server.warnings(PLANNED["layer_ids"]),
        "vllm": json.loads(json.dumps(vllm)),
        "memory_bytes_per_worker": None,
        "packing": "the server's own batches",
    }


async def choose(pilot: Pilot[Any], name: str, value: str) -> None:
    """Goes to a choice by Tab, opens it and takes a value."""
    await fill(pilot, **{name: ""})
    select = pilot.app.screen.query_one(f"#{name}", Select)
    values = [item for _, item in select._options]
    steps = values.index(value) - values.index(select.value)
    await pilot.press("enter", *["down" if steps > 0 else "up"] * abs(steps), "enter")
    await until(pilot, lambda: select.value == value, f"{name} {value}")


async def test_an_extraction_by_vllm_goes_to_the_node_with_its_fields_and_its_options_untouched() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=planned(FOUND, "qwen3"))
    app = console(link)
    async with app.run_test(size=(80, 40)) as pilot:
        await open_form(pilot)
        assert "vLLM Python" not in shown(app)
        await choose(pilot, "backend", "vllm")
        await until_shown(pilot, "vLLM Python", "server URL", "tensor parallel", "concurrency", "vLLM options")
        await fill(pilot, **EXTRACT, vllm_python="/opt/vllm/bin/python", tensor_parallel="2", concurrency="64")
        await fill(pilot, extra_args="")
        await pilot.press(*"--swap-space", "space", "4", "space")
        await type_text(pilot, "--x a b")
        await pilot.press("f5")
        await until(pilot, lambda: bool(link.questions("plan")))
        (asked,) = link.questions("plan")
        wanted = ExtractSpec(
            **EXTRACT,
            backend="vllm",
            vllm_python="/opt/vllm/bin/python",
            tensor_parallel=2,
            concurrency=64,
            extra_args=("--swap-space", "4", "--x", "a", "b"),
        )
        assert asked["spec"] == wanted.to_json()
        await until_shown(pilot, "This can run.", "0.26.0 in /opt/vllm/bin/python", "its vLLM command")
        assert not launch_button(pilot).disabled


async def test_the_plan_names_the_vllm_what_it_can_with_which_options_and_the_command() -> None:
    odd = replace(FOUND, torch="2.12.0+cu130")
    plan_answer = planned(odd, "qwen3_5", extra_args=("--swap-space", "4"))
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=plan_answer)
    app = console(link)
    async with app.run_test(size=(160, 60)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until_shown(
            pilot,
            "0.26.0 in /opt/vllm/bin/python with torch 2.12.0+cu130, CUDA 13.0, transformers 5.17.0",
            "yes, this version was tried",
            "--no-enable-prefix-caching --language-model-only",
            "a free port is chosen",
            "/opt/vllm/bin/python -m vllm.entrypoints.cli.main serve /m/qwen",
            "--swap-space 4",
        )
        # A fault stands among the warnings, and not once more beside the vLLM.
        assert shown(app).count("it may not start") == 1 and "known fault" not in shown(app)


async def test_a_vllm_that_cannot_is_refused_with_why_and_what_can_and_cannot_be_launched() -> None:
    answer = planned(OLD, "qwen3_5")
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=answer)
    app = console(link)
    async with app.run_test(size=(160, 60)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until_shown(pilot, "! vLLM 0.20.1 cannot extract from qwen3_5", "remedy: ", "it can", "no")
        assert "This can run" not in shown(app) and "its vLLM command" not in shown(app)
        # Its reason stands there once.
        text = " ".join(shown(app).split())
        assert text.count(" ".join(str(answer["error"]).split())[:60]) == 1
        await pilot.press("f9")
        await pilot.pause()
        assert launch_button(pilot).disabled and not link.questions("launch")


async def test_what_nobody_knows_of_a_version_is_told_as_not_known_with_what_may_be_better() -> None:
    unknown = Found("/opt/new/bin/python", "0.99.0", None, None, None, None)
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=planned(unknown, "qwen3"))
    app = console(link)
    async with app.run_test(size=(160, 60)) as pilot:
        await open_form(pilot)
        await fill(pilot, **EXTRACT)
        await pilot.press("f5")
        await until_shown(pilot, "This can run.", "not known", "try it with a few samples first", "its vLLM command")
        assert not launch_button(pilot).disabled


async def test_a_server_that_runs_already_is_named_with_its_model_and_its_limit() -> None:
    other = OtherPlan("http://10.0.0.7:8000", "0.26.0", Served("qwen", "/m/qwen", 8192), 8192, "")
    spec = ExtractSpec(**EXTRACT, backend="vllm", server_url=other.url)
    vllm = json.loads(json.dumps(other.facts(spec, PLANNED["layer_ids"], 4096)))
    answer = {**PLANNED, "vllm": vllm, "warnings": other.warnings(PLANNED["layer_ids"])}
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer=answer)
    app = console(link)
    async with app.run_test(size=(160, 60)) as pilot:
        await open_form(pilot)
        await choose(pilot, "backend", "vllm")
        await fill(pilot, **EXTRACT, server_url="http://h")
        await pilot.press("f5")
        await until_shown(pilot, "http://10.0.0.7:8000: vLLM 0.26.0, serves qwen, requests of at most 8,192 tokens")
        assert shown(app).count("taken on trust") == 1 and "not known" not in shown(app)
        assert link.questions("plan")[0]["spec"]["server_url"] == "http://h"


async def test_a_comparison_is_asked_for_by_the_form() -> None:
    link = ScriptedLink("gpu-1", gpu_node("gpu-1"), plan_answer={"ok": True, "warnings": []})
    app = console(link)
    async with app.run_test(size=(80, 40)) as pilot:
        await open_form(pilot)
        await choose(pilot, "verb", "compare")
        await until_shown(pilot, "backends run", "vLLM Python", "concurrency", "GPUs")
        assert "server URL" not in shown(app) and "files' dtype" not in shown(app)
        await fill(pilot, **EXTRACT, samples="64")
        await choose(pilot, "together", "side by side")
        await fill(pilot, gpus="")
        await pilot.press("space", "f5")
        await until(pilot, lambda: bool(link.questions("plan")))
        (asked,) = link.questions("plan")
        assert (asked["verb"], len(asked["gpus"])) == ("compare", 1)
        assert asked["spec"] == CompareSpec(**EXTRACT, samples=64, together=True).to_json()


def test_options_are_split_as_a_shell_does_and_an_open_quote_is_refused() -> None:
    texts = {**EXTRACT, "backend": "vllm", "extra_args": '--hf-overrides \'{"a": 1}\' --x "b c"'}
    spec = make_order("gpu-1", "extract", texts).spec
    assert spec["extra_args"] == ["--hf-overrides", '{"a": 1}', "--x", "b c"]
    with pytest.raises(SpecError, match=r"extra_args .* cannot be read: No closing quotation; quote what has blanks"):
        make_order("gpu-1", "extract", {**texts, "extra_args": "--x 'y"})


def test_what_was_typed_for_vllm_does_not_go_with_the_other_backend() -> None:
    texts = {**EXTRACT, "tensor_parallel": "4", "extra_args": "--x", "server_url": "http://h:1", "backend": "hf"}
    assert make_order("gpu-1", "extract", texts).spec == ExtractSpec(**EXTRACT).to_json()
    spec = make_order("gpu-1", "compare", texts).spec
    assert (spec["tensor_parallel"], spec["extra_args"]) == (4, ["--x"])


def test_the_python_of_vllm_may_be_relative_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {**EXTRACT, "backend": "vllm", "vllm_python": "env/bin/python"}
    assert make_order("local", "extract", texts).spec["vllm_python"] == str(tmp_path / "env/bin/python")
    assert make_order("gpu-1", "extract", {**texts, "vllm_python": "python3"}).spec["vllm_python"] == "python3"


def test_every_field_of_every_verb_stands_in_the_form_and_is_one_of_its_spec() -> None:
    from backends.spec import SPECS

    for verb in VERBS:
        for backend in ("hf", "vllm"):
            names = fields_of(verb, backend)
            assert set(names) <= set(ORDER) and set(names) <= set(SPECS[verb].__dataclass_fields__), verb
    assert set(TEXTS) <= set(ORDER)


@pytest.mark.parametrize("width", [40, 78, 198])
def test_the_command_can_be_copied_from_the_screen_into_a_shell(width: int) -> None:
    command = planned(FOUND, "qwen3_5", extra_args=("--hf-overrides", '{"a b": [1, 2]}'))["vllm"]["command"]
    lines = command_lines(command, width)
    back = shlex.split("\n".join(lines).replace("\\\n", ""))
    assert [_value(word) for word in back] == [_value(word) for word in command]
    assert all(len(line) <= width for line in lines) or width == 40


def test_a_list_or_a_string_with_commas_is_never_broken() -> None:
    listed = ",".join(f"https://origin-{number}.example" for number in range(9))
    odd = json.dumps(
        {"path": "/data/" + ",".join("abcdefgh" * 3 for _ in range(5)), "n": 1, "more": ["x" * 30, "y" * 30]}
    )
    command = ["/vllm/bin/python", "serve", "--allowed-origins", listed, "--hf-overrides", odd, "--note", "it's, so"]
    text = "\n".join(command_lines(command, 60))
    assert [_value(word) for word in shlex.split(text.replace("\\\n", ""))] == [_value(word) for word in command]
    assert (
        subprocess.run(
            ["bash", "-c", "printf '%s\\n' " + text], capture_output=True, text=True, check=True
        ).stdout.count(listed)
        == 1
    )


def _value(word: str) -> Any:
    return json.loads(word) if word.startswith("{") else word
