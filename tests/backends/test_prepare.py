from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from conversation_rows import chat, parts, run_prepare, write_lines
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backends.dataset import PreparedDataset
from backends.demo.model import CHAT_TEMPLATE
from backends.prepare import PrepareError


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
    result = run_prepare(model, tmp_path / "out", *conversation_files, events=events)
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
    run_prepare(model, tmp_path / "out", *conversation_files)
    rows = [json.loads(line) for name in conversation_files for line in Path(name).read_text("utf-8").splitlines()]
    row = 0
    for conversation in rows:
        turns = conversation["conversations"]
        for turn in turns[1::2]:
            before, supervised = parts(model, tmp_path / "out", row)
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
    run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", *styles))
    prepared = PreparedDataset(tmp_path / "out")
    assert prepared.row(0) == prepared.row(1) == prepared.row(2)
    assert parts(model, tmp_path / "out", 0)[1] == "4<|im_end|>\n"


def test_the_columns_are_the_trainers(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"))
    run_prepare(model, tmp_path / "with", source)
    run_prepare(model, tmp_path / "without", source, keep_messages=False)
    written = datasets.load_from_disk(str(tmp_path / "with"))
    assert written.column_names == ["input_ids", "loss_mask", "seq_len", "messages"]
    assert written[0]["messages"] == chat("2+2?", "4")["conversations"]
    assert written[0]["seq_len"] == len(written[0]["input_ids"]) == len(written[0]["loss_mask"])
    assert datasets.load_from_disk(str(tmp_path / "without")).column_names == ["input_ids", "loss_mask", "seq_len"]


def test_a_long_row_is_cut_on_the_right_and_one_without_answer_left_is_counted(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("short?", "word " * 100), chat("word " * 100, "never reached"))
    whole = run_prepare(model, tmp_path / "whole", source)
    cut = run_prepare(model, tmp_path / "cut", source, max_tokens=40)
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
    source = write_lines(tmp_path / "in.jsonl", chat("well?", "\n\nyes"), chat("well?", "yes"))
    run_prepare(tmp_path / "model", tmp_path / "out", source, events=events)
    # Without the merge the colon would not be supervised; with it the token that holds it must be.
    before, supervised = parts(tmp_path / "model", tmp_path / "out", 0)
    assert not before.endswith(":") and supervised.endswith(":\n\nyes")
    assert parts(tmp_path / "model", tmp_path / "out", 1) == ("Q well? answer:", "yes")
    assert [event["message"] for event in events.of("warning")] == [
        "in 1 samples the turn begins otherwise than the generation prompt ends;"
        " they are supervised from the first token that differs"
    ]


def test_characters_of_many_bytes_do_not_move_the_boundary(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("日本語 ünïcödé 🦆🦆", "🦆 ja — 漢字"))
    run_prepare(model, tmp_path / "out", source)
    before, supervised = parts(model, tmp_path / "out", 0)
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
    thinking = chat("2+2?", "4")
    thinking["conversations"][1]["thinking"] = "two and two"
    source = write_lines(tmp_path / "in.jsonl", chat("2+2?", "4"), thinking)
    result = run_prepare(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 2
    before, supervised = parts(folder, tmp_path / "out", 0)
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
    source = write_lines(tmp_path / "in.jsonl", chat("a", "b", "c", "d"))
    result = run_prepare(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 1
    reason = "the chat template writes what comes before the turn otherwise once the turn is there"
    assert result["skipped"] == {reason: 1}
    assert events.of("warning")[0]["message"] == f"1 samples skipped: {reason} (first: {source}:1)"


def test_an_agreement_that_ends_inside_history_is_no_boundary(templated: Any, tmp_path: Path) -> None:
    # With the generation prompt the whole text is written otherwise; history without it agrees with the turn's text.
    folder = templated("{% if add_generation_prompt %}go: {% endif %}" + CHAT_TEMPLATE)
    with pytest.raises(PrepareError, match=r"no sample is left of 1 .*writes what comes before"):
        run_prepare(folder, tmp_path / "out", write_lines(tmp_path / "in.jsonl", chat("2+2?", "4")))
    assert not (tmp_path / "out").exists()


def test_a_template_that_leaves_the_turn_out_gives_no_row(templated: Any, tmp_path: Path) -> None:
    folder = templated("{{ messages[0]['content'] }}")
    with pytest.raises(PrepareError, match="adds nothing for the turn"):
        run_prepare(folder, tmp_path / "out", write_lines(tmp_path / "in.jsonl", chat("2+2?", "4")))


def test_tool_calls_reach_the_template_with_their_arguments_as_objects(templated: Any, tmp_path: Path) -> None:
    calls = "{% for call in message['tool_calls'] %}{{ call['function']['arguments'] | tojson }}{% endfor %}"
    folder = templated(CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}" + calls))
    lines = [chat("2+2?", "") for _ in range(3)]
    for line, arguments in zip(lines, ['{"a": [2, 2]}', {"a": [2, 2]}, '{"a": '], strict=True):
        line["conversations"][1] |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
        }
    result = run_prepare(folder, tmp_path / "out", write_lines(tmp_path / "in.jsonl", *lines))
    assert result["skipped"] == {"a tool call's arguments are not JSON": 1}
    for row in (0, 1):
        assert parts(folder, tmp_path / "out", row)[1] == '{"a": [2, 2]}<|im_end|>\n'


def test_a_turn_that_the_template_refuses_is_skipped_with_its_words(
    templated: Any, tmp_path: Path, events: Any
) -> None:
    refusing = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    folder = templated(refusing + CHAT_TEMPLATE)
    source = write_lines(tmp_path / "in.jsonl", chat("no", "4"), chat("yes", "5"))
    result = run_prepare(folder, tmp_path / "out", source, events=events)
    assert result["samples"] == 1
    assert result["skipped"] == {"the chat template refuses it: not this one": 1}
    assert f"first: {source}:1" in events.of("warning")[0]["message"]


def test_what_cannot_be_trained_on_is_skipped_and_counted_by_reason(model: Path, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        chat("2+2?", "4"),
        {"conversations": [{"from": "bing", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "gpt", "value": "Welcome!"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a duck"}]},
        chat("half", "\ud83d"),
        {"conversations": []},
    )  # fmt: skip
    result = run_prepare(model, tmp_path / "out", source)
    assert result["samples"] == 2
    assert result["skipped"] == {
        "unknown role 'bing'": 1,
        "the assistant's turn opens its conversation": 1,
        "a turn's content is not text": 1,
        "a turn's text holds half a surrogate pair": 1,
        "a conversation has no turn of the assistant": 1,
    }
    assert result["total"] == result["samples"] + sum(result["skipped"].values())


def test_a_turn_after_a_system_message_alone_and_an_empty_turn_are_rows_as_the_trainers_are(
    model: Path, tmp_path: Path
) -> None:
    system = {"messages": [{"role": "system", "content": "Greet."}, {"role": "assistant", "content": "Hi!"}]}
    run_prepare(model, tmp_path / "out", write_lines(tmp_path / "in.jsonl", system, chat("anything?", "")))
    assert parts(model, tmp_path / "out", 0)[1] == "Hi!<|im_end|>\n"
    assert parts(model, tmp_path / "out", 1)[1] == "<|im_end|>\n"


def test_the_limit_counts_conversations(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[chat("a", "b", "c", "d")] * 3)
    assert run_prepare(model, tmp_path / "out", source, limit=2)["samples"] == 4
