from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backends.conversations import ConversationError
from backends.dataset import PreparedDataset
from backends.demo.model import CHAT_TEMPLATE
from backends.errors import Interrupted, JobError
from backends.events import EventLog
from backends.prepare import RECORD, PrepareError, prepare
from backends.spec import PrepareSpec


def _write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"conversations": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def _run(model: Path, output: Path, *inputs: str, events: EventLog | None = None, **fields: Any) -> dict[str, Any]:
    spec = PrepareSpec(model=str(model), inputs=inputs, output=str(output), **fields)
    return prepare(spec, events or EventLog(None), lambda: False)


@functools.cache
def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def _parts(model: Path, output: Path, row: int) -> tuple[str, str]:
    """The text before the supervised tokens and the supervised text; nothing follows."""
    tokenizer = _tokenizer(model)
    ids, mask = PreparedDataset(output).row(row)
    first = mask.index(1)
    assert mask == [0] * first + [1] * (len(ids) - first)
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen3"]


@pytest.fixture
def templated(tmp_path: Path, model: Path) -> Any:
    """Makes a copy of the model's tokenizer with another chat template."""

    def make(template: str) -> Path:
        folder = tmp_path / "templated"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(model / name, folder / name)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return folder

    return make


# --- what is written ---


def test_every_assistant_turn_of_the_real_conversations_is_one_row(
    model: Path, tmp_path: Path, conversation_files: tuple[str, str], events: Any
) -> None:
    result = _run(model, tmp_path / "out", *conversation_files, events=events)
    prepared = PreparedDataset(tmp_path / "out")
    assert result["samples"] == len(prepared) == 220 + 30 * 2
    assert result["tokens"] == sum(prepared.lengths())
    assert result["skipped"] == {} and result["truncated"] == 0
    masks = [prepared.row(row)[1] for row in range(len(prepared))]
    assert result["supervised_tokens"] == sum(map(sum, masks))
    assert result["supervised_share"] == pytest.approx(result["supervised_tokens"] / result["tokens"], abs=1e-4)
    assert events.of("started") == [{"verb": "prepare", "total": 280, "already_done": 0}]
    assert events.of("progress")[-1]["done"] == 280


def test_the_supervised_tokens_are_the_assistants_words_and_the_rest_is_the_prompt(
    model: Path, tmp_path: Path, conversation_files: tuple[str, str]
) -> None:
    _run(model, tmp_path / "out", *conversation_files)
    rows = [json.loads(line) for name in conversation_files for line in Path(name).read_text("utf-8").splitlines()]
    row = 0
    for conversation in rows:
        turns = conversation["conversations"]
        for turn in turns[1::2]:
            before, supervised = _parts(model, tmp_path / "out", row)
            assert supervised == (turn.get("content") or turn["value"]) + "<|im_end|>\n"
            assert before.endswith("<|im_start|>assistant\n")
            assert (turns[0].get("content") or turns[0]["value"]) in before
            row += 1
    assert row == 280


def test_both_key_styles_and_the_key_messages_give_the_same_rows(model: Path, tmp_path: Path) -> None:
    styles = [
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "human", "content": "2+2?"}, {"role": "gpt", "content": "4"}]},
    ]  # fmt: skip
    _run(model, tmp_path / "out", _write(tmp_path / "in.jsonl", *styles))
    prepared = PreparedDataset(tmp_path / "out")
    assert prepared.row(0) == prepared.row(1) == prepared.row(2)
    assert _parts(model, tmp_path / "out", 0)[1] == "4<|im_end|>\n"


