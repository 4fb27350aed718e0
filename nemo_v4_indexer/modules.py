"""Small Megatron modules that the indexer and its attention are built of.

S tokens, B batch.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from nemo_v4_indexer.ops.split_linear import split_linear


def mark_replicated(module, sequence_parallel, average):
    """Tell Megatron's finalize step how to sync the module's gradients over the tensor parallel group.

    sequence_parallel: every rank saw its own rows only, under sequence parallelism: sum.
    average: the gradients of the ranks are to be averaged.
    """
    for parameter in module.parameters():
        parameter.sequence_parallel = sequence_parallel
        parameter.average_gradients_across_tp_domain = average


class Float32Module(MegatronModule):
    """Keeps its own parameters and its submodules' at fp32 (or fp64) when the model around it is cast lower."""

    def _apply(self, fn, recurse=True):
        def keep(tensor):
            out = fn(tensor)
            lowered = out.is_floating_point() and out.dtype not in (torch.float32, torch.float64)
            return tensor.to(out.device) if lowered else out

        return super()._apply(keep, recurse)


class RMSNorm(MegatronModule):
    """Root mean square norm over the last dim, in fp32; allowed under sequence parallelism, unlike torch's wrapper.

    Built as Megatron builds norms: (config, hidden_size, eps).
    """

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(config)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class ReplicatedLinear(MegatronModule):
    """x @ weight.T without bias, the same on every tensor parallel rank, in x's dtype."""

    def __init__(self, config, input_size, output_size):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Float32Linear(Float32Module, ReplicatedLinear):
    """`ReplicatedLinear` whose weight and product are fp32 whatever x is; of bf16 x on a GPU by `split_linear`."""

    def forward(self, x):
        if x.is_cuda and x.dtype == torch.bfloat16 and self.weight.dtype == torch.float32:
            return split_linear(x, self.weight)
        return F.linear(x.to(self.weight.dtype), self.weight)
