"""Indexer weights to and from Hugging Face names and safetensors files."""

import json
import logging

import pytest
import torch
from mocked_parallel import (
    HIDDEN,
    Q_LORA,
    ROPE,
    attention_config,
    groups,
    inputs,
    randomize,
    transformer_config,
)
from safetensors.torch import save_file

from nemo_v4_indexer import rotary, weights_files
from nemo_v4_indexer.attention import V4SelfAttention
from nemo_v4_indexer.config import IndexerConfig
from nemo_v4_indexer.layer import V4Indexer
from nemo_v4_indexer.weights import export_indexer_weights, load_indexer_weights, save_indexer_weights

V4_NAMES = {
    "wq_b.weight", "weights_proj.weight", "compressor.wkv.weight", "compressor.wgate.weight", "compressor.ape",
    "compressor.norm.weight",
}  # fmt: skip
V32_NAMES = {"wq_b.weight", "weights_proj.weight", "wk.weight", "k_norm.weight", "k_norm.bias"}
SETTINGS = dict(topk=3, n_heads=4, head_dim=16, heavy_ratio=16, window=5, rope=ROPE, backend="reference")


def plan(ratios, mtp=0):
    return IndexerConfig(num_layers=len(ratios) - mtp, num_mtp_layers=mtp, compress_ratio=ratios, **SETTINGS)


def build(ratios, seed=0, mtp=0):
    """The indexers of a model with these ratios."""
    config = transformer_config(num_layers=len(ratios) - mtp)
    common = dict(q_lora_rank=Q_LORA, pg_collection=groups())
    layers = [layer for layer in plan(ratios, mtp).plan() if layer.has_indexer]
    made = [V4Indexer(config, None, layer.layer_number, layer=layer, **common) for layer in layers]
    return randomize(torch.nn.ModuleList(made), seed)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_names_follow_the_public_checkpoints():
    tensors = export_indexer_weights(build([0, 4, 16, 2, 4], mtp=1))
    expected = {f"{layer}.attn.indexer.{name}" for layer in ("layers.1", "layers.3", "mtp.0") for name in V4_NAMES}
    assert set(tensors) == expected
    assert tensors["layers.1.attn.indexer.compressor.ape"].shape == (4, 32)
    assert tensors["layers.1.attn.indexer.wq_b.weight"].shape == (64, Q_LORA)
    assert tensors["layers.3.attn.indexer.compressor.wkv.weight"].shape == (32, HIDDEN)
    v32 = export_indexer_weights(build([1, 1]))
    assert set(v32) == {f"model.layers.{n}.self_attn.indexer.{name}" for n in (0, 1) for name in V32_NAMES}
    assert set(export_indexer_weights(build([1]), layout="v4")) == {f"layers.0.attn.indexer.{n}" for n in V32_NAMES}


@pytest.mark.parametrize("ratios", [[0, 4, 16, 2], [1, 1]])
@pytest.mark.parametrize("target", ["mapping", "file", "folder", "sharded", "index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bitwise(tmp_path, ratios, target, dtype):
    ours, other = build(ratios).to(dtype), build(ratios, seed=1).to(dtype)
    assert not same(ours, other)
    if target == "mapping":
        source = export_indexer_weights(ours)
    else:
        source = tmp_path / ("part.safetensors" if target == "file" else "folder")
        shard = 2000 if target in ("sharded", "index") else None
        files = save_indexer_weights(ours, source, max_shard_bytes=shard)
        assert len(files) == 1 if shard is None else len(files) > 3
        source = files[-1] if target == "index" else source
    names = load_indexer_weights(other, source)
    assert same(ours, other)
    again = export_indexer_weights(other)
    assert sorted(again) == names
    assert all(torch.equal(tensor, again[name]) for name, tensor in export_indexer_weights(ours).items())


def test_export_copies():
    model = build([4])
    tensors = export_indexer_weights(model)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        model[0].wq_b.weight.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: f"model.language_model.{name}".replace(".attn.", ".self_attn."),
        lambda name: (
            "model."
            + name.replace(".attn.indexer.", ".self_attn.compressor.indexer.")
            .replace("compressor.ape", "ape_param.weight")
            .replace("indexer.compressor.norm", "indexer.kv_norm")
            .replace("indexer.compressor.w", "indexer.w")
        ),
    ],
)
def test_other_spellings_are_read(rename):
    ours, other = build([0, 4, 4]), build([0, 4, 4], seed=1)
    renamed = {rename(name): tensor for name, tensor in export_indexer_weights(ours).items()}
    renamed["model.layers.1.self_attn.wq_b.weight"] = torch.zeros(3)  # the main attention's: not ours to judge
    renamed["model.layers.1.self_attn.compressor.wkv.weight"] = torch.zeros(3)
    load_indexer_weights(other, renamed)
    assert same(ours, other)


