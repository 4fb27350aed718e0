"""Window, compressed entries and sink in one softmax, against a dense softmax in fp64."""

import math

import naive
import pytest
import torch
from largest import Largest

from nemo_v4_indexer.ops.sparse_attention import Entries, attention_mass, sparse_attention

B, N, C, SCALE = 2, 3, 8, 0.4


def problem(rows, ratio, topk, dtype=torch.float32, seed=0):
    """Leaves q, kv, latent, sink; entries (topk None: everything visible); and the mask [B, S, G] they stand for."""
    generator = torch.Generator().manual_seed(seed)
    groups = rows // ratio
    shapes = (rows, B, N, C), (rows, B, C), (groups, B, C), (N,)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    pairs = naive.limits(rows, ratio, groups, B)
    limits = naive.limit_tensors(pairs)
    seen = torch.tensor([[[s <= g < e for g in range(groups)] for s, e in row] for row in pairs], dtype=torch.bool)
    seen = seen.view(B, rows, groups)
    indices = None
    if topk is not None:
        indices = naive.select(torch.randn(B, rows, groups, generator=generator), pairs, topk)
        picked = torch.zeros(B, rows, groups + 1, dtype=torch.bool)
        seen = picked.scatter(-1, torch.where(indices < 0, groups, indices).long(), True)[..., :groups]
        indices = indices[..., torch.randperm(topk, generator=generator)]  # order and place of empty slots are free
    return tensors, Entries(tensors[2], indices, *limits), seen


def run(tensors, entries, window, **options):
    q, kv, _, sink = tensors
    return sparse_attention(q, kv, entries, sink, window=window, scale=SCALE, **options)


CASES = [(1, 4, 2), (3, 4, 2), (21, 4, 2), (21, 4, 9), (21, 4, None), (13, 1, 3), (23, 7, None)]


@pytest.mark.parametrize(("rows", "ratio", "topk"), CASES)
@pytest.mark.parametrize("window", [1, 5, 64])
def test_output_and_every_gradient_match_a_dense_softmax(rows, ratio, topk, window):
    tensors, entries, seen = problem(rows, ratio, topk)
    out, denominator, _ = run(tensors, entries, window)
    oracles = [t.detach().double().requires_grad_() for t in tensors]
    expected, _, log_sum = naive.attention(oracles[0], oracles[1], oracles[2], seen, oracles[3], window, SCALE)
    naive.assert_close(out, expected, 1e-6)
    torch.testing.assert_close(denominator, log_sum.float())
    assert denominator.dtype == torch.float32 and not denominator.requires_grad
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(out, tensors, grad)
    wanted = torch.autograd.grad(expected, oracles, grad.double())
    for name, actual, oracle in zip(("q", "kv", "latent", "sink"), got, wanted, strict=True):
        assert actual.shape == oracle.shape and actual.isfinite().all(), name
        torch.testing.assert_close(actual.double(), oracle, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"d{n}: {m}")
    for oracle, name in zip(wanted, ("q", "kv", "latent"), strict=False):
        assert oracle.numel() == 0 or not seen.any() or oracle.abs().max() > 1e-2, f"d{name} is vacuous"


def test_without_a_window_only_entries_and_sink_share_the_weight():
    tensors, entries, seen = problem(13, 1, 4)
    q, kv, latent, sink = tensors
    out = run(tensors, entries, 0).out
    expected, _, _ = naive.attention(q, kv, latent, seen, sink, 0, SCALE)
    naive.assert_close(out, expected, 1e-6)
    out.square().sum().backward()
    assert kv.grad is None and latent.grad.abs().max() > 1e-2


def test_the_window_alone():
    (q, kv, latent, sink), _, _ = problem(21, 4, 2)
    out, *_ = sparse_attention(q, kv, None, sink, window=5, scale=SCALE)
    nothing = torch.zeros(B, 21, 5, dtype=torch.bool)
    naive.assert_close(out, naive.attention(q, kv, latent, nothing, sink, 5, SCALE)[0], 1e-6)


def test_the_sink_takes_weight_and_gives_nothing():
    tensors, entries, _ = problem(21, 4, 2)
    q, kv, latent, sink = (t.detach() for t in tensors)
    entries = entries._replace(latent=latent)
    small = run((q, kv, latent, sink), entries, 5).out
    large = run((q, kv, latent, sink + 30), entries, 5).out
    assert small.abs().max() > 0.1 and large.abs().max() < 1e-6
    only_first = sink + torch.tensor([30.0, 0, 0])
    mixed = run((q, kv, latent, only_first), entries, 5).out
    torch.testing.assert_close(mixed[:, :, 1:], small[:, :, 1:])


