"""Test the catalog: names, facts against real models, the workload of every entry; quantization of a config."""

import json
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import warm
from messages import check_refusals
from transformers import BitsAndBytesConfig

import autotune
from autotune.core.options import OPTIONS
from autotune.core.workload import Workload
from autotune.models import catalog
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task, max_seq_len
from autotune.tuning.options import build_workload

PACKAGE = Path(autotune.__file__).parent

PROMISED = (
    "bert-base-uncased", "bert-large-uncased", "bert-base-cased", "roberta-base", "roberta-large",
    "distilbert-base-uncased", "distilroberta-base", "albert-base-v2", "electra-base-discriminator",
    "xlm-roberta-base", "microsoft/deberta-v3-base", "microsoft/deberta-v3-large", "answerdotai/ModernBERT-base",
    "answerdotai/ModernBERT-large", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2",
    "EleutherAI/pythia-410m", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-0.6B", "google/gemma-2-2b", "google/gemma-3-1b-pt",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "t5-small", "t5-base", "t5-large", "google/flan-t5-base",
    "facebook/bart-base", "facebook/bart-large", "google/vit-base-patch16-224", "google/vit-large-patch16-224",
    "facebook/dinov2-base", "openai/whisper-tiny", "openai/whisper-small", "openai/whisper-medium",
)  # fmt: skip
FOR_TRYING_OUT = ("bert-tiny", "gpt2-tiny", "llama-tiny", "t5-tiny", "vit-tiny", "whisper-tiny-random",
                  "qwen2.5-vl-tiny", "smolvlm-tiny")  # fmt: skip

# Millions of parameters as their authors or their hub pages give them; the catalog counts the head
# of the inferred task too, which is under 1.5 % of any of these.
PUBLISHED_MILLIONS = {
    "bert-base-uncased": 110, "bert-large-uncased": 336, "bert-base-cased": 108, "bert-large-cased": 334,
    "bert-base-multilingual-cased": 178, "bert-tiny": 4.4, "roberta-base": 125, "roberta-large": 355,
    "distilroberta-base": 82, "xlm-roberta-base": 278, "xlm-roberta-large": 560, "distilbert-base-uncased": 67,
    "distilbert-base-cased": 66, "albert-base-v2": 11.7, "electra-small-discriminator": 13.5,
    "electra-base-discriminator": 109, "electra-large-discriminator": 335, "deberta-v3-small": 141,
    "deberta-v3-base": 184, "deberta-v3-large": 435, "ModernBERT-base": 149, "ModernBERT-large": 395,
    "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558, "distilgpt2": 82, "pythia-70m": 70.4,
    "pythia-160m": 162, "pythia-410m": 405, "pythia-1b": 1012, "pythia-1.4b": 1415, "Llama-3.2-1B": 1236,
    "Llama-3.2-3B": 3213, "Llama-3.1-8B": 8030, "TinyLlama-1.1B-Chat-v1.0": 1100, "SmolLM2-135M": 135,
    "SmolLM2-360M": 362, "Qwen2.5-0.5B": 494, "Qwen2.5-1.5B": 1544, "Qwen2.5-3B": 3086, "Qwen2.5-7B": 7616,
    "Qwen3-0.6B": 596, "Qwen3-1.7B": 1720, "Qwen3-4B": 4022, "gemma-2-2b": 2614, "gemma-3-1b-pt": 1000,
    "gemma-2-9b": 9242, "gemma-2-27b": 27227, "Qwen2.5-14B": 14770, "Qwen2.5-32B": 32764, "Qwen3-8B": 8191,
    "Qwen3-14B": 14768, "Qwen3-32B": 32762, "Qwen3-30B-A3B": 30532, "Mistral-7B-v0.3": 7248,
    "Mistral-Nemo-Base-2407": 12248, "Mistral-Small-24B-Base-2501": 23572, "Phi-3-mini-4k-instruct": 3821,
    "phi-4": 14660, "OLMo-2-1124-7B": 7299, "OLMoE-1B-7B-0924": 6919, "gpt-oss-20b": 20915, "gemma-3-270m": 268,
    # Without the 417 million of its vision part: arXiv 2503.19786, table 1.
    "gemma-3-4b-pt": 3884, "gemma-3-12b-pt": 11771, "gemma-3-27b-pt": 27016, "SmolLM3-3B": 3075,
    "Phi-4-mini-instruct": 3836, "Qwen3-4B-Instruct-2507": 4022, "Qwen3-30B-A3B-Instruct-2507": 30532,
    "Qwen2.5-VL-3B-Instruct": 3755, "Qwen2.5-VL-7B-Instruct": 8292, "SmolVLM-256M-Instruct": 256,
    "t5-small": 60.5, "t5-base": 223, "t5-large": 738,
    # Published as 77, 248 and 783 with an output matrix of its own; transformers 5 ties it to the
    # embedding when it builds from a config, so that much less is trained.
    "flan-t5-small": 77 - 0.512 * 32.128,
    "flan-t5-base": 247.6 - 0.768 * 32.128,
    "flan-t5-large": 783 - 1.024 * 32.128,
    "bart-base": 139, "bart-large": 406, "vit-base-patch16-224": 86.6, "vit-base-patch16-224-in21k": 86,
    "vit-large-patch16-224": 304, "dinov2-small": 22.1, "dinov2-base": 86.6, "dinov2-large": 304,
    "whisper-tiny": 37.8, "whisper-base": 72.6, "whisper-small": 242, "whisper-medium": 764,
    "whisper-large-v3": 1543, "whisper-large-v3-turbo": 809,
}  # fmt: skip

