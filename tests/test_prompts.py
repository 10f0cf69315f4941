"""The order of prompts, and resuming it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.prompts import DataCounts, PromptSource, load_prompts, make_prompt_source
from streamrl.config import Config, config_from_tree
from streamrl.errors import ConfigError
from streamrl.examples import Example
from streamrl.records import Prompt
from streamrl.warm_up import make_character_tokenizer

TOKENIZER: Any = make_character_tokenizer([chr(code) for code in range(32, 127)])


def source_of(num_prompts: int = 7, *, seed: int = 0, epochs: int = 0, shuffle: bool = True) -> PromptSource:
    examples = [Example(text=f"prompt {i}", answer=str(i)) for i in range(num_prompts)]
    ids = [np.array([1, i], dtype=np.int32) for i in range(num_prompts)]
    return PromptSource(examples, ids, seed=seed, epochs=epochs, shuffle=shuffle)


def take(source: PromptSource, count: int) -> list[Prompt]:
    prompts = [source.next() for _ in range(count)]
    assert all(prompt is not None for prompt in prompts)
    return [prompt for prompt in prompts if prompt is not None]


def file_config(path: pathlib.Path, rows: list[dict[str, str]], **data: Any) -> Config:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_from_tree(
        {
            "data": {"source": "jsonl", "path": str(path), **data},
            "reward": {"kind": "exact_match"},
            "eval": {"num_prompts": 2},
        }
    )


ROWS = [{"prompt": "x" * (1 + i), "answer": str(i)} for i in range(10)]


def test_every_epoch_gives_every_prompt_once_in_an_order_of_its_own() -> None:
    prompts = take(source_of(20), 60)
    epochs = [[p.index for p in prompts[i : i + 20]] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [p.uid for p in prompts[18:22]] == ["0-000018", "0-000019", "1-000000", "1-000001"]
    assert len({p.uid for p in prompts}) == 60


def test_the_order_depends_on_the_seed_alone() -> None:
    orders = [[p.index for p in take(source_of(20, seed=seed), 40)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_prompts_come_in_file_order() -> None:
    assert [p.index for p in take(source_of(3, shuffle=False), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_prompt_carries_its_tokens_and_its_task() -> None:
    prompt = take(source_of(5), 1)[0]
    assert prompt.prompt_ids.tolist() == [1, prompt.index]
    assert prompt.prompt_ids.dtype == np.int32


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 14, 20])
def test_a_restored_source_continues_where_the_saved_one_stood(taken: int) -> None:
    source = source_of(7, epochs=3)
    take(source, taken)
    state = json.loads(json.dumps(source.state_dict()))  # as a checkpoint would keep it
    restored = source_of(7, epochs=3)
    restored.load_state_dict(state)
    rest = [source.next() for _ in range(25 - taken)]
    again = [restored.next() for _ in range(25 - taken)]
    assert [p and p.uid for p in again] == [p and p.uid for p in rest]
    assert [p and p.index for p in again] == [p and p.index for p in rest]
    assert restored.exhausted


@pytest.mark.parametrize("other", [source_of(8), source_of(7, seed=1), source_of(7, shuffle=False)])
def test_a_state_of_other_data_is_refused(other: PromptSource) -> None:
    with pytest.raises(ConfigError, match="not the prompts that the checkpoint was made with"):
        other.load_state_dict(source_of(7).state_dict())


def test_the_source_ends_after_its_last_epoch() -> None:
    source = source_of(2, epochs=2)
    take(source, 3)
    assert not source.exhausted
    take(source, 1)
    assert source.exhausted
    assert source.next() is None and source.next() is None


def test_zero_epochs_never_end() -> None:
    source = source_of(2, epochs=0)
    take(source, 101)
    assert not source.exhausted


def test_prompts_are_tokenized_as_the_model_sees_them(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS, shuffle=False, template="<{prompt}>")
    prompt = take(make_prompt_source(config, TOKENIZER), 3)[2]
    assert prompt.prompt_ids.tolist() == TOKENIZER("<xxx>")["input_ids"]
    assert prompt.prompt_ids[0] == TOKENIZER.bos_token_id
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt.task)) == {"prompt": "<xxx>", "answer": "2"}


def test_long_prompts_are_skipped_and_counted(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS, max_prompt_tokens=5)
    source = make_prompt_source(config, TOKENIZER)
    assert len(source) == 4  # <bos> and at most four characters
    assert source.num_skipped == 4  # the last two of the ten rows are held out
    assert max(len(p.prompt_ids) for p in take(source, 8)) == 5


def test_long_prompts_are_refused_where_the_config_says_so(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS, max_prompt_tokens=5, long_prompts="refuse")
    with pytest.raises(
        ConfigError, match=r"max_prompt_tokens \(5\): 4 of 8 training prompts are longer; the longest has 9"
    ):
        make_prompt_source(config, TOKENIZER)


def test_a_run_without_a_short_enough_prompt_is_refused(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS, max_prompt_tokens=1)
    with pytest.raises(ConfigError, match=r"8 of 8 training prompts are longer"):
        make_prompt_source(config, TOKENIZER)


def test_held_out_prompts_have_names_of_their_own(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS)
    prompts, _ = load_prompts(config, TOKENIZER)
    assert [p.uid for p in prompts] == ["eval-000000", "eval-000001"]
    assert [p.task["answer"] for p in prompts] == ["8", "9"]
    trained = {p.task["prompt"] for p in take(make_prompt_source(config, TOKENIZER), 16)}
    assert not trained & {p.task["prompt"] for p in prompts}


def test_everything_left_out_of_the_data_is_counted_by_reason(tmp_path: pathlib.Path) -> None:
    rows = [*ROWS[:-2], ROWS[0], ROWS[-1], ROWS[-2], ROWS[-1]]
    _, counts = load_prompts(file_config(tmp_path / "rows.jsonl", rows, max_prompt_tokens=10), TOKENIZER)
    assert counts == DataCounts(train=8, held_out=1, duplicates=1, leaked=1, long_train=0, long_held_out=1)


def test_the_line_about_the_data_names_only_what_happened() -> None:
    counts = DataCounts(train=7000, held_out=2, duplicates=0, leaked=0, long_train=0, long_held_out=0)
    assert str(counts) == "7,000 training prompts, 2 held out"
    counts = DataCounts(train=7, held_out=2, duplicates=1, leaked=0, long_train=3, long_held_out=0)
    assert str(counts).endswith("; left out: 1 duplicates, 3 longer than data.max_prompt_tokens")


def test_a_chat_prompt_goes_through_the_template_without_a_second_bos(tmp_path: pathlib.Path) -> None:
    config = file_config(tmp_path / "rows.jsonl", ROWS, chat=True, shuffle=False)
    with pytest.raises(ConfigError, match=r"data\.chat \(True\): the tokenizer of model\.path has no chat template"):
        make_prompt_source(config, TOKENIZER)
    chatty: Any = make_character_tokenizer([chr(code) for code in range(32, 127)])
    chatty.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}>"
    ids = take(make_prompt_source(config, chatty), 1)[0].prompt_ids.tolist()
    assert chatty.decode(ids) == "<bos>[x]>"
