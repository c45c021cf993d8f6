"""Test what is predicted for weights and moments in few bits against bitsandbytes itself, on the CPU."""

import dataclasses

import pytest
import torch
from tiny import tiny_workload

from autotune.core.workload import QuantizeName, Workload
from autotune.worker.fake.semantics import FewBitsOptimizer, quantize_fake
from autotune.worker.trial.build import build_model

pytest.importorskip("peft", reason="peft is not installed: pip install 'traintune[peft]'")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

# A layer of it has several blocks of scales.
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}


def workload(name: str, bits: QuantizeName, **changes: object) -> Workload:
    sizes = SIZES if name == "llama-tiny" else {}
    made = tiny_workload(name, config=sizes, dtype="bfloat16")
    return dataclasses.replace(made, **{"peft": "lora", "lora_rank": 4, "quantize": bits, **changes})


def stored_bytes(model: torch.nn.Module) -> int:
    """What the tensors of a model take, with the scales that bitsandbytes keeps beside its weights."""
    found = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        scales = [parameter.SCB] if hasattr(parameter, "SCB") else []
        scales += [state.absmax, state.state2.absmax] if state is not None else []
        found |= {scale.data_ptr(): scale.nbytes for scale in scales if scale is not None}
    return sum(found.values())


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "t5-tiny", "bert-tiny"])
def test_stored_weights_take_what_bitsandbytes_takes(name: str, bits: QuantizeName) -> None:
    asked = workload(name, bits)
    real = build_model(asked, "eager", torch.device("cpu"))
    fake = build_model(asked, "eager", torch.device("meta"))
    quantize_fake(fake, asked)
    tensors = {id(tensor): tensor.nbytes for tensor in (*fake.parameters(), *fake.buffers())}
    assert sum(tensors.values()) == stored_bytes(real)
    trained = [[p.shape for p in model.parameters() if p.requires_grad] for model in (real, fake)]
    assert trained[0] == trained[1]


def test_layers_that_get_no_adapter_are_quantized_too() -> None:
    asked = workload("llama-tiny", "4bit", lora_options={"target_modules": ["q_proj"]})
    fake = build_model(asked, "eager", torch.device("meta"))
    quantize_fake(fake, asked)
    kinds = {type(module).__name__ for name, module in fake.named_modules() if name.endswith(("base_layer", "up_proj"))}
    assert kinds == {"_FourBits"}


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_gradients_flow_to_every_adapter(bits: QuantizeName) -> None:
    asked = workload("llama-tiny", bits)
    model = build_model(asked, "eager", torch.device("meta"))
    quantize_fake(model, asked)
    tokens = torch.zeros((2, 16), dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_moments_take_what_bitsandbytes_takes(name: str) -> None:
    from bitsandbytes.optim import AdamW8bit, Lion8bit, PagedAdamW32bit

    kind = {"adamw_bnb_8bit": AdamW8bit, "paged_adamw_32bit": PagedAdamW32bit, "lion_8bit": Lion8bit}[name]
    layers = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 8))
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    real, fake = kind(layers.parameters()), FewBitsOptimizer(layers, name)

    def held(optimizer: torch.optim.Optimizer) -> int:
        # Tables of codes are the same for all parameters.
        values = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
        return sum(value.nbytes for key, value in values if torch.is_tensor(value) and "qmap" not in str(key))

    fake.step()
    real.step()
    # On a CPU there is no managed memory; the parameters are small enough to be on the GPU, too.
    assert held(fake) == held(real)
