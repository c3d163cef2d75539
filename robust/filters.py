"""Filters and warps for batches of images; the corruptions are built from them.

x: (B, C, H, W) float32, in grey levels, on any device.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F


def quantise(x, guard=2 ** -12):
    """Turn grey levels into uint8: clip and truncate.

    The guard is added so that float32 rounding errors do not darken flat areas.
    """
    x = (x + guard).clamp_(0, 255)
    return x.int().byte()                                       # through int32: faster on a CPU


def gaussian(radius, sigma):
    """Return a Gaussian at -radius to radius with sum 1, (2 * radius + 1,) float64."""
    k = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weight = (-k ** 2 / (2 * max(sigma, 1e-9) ** 2)).exp()
    return weight / weight.sum()


@lru_cache(maxsize=None)
def disk(radius, sigma):
    """Return a disk-shaped kernel whose edge is smoothed by a small Gaussian, (side, side) float64.

    The sum is 1.013 for radius 8 and 1.011 for 10, as in the source; else 1 up to rounding.
    """
    half = 8                                                # the kernel is 2 half + 1 pixels wide
    edge = 1                                                # the Gaussian is 2 edge + 1 pixels wide
    if radius > 8:
        half = radius
        edge = 2
    side = 2 * half + 1
    place = torch.arange(-half, half + 1)
    kernel = (place ** 2 + place[:, None] ** 2 <= radius ** 2).float()
    kernel = kernel / kernel.sum()
    kernel = F.pad(kernel[None, None], [edge] * 4, mode="reflect")[0, 0]
    # Smooth rows, then columns, in float32 and in OpenCV's order: the sums of pairs are weighted.
    g = gaussian(edge, sigma).float()
    for _ in range(2):
        kernel = kernel.T
        total = kernel[edge:edge + side] * g[edge]
        for i in range(1, edge + 1):
            before = kernel[edge - i:edge - i + side]
            after = kernel[edge + i:edge + i + side]
            total = total + (before + after) * g[edge + i]
        kernel = total
    kernel = (kernel.double() + kernel.mT) / 2            # exactly symmetric; keeps the sum
    used = kernel.sum(0) > 0
    empty = int(used.int().argmax())                        # columns of zeros before the disk
    return kernel[empty:side - empty, empty:side - empty]


def gaussian_blur(x, sigma):
    """Filter x with a Gaussian up to 4 sigma; borders repeat, as in scikit-image."""
    B, C = x.shape[:2]
    radius = int(4 * sigma + 0.5)
    g = gaussian(radius, sigma).float().to(x.device)
    x = F.pad(x, [radius] * 4, mode="replicate").flatten(0, 1)[None]        # (1, B * C, h, w)
    for kernel in g[None, :], g[:, None]:
        x = F.conv2d(x, kernel.expand(B * C, 1, -1, -1), groups=B * C)
    return x[0].unflatten(0, (B, C))


def motion(x, radius, sigma, angle):
    """Smear images along a line: a one-sided Gaussian over 2 * radius + 1 whole-pixel shifts.

    Borders repeat. angle: (B,) in degrees. The result equals ImageMagick's MotionBlur.
    """
    H, W = x.shape[2:]
    reach = 2 * radius
    length = torch.arange(reach + 1, device=x.device, dtype=angle.dtype)[:, None]       # of a shift
    weights = [math.exp(-i ** 2 / (2 * sigma ** 2)) for i in range(reach + 1)]
    # nearest whole number, halves down, as in ImageMagick
    dy = (length * torch.sin(angle * (math.pi / 180)) - 0.5).ceil().long()      # (shifts, B)
    dx = (length * torch.cos(angle * (math.pi / 180)) - 0.5).ceil().long()
    padded = F.pad(x, [reach] * 4, mode="replicate")
    windows = padded.unfold(2, H, 1).unfold(3, W, 1)        # (B, C, top, left, H, W), a view
    image = torch.arange(len(x), device=x.device)
    out = torch.zeros_like(x)
    for weight, top, left in zip(weights, reach + dy, reach + dx):
        shifted = windows[image, :, top, left]              # (B, C, H, W)
        out.add_(shifted, alpha=weight / sum(weights))
    return out


def bilinear(x, across, down, align_corners):
    """Interpolate pixels bilinearly at coordinates that broadcast to (B, H, W).

    The image is mirrored at the centres (align_corners) or the outer edges of its border pixels.
    """
    edge = 0 if align_corners else 0.5
    h, w = x.shape[2:]
    across = (across + edge) * (2 / (w - 1 + 2 * edge)) - 1              # grid_sample wants [-1, 1]
    down = (down + edge) * (2 / (h - 1 + 2 * edge)) - 1
    grid = torch.stack(torch.broadcast_tensors(across, down), -1)
    grid = grid.expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=align_corners)


def pixel_grid(H, W, device):
    """Return the coordinates of the pixels: across (W,), down (H, 1); float32."""
    across = torch.arange(W, device=device).float()
    down = torch.arange(H, device=device).float()
    return across, down[:, None]


def enlarge(x, factor, H, W):
    """Zoom (B, C, h, w) bilinearly by `factor`, corners aligned; return the first H x W pixels."""
    h, w = x.shape[2:]
    across, down = pixel_grid(H, W, x.device)
    across = across * ((w - 1) / (round(w * factor) - 1))
    down = down * ((h - 1) / (round(h * factor) - 1))
    return bilinear(x, across, down, align_corners=True)


@lru_cache(maxsize=32)
def smoothing(size, sigma, device):
    """Return the matrix (size, size) of a Gaussian filter up to 3 sigma; borders reflect."""
    radius = int(3 * sigma + 0.5)
    source = torch.arange(size)[:, None] + torch.arange(-radius, radius + 1)
    source = source % (2 * size)
    source = torch.minimum(source, 2 * size - 1 - source)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, source, gaussian(radius, sigma).expand(size, -1))
    return matrix.float().to(device)


def displace(x, sigma, shift):
    """Smooth the shifts with a Gaussian, then move each pixel by its shift.

    sigma: (across, down), of the Gaussian. shift: (B, 2, H, W), in pixels, across and down.
    """
    H, W = x.shape[2:]
    across_matrix = smoothing(W, sigma[0], x.device).mT
    down_matrix = smoothing(H, sigma[1], x.device)
    # Multiply one by one: on some processors a batched product rounds differently per batch size.
    # Multiply copies, because rounding can also depend on where a matrix begins in memory.
    smooth = [down_matrix @ one.clone() @ across_matrix for one in shift.flatten(0, 1)]
    shift = torch.stack(smooth).view_as(shift)
    across, down = pixel_grid(H, W, x.device)
    return bilinear(x, across + shift[:, 0], down + shift[:, 1], align_corners=False)


@lru_cache(maxsize=32)
def boxes(size, n, device):
    """Divide `size` pixels into n windows [int(i * s + 0.5), int((i + 1) * s + 0.5)), s = size / n.

    Returns the members of each window in a column, (widest, n), and its length, (n, 1). Where a
    window is shorter than the widest one, its member is `size`, a row of zeros in box_shrink.
    """
    edge = torch.tensor([int(i * size / n + 0.5) for i in range(n + 1)])
    length = edge.diff()
    member = edge[:-1] + torch.arange(int(length.max()))[:, None]
    member = torch.where(member < edge[1:], member, size)
    return member.to(device), length[:, None].float().to(device)


def box_shrink(images, n):
    """Shrink (B, 3, H, W) to n rows, uint8, by averages over windows, as PIL's BOX filter does."""
    member, length = boxes(images.shape[2], n, images.device)
    x = F.pad(images, (0, 0, 0, 1))                         # row `size`: zeros
    total = x.index_select(2, member[0]).float()
    for rows in member[1:]:
        total += x.index_select(2, rows).float()
    mean = total.mul_(1 / length)
    return mean.add_(0.5).byte()                            # rounds: byte() truncates
