"""The model a run starts from: whatever `model.path` names becomes a folder with weights, config and tokenizer.

`base` is made here, offline: a small Llama with a character tokenizer, warm-started by supervised learning on the run's
own training examples (never on held-out ones). A GGUF file is converted once. Both are kept in the cache under a hash
of everything that matters to them, and appear there by one rename, so that a killed run leaves no half model.
Deterministic by `run.seed` for one machine and thread count. Never imports vllm; torch and transformers only when a
model has to be made.

Waits: `prepare_model` for another run that makes the same model (its process ends the wait, dead or done;
_LOCK_TIMEOUT_S), and for the hub (huggingface_hub's own time limits).
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceededError
from streamrl.examples import Example, load_examples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: called often while a model is made."""

_FORMAT = 1  # raise it when the same settings must give another model
_LOCK_TIMEOUT_S = 900.0
_MAX_POSITIONS = 4096  # rotary positions cost nothing, so the cached model serves any model.max_length up to here
_ASCII = [chr(code) for code in range(32, 127)]
_PAD, _BOS, _EOS, _UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def model_kind(config: Config) -> Literal["base", "folder", "gguf", "hub"]:
    """What `model.path` names, checked as far as that is possible without reading weights or using the network.

    Raises:
        ConfigError: nothing usable is there.
    """
    name = config.model.path
    if name == "base":
        return "base"
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        found = {file.name for file in path.iterdir()}
        has_weights = any(file.endswith(".safetensors") for file in found)
        has_tokenizer = found & {"tokenizer.json", "tokenizer.model", "vocab.json"}
        if "config.json" in found and has_weights and has_tokenizer:
            return "folder"
        raise ConfigError(
            f"model.path ({name}): is a folder without a model; it needs config.json, *.safetensors and "
            "tokenizer.json. Name a folder that save_pretrained wrote for both model and tokenizer."
        )
    if path.is_file() and path.suffix == ".gguf":
        return "gguf"
    if path.exists():
        raise ConfigError(f"model.path ({name}): is neither a folder nor a .gguf file. Name one, a hub name, or base.")
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model.path ({name}): no such file or folder. Name one that exists, a hub name, or base.")
    return "hub"


def prepare_model(config: Config, *, progress: Progress | None = None) -> str:
    """A folder with the Hugging Face weights, config and tokenizer of `model.path`, made or fetched if need be.

    Raises:
        ConfigError: the model cannot be had; the message says why.
        DeadlineExceededError: another process holds the cache entry for too long.
    """
    kind = model_kind(config)
    report = progress or (lambda what, done, total: None)
    if kind == "hub":
        return _fetch(config.model.path)
    path = pathlib.Path(config.model.path).expanduser()
    if kind == "folder":
        return str(path.resolve())
    if kind == "gguf":
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()
        return _cached(config, f"gguf-{config.model.dtype}", key, lambda out: _convert_gguf(config, path, out, report))
    examples = [e for e in load_examples(config).train if e.answer is not None]
    if not examples:
        raise ConfigError(
            f"model.path (base): data.task={config.data.task} gives no answers to learn from. Name a model."
        )
    return _cached(config, "base", _base_key(config, examples), lambda out: _make_base(config, examples, out, report))


# -- cache --


def _cached(config: Config, kind: str, key: str, make: Callable[[pathlib.Path], None]) -> str:
    import filelock

    root = pathlib.Path(config.model.cache_dir or "~/.cache/streamrl").expanduser().resolve()
    final = root / f"{kind}-{key[:16]}"
    if final.is_dir():
        return str(final)
    part = root / f"{final.name}.part"  # ours alone under the lock: whatever is there, a killed process left
    lock = filelock.FileLock(root / f"{final.name}.lock")  # the kernel releases it when its holder dies
    try:
        root.mkdir(parents=True, exist_ok=True)
        held = lock.acquire(timeout=_LOCK_TIMEOUT_S)
    except filelock.Timeout:
        raise DeadlineExceededError(
            f"waited {_LOCK_TIMEOUT_S:.0f} s for another process that makes {final}; it holds {lock.lock_file}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"model.cache_dir ({root}): cannot be written: {error}. Set model.cache_dir=FOLDER."
        ) from None
    with held:
        if not final.is_dir():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            os.rename(part, final)
    return str(final)


