"""Corruptions pixel by pixel, in plain loops and float64: the oracles of the batched operators.

Written from the descriptions in Hendrycks & Dietterich 2019 and of their scripts, without scipy,
torch or code of the product. Images are uint8 (H, W, 3); `c` are the constants of a severity; `d`
the draws. All return uint8.
"""

import colorsys
import math
from collections.abc import Callable

import numpy as np
from scipy.stats import poisson  # its percent points are the definition of the draw

Array = np.ndarray


def truncated(pixels: Array) -> Array:
    return (np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def clamp(index: int, size: int) -> int:
    return min(max(index, 0), size - 1)


def mirror_without_edge(index: int, size: int) -> int:
    while not 0 <= index < size:
        index = -index if index < 0 else 2 * (size - 1) - index
    return index


def mirror_with_edge(index: int, size: int) -> int:
    while not 0 <= index < size:
        index = -1 - index if index < 0 else 2 * size - 1 - index
    return index


def gaussian(
    pixels: Array, sigma: float, *, border: Callable = clamp, truncate: float = 4
) -> Array:
    radius = int(truncate * sigma + 0.5)
    taps = [
        math.exp(-(i**2) / (2 * sigma**2)) if sigma else 1.0 for i in range(-radius, radius + 1)
    ]
    for axis in (0, 1):
        size, source = pixels.shape[axis], np.moveaxis(pixels, axis, 0)
        weights, total = np.zeros((size, size)), sum(taps)
        for place in range(size):
            for tap, weight in enumerate(taps):
                weights[place, border(place + tap - radius, size)] += weight / total
        lines = [sum(w * line for w, line in zip(row, source, strict=True)) for row in weights]
        pixels = np.moveaxis(np.array(lines), 0, axis)
    return pixels


def gaussian_noise(image: Array, c: tuple, d: dict) -> Array:
    return truncated(image / 255 + c[0] * d["normal"])


def speckle_noise(image: Array, c: tuple, d: dict) -> Array:
    return truncated(image / 255 + image / 255 * c[0] * d["normal"])


def shot_noise(image: Array, c: tuple, d: dict) -> Array:
    counts = poisson.ppf(np.maximum(d["uniform"], 1e-300), image / 255 * c[0])
    return truncated(np.where(image == 0, 0, counts) / c[0])


def impulse_noise(image: Array, c: tuple, d: dict) -> Array:
    result = image.copy()
    for place in np.ndindex(*image.shape):
        draw = float(d["uniform"][place])
        if draw < c[0]:
            result[place] = 255 if draw < c[0] / 2 else 0
    return result


def gaussian_blur(image: Array, c: tuple, d: dict) -> Array:
    return truncated(gaussian(image / 255, c[0]))


def disk(radius: float, sigma: float) -> Array:
    half = 8 if radius <= 8 else int(radius)
    span = range(-half, half + 1)
    kernel = np.array([[float(x * x + y * y <= radius * radius) for x in span] for y in span])
    kernel /= kernel.sum()
    reach = 1 if radius <= 8 else 2
    taps = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-reach, reach + 1)]
    smooth = np.zeros_like(kernel)
    for y, x in np.ndindex(*kernel.shape):
        for i, down in enumerate(taps):
            for j, across in enumerate(taps):
                row = mirror_without_edge(y + i - reach, len(kernel))
                column = mirror_without_edge(x + j - reach, len(kernel))
                smooth[y, x] += down * across * kernel[row, column] / sum(taps) ** 2
    return smooth


def defocus_blur(image: Array, c: tuple, d: dict) -> Array:
    kernel = disk(*c)
    half = len(kernel) // 2
    height, width = image.shape[:2]
    rows = [mirror_without_edge(y, height) for y in range(-half, height + half)]
    columns = [mirror_without_edge(x, width) for x in range(-half, width + half)]
    padded = image[rows][:, columns] / 255
    result = np.zeros(image.shape)
    for y, x in np.ndindex(height, width):
        window = padded[y : y + 2 * half + 1, x : x + 2 * half + 1]
        result[y, x] = (window * kernel[..., None]).sum(axis=(0, 1))
    return truncated(result)