def test_every_problem_is_named_and_nothing_is_written():
    model = build([0, 4, 4], seed=1)
    before = [p.clone() for p in model.parameters()]
    tensors = export_indexer_weights(build([0, 4, 4]))
    del tensors["layers.1.attn.indexer.compressor.ape"]
    tensors["layers.2.attn.indexer.wq_b.weight"] = torch.zeros(64, Q_LORA + 1)
    tensors["layers.2.attn.indexer.wq_b.bias"] = torch.zeros(64)
    tensors["layers.7.attn.indexer.wq_b.weight"] = torch.zeros(64, Q_LORA)
    tensors["model.layers.1.self_attn.indexer.weights_proj.weight"] = torch.zeros(4, HIDDEN)
    with pytest.raises(ValueError) as caught:
        load_indexer_weights(model, tensors)
    text = str(caught.value)
    for part in (
        "layers.1.attn.indexer.compressor.ape is missing",
        f"layers.2.attn.indexer.wq_b.weight has shape (64, {Q_LORA + 1}), expected (64, {Q_LORA})",
        "layers.2.attn.indexer.wq_b.bias is extra",
        "layers.7.attn.indexer.wq_b.weight is extra",
        "both name indexer.weights_proj.weight of layer 2",
    ):
        assert part in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_lenient_loading():
    tensors = export_indexer_weights(build([4, 4, 4]))
    stage = build([4, 4])
    with pytest.raises(ValueError, match=r"layers\.2\.attn\.indexer\.wq_b\.weight is extra"):
        load_indexer_weights(stage, tensors)
    assert len(load_indexer_weights(stage, tensors, other_layers=True)) == 2 * len(V4_NAMES)
    tensors["layers.0.attn.indexer.stray"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.indexer\.stray is extra"):
        load_indexer_weights(stage, tensors, other_layers=True)
    part = {name: tensor for name, tensor in tensors.items() if "wq_b" in name}
    assert len(load_indexer_weights(stage, part, strict=False)) == 2
    part = {name: tensor[:1] for name, tensor in part.items()}
    with pytest.raises(ValueError, match=r"has shape \(1, 24\), expected \(64, 24\)"):
        load_indexer_weights(stage, part, strict=False)


def glm_products(tensors, x, qr):
    """q . k [S, S, H] as GLM-5 computes them: LayerNorm keys, the pairs (2i, 2i + 1) of the first channels turned."""
    layer, dim = plan([1]).layer(1), ROPE["dim"]
    wq_b, wk, gain, bias = (
        tensors[f"model.layers.0.self_attn.indexer.{name}"]
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    )
    q = (qr @ wq_b.T).unflatten(-1, (layer.n_heads, layer.head_dim))
    k = torch.nn.functional.layer_norm(x @ wk.T, (layer.head_dim,), gain, bias, 1e-6)[..., None, :]
    table = rotary.rotary_table(torch.arange(len(x)), layer.rope)
    # the rotation acts on the last channels: bring the first ones there
    q, k = (rotary.rotate_interleaved(t.roll(-dim, dims=-1), table) for t in (q, k))
    return torch.einsum("sbhd,tbd->sth", q, k[:, :, 0])


def test_interleaved_checkpoints_score_the_same():
    ours, glm = build([1]), build([1], seed=1)
    interleaved, plain = export_indexer_weights(ours, pairing="interleaved"), export_indexer_weights(ours)
    weight = "model.layers.0.self_attn.indexer.weights_proj.weight"
    assert torch.equal(interleaved[weight], plain[weight])
    x, qr = inputs(20, batch=1), inputs(20, Q_LORA, batch=1)
    q, k, _ = ours[0].forward_before_topk(x, qr)
    products = torch.einsum("sbhd,tbd->sth", q, k)
    torch.testing.assert_close(glm_products(interleaved, x, qr), products, rtol=1e-4, atol=1e-4)
    assert (glm_products(plain, x, qr) - products).abs().max() > 0.1  # the other pairing is another indexer
    load_indexer_weights(glm, interleaved, pairing="interleaved")
    assert same(ours, glm)
    load_indexer_weights(glm, interleaved)
    assert not same(ours, glm)


def test_fp8_weights_are_dequantized(tmp_path):
    model = build([4])
    tensors = export_indexer_weights(model)
    name = "layers.0.attn.indexer.wq_b.weight"
    quantized = (tensors[name] / 0.25).to(torch.float8_e4m3fn)
    for scale_name in ("layers.0.attn.indexer.wq_b.scale", f"{name}_scale_inv"):
        fp8 = tensors | {name: quantized, scale_name: torch.full((1, 1), 0.25)}
        save_file(fp8, tmp_path / "fp8.safetensors")
        load_indexer_weights(model, tmp_path / "fp8.safetensors")
        assert torch.equal(model[0].wq_b.weight, quantized.float() * 0.25)
    with pytest.raises(ValueError, match=r"wq_b\.weight is fp8 and its scale layers\.0\.attn\.indexer\.wq_b\.scale is"):
        load_indexer_weights(model, tensors | {name: quantized})
    bad = tensors | {name: quantized, "layers.0.attn.indexer.wq_b.scale": torch.ones(2, 1)}
    with pytest.raises(ValueError, match=r"wq_b\.scale has shape \(2, 1\), expected \(1, 1\)"):
        load_indexer_weights(model, bad)


def test_blocks_of_fp8_scales():
    weight = torch.ones(130, 260).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).view(2, 3)
    with weights_files.open_tensors({"a.weight": weight, "a.scale": scale}) as tensors:
        value = tensors.dequantized("a.weight")
    assert value.shape == (130, 260)
    assert [value[i, j].item() for i, j in ((127, 127), (127, 128), (128, 255), (129, 259))] == [1, 2, 5, 6]


