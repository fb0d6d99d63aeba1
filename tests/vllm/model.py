"""Make the folder of a tiny vision-language model with random weights, without a download.

One layer each: a photograph of 3 megapixels takes a tenth of a second, so that caches show. The weights are large
enough for the tokens to depend on the picture.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if 'image' in part['type'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen2_5_VLProcessor"}
CHANNELS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def make_tokenizer(folder: Path) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=letters))
    write(folder / "vocab.json", tokenizer.get_vocab())
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    added = {str(number): {"content": token, "special": True} for token, number in ids.items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE, "added_tokens_decoder": added})
    write(folder / "chat_template.json", {"chat_template": TEMPLATE})
    return ids


def make_model(folder: Path, pixels: int = 4 << 20, **encoder: int) -> Path:
    """Make the model's folder if it is not there, and return it; `encoder` replaces sizes of the vision part.

    Larger images are made as small as `pixels`. An engine's start tries the largest.
    """
    if (folder / "made").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    ids = make_tokenizer(folder)
    sizes = {"min_pixels": 56**2, "max_pixels": pixels, "size": {"shortest_edge": 56**2, "longest_edge": pixels}}
    image, video = {"image_processor_type": "Qwen2VLImageProcessor"}, {"video_processor_type": "Qwen2VLVideoProcessor"}
    write(folder / "preprocessor_config.json", image | sizes | PATCHES | CHANNELS)
    write(folder / "video_preprocessor_config.json", video | sizes | PATCHES | CHANNELS)
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 64,
        "out_hidden_size": 128,
        "intermediate_size": 64,
        "num_heads": 4,
    }
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "in_chans": 3}
    vision |= {"window_size": 112, "fullatt_block_indexes": [], "tokens_per_second": 2, "model_type": "qwen2_5_vl"}
    vision |= encoder
    text: dict[str, Any] = {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32768}
    text |= {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    tokens = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    kind = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "dtype": "float32"}
    write(folder / "config.json", kind | text | tokens | {"vision_config": vision, "tie_word_embeddings": False})
    write(
        folder / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"]], "pad_token_id": ids["<|endoftext|>"]}
    )
    make_weights(folder)
    (folder / "made").touch()
    return folder


def make_weights(folder: Path, auto: Any = AutoModelForImageTextToText) -> None:
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
            else:
                weight.fill_(0.0 if "bias" in name else 1.0)
    model.save_pretrained(folder)


TEXT: dict[str, dict[str, Any]] = {
    "full": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "two groups": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Models for text alone: what their layers attend to."""


def make_text_config(folder: Path, kind: str) -> Path:
    """Write the configuration of a model for text alone, and return the folder."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 65536}
    tokens = {"vocab_size": 256 + len(SPECIAL), "bos_token_id": 256, "eos_token_id": 258}
    write(folder / "config.json", TEXT[kind] | sizes | heads | tokens | {"dtype": "float32"})
    return folder


def make_text_model(folder: Path, kind: str) -> Path:
    """Make the folder of a model for text alone, and return it."""
    make_tokenizer(folder)
    make_text_config(folder, kind)
    make_weights(folder, AutoModelForCausalLM)
    return folder
