"""`ballast template MODEL_OR_FILE [name=value ...]`: what a chat template does to turns of a conversation.

MODEL_OR_FILE --separate process--> findings --> a page, and exit code 1 if the template refuses a message
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from controller.config.model_files import read_model_files
from controller.lifecycle.template_report import examine, page
from workers.chat_templates import Template, read_template, template_of
from workers.errors import BallastError, ConfigError, one_line

PLACEHOLDERS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
TIMEOUT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page.

    Return 0, 1 if the template refuses a message, or 2 with one line if the page cannot be made.
    """
    parser = argparse.ArgumentParser(
        prog="ballast template", description="What a chat template does to turns."
    )
    parser.add_argument(
        "source", metavar="MODEL_OR_FILE", help="a model's folder or name, or a Jinja file"
    )
    parser.add_argument(
        "arguments", metavar="name=value", nargs="*", help="variables of the template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the page"
    )
    namespace = parser.parse_args(None if arguments is None else list(arguments))
    try:
        options = dict(map(_argument, namespace.arguments))
        is_file = Path(namespace.source).is_file()
        model = None if is_file else read_model_files(namespace.source, "MODEL")
        template = (
            template_of(model.folder)
            if model
            else Template(read_template(namespace.source, "FILE"), PLACEHOLDERS)
        )
        if template is None:
            raise ConfigError(
                f"MODEL={namespace.source}: the model has no chat template. Name a Jinja file."
            )
        report = examine(
            template,
            [],
            options,
            f"the chat template of {namespace.source}",
            TIMEOUT_S,
            model,
        )
    except (BallastError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    assert report is not None  # without prompts, failures are raised
    code = int(report.findings.refuses)
    if namespace.json:
        print(
            json.dumps(
                {"exit_code": code, **asdict(report)},
                indent=1,
                ensure_ascii=False,
                default=str,
            )
        )
    else:
        print("\n".join(page(report)))
    return code


def _argument(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        # Of Python, which raises where libyaml would end the process.
        return name, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{text}: the value is not YAML. Write name=value.") from None


if __name__ == "__main__":
    sys.exit(main())