def test_the_columns_are_the_trainers(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"))
    _run(model, tmp_path / "with", source)
    _run(model, tmp_path / "without", source, keep_messages=False)
    written = datasets.load_from_disk(str(tmp_path / "with"))
    assert written.column_names == ["input_ids", "loss_mask", "seq_len", "messages"]
    assert written[0]["messages"] == _chat("2+2?", "4")["conversations"]
    assert written[0]["seq_len"] == len(written[0]["input_ids"]) == len(written[0]["loss_mask"])
    assert datasets.load_from_disk(str(tmp_path / "without")).column_names == ["input_ids", "loss_mask", "seq_len"]


def test_a_long_row_is_cut_on_the_right_and_one_without_answer_left_is_counted(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("short?", "word " * 100), _chat("word " * 100, "never reached"))
    whole = _run(model, tmp_path / "whole", source)
    cut = _run(model, tmp_path / "cut", source, max_tokens=40)
    assert whole["samples"] == 2 and cut["samples"] == 1
    assert cut["truncated"] == 1
    assert cut["skipped"] == {"what comes before the turn fills max_tokens": 1}
    ids, mask = PreparedDataset(tmp_path / "cut").row(0)
    full_ids, full_mask = PreparedDataset(tmp_path / "whole").row(0)
    assert ids == full_ids[:40] and mask == full_mask[:40]


def test_a_token_across_the_boundary_is_supervised(tmp_path: Path, events: Any) -> None:
    # The template's prompt ends in a colon, the answer begins with newlines, and the tokenizer, whose offsets leave out
    # whitespace as those of Qwen do, knows ":\n\n" as one token.
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\s\p{L}]+[\r\n]*|\s+|\p{L}+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        ["answer:\n\nyes"] * 50, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}Q {{ m['content'] }} {% else %}answer:{{ m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    source = _write(tmp_path / "in.jsonl", _chat("well?", "\n\nyes"), _chat("well?", "yes"))
    _run(tmp_path / "model", tmp_path / "out", source, events=events)
    # Without the merge the colon would not be supervised; with it the token that holds it must be.
    before, supervised = _parts(tmp_path / "model", tmp_path / "out", 0)
    assert not before.endswith(":") and supervised.endswith(":\n\nyes")
    assert _parts(tmp_path / "model", tmp_path / "out", 1) == ("Q well? answer:", "yes")
    assert [event["message"] for event in events.of("warning")] == [
        "in 1 samples the turn begins otherwise than the generation prompt ends;"
        " they are supervised from the first token that differs"
    ]


def test_characters_of_many_bytes_do_not_move_the_boundary(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("日本語 ünïcödé 🦆🦆", "🦆 ja — 漢字"))
    _run(model, tmp_path / "out", source)
    before, supervised = _parts(model, tmp_path / "out", 0)
    assert supervised == "🦆 ja — 漢字<|im_end|>\n"
    assert "日本語 ünïcödé 🦆🦆" in before


# --- what is skipped, and counted ---


# As templates of reasoning models do: the generation prompt opens a block, and a finished turn has its own.
SCAFFOLD = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ message['content'] }}",
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>{% endif %}{{ message['content'] }}",
)


def test_a_generation_prompt_that_opens_a_block_moves_the_boundary_to_where_the_turn_differs_from_it(
    templated: Any, tmp_path: Path, events: Any
) -> None:
    folder = templated(SCAFFOLD)
    thinking = _chat("2+2?", "4")
    thinking["conversations"][1]["thinking"] = "two and two"
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"), thinking)
    result = _run(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 2
    before, supervised = _parts(folder, tmp_path / "out", 0)
    assert before.endswith("<|im_start|>assistant\n") and supervised == "4<|im_end|>\n"
    # What both have in common is context: the block's opening is there before the model writes a word.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt, whole = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>two and two</think>4<|im_end|>\n",
        )
    )
    common = next(i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    assert 0 < common < len(prompt)
    ids, mask = PreparedDataset(tmp_path / "out").row(1)
    assert ids == whole
    assert mask == [0] * common + [1] * (len(whole) - common)
    assert [event["message"][:12] for event in events.of("warning")] == ["in 2 samples"]


def test_a_template_that_rewrites_history_is_unstable_and_its_turn_is_skipped_and_counted(
    templated: Any, tmp_path: Path, events: Any
) -> None:
    # The first message is written otherwise as soon as a second answer is there.
    rewriting = "{% if messages|selectattr('role', 'equalto', 'assistant')|list|length > 1 %}many\n{% endif %}"
    folder = templated(rewriting + CHAT_TEMPLATE)
    source = _write(tmp_path / "in.jsonl", _chat("a", "b", "c", "d"))
    result = _run(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 1
    reason = "the chat template writes what comes before the turn otherwise once the turn is there"
    assert result["skipped"] == {reason: 1}
    assert events.of("warning")[0]["message"] == f"1 samples skipped: {reason} (first: {source}:1)"


def test_an_agreement_that_ends_inside_history_is_no_boundary(templated: Any, tmp_path: Path) -> None:
    # With the generation prompt the whole text is written otherwise; history without it agrees with the turn's text.
    folder = templated("{% if add_generation_prompt %}go: {% endif %}" + CHAT_TEMPLATE)
    with pytest.raises(PrepareError, match=r"no sample is left of 1 assistant turns .*writes what comes before"):
        _run(folder, tmp_path / "out", _write(tmp_path / "in.jsonl", _chat("2+2?", "4")))
    assert not (tmp_path / "out").exists()


def test_a_template_that_leaves_the_turn_out_gives_no_row(templated: Any, tmp_path: Path) -> None:
    folder = templated("{{ messages[0]['content'] }}")
    with pytest.raises(PrepareError, match="adds nothing for the turn"):
        _run(folder, tmp_path / "out", _write(tmp_path / "in.jsonl", _chat("2+2?", "4")))


def test_tool_calls_reach_the_template_with_their_arguments_as_objects(templated: Any, tmp_path: Path) -> None:
    calls = "{% for call in message['tool_calls'] %}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    folder = templated(CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}" + calls))
    lines = [_chat("2+2?", "") for _ in range(3)]
    for line, arguments in zip(lines, ['{"a": [2, 2]}', {"a": [2, 2]}, '{"a": '], strict=True):
        line["conversations"][1] |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
        }
    result = _run(folder, tmp_path / "out", _write(tmp_path / "in.jsonl", *lines))
    assert result["skipped"] == {"a tool call's arguments are not JSON": 1}
    for row in (0, 1):
        assert _parts(folder, tmp_path / "out", row)[1] == '{"a": [2, 2]}<|im_end|>\n'


