"""The model a run starts from: whatever `model.path` names becomes a folder with weights, config and tokenizer.

`base` is made offline from the run's own training examples, never from held-out ones (warm_up.py). A GGUF file is
converted once. Both are kept in the cache under a hash of everything that matters to them, and appear there by one
rename, so that a killed run leaves no half model. Never imports vllm; torch and transformers only when a model has to
be made.

Waits: `prepare_model` for another run that makes the same model (its process ends the wait, dead or done;
_LOCK_TIMEOUT_S), and for the hub (huggingface_hub's own time limits).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any, Literal

from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceededError
from streamrl.examples import load_examples
from streamrl.warm_up import Progress, base_model_key, make_base_model

_LOCK_TIMEOUT_S = 900.0
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
    key = base_model_key(config, examples)
    return _cached(config, "base", key, lambda out: _save(*make_base_model(config, examples, report), out))


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer in a folder that `prepare_model` gave.

    For one that is nothing but its tokenizer.json, as the base model's is, without the 4 seconds in which AutoTokenizer
    imports torch.
    """
    file = pathlib.Path(model_path) / "tokenizer_config.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") == "TokenizersBackend":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


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


def _save(model: Any, tokenizer: Any, out: pathlib.Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would break the caller's
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


# -- models of others --


def _convert_gguf(config: Config, path: pathlib.Path, out: pathlib.Path, report: Progress) -> None:
    """Dequantise a GGUF file into the Hugging Face layout, its chat template included."""
    try:
        import gguf  # noqa: F401 - transformers needs it, and its own message does not say for what
    except ImportError:
        raise ConfigError(f"model.path ({path}): reading GGUF needs the package gguf. Run: pip install gguf.") from None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    what = "conversion of the GGUF file"
    try:
        report(what, 0, 3)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        settings = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        report(what, 1, 3)
        # Not from_pretrained: it would keep the weights quantised, which the learner cannot train.
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar would break the caller's
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        unfilled = set(model.state_dict()) - set(tensors) - set(model.all_tied_weights_keys)
        if unfilled:
            raise ValueError(f"it has no weights for {', '.join(sorted(unfilled)[:3])}")
        model.load_state_dict(tensors, strict=False)
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"model.path ({path}): transformers cannot read this GGUF file: {error}.") from None
    report(what, 2, 3)
    _save(model.to(getattr(torch, config.model.dtype)), tokenizer, out)
    report(what, 3, 3)


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
