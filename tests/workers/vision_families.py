"""Tiny random models of families that see images, with processors, tokenizers and chat templates, by no
download.

    path = vision_model("qwen2_5_vl")                # a session's fixture: built once, do not write into it
    prompt = f"How many?{PLACEHOLDERS['qwen2_5_vl']}"  # an image, as the family's chat template writes it

Tokenizers have the 256 bytes and the special tokens, one token a byte. Vocabularies are larger than
tokenizers.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Built = tuple[hf.PreTrainedConfig, hf.ProcessorMixin]

HIDDEN = 128
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
# Of a ViT.
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# Of a Qwen or GLM tower.
MERGING = {"depth": 2, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
WIDENING = MERGING | {
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 64,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 6, 6],
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SIZES = ((84, 56), (56, 112), (64, 64))  # of `pictures`, width and height
EXACT = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "idefics3",
    "smolvlm",
    "internvl",
    "glm4v",
    "pixtral",
    "mistral3",
)

PLACEHOLDERS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "llava": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACEHOLDER{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pictures() -> list[Image.Image]:
    """Noise of different sizes and shapes."""
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (h, w, 3)).astype("uint8"))
        for w, h in SIZES
    ]


def save_tiny_vision_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Write model, processor and tokenizer. overrides: of the configuration's text part."""
    torch.manual_seed(0)
    config, processor = BUILDERS[family](family)
    for name, value in overrides.items():
        setattr(config.get_text_config(), name, value)
    model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    # Large enough that log-probs are far from uniform, and images matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "llava":
        _name_as_published(folder / "model.safetensors")
    return folder


