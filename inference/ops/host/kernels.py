"""Loops over rows, heads and segments, compiled by numba; what happens within a row is in simd.py. None allocates or holds the GIL.

Callers (fast.py) see to it that arrays are f32 with unit stride along the last axis and that outputs are fresh. Row kernels take
[T, H, D] with any strides before the last axis.
"""
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from .jit import kernel
from .simd import (
    BF16_DOT,
    LANES,
    ROWS,
    WIDTH,
    add_row,
    column,
    gelu_row,
    gelu_tanh_row,
    halves_row,
    layer_norm_row,
    panel_row,
    rms_norm_row,
    rotate_row,
    scale_row,
    silu_row,
    softmax_row,
    tile,
    tile_bf16,
    transpose,
)

QUERIES = 2 * ROWS                                          # query rows whose scores are held at once, in the first-level cache
DEPTH = 1024                                                # rows of a weight panel that are used at once, in the second-level cache
BLOCK = 1 << 16                                             # elements of the rows that meet them there
TURNS = 4 if LANES == 8 else 1                              # tiles that share fetching the next panel, if there are no more
F32 = np.float32


@kernel("void(float32[:,:,:], float32[:,:,::1])")
def gelu(x, out):
    source, target = x.ctypes.data, out.ctypes.data
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            gelu_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1], x.shape[2])


@kernel("void(float32[:,:,:], float32[:,:,::1])")
def gelu_tanh(x, out):
    source, target = x.ctypes.data, out.ctypes.data
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            gelu_tanh_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1], x.shape[2])


@kernel("void(float32[:,:,:], float32[:,:,::1])")
def silu(x, out):
    source, target = x.ctypes.data, out.ctypes.data
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            silu_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1], x.shape[2])


@kernel("void(float32[:,:,:], float32[:,:,::1], float32[::1], float32[::1], float32)")
def layer_norm(x, out, weight, bias, eps):
    source, target = x.ctypes.data, out.ctypes.data
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            layer_norm_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1],
                           weight.ctypes.data, bias.ctypes.data, x.shape[2], eps)


@kernel("void(float32[:,:,:], float32[:,:,::1], float32[::1], float32)")
def rms_norm(x, out, weight, eps):
    source, target = x.ctypes.data, out.ctypes.data
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            rms_norm_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1],
                         weight.ctypes.data, x.shape[2], eps)


@kernel("void(float32[:,:,:], float32[:,:,::1], float32[:,::1], float32[:,::1])")
def rope(x, out, cos, sin):
    """Pairs (i, i + half) of every head; what stands behind 2 * half is copied."""
    source, target, half = x.ctypes.data, out.ctypes.data, cos.shape[1]
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            rotate_row(source + i * x.strides[0] + j * x.strides[1], target + i * out.strides[0] + j * out.strides[1],
                       cos.ctypes.data + i * cos.strides[0], sin.ctypes.data + i * sin.strides[0], half)
            for d in range(2 * half, x.shape[2]):
                out[i, j, d] = x[i, j, d]


@kernel("void(float32[:,:], int32[::1], float32[:,::1])")
def mean(x, starts, out):
    """[T, D] -> [B, D]: rows are added in order."""
    width, source = x.shape[1], x.ctypes.data
    for b in range(starts.size - 1):
        target = out.ctypes.data + b * out.strides[0]
        out[b] = F32(0)
        for i in range(starts[b], starts[b + 1]):
            add_row(target, source + i * x.strides[0], target, width)
        scale_row(target, width, F32(1) / F32(starts[b + 1] - starts[b]))


@kernel("void(float32[:,::1], float32[:,:,::1], intp)")
def pack(rows, panels, first):
    """Rows of a weight [n, K] into its panels [P, K, WIDTH], from panel `first` on. What stands in f32 may be any four bytes."""
    depth, across = rows.shape[1], rows.strides[0]
    whole = depth - depth % LANES
    for top in range(0, rows.shape[0], LANES):
        panel, column = first + top // WIDTH, top % WIDTH
        count = min(LANES, rows.shape[0] - top)
        done = 0
        if count == LANES:
            source = rows.ctypes.data + top * across
            target = panels.ctypes.data + panel * panels.strides[0] + 4 * column
            for k in range(0, whole, LANES):
                transpose(source + 4 * k, across, target + 4 * WIDTH * k)
            done = whole
        for k in range(done, depth):
            for j in range(count):
                panels[panel, k, column + j] = rows[top + j, k]


