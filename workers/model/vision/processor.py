"""The processor of a model that reads images: its tokenizer and image processor, as transformers
joins them.
"""

from workers.errors import describe_error
from workers.images.placeholders import COMPARED, Placeholders, RefusedImages
from workers.model.rules.families import IMAGES_SEE_AHEAD


def load_placeholders(path: str, compared: int = COMPARED) -> Placeholders | None:
    """Load the processor of model.path, or None for a model that reads no images.

    A model that is trained on text alone, or whose processor cannot be loaded, refuses images.
    compared: see `Placeholders`.
    """
    from transformers import AutoProcessor, PreTrainedConfig

    config = PreTrainedConfig.get_config_dict(path, local_files_only=True)[0]
    if "vision_config" not in config:
        return None
    if config["model_type"] in IMAGES_SEE_AHEAD:
        return RefusedImages(
            path, f"tokens of its images attend to later ones ({config['model_type']})"
        )
    try:
        processor = AutoProcessor.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types
        return RefusedImages(
            path, f"its processor cannot be loaded: {describe_error(error)}"
        )
    return (
        Placeholders(processor, path, compared)
        if hasattr(processor, "image_token")
        else None
    )
