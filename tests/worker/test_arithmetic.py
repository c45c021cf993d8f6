"""Test that the arithmetic of a step is counted as torch's own counter counts it, forward and backward."""

from typing import Any

import pytest
import torch
import transformers
from tiny import QUICK, tiny_workload
from torch.utils.flop_counter import FlopCounterMode

from autotune.core.candidate import Arm, Candidate
from autotune.worker.trial.meter import Arithmetic

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
EXPERTS = {**SIZES, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers that share weights": ("AlbertForSequenceClassification", {**SIZES, "embedding_size": 32}),
    "an encoder and a decoder": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "experts": ("Qwen2MoeForCausalLM", {**EXPERTS, "num_key_value_heads": 4, "num_experts_per_tok": 2}),
    "an output of all words": ("GPT2LMHeadModel", {"vocab_size": 5000, "n_embd": 64, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize(("name", "sizes"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("frozen", [False, True])
def test_it_is_what_torch_counts(name: str, sizes: dict[str, Any], frozen: bool) -> None:
    kind: Any = getattr(transformers, name)
    config = kind.config_class(**sizes, attn_implementation="eager")
    model = kind(config).train()
    if frozen:
        for parameter in list(model.parameters())[: len(list(model.parameters())) // 2]:
            parameter.requires_grad_(False)
    # torch counts no grouped products, as which experts are computed.
    as_usual = getattr(config, "_experts_implementation", None)
    tokens = torch.randint(3, 90, (2, 64))
    labels = torch.tensor([0, 1]) if "Classification" in name else tokens[:, :8] if "T5" in name else tokens
    given = {"input_ids": tokens, "labels": labels.contiguous()}
    if as_usual is not None:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**given).loss.backward()
    if as_usual is not None:
        model.set_experts_implementation(as_usual)
    with Arithmetic() as counted:
        model(**given)
    assert counted.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("heads", [2, 8])
def test_attention_with_fewer_keys_than_queries_is_counted(heads: int) -> None:
    """As each torch does: that of 2.11 refuses it."""
    query, key = (torch.empty((2, count, 16, 32), device="meta") for count in (8, heads))
    with Arithmetic() as counted:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    # Queries by keys and the result by values, each 2 × 32 operations of 16 × 16 pairs.
    assert counted.forward_flops == 2 * 8 * 16 * 16 * 2 * 2 * 32


def test_a_trial_counts_that_of_a_sample(trial_server: Any) -> None:
    """Weights of BERT's linear layers, times its tokens: the same at every batch, and with checkpointing."""
    workload = tiny_workload("bert-tiny", seq_len=32)
    outcomes = [
        trial_server.trial(workload, candidate, QUICK).completed.measurement
        for candidate in (Candidate(Arm(), 2, 2), Candidate(Arm(gradient_checkpointing=True), 4))
    ]
    forward, both = outcomes[0].sample_flops
    assert both == 3 * forward
    assert outcomes[1].sample_flops == outcomes[0].sample_flops
