"""The pretraining recipes: each resolves, restricts what it selects, divides over its ranks; the stages follow."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from mocked_parallel import single_process

import nemo_v4_indexer
from nemo_v4_indexer.integrations.megatron import V4TransformerConfig, v4_layer_spec
from nemo_v4_indexer.training import checkpoint, options
from nemo_v4_indexer.training.cli import run
from nemo_v4_indexer.training.config import PretrainConfig
from nemo_v4_indexer.training.world import Launch

FOLDER = Path(nemo_v4_indexer.__file__).parent / "configs"
RECIPES = sorted(path.stem for path in FOLDER.glob("pretrain_*.yaml"))
SHAPES = {"v4_flash": 43, "v4_pro": 61, "v32": 61, "v32_warmup": 61, "glm5": 78, "glm5_warmup": 78}
SHAPES |= {"v4_4layer": 4, "v4_4layer_megatron": 4}
KERNEL_HEADS = (8, 16, 32, 64, 128)


def job(capsys, *arguments):
    assert run([*arguments, "--cfg", "job"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_every_model_has_a_recipe():
    assert set(RECIPES) == {"pretrain_tiny", *(f"pretrain_{name}" for name in SHAPES)}


@pytest.mark.parametrize("name", RECIPES)
def test_cfg_job_resolves(capsys, name):
    values = job(capsys, "--config-name", name)
    assert "${" not in yaml.safe_dump(values) and values["output_dir"] == f"outputs/{name}"
    config = PretrainConfig.from_dict(values)
    assert config.indexer.num_layers == SHAPES.get(name.removeprefix("pretrain_"), 4)
    assert config.indexer.warnings_for(config.data.sequence_length) == []
    tensor = config.parallel.tensor
    for size in (config.attention.n_heads, config.attention.o_groups, config.model.ffn_hidden_size, 256):
        assert size % tensor == 0
    assert config.train.batch_size % (16 // tensor if tensor > 1 else 8) == 0 or name == "pretrain_tiny"
    assert config.model.num_mtp_layers == 0  # the embedded engine refuses others
    if config.device == "cuda":
        assert config.indexer.n_heads in KERNEL_HEADS and config.indexer.head_dim == 128
        assert max(layer.topk for layer in config.indexer.plan()) <= 4096


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_accepts_the_shapes(capsys, name):
    config = PretrainConfig.from_dict(job(capsys, "--config-name", name))
    sizes = dict(num_layers=config.model.num_layers, hidden_size=config.model.hidden_size)
    sizes |= dict(num_attention_heads=config.attention.n_heads, kv_channels=config.attention.head_dim)
    megatron = V4TransformerConfig(v4_indexer=config.indexer, v4_attention=config.attention, **sizes)
    with single_process():
        assert len(v4_layer_spec(megatron).layer_specs) == config.model.num_layers


ON_MEGATRON = [(name, ()) for name in RECIPES if name != "pretrain_v4_4layer"]
WITHIN_NODES = ("parallel.tensor=8", "parallel.pipeline=2", "megatron.decoder_last_pipeline_num_layers=30")
ON_MEGATRON += [("pretrain_v4_pro", WITHIN_NODES), ("pretrain_v32", WITHIN_NODES)]
ON_MEGATRON += [("pretrain_v4_flash", ("model.num_mtp_layers=1", "indexer.compress_ratio.mtp=[0]"))]


@pytest.mark.parametrize(("name", "more"), ON_MEGATRON)
@pytest.mark.parametrize("replicas", [1, 2])
def test_megatron_accepts_the_options(capsys, monkeypatch, tmp_path, name, more, replicas):
    """On the processes that the recipe's division needs, and on twice as many."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0))
    config = PretrainConfig.from_dict(job(capsys, "--config-name", name, *more))
    assert config.engine in ("auto", "megatron")
    parallel = config.parallel
    size = parallel.tensor * parallel.context * parallel.pipeline
    place = Launch(0, size * replicas, 0, min(size * replicas, 8), False)
    args = options.parse(options.options_of(config, place, tmp_path, False), place)
    assert args.data_parallel_size == replicas and args.params_dtype == torch.bfloat16
    assert (args.num_layers, args.mtp_num_layers) == (config.model.num_layers, config.indexer.num_mtp_layers or None)
    assert args.train_iters == config.train.steps and args.save_retain_interval is None


@pytest.mark.parametrize("name", ["v32", "glm5"])
def test_stages_lead_into_each_other(capsys, name):
    """Settings that the second and the third run share are equal; the dense run has no indexer."""
    warmup = PretrainConfig.from_dict(job(capsys, "--config-name", f"pretrain_{name}_warmup"))
    sparse = PretrainConfig.from_dict(job(capsys, "--config-name", f"pretrain_{name}"))
    assert warmup.train.freeze_main and not sparse.train.freeze_main
    assert warmup.indexer.loss.warmup_steps == warmup.train.steps and sparse.indexer.loss.warmup_steps == 0
    assert sparse.train.init_from == warmup.output_dir and warmup.model == sparse.model
    dense = job(capsys, "--config-name", f"pretrain_{name}", "indexer.heavy_ratio=1", "train.init_from=null")
    assert not any(layer.has_indexer for layer in PretrainConfig.from_dict(dense).indexer.plan())


def weights(folder):
    shard = torch.load(checkpoint.newest(folder / "checkpoints") / "shard_0000.pt", weights_only=True)
    return {key: data for key, _, _, data in shard["pieces"] if not key.startswith("optimizer.")}


def test_the_three_runs_of_v32_on_a_small_model(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {n} of a small book, {n * n}.\n" for n in range(400)))
    small = (
        "model.hidden_size=32", "model.num_layers=2", "model.ffn_hidden_size=64", "model.attention.n_heads=4",
        "model.attention.head_dim=16", "model.attention.q_lora_rank=16", "model.attention.o_lora_rank=16",
        "model.attention.o_groups=2", "model.attention.rope_dim=8", "indexer.n_heads=4", "indexer.head_dim=16",
        "indexer.rope.dim=8", "indexer.topk=8", "data=text_file", f"data.path={text}", "data.sequence_length=32",
        "parallel.tensor=1", "parallel.sequence=false", "device=cpu", "train.batch_size=2", "train.steps=2",
        "train.lr_warmup_steps=0", "train.eval_batches=0", "train.threads=1",
    )  # fmt: skip

    def stage(name, output, *more):
        where = f"output_dir={tmp_path / output}"
        assert run(["--config-name", f"pretrain_{name}", *small, where, *more]) == 0
        return weights(tmp_path / output)

    dense = stage("v32", "dense", "indexer.heavy_ratio=1", "train.init_from=null", "train.lr=2e-4", "train.min_lr=2e-5")
    warm = stage("v32_warmup", "warmup", f"train.init_from={tmp_path / 'dense'}")
    sparse = stage("v32", "sparse", f"train.init_from={tmp_path / 'warmup'}")
    assert all(torch.equal(dense[key], warm[key]) for key in dense)
    indexers = warm.keys() - dense.keys()
    assert indexers and all(".indexer." in key for key in indexers)
    assert any(not torch.equal(warm[key], sparse[key]) for key in dense)
    assert any(not torch.equal(warm[key], sparse[key]) for key in indexers)
