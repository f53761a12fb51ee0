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
        objects: of one tenant, where there is a quota.
        spaces: of one tenant: each is looked through by every look-up.
        idle_seconds: without a byte from, or room for a byte to, the other side.
        rate: bytes a second that a body must bring on the whole, once `idle_seconds` are over.
        head_seconds: from a connection, or the end of an answer, to the end of the next request's headers.
        head_bytes: of a request's line and headers, about.
        connections: at once; beyond them requests are answered 503.
    """

    object_bytes: int = 64 << 30
    json_bytes: int = 16 * MB
    tokens: int = 2_000_000
    page: int = 1000
    objects: int = 1_000_000
    spaces: int = 1000
    idle_seconds: float = 60.0
    rate: float = 10_000.0
    head_seconds: float = 30.0
    head_bytes: int = 1 << 16
    connections: int = 400
