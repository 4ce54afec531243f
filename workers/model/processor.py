"""The processor of a model that reads images: its tokenizer and image processor, as transformers joins them."""

from transformers import AutoConfig, AutoProcessor

from workers.errors import ConfigError, named
from workers.placeholders import Placeholders


def load_placeholders(path: str) -> Placeholders | None:
    """Load the processor of model.path, or None for a model that reads no images. Raises ConfigError."""
    try:
        if not hasattr(AutoConfig.from_pretrained(path, local_files_only=True), "vision_config"):
            return None
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise ConfigError(f"model.path={path} has no processor for images: {named(error)}.") from error
    return Placeholders(processor, path) if hasattr(processor, "image_token") else None