TASK_OF_TYPE = {
    **dict.fromkeys(("gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text"), "causal-lm"),
    **dict.fromkeys(("mistral", "phi3", "olmo2", "qwen3_moe", "olmoe", "gpt_oss", "smollm3"), "causal-lm"),
    **dict.fromkeys(("t5", "bart"), "seq2seq-lm"),
    **dict.fromkeys(("vit", "dinov2"), "image-classification"),
    "whisper": "speech-seq2seq",
    **dict.fromkeys(("qwen2_5_vl", "idefics3", "smolvlm"), "image-text-to-text"),
    **dict.fromkeys(("albert", "bert", "deberta-v2", "distilbert", "electra"), "sequence-classification"),
    **dict.fromkeys(("modernbert", "roberta", "xlm-roberta"), "sequence-classification"),
}

# Builds every entry without memory for its weights, in a process of its own: torch stays out of this one.
BUILD_ALL = """
import json, sys
import torch, transformers
from autotune.models import catalog
from autotune.models.tasks import infer_task

AUTO = {
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    "image-classification": transformers.AutoModelForImageClassification,
    "speech-seq2seq": transformers.AutoModelForSpeechSeq2Seq,
    "image-text-to-text": transformers.AutoModelForImageTextToText,
}
counts = {}
for name in sys.argv[1:]:
    entry = catalog.find(name)
    config = dict(entry.config)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AUTO[infer_task(entry.config)].from_config(config)
    counts[entry.name] = sum(parameter.numel() for parameter in model.parameters())

def longer_than_stated(name, length, **smaller):
    config = {**catalog.find(name).config, **smaller}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    tokens = torch.ones(1, length, dtype=torch.long)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)(input_ids=tokens, labels=tokens).logits.shape[1]
    return transformers.AutoModel.from_config(config)(input_ids=tokens).last_hidden_state.shape[1]

small = dict(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=10)
lengths = [longer_than_stated("t5-tiny", 150), longer_than_stated("deberta-v3-base", 600, **small)]
json.dump({"counts": counts, "lengths": lengths}, sys.stdout)
"""


def entry_of(name: str) -> catalog.CatalogEntry:
    entry = catalog.find(name)
    assert entry is not None, f"{name} is not in the catalog"
    return entry


def smallest() -> list[str]:
    """Return the smallest model of each architecture."""
    by_type = {entry.config["model_type"]: entry for entry in sorted(catalog.entries(), key=lambda e: -e.parameters)}
    return [entry.name for entry in by_type.values()]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.whole)], ids=["sample", "all"])
def built(request: pytest.FixtureRequest) -> dict[str, object]:
    """Build models with ``transformers``: one of each architecture, and all in ``make test-whole``."""
    names = [entry.name for entry in catalog.entries()] if request.param else smallest()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PACKAGE.parent)}
    facts = json.loads(warm.output_of("-c", BUILD_ALL, *names, env=environment))
    assert isinstance(facts, dict)
    return facts


def test_every_promised_name_is_there() -> None:
    assert not [name for name in (*PROMISED, *FOR_TRYING_OUT) if catalog.find(name) is None]
    assert len(catalog.entries()) >= 30


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("bert-large-uncased", "google-bert/bert-large-uncased"),
        ("google-bert/bert-large-uncased", "google-bert/bert-large-uncased"),
        ("BERT-Large-Uncased", "google-bert/bert-large-uncased"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("META-LLAMA/llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("gpt2", "openai-community/gpt2"),
        ("google/bert_uncased_L-2_H-128_A-2", "prajjwal1/bert-tiny"),
    ],
)
def test_names_with_and_without_organisation_in_any_case(spelling: str, name: str) -> None:
    assert entry_of(spelling).name == name


