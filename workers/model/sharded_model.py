"""One model on this rank: loaded, checked, sharded over the ranks, filled, and its weights given back.

files --Source--> module on the CPU --adapters, stage, tensors, experts, FSDP2--> shards --> filled
named_weights, save_pretrained: gather --> names of the files
adapter_files, save_adapters, output_layer: the part that other engines and roles take
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from balancing.model_counts import model_windows
from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.chat_templates import read_template
from workers.config.model import RECOMPUTED
from workers.config.roles import ModelConfig, ParallelConfig
from workers.errors import ConfigError
from workers.model.adapter_products import join_adapter_products
from workers.model.checkpoint.checkpoint_weights import CheckpointWeights, Conversion, Shard
from workers.model.checkpoint.export import (
    FILE_BYTES,
    stored_dtype,
    write_folder,
    write_model,
)
from workers.model.checkpoint.loading import Source
from workers.model.checkpoint.lora import (
    adapter_files,
    adapter_weights,
    add_adapters,
    lower_base,
    merged_shards,
    write_adapters,
)
from workers.model.compiled_layers import compile_layers
from workers.model.forward_backward import MicroBatchRunner
from workers.model.layout import RowLayout
from workers.model.losses.distillation import WholeLayer, as_numpy
from workers.model.low_bit_linear import narrow_frozen
from workers.model.model import PackedModel, compute_dtype
from workers.model.moe.expert_parallel import share_experts
from workers.model.moe.routing import Routing
from workers.model.numerics_check import Expected, check_against_reference, own_outputs
from workers.model.numerics_probe import Probe, make_probe
from workers.model.pretrained import load_tokenizer
from workers.model.recomputation import checkpoint_layers
from workers.model.rows.packing import check_tokenizer, max_positions
from workers.model.rules.model_rules import check_model, compiles
from workers.model.sharding.parallel import (
    limit_waits,
    make_parallel,
    prepare_backward,
    reshard,
    shard_model,
)
from workers.model.sharding.stage_layers import Part
from workers.model.sharding.tensor_parallel import share_model
from workers.model.stages.stage_pipeline import Stage
from workers.model.timing import MicroStepClock
from workers.model.value_head import LOADERS, name_pad_token


class ShardedModel:
    """Hold a model that is sharded over the ranks. `TrainingEngine` computes with it.

    trained: whether an optimiser follows. Without one the model is frozen.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        trained: bool,
        device: torch.device | str,
        cpu_offload: bool,
        reshard_after_forward: bool,
        temperature: float,
        parallel: ParallelConfig | None,
        head: str,
        check_numerics: bool,
    ) -> None:
        if head not in LOADERS:
            raise ConfigError(f"head={head} is not one of {', '.join(LOADERS)}")
        self.device = torch.device(device)
        self.model_config = model_config
        self.head = head
        self.temperature = temperature
        self.reshard_after_forward = reshard_after_forward
        self.dtype = compute_dtype(model_config.dtype, self.device)
        self.tokenizer = load_tokenizer(model_config.path)
        self.chat_template = (
            read_template(model_config.chat_template) if model_config.chat_template else ""
        )
        self.parallel = make_parallel(self.device, parallel)
        # Parameters, gradients and optimiser state stay in float32 when the computation is in bfloat16.
        parameter_dtype = torch.promote_types(self.dtype, torch.float32)
        source = self._source(parameter_dtype)
        self.module = source.module
        if head == "value":
            name_pad_token(self.module.model.config, self.tokenizer)
        self.clock = MicroStepClock(self.device, model_windows(self.module.model.config))
        self.vocabulary = self.module.model.get_input_embeddings().num_embeddings
        self.positions = max_positions(self.module.model.config)
        self._check_model()
        # Kept by name, because only a pipeline's last stage keeps the layer.
        output = self.module.model.get_output_embeddings() if head == "lm" else None
        self._output_name = next(
            (name for name, part in self.module.model.named_modules() if part is output), ""
        )
        self.layout = RowLayout(
            model_config, self.parallel, self.module, self.device, self.dtype
        )
        self.stage = Stage(
            self.module,
            self.parallel,
            recomputed=RECOMPUTED[model_config.gradient_checkpointing],
        )
        self.num_parameters = sum(
            parameter.numel() for parameter in self.module.parameters()
        )
        self.module.set_trained(trained, model_config.train_vision)
        # A frozen engine is a reference: the base model, which adapters leave as it is.
        self.has_adapters = trained and model_config.lora.rank > 0
        if self.has_adapters:
            source.change(lambda module: add_adapters(module.model, model_config.lora))
            stored = model_config.base_dtype, self.parallel.tensor.size()
            source.change(lambda module: lower_base(module.model, *stored))
        self.routing = Routing(
            self.module, model_config, self.parallel, self.device, trained=trained
        )
        self._numerics = self._probe_numerics(source) if check_numerics else None
        if self.has_adapters and model_config.base_dtype != "float32":
            source.change(
                lambda module: narrow_frozen(module.model, self.dtype, module.tower)
            )
        self._place(source, cpu_offload)
        self.stored_dtype = stored_dtype(model_config.path, parameter_dtype)

    def _place(self, source: Source[PackedModel], cpu_offload: bool) -> None:
        """Shard the module and fill it with the files' weights. Collective."""
        weights = {name: shard.like for name, shard in self._shards().items()}
        self._distribute(cpu_offload)
        limit_waits()
        source.fill(self.device, cpu_offload=cpu_offload)
        self.module.place_tower(self.device, self.dtype)
        prepare = self._before_backward
        hooks = self.routing.hooks
        self.runner = MicroBatchRunner(
            self.stage, self.layout, self.clock, self.device, self.dtype, prepare, hooks
        )
        self.checkpoint_weights = CheckpointWeights(
            self.module.model,
            source.rules,
            weights,
            self._shards,
            self.device,
            self.stage,
            self.module.frozen_names,
        )

    def _probe_numerics(self, source: Source[PackedModel]) -> tuple[Probe, Expected]:
        probe = make_probe(
            self.module, self.dtype, self.temperature, self.layout.shared_from
        )
        return probe, source.ask(lambda module: own_outputs(module, probe))

    def _compare_numerics(self) -> None:
        """Compare with the model's own forward pass, if the check was asked for. Collective."""
        if self._numerics is None:
            return
        probe, expected = self._numerics
        self._numerics = None  # nothing of the check stays in memory
        sequences = self.routing.with_own_choices(probe.sequences)
        for degree in self.parallel.config.context_degrees:
            shared = (
                {CONTEXT_DEGREE: torch.full((len(sequences),), degree)}
                if self.parallel.shares_by_step
                else {}
            )
            probed = replace(sequences, columns=sequences.columns | shared)
            with self.routing.without_losses():
                check_against_reference(self, replace(probe, sequences=probed), expected)

    def _source(self, parameter_dtype: torch.dtype) -> Source[PackedModel]:
        shared = self.parallel.context.size() * self.parallel.tensor.size() > 1
        layout = self.model_config.attention_layout(shared=shared)
        loaded = replace(self.model_config, layout=layout, forward_layout="same")
        return Source(partial(LOADERS[self.head], loaded, parameter_dtype))

    def _check_model(self) -> None:
        cuda = self.device.type == "cuda"
        half = self.dtype.itemsize == 2
        check_model(
            self.module,
            self.model_config,
            self.parallel.config,
            head=self.head,
            cuda=cuda,
            half=half,
        )
        check_tokenizer(self.tokenizer, self.vocabulary, self.model_config.path)

    def _distribute(self, cpu_offload: bool) -> None:
        if self.parallel.tensor.size() > 1:
            share_model(self.module.model, self.parallel.tensor)
        self.stage.keep(self.module)
        experts = share_experts(self.module.model, self.parallel, self.routing.grouped)
        cuda = self.device.type == "cuda"
        images = self.module.vision is not None
        compiled = compiles(
            self.model_config, self.parallel.config, cuda=cuda, images=images
        )
        if self.model_config.batch_invariant:
            from workers.model.batch_invariant.qwen3 import compute_as_engines

            compute_as_engines(self.module, self.device)
        if self.has_adapters and not compiled and self.parallel.tensor.size() == 1:
            join_adapter_products(self.module.model)
        tower = self.module.tower_blocks
        layers = self.module.layers
        checkpoint_layers(
            self.module.model, layers, self.model_config, tower, compiled=compiled
        )
        if compiled:
            compile_layers(layers, shares_experts=self.parallel.config.expert_parallel > 1)
        shard_model(
            self.module,
            layers,
            self.parallel.sharding,
            compute_dtype=self.dtype,
            reduce_dtype=torch.promote_types(self.dtype, torch.float32),
            cpu_offload=cpu_offload,
            reshard_after_forward=self.reshard_after_forward,
            experts=experts,
            uncast=tower,
            unsharded=self.module.frozen_tower,
        )

    @property
    def data_parallel_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups over which consecutive sums cover all ranks with different sequences.

        With context-parallel degrees by micro-step, ranks add only the rows of `counted`.
        """
        names = ("dp_replicate", "dp_shard", *["cp"] * self.parallel.shares_by_step)
        return [self.parallel.mesh[name].get_group() for name in names]

    def counted(self, sequences: DataProto) -> Tensor:
        """Return which sequences this rank counts, of those that ranks share by choice of a plan:
        bool [B].
        """
        degrees = sequences.columns.get(CONTEXT_DEGREE)
        if degrees is None:
            return torch.ones(len(sequences), dtype=torch.bool)
        return self.parallel.context_rank % degrees == 0

    def named_weights(
        self,
        dtype: torch.dtype | None = None,
        keeper: int | None = None,
        *,
        frozen_tower: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights under the names and in the shapes of the model's files, on `device`.
        Collective.

        dtype: None keeps the parameters'. keeper: only rank that gets them, or None for all. frozen_tower:
        also a frozen vision tower's. `lm_head.weight` is included even if tied: vLLM keeps a packed copy of
        the output layer.
        """
        reshard(self.module)
        return self.checkpoint_weights.convert(
            self._sent_conversions(frozen_tower), dtype, keeper
        )

    def weights_metadata(
        self, dtype: torch.dtype | None = None, *, frozen_tower: bool = False
    ) -> dict[str, Tensor]:
        """Return `named_weights` in order as meta tensors. Not collective."""
        return self.checkpoint_weights.metadata(self._sent_conversions(frozen_tower), dtype)

    def _sent_conversions(self, frozen_tower: bool) -> list[Conversion]:
        weights = self.checkpoint_weights
        return [*weights.plan.values()] if frozen_tower else weights.updated

    def _shards(self) -> dict[str, Shard]:
        if self.has_adapters:
            return merged_shards(self.module.model, self.device)
        # A state dict lists tied weights under both names, unlike named_parameters.
        return {
            name: Shard.of(weight)
            for name, weight in self.module.model.state_dict().items()
        }

    def save_pretrained(self, path: str | Path, file_bytes: int = FILE_BYTES) -> None:
        """Write the model in Hugging Face format, in its files' dtype, with the source's other files.
        Collective.

        Ranks share the writing and return when the folder is complete. An existing folder is replaced. Raises
        OutputError if a rank cannot write.
        """
        reshard(self.module)
        source = self.model_config.path
        write_model(
            self.checkpoint_weights,
            source,
            Path(path),
            self.stored_dtype,
            file_bytes,
            chat_template=self.chat_template,
        )

    def output_layer(self) -> WholeLayer:
        """Return the whole output layer, on the host of every rank. Collective."""
        self._check_head("lm")
        reshard(self.module)
        weights = self.checkpoint_weights
        weight, bias = (
            as_numpy(weights.whole(name, self.dtype)) if weights.has(name) else None
            for name in (f"{self._output_name}.weight", f"{self._output_name}.bias")
        )
        return WholeLayer(
            weight, bias, self.module.softcap, self.module.logit_factor, self.dtype
        )

    def save_adapters(self, path: str | Path) -> None:
        """Write only the adapters, in peft's format. Collective. Raises OutputError, on every rank, if rank 0
        cannot write.
        """
        weights = self._adapter_weights("save adapters")
        write_folder(
            Path(path), lambda folder: write_adapters(self.module.model, weights, folder)
        )

    def adapter_files(self) -> dict[str, np.ndarray]:
        """Return the files of `save_adapters` by name, uint8 [bytes], empty except on rank 0. Collective."""
        weights = self._adapter_weights("give adapters to engines")
        return {} if dist.get_rank() else adapter_files(self.module.model, weights)

    def _adapter_weights(self, action: str) -> dict[str, Tensor]:
        """Return whole A and B by peft's names, on the host of the ranks at place zero."""
        self._check_adapters(action)
        reshard(self.module)
        every = adapter_weights(self.module.model, self.device)
        keep = self.parallel.is_place_zero
        parts = self.stage.of_all({name: weight.cpu() for name, weight in every if keep})
        return {name: weight for part in parts for name, weight in part.items()}

    def _check_adapters(self, action: str) -> None:
        if not self.has_adapters:
            raise ConfigError(
                f"an engine without adapters cannot {action}. Set model.lora.rank."
            )

    def _before_backward(self, part: Part, last: bool) -> None:
        settings = self.parallel.config
        layers = self.module.layers_of(part)
        prepare_backward(
            self.module,
            layers,
            last,
            reshard_after_forward=self.reshard_after_forward,
            config=settings,
        )

    def _check_head(self, head: str) -> None:
        if self.head != head:
            raise ConfigError(
                f"this engine has head={self.head!r}, and log_probs need 'lm', values 'value'"
            )
