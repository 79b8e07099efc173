"""Images and cells of a grid, and the start of a PNG file."""

import struct
import zlib

import torch

from flow_grpo.data.grid import ImageInfo


def pictures(count=5, height=6, width=10):
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(0)) / 255


CELLS = [ImageInfo(f'prompt "{i}" <b>é</b> \x1b[31m', i, "tiny") for i in range(5)]


def header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
