"""Write a saved model's card, README.md: source, data and settings. A card copied from the source model is
kept.

settings --> runs/NAME/model/README.md
"""

import importlib.metadata
from pathlib import Path

from huggingface_hub import ModelCardData

from controller.config import TrainingConfig
from controller.config.schema import changed_yaml
from controller.packages import distribution
from workers.config.model import ROUNDED

MARK = "<!-- written by Ballast -->"  # a card of an earlier stage is rewritten
PACKAGES = ("torch", "transformers", "ray")
TEXT = """\
---
{data}
---
{mark}
# {name}

{headline}{base}

Trained with {versions}. These settings differ from their defaults:

```yaml
{settings}
```
"""

ROUNDED_BASE = """

Weights below the adapters were rounded to {base_dtype} for training, and this model holds the rounded ones.
Adapters of the run fit this model, not {source}.\
"""


def write_card(config: TrainingConfig, folder: Path) -> None:
    """Write the card into `folder`, unless it holds a card that is not ours."""
    card = folder / "README.md"
    if card.is_file() and MARK not in card.read_text(encoding="utf-8", errors="replace"):
        return
    source = config.model.path
    data = ModelCardData(
        base_model=None if Path(source).exists() else source,
        library_name="transformers",
        pipeline_tag="text-generation" if config.head == "lm" else "text-classification",
        tags=["ballast"],
    )
    names = (distribution(), *PACKAGES)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in names if name
    )
    text = TEXT.format(
        data=data.to_yaml(),
        mark=MARK,
        name=config.run.name,
        headline=config.headline,
        base=_rounded_base(config),
        versions=versions,
        settings=changed_yaml(config).strip(),
    )
    card.write_text(text, encoding="utf-8")


def _rounded_base(config: TrainingConfig) -> str:
    model = config.model
    if not model.lora.rank or model.base_dtype not in ROUNDED:
        return ""
    return ROUNDED_BASE.format(base_dtype=model.base_dtype, source=model.path)
