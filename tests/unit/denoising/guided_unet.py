"""A small UNet with the names, the order and the arithmetic of guided-diffusion, as an oracle.

Written from the papers' description (Dhariwal & Nichol 2021, app. B): numbered input, middle and
output blocks, attention over fused queries, keys and values, time as scale and shift or as a bias.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def norm(channels):
    return nn.GroupNorm(32, channels)


def time_waves(times, width):
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2))
    angles = times[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class Res(nn.Module):
    def __init__(self, given, made, time, *, scale_shift, change="none"):
        super().__init__()
        self.scale_shift, self.change = scale_shift, change
        self.in_layers = nn.Sequential(norm(given), nn.SiLU(), nn.Conv2d(given, made, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time, made * (1 + scale_shift)))
        self.out_layers = nn.Sequential(
            norm(made), nn.SiLU(), nn.Dropout(0), nn.Conv2d(made, made, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if given == made else nn.Conv2d(given, made, 1)

    def resample(self, x):
        if self.change == "down":
            return F.avg_pool2d(x, 2)
        return F.interpolate(x, scale_factor=2, mode="nearest") if self.change == "up" else x

    def forward(self, x, emb):
        h = self.in_layers[2](self.resample(self.in_layers[:2](x)))
        wave = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = wave.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + wave)
        return self.skip_connection(self.resample(x)) + h


class Attention(nn.Module):
    def __init__(self, channels, head_width, order):
        super().__init__()
        self.head_width, self.order = head_width, order
        self.norm = norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x, emb):
        flat = x.flatten(2)
        batch, channels, length = flat.shape
        heads, width = channels // self.head_width, self.head_width
        qkv = self.qkv(self.norm(flat))
        if self.order == "legacy":  # head by head: its queries, its keys, its values
            q, k, v = qkv.reshape(batch * heads, 3 * width, length).split(width, dim=1)
        else:  # queries of all heads, keys of all heads, values of all heads
            q, k, v = (part.reshape(batch * heads, width, length) for part in qkv.chunk(3, dim=1))
        weights = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(width), dim=-1)
        h = torch.einsum("bts,bcs->bct", weights, v).reshape(batch, channels, length)
        return (flat + self.proj_out(h)).reshape(x.shape)


class Down(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x, emb):
        return self.op(x)


class Up(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, emb):
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Stem(nn.Conv2d):
    def forward(self, x, emb):
        return super().forward(x)


class GuidedUNet(nn.Module):
    def __init__(
        self, *, channels=3, made=6, width=32, mults=(1, 2), attends=(False, True), num_res=1,
        head_width=16, num_heads=None, order="legacy", scale_shift=True, resnet_resampling=True,
    ):  # fmt: skip
        super().__init__()
        self.width, time = width, 4 * width
        self.time_embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))

        def res(given, out, change="none"):
            return Res(given, out, time, scale_shift=scale_shift, change=change)

        def attention(out):  # a constant width of heads, or a constant number of them
            return Attention(out, out // num_heads if num_heads else head_width, order)

        def layers(given, out, attending):
            return [res(given, out), *([attention(out)] if attending else [])]

        blocks, kept, here = [[Stem(channels, width, 3, padding=1)]], [width], width
        for level, mult in enumerate(mults):
            for _ in range(num_res):
                blocks.append(layers(here, mult * width, attends[level]))
                here = mult * width
                kept.append(here)
            if level < len(mults) - 1:
                blocks.append([res(here, here, "down") if resnet_resampling else Down(here)])
                kept.append(here)
        self.input_blocks = nn.ModuleList(nn.ModuleList(block) for block in blocks)
        middle = [res(here, here), attention(here), res(here, here)]
        self.middle_block = nn.ModuleList(middle)
        blocks = []
        for level in reversed(range(len(mults))):
            for number in range(num_res + 1):
                block = layers(here + kept.pop(), mults[level] * width, attends[level])
                here = mults[level] * width
                if level and number == num_res:
                    block.append(res(here, here, "up") if resnet_resampling else Up(here))
                blocks.append(block)
        self.output_blocks = nn.ModuleList(nn.ModuleList(block) for block in blocks)
        last = nn.Conv2d(here, made, 3, padding=1)
        self.out = nn.Sequential(norm(here), nn.SiLU(), last)

    def forward(self, x, times):
        emb, kept = self.time_embed(time_waves(times, self.width)), []
        for block in self.input_blocks:
            for layer in block:
                x = layer(x, emb)
            kept.append(x)
        for layer in self.middle_block:
            x = layer(x, emb)
        for block in self.output_blocks:
            x = torch.cat([x, kept.pop()], dim=1)
            for layer in block:
                x = layer(x, emb)
        return self.out(x)