@pytest.mark.parametrize(("rows", "ratio", "topk"), [(21, 4, 2), (21, 4, None), (40, 1, 3)])
@pytest.mark.parametrize("window", [0, 3, 64])
@pytest.mark.parametrize("workspace", [1, 20_000, 60_000])
def test_chunked_equals_unchunked_in_output_and_every_gradient(rows, ratio, topk, window, workspace):
    results = []
    for options in ({}, {"workspace_bytes": workspace}):
        tensors, entries, _ = problem(rows, ratio, topk)
        out, denominator, _ = run(tensors, entries, window, **options)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(out, tensors, grad, materialize_grads=True)
        results.append((out, denominator, *gradients))
    names = ("out", "denominator", "dq", "dkv", "dlatent", "dsink")
    for name, whole, parts in zip(names, *results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert results[0][4].abs().max() > 1e-2


@pytest.mark.parametrize("topk", [2, None])
@pytest.mark.parametrize("workspace", [1, 256 * 2**20])
def test_a_sequence_shorter_than_the_ratio_attends_to_its_window(topk, workspace):
    tensors, entries, seen = problem(3, 4, topk)
    q, kv, latent, sink = tensors
    out, denominator, _ = run(tensors, entries, 2, workspace_bytes=workspace)
    naive.assert_close(out, naive.attention(q, kv, latent, seen, sink, 2, SCALE)[0], 1e-6)
    gradients = torch.autograd.grad(out.sum(), tensors)  # also of the latent, of which there is none
    assert gradients[2].shape == (0, B, C) and gradients[1].any()
    mass = attention_mass(q, denominator, entries, SCALE)
    assert mass.shape == (B, 3, topk or 0) and not mass.any()


def test_no_intermediate_passes_the_workspace():
    """Window alone, S = 1024: whole window logits would take 12 MiB. A long chunk reads many window keys."""
    (q, kv, latent, sink), _, _ = problem(1024, 4, None)
    workspace = 2**19
    with torch.no_grad(), Largest() as largest:
        out, *_ = sparse_attention(q, kv, None, sink, window=16, scale=SCALE, workspace_bytes=workspace)
    nothing = torch.zeros(B, 1024, 256, dtype=torch.bool)
    naive.assert_close(out, naive.attention(q, kv, latent, nothing, sink, 16, SCALE)[0], 1e-6)
    assert workspace / 8 < largest.bytes <= workspace


def test_backward_recomputes_chunks_instead_of_keeping_them():
    tensors, entries, _ = problem(512, 4, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(tensors, entries, 16, workspace_bytes=2**19)
    gathered = B * 512 * 16 * C * 4
    assert max(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor)) < gathered / 4


def test_changing_a_token_changes_nothing_before_it():
    tensors, entries, _ = problem(21, 4, None)
    before = run(tensors, entries, 5).out
    for t in range(21):
        q, kv, latent, sink = (x.detach().clone() for x in tensors)
        q[t], kv[t], latent[t // 4 :] = 9, 9, 9
        after = run((q, kv, latent, sink), entries._replace(latent=latent), 5).out
        assert torch.equal(after[:t], before[:t]) and not torch.equal(after[t], before[t])


@pytest.mark.parametrize("topk", [3, None])
@pytest.mark.parametrize("workspace", [1, 20_000, 256 * 2**20])
def test_mass_is_the_probability_of_entries_under_the_full_denominator(topk, workspace):
    tensors, entries, seen = problem(21, 4, topk)
    q, kv, latent, sink = tensors
    _, denominator, mass = run(tensors, entries, 5, with_mass=True, workspace_bytes=workspace)
    torch.testing.assert_close(mass, attention_mass(q, denominator, entries, SCALE))
    _, p, _ = naive.attention(q, kv, latent, seen, sink, 5, SCALE)
    whole = p.sum(1).detach()
    if topk is None:
        expected = whole
    else:
        expected = whole.gather(-1, entries.indices.clamp(min=0).long()).masked_fill(entries.indices < 0, 0)
    torch.testing.assert_close(mass, expected.float())
    assert mass.dtype == torch.float32 and not mass.requires_grad
    assert not mass[:, :3].any() and (mass[:, 3:].sum(-1) > 0).all()


def test_mass_of_entries_window_and_sink_sums_to_the_heads():
    (q, kv, _, sink), entries, _ = problem(21, 4, None)
    _, denominator, _ = sparse_attention(q, kv, entries, sink, window=64, scale=SCALE)
    raw = SCALE * torch.einsum("sbnc,tbc->bnst", q, kv)
    causal = torch.ones(21, 21).tril().log()
    window = (raw + causal - denominator[..., None]).exp().sum((1, 3))
    of_sink = (sink[None, :, None] - denominator).exp().sum(1)
    total = attention_mass(q, denominator, entries, SCALE).sum(-1) + window + of_sink
    torch.testing.assert_close(total, torch.full((B, 21), float(N)))


def test_mass_of_some_rows():
    (q, kv, _, sink), entries, _ = problem(21, 4, 3)
    _, denominator, _ = sparse_attention(q, kv, entries, sink, window=5, scale=SCALE)
    whole = attention_mass(q, denominator, entries, SCALE)
    part = attention_mass(q[7:12], denominator[..., 7:12], entries.rows(7, 12), SCALE)
    torch.testing.assert_close(part, whole[:, 7:12])


def test_bf16_keeps_its_dtype_and_an_fp32_softmax():
    tensors, entries, seen = problem(64, 4, 4, torch.bfloat16)
    out, denominator, _ = run(tensors, entries, 16)
    q, kv, latent, sink = (t.detach() for t in tensors)
    expected, _, log_sum = naive.attention(q, kv, latent, seen, sink, 16, SCALE)
    assert out.dtype == torch.bfloat16 and denominator.dtype == torch.float32
    naive.assert_close(out, expected, 8e-3)
    assert (denominator - log_sum).abs().max() < 0.05 and math.isfinite(denominator.sum())
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 4
