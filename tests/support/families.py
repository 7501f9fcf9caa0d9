"""Small modules with the shapes of well-known model families: what their public code does, with few channels.

`FAMILIES` makes (model in eval mode, args of one call) by name.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.SiLU) -> nn.Module:
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs), act()
    )


class YoloV5(nn.Module):
    """A backbone with C3 and SPPF, and a head that keeps its grids between calls as YOLOv5's does."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem, self.down = conv_bn(3, 8, 6, 2), conv_bn(8, 16, 3, 2)
        self.split, self.other, self.join = conv_bn(16, 8, 1), conv_bn(16, 8, 1), conv_bn(16, 16, 1)
        self.bottleneck = nn.Sequential(conv_bn(8, 8, 1), conv_bn(8, 8, 3))
        self.pool, self.reduce, self.sppf = nn.MaxPool2d(5, 1, 2), conv_bn(16, 8, 1), conv_bn(32, 16, 1)
        self.last = conv_bn(16, 16, 3, 2)
        self.outputs = classes + 5
        self.heads = nn.ModuleList(nn.Conv2d(16, 2 * self.outputs, 1) for _ in range(2))
        self.stride = [4.0, 8.0]
        self.grid = [torch.empty(0) for _ in range(2)]
        self.register_buffer("anchors", torch.tensor([[[1.0, 2.0], [3.0, 2.0]], [[2.0, 5.0], [4.0, 3.0]]]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.down(self.stem(x))
        a = self.split(x)
        x = self.join(torch.cat((a + self.bottleneck(a), self.other(x)), 1))
        y = [self.reduce(x)]
        y.extend(self.pool(y[-1]) for _ in range(3))
        x = self.sppf(torch.cat(y, 1))
        features, found = [x, self.last(x)], []
        for i, feature in enumerate(features):
            head = self.heads[i](feature)
            batch, _, rows, columns = head.shape
            head = head.view(batch, 2, self.outputs, rows, columns).permute(0, 1, 3, 4, 2).contiguous()
            if self.grid[i].shape[2:4] != head.shape[2:4]:
                ys, xs = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
                self.grid[i] = torch.stack((xs, ys), 2).expand(1, 2, rows, columns, 2).float() - 0.5
            xy, wh, rest = head.sigmoid().split((2, 2, self.outputs - 4), 4)
            xy = (xy * 2 + self.grid[i]) * self.stride[i]
            wh = (wh * 2) ** 2 * self.anchors[i].view(1, 2, 1, 1, 2) * self.stride[i]
            found.append(torch.cat((xy, wh, rest), 4).view(batch, -1, self.outputs))
            features[i] = head
        return torch.cat(found, 1), features


class YoloV8(nn.Module):
    """A head with distribution focal loss: a softmax over bins, a fixed convolution, boxes from anchor points."""

    def __init__(self, classes: int = 3, bins: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 8, 3, 2), conv_bn(8, 16, 3, 2))
        self.more = conv_bn(16, 16, 3, 2)
        self.boxes = nn.ModuleList(nn.Sequential(conv_bn(16, 16), nn.Conv2d(16, 4 * bins, 1)) for _ in range(2))
        self.scores = nn.ModuleList(nn.Sequential(conv_bn(16, 16), nn.Conv2d(16, classes, 1)) for _ in range(2))
        self.dfl = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)
        self.dfl.weight.data[:] = torch.arange(bins, dtype=torch.float).view(1, bins, 1, 1)
        self.classes, self.bins = classes, bins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.body(x)
        features = [first, self.more(first)]
        joined, points, strides = [], [], []
        for i, feature in enumerate(features):
            joined.append(torch.cat((self.boxes[i](feature), self.scores[i](feature)), 1).flatten(2))
            rows, columns = feature.shape[2:]
            ys, xs = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
            points.append(torch.stack((xs, ys), -1).view(-1, 2))
            strides.append(torch.full((rows * columns, 1), 4.0 * 2**i))
        box, score = torch.cat(joined, 2).split((4 * self.bins, self.classes), 1)
        batch, _, count = box.shape
        distances = self.dfl(box.view(batch, 4, self.bins, count).transpose(2, 1).softmax(1)).view(batch, 4, count)
        centers = torch.cat(points).t().unsqueeze(0)
        low, high = centers - distances[:, :2], centers + distances[:, 2:]
        boxes = torch.cat(((low + high) / 2, high - low), 1) * torch.cat(strides).t()
        return torch.cat((boxes, score.sigmoid()), 1)


