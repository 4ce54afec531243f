"""Trials of users' code that need torch or transformers, run by `ask` in a separate process."""

import math
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from inspect import isfunction
from typing import Any

from workers.chat_templates import check_read, variables_of
from workers.config.loss import DistillationConfig, undecorated_error
from workers.config.roles import LossConfig, OptimizerConfig
from workers.episodes.template_findings import template_findings
from workers.errors import BallastError, ConfigError, DataError, clause, describe_error
from workers.rendering import Messages, Options, check_size
from workers.template_forms import try_forms
from workers.user_code.functions import load, load_module, pack_text
from workers.user_code.process import RAISED
from workers.user_code.tool_types import problem_of_tool

MOST_STEPS = 10_000  # of a schedule
MOST_BYTES = 2**31  # of memory, for a template


def try_loss(
    key: str,
    name: str,
    config: LossConfig,
    columns: dict[str, Any],
    tokens: tuple[str, ...],
    meta: dict[str, Any],
) -> None:
    """Compute the gradient of a policy loss on two sequences, and on none. columns: [2] each. Raises
    ConfigError.
    """
    load(key, name)  # first, so that import errors are raised before torch is loaded
    if "workers.model.losses.registry" not in sys.modules:  # where the decorator is
        raise undecorated_error(name)
    import torch

    from workers.batch.dataproto import DataProto
    from workers.model.losses import (
        Denominators,
        Predictions,
        make_policy_loss,
        prepare,
        to_metrics,
    )
    from workers.model.rows.packing import pack, with_work

    # It needs a model.
    loss = make_policy_loss(replace(config, distillation=DistillationConfig()))
    mask = torch.tensor([False, True, True, False, True, True, True])
    token_columns: dict[str, torch.Tensor] = dict.fromkeys(tokens, -torch.ones(len(mask)))
    token_columns |= {"input_ids": torch.arange(len(mask)), "loss_mask": mask}
    objects = {
        name: column for name, column in columns.items() if column.dtype.kind in "OU"
    }
    numbers = {
        name: torch.from_numpy(column)
        for name, column in columns.items()
        if name not in objects
    }
    batch = DataProto(torch.tensor([3, 4]), token_columns, numbers, objects, meta)
    denominators = Denominators(tokens=5.0, sequences=2.0, groups=2.0)
    for description, part in (("two sequences", batch), ("no sequence", batch.slice(0, 0))):
        try:
            (part,) = prepare(loss, [part], denominators)
            row = pack(with_work(part))
            log_probs = (-torch.ones(len(row.loss_positions))).requires_grad_()
            hidden = (log_probs[:, None].expand(-1, 8),) if config.hidden_states else ()
            value, statistics = loss(
                Predictions.gather((log_probs, log_probs**2, *hidden), part, row),
                denominators,
            )
            _take_gradient(value, log_probs)
            to_metrics([statistics])
        except BallastError as error:
            raise ConfigError(
                f"{key}={name!r}, tried on {description}: {clause(error)}."
            ) from None
        except RAISED as error:
            raise ConfigError(
                f"{key}={name!r}, tried on {description}, raised {describe_error(error)}."
            ) from None


def _take_gradient(value: Any, log_probs: Any) -> None:
    """Raise DataError unless a loss has a finite gradient. Log-probs of -1 give none a reason to overflow."""
    if not value.requires_grad:
        raise DataError(
            "the losses have no gradient. Compute them from predictions.log_probs."
        )
    value.backward()
    if not math.isfinite(value.item()):
        raise DataError(f"the loss is {value.item()}. Return finite losses.")
    if log_probs.grad is not None and not log_probs.grad.isfinite().all():
        raise DataError("the gradient of the loss is not finite.")


