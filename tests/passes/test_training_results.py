"""A training result with a checkpoint plan trains as the same module without one, to the bit, however it is used."""

import copy
import io
import logging
import pickle
import random
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import Net as Tiny
from tiny_models import enliven
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from training_models import assert_equal, state_of, steps

from optimizer import optimize, report_of
from passes import InsertCheckpoints
from passes.checkpointing.profile import loss_of


class Net(nn.Module):
    """Has a bias to fold, dropout as a module and as a function, and blocks that are dropped for single rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = self.drop(F.gelu(norm(conv(x))))
            if self.training:
                y = y * (torch.rand(len(x), 1, 1, 1, device=x.device) < 0.8)
            x = x + y
        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training))


def image(seed=3, rows=4, size=8):
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))


def rows(seed=3):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def built(make):
    torch.manual_seed(0)
    return enliven(make()).train()


@pytest.fixture(scope="module")
def pair():
    """The result without a plan, and with the plan that needs the least memory."""
    model = built(Net)
    plain, result = (
        optimize(model, passes, mode="training", example_inputs=(image(),), strict=True)
        for passes in ([], [InsertCheckpoints("min")])
    )
    assert report_of(result).passes[-1].detail.chosen.peak < 0.6 * report_of(result).passes[-1].detail.eager.peak
    return plain, result


# ------------------------------------------------------------------------------------- uses of a result


def switched(model):
    seen = []
    for _ in range(2):
        seen += steps(model.train(), image(), count=1) + steps(model.eval(), image(), count=1)
        model.train()
        model.norms[0].eval()
        model.drop.eval()
        seen += steps(model, image(), count=1)
    return seen


def autocast(model):
    def call(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(image())

    return steps(model, call=call)


def scaled(model):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", growth_interval=1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model(image()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [*state_of(model), *(parameter.detach().clone() for parameter in model.parameters())]
    return seen


def gathered(model):
    """Several forwards, and one backward pass through all of them; gradients are added up."""
    for seed in range(2):
        torch.stack([loss_of(model(image(3 * seed + number))) for number in range(3)]).sum().backward()
    return state_of(model)


def gone_through_twice(model):
    loss = loss_of(model(image()))
    loss.backward(retain_graph=True)
    loss.backward()
    return state_of(model)


def with_a_penalty(model):
    x = image().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    (slope.square().sum() + outputs.sum()).backward()
    return [*state_of(model), x.grad]


def in_parts(model):
    outputs = model(image())
    first = torch.autograd.grad(outputs[:2, 1].sum(), [model.stem.weight, model.head.weight], retain_graph=True)
    return [*first, *torch.autograd.grad(outputs[3:].exp().sum(), list(model.parameters()))]


def in_a_thread(model):
    def call(model):
        found = []
        thread = threading.Thread(target=lambda: found.append(model(image())))
        thread.start()
        thread.join()
        return found[0]

    return steps(model, call=call)


def with_other_parameters(model):
    others = {name: (1.1 * tensor.detach()).requires_grad_() for name, tensor in model.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    seen = []
    for _ in range(2):
        outputs = functional_call(model, {**others, **buffers}, (image(),))
        seen += [outputs.detach(), *torch.autograd.grad(loss_of(outputs), list(others.values()))]
    return seen + [tensor.clone() for tensor in buffers.values()]


def by_torch_func(model):
    model.eval().head.train()
    model.training = True
    others = {name: torch.stack([tensor.detach(), 1.1 * tensor.detach()]) for name, tensor in model.named_parameters()}

    def loss(values):
        return functional_call(model, values, (image(),)).square().mean()

    return list(vmap(grad(loss), randomness="same")(others).values())


def hooked(model):
    held = []
    handles = [
        module.register_forward_hook(lambda module, args, output: held.append(output))
        for module in (model.drop, *model.norms)
    ]
    handles += [
        module.register_full_backward_hook(lambda module, before, after: held.append(after[0].clone()))
        for module in (*model.convs, model.head)
    ]
    seen = steps(model, image())
    for handle in handles:
        handle.remove()
    return [*seen, *(tensor.detach() for tensor in held), *steps(model, image())]


def frozen_in_part(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("convs.1.weight", "norm.bias"))
    return steps(model, image())


def frozen(model):
    model.requires_grad_(False)
    x = image().requires_grad_()
    return [model(image()), *steps(model, x), x.grad]


def with_other_children(model):
    torch.manual_seed(2)
    model.head = nn.Linear(8, 7)
    seen = steps(model, image())
    model.drop, model.convs[1] = nn.Identity(), nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU())
    return seen + steps(model, image())


def in_other_dtypes(model):
    seen = []
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        moved = copy.deepcopy(model).to(dtype)
        seen += steps(moved, image().to(dtype), count=2)
    return seen


def on_meta_and_back(model):
    values = copy.deepcopy(model.state_dict())
    moved = model.to("meta")
    loss_of(moved(image().to("meta"))).backward()
    assert all(parameter.grad.is_meta for parameter in moved.parameters())
    moved.zero_grad()
    moved.to_empty(device="cpu").load_state_dict(values)
    return steps(moved, image())


def swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return steps(model, image(), count=1) + steps(model.double(), image().double(), count=1)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def copied_and_pickled(model):
    file = io.BytesIO()
    torch.save(pickle.loads(pickle.dumps(copy.deepcopy(model))), file)
    file.seek(0)
    return steps(torch.load(file, weights_only=False), image())


def averaged(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    seen = []
    for _ in range(2):
        seen += steps(model, image(), count=1)
        average.update_parameters(model)
    seen += steps(average, image(), count=1)
    update_bn([image(1), image(2)], average)
    return [*seen, average.eval()(image()).detach()]


def parametrized(model):
    parametrizations.weight_norm(model.head)
    parametrizations.spectral_norm(model.convs[0])
    seen = steps(model, image())
    parametrize.remove_parametrizations(model.head, "weight")
    return seen + steps(model, image())


def saved_on_the_cpu(model):
    with save_on_cpu():
        return steps(model, image())


def inside_of_a_checkpoint(model):
    x = image().requires_grad_()
    seen = steps(model, call=lambda model: checkpoint(model, x, use_reentrant=False))
    return seen + steps(model, call=lambda model: checkpoint(model, x, use_reentrant=True))


def deterministic(model):
    torch.use_deterministic_algorithms(True)
    try:
        return steps(model, image())
    finally:
        torch.use_deterministic_algorithms(False)


def of_other_sizes(model):
    return steps(model, image(rows=2)) + steps(model, image(rows=7, size=10))


def broken_off_forward(model):
    def stop(*args):
        raise KeyboardInterrupt

    handle = model.norms[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(image())
    handle.remove()
    return steps(model, image())


def broken_off_backward(model):
    def stop(gradient):
        raise KeyboardInterrupt

    handle = model.norms[0].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
    loss = loss_of(model(image()))
    handle.remove()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    return steps(model, image())


DONE = [
    switched, autocast, scaled, gathered, gone_through_twice, with_a_penalty, in_parts, in_a_thread,
    with_other_parameters, by_torch_func, hooked, frozen_in_part, frozen, with_other_children,
    in_other_dtypes, on_meta_and_back, swapped, copied_and_pickled, averaged, parametrized,
    saved_on_the_cpu, inside_of_a_checkpoint, deterministic, of_other_sizes,
    broken_off_forward, broken_off_backward,
]  # fmt: skip


@pytest.mark.parametrize("do", DONE, ids=lambda do: do.__name__)
def test_a_plan_changes_nothing_but_what_is_kept(do, pair):
    seen = []
    for model in pair:
        torch.manual_seed(1)
        seen.append(do(copy.deepcopy(model)))
    assert_equal(*seen)


def written_over(model, *, activation):
    """Gradients of a step that overwrites its input (0), an activation (1) or nothing (None) before `backward()`."""
    model = copy.deepcopy(model)
    held = [x := image()]
    model.convs[0].register_forward_hook(lambda module, args, output: held.append(output))
    torch.manual_seed(1)
    outputs = model(x)
    if activation is not None:
        held[activation].detach().zero_()
    loss_of(outputs).backward()
    return state_of(model)


def test_an_input_that_is_written_over_before_the_backward_pass_raises_as_without_a_plan(pair):
    for model in pair:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            written_over(model, activation=0)


def test_an_activation_that_is_written_over_before_the_backward_pass_is_computed_again(pair):
    plain, result = pair
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_over(plain, activation=1)
    assert_equal(written_over(plain, activation=None), written_over(result, activation=1))


# ------------------------------------------------------------------------------------- kinds of forwards


def with_layers(function, *layers):
    """A function of a module and its layers as a forward."""
    return Tiny(function, layers=nn.ModuleList(layers))


def linear():
    return nn.Linear(8, 8)


def packed():
    def forward(self, x):
        given = nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 8), [3, 2], batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layers[0](given)[0], batch_first=True)
        return padded.tanh()

    return with_layers(forward, nn.GRU(8, 6, batch_first=True))


def embedded(**options):
    def forward(self, x):
        return self.layers[1](self.layers[0](x.abs().mul(5).long().clamp(max=19)).tanh().exp())

    return with_layers(forward, nn.Embedding(20, 8, **options), linear())


def complex_numbers():
    def forward(self, x):
        z = torch.fft.fft(self.layers[0](x))
        z = z.conj() * z.exp() + z.imag.sin()
        return torch.tanh(torch.view_as_real(z).sum(-1)) + z.real.cos()

    return with_layers(forward, linear())


def normed():
    norm = nn.utils.spectral_norm
    return nn.Sequential(norm(linear()), nn.GELU(), norm(linear()), nn.Tanh())


def with_reentrant_checkpoints():
    def part(self, x):
        return F.dropout(self.layers[3](self.layers[1](x)).exp().tanh(), 0.2, self.training)

    def forward(self, x):
        for layer in (self.layers[0], self.layers[2]):
            x = checkpoint(part, self, F.gelu(layer(x)), use_reentrant=True)
        return x.exp()

    return with_layers(forward, linear(), linear(), linear(), nn.BatchNorm1d(8))


def seeded():
    def forward(self, x):
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(11)
        for layer in self.layers:
            x = F.gelu(layer(x)) * torch.bernoulli(torch.full_like(x, 0.7), generator=generator)
            x = F.dropout(x, 0.3)
        return x

    return with_layers(forward, linear(), linear())


def without_gradients():
    def forward(self, x):
        with torch.no_grad():
            a = F.gelu(self.layers[0](x)).exp()
        b = self.layers[1](a).tanh().detach().exp()
        with torch.inference_mode():
            c = self.layers[2](x).sin()
        # The outputs include the input, a view of a parameter, and a parameter.
        return self.layers[3](b).sigmoid() * b.cos() + c.clone(), x, self.layers[0].weight.t(), self.layers[1].bias

    return with_layers(forward, linear(), linear(), linear(), linear())


def nested():
    def forward(self, x):
        x = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return torch.cat(x.unbind())

    return with_layers(forward, linear(), linear())


# More models: see `tests/support/training_models.py` and `random_steps.py`.
MODELS = {
    "packed": packed,
    "sparse": lambda: embedded(sparse=True),
    "renormed": lambda: embedded(max_norm=0.5),
    "complex": complex_numbers,
    "older spectral norm": normed,
    "reentrant checkpoints": with_reentrant_checkpoints,
    "seeded": seeded,
    "without gradients": without_gradients,
    "nested": nested,
    "one call": linear,
    "nothing to compute again": lambda: nn.Sequential(nn.Flatten(), linear()),
}


# torch's own checkpoints warn if no input requires gradients.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", MODELS)
def test_whatever_a_forward_does_it_trains_alike(name, caplog):
    model = built(MODELS[name])
    item = InsertCheckpoints("min")
    result = optimize(model, [item], mode="training", example_inputs=(rows(),), strict=True)
    assert report_of(result).passes[-1].status == "applied"
    assert_equal(*(steps(copy.deepcopy(one), rows()) for one in (model, result)))
    assert not caplog.text


@pytest.mark.parametrize("when", ["before the plan", "behind it"])
def test_a_model_that_has_checkpoints_of_its_own_switched_on_trains_alike(when):
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=24, use_cache=False)
    words = {"input_ids": torch.arange(20).view(2, 10), "labels": torch.arange(20).view(2, 10)}
    model, other = (built(lambda: transformers.GPT2LMHeadModel(config)) for _ in range(2))
    model.activation_checkpointing_enable()
    if when == "before the plan":
        other.activation_checkpointing_enable()
    result = optimize(other, [InsertCheckpoints("min")], mode="training", example_kwargs=words, strict=True)
    if when == "behind it":
        result.activation_checkpointing_enable()
    assert_equal(*(steps(one, **words) for one in (model, result)))


@pytest.mark.filterwarnings("ignore:.torch.jit.*. is deprecated")
def test_a_scripted_child_trains_alike():
    def make():
        part = torch.jit.script(nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU()))
        return nn.Sequential(linear(), nn.GELU(), part, nn.Tanh())

    result = optimize(built(make), [InsertCheckpoints("min")], mode="training", example_inputs=(rows(),), strict=True)
    assert_equal(steps(built(make), rows()), steps(result, rows()))


def test_layers_that_are_dropped_at_random_train_alike_and_it_is_said(caplog):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(linear() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                if not self.training or random.random() < 0.6:
                    x = F.gelu(layer(x)).exp().tanh()
            return x + 0 * sum(layer.weight.sum() for layer in self.layers)

    model = built(Dropping)
    random.seed(0)
    result = optimize(model, [InsertCheckpoints(1.0)], mode="training", example_inputs=(rows(),))
    seen = []
    with caplog.at_level(logging.WARNING):
        for one in (model, result):
            random.seed(5)
            seen.append(steps(copy.deepcopy(one), rows(), count=6))
    assert_equal(*seen)
    assert "a different path" in caplog.text