class FrozenBatchNorm(nn.Module):
    """BatchNorm of four buffers, as in DETR and torchvision's detectors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 0.9), ("bias", 0.1), ("running_mean", 0.2), ("running_var", 1.3)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (self.weight * (self.running_var + 1e-5).rsqrt()).view(1, -1, 1, 1)
        return x * scale + (self.bias.view(1, -1, 1, 1) - self.running_mean.view(1, -1, 1, 1) * scale)


class Detr(nn.Module):
    """A backbone with FrozenBatchNorm, sine positions, nn.Transformer and learned queries."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 7, 4, 3, bias=False), FrozenBatchNorm(16), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1)
        )
        self.transformer = nn.Transformer(dim, 4, 1, 1, 64, 0.1)
        self.queries = nn.Embedding(5, dim)
        self.classes, self.boxes, self.dim = nn.Linear(dim, 4), nn.Linear(dim, 4), dim

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        feature = self.body(x)
        ones = torch.ones_like(feature[:, 0])
        steps = 10000 ** (2 * (torch.arange(self.dim // 2) // 2) / (self.dim // 2))
        places = [ones.cumsum(axis)[..., None] / steps for axis in (1, 2)]
        position = torch.cat([torch.stack((p[..., 0::2].sin(), p[..., 1::2].cos()), 4).flatten(3) for p in places], 3)
        sequence = (feature + position.permute(0, 3, 1, 2)).flatten(2).permute(2, 0, 1)
        queries = self.queries.weight.unsqueeze(1).repeat(1, x.shape[0], 1)
        hidden = self.transformer(sequence, queries).transpose(0, 1)
        return {"pred_logits": self.classes(hidden), "pred_boxes": self.boxes(hidden).sigmoid()}


class Raft(nn.Module):
    """All-pairs correlation, lookups by grid_sample, and a recurrent update."""

    def __init__(self, dim: int = 16, radius: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, dim, 7, 4, 3), nn.InstanceNorm2d(dim), nn.ReLU(), nn.Conv2d(dim, dim, 3, 2, 1)
        )
        self.context = nn.Conv2d(3, 2 * dim, 9, 8, 4)
        window = (2 * radius + 1) ** 2
        self.motion = nn.Conv2d(window + 2, dim, 3, padding=1)
        self.gate, self.candidate = nn.Conv2d(3 * dim, dim, 3, padding=1), nn.Conv2d(3 * dim, dim, 3, padding=1)
        self.flow, self.radius, self.dim = nn.Conv2d(dim, 2, 3, padding=1), radius, dim

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        one, two = self.features(first), self.features(second)
        batch, dim, rows, columns = one.shape
        volume = torch.matmul(one.flatten(2).transpose(1, 2), two.flatten(2)) / math.sqrt(dim)
        volume = volume.view(batch * rows * columns, 1, rows, columns)
        hidden, context = self.context(first).split((self.dim, self.dim), 1)
        hidden, context = hidden.tanh(), context.relu()
        ys, xs = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        start = torch.stack((xs, ys)).float()[None].repeat(batch, 1, 1, 1)
        at = start
        steps = torch.linspace(-self.radius, self.radius, 2 * self.radius + 1)
        delta = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1)
        for _ in range(3):
            centers = at.permute(0, 2, 3, 1).reshape(batch * rows * columns, 1, 1, 2) + delta
            xs, ys = centers.split((1, 1), -1)
            grid = torch.cat((2 * xs / (columns - 1) - 1, 2 * ys / (rows - 1) - 1), -1)
            looked = F.grid_sample(volume, grid, align_corners=True).view(batch, rows, columns, -1).permute(0, 3, 1, 2)
            inputs = torch.cat((self.motion(torch.cat((looked, at - start), 1)).relu(), context), 1)
            gate = self.gate(torch.cat((hidden, inputs), 1)).sigmoid()
            hidden = (1 - gate) * hidden + gate * self.candidate(torch.cat((hidden, inputs), 1)).tanh()
            at = at + self.flow(hidden)
        return 8 * F.interpolate(at - start, scale_factor=8, mode="bilinear", align_corners=True)


class U2Net(nn.Module):
    """Nested U blocks, with upsampling to the size of the skip connection."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.start = conv_bn(3, dim, act=nn.ReLU)
        self.down = nn.ModuleList(conv_bn(dim, dim, act=nn.ReLU) for _ in range(3))
        self.up = nn.ModuleList(conv_bn(2 * dim, dim, act=nn.ReLU) for _ in range(3))
        self.bottom = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=2, dilation=2), nn.BatchNorm2d(dim), nn.ReLU())
        self.sides = nn.ModuleList(nn.Conv2d(dim, 1, 3, padding=1) for _ in range(3))
        self.fuse = nn.Conv2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size, kept = x.shape[2:], []
        first = x = self.start(x)
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2, stride=2, ceil_mode=True)
        x, sides = self.bottom(x), []
        for block, skip, side in zip(self.up, reversed(kept), self.sides, strict=True):
            x = block(torch.cat((F.interpolate(x, size=skip.shape[2:], mode="bilinear"), skip), 1))
            sides.append(F.interpolate(side(x + 0), size=size, mode="bilinear"))
        sides[-1] = sides[-1] + first.mean(1, keepdim=True)
        return tuple(torch.sigmoid(each) for each in (self.fuse(torch.cat(sides, 1)), *sides))


class ModNet(nn.Module):
    """IBNorm, half BatchNorm and half InstanceNorm, squeeze-and-excitation, and a matte of three branches."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.conv, self.half = nn.Conv2d(3, dim, 3, 2, 1), dim // 2
        self.bn, self.norm = nn.BatchNorm2d(dim // 2), nn.InstanceNorm2d(dim // 2, affine=False)
        self.deep = conv_bn(dim, dim, 3, 2, nn.ReLU6)
        self.squeeze = nn.Sequential(
            nn.Linear(dim, 4, bias=False), nn.ReLU(), nn.Linear(4, dim, bias=False), nn.Sigmoid()
        )
        self.semantic, self.detail, self.matte = (nn.Conv2d(n, 1, 3, padding=1) for n in (dim, dim + 3, 2))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.conv(image)
        x = torch.cat((self.bn(x[:, : self.half].contiguous()), self.norm(x[:, self.half :].contiguous())), 1).relu()
        low = self.deep(x)
        weights = self.squeeze(F.adaptive_avg_pool2d(low, 1).flatten(1)).view(low.shape[0], -1, 1, 1)
        low = low * weights.expand_as(low)
        semantic = self.semantic(low).sigmoid()
        small = F.interpolate(image, scale_factor=0.5, mode="bilinear", align_corners=False)
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        detail = F.interpolate(self.detail(torch.cat((up, small), 1)).sigmoid(), scale_factor=2, mode="bilinear")
        coarse = F.interpolate(semantic, scale_factor=4, mode="bilinear")
        return semantic, detail, self.matte(torch.cat((coarse, detail), 1)).sigmoid()


class Crnn(nn.Module):
    """Convolutions to a height of one, then bidirectional LSTMs over the width; time comes first in the output."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(1, 8, act=nn.ReLU), nn.MaxPool2d(2), conv_bn(8, 16, act=nn.ReLU), nn.MaxPool2d((2, 1)),
            nn.Conv2d(16, 16, (4, 1)),
        )  # fmt: skip
        self.rnn, self.embed = nn.LSTM(16, 12, bidirectional=True), nn.Linear(24, 20)
        self.rnn2, self.head = nn.LSTM(20, 12, bidirectional=True), nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        assert x.shape[2] == 1
        x = x.squeeze(2).permute(2, 0, 1)
        for rnn, layer in ((self.rnn, self.embed), (self.rnn2, self.head)):
            x, _ = rnn(x)
            steps, batch, dim = x.shape
            x = layer(x.view(steps * batch, dim)).view(steps, batch, -1)
        return x.transpose(0, 1).log_softmax(2)


class HifiGan(nn.Module):
    """Weight-normed transposed convolutions, and residual blocks of several dilations that are averaged."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.pre, self.post = norm(nn.Conv1d(10, dim, 7, padding=3)), norm(nn.Conv1d(dim // 4, 1, 7, padding=3))
        self.ups = nn.ModuleList(norm(nn.ConvTranspose1d(dim >> i, dim >> (i + 1), 8, 4, 2)) for i in range(2))
        self.blocks = nn.ModuleList(
            norm(nn.Conv1d(dim >> (i + 1), dim >> (i + 1), 3, padding=d, dilation=d)) for i in range(2) for d in (1, 3)
        )

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = self.pre(mel)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            total = None
            for block in self.blocks[2 * i : 2 * i + 2]:
                y = x + block(F.leaky_relu(x, 0.1))
                total = y if total is None else total + y
            x = total / 2
        return torch.tanh(self.post(F.leaky_relu(x)))


class Mixer(nn.Module):
    """A 1x1 convolution by an inverted matrix, which the first call keeps on the module."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1, bias=False)
        self.conv.weight.data = torch.linalg.qr(torch.randn(channels, channels)).Q.contiguous().unsqueeze(-1)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "W_inverse"):
            self.W_inverse = self.conv.weight.squeeze().float().inverse()[..., None]
        return F.conv1d(audio, self.W_inverse)


class WaveGlow(nn.Module):
    """Inverse flow: gated layers with weight_norm, affine coupling, and the inverse of a 1x1 convolution."""

    def __init__(self, groups: int = 4, dim: int = 8) -> None:
        super().__init__()
        norm, half = torch.nn.utils.parametrizations.weight_norm, groups // 2
        self.starts = nn.ModuleList(norm(nn.Conv1d(half, dim, 1)) for _ in range(2))
        self.gates = nn.ModuleList(norm(nn.Conv1d(dim, 2 * dim, 3, padding=1)) for _ in range(2))
        self.conditions = nn.ModuleList(norm(nn.Conv1d(10, 2 * dim, 1)) for _ in range(2))
        self.ends = nn.ModuleList(nn.Conv1d(dim, groups, 1) for _ in range(2))
        self.mixers = nn.ModuleList(Mixer(groups) for _ in range(2))
        self.half, self.dim = half, dim

    def forward(self, mel: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        layers = (self.starts, self.gates, self.conditions, self.ends, self.mixers)
        for start, gate, condition, end, mixer in zip(*layers, strict=True):
            one, two = audio[:, : self.half], audio[:, self.half :]
            acts = gate(start(one)) + condition(mel)
            acts = acts[:, : self.dim].tanh() * acts[:, self.dim :].sigmoid()
            shift, scale = end(acts).chunk(2, 1)
            audio = mixer(torch.cat((one, (two - shift) * torch.exp(-scale)), 1))
        return audio.transpose(1, 2).flatten(1)


class PointNet2(nn.Module):
    """Farthest point sampling in a loop, groups of the nearest points, and a PointNet for each group."""

    def __init__(self, centers: int = 6, nearest: int = 4) -> None:
        super().__init__()
        self.local = nn.Sequential(conv_bn(3, 16, 1, act=nn.ReLU), conv_bn(16, 16, 1, act=nn.ReLU))
        self.overall = nn.Sequential(nn.Linear(19, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
        self.centers, self.nearest = centers, nearest

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        batch, count, _ = points.shape
        rows = torch.arange(batch, device=points.device)
        distance = torch.full((batch, count), 1e10, device=points.device)
        farthest = torch.zeros(batch, dtype=torch.long, device=points.device)
        chosen = []
        for _ in range(self.centers):
            chosen.append(farthest)
            center = points[rows, farthest].unsqueeze(1)
            distance = torch.minimum(distance, ((points - center) ** 2).sum(-1))
            farthest = distance.max(-1)[1]
        centers = points[rows[:, None], torch.stack(chosen, 1)]
        near = torch.cdist(centers, points).topk(self.nearest, dim=-1, largest=False)[1]
        groups = points[rows[:, None, None], near] - centers.unsqueeze(2)
        local = self.local(groups.permute(0, 3, 2, 1)).max(2)[0].transpose(1, 2)
        pooled = torch.cat((centers, local), 2).max(1)[0]
        return self.overall(pooled).log_softmax(-1)


Member = tuple[nn.Module, tuple[torch.Tensor, ...]]


def called(model: nn.Module, *args: torch.Tensor) -> Member:
    with torch.no_grad():
        model(*args)
    return model, args


# The route of each file, or a pattern of the reason why there is none.
_USUAL = {"torchscript": "trace", "onnx": "dynamo", "pt2": "export"}
FAMILIES: dict[str, tuple[Callable[[], Member], dict[str, str]]] = {
    "yolov5": (lambda: (YoloV5(), (torch.randn(2, 3, 32, 32),)), _USUAL),
    "yolov8": (lambda: (YoloV8(), (torch.randn(2, 3, 32, 32),)), _USUAL),
    "detr": (lambda: (Detr(), (torch.randn(2, 3, 32, 32),)), _USUAL),
    "raft": (lambda: (Raft(), (torch.randn(2, 3, 32, 40), torch.randn(2, 3, 32, 40))), _USUAL),
    "u2net": (lambda: (U2Net(), (torch.randn(2, 3, 36, 36),)), _USUAL),
    "modnet": (lambda: (ModNet(), (torch.randn(2, 3, 32, 32),)), _USUAL),
    "crnn": (lambda: (Crnn(), (torch.randn(2, 1, 16, 24),)), _USUAL),
    "hifigan": (lambda: (HifiGan(), (torch.randn(2, 10, 12),)), _USUAL),
    # ONNX has no inverse of a matrix: a file needs the one that an earlier call kept.
    "waveglow": (lambda: (WaveGlow(), _sound()), _USUAL | {"onnx": "No ONNX function found for .*linalg_inv_ex"}),
    "waveglow-called": (lambda: called(WaveGlow(), *_sound()), _USUAL),
    "pointnet2": (lambda: (PointNet2(), (torch.randn(2, 24, 3),)), _USUAL | {"onnx": "torchscript"}),
}


def _sound() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 10, 12), torch.randn(2, 4, 12)


def family(name: str) -> Member:
    """A member of a family: the model in eval mode, and the args of one call."""
    torch.manual_seed(0)
    model, args = FAMILIES[name][0]()
    return enliven(model).eval(), args