@pytest.mark.parametrize("name", ["", "bert", "someone-else/gpt2", "google-bert/bert-large-uncased/", "gpt2 "])
def test_other_names_find_nothing(name: str) -> None:
    assert catalog.find(name) is None


def test_no_spelling_belongs_to_two_entries() -> None:
    spellings = [name.lower() for entry in catalog.entries() for name in entry.names]
    assert len(spellings) == len(set(spellings))


def test_only_what_is_for_trying_out_has_no_organisation() -> None:
    homeless = {entry.name for entry in catalog.entries() if "/" not in entry.name}
    assert homeless == {*FOR_TRYING_OUT} - {"bert-tiny"}
    for name in FOR_TRYING_OUT:
        entry = entry_of(name)
        assert entry.about.endswith("for trying out")
        assert entry.parameters < 5_000_000
        assert name == "bert-tiny" or entry.config.get("vocab_size", 0) <= 1000


def test_families_stay_together_from_small_to_large() -> None:
    ours = [entry.name for entry in catalog.entries() if entry.config["model_type"] == "gpt2"]
    assert [name.rsplit("/", 1)[-1] for name in ours] == [
        "gpt2-tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
    ]  # fmt: skip
    names = [entry.name for entry in catalog.entries()]
    start = names.index("gpt2-tiny")
    assert names[start : start + 6] == ours


def test_about_tells_the_layers_of_the_config() -> None:
    for entry in catalog.entries():
        config = {**entry.config, **entry.config.get("text_config", {})}
        encoder = config.get("encoder_layers", config.get("num_layers"))
        layers = [encoder, config.get("decoder_layers", encoder)] if config.get("is_encoder_decoder") else []
        for key in ("num_hidden_layers", "n_layers", "n_layer"):
            layers = layers or ([config[key]] if key in config else [])
        phrase = " + ".join(map(str, layers)) + " layers"
        assert re.search(rf"(?<![\d+] ){re.escape(phrase)}", entry.about), entry


def test_configs_hold_no_generation_settings_nor_labels() -> None:
    # transformers refuses or warns about the former; the latter are a thousand lines.
    unwanted = {"id2label", "label2id", "auto_map", "transformers_version", "max_length", "num_beams", "use_cache"}
    assert not [entry.name for entry in catalog.entries() if unwanted & entry.config.keys()]


def test_parameters_are_those_of_the_model_that_transformers_builds(built: dict[str, object]) -> None:
    counts = built["counts"]
    assert isinstance(counts, dict)
    assert len(counts) >= 20
    assert {entry.name: entry.parameters for entry in catalog.entries() if entry.name in counts} == counts


def test_parameters_are_those_that_were_published() -> None:
    not_here_alone = {entry.name.rpartition("/")[2] for entry in catalog.entries() if "/" in entry.name}
    assert not_here_alone == PUBLISHED_MILLIONS.keys()
    for name, millions in PUBLISHED_MILLIONS.items():
        assert entry_of(name).parameters == pytest.approx(millions * 1e6, rel=0.015), name


def test_every_entry_has_a_sensible_task() -> None:
    for entry in catalog.entries():
        assert infer_task(entry.config) == TASK_OF_TYPE[entry.config["model_type"]], entry.name


def test_a_model_with_a_part_that_sees_is_trained_as_its_class_says() -> None:
    sees = {"vision_config": {}, "text_config": {}}
    for architecture, task in (
        ("SiglipForImageClassification", "image-classification"),
        ("Gemma3ForSequenceClassification", "sequence-classification"),
        ("Gemma3ForConditionalGeneration", "image-text-to-text"),
        ("CLIPModel", "image-text-to-text"),
    ):
        assert infer_task({"model_type": "x", "architectures": [architecture], **sees}) == task


def test_every_entry_has_a_sensible_sequence_length() -> None:
    shorter = {"gpt2-tiny": 128, "llama-tiny": 256, "t5-tiny": 128, "whisper-tiny-random": 64,
               "smolvlm-tiny": 256}  # fmt: skip
    for entry in catalog.entries():
        task = infer_task(entry.config)
        expected = {"image-classification": 1, "speech-seq2seq": 448}.get(task, 512)
        assert choose_seq_len(entry.config, task, None) == shorter.get(entry.name, expected), entry.name


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bert-base-uncased", 512),
        ("roberta-base", 512),
        ("ModernBERT-base", 8192),
        ("gpt2", 1024),
        ("Llama-3.2-1B", 131072),
        ("t5-base", None),
        ("deberta-v3-base", None),
        ("vit-base-patch16-224", None),
    ],
)
def test_the_longest_sequence(name: str, limit: int | None) -> None:
    assert max_seq_len(entry_of(name).config) == limit


