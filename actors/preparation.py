"""What a run needs before its first process: the model in a folder, and proof that its prompts can be tokenized.

Starts nothing and writes nothing but the cache of models, so that whatever is refused here leaves nothing behind.
Waits: as `prepare_model`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.live_view import show_progress
from actors.prompts import DataCounts, load_prompts
from streamrl.base_model import load_tokenizer, prepare_model
from streamrl.config import Config
from streamrl.records import Prompt


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Example: Preparation(model_path="/root/.cache/streamrl/base-1bb2", model_s=0.2, eval_prompts=[...], data=...)."""

    model_path: str
    model_s: float  # seconds to make or find the model
    eval_prompts: list[Prompt]
    data: DataCounts


def prepare(config: Config) -> Preparation:
    """Make or find the model, tokenize the prompts.

    Raises:
        ConfigError: the model or the data cannot be had, or the prompts do not fit.
        DeadlineExceededError: another process makes the same model for too long.
    """
    begun = time.monotonic()
    with show_progress() as progress:
        model_path = prepare_model(config, progress=progress)
    model_s = time.monotonic() - begun
    eval_prompts, data = load_prompts(config, load_tokenizer(model_path))
    return Preparation(model_path=model_path, model_s=model_s, eval_prompts=eval_prompts, data=data)
