"""The base model made offline: a small Llama with a character tokenizer, taught the run's own task for a moment.

Supervised learning on training examples gives RL something to improve; `model.warm_up.wrong_share` of the
demonstrations are wrong, so that there is something to unlearn as well. Deterministic by `run.seed` on one kind of CPU,
whatever the number of its cores. Imports torch and transformers only when called. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.examples import Example

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: called often while a model is made."""

_FORMAT = 1  # raise it when the same settings must give another model
_MAX_POSITIONS = 4096  # rotary positions cost nothing, so one made model serves any model.max_length up to here
_ASCII = [chr(code) for code in range(32, 127)]
_PAD, _BOS, _EOS, _UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"


def base_model_key(config: Config, examples: Sequence[Example]) -> str:
    """A hash of everything that the made model depends on."""
    digest = hashlib.sha256()
    digest.update(msgspec.json.encode([_FORMAT, config.run.seed, config.model.warm_up, _max_positions(config)]))
    for example in examples:
        digest.update(msgspec.json.encode([example.text, example.answer]))
    return digest.hexdigest()


def make_base_model(
    config: Config, examples: Sequence[Example], report: Progress
) -> tuple[Any, PreTrainedTokenizerFast]:
    """The warmed-up Llama and its tokenizer, from examples that all have answers.

    Raises:
        ConfigError: no example fits into model.max_length.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_character_tokenizer(sorted({*_ASCII, *"".join(f"{e.text}{e.answer}" for e in examples)}))
    warm_up = config.model.warm_up
    with torch.random.fork_rng(), _one_thread():
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
    return model, tokenizer


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """So that the sums, and the weights, do not depend on the number of cores.

    It costs little: with tensors this small, two threads mostly wait for each other, and burn both cores at it.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _max_positions(config: Config) -> int:
    return max(config.model.max_length, _MAX_POSITIONS)


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
