"""The run's data: reading, refusing and splitting."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from streamrl.config import Config, config_from_tree
from streamrl.errors import ConfigError
from streamrl.examples import load_examples, open_task, plain, restore
from streamrl.template import Template

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(10)]


def words_config(*, seed: int = 0, size: int = 200, num_held_out: int = 50, length: int = 3) -> Config:
    return config_from_tree(
        {
            "run": {"seed": seed},
            "data": {
                "task": "spell_backward",
                "task_args": {"min_word_len": length, "max_word_len": length},
                "template": "{word}=",
                "size": size,
            },
            "eval": {"num_prompts": num_held_out},
        }
    )


def file_config(path: pathlib.Path, *, num_held_out: int = 2, kind: str = "exact_match", **data: Any) -> Config:
    source = "parquet" if path.suffix == ".parquet" else "jsonl"
    return config_from_tree(
        {
            "data": {"source": source, "path": str(path), **data},
            "reward": {"kind": kind},
            "eval": {"num_prompts": num_held_out},
        }
    )


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_no_held_out_text_is_trained_on_even_where_draws_collide() -> None:
    sets = load_examples(words_config(size=3000))
    held_out = {e.text for e in sets.held_out}
    train = [e.text for e in sets.train]
    assert len(held_out) == 50
    assert sets.num_leaked > 0, "1,300 words and 3,000 draws must collide, or this test shows nothing"
    assert not held_out & set(train)
    assert len(train) == len(set(train)) == 3000 - sets.num_leaked - sets.num_duplicates


def test_the_same_config_gives_the_same_examples() -> None:
    assert load_examples(words_config()) == load_examples(words_config())


def test_the_seed_changes_training_and_not_what_is_held_out() -> None:
    one, two = load_examples(words_config(seed=1)), load_examples(words_config(seed=2))
    assert one.held_out == two.held_out
    assert one.train != two.train


def test_neighbouring_seeds_do_not_share_their_draws() -> None:
    one, two = (load_examples(words_config(seed=s, size=300, length=8)).train for s in (1, 2))
    shared = {e.text for e in one} & {e.text for e in two}
    assert len(shared) < 30, "reasoning-gym's own seeding would share 299 of 300"


def test_a_task_with_too_few_prompts_to_hold_out_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.num_prompts \(2000\): data.task=spell_backward gave only \d+ distinct"
    ):
        load_examples(words_config(num_held_out=2000))


def test_no_held_out_prompts_are_drawn_when_none_are_wanted() -> None:
    assert load_examples(words_config(num_held_out=0)).held_out == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"task": "spell_backwards"},
            r"data\.task \('spell_backwards'\): no such reasoning-gym task\. Did you mean spell_b",
        ),
        (
            {"task": "chain_sum", "task_args": {"max_term": 3}},
            r"data\.task_args .*max_term.*arguments are: min_terms, max_t",
        ),
        (
            {"task": "chain_sum", "task_args": {"min_terms": 9}},
            r"data\.task_args .*refused by chain_sum: max_terms must be",
        ),
        (
            {"task": "chain_sum", "task_args": {"seed": 9}},
            r"data\.task_args\.seed \(9\): set by streamrl\. Use run\.seed",
        ),
    ],
)
def test_a_wrong_task_is_refused_with_the_remedy(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_examples(config_from_tree({"data": {"size": 3, **data}}))


def test_a_verifier_that_tells_tuples_from_lists_still_scores_after_the_wire() -> None:
    dataset = open_task("rearc", {}, seed=3, size=1)
    entry = dataset[0]
    wire = msgspec.msgpack.encode(plain(entry))
    assert dataset.score_answer(entry["answer"], restore(msgspec.msgpack.decode(wire))) == 1.0
    assert dataset.score_answer(entry["answer"], msgspec.msgpack.decode(msgspec.msgpack.encode(entry))) < 1.0


def test_numpy_values_of_a_task_become_plain() -> None:
    entry = open_task("knights_knaves", {}, seed=3, size=1)[0]
    assert restore(msgspec.msgpack.decode(msgspec.msgpack.encode(plain(entry)))) == entry


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_the_last_rows_of_a_file_are_held_out(write: Any, tmp_path: pathlib.Path) -> None:
    suffix = "jsonl" if write is write_jsonl else "parquet"
    sets = load_examples(file_config(write(tmp_path / f"rows.{suffix}", ROWS)))
    assert [e.text for e in sets.held_out] == ["8+8=", "9+9="]
    assert [e.text for e in sets.train] == [f"{i}+{i}=" for i in range(8)]
    assert sets.train[3].answer == "6"
    assert sets.train[3].task == {"prompt": "3+3=", "answer": "6"}


def test_repeated_and_leaking_rows_are_dropped_and_counted(tmp_path: pathlib.Path) -> None:
    rows = [*ROWS[:4], ROWS[0], ROWS[3], ROWS[3]]
    sets = load_examples(file_config(write_jsonl(tmp_path / "rows.jsonl", rows), num_held_out=1))
    assert [e.text for e in sets.held_out] == ["3+3="]
    assert [e.text for e in sets.train] == ["0+0=", "1+1=", "2+2="]
    assert (sets.num_duplicates, sets.num_leaked) == (1, 2)


def test_held_out_prompts_may_come_from_a_file_of_their_own(tmp_path: pathlib.Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    eval_path = write_jsonl(tmp_path / "eval.jsonl", [ROWS[4], {"prompt": "new", "answer": "x"}, ROWS[5]])
    sets = load_examples(file_config(path, eval_path=str(eval_path)))
    assert [e.text for e in sets.held_out] == ["4+4=", "new"]
    assert [e.text for e in sets.train] == [row["prompt"] for row in ROWS if row is not ROWS[4]]


def test_a_function_of_the_users_gets_the_whole_row(tmp_path: pathlib.Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    sets = load_examples(file_config(path, kind="python", template="Add. {prompt}"))
    assert sets.train[5].task == {"prompt": "Add. 5+5=", "answer": "10", "row": ROWS[5]}


def test_a_file_that_is_wholly_held_out_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"none of the 10 rows is left for training once the 10 held-out"):
        load_examples(file_config(path, num_held_out=50))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"data\.path \(.*rows\.jsonl\): has no rows"),
        (b"\n\n", r"has no rows"),
        (b'{"prompt": "a", "answer": "b"}\n{"prompt": \n', r"data\.path \(.*\), line 2: not JSON"),
        (b'{"prompt": "a", "answer": "b"}\n\n{"prompt": "\xff"}\n', r"line 3: not UTF-8 .*Save it as UTF-8"),
        (b"[1, 2]\n", r"line 1: must be a JSON object, not list"),
        (b'{"prompts": "a", "answer": "b"}\n', r"line 1: has no column prompt\. Did you mean prompts\?"),
        (b'{"prompt": "a"}\n', r"line 1: has no column answer\. It has: prompt\. Set data\.prompt_column"),
        (b'{"prompt": ["a"], "answer": "b"}\n', r"line 1: column prompt must be a text that is not empty, not \['a'\]"),
        (b'{"prompt": "", "answer": "b"}\n', r"line 1: column prompt must be a text that is not empty, not ''"),
        (b'{"prompt": "a", "answer": null}\n', r"line 1: column answer must be a text"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_its_line(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_examples(file_config(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(ConfigError, match=rf"data\.path \(.*{name}\): no such file"):
            load_examples(file_config(tmp_path / name))


def test_a_bad_parquet_file_is_refused(tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet at all")
    with pytest.raises(ConfigError, match=r"data\.path \(.*broken\.parquet\): cannot be read"):
        load_examples(file_config(broken))
    other = write_parquet(tmp_path / "other.parquet", [{"question": "a", "answer": "b"}])
    with pytest.raises(ConfigError, match=r"has no column prompt\. It has: question, answer"):
        load_examples(file_config(other))
    nulls = write_parquet(tmp_path / "nulls.parquet", [{"prompt": "a", "answer": "b"}, {"prompt": None, "answer": "b"}])
    with pytest.raises(ConfigError, match=r"row 2: column prompt must be a text"):
        load_examples(file_config(nulls))
    empty = tmp_path / "empty.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string"), "answer": []}), empty)
    with pytest.raises(ConfigError, match=r"has no rows"):
        load_examples(file_config(empty))


def test_numbers_are_taken_as_text(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": "a", "answer": 3}, {"prompt": "b", "answer": 0.5}, {"prompt": "c", "answer": "d"}]
    sets = load_examples(file_config(write_jsonl(tmp_path / "rows.jsonl", rows), num_held_out=1))
    assert [e.answer for e in sets.train] == ["3", "0.5"]


def test_a_template_fills_in_fields_and_keeps_doubled_braces() -> None:
    assert Template("{{{prompt}}} at {level}").render({"prompt": "x", "level": 2}, where="line 1") == "{x} at 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"data\.template \('\{'\): .*Double a brace"),
        ("hello", r"names no field, so every prompt would be the same"),
        ("{prompt.__class__}", r"\{prompt\.__class__\} is not a field name"),
        ("{}", r"\{\} is not a field name"),
    ],
)
def test_a_bad_template_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Template(text)


def test_a_template_with_an_unknown_field_lists_the_fields() -> None:
    with pytest.raises(ConfigError, match=r"line 1 has no field words\. It has: prompt, word"):
        Template("{words}").render({"prompt": "x", "word": "y"}, where="line 1")
