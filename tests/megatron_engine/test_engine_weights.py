"""Starting from, or going on from, a Megatron checkpoint that lacks weights of the model."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
from nemo_v4_indexer.integrations import megatron as host
from nemo_v4_indexer.training import megatron_checkpoint
from nemo_v4_indexer.training.cpu_host import megatron_on
from nemo_v4_indexer.training.errors import UsageError


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # saving waits for the GPU
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    indexer = IndexerConfig.from_dict(
        dict(num_layers=2, compress_ratio=[0, 4], topk=3, n_heads=4, head_dim=16, window=8, rope=dict(dim=8))
    )
    attention = AttentionConfig(n_heads=4, head_dim=16, q_lora_rank=16, o_groups=2, o_lora_rank=16, rope_dim=8)

    def model(seed):
        sizes = dict(hidden_size=32, num_layers=2, ffn_hidden_size=64)
        return host.build_gpt_model(sizes, attention, indexer, vocab_size=64, sequence_length=32, seed=seed)

    with megatron_on(torch.device("cpu")):
        yield model
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def save(model, folder, without):
    tree = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    path = folder / "checkpoints" / "iter_0000007"
    path.mkdir(parents=True)
    dist_checkpointing.save({name: entry for name, entry in tree.items() if without not in name}, str(path))
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    return path


def test_a_dense_checkpoint_starts_a_run_but_does_not_continue_one(build, tmp_path):
    dense, model = build(1), build(2)
    path = save(dense, tmp_path, ".indexer.")
    fresh = {name: value.detach().clone() for name, value in model.named_parameters() if ".indexer." in name}
    assert len(fresh) > 4
    source, new = megatron_checkpoint.load_weights(tmp_path, model)
    assert source == path and len(new) == len(fresh) and all(".layers.1." in name for name in new)
    for name, value in model.named_parameters():
        assert torch.equal(value, fresh.get(name, dense.get_parameter(name))), name
    with pytest.raises(UsageError, match=r"lacks \d+ weights of this model.*train.init_from"):
        megatron_checkpoint.check_complete(path, model)


def test_other_missing_weights_are_refused(build, tmp_path):
    model = build(1)
    save(model, tmp_path, ".wq_a.")
    with pytest.raises(
        UsageError, match=r"lacks 2 weights of this model, such as decoder.layers.0.self_attention.wq_a"
    ):
        megatron_checkpoint.load_weights(tmp_path, model)


def test_a_folder_without_checkpoints_is_refused(build, tmp_path):
    with pytest.raises(UsageError, match=r"train.init_from=.* is neither a Megatron checkpoint nor a folder"):
        megatron_checkpoint.load_weights(tmp_path, build(1))