@kernel("void(float32[:,:], float32[:,:,::1], float32[::1], float32[:,::1], intp, intp)")
def linear(x, panels, start, out, first, last):
    """out = x @ weight.T + bias, panels `first` to `last` of it: [T, K], weight as [P, K, WIDTH], bias as [P * WIDTH] -> [T, N].

    Long rows are cut into equal parts of at most DEPTH; a sum goes on where the part before it ended.
    """
    rows, depth, columns = x.shape[0], panels.shape[1], out.shape[1]
    parts = -(-depth // DEPTH)
    part = -(-depth // parts)
    height = max(BLOCK // part, ROWS)
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        tiles = -(-(bottom - top) // ROWS)
        turns = tiles if tiles <= TURNS else 1
        pace = 4 * WIDTH // turns
        for low in range(0, depth, part):
            deep = min(part, depth - low)
            for p in range(first, last):
                panel = panels.ctypes.data + p * panels.strides[0] + low * panels.strides[1]
                i = top
                for t in range(tiles):
                    count = (bottom - i) // (tiles - t)
                    target = out.ctypes.data + i * out.strides[0] + p * WIDTH * 4
                    origin, stride = (target, columns) if low else (start.ctypes.data + p * WIDTH * 4, 0)
                    tile(count, x.ctypes.data + i * x.strides[0] + low * 4, x.strides[0] // 4, panel, deep, target, columns,
                         columns - p * WIDTH, origin, stride, panels.strides[0] + t % turns * deep * pace, pace)
                    i += count


@kernel("void(float32[:,:,:], float32[:,:,:], float32[:,:,:], float32[:,:,::1], int32[::1], int32[::1], boolean[::1], "
        "boolean, intp, float32, float32[::1], intp, intp)")
def attention(q, k, v, out, starts, parent, hidden, causal, window, scale, scratch, first, last):
    """Heads of keys and values `first` to `last`, of every segment: [T, H, Dh], [T, Hkv, Dh] x 2 -> [T, H, Dh].

    parent: [B] or empty; hidden: [T] or empty; window: -1 for none. scratch holds `WIDTH` zeros, QUERIES
    totals, the keys of one head in panels, its values in panels, and the scores of QUERIES rows, for the segment with the most keys
    (`scratch_size`).
    """
    width, groups = q.shape[2], q.shape[1] // k.shape[1]
    value_panels = -(-width // WIDTH)
    zeros = scratch.ctypes.data
    for s in range(starts.size - 1):
        begin, length = starts[s], starts[s + 1] - starts[s]
        before = 0                                          # rows of the shared prefix
        prefix = 0
        if parent.size and parent[s] >= 0:
            prefix = starts[parent[s]]
            before = starts[parent[s] + 1] - prefix
        count = before + length
        padded = -(-count // WIDTH) * WIDTH
        keys = zeros + 4 * (WIDTH + QUERIES)
        values = keys + 4 * padded * width
        scores = values + 4 * value_panels * WIDTH * count
        for h in range(first, last):
            for j in range(count):
                row = prefix + j if j < before else begin + j - before
                column(k.ctypes.data + row * k.strides[0] + h * k.strides[1],
                       keys + 4 * (j // WIDTH * WIDTH * width + j % WIDTH), width, WIDTH)
                for d in range(value_panels):
                    panel_row(v.ctypes.data + row * v.strides[0] + h * v.strides[1] + 4 * d * WIDTH,
                              values + 4 * WIDTH * (d * count + j), width - d * WIDTH)
            for g in range(h * groups, (h + 1) * groups):
                for top in range(0, length, QUERIES):
                    rows = min(QUERIES, length - top)
                    at = before + top                       # the position of the block's first row
                    low, high = 0, count                    # keys that any of its rows sees
                    if window >= 0:
                        low = max(at - window, 0) // WIDTH * WIDTH
                        high = min(at + rows + window, count)
                    if causal:
                        high = min(high, at + rows)
                    query = q.ctypes.data + (begin + top) * q.strides[0] + g * q.strides[1]
                    tiles = -(-rows // ROWS)
                    for p in range(low, high, WIDTH):
                        i = 0
                        for t in range(tiles):
                            many = (rows - i) // (tiles - t)
                            tile(many, query + i * q.strides[0], q.strides[0] // 4, keys + 4 * p * width, width,
                                 scores + 4 * (i * padded + p), padded, WIDTH, zeros, 0, 0, 0)
                            i += many
                    base = (scores - zeros) // 4
                    for i in range(rows):
                        row = base + i * padded
                        one, end = low, high
                        if window >= 0:
                            one, end = max(one, at + i - window), min(end, at + i + window + 1)
                        if causal:
                            end = min(end, at + i + 1)
                        if hidden.size:
                            seen = 0
                            for j in range(one, end):
                                if hidden[prefix + j if j < before else begin + j - before]:
                                    scratch[row + j] = -np.inf
                                else:
                                    seen += 1
                            if seen == 0:
                                one, end = at + i, at + i + 1
                                scratch[row + one] = F32(0)
                        for j in range(low, one):
                            scratch[row + j] = F32(0)
                        for j in range(end, high):
                            scratch[row + j] = F32(0)
                        scratch[WIDTH + i] = softmax_row(zeros + 4 * (row + one), end - one, scale)
                    target = out.ctypes.data + (begin + top) * out.strides[0] + g * out.strides[1]
                    for d in range(value_panels):
                        i = 0
                        for t in range(tiles):
                            many = (rows - i) // (tiles - t)
                            tile(many, scores + 4 * (i * padded + low), padded, values + 4 * WIDTH * (d * count + low), high - low,
                                 target + i * out.strides[0] + 4 * d * WIDTH, out.strides[0] // 4, width - d * WIDTH, zeros, 0, 0, 0)
                            i += many
                    for i in range(rows):
                        scale_row(target + i * out.strides[0], width, F32(1) / scratch[WIDTH + i])


def scratch_size(keys: int, width: int) -> int:
    """Elements that `attention` needs for a segment that sees `keys` rows."""
    padded = -(-keys // WIDTH) * WIDTH
    return WIDTH + QUERIES + padded * width + -(-width // WIDTH) * WIDTH * keys + QUERIES * padded


if BF16_DOT:                                                # others have no such instructions, and LLVM would end the process
    @kernel("void(float32[:,:], uint16[:,::1])")
    def halves(x, out):
        """f32 to bf16, [T, K] -> [T, K'], K' the next multiple of 2 * LANES."""
        for i in range(x.shape[0]):
            halves_row(x.ctypes.data + i * x.strides[0], out.ctypes.data + i * out.strides[0], x.shape[1])

    @kernel("void(uint32[:,::1], uint32[:,:,::1], float32[::1], float32[:,::1], intp, intp)")
    def linear_bf16(x, panels, start, out, first, last):
        """As `linear`, along K in pairs of bf16; products of a pair are added to the sum one after the other."""
        rows, depth, columns = x.shape[0], panels.shape[1], out.shape[1]
        parts = -(-depth // DEPTH)
        part = -(-depth // parts)
        height = max(BLOCK // part, ROWS)
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            tiles = -(-(bottom - top) // ROWS)
            turns = tiles if tiles <= TURNS else 1
            pace = 4 * WIDTH // turns
            for low in range(0, depth, part):
                deep = min(part, depth - low)
                for p in range(first, last):
                    panel = panels.ctypes.data + p * panels.strides[0] + low * panels.strides[1]
                    i = top
                    for t in range(tiles):
                        count = (bottom - i) // (tiles - t)
                        target = out.ctypes.data + i * out.strides[0] + p * WIDTH * 4
                        origin, stride = (target, columns) if low else (start.ctypes.data + p * WIDTH * 4, 0)
                        tile_bf16(count, x.ctypes.data + i * x.strides[0] + low * 4, x.strides[0] // 4, panel, deep, target, columns,
                                  columns - p * WIDTH, origin, stride, panels.strides[0] + t % turns * deep * pace, pace)
                        i += count