def test_rounding_to_the_model_dtype_is_said(caplog):
    model = build([4]).to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        load_indexer_weights(model, export_indexer_weights(build([4])))
    assert "1 indexer tensors were rounded" in caplog.text  # wq_b; the rest stays fp32
    assert "layers.0.attn.indexer.wq_b.weight" in caplog.text


def test_main_attention_compressor():
    def attention(seed):
        config = plan([4])
        made = V4SelfAttention(
            transformer_config(), None, 1, layer=config.layer(1), attention=attention_config(), pg_collection=groups()
        )
        return randomize(made, seed)

    ours, other = attention(0), attention(1)
    tensors = export_indexer_weights(ours, attention_compressor=True)
    own = {name for name in tensors if ".indexer." not in name}
    assert own == {f"layers.0.attn.compressor.{n}" for n in ("wkv.weight", "wgate.weight", "ape", "norm.weight")}
    load_indexer_weights(other, tensors, attention_compressor=True)
    assert same(ours.compressor, other.compressor) and same(ours.indexer, other.indexer)
    assert not same(ours.wkv, other.wkv)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.compressor\.ape is missing"):
        load_indexer_weights(other, export_indexer_weights(ours), attention_compressor=True)


def test_reads_only_what_it_needs(tmp_path, monkeypatch):
    save_indexer_weights(build([4]), tmp_path)
    index = {f"layers.0.attn.indexer.{name}": "model.safetensors" for name in V4_NAMES}
    index["embed.weight"] = "absent.safetensors"
    (tmp_path / weights_files.INDEX).write_text(json.dumps({"weight_map": index}))
    load_indexer_weights(build([4]), tmp_path)
    index["layers.0.attn.indexer.wq_b.weight"] = "absent.safetensors"
    (tmp_path / weights_files.INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load_indexer_weights(build([4]), tmp_path)


def test_bad_arguments(tmp_path):
    model = build([4])
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_indexer_weights(model, tmp_path)
    with pytest.raises(TypeError, match="mapping or a path, got int"):
        load_indexer_weights(model, 3)
    with pytest.raises(ValueError, match="pairing must be one of half_split, interleaved, got 'neox'"):
        load_indexer_weights(model, {}, pairing="neox")
    with pytest.raises(ValueError, match="layout must be one of v4, v32, got 'hf'"):
        export_indexer_weights(model, layout="hf")
    with pytest.raises(ValueError, match="holds no indexer"):
        export_indexer_weights(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_shard_bytes needs a folder"):
        save_indexer_weights(model, tmp_path / "a.safetensors", max_shard_bytes=1)
    (tmp_path / weights_files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        load_indexer_weights(model, tmp_path)
    with pytest.raises(ValueError, match="two indexers have layer number 1"):
        export_indexer_weights([model, build([4])])
