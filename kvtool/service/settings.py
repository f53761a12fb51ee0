"""What a service is started with."""

from dataclasses import dataclass

MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        object_bytes: of one object.
        json_bytes: of any other body.
        tokens: ids in one look-up.
        page: entries in one answer.
        idle_seconds: without a byte from, or room for a byte to, the other side.
    """

    object_bytes: int = 64 << 30
    json_bytes: int = 16 * MB
    tokens: int = 2_000_000
    page: int = 1000
    idle_seconds: float = 60.0
