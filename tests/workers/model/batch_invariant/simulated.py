"""An update of a training engine with `model.batch_invariant` on the simulated GPU: which operators it calls."""

from collections import Counter
from collections.abc import Iterable

from workers.config.model import ModelConfig
from workers.config.roles import LossConfig, OptimizerConfig
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss
from workers.model.memory import memory_trace
from workers.model.memory.fake_gpu import DEVICE, FakeGpu, fake_gpus

LAYERS = 2
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 150,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}


def count_operators(checkpointing: str) -> Counter[str]:
    calls: Counter[str] = Counter()
    plain = FakeGpu.__torch_dispatch__

    def dispatch(mode, operator, types, args=(), kwargs=None):
        calls[operator._schema.name] += 1
        return plain(mode, operator, types, args, kwargs)

    with memory_trace._folder(QWEN3, LAYERS) as path:
        model = ModelConfig(
            path=path,
            dtype="bfloat16",
            batch_invariant=True,
            gradient_checkpointing=checkpointing,
        )
        engine = TrainingEngine(
            model, optimizer=OptimizerConfig(), total_steps=1, device=f"{DEVICE}:0"
        )
    sequences, cuts = memory_trace.full_micro_batches(
        128, 64, engine.vocabulary, 1, padded=False
    )
    FakeGpu.__torch_dispatch__ = dispatch
    loss = make_policy_loss(LossConfig())
    engine.forward_backward(sequences, cuts, loss, Denominators.of(sequences))
    FakeGpu.__torch_dispatch__ = plain
    return calls


def count_by_mode(modes: Iterable[str]) -> dict[str, Counter[str]]:
    """Return calls of operators by value of `model.gradient_checkpointing`. Run it in a process of its own."""
    with fake_gpus(1):
        return {mode: count_operators(mode) for mode in modes}
