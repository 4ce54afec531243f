"""The process of `workers.chat_template`: prompts rendered by transformers' own renderer."""

import json

from transformers.utils.chat_template_utils import render_jinja_template

from workers.isolation import Answer, answering, named


def respond(question: Answer, payload: bytes) -> tuple[Answer, bytes]:
    """Nothing, or the `failure` of the first prompt that the template does not render."""
    options = {"chat_template": question["template"], "add_generation_prompt": not question["answered"]}
    for number, messages in enumerate(json.loads(payload), start=1):
        try:
            render_jinja_template([messages], **options, **question["special_tokens"])
        except Exception as error:
            line = f", in line {error.lineno}" if hasattr(error, "lineno") else ""
            return {"failure": f"raised {named(error)}{line}, on prompt {number} of those tried"}, b""
    return {}, b""


if __name__ == "__main__":
    answering(respond)