def _base_key(config: Config, examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    digest.update(msgspec.json.encode([_FORMAT, config.run.seed, config.model.warm_up, _max_positions(config)]))
    for example in examples:
        digest.update(msgspec.json.encode([example.text, example.answer]))
    return digest.hexdigest()


def _max_positions(config: Config) -> int:
    return max(config.model.max_length, _MAX_POSITIONS)


# -- the base model --


def _make_base(config: Config, examples: Sequence[Example], out: pathlib.Path, report: Progress) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    characters = sorted({*_ASCII, *"".join(f"{e.text}{e.answer}" for e in examples)})
    tokenizer = make_character_tokenizer(characters)
    warm_up = config.model.warm_up
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=warm_up.hidden_size,
                intermediate_size=4 * warm_up.hidden_size,
                num_hidden_layers=warm_up.num_layers,
                num_attention_heads=warm_up.num_heads,
                max_position_embeddings=_max_positions(config),
                tie_word_embeddings=False,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        _warm_up(config, model, tokenizer, examples, report)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_character_tokenizer(characters: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a character, `<bos>` in front of a text, `<unk>` for what is not in `characters`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([_PAD, _BOS, _EOS, _UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _warm_up(
    config: Config, model: Any, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], report: Progress
) -> None:
    """Supervised learning of answer and end of sequence given the prompt; the learning rate rises, then falls to 0."""
    import torch

    warm_up = config.model.warm_up
    prompts = tokenizer([e.text for e in examples])["input_ids"]
    answers = tokenizer([e.answer for e in examples], add_special_tokens=False)["input_ids"]
    pairs = [
        (prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt) + len(answer) < config.model.max_length
    ]
    if not pairs:
        raise ConfigError(
            f"model.max_length ({config.model.max_length}): no training example with its answer fits. Set it higher."
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.lr, betas=(0.9, 0.95), weight_decay=0.01)
    ramp = max(warm_up.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / ramp, (warm_up.steps - step) / max(warm_up.steps - ramp, 1))
    )
    generator = torch.Generator().manual_seed(config.run.seed)
    model.train()
    for step in range(warm_up.steps):
        report("warm-up of the base model", step, warm_up.steps)
        chosen = torch.randint(len(pairs), (warm_up.batch_size,), generator=generator).tolist()
        wrong = (torch.rand(warm_up.batch_size, generator=generator) < warm_up.wrong_share).tolist()
        batch = [
            (prompt, [*(reversed(answer) if turn else answer), tokenizer.eos_token_id])
            for (prompt, answer), turn in zip((pairs[i] for i in chosen), wrong, strict=True)
        ]
        input_ids, labels = _pad(batch, tokenizer.pad_token_id)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    report("warm-up of the base model", warm_up.steps, warm_up.steps)


def _pad(pairs: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids [N, T] and labels [N, T], -100 outside the answers.

    Padded on the right, where causal attention of a real token never looks, so no attention mask is needed.
    """
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    input_ids = torch.full((len(pairs), width), pad)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


# -- models of others --


def _convert_gguf(config: Config, path: pathlib.Path, out: pathlib.Path, report: Progress) -> None:
    """Dequantise a GGUF file into the Hugging Face layout, its chat template included."""
    try:
        import gguf  # noqa: F401 - transformers needs it, and its own message does not say for what
    except ImportError:
        raise ConfigError(f"model.path ({path}): reading GGUF needs the package gguf. Run: pip install gguf.") from None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    report("conversion of the GGUF file", 0, 3)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        report("conversion of the GGUF file", 1, 3)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"model.path ({path}): transformers cannot read this GGUF file: {error}.") from None
    report("conversion of the GGUF file", 2, 3)
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    dense.load_state_dict(model.state_dict())
    dense.to(getattr(torch, config.model.dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    report("conversion of the GGUF file", 3, 3)


def _fetch(name: str) -> str:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, httpx.HTTPError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path ({name}): no folder of that name, and the Hugging Face hub did not give it: {reason} Name a "
            "folder or a .gguf file, or use model.path=base, which needs no network."
        ) from None
