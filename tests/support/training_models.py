"""Small models whose forward has something that a training step must handle, each as (model, inputs)."""

import random

import torch
import torch.nn.functional as F
import transformers
from tiny_models import Net, enliven
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.profile import loss_of, there_before
from passes.checkpointing.tape import UNCOUNTED


class Names(TorchFunctionMode):
    """Records the names of the torch functions that are called, as a plan counts them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in UNCOUNTED:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """Writes in place to the output of a BatchNorm."""

    def __init__(self, activation=None, momentum=None):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=momentum)])
        self.short = nn.Conv2d(3, 8, 1)
        self.activation = activation or nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = self.activation(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += self.short(x)
        y = F.max_pool2d(self.activation(y), 2)
        return self.head(F.dropout(y, 0.3, self.training).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        with torch.no_grad():
            scale = 1 / x.norm(dim=-1, keepdim=True)
        q, k, v = (t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.project(self.norm(x * scale)).split(16, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        y = F.gelu(self.out(y.transpose(1, 2).reshape(x.shape))) + x
        return F.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten()), y


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        y = x * factor
        ctx.save_for_backward(x, y)
        return y.exp()

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y.exp() * 2.0 + 0 * x, None


class Mixed(nn.Module):
    """Has views, concatenations, lists of tensors, its own checkpoint, its own autograd function and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask=None):
        self.calls += 1
        a = torch.tanh(self.layers[0](x))
        b = self.layers[1](a).sigmoid()
        c = checkpoint(lambda t: self.norm(self.layers[2](t)).relu(), b, use_reentrant=False)
        parts = torch.cat([a, c[:, :4], Scaled.apply(b, 0.3)], dim=1).chunk(2, dim=1)
        y = torch.stack([parts[0].T.contiguous().T, parts[1] * 2]).sum(0)
        z = y.clone()
        z[:, ::2] = 0.5 * z[:, 1::2]
        z = z.masked_fill(z > 1, 0.0) if mask is None else z.where(mask, z.exp())
        return self.layers[3](z[:, :8]), z


class Doubled(torch.Tensor):
    """A tensor subclass whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + result if func.__name__ == "mul" else result


def chosen(m, x):
    """Chooses its kernel, its generator and its tensor class itself."""
    q = m.layer(x).view(1, 1, -1, 8)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, q, q).tanh()
    y = m.layer(y).exp()
    noise = torch.empty_like(y).uniform_(generator=torch.Generator().manual_seed(int(x.numel())))
    noise = torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) + noise
    z = torch.mul(y.as_subclass(Doubled), noise).as_subclass(torch.Tensor)
    return z.sigmoid() * y


def mapped(m, x):
    """Maps a function over its rows, whose tensors aren't usable outside of it, and takes a gradient in there."""

    def row(r):
        return (m.layer(r).tanh() * r.exp()).sigmoid().sum()

    y = torch.func.vmap(row)(x)
    slope = torch.func.vmap(torch.func.grad(row))(x)
    return y[:, None] * slope.sin().cos()


def sliced(m, x):
    """Slices at a computed position, and takes a tuple of results apart."""
    y = m.layer(x)
    best = y.max(dim=1)
    count = best.indices.sum().clamp(2, 5)
    some = y[:count, torch.tensor([1, 0, 2])]
    return (best.values[:count] * some.exp().sum(1)).sigmoid()


def twice(m, x):
    """Passes one tensor as several arguments, which changes the path that a call takes."""
    y = m.norm(x).exp()[:, None].sigmoid()
    return m.norm(x + m.attention(y, y, y)[0][:, 0]).tanh()


def precise(m, x):
    """Computes a part in another default dtype, and makes random tensors there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        y = m.layer(x) * (torch.arange(8) / 3 + torch.rand(8)).sin()
    finally:
        torch.set_default_dtype(before)
    return y.exp()


def inferring(m, x):
    """Computes a part in inference mode."""
    y = m.layer(x).exp()
    with torch.inference_mode():
        scale = y.abs().amax(1, keepdim=True).clamp_(min=1)
    return m.other(y + scale).sin()


class Named(nn.Module):
    """Takes its arguments by name, returns a dict, and trains only a part of itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 8, 3), nn.GELU())
        self.body[:2].requires_grad_(False)
        self.head = nn.Linear(8, 5)

    def forward(self, image, *, labels=None, scale=1.0):
        features = self.body(image * scale)
        with torch.no_grad():
            weight = features.abs().mean((2, 3), keepdim=True)
        logits = self.head((features * weight).mean((2, 3)))
        given = {"logits": logits, "features": features}
        return given if labels is None else given | {"loss": F.cross_entropy(logits, labels)}


class Convolutions(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        super().__init__(*layers, nn.Flatten(), nn.Linear(32, 5), nn.Softmax(1))


class Cast(nn.Sequential):
    """Runs its inner module under autocast."""

    def forward(self, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return self[0](*args)


def built(make, *inputs):
    torch.manual_seed(0)
    return enliven(make()).train(), inputs


def with_a_layer(run):
    return built(lambda: Net(run, layer=nn.Linear(8, 8)), rows())


def image(requires_grad=True):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3), requires_grad=requires_grad)


def rows():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)


def tokens():
    return torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(3))


