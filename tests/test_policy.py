"""The policy against plain transformers, one sequence at a time without packing."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from test_packing import rollout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import streamrl.policy
from streamrl.errors import ConfigError
from streamrl.packing import MicroBatch, filler_micro_batch, pack_prompts, pack_rollouts
from streamrl.policy import Policy

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-grouped": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=6)),
}
LENGTHS = [(1, 1), (3, 7), (5, 2), (2, 11), (1, 4), (6, 1)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def save(model: torch.nn.Module, folder: pathlib.Path) -> pathlib.Path:
    for parameter in model.parameters():  # as initialised, all log-probs are nearly equal
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.manual_seed(0)
    return save(ARCHITECTURES["llama-tied"](), tmp_path / "model")


def batch_of(lengths: list[tuple[int, int]] = LENGTHS) -> MicroBatch:
    numbers = np.random.default_rng(1)
    rollouts = [rollout(numbers.integers(0, 29, p).tolist(), numbers.integers(0, 29, r).tolist()) for p, r in lengths]
    (batch,) = pack_rollouts(rollouts, torch.zeros(len(lengths)), max_tokens=1000)
    return batch


def plain_log_probs(
    folder: pathlib.Path, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Each sequence alone through the untouched model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    log_probs, entropies, start = [], [], 0
    for length in batch.lengths:
        ids = batch.tokens["input_ids"][start : start + length]
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
        all_log_probs = logits.double().log_softmax(-1)
        log_probs += [torch.zeros(1).double(), all_log_probs.gather(1, ids[1:, None])[:, 0]]
        entropies += [torch.zeros(1).double(), torch.distributions.Categorical(logits=logits.double()).entropy()]
        start += length
    mask = batch.tokens["response_mask"]
    return torch.cat(log_probs) * mask, torch.cat(entropies) * mask, model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_packed_log_probs_equal_those_of_each_sequence_alone(
    architecture: str, temperature: float, mesh: DeviceMesh, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    folder = save(ARCHITECTURES[architecture](), tmp_path / "model")
    batch = batch_of()
    log_probs, entropy = Policy(folder, mesh=mesh, temperature=temperature).token_log_probs(batch)
    expected, expected_entropy, _ = plain_log_probs(folder, batch, temperature)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(log_probs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-5)
    assert not entropy.requires_grad


def test_gradients_equal_those_of_each_sequence_alone(mesh: DeviceMesh, folder: pathlib.Path) -> None:
    batch = batch_of()
    policy = Policy(folder, mesh=mesh, temperature=0.7)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
    log_probs, entropy = policy.token_log_probs(batch, entropy_grad=True)
    ((log_probs + 0.3 * entropy) * weights).sum().backward()
    expected, expected_entropy, model = plain_log_probs(folder, batch, 0.7)
    ((expected + 0.3 * expected_entropy) * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    reference = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient.full_tensor(), reference[name], atol=1e-4, rtol=1e-4), name


def test_chunks_of_the_head_change_nothing(
    mesh: DeviceMesh, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of()
    policy = Policy(folder, mesh=mesh, temperature=0.7)
    results = []
    for max_logits in (1 << 24, 5 * 29):
        monkeypatch.setattr(streamrl.policy, "MAX_LOGITS", max_logits)
        log_probs, entropy = policy.token_log_probs(batch, entropy_grad=True)
        (log_probs.sum() + entropy.sum()).backward()
        results.append([log_probs.detach(), entropy.detach(), *(p.grad.full_tensor() for p in policy.parameters())])
        for parameter in policy.parameters():
            parameter.grad = None
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


def gradients_of(policy: Policy, batch: MicroBatch) -> list[torch.Tensor]:
    """Log-probs, entropy and all gradients."""
    log_probs, entropy = policy.token_log_probs(batch, entropy_grad=True)
    weights = torch.linspace(-1, 1, batch.num_tokens)
    ((log_probs + 0.3 * entropy) * weights).sum().backward()
    results = [log_probs.detach(), entropy.detach(), *(p.grad.full_tensor() for p in policy.parameters())]
    for parameter in policy.parameters():
        parameter.grad = None
    return results


@contextlib.contextmanager
def kept_for_backward() -> Iterator[list[int]]:
    """Numbers in the tensors that autograd keeps, outside of what it will compute again."""
    kept = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def test_activation_checkpointing_keeps_less_and_changes_nothing(mesh: DeviceMesh, folder: pathlib.Path) -> None:
    batch, results, kept = batch_of(), [], []
    for activation_checkpointing in (False, True):
        policy = Policy(folder, mesh=mesh, temperature=0.7, activation_checkpointing=activation_checkpointing)
        assert [name for name, _ in policy.named_parameters()][0] == "model.embed_tokens.weight"  # as published
        with kept_for_backward() as numbers:
            policy.token_log_probs(batch)
        kept.append(numbers[0])
        results.append(gradients_of(policy, batch))
    assert kept[1] < 0.5 * kept[0]
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_change_nothing_for_any_number_of_tokens(
    mesh: DeviceMesh, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # an engine of an earlier test has set it
    plain = Policy(folder, mesh=mesh, temperature=0.7)
    compiled = Policy(folder, mesh=mesh, temperature=0.7, compile=True, activation_checkpointing=True)
    torch._dynamo.utils.counters.clear()
    for lengths in (LENGTHS, LENGTHS[1:4], [(2, 9)]):
        batch = batch_of(lengths)
        for ours, theirs in zip(gradients_of(compiled, batch), gradients_of(plain, batch), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled


def test_logits_are_never_held_for_all_tokens(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    """4,096 tokens of a vocabulary of 49,152: all logits would be 805 MB, and with their softmax and gradient several
    times that."""
    tokens, vocabulary = 4096, 49152
    shape = {**SHAPE, "vocab_size": vocabulary, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    policy = Policy(tmp_path / "model", mesh=mesh, temperature=1.0)
    batch = pack_prompts([[7] * 32] * (tokens // 32))

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    process = psutil.Process()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the high-water mark of the resident set
    before = process.memory_info().rss
    with Watch():
        policy.token_log_probs(batch)[0].sum().backward()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(encoding="ascii"))
    assert vocabulary * 100 < largest <= streamrl.policy.MAX_LOGITS < tokens * vocabulary
    used = int(peak) * 1024 - before
    print(f"peak {used / 1e6:.0f} MB above the {before / 1e6:.0f} MB before")
    assert used < 0.6 * tokens * vocabulary * 4


def test_the_order_and_company_of_a_sequence_do_not_matter(mesh: DeviceMesh, folder: pathlib.Path) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    sequences = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    together = policy.probe_log_probs(sequences)
    alone = [value for sequence in sequences for value in policy.probe_log_probs([sequence])]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(together) == sum(len(s) - 1 for s in sequences)


def test_the_probe_is_at_temperature_one(mesh: DeviceMesh, folder: pathlib.Path) -> None:
    sequences = [[3, 1, 4], [1, 5, 9, 2]]
    by_temperature = [Policy(folder, mesh=mesh, temperature=t).probe_log_probs(sequences) for t in (0.5, 1.0)]
    assert by_temperature[0] == by_temperature[1]


def test_a_filler_gives_every_parameter_a_gradient_of_zero(mesh: DeviceMesh, folder: pathlib.Path) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    log_probs, _ = policy.token_log_probs(filler_micro_batch())
    log_probs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.full_tensor().any(), name


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_log_probs(
    mesh: DeviceMesh, folder: pathlib.Path
) -> None:
    batch = batch_of()
    policy = Policy(folder, mesh=mesh, temperature=1.0, dtype="bfloat16")
    log_probs, _ = policy.token_log_probs(batch)
    log_probs.sum().backward()
    exact, _, _ = plain_log_probs(folder, batch, 1.0)
    assert log_probs.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
    difference = (log_probs.double() - exact).abs().max()
    assert 1e-4 < difference < 1.0  # really bfloat16, and not far off


def test_saved_weights_and_saved_state_come_back(
    mesh: DeviceMesh, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    probe = [[1, 2, 3, 4]]
    before = policy.probe_log_probs(probe)
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy.token_log_probs(batch_of())[0].sum().backward()
    optimizer.step()
    after = policy.probe_log_probs(probe)
    assert after != before
    policy.save_pretrained(tmp_path / "exported", is_main=True)
    assert Policy(tmp_path / "exported", mesh=mesh, temperature=1.0).probe_log_probs(probe) == pytest.approx(after)
    policy.load_state_dict(state)
    assert policy.probe_log_probs(probe) == pytest.approx(before)


def test_clipping_scales_gradients_to_the_norm_and_returns_the_norm_before(
    mesh: DeviceMesh, folder: pathlib.Path
) -> None:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    policy.token_log_probs(batch_of())[0].sum().backward()
    norm = policy.clip_grad_norm(0.5)
    after = sum(float((p.grad.full_tensor() ** 2).sum()) for p in policy.parameters()) ** 0.5
    assert norm > 0.5 and after == pytest.approx(0.5, rel=1e-4)


def test_a_model_that_changes_its_logits_after_the_head_is_refused(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=6, final_logit_softcapping=0.5))
    with pytest.raises(ConfigError, match="soft-capping"):
        Policy(save(model, tmp_path / "model"), mesh=mesh, temperature=1.0)


def test_a_sequence_beyond_a_sliding_window_is_refused(mesh: DeviceMesh, tmp_path: pathlib.Path) -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6))
    policy = Policy(save(model, tmp_path / "model"), mesh=mesh, temperature=1.0)
    assert len(policy.probe_log_probs([[1, 2, 3, 4, 5, 6]])) == 5
    with pytest.raises(ConfigError, match="model.max_length<=6"):
        policy.probe_log_probs([[1, 2, 3, 4, 5, 6, 7]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
@pytest.mark.parametrize("architecture", ["gpu-llama-tied", "gpu-qwen3-grouped"])
def test_a_gpu_gives_the_log_probs_and_gradients_of_the_cpu(
    architecture: str, dtype: str, tolerance: float, mesh: DeviceMesh, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 64, "head_dim": 16}  # flash attention takes head sizes in multiples of 8
    model = {
        "gpu-llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)),
        "gpu-qwen3-grouped": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=2)),
    }[architecture]()
    model.save_pretrained(tmp_path / "model")
    batch = batch_of()
    results = []
    for device_mesh, kind in ((mesh, "float32"), (init_device_mesh("cuda", (1,)), dtype)):
        policy = Policy(tmp_path / "model", mesh=device_mesh, temperature=0.7, dtype=kind)
        log_probs, _ = policy.token_log_probs(batch)
        log_probs.sum().backward()
        norm = policy.clip_grad_norm(1.0)
        gradients = [p.grad.full_tensor().cpu() for p in policy.parameters()]
        results.append((log_probs.detach().cpu(), norm, gradients))
    (expected, expected_norm, expected_gradients), (log_probs, norm, gradients) = results
    assert torch.allclose(log_probs, expected, atol=tolerance)
    assert norm == pytest.approx(expected_norm, rel=tolerance)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm()) + 1e-4
