"""Random models small enough for any test, and what plain Transformers computes with them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")
EOS = 2


def make_tiny_llama(folder: pathlib.Path, *, tied: bool, seed: int = 0) -> pathlib.Path:
    """A Llama of `make_tiny_model`."""
    return make_tiny_model(folder, family="llama", tied=tied, seed=seed)


def make_tiny_model(folder: pathlib.Path, *, family: str, tied: bool, seed: int = 0) -> pathlib.Path:
    """Weights and a character tokenizer in `folder`; log-probs are far from uniform, so that an error shows.

    Attention is grouped. Qwen2 has biases besides, Qwen3 norms of queries and keys.
    """
    torch.manual_seed(seed)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Reference:
    """The learner's side of the truth: a Transformers model whose weights the tests change."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def step(self, seed: int, scale: float = 0.02) -> None:
        """Move every weight, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)

    @torch.no_grad()
    def log_probs(self, sequence: Sequence[int], *, temperature: float = 1.0) -> torch.Tensor:
        """Of every token but the first, [len - 1]."""
        ids = torch.tensor([list(sequence)])
        logits = self.model(ids).logits[0, :-1].float() / temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        return [value for sequence in sequences for value in self.log_probs(sequence).tolist()]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
        return ids[len(prompt) :]
