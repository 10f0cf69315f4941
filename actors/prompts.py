"""Which prompt next: the training prompts in an order fixed by seed, resumable, and the held-out prompts.

Invariants: `uid` is "<epoch>-<position>" and never repeats in a run; the order depends only on the config and the seed,
each epoch shuffled anew; a source restored by `load_state_dict` continues exactly where the saved one stood; no
held-out prompt text occurs in training. Nothing here waits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.examples import Example, load_examples
from streamrl.records import IntArray, Prompt


class Tokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    chat_template: Any

    def __call__(self, text: list[str], **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class PromptSource:
    """Training prompts, epoch after epoch. Not thread-safe: one owner, the buffer server."""

    def __init__(
        self,
        examples: Sequence[Example],
        prompt_ids: Sequence[IntArray],
        *,
        seed: int,
        epochs: int = 0,
        shuffle: bool = True,
        num_skipped: int = 0,
    ) -> None:
        """`prompt_ids[i]` [P] are the tokens of `examples[i]`; `epochs` 0 never ends."""
        assert len(examples) == len(prompt_ids) and examples
        self._examples = examples
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._epochs = epochs
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self.num_skipped = num_skipped
        """Prompts left out because they are longer than data.max_prompt_tokens."""

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._examples)

    @property
    def exhausted(self) -> bool:
        """Whether the last epoch is over: `next` gives None from now on."""
        return self._epochs > 0 and self._epoch >= self._epochs

    def next(self) -> Prompt | None:
        """The next prompt instance, or None at the end of the last epoch."""
        if self.exhausted:
            return None
        index = int(self._order[self._position])
        prompt = Prompt(
            uid=f"{self._epoch}-{self._position:06d}",
            index=index,
            prompt_ids=self._prompt_ids[index],
            task=self._examples[index].task,
        )
        self._position += 1
        if self._position == len(self):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        return prompt

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands; plain data."""
        return {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: the data or its order is not that of the saved source, so positions mean other prompts.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                "data: not the prompts that the checkpoint was made with, so it cannot continue where that run stood. "
                "Restore run.seed, the data settings and the files of the saved run, or start a new run."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int64)
        return np.random.default_rng((self._seed, epoch)).permutation(len(self))

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._seed}/{self._shuffle}/{len(self)}".encode())
        for example in self._examples:
            digest.update(example.text.encode() + b"\0")
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """How many examples a run has, and how many were left out and why.

    Example: DataCounts(train=7115, held_out=128, duplicates=859, leaked=26, long_train=0, long_held_out=0).
    """

    train: int
    held_out: int
    duplicates: int  # training rows whose text an earlier row has
    leaked: int  # training rows whose text is that of a held-out row
    long_train: int  # longer than data.max_prompt_tokens
    long_held_out: int

    def __str__(self) -> str:
        """`7,115 training prompts, 128 held out; left out: 859 duplicates, 26 equal to a held-out one`."""
        reasons = (
            (self.duplicates, "duplicates"),
            (self.leaked, "equal to a held-out one"),
            (self.long_train, "longer than data.max_prompt_tokens"),
            (self.long_held_out, "held-out ones longer than data.max_prompt_tokens"),
        )
        left_out = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
        text = f"{self.train:,} training prompts, {self.held_out:,} held out"
        return f"{text}; left out: {left_out}" if left_out else text


def make_prompt_source(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The training prompts of the run, tokenized.

    Raises:
        ConfigError: bad data; no prompt within data.max_prompt_tokens; a longer one with data.long_prompts=refuse.
    """
    examples, ids, num_skipped = _within_length(config, load_examples(config).train, tokenizer, kind="training")
    return PromptSource(
        examples,
        ids,
        seed=config.run.seed,
        epochs=config.data.epochs,
        shuffle=config.data.shuffle,
        num_skipped=num_skipped,
    )


def load_prompts(config: Config, tokenizer: Tokenizer) -> tuple[list[Prompt], DataCounts]:
    """The held-out prompts in a fixed order, uid "eval-<position>", and the counts of all of the run's data.

    There are no held-out prompts when eval.num_prompts is 0.

    Raises:
        ConfigError: as `make_prompt_source`, for the training prompts too.
    """
    sets = load_examples(config)
    train, _, long_train = _within_length(config, sets.train, tokenizer, kind="training")
    examples, ids, long_held_out = _within_length(config, sets.held_out, tokenizer, kind="held-out")
    prompts = [
        Prompt(uid=f"eval-{index:06d}", index=index, prompt_ids=ids[index], task=example.task)
        for index, example in enumerate(examples)
    ]
    return prompts, DataCounts(
        train=len(train),
        held_out=len(prompts),
        duplicates=sets.num_duplicates,
        leaked=sets.num_leaked,
        long_train=long_train,
        long_held_out=long_held_out,
    )


def _within_length(
    config: Config, examples: Sequence[Example], tokenizer: Tokenizer, *, kind: str
) -> tuple[list[Example], list[IntArray], int]:
    if not examples:
        return [], [], 0
    ids = _tokenize(config, [e.text for e in examples], tokenizer)
    kept = within_length(config, examples, [len(tokens) for tokens in ids], kind=kind)
    return [examples[i] for i in kept], [ids[i] for i in kept], len(examples) - len(kept)


def within_length(config: Config, examples: Sequence[Example], lengths: Sequence[int], *, kind: str) -> list[int]:
    """Positions of the examples whose length in tokens is between 1 and data.max_prompt_tokens.

    Raises:
        ConfigError: there is none, or a longer one with data.long_prompts=refuse.
    """
    limit = config.data.max_prompt_tokens
    kept = [i for i, length in enumerate(lengths) if 0 < length <= limit]
    if examples and (not kept or (config.data.long_prompts == "refuse" and len(kept) < len(examples))):
        longest = max(range(len(lengths)), key=lambda i: lengths[i])
        raise ConfigError(
            f"data.max_prompt_tokens ({limit}): {len(examples) - len(kept)} of {len(examples)} {kind} prompts are "
            f"longer; the longest has {lengths[longest]} tokens and begins {examples[longest].text[:60]!r}. "
            f"Set data.max_prompt_tokens>={lengths[longest]} and model.max_length to match, or "
            "data.long_prompts=skip if enough prompts are shorter."
        )
    return kept


def _tokenize(config: Config, texts: list[str], tokenizer: Tokenizer) -> list[IntArray]:
    if config.data.chat:
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.chat (True): the tokenizer of model.path has no chat template. Set data.chat=false."
            )
        conversations = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not config.data.chat)["input_ids"]
    return [np.asarray(tokens, dtype=np.int32) for tokens in encoded]
