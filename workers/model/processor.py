"""The processor of a model that reads images: its tokenizer and image processor, as transformers joins them."""

from transformers import AutoProcessor, PreTrainedConfig

from workers.errors import ConfigError, named
from workers.model.rules.families import IMAGES_SEE_AHEAD
from workers.placeholders import Placeholders, RefusedImages


def load_placeholders(path: str) -> Placeholders | None:
    """Load the processor of model.path, or None for a model that reads no images. Raises ConfigError."""
    try:
        config = PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
        if "vision_config" not in config:
            return None
        if config["model_type"] in IMAGES_SEE_AHEAD:
            return RefusedImages(path, config["model_type"])
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise ConfigError(f"model.path={path} has no processor for images: {named(error)}.") from error
    return Placeholders(processor, path) if hasattr(processor, "image_token") else None
