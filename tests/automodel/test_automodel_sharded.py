"""AutoModel's FSDP2 sharding of the model, over two gloo processes: frozen when sharded, trained afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "nemo_automodel", reason="nemo-automodel 0.7.0 is not installed: pip install 'nemo-v4-indexer[automodel]'"
)

RANKS = 2
WORKER = """
import sys
import torch
import torch.distributed as dist
from nemo_automodel._transformers.infrastructure import apply_model_infrastructure
from nemo_automodel.components.models.deepseek_v4.fsdp import fully_shard_deepseek_v4
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tiny_v4 import build, tokens
from nemo_v4_indexer.integrations.automodel import AdamW, indexer_metrics
from nemo_v4_indexer.weights import export_indexer_weights

torch.set_num_threads(1)
dtype = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def prepared():
    return apply_model_infrastructure(build(dtype=dtype), is_meta_device=False, device=torch.device("cpu"))


def backward(model, ids):
    (0.0 * model(input_ids=ids).logits.float().sum()).backward()
    return {n: p.grad for n, p in model.named_parameters() if ".compressor.indexer." in n}


model = prepared()
mesh, policy = init_device_mesh("cpu", (size,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
for module in [*model.model.layers.values(), *model.mtp.layers, model]:
    fully_shard_deepseek_v4(module, mesh, policy)
(optimizer,) = AdamW(lr=2e-2, log_every=0).build(model)
shards = backward(model, tokens(seed=rank))
shards = {name: gradient.full_tensor() for name, gradient in shards.items()}
assert indexer_metrics(model)["indexer_loss"] > 0

whole = prepared()
AdamW(lr=1e-3, log_every=0).build(whole)
mean = {}
for other in range(size):
    whole.zero_grad()
    for name, gradient in backward(whole, tokens(seed=other)).items():
        mean[name] = mean.get(name, 0) + gradient / size
assert shards.keys() == mean.keys()
for name, expected in mean.items():
    assert expected.norm() > 1e-6, name
    error = ((shards[name] - expected).norm() / expected.norm()).item()
    assert error < (1e-4 if dtype == "float32" else 5e-2), (name, error)

before = export_indexer_weights(model)
optimizer.step()
after = export_indexer_weights(model)
assert all(not torch.equal(before[name], after[name]) for name in before)
dist.barrier()
dist.destroy_process_group()
print("sharded ok")
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_gradients_are_the_mean_over_ranks(tmp_path, dtype):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run([*command, str(script), dtype], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sharded ok") == RANKS