def try_optimizer(key: str, name: str, config: OptimizerConfig, total_steps: int) -> None:
    """Make a custom optimiser of parameters as a rank holds them, and ask its schedule. Raises
    ConfigError.
    """
    load(key, name)  # first, as for a loss
    import torch
    from torch.distributed.tensor import distribute_tensor

    from workers.model.optimizer.optimizer import make_optimizer, make_schedule
    from workers.model.sharding.parallel import make_parallel

    mesh = make_parallel(torch.device("cpu")).sharding
    shapes = {"model.layers.0.mlp.up_proj.weight": (64, 64), "model.norm.weight": (64,)}
    parameters = {
        parameter_name: torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh))
        for parameter_name, shape in shapes.items()
    }
    step = 0
    schedule = f"optimizer.schedule_function={config.schedule_function!r}"
    try:
        rate = make_schedule(
            make_optimizer(parameters.items(), config), config, total_steps
        ).lr_lambdas[0]
        for step in range(min(total_steps, MOST_STEPS)):
            if not 0 <= (factor := rate(step)) < math.inf:
                raise ConfigError(
                    f"{schedule}: it returned {factor} at step {step}. Return a number of at least 0."
                )
    except RAISED as error:
        text = (
            str(error)
            if isinstance(error, ConfigError)
            else f"{schedule}: it raised {describe_error(error)} at step {step}."
        )
        raise ConfigError(
            text.replace("optimizer.", f"{key.rpartition('.')[0]}.", 1)
        ) from None


def describe_tools(key: str, name: str) -> dict[str, Any]:
    """Pickle the functions of a module, those of `__all__` or its own public ones, with schemas. Raises
    ConfigError.
    """
    module = load_module(key, name)
    from transformers.utils import get_json_schema

    own_names = [
        tool_name
        for tool_name, f in vars(module).items()
        if isfunction(f) and f.__module__ == module.__name__
    ]
    names = getattr(
        module,
        "__all__",
        [tool_name for tool_name in own_names if not tool_name.startswith("_")],
    )
    tools: dict[str, Any] = {
        tool_name: getattr(module, tool_name, None) for tool_name in names
    }
    if not tools:
        raise ConfigError(
            f"{key}={name}: it has no public function. Define one with type hints and a docstring."
        )
    schemas = []
    for tool_name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers has several
            raise ConfigError(
                f"{key}={name}: {tool_name} has no schema: {clause(error)}. Give every argument a type "
                "hint, and a line under `Args:` in the docstring."
            ) from None
        if problem := problem_of_tool(tool):
            raise ConfigError(f"{key}={name}: {tool_name} cannot be called: {problem}.")
    return {"packed": pack_text(key, name, module, tools), "schemas": schemas}


def render_prompts(
    prompts: Sequence[tuple[str, Messages, Options]],
    special: dict[str, Any],
    answered: bool,
    examined: Any,
    template_name: str,
) -> dict[str, Any] | None:
    """Render chat messages by a template, each with its options, and return `TemplateFindings` as a mapping.

    special: options of all. examined: template, options and tokens of the findings. They are None if the
    template takes the prompts only. Raises ConfigError, naming `template_name`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(
        messages: Messages, template: str, *, begins: bool = False, **options: Any
    ) -> str:
        texts, _ = render_jinja_template(
            [messages],
            chat_template=template,
            add_generation_prompt=begins,
            **special | options,
        )
        return check_size(str(texts[0]))

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    template, run_options, tokens = examined
    texts = {template}
    texts.update(text for text, *_ in prompts)
    forms = {text: try_forms(partial(render, template=text)) for text in texts}

    def in_its_form(
        messages: Messages, begins: bool, options: Options, text: str = template
    ) -> str:
        check_read(text, options)
        return render(forms[text].apply(messages), text, begins=begins, **options)

    number = 0
    try:
        for text, messages, options in prompts:
            number += 1
            with suppress(DataError):  # of the record, which tokenizing names
                in_its_form(messages, not answered, options, text)
        number = 0
        arguments = tuple(sorted(variables_of(template).arguments))
        bos = special.get("bos_token", "")
        return asdict(template_findings(in_its_form, arguments, run_options, bos, tokens))
    except Exception as error:  # templates may raise anything
        if prompts and not number:
            return None
        place = f", on prompt {number} of those tried" if number else ""
        if isinstance(error, ConfigError):
            raise ConfigError(f"{template_name}{place}: {error}") from None
        line = f", in line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ConfigError(
            f"{template_name} raised {describe_error(error)}{line}{place}."
        ) from None
