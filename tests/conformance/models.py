"""The models that vLLM's tests name. For the scheduler: configurations and processors, no weights.

Limits, special tokens and sizes of images are the real models': tests count on them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from testkit import tiny_models
from testkit.worlds.opt_config import OPT_CONFIG

_OPT = OPT_CONFIG | {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}

_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32064,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 64,
    },
}

_LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}

_QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
}

# Linear attention in all layers but the last.
_QWEN_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 262144,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

_QWEN_PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}

_CONFIGURATIONS = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT,
    "llava-hf/llava-1.5-7b-hf": _LLAVA,
    "Qwen/Qwen2.5-VL-3B-Instruct": _QWEN,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN_NEXT,
}

# Of multimodal models, vLLM asks the processor how many tokens an image may have.
_PROCESSORS = {
    "llava-hf/llava-1.5-7b-hf": (_LLAVA_PROCESSOR, {"<image>": 32000}),
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        _QWEN_PROCESSOR,
        {
            "<|vision_start|>": 151652,
            "<|vision_end|>": 151653,
            "<|image_pad|>": 151655,
            "<|video_pad|>": 151656,
        },
    ),
}


def write_models(folder: Path) -> Path:
    """Write them so that their names are paths below `folder`, which is how vLLM finds them."""
    for name, configuration in _CONFIGURATIONS.items():
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        _write_json(path / "config.json", configuration)
        if name in _PROCESSORS:
            processor, special_tokens = _PROCESSORS[name]
            _write_json(path / "preprocessor_config.json", processor)
            _write_tokenizer(path, special_tokens)
    return folder


# What tests of engines and servers name: one model, or one that ends its thoughts and texts.
_LLAMAS = (
    "Qwen/Qwen2-VL-2B-Instruct",  # for its tests of text; it sees no images
    "Qwen/Qwen2.5-1.5B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite",
    "facebook/opt-125m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "openai-community/gpt2",
)
_ENDING = (
    "HuggingFaceH4/zephyr-7b-beta",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
)
_LORAS = (
    "charent/self_cognition_Alice",
    "typeof/zephyr-7b-beta-lora",
)

# With these, test_engine_core.py's prompt has the 12 tokens that it needs, and the prompts of
# test_chunked_prompt.py are short enough.
_WORDS = (" Masataka", " Oniwa", " capital", " France")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # which parsers look for
_NUM_OTHER_WORDS = 6000  # tests name ids up to 5,000

_LIMIT = {"max_new_tokens": 128}  # of those that set none

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def write_tiny_llamas(folder: Path) -> Path:
    """Write a model that can be computed, and an adapter, found as those of `write_models()`."""
    model, ending, lora = (folder / name for name in ("llama", "ending", "lora"))
    tiny_models.write_model(
        model,
        "llama",
        more_tokens=(*_WORDS, *_MARKS),
        output_tokens=[f"<{number}>" for number in range(_NUM_OTHER_WORDS)],
        chat_template=_CHAT_TEMPLATE,
    )
    example = folder / "examples/template_chatml.jinja"
    example.parent.mkdir(exist_ok=True)
    example.write_text(_CHAT_TEMPLATE)
    _write_json(model / "generation_config.json", _LIMIT)
    _write_ending(ending, model)
    _write_lora(lora)
    for target, names in ((model, _LLAMAS), (ending, _ENDING), (lora, _LORAS)):
        for path in (folder / name for name in names):
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(target)
    return folder


def _write_ending(folder: Path, model: Path) -> None:
    """Write a model that soon ends its thoughts and, with each 20th token, its texts."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    weights["lm_head.weight"][tokenizer.token_to_id("</think>")] *= 8
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ends = [tokenizer.token_to_id(f"<{number}>") for number in range(0, _NUM_OTHER_WORDS, 20)]
    _write_json(folder / "generation_config.json", _LIMIT | {"eos_token_id": ends})


def _write_lora(folder: Path) -> None:
    """Write an adapter of rank 8 for the queries of both layers."""
    import torch
    from safetensors.torch import save_file

    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.ones(8, tiny_models.HIDDEN_SIZE)
        weights[f"{name}.lora_B.weight"] = torch.ones(4 * tiny_models.HEAD_SIZE, 8)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    configuration = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    _write_json(folder / "adapter_config.json", configuration)


def _write_tokenizer(path: Path, special_tokens: dict[str, int]) -> None:
    """Write one that knows the special tokens, and no other word."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1} | special_tokens, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(it, special=True) for it in special_tokens])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"},
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
