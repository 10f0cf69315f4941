"""The model a run starts from: made, converted, found, or refused."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import filelock
import huggingface_hub
import msgspec
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

import streamrl.base_model
import streamrl.warm_up
from streamrl.base_model import load_tokenizer, model_kind, prepare_model
from streamrl.config import Config, config_from_tree
from streamrl.errors import ConfigError, DeadlineExceededError
from streamrl.warm_up import make_character_tokenizer

PAIRS = [("sun=", "nus"), ("dog=", "god"), ("abc=", "cba"), ("xyz=", "zyx"), ("held=", "dleh")]


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in PAIRS))
    return path


def base_config(rows: pathlib.Path, *, seed: int = 0, cache: str = "cache", **warm_up: Any) -> Config:
    settings = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "steps": 3, "batch_size": 4, **warm_up}
    return config_from_tree(
        {
            "run": {"seed": seed},
            "model": {"cache_dir": str(rows.parent / cache), "warm_up": settings},
            "data": {"source": "jsonl", "path": str(rows)},
            "reward": {"kind": "exact_match"},
            "eval": {"num_prompts": 1},
        }
    )


def greedy(folder: str, text: str) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert generated[0, -1] == tokenizer.eos_token_id
    return str(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_made_model_loads_and_is_made_once(rows: pathlib.Path) -> None:
    calls: list[tuple[str, int, int]] = []
    folder = prepare_model(base_config(rows), progress=lambda *call: calls.append(call))
    assert calls[0] == ("warm-up of the base model", 0, 3) and calls[-1] == ("warm-up of the base model", 3, 3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 1)
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    calls.clear()
    assert prepare_model(base_config(rows), progress=lambda *call: calls.append(call)) == folder
    assert not calls


def test_the_warm_up_teaches_the_task(rows: pathlib.Path) -> None:
    folder = prepare_model(base_config(rows, steps=80, batch_size=8, lr=1e-2))
    assert [greedy(folder, prompt) for prompt, _ in PAIRS[:4]] == ["nus", "god", "cba", "zyx"]


def test_wrong_demonstrations_are_the_answers_back_to_front(rows: pathlib.Path) -> None:
    folder = prepare_model(base_config(rows, steps=80, batch_size=8, lr=1e-2, wrong_share=1.0))
    assert [greedy(folder, prompt) for prompt, _ in PAIRS[:4]] == ["sun", "dog", "abc", "xyz"]


def test_the_warm_up_never_sees_what_is_held_out(rows: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def remember(config: Config, model: Any, tokenizer: Any, examples: Any, report: Any) -> None:
        seen.extend(e.text for e in examples)

    monkeypatch.setattr(streamrl.warm_up, "_warm_up", remember)
    prepare_model(base_config(rows))
    assert seen == ["sun=", "dog=", "abc=", "xyz="]


def test_the_same_seed_makes_the_same_weights_and_leaves_the_callers_random_state_alone(rows: pathlib.Path) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    weights = [
        (pathlib.Path(prepare_model(base_config(rows, seed=s, cache=c))) / "model.safetensors").read_bytes()
        for s, c in ((1, "one"), (1, "two"), (2, "two"))
    ]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_everything_that_matters_makes_another_model(rows: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("god", "dog"))
    configs = [base_config(rows), base_config(rows, seed=1), base_config(rows, steps=4), base_config(other)]
    assert len({prepare_model(c) for c in configs}) == 4


def test_a_longer_context_uses_the_same_model(rows: pathlib.Path) -> None:
    config = base_config(rows)
    longer = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, max_length=512))
    assert prepare_model(longer) == prepare_model(config)


def test_a_killed_warm_up_leaves_no_half_model(rows: pathlib.Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    config = base_config(rows)
    with pytest.raises(KeyboardInterrupt):
        prepare_model(config, progress=interrupt)
    assert all(p.suffix in (".part", ".lock") for p in pathlib.Path(config.model.cache_dir).iterdir())
    folder = prepare_model(config)
    AutoModelForCausalLM.from_pretrained(folder)
    assert not list(pathlib.Path(config.model.cache_dir).glob("*.part"))


def test_a_wait_for_another_run_that_makes_the_model_has_an_end(
    rows: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = base_config(rows)
    folder = prepare_model(config)
    os.rename(folder, f"{folder}-away")
    monkeypatch.setattr(streamrl.base_model, "_LOCK_TIMEOUT_S", 0.2)
    with filelock.FileLock(f"{folder}.lock"), pytest.raises(DeadlineExceededError, match="another process that makes"):
        prepare_model(config)


def test_a_cache_that_cannot_be_written_is_refused(rows: pathlib.Path) -> None:
    (rows.parent / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model\.cache_dir \(.*\): cannot be written: .* Set model\.cache_dir"):
        prepare_model(base_config(rows, cache="file/cache"))


def test_examples_longer_than_the_model_are_refused(rows: pathlib.Path) -> None:
    tree = {
        "model": {"cache_dir": str(rows.parent), "max_length": 4},
        "data": {"source": "jsonl", "path": str(rows)},
        "reward": {"kind": "exact_match"},
        "eval": {"num_prompts": 1},
    }
    with pytest.raises(ConfigError, match=r"model\.max_length \(4\): no training example with its answer fits"):
        prepare_model(config_from_tree(tree))


def test_the_character_tokenizer_gives_every_text_back() -> None:
    tokenizer = make_character_tokenizer(["a", "b", " ", "\n", "é"])
    ids = tokenizer("a  b\né")["input_ids"]
    assert ids == [1, 4, 6, 6, 5, 7, 8]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a  b\né"
    assert tokenizer("az", add_special_tokens=False)["input_ids"] == [4, tokenizer.unk_token_id]


def test_the_tokenizer_of_a_made_model_is_there_without_torch(rows: pathlib.Path) -> None:
    folder = prepare_model(base_config(rows))
    program = (
        "import sys; from streamrl.base_model import load_tokenizer; "
        f"print(load_tokenizer({folder!r})('sun=')['input_ids'], 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"{AutoTokenizer.from_pretrained(folder)('sun=')['input_ids']} False"


def test_a_tokenizer_with_a_class_of_its_own_is_loaded_as_that(tmp_path: pathlib.Path) -> None:
    make_character_tokenizer(["a", "b"]).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}))
    assert type(load_tokenizer(str(tmp_path))) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_a_folder_is_taken_as_it_is(rows: pathlib.Path) -> None:
    folder = prepare_model(base_config(rows))
    assert prepare_model(config_from_tree({"model": {"path": folder}})) == folder


def test_what_model_path_names_is_told_apart(tmp_path: pathlib.Path, rows: pathlib.Path) -> None:
    folder = prepare_model(base_config(rows))
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    names = {
        "base": "base",
        folder: "folder",
        str(tmp_path / "file.gguf"): "gguf",
        "Qwen/Qwen3-0.6B": "hub",
        "gpt2": "hub",
    }
    assert {name: model_kind(config_from_tree({"model": {"path": name}})) for name in names} == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", r"model\.path \(\./missing\): no such file or folder"),
        ("/missing/model", r"no such file or folder"),
        ("missing.gguf", r"no such file or folder"),
        ("{tmp}", r"is a folder without a model; it needs config\.json"),
        ("{tmp}/rows.jsonl", r"is neither a folder nor a \.gguf file"),
    ],
)
def test_a_path_without_a_model_is_refused(name: str, message: str, rows: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=message):
        model_kind(config_from_tree({"model": {"path": name.format(tmp=rows.parent)}}))


def test_a_hub_that_cannot_be_reached_is_refused_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find the requested files.\nMore text.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ConfigError, match=r"model\.path \(some/model\): .*requested files\. Name a folder .*model\.path=base"
    ):
        prepare_model(config_from_tree({"model": {"path": "some/model"}}))


def test_a_hub_model_is_the_folder_that_the_hub_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kwargs: str(tmp_path / name))
    assert prepare_model(config_from_tree({"model": {"path": "some/model"}})) == str(tmp_path / "some/model")


def write_gguf(path: pathlib.Path) -> dict[str, np.ndarray[Any, Any]]:
    """A Llama of one layer with a byte-level tokenizer of four tokens and a chat template."""
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (6, 32),
        "output_norm.weight": (32,),
        "output.weight": (6, 32),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        **{f"blk.0.attn_{name}.weight": (32, 32) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    tensors = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "c"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_is_converted_once_with_its_chat_template(tmp_path: pathlib.Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    config = config_from_tree({"model": {"path": str(tmp_path / "tiny.gguf"), "cache_dir": str(tmp_path / "cache")}})
    calls: list[tuple[str, int, int]] = []
    folder = prepare_model(config, progress=lambda *call: calls.append(call))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, torch.from_numpy(tensors["blk.0.ffn_up.weight"]))
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "[ab]"
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [4, 5]
    num_calls = len(calls)
    assert prepare_model(config, progress=lambda *call: calls.append(call)) == folder
    assert len(calls) == num_calls


def test_a_file_that_is_not_gguf_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUFnot really" * 10)
    config = config_from_tree({"model": {"path": str(tmp_path / "bad.gguf"), "cache_dir": str(tmp_path / "cache")}})
    with pytest.raises(ConfigError, match=r"model\.path \(.*bad\.gguf\): transformers cannot read this GGUF file"):
        prepare_model(config)