def test_a_turn_that_the_template_refuses_is_skipped_with_its_words(
    templated: Any, tmp_path: Path, events: Any
) -> None:
    refusing = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    folder = templated(refusing + CHAT_TEMPLATE)
    source = _write(tmp_path / "in.jsonl", _chat("no", "4"), _chat("yes", "5"))
    result = _run(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 1
    assert result["skipped"] == {"the chat template refuses it: not this one": 1}
    assert f"first: {source}:1" in events.of("warning")[0]["message"]


def test_what_cannot_be_trained_on_is_skipped_and_counted_by_reason(model: Path, tmp_path: Path) -> None:
    source = _write(
        tmp_path / "in.jsonl",
        _chat("2+2?", "4"),
        {"conversations": [{"from": "bing", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "gpt", "value": "Welcome!"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a duck"}]},
        _chat("half", "\ud83d"),
        {"conversations": []},
    )  # fmt: skip
    result = _run(model, tmp_path / "out", source)
    assert result["samples"] == 2
    assert result["skipped"] == {
        "unknown role 'bing'": 1,
        "the assistant's turn opens its conversation": 1,
        "a turn's content is not text": 1,
        "a turn's text holds half a surrogate pair": 1,
    }
    assert result["total"] == result["samples"] + sum(result["skipped"].values())


def test_a_turn_after_a_system_message_alone_and_an_empty_turn_are_rows_as_the_trainers_are(
    model: Path, tmp_path: Path
) -> None:
    system = {"messages": [{"role": "system", "content": "Greet."}, {"role": "assistant", "content": "Hi!"}]}
    _run(model, tmp_path / "out", _write(tmp_path / "in.jsonl", system, _chat("anything?", "")))
    assert _parts(model, tmp_path / "out", 0)[1] == "Hi!<|im_end|>\n"
    assert _parts(model, tmp_path / "out", 1)[1] == "<|im_end|>\n"


def test_the_limit_counts_conversations(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", *[_chat("a", "b", "c", "d")] * 3)
    assert _run(model, tmp_path / "out", source, limit=2)["samples"] == 4


# --- bad input: nothing is written ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"conversations": [', "line 3 is not JSON: .* at column"),
        (b"[1, 2]", "line 3 is a JSON list, not an object"),
        (b'{"text": "hi", "id": 3}', r"line 3 has no list `conversations` or `messages` \(its keys: text, id\)"),
        (b'{"conversations": ["hi"]}', "line 3 has a turn without `role` or `from`"),
        (b'{"conversations": "\xff"}', "line 3 is not UTF-8"),
        (b'{"n": ' + b"9" * 5000 + b"}", "line 3 is not JSON that can be read"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_written(model: Path, tmp_path: Path, line: bytes, words: str) -> None:
    good = json.dumps(_chat("2+2?", "4")).encode()
    source = tmp_path / "in.jsonl"
    # After a good line and an empty one, and before another good one.
    source.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    with pytest.raises(ConversationError, match=words) as caught:
        _run(model, tmp_path / "out", str(source))
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + json.dumps(_chat("2+2?", "4")).encode() + b"\r\n")
    assert _run(model, tmp_path / "out", str(source))["samples"] == 1


def test_missing_and_empty_files_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"missing\.jsonl cannot be read"):
        _run(model, tmp_path / "out", str(tmp_path / "missing.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConversationError, match=r"empty\.jsonl holds no conversation"):
        _run(model, tmp_path / "out", str(empty))


def test_a_model_without_tokenizer_or_template_is_refused(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"))
    with pytest.raises(PrepareError, match="nowhere is not a folder"):
        _run(tmp_path / "nowhere", tmp_path / "out", source)
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    with pytest.raises(PrepareError, match="bare has no tokenizer"):
        _run(tmp_path / "bare", tmp_path / "out", source)
    shutil.copytree(model, tmp_path / "mute", ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    with pytest.raises(PrepareError, match="has no chat template"):
        _run(tmp_path / "mute", tmp_path / "out", source)


# --- the output: whole or not at all ---


def test_the_same_prepare_again_finishes_at_once_and_changes_nothing(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"))
    first = _run(model, tmp_path / "out", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    # Neither the name of the file nor that of the model matters, only what is in them.
    renamed = str(Path(source).rename(tmp_path / "renamed.jsonl"))
    again = _run(model, tmp_path / "out", renamed)
    assert again["already_done"] and not first["already_done"]
    assert again["samples"] == first["samples"] == again["done"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_an_output_of_another_prepare_or_of_nobody_is_left_alone(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"))
    _run(model, tmp_path / "out", source)
    with pytest.raises(PrepareError, match=r"holds another dataset \(differs in max_tokens\): delete it or"):
        _run(model, tmp_path / "out", source, max_tokens=100)
    _write(tmp_path / "in.jsonl", _chat("2+3?", "5"))
    with pytest.raises(PrepareError, match="differs in inputs_sha256"):
        _run(model, tmp_path / "out", source)
    assert _parts(model, tmp_path / "out", 0)[1] == "4<|im_end|>\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(PrepareError, match="was not written by `prepare`"):
        _run(model, tmp_path / "mine", source)
    with pytest.raises(PrepareError, match="is a file"):
        _run(model, tmp_path / "in.jsonl", source)


def test_the_same_conversations_give_the_same_fingerprint_elsewhere(model: Path, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", _chat("2+2?", "4"))
    for name in ("a", "b"):
        _run(model, tmp_path / name, source)
    assert PreparedDataset(tmp_path / "a").fingerprint == PreparedDataset(tmp_path / "b").fingerprint


def test_a_stop_leaves_nothing_behind(model: Path, tmp_path: Path, conversation_files: tuple[str, str]) -> None:
    answers = iter([False, True])
    spec = PrepareSpec(model=str(model), inputs=conversation_files, output=str(tmp_path / "out"))
    with pytest.raises(Interrupted, match="nothing was written"):
        prepare(spec, EventLog(None), lambda: next(answers))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_prepare_left_is_swept_by_the_next(model: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.preparing"
    (work / "whole").mkdir(parents=True)
    (work / "rows.arrow").write_bytes(b"half")
    (work / "whole" / "state.json").write_text("{}")
    _run(model, tmp_path / "out", _write(tmp_path / "in.jsonl", _chat("2+2?", "4")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]
    assert (tmp_path / "out" / RECORD).is_file()


def test_two_prepares_of_one_output_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    import fcntl

    work = tmp_path / ".out.preparing"
    work.mkdir()
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(JobError, match="another prepare is writing"):
            _run(model, tmp_path / "out", _write(tmp_path / "in.jsonl", _chat("2+2?", "4")))
        assert work.is_dir() and not (tmp_path / "out").exists()
    finally:
        os.close(descriptor)


def test_a_full_disk_is_one_clear_line_and_leaves_no_dataset(model: Path, tmp_path: Path) -> None:
    # A limit on the size of a file stands for the full disk: the same error from the same call, in a process of its own.
    source = _write(tmp_path / "in.jsonl", *[_chat("2+2?", "four " * 200)] * 50)
    spec = {"model": str(model), "inputs": [source], "output": str(tmp_path / "out")}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    main = Path(sys.modules["backends"].__file__ or "").with_name("__main__.py")
    script = (
        "import resource, signal, runpy, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536));"
        f"sys.argv = ['backends', 'prepare', {str(tmp_path / 'spec.json')!r}];"
        f"runpy.run_path({str(main)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert f"the dataset {tmp_path / 'out'} cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "spec.json"]
