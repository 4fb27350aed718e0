"""What an arm must get right before it is timed.

R checked rows, the rest as in `bench_problem`. Every check returns measured errors, or raises Wrong with the reason.
"""

import torch

from nemo_v4_indexer import reference, visibility

SCORE_TOLERANCE = 8e-6  # of the largest score: fp32 sums in another order
BF16_SCORES = 2e-2  # relative error of scores computed with bf16 intermediates


class Wrong(Exception):
    """An arm's result does not pass."""


def relative(found, truth):
    """||found - truth|| / ||truth||; infinite where found holds a NaN."""
    error = float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300))
    return error if error == error else float("inf")


def _demand(condition, reason):
    if not bool(condition):
        raise Wrong(reason)


def _limits(problem, rows):
    return problem.start[:, rows], problem.end[:, rows]


def check_scores(problem, result):
    """result: scores [B, n, >= G] of the n rows from `first` on (default all); `bf16` allows bf16 intermediates."""
    first, scores = result.get("first", 0), result["scores"]
    inside = (problem.rows >= first) & (problem.rows < first + scores.shape[1])
    rows, truth = problem.rows[inside], problem.truth[:, inside]
    seen = visibility.visible(*_limits(problem, rows), problem.shape.groups)
    error = relative(scores[:, rows - first, : problem.shape.groups][seen], truth[seen])
    limit = BF16_SCORES if result.get("bf16") else 1e-5
    _demand(error <= limit, f"relative error of scores {error:.1e}, allowed {limit:.1e}")
    return {"scores": error}


def check_topk(problem, result, exact):
    """result: values, indices [B, S, <= K] of the largest of `problem.logits`. exact: in this package's order."""
    rows, topk = problem.rows, problem.shape.topk
    logits = problem.padded_logits[:, rows, : problem.shape.groups]
    seen = visibility.visible(*_limits(problem, rows), problem.shape.groups)
    _demand(relative(logits[seen], problem.truth[seen]) <= 1e-5, "the scores to select from are wrong")
    values, indices = reference.select(logits, *_limits(problem, rows), topk)
    found, at = result["values"][:, rows], result["indices"][:, rows].long()
    if exact:
        _demand(torch.equal(found, values) and torch.equal(at, indices.long()), "not the exact ascending selection")
        return {}
    used = found > float("-inf")
    _demand(torch.equal(logits.gather(-1, at.clamp(min=0))[used], found[used]), "indices and values differ")
    order = found.sort(dim=-1, descending=True).values
    width = order.shape[-1]
    _demand(torch.equal(order, values.sort(dim=-1, descending=True).values[..., :width]), "not the largest scores")
    return {}


def check_selection(problem, result, exact):
    """result: indices [B, S, <= K], and values of them where the arm gives any.

    Any order passes, and a key may take another's place where fp32 cannot tell them apart. exact: the slots also
    ascend, and are the very keys of the fp64 scores wherever the K-th and the next score differ by more than that.
    """
    rows, topk, truth = problem.rows, problem.shape.topk, problem.truth
    start, end = _limits(problem, rows)
    seen = visibility.visible(start, end, problem.shape.groups)
    at = result["indices"][:, rows].long()
    taken = at >= 0
    _demand(torch.equal(taken.sum(-1), seen.sum(-1).clamp(max=topk)), "wrong number of slots in use")
    _demand(((at >= start[..., None]) & (at < end[..., None]))[taken].all(), "a key outside the row's limits")
    _demand((at.sort(dim=-1).values.diff(dim=-1) != 0)[taken.sort(dim=-1).values[..., :-1]].all(), "a key chosen twice")
    budget = SCORE_TOLERANCE * float(truth[seen].abs().max())
    found = truth.gather(-1, at.clamp(min=0))
    errors = {}
    if "values" in result:
        errors["values"] = float((result["values"][:, rows].double() - found)[taken].abs().max()) / (budget or 1.0)
        _demand(errors["values"] <= 1, f"scores of the selection off by {errors['values']:.1f} times the allowed error")
        errors["values"] *= SCORE_TOLERANCE
    worst = found.masked_fill(~taken, float("inf")).amin(-1)
    chosen = torch.zeros(*seen.shape[:-1], problem.shape.groups + 1, dtype=torch.bool, device=seen.device)
    chosen.scatter_(-1, at.masked_fill(~taken, problem.shape.groups), True)
    left = truth.masked_fill(~seen | chosen[..., :-1], float("-inf")).amax(-1)
    _demand((left <= worst + 2 * budget).all(), "a better key was left out")
    if exact:
        _demand((at.diff(dim=-1) > 0)[taken[..., 1:]].all() and not (taken[..., 1:] & ~taken[..., :-1]).any(), "order")
        _, indices = reference.select(truth, start, end, topk)
        clear = worst - left > 2 * budget
        _demand(torch.equal(at[clear], indices[clear].long()), "not the keys of the fp64 scores")
    return errors