MODELS = {
    "in place": lambda: built(Residual, image()),
    "out of place": lambda: built(lambda: Residual(nn.SiLU()), image()),
    "attention": lambda: built(Attention, tokens()),
    "tied": lambda: built(lambda: Attention(tied=True), tokens()),
    "mixed": lambda: built(Mixed, rows()),
    "mask": lambda: built(Mixed, rows(), torch.rand(6, 10, generator=torch.Generator().manual_seed(4)) > 0.5),
    "recurrent": lambda: built(
        lambda: Net(lambda m, x: m.inner(x[:, None])[0], inner=nn.LSTM(8, 6, num_layers=2, dropout=0.2)), rows()
    ),
    "twice": lambda: built(
        lambda: Net(twice, attention=nn.MultiheadAttention(8, 2, dropout=0.2), norm=nn.LayerNorm(8)), rows()
    ),
    "infers": lambda: built(lambda: Net(inferring, layer=nn.Linear(8, 8), other=nn.Linear(8, 8)), rows()),
    "precise": lambda: with_a_layer(precise),
    "maps": lambda: with_a_layer(mapped),
    "chooses": lambda: with_a_layer(chosen),
    "slices": lambda: with_a_layer(sliced),
    "norms": lambda: built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.PReLU(),
        ),
        image(),
    ),
}


# ------------------------------------------------------------------------------------- training steps


def labels():
    return torch.arange(4)


# The steps that run on fake tensors as well, each as (model, args, kwargs).
STEPS = {
    **{name: lambda make=MODELS[name]: (*make(), {}) for name in ("attention", "tied", "mixed", "mask", "norms")},
    "in place": lambda: (*built(lambda: Residual(momentum=0.1), image()), {}),
    "out of place": lambda: (*built(lambda: Residual(nn.SiLU(), momentum=0.1), image()), {}),
    "loss outside": lambda: (*built(Named, image(requires_grad=False)), {"scale": 0.5}),
    "loss inside": lambda: (*built(Named), {"image": image(), "labels": labels()}),
    "frozen input": lambda: (*built(lambda: Residual(momentum=0.1), image(requires_grad=False)), {}),
    "casts": lambda: (*built(lambda: Cast(Convolutions()), image()), {}),
    "casts attention": lambda: (*built(lambda: Cast(Attention()), tokens()), {}),
}


def with_gradients(model, args, kwargs):
    """Create zero gradients, as a second step finds them, and return the arguments."""
    for tensor in (*model.parameters(), *args, *kwargs.values()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.grad = torch.zeros_like(tensor)
    return model, args, kwargs


def peak_of(model, inputs, kwargs):
    """The maximum number of bytes alive in a real step."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes(without=there_before(model, inputs, kwargs)) as live:
        loss_of(model(*inputs, **kwargs)).backward()
    return live.peak


def steps(model, *inputs, count=3, call=None, **kwargs):
    """The losses, gradients and buffers of some steps, and the state of the random generator after them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01) if trained else None
    torch.manual_seed(1)
    seen = []
    for _ in range(count):
        model.zero_grad()
        loss = loss_of(model(*inputs, **kwargs) if call is None else call(model))
        loss.backward()
        seen.append(loss.detach())
        seen += state_of(model)
        if optimizer is not None:
            optimizer.step()
    return [*seen, torch.get_rng_state()]


def state_of(model):
    gradients = (None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters())
    return [*gradients, *(buffer.clone() for buffer in model.buffers())]


def assert_equal(expected, got):
    assert len(expected) == len(got)
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            assert a.layout == b.layout
            assert torch.equal(*((a.to_dense(), b.to_dense()) if a.is_sparse else (a, b))), number


def random_choice_of(profile, seed):
    """A random choice of a profile's calls, with regions that may be nested: (wanted, regions)."""
    rng = random.Random(seed)
    share, length, inner = rng.choice((0.2, 0.5, 0.8, 1.0)), rng.choice((1, 3, 10, 100)), rng.choice((1, 2, 4))
    count = len(profile.calls)
    wanted = [rng.random() < share for _ in range(count)]
    regions = tuple(
        (index // length,) if rng.random() < 0.6 else (index // length, index // inner) for index in range(count)
    )
    return wanted, regions


_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SIZES, "vocab_size": 50, "max_position_embeddings": 24}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 24}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}


def _words():
    return torch.arange(40).view(2, 20)


def _texts(**more):
    return {"input_ids": _words(), "labels": _words(), **more}


# The class of each model, its configuration, and the keyword arguments of a call.
TRANSFORMERS = {
    "resnet": ("ResNetForImageClassification", _RESNET, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "bert": (
        "BertForSequenceClassification",
        _TEXT,
        lambda: {"input_ids": _words(), "attention_mask": torch.ones(2, 20).tril(12)},
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2, lambda: _texts(use_cache=False)),
    "t5": ("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}, _texts),
}


def of_transformers(name):
    """A tiny model of transformers, in training: (model, args, kwargs)."""
    torch.manual_seed(0)
    name_of_class, config, inputs = TRANSFORMERS[name]
    model_class = getattr(transformers, name_of_class)
    model, kwargs = model_class(model_class.config_class(**config)), inputs()
    if "labels" not in kwargs:
        kwargs["labels"] = torch.arange(2)
    return enliven(model).train(), (), kwargs
