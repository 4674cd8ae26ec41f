"""Bytes of files as text and back, without loss. Imported by all below config.

A patch is text with any bytes in it: the files it edits may hold anything.
"""


def decode(data: bytes) -> str:
    """Text of any bytes; line ends stay as they are."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """The bytes ``decode`` had."""
    return text.encode("utf-8", "surrogateescape")
