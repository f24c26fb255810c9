#!/usr/bin/env -S python3 -B
"""Writes a checkpoint by the description in docs/FORMATS.md, independently of src/train.

usage: make_checkpoint.py FILE [BLOBS]
"""
import struct
import sys


def crc32c(data, crc=0):
    """Bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def name(text):
    """A length, the name and a NUL."""
    return struct.pack("B", len(text)) + text.encode() + b"\0"


def checkpoint(blobs):
    """The bytes of a file with these (name, bytes)."""
    settings = b'{"seed": 1}'
    tables = b"\0" + name("cursor") + struct.pack("<q", -2)
    tables += b"\1" + name("nan") + struct.pack("<d", float("nan"))
    for text, data in blobs:
        tables += name(text) + struct.pack("<Q", len(data))
    header = 44 + len(settings) + 1 + len(tables) + 4
    size = header + sum(len(data) for _, data in blobs) + 4 * len(blobs) + 12
    head = b"NBCKPT\r\n" + struct.pack("<IIQQIII", 1, header, size, 7, len(settings), 2,
                                       len(blobs)) + settings + b"\0" + tables
    crc = crc32c(head)
    trailer = b"".join(struct.pack("<I", crc32c(data)) for _, data in blobs) + b"NBCKEND\n"
    return (head + struct.pack("<I", crc) + b"".join(data for _, data in blobs) + trailer +
            struct.pack("<I", crc32c(trailer, crc)))


def main():
    """Writes the file."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    blobs = [("abc", b"abc"), ("empty", b"")] + [(f"t{i}", bytes([i])) for i in range(count - 2)]
    with open(sys.argv[1], "wb") as file:
        file.write(checkpoint(blobs[:count]))


if __name__ == "__main__":
    main()