def glass_blur(image: Array, c: tuple, d: dict) -> Array:
    sigma, delta = c[0], int(c[1])
    shuffled = truncated(gaussian(image / 255, sigma) + 1e-9)
    height, width = image.shape[:2]
    for shifts in d["shifts"]:
        for y in range(height - delta, delta, -1):
            for x in range(width - delta, delta, -1):
                dx, dy = shifts[:, y - delta - 1, x - delta - 1]
                shuffled[y, x] = shuffled[y + dy, x + dx]  # a copy, although published as a swap
    return truncated(gaussian(shuffled / 255, sigma) + 1e-9)


def moved_along(levels: Array, radius: int, sigma: float, angle: float) -> Array:
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    height, width = levels.shape[:2]
    result = np.zeros(levels.shape)
    turn = angle * math.pi / 180
    for y, x in np.ndindex(height, width):
        for i, weight in enumerate(weights):
            row = clamp(y + math.ceil(i * math.sin(turn) - 0.5), height)
            column = clamp(x + math.ceil(i * math.cos(turn) - 0.5), width)
            result[y, x] += weight / sum(weights) * levels[row, column]
    sixteen_bits = np.floor(result * 257 + 0.5)
    return sixteen_bits // 257


def motion_blur(image: Array, c: tuple, d: dict) -> Array:
    return moved_along(image, int(c[0]), c[1], float(d["angle"])).astype(np.uint8)


def line_of_zoom(size: int, factor: float) -> list[tuple[int, int, float]]:
    """(pixel, next pixel, share of the next) of each place of a zoomed and trimmed line."""
    kept = math.ceil(size / factor)
    start, new = (size - kept) // 2, round(kept * factor)
    trim = (new - size) // 2
    places = []
    for index in range(trim, trim + size):
        where = index * (kept - 1) / (new - 1)
        first = min(int(where), kept - 2)
        places.append((start + first, start + first + 1, where - first))
    return places


def zoomed(pixels: Array, factor: float) -> Array:
    rows, columns = (line_of_zoom(size, factor) for size in pixels.shape[:2])
    result = np.zeros(pixels.shape)
    for y, (top, bottom, down) in enumerate(rows):
        for x, (left, right, across) in enumerate(columns):
            upper = (1 - across) * pixels[top, left] + across * pixels[top, right]
            lower = (1 - across) * pixels[bottom, left] + across * pixels[bottom, right]
            result[y, x] = (1 - down) * upper + down * lower
    return result


def zoom_blur(image: Array, c: tuple, d: dict) -> Array:
    factors = np.arange(1, 1 + (c[0] - 0.5) * c[1], c[1])
    assert len(factors) == c[0]
    total = image / 255
    for factor in factors:
        total = total + (zoomed(image / 255, factor) if factor > 1 else image / 255)
    return truncated(total / (len(factors) + 1))


def snow(image: Array, c: tuple, d: dict) -> Array:
    mean, deviation, zoom, threshold, radius, sigma, weight = c
    layer = mean + deviation * d["normal"].astype(float)
    layer = zoomed(layer, zoom) if zoom > 1 else layer
    layer[layer < threshold] = 0
    flakes = moved_along(truncated(layer), int(radius), sigma, float(d["angle"])) / 255
    result = np.zeros(image.shape)
    height, width = image.shape[:2]
    for y, x in np.ndindex(height, width):
        pixel = image[y, x] / 255
        white = 1.5 * (0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]) + 0.5
        base = weight * pixel + (1 - weight) * np.maximum(pixel, white)
        result[y, x] = base + flakes[y, x] + flakes[height - 1 - y, width - 1 - x]
    return truncated(result)


