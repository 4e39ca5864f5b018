"""Operators that training uses, as functions of a device; each gives tensors to compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = Callable[[str], "list[Tensor]"]

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape: int, high: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the inputs' gradients for a gradient of it that is not uniform."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    result = function(*leaves)
    weight = numbers(*result.shape, seed=99, dtype=result.dtype).to(result.device)
    result.backward(weight)
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


@case
def arithmetic(device):
    x, y = numbers(5, 7).to(device), numbers(7, seed=1).to(device)
    return [x + y, x * 2.5, x - 1, (x / y).abs().sqrt(), x > y, x.pow(3), -x, x.clamp(-1, 1)]


@case
def in_place(device):
    x = numbers(5, 7).to(device)
    x.mul_(2).add_(1)[:, 1:3].zero_()
    x[2].fill_(4)
    x.t().copy_(x.t() + 1)
    return [x]


@case
def reductions(device):
    x = numbers(4, 5, 6).to(device)
    values, indices = x.max(dim=1)
    return [x.sum(), x.mean(1), x.var(2), x.norm(), x.argmin(), values, indices, x.logsumexp(0)]


@case
def matrices(device):
    x, y = numbers(6, 8).to(device), numbers(8, 4, seed=1).to(device)
    batch = numbers(3, 6, 8, seed=2).to(device)
    return [
        x @ y,
        batch @ y,
        torch.bmm(batch, batch.mT),
        torch.addmm(x[0, :4], x, y),
        x.mv(y[:, 0]),
    ]


@case
def einsum(device):
    x, y = numbers(2, 3, 4).to(device), numbers(2, 5, 4, seed=1).to(device)
    return with_gradients(lambda a, b: torch.einsum("bik,bjk->bij", a, b), x, y)


@case
def joining(device):
    x, y = numbers(3, 4).to(device), numbers(3, 4, seed=1).to(device)
    return [torch.cat([x, y], 1), torch.stack([x, y], 2), *x.chunk(2, 1), x.repeat(2, 3), x.flip(0)]


@case
def choosing(device):
    x, y = numbers(3, 4).to(device), numbers(3, 4, seed=1).to(device)
    return [
        torch.where(x > 0, x, y),
        torch.where(x > 0, x, 0.0),
        x.masked_fill(y > 0, -1),
        x.tril(),
    ]


@case
def indexing(device):
    x, rows = numbers(7, 4).to(device), whole(5).to(device)
    y = x.clone()
    y[rows] = 0
    y.index_put_((rows,), torch.ones(5, 4, device=device), accumulate=True)
    picked = x.gather(0, whole(2, 4).to(device))
    return [x[rows], x[rows, 1], x[x > 0], x[:, [2, 0]], x.index_select(0, rows), y, picked]


@case
def indexing_backward(device):
    rows = whole(9).to(device)
    return with_gradients(lambda x: x[rows], numbers(7, 4).to(device))


@case
def scattering(device):
    x, rows = numbers(7, 4).to(device), whole(5, 4).to(device)
    added = x.scatter_add(0, rows, numbers(5, 4, seed=2).to(device))
    return [added, x.scatter(0, rows, 3.0), x.index_add(0, rows[:, 0], numbers(5, 4).to(device))]


@case
def sizes_that_depend_on_values(device):
    x = whole(20).to(device)
    y = numbers(6, 5).to(device)
    unique, counts = x.unique(return_counts=True)
    repeated = torch.repeat_interleave(whole(4).to(device))
    return [x.nonzero(), unique, counts, y.masked_select(y > 0), x.bincount(), repeated]


@case
def ordering(device):
    x = numbers(4, 9).to(device)
    values, indices = x.sort(dim=1, descending=True)
    best, where = x.topk(3)
    return [values, indices, best, where, x.argsort(), x.median(), x.kthvalue(2).values]


@case
def running(device):
    x = numbers(4, 9).to(device)
    return [x.cumsum(1), x.cumprod(0), x.cummax(1).values, x.diff()]


@case
def factories(device):
    return [
        torch.arange(3, 12, 2, device=device),
        torch.linspace(0, 1, 5, device=device),
        torch.full((2, 3), 1.5, device=device),
        torch.eye(3, device=device),
        torch.tril_indices(3, 3, device=device),
        torch.ones(2, device=device, dtype=torch.bfloat16),
        torch.tensor([[1, 2]], device=device),
    ]


@case
def conversions(device):
    x = numbers(4, 6).to(device)
    half = x.to(torch.bfloat16)
    return [half, half.float(), x.long(), x.t().contiguous(), x.to(torch.float16).t().float()]


@case
def results_given(device):
    x = numbers(3, 4).to(device)
    small = torch.empty(0, device=device)
    torch.add(x, 1, out=small)
    wide = torch.empty(4, 3, device=device).t()
    torch.mul(x, 2, out=wide)
    rows = torch.empty(0, dtype=torch.long, device=device)
    torch.nonzero(x > 0, out=rows)
    return [small, wide, rows]


@case
def embedding(device):
    ids = whole(3, 5).to(device)
    return with_gradients(lambda table: F.embedding(ids, table), numbers(7, 4).to(device))


@case
def linear_and_activations(device):
    x, weight, bias = (numbers(*s).to(device) for s in ((2, 5, 8), (6, 8), (6,)))

    def function(x, weight, bias):
        y = F.linear(x, weight, bias)
        return F.silu(y) + F.gelu(y) + F.gelu(y, approximate="tanh") + y.relu() + y.sigmoid()

    return with_gradients(function, x, weight, bias)


@case
def normalisations(device):
    x, weight, bias = (numbers(*s).to(device) for s in ((2, 5, 8), (8,), (8,)))
    layer = with_gradients(lambda *t: F.layer_norm(t[0], (8,), *t[1:]), x, weight, bias)
    group = with_gradients(lambda t: F.group_norm(t, 5), x)
    return layer + group


@case
def rms_norm(device):
    x, weight = numbers(2, 5, 8).to(device), numbers(8).to(device)
    return with_gradients(lambda x, weight: F.rms_norm(x, (8,), weight, 1e-6), x, weight)


@case
def recurrent(device):
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        layer = kind(4, 3, num_layers=2).to(device)
        found += with_gradients(lambda x, layer=layer: layer(x)[0], numbers(5, 2, 4).to(device))
        found += [p.grad for p in layer.parameters()]
    return found


@case
def batch_norm(device):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3).to(device)
    found = with_gradients(layer, numbers(4, 3, 5, 5).to(device))
    layer.eval()
    return [*found, layer.running_mean, layer.running_var, layer(numbers(2, 3, 5, 5).to(device))]


@case
def convolutions(device):
    x, weight, bias = (numbers(*s).to(device) for s in ((2, 3, 9, 9), (6, 3, 3, 3), (6,)))
    plain = with_gradients(lambda *t: F.conv2d(*t, stride=2, padding=1), x, weight, bias)
    depthwise = with_gradients(lambda *t: F.conv2d(*t, groups=3), x, numbers(3, 1, 3, 3).to(device))
    line = with_gradients(F.conv1d, x[:, :, 0], weight[:, :, 0])
    transposed = with_gradients(F.conv_transpose2d, x, numbers(3, 2, 3, 3).to(device))
    channels_last = [F.conv2d(x.to(memory_format=torch.channels_last), weight)]
    return plain + depthwise + line + transposed + channels_last


@case
def pooling_and_resizing(device):
    x = numbers(2, 3, 8, 8).to(device)
    most = with_gradients(lambda t: F.max_pool2d(t, 2), x)
    mean = with_gradients(lambda t: F.adaptive_avg_pool2d(t, 3), x)
    larger = with_gradients(lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"), x)
    return most + mean + larger


@case
def attention(device):
    q, k, v = (numbers(2, 4, 6, 8, seed=i).to(device) for i in range(3))
    return with_gradients(lambda *t: _math_attention(*t, is_causal=True), q, k, v)


def _math_attention(*arguments, **options):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **options)


@case
def losses(device):
    logits, labels = numbers(6, 5).to(device), whole(6, high=5).to(device)
    found = with_gradients(lambda x: F.cross_entropy(x, labels, reduction="none"), logits)
    mean = with_gradients(lambda x: F.cross_entropy(x, labels), logits)
    return [*found, *mean, *with_gradients(lambda x: F.mse_loss(x, torch.zeros_like(x)), logits)]


@case
def softmax_that_widens(device):
    x = numbers(3, 8, dtype=torch.bfloat16).to(device)
    return with_gradients(lambda x: F.softmax(x, -1, dtype=torch.float32), x)


@case
def linear_algebra(device):
    x = numbers(4, 4).to(device)
    positive = x @ x.mT + torch.eye(4, device=device)
    q, r = torch.linalg.qr(x)
    return [
        *(torch.linalg.cholesky(positive), torch.linalg.inv(positive), torch.linalg.det(x), q, r),
        torch.linalg.solve(positive, x),
        torch.linalg.svdvals(x),
    ]


@case
def complex_numbers(device):
    x = torch.view_as_complex(numbers(3, 4, 2).to(device))
    return [torch.view_as_real(x * x.conj()), x.abs(), torch.fft.rfft(numbers(8).to(device)).abs()]


@case
def lists_of_tensors(device):
    x = [numbers(3, seed=i).to(device) for i in range(3)]
    torch._foreach_mul_(x, 2.0)
    torch._foreach_addcdiv_(x, x, [y.abs() + 1 for y in x], -0.5)
    return [*torch._foreach_add(x, 1.0), *torch._foreach_norm(x)]
