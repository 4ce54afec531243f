"""The engine's side of `ipc` and `nccl`: vLLM's own engines, made to refuse an update that omits a parameter."""

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from workers.rollout.complete_update import CompleteUpdate


class CompleteNCCLWeightTransferEngine(CompleteUpdate, NCCLWeightTransferEngine):
    """All weights in one call, broadcast by policy rank zero."""


class CompleteIPCWeightTransferEngine(CompleteUpdate, IPCWeightTransferEngine):
    """A call for each buffer of weights."""

    at_once = False