def plain_gradients(problem):
    """dq, dk, dw as plain bf16 torch gives them: bf16 products and factors, fp32 only where dk is summed up."""
    q, w, grad = problem.q, problem.w, problem.grad
    s, b, h, d = q.shape
    dq, dw = torch.empty_like(q), torch.empty_like(w)
    dk = torch.zeros(b, problem.shape.groups, d, device=q.device)
    keys = problem.k.permute(1, 0, 2)
    for i in range(b):
        for lo, hi in reference.chunk_rows(s, problem.shape.topk * (8 * h + 6 * d), 2**28):
            at = problem.indices[i, lo:hi].clamp(min=0).long()
            chosen, g = keys[i][at], grad[i, lo:hi, None]
            products = torch.einsum("shd,skd->shk", q[lo:hi, i], chosen)
            factor = (g * w[lo:hi, i, :, None] * (products > 0)).bfloat16()
            dw[lo:hi, i] = (g * products.relu()).sum(-1)
            dq[lo:hi, i] = torch.einsum("shk,skd->shd", factor, chosen)
            rows = torch.einsum("shk,shd->skd", factor, q[lo:hi, i]).float()
            dk[i].index_add_(0, at.flatten(), rows.flatten(0, 1))
    return dq, dk.permute(1, 0, 2).bfloat16(), dw


def gradient_limits(problem):
    """Twice plain bf16 torch's relative error against fp64, for dq, dk and dw of a small problem."""
    truth = _true_gradients(problem, problem.indices, problem.grad, problem.w)
    return [2 * relative(x, y) for x, y in zip(plain_gradients(problem), truth, strict=True)]


def _true_gradients(problem, indices, grad, w, rows=None):
    at = slice(None) if rows is None else rows
    part = problem.q[at].double(), problem.k.double(), w[at].double(), indices[:, at], grad[:, at].double()
    return reference.backward(*part, workspace_bytes=2**29)


def _true_dk(problem, indices, grad, w):
    """fp64 dk [n, B, D] of `problem.keys`."""
    out = torch.zeros(
        len(problem.keys), problem.shape.batch, problem.shape.dim, dtype=torch.float64, device=grad.device
    )
    for n, key in enumerate(problem.keys):
        for b in range(problem.shape.batch):
            slots = indices[b] == key
            rows = slots.any(-1).nonzero()[:, 0]
            g = grad[b].masked_fill(~slots, 0).sum(-1)[rows].double()
            q = problem.q[rows, b].double()
            mask = (q @ problem.k[key, b].double() > 0) * w[rows, b].double() * g[:, None]
            out[n, b] = torch.einsum("nh,nhd->d", mask, q)
    return out


def check_gradients(problem, result, limits, whole):
    """result: dq, dk, dw, of its own indices, grad and weights where it names them.

    limits: allowed relative errors of the three. whole: compare everything, else the checked rows and keys.
    """
    indices, grad = result.get("indices", problem.indices), result.get("grad", problem.grad)
    w = result.get("weights", problem.w)
    grad = grad[..., : indices.shape[-1]].masked_fill(indices < 0, 0)
    found = result["dq"], result["dk"], result["dw"]
    if whole:
        truth = _true_gradients(problem, indices, grad, w)
    else:
        dq, _, dw = _true_gradients(problem, indices, grad, w, problem.rows)
        found = found[0][problem.rows], found[1][problem.keys], found[2][problem.rows]
        truth = dq, _true_dk(problem, indices, grad, w), dw
    errors = {name: relative(x, y) for name, x, y in zip(("dq", "dk", "dw"), found, truth, strict=True)}
    for (name, error), limit in zip(errors.items(), limits, strict=True):
        _demand(error <= limit, f"relative error of {name} {error:.1e}, twice plain bf16 torch's is {limit:.1e}")
    return errors


def check(problem, operation, result, limits, *, exact, whole=False):
    """Every check of one operation; the measured errors. exact: also this package's promises on order."""
    if operation == "scores":
        return check_scores(problem, result)
    if operation == "top-k":
        return check_topk(problem, result, exact)
    errors = check_selection(problem, result, exact) if operation != "backward" else {}
    if operation != "forward":
        errors |= check_gradients(problem, result, limits, whole)
    return errors
