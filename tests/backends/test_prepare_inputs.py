"""Where conversations may come from, what may stand in them, the order of the rows, and the figures of it all."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from conversation_rows import chat, parts, run_prepare, write_lines

from backends import sources
from backends.conversations import Conversation, Records, Skipped, Tokenised
from backends.dataset import PreparedDataset
from backends.plan import plan
from backends.prepare import PrepareError
from backends.sources import SourceError
from backends.spec import PrepareSpec

CHATS = [chat(f"What is {n} + {n}?", f"{n} and {n} make {2 * n}.") for n in range(40)]
ROWS = [{"input_ids": [n, n + 1, n + 2], "loss_mask": [0, 1, 1]} for n in range(5, 9)]


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen3"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet is read through a cache of `datasets`: not the developer's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def rows_of(output: Path) -> list[tuple[list[int], list[int]]]:
    prepared = PreparedDataset(output)
    return [prepared.row(i) for i in range(len(prepared))]


# --- where they come from ---


def test_every_kind_of_file_gives_the_same_rows(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", *CHATS)
    (tmp_path / "b.json").write_text("\n " + json.dumps(CHATS, indent=1))
    table = datasets.Dataset.from_list(CHATS)
    table.to_parquet(tmp_path / "c.parquet")
    table.save_to_disk(tmp_path / "d")
    wanted = None
    for name in ("a.jsonl", "b.json", "c.parquet", "d"):
        run_prepare(model, tmp_path / f"out-{name}", str(tmp_path / name))
        found = rows_of(tmp_path / f"out-{name}")
        wanted = wanted or found
        assert len(found) == 40 and found == wanted


def test_a_folder_gives_the_files_in_it_and_below_it_in_order_and_no_hidden_ones(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "below").mkdir(parents=True)
    (folder / ".git").mkdir()
    write_lines(folder / "z.jsonl", CHATS[3])
    write_lines(folder / "a.jsonl", CHATS[0], CHATS[1])
    write_lines(folder / "below" / "b.jsonl", CHATS[2])
    write_lines(folder / ".git" / "x.jsonl", CHATS[9])
    (folder / "README.md").write_text("no conversation")
    run_prepare(model, tmp_path / "out", str(folder))
    run_prepare(model, tmp_path / "wanted", write_lines(tmp_path / "w.jsonl", *CHATS[:4]))
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "wanted")


def test_a_folder_of_more_files_than_may_be_open_at_a_time_is_read_in_any_order(tmp_path: Path) -> None:
    def opened() -> int:
        return sum(str(tmp_path) in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())

    for number in range(2 * sources._OPEN):
        write_lines(tmp_path / f"{number}.jsonl", chat(f"q{number}", "a"), chat(f"r{number}", "b"))
    most, asked = 0, []
    for record in Records((str(tmp_path),), shuffle_seed=0):
        assert isinstance(record, Conversation)
        asked.append(record.messages[0]["content"])
        most = max(most, opened())
    assert sorted(asked) == sorted(f"{letter}{number}" for letter in "qr" for number in range(2 * sources._OPEN))
    assert most == sources._OPEN


def test_folders_and_files_that_hold_nothing_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "b.json").write_text('[{"conversations": ')
    write_lines(tmp_path / "c.jsonl", CHATS[0])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(CHATS[:2])}).save_to_disk(tmp_path / "splits")
    for name, words in {
        "empty": r"the folder .*empty holds no \.jsonl",
        "a.parquet": r"a\.parquet cannot be read as Parquet: ",
        "b.json": r"b\.json is not JSON: .* at column",
        "splits": "holds several splits: give one of its folders: train",
        "none.parquet": r"none\.parquet is not a file",
    }.items():
        with pytest.raises(SourceError, match=words) as caught:
            run_prepare(model, tmp_path / "out", str(tmp_path / "c.jsonl"), str(tmp_path / name))
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


# --- rows that are tokenised already ---


def test_tokenised_rows_pass_through_as_they_are(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ROWS[0], CHATS[0], ROWS[1])
    result = run_prepare(model, tmp_path / "out", source)
    assert result["samples"] == 3
    rows = rows_of(tmp_path / "out")
    assert [rows[0], rows[2]] == [([5, 6, 7], [0, 1, 1]), ([6, 7, 8], [0, 1, 1])]
    assert parts(model, tmp_path / "out", 1)[1] == "0 and 0 make 0.<|im_end|>\n"


def test_a_prepared_dataset_passes_through_and_needs_no_tokenizer(model: Path, tmp_path: Path) -> None:
    run_prepare(model, tmp_path / "first", write_lines(tmp_path / "in.jsonl", *CHATS))
    nothing = tmp_path / "model"
    nothing.mkdir()
    spec = PrepareSpec(model=str(nothing), inputs=(str(tmp_path / "first"),), output=str(tmp_path / "second"))
    assert plan(spec)["ok"]
    run_prepare(nothing, tmp_path / "second", str(tmp_path / "first"))
    assert rows_of(tmp_path / "second") == rows_of(tmp_path / "first")
    # Conversations do need one.
    refused = plan(
        PrepareSpec(model=str(nothing), inputs=(str(tmp_path / "in.jsonl"),), output=str(tmp_path / "third"))
    )
    assert not refused["ok"] and "has no tokenizer" in refused["error"]


def test_tokenised_rows_that_cannot_be_trained_on_are_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    bad = {
        "differ in length": {"input_ids": [1, 2], "loss_mask": [1]},
        "is not a list of token ids": {"input_ids": [1, -2], "loss_mask": [1, 1]},
        "is not a list of 0 and 1": {"input_ids": [1, 2], "loss_mask": [0, 2]},
        "no token of a tokenised row is supervised": {"input_ids": [1, 2], "loss_mask": [0, 0]},
        "no token of the first 4 of a tokenised row is supervised": {"input_ids": [1] * 5, "loss_mask": [0] * 4 + [1]},
    }
    long = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 1, 1, 1]}
    result = run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", long, *bad.values()), max_tokens=4)
    assert (result["samples"], result["truncated"]) == (1, 1)
    assert rows_of(tmp_path / "out") == [([1, 2, 3, 4], [0, 0, 0, 1])]
    assert len(result["skipped"]) == len(bad) and set(result["skipped"].values()) == {1}
    for words in bad:
        assert any(words in reason for reason in result["skipped"])


# --- what may stand in a conversation ---

TEMPLATE = """{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
call {{ call.function.name }}({{ ARGUMENTS }}){% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_template(model: Path, folder: Path, arguments: str) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("ARGUMENTS", arguments))
    return folder


@pytest.mark.parametrize("arguments", ["call.function.arguments | tojson", "'' + call.function.arguments"])
@pytest.mark.parametrize("given", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_tools_and_their_calls_and_answers_reach_the_template(
    model: Path, tmp_path: Path, arguments: str, given: Any
) -> None:
    """Templates want the arguments as an object or as a text; conversations hold one or the other."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": given}}
    conversation = {
        "tools": json.dumps([tool]),
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
    }
    folder = with_template(model, tmp_path / "model", arguments)
    result = run_prepare(folder, tmp_path / "out", write_lines(tmp_path / "in.jsonl", conversation))
    assert (result["samples"], result["skipped"]) == (2, {})
    before, supervised = parts(folder, tmp_path / "out", 0)
    assert before.startswith("tools: ") and '"weather"' in before and "Rome?<|im_end|>" in before
    assert supervised == 'call weather({"city": "Rome"})<|im_end|>\n'
    before, supervised = parts(folder, tmp_path / "out", 1)
    assert 'call weather({"city": "Rome"})' in before and "tool\nsunny" in before and supervised == "Sunny.<|im_end|>\n"


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_keys_that_a_table_has_for_other_rows_alone_do_not_reach_the_template(tmp_path: Path, kind: str) -> None:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {key: "x"}}}
        for name, key in (("weather", "city"), ("time", "zone"))
    ]
    tools = [{"function": {"name": "weather", "needs": {"city": "where"}}}, {"function": {"name": "time"}}]
    turns = [{"role": "user", "content": "?"}, *({"role": "assistant", "tool_calls": [call]} for call in calls)]
    table = datasets.Dataset.from_list([{"messages": turns, "tools": tools}])
    if kind == "parquet":
        table.to_parquet(tmp_path / "in")
        (tmp_path / "in").rename(tmp_path / "in.parquet")
    else:
        table.save_to_disk(tmp_path / "in.parquet")
    (record,) = Records((str(tmp_path / "in.parquet"),))
    assert isinstance(record, Conversation)
    assert record.tools == tools
    assert [message.get("tool_calls", []) for message in record.messages] == [[], calls[:1], calls[1:]]


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "reasoning"])
def test_the_reasoning_of_the_last_turn_is_supervised_and_that_of_history_is_the_templates_affair(
    model: Path, tmp_path: Path, key: str
) -> None:
    conversation = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "gpt", "value": "4", key: "two twos"},
            {"from": "human", "value": "3+3?"},
            {"from": "gpt", "value": "6", key: "two threes"},
        ]
    }
    folder = with_template(model, tmp_path / "model", "''")
    result = run_prepare(folder, tmp_path / "out", write_lines(tmp_path / "in.jsonl", conversation))
    assert result["samples"] == 2
    assert parts(folder, tmp_path / "out", 0)[1] == "<think>two twos</think>4<|im_end|>\n"
    before, supervised = parts(folder, tmp_path / "out", 1)
    assert supervised == "<think>two threes</think>6<|im_end|>\n" and "two twos" not in before


# --- the order of the rows ---


def order(*inputs: str, seed: int | None, limit: int | None = None) -> list[str]:
    records = list(Records(inputs, limit, seed))
    assert all(isinstance(record, Conversation) for record in records)
    return [str(record.messages[0]["content"]) for record in records if isinstance(record, Conversation)]


def test_the_order_depends_on_the_seed_and_the_conversations_and_on_nothing_else(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl", *CHATS)
    mixed = CHATS.copy()
    random.Random(5).shuffle(mixed)
    first, second = write_lines(tmp_path / "1.jsonl", *mixed[:13]), write_lines(tmp_path / "2.jsonl", *mixed[13:])
    shuffled = order(whole, seed=0)
    assert shuffled == order(second, first, seed=0) == order(first, second, seed=0)
    assert sorted(shuffled) == sorted(order(whole, seed=None))
    assert shuffled not in (order(whole, seed=None), order(whole, seed=1))
    # One conversation more moves none of the others.
    more = write_lines(tmp_path / "more.jsonl", chat("And this?", "That."))
    longer = order(whole, more, seed=0)
    longer.remove("And this?")
    assert longer == shuffled
    # A limit takes from all of them.
    assert order(whole, seed=0, limit=7) == shuffled[:7]
    assert order(whole, seed=None, limit=7) == [f"What is {n} + {n}?" for n in range(7)]


def test_the_turns_of_a_conversation_stay_together_and_the_same_command_again_is_done(
    model: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *(chat(f"q{n}", "a", f"r{n}", "b") for n in range(12)))
    run_prepare(model, tmp_path / "out", source, shuffle_seed=3)
    asked = [parts(model, tmp_path / "out", row)[0].split("user\n")[1][:3].split("<")[0] for row in range(24)]
    assert asked[::2] == asked[1::2] and sorted(asked[::2]) == sorted(f"q{n}" for n in range(12))
    assert asked[::2] != [f"q{n}" for n in range(12)]
    again = run_prepare(model, tmp_path / "out", source, shuffle_seed=3)
    assert again["already_done"] and again["statistics"]["lengths"]
    with pytest.raises(PrepareError, match="differs in shuffle_seed"):
        run_prepare(model, tmp_path / "out", source, shuffle_seed=4)


def test_what_cannot_be_used_is_told_with_its_place_whatever_the_order(tmp_path: Path) -> None:
    odd = {"conversations": [{"from": "narrator", "value": "x"}, {"from": "gpt", "value": "y"}]}
    source = write_lines(tmp_path / "in.jsonl", *CHATS[:3], odd, ROWS[0])
    records = Records((source,), None, 0)
    assert (records.conversations, records.samples, len(records)) == (4, 5, 5)
    (skipped,) = [record for record in records if isinstance(record, Skipped)]
    assert skipped == Skipped(f"{source}:4", 1, "unknown role 'narrator'")
    (row,) = [record for record in records if isinstance(record, Tokenised)]
    assert row == Tokenised(f"{source}:5", [5, 6, 7], [0, 1, 1])


def test_a_conversation_without_a_turn_of_the_assistant_is_counted_and_told(
    model: Path, tmp_path: Path, events: Any
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", chat("hello?"), chat("2+2?", "4"), {"messages": [{"role": "bot", "content": "x"}]}
    )
    result = run_prepare(model, tmp_path / "out", source, events=events)
    assert (result["samples"], result["total"]) == (1, 3)
    assert result["skipped"] == {"a conversation has no turn of the assistant": 1, "unknown role 'bot'": 1}
    assert any(f"(first: {source}:1)" in event["message"] for event in events.of("warning"))


# --- figures ---


def test_the_statistics_are_those_of_the_rows(model: Path, tmp_path: Path) -> None:
    lengths = [1, 2, 3, 4, 5, 8, 9, 100, 100, 100]
    rows = [{"input_ids": [7] * n, "loss_mask": [0] * (n // 2) + [1] * (n - n // 2)} for n in lengths]
    result = run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", *rows))
    found = result["statistics"]
    assert found["lengths"] == {"min": 1, "p10": 2, "p50": 8, "p90": 100, "p99": 100, "max": 100, "mean": 33.2}
    assert found["supervised"]["max"] == 50 and found["supervised_share"]["max"] == 1.0
    histogram = {bucket["to"]: bucket["samples"] for bucket in found["histogram"]}
    assert histogram == {1: 1, 2: 1, 4: 2, 8: 2, 16: 1, 32: 0, 64: 0, 128: 3}
    assert sum(bucket["tokens"] for bucket in found["histogram"]) == sum(lengths)
    assert found["histogram"][-1]["supervised_share"] == 0.5 and found["histogram"][5]["supervised_share"] is None
    record = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert record["finished"]["statistics"] == found
