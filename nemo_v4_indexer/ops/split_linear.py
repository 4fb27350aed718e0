"""x @ weight.T of bf16 activations and an fp32 weight, nearly with fp32 accuracy, on tensor cores.

An fp32 number is the sum of three bf16 numbers (three times 8 bits), and the product of two bf16 numbers is exact in
the fp32 accumulator of a tensor core. So an fp32 product is a few bf16 ones, and needs no fp32 copy of x.

S rows, K input and N output channels.
"""

import torch


def split(x, parts):
    """bf16 tensors whose sum is fp32 `x` to 8 bits each, the largest first."""
    found = []
    for _ in range(parts):
        found.append(x.to(torch.bfloat16))
        x = x - found[-1]
    return found


def _sum_of_products(pairs, longest):
    """fp32 sum of a @ b over pairs of bf16 matrices, in the order given; the last pair in pieces of `longest` terms.

    A tensor core drops the lowest bits of what it adds up, so long sums of the largest terms are cut.
    """
    *small, (a, b) = pairs
    pieces = zip(a.split(longest, dim=1), b.split(longest, dim=0), strict=True)
    total = None
    for a, b in (*small, *pieces):
        if not a.is_cuda:  # PyTorch has no such product there
            product = a.float() @ b.float()
            total = product if total is None else total + product
        elif total is None:
            total = torch.mm(a, b, out_dtype=torch.float32)
        else:
            total = torch.addmm(total, a, b, out_dtype=torch.float32)
    return total


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _sum_of_products([(x, part.t()) for part in reversed(split(weight, 3))], 1024)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = dweight = None
        high, middle, low = split(grad, 3)
        if ctx.needs_input_grad[0]:  # 16 bits are plenty for a gradient that is rounded to bf16
            first, second = split(weight, 2)
            dx = _sum_of_products([(middle, first), (high, second), (high, first)], 4096).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = _sum_of_products([(part.t(), x) for part in (low, middle, high)], 4096)
        return dx, dweight


def split_linear(x, weight):
    """x @ weight.T.

    Args:
        x: bf16 [..., K]. weight: fp32 [N, K].

    Returns:
        fp32 [..., N]. Gradients: bf16 as x, fp32 as weight. Where x or weight is infinite the result may be NaN.
    """
    return _SplitLinear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