def test_relative_positions_really_go_beyond_what_the_config_says(built: dict[str, object]) -> None:
    assert built["lengths"] == [150, 600]
    assert choose_seq_len(entry_of("t5-base").config, "seq2seq-lm", 1024) == 1024


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("bert-large-uncasd", "bert-large-uncased"),
        ("someone/Roberta-Larg", "roberta-large"),
        ("llama-3.2-1b-base", "Llama-3.2-1B"),
        ("deberta-large", "deberta-v3-large"),
        ("bert-lrge", "bert-large-uncased"),
        ("bert-large", "bert-large-uncased"),
        ("gpt2-lrge", "gpt2-large"),
    ],
)
def test_near_names(name: str, near: str) -> None:
    names = catalog.near_names(name)
    assert near in names
    assert len(names) <= 3
    assert all(catalog.find(known) for known in names)


def test_there_are_no_near_names_if_nothing_is_near() -> None:
    assert catalog.near_names("zzzzzzzz") == ()
    assert catalog.near_names("") == ()
    assert catalog.near_names("x" * 1_000_000) == ()


@pytest.mark.parametrize("name", ["microsoft/phi-1.5", "01-ai/Yi-1.5-6B", "HuggingFaceTB/SmolLM2-1.7B"])
def test_other_models_of_the_hub_are_no_misspelt_names(name: str) -> None:
    """The answer to a hub that cannot be reached would name models that have nothing to do with them."""
    assert catalog.near_names(name) == ()


def test_importing_reads_nothing_and_the_data_is_found_inside_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "autotune.zip"
    with zipfile.ZipFile(archive, "w") as whole:
        for file in (
            PACKAGE / "__init__.py",
            PACKAGE / "models" / "__init__.py",
            *(PACKAGE / "core").glob("*.py"),
            *(PACKAGE / "models" / "catalog").rglob("*.*"),
        ):
            if file.suffix in (".py", ".json"):
                whole.write(file, file.relative_to(PACKAGE.parent))
    script = (
        "import sys; from autotune.models import catalog; print(catalog.__file__); "
        "print(catalog.entries.cache_info().currsize, len(catalog.entries())); "
        "print(*{'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(archive)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    where, sizes, heavy = child.stdout.split("\n")[:3]
    assert where.startswith(str(archive))
    assert sizes == f"0 {len(catalog.entries())}"
    assert heavy == ""


QLORA = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"]
).to_dict()
NAMED_OF_EVERY_MODEL = ["lm_head", "model.embed_tokens", "multi_modal_projector", "merger", "model.visual", "router"]


def workload(folder: Path, stated: Any, **options: Any) -> Workload:
    config = {**resolve_model("llama-tiny").config, "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return build_workload({**{option.name: option.default for option in OPTIONS}, "model": str(folder), **options})


@pytest.mark.parametrize(
    ("stated", "quantize"),
    [
        (QLORA, "4bit"),
        ({**QLORA, "llm_int8_skip_modules": NAMED_OF_EVERY_MODEL}, "4bit"),
        (BitsAndBytesConfig(load_in_8bit=True).to_dict(), "8bit"),
        (None, "4bit"),
        (None, None),
    ],
)
def test_what_quantize_does_is_what_it_says(tmp_path: Path, stated: Any, quantize: str | None) -> None:
    made = workload(tmp_path, stated, quantize=quantize, peft="lora")
    assert (made.quantize, made.config.get("quantization_config")) == (quantize, None)


def test_messages_of_quantizations_that_are_refused(tmp_path: Path) -> None:
    in_4bit, in_8bit = ({"quantize": bits, "peft": "lora"} for bits in ("4bit", "8bit"))
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "nothing asks for it": (QLORA, {}),
        "other bits are asked for": (QLORA, in_8bit),
        "another type of 4 bits": (BitsAndBytesConfig(load_in_4bit=True).to_dict(), in_4bit),
        "modules that it leaves out": ({**QLORA, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}, in_4bit),
        "another method": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {}),
    }
    calls = {name: partial(workload, tmp_path, stated, **options) for name, (stated, options) in cases.items()}
    check_refusals("quantizations", calls, tmp_path)