def plasma(uniform: Array, decay: float) -> Array:
    side = len(uniform)
    heights = {(0, 0): 0.0}
    step, rough = side, 100.0

    def around(y: int, x: int, offsets: list[tuple[int, int]]) -> float:
        mean = sum(heights[(y + i) % side, (x + j) % side] for i, j in offsets) / 4
        return mean + rough * rough * float(uniform[y, x])

    while step > 1:
        h = step // 2
        middles = [(y, x) for y in range(h, side, step) for x in range(h, side, step)]
        for y, x in middles:
            heights[y, x] = around(y, x, [(-h, -h), (-h, h), (h, -h), (h, h)])
        edges = [(y, x) for y in range(0, side, h) for x in range(0, side, h)]
        for y, x in edges:
            if (y // h + x // h) % 2:
                heights[y, x] = around(y, x, [(-h, 0), (h, 0), (0, -h), (0, h)])
        step, rough = h, rough / decay
    values = np.array([[heights[y, x] for x in range(side)] for y in range(side)])
    return (values - values.min()) / (values.max() - values.min())


def fog(image: Array, c: tuple, d: dict) -> Array:
    height, width = image.shape[:2]
    brightest = image.max() / 255
    layer = plasma(d["uniform"], c[1])[:height, :width, None]
    return truncated((image / 255 + c[0] * layer) * brightest / (brightest + c[0]))


def in_hsv(image: Array, change: Callable[[float, float, float], tuple]) -> Array:
    result = np.zeros(image.shape)
    for y, x in np.ndindex(*image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(image[y, x] / 255))
        result[y, x] = colorsys.hsv_to_rgb(*change(hue, saturation, value))
    return truncated(result)


def brightness(image: Array, c: tuple, d: dict) -> Array:
    return in_hsv(image, lambda h, s, v: (h, s, min(v + c[0], 1)))


def saturate(image: Array, c: tuple, d: dict) -> Array:
    return in_hsv(image, lambda h, s, v: (h, min(c[0] * s + c[1], 1), v))


def contrast(image: Array, c: tuple, d: dict) -> Array:
    means = [image[..., channel].mean() / 255 for channel in range(3)]
    return truncated((image / 255 - means) * c[0] + means)


def bilinear(pixels: Array, x: float, y: float, border: Callable) -> Array:
    left, top = math.floor(x), math.floor(y)
    across, down = x - left, y - top
    height, width = pixels.shape[:2]
    rows = [border(top, height), border(top + 1, height)]
    columns = [border(left, width), border(left + 1, width)]
    upper = (1 - across) * pixels[rows[0], columns[0]] + across * pixels[rows[0], columns[1]]
    lower = (1 - across) * pixels[rows[1], columns[0]] + across * pixels[rows[1], columns[1]]
    return (1 - down) * upper + down * lower


def elastic_transform(image: Array, c: tuple, d: dict) -> Array:
    strength, sigma, _ = c
    height, width = image.shape[:2]
    reach, x, y = min(height, width) // 3, width // 2, height // 2
    points = [(x + reach, y + reach), (x + reach, y - reach), (x - reach, y - reach)]
    moved = np.array(points) + d["jitter"].astype(float)
    forward = np.linalg.solve([[*point, 1] for point in points], moved).T  # 2 x 3: source to result
    back = np.linalg.inv(np.vstack([forward, [0, 0, 1]]))
    warped = np.zeros(image.shape)
    for y, x in np.ndindex(height, width):
        from_x, from_y, _ = back @ [x, y, 1]
        warped[y, x] = bilinear(image / 255, from_x, from_y, mirror_without_edge)
    if not strength:
        return truncated(warped)
    across, down = (
        strength * gaussian(field.astype(float), sigma, border=mirror_with_edge, truncate=3)
        for field in d["uniform"]
    )
    result = np.zeros(image.shape)
    for y, x in np.ndindex(height, width):
        result[y, x] = bilinear(warped, x + across[y, x], y + down[y, x], mirror_with_edge)
    return truncated(result)


def pixelate(image: Array, c: tuple, d: dict) -> Array:
    """Means over areas, rounded by Pillow after each direction; then the nearest."""
    levels = image.astype(float)
    for axis in (1, 0):
        lines = np.moveaxis(levels, axis, 0)
        size = len(lines)
        small = int(size * c[0])
        scale = size / small
        shrunk = []
        for index in range(small):  # Pillow's box: pixels whose centres lie in the interval
            inside = [k for k in range(size) if index * scale < k + 0.5 <= (index + 1) * scale]
            shrunk.append(np.floor(lines[inside].mean(axis=0) + 0.5))
        back = [shrunk[int((index + 0.5) * small / size)] for index in range(size)]
        levels = np.moveaxis(np.array(back), 0, axis)
    return levels.astype(np.uint8)


def spatter_mud(image: Array, c: tuple, d: dict) -> Array:
    mean, deviation, sigma, threshold, strength, _ = c
    liquid = gaussian(mean + deviation * d["normal"].astype(float), sigma)
    weight = gaussian((liquid > threshold).astype(float), strength)
    weight[weight < 0.8] = 0
    mud = np.array([63, 42, 20]) / 255
    return truncated(image / 255 * (1 - weight[..., None]) + weight[..., None] * mud)
