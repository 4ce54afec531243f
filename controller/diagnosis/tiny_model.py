"""A random model made on the fly, for machines that have none yet."""

from pathlib import Path

VOCABULARY = 512


def save_tiny_model(folder: Path) -> None:
    """A Qwen2 of a quarter of a million parameters with tied embeddings, and a tokenizer, in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for a megabyte
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 64, which every attention kernel takes
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,  # large enough that an update moves log-probs
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t2"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(folder)