def _name_as_published(file: Path) -> None:
    """Name a CLIP tower as LLaVA's files do. Transformers reads both names, vLLM only these."""
    weights = {
        name.replace("tower.", "tower.vision_model."): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


def byte_tokenizer(
    extra: Iterable[str] = (), named: dict[str, str] | None = None, **settings: Any
) -> Any:
    """Bytes and special tokens. named: tokens that processors find as attributes of the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    named = named or {}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra, *named.values()]
    bytewise.add_special_tokens(list(dict.fromkeys(specials)))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, extra_special_tokens=named, **ends, **settings
    )


def _text(tokenizer: Any, **settings: Any) -> dict[str, Any]:
    pad = tokenizer.pad_token_id
    return (
        TEXT
        | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad, "bos_token_id": pad}
        | settings
    )


def _chat(family: str) -> str:
    return CHAT.replace("PLACEHOLDER", PLACEHOLDERS[family])


def _qwen(family: str) -> Built:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(names)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(names))
    text, patch, rope = _text(tokenizer), 14, ROPE
    if family == "qwen2_vl":
        classes = hf.Qwen2VLConfig, hf.Qwen2VLProcessor, hf.Qwen2VLVideoProcessor
        tower = MERGING | {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        classes = hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor
        tower = WIDENING | {"window_size": 56, "fullatt_block_indexes": [1]}
    elif family == "qwen3_5":
        classes = hf.Qwen3_5Config, hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor
        tower = WIDENING | {"num_position_embeddings": 64}
        rope = ROPE | {
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        }
        text, patch = _text(tokenizer, **GATED_DELTA, head_dim=32), 16
    else:
        classes = hf.Qwen3VLConfig, hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor
        tower = WIDENING | {"num_position_embeddings": 64, "depth": 3}
        tower |= {"deepstack_visual_indexes": [0, 1]}
        rope = ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text, patch = _text(tokenizer, head_dim=32), 16
    config = classes[0](
        text_config=text | {"rope_parameters": rope},
        vision_config=tower | {"patch_size": patch},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    area = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    images = hf.Qwen2VLImageProcessor(
        patch_size=patch, merge_size=2, temporal_patch_size=2, size=area
    )
    return config, classes[1](
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=classes[2](),
        chat_template=_chat(family),
    )


def _glm4v(family: str) -> Built:
    names = [f"<|{name}|>" for name in ("image", "video")]
    names += [
        f"<|{side}_of_{name}|>" for name in ("image", "video") for side in ("begin", "end")
    ]
    tokenizer = byte_tokenizer(names)
    keys = (
        "image_token_id",
        "video_token_id",
        "image_start_token_id",
        "image_end_token_id",
    )
    keys += ("video_start_token_id", "video_end_token_id")
    config = hf.Glm4vConfig(
        text_config=_text(tokenizer, rope_parameters=ROPE | {"partial_rotary_factor": 1.0}),
        vision_config=WIDENING | {"image_size": 112, "patch_size": 14},
        tie_word_embeddings=False,
        **dict(zip(keys, tokenizer.convert_tokens_to_ids(names), strict=True)),
    )
    area = {"shortest_edge": 2 * 28**2, "longest_edge": 2 * 112**2}
    images = hf.Glm4vImageProcessor(
        patch_size=14, merge_size=2, temporal_patch_size=2, size=area
    )
    videos = hf.Glm4vVideoProcessor()
    return config, hf.Glm4vProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=_chat(family),
    )


def _gemma3(family: str) -> Built:
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = byte_tokenizer(
        ["<bos>", *("\n" * n for n in range(1, 5))], named, bos_token="<bos>"
    )
    image, start, end = tokenizer.convert_tokens_to_ids(list(named.values()))
    layers = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3Config(
        text_config=_text(tokenizer, head_dim=32, query_pre_attn_scalar=32, **layers),
        vision_config=TOWER | {"image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=start,
        eoi_token_index=end,
    )
    images = hf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return config, hf.Gemma3Processor(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=_chat(family),
    )


def _idefics3(family: str) -> Built:
    """One image in one part. With `do_image_splitting` large images become rows and columns of parts."""
    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tokenizer = byte_tokenizer(
        [f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)], named
    )
    is_smol = family == "smolvlm"
    config = (hf.SmolVLMConfig if is_smol else hf.Idefics3Config)(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        text_config=_text(tokenizer, model_type="llama"),
        vision_config=TOWER | {"image_size": 56, "patch_size": 14},
    )
    edges = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56}}
    images = (hf.SmolVLMImageProcessor if is_smol else hf.Idefics3ImageProcessor)(
        do_image_splitting=False, **edges
    )
    videos = {"video_processor": hf.SmolVLMVideoProcessor()} if is_smol else {}
    return config, (hf.SmolVLMProcessor if is_smol else hf.Idefics3Processor)(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_chat(family),
        **videos,
    )


def _llava(family: str) -> Built:
    tokenizer = byte_tokenizer(["<image>"])
    clip = {
        "model_type": "clip_vision_model",
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 32,
    }
    config = hf.LlavaConfig(
        text_config=_text(tokenizer, model_type="llama"),
        vision_config=TOWER | clip,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    images = hf.CLIPImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    return config, hf.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_chat(family),
    )


def _internvl(family: str) -> Built:
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    named |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = byte_tokenizer((), named)
    config = hf.InternVLConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config=TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    images = hf.GotOcr2ImageProcessor(
        size={"height": 56, "width": 56}, crop_to_patches=False
    )
    return config, hf.InternVLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=_chat(family),
    )


def _pixtral(family: str) -> Built:
    tokenizer = byte_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    is_mistral = family == "mistral3"
    own: dict[str, Any] = {"spatial_merge_size": 2}
    if not is_mistral:
        own = {
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu",
        }
    config = (hf.Mistral3Config if is_mistral else hf.LlavaConfig)(
        text_config=_text(
            tokenizer, model_type="mistral", head_dim=32, sliding_window=None
        ),
        vision_config=TOWER
        | {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
        **own,
    )
    images = hf.PixtralImageProcessor(
        size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
    )
    return config, hf.PixtralProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2 if is_mistral else 1,
        chat_template=_chat(family),
    )


BUILDERS: dict[str, Callable[[str], Built]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), _qwen),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics3),
    **dict.fromkeys(("pixtral", "mistral3"), _pixtral),
    "gemma3": _gemma3,
    "llava": _llava,
    "internvl": _internvl,
    "glm4v": _glm4v,
}
