"""Profiles: what a pair of models gave, plan by plan of recomputation. A header alone, as of maps, without arrays. SPEC.md, "Profiles"."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from formats.atomic import atomic_write
from formats.errors import KVError, ManifestError
from formats.files import naming
from formats.manifest import ModelInfo, Node, model_of
from formats.tables import Kind, digest_of

VERSION = 1
KIND = Kind("profile", VERSION, sealed=True)


@dataclass(frozen=True)
class Row:
    """What one way to hand a cache over gave, mean of the texts.

    Attributes:
        plan: what is recomputed, as `--recompute` takes it; "" is nothing.
        mapped: whether rows go through the map.
        share: arithmetic of map and recomputation over that of the receiver's own prefill of `prefix` tokens.
        kl: KL(own prefill || this), nats a token.
        ratio, low, high: `kl` over that of the plain recode, and the ends of its 95 % interval, paired over texts; None of that one.
        top1: share of positions whose most likely token is that of the own prefill.
    """

    plan: str
    mapped: bool
    share: float
    kl: float
    ratio: float | None
    low: float | None
    high: float | None
    top1: float


@dataclass(frozen=True)
class Profile:
    """What a profile file holds.

    Attributes:
        source, target: the models.
        mapping: digest of the map that was used, or None.
        texts: name of each text -> blake3 (hex) of its token ids as little-endian int64.
        prefix: tokens cached. scored: tokens scored after them.
        rows: ascending by share.
        left_out: what could not be measured for this pair, and why.
        producer: versions of what wrote it.
    """

    source: ModelInfo
    target: ModelInfo
    mapping: str | None
    texts: Mapping[str, str]
    prefix: int
    scored: int
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    producer: Mapping[str, str] = field(default_factory=dict)

    def front(self) -> tuple[bool, ...]:
        """Of each row, whether no other has less divergence for at most its share."""
        return tuple(not any(_better(other, row) for other in self.rows) for row in self.rows)


def _better(a: Row, b: Row) -> bool:
    return a.share <= b.share and a.kl <= b.kl and (a.share, a.kl) != (b.share, b.kl)


def to_bytes(profile: Profile) -> bytes:
    """The file as bytes.

    Raises:
        ValueError: content that a reader would refuse.
    """
    body = asdict(profile) | {"texts": dict(profile.texts), "producer": dict(profile.producer)}
    data = KIND.to_bytes(body, {})
    try:
        _made(KIND.parse(data)[0])
    except KVError as error:
        raise ValueError(f"[profile] it could not be read again: {error}") from error
    return data


def read_profile(path: str | os.PathLike[str]) -> tuple[Profile, str]:
    """A profile file and its digest (hex).

    Raises:
        FormatError: what is wrong with it.
        OSError: it cannot be read.
    """
    with naming(os.fspath(path)):
        root, _, digest = KIND.read(path)
        return _made(root), digest


def write_profile(path: str | os.PathLike[str], profile: Profile) -> str:
    """Write a profile file, atomically; returns its digest.

    Raises:
        ValueError: content that a reader would refuse.
        OSError: as the system gives it.
    """
    data = to_bytes(profile)
    with atomic_write(path) as out:
        out.write(data)
    return digest_of(data)


def _made(root: Node) -> Profile:
    rows: Sequence[Row] = [_row(node) for node in root.key("rows").elements()]
    if list(rows) != sorted(rows, key=lambda row: row.share):
        raise ManifestError("$.rows: must ascend by share")
    return Profile(
        source=model_of(root.key("source")),
        target=model_of(root.key("target")),
        mapping=root.key("mapping").optional(lambda node: node.digest()),
        texts={name: node.digest() for name, node in root.key("texts").items()},
        prefix=root.key("prefix").integer(1),
        scored=root.key("scored").integer(1),
        rows=tuple(rows),
        left_out=tuple(node.text() for node in root.key("left_out").elements()),
        producer={name: node.text() for name, node in root.key("producer").items()},
    )


def _row(node: Node) -> Row:
    share, kl, top1 = (node.key(name).number() for name in ("share", "kl", "top1"))
    ratio, low, high = (node.key(name).optional(lambda value: value.number()) for name in ("ratio", "low", "high"))
    if share < 0 or kl < 0 or not 0 <= top1 <= 1:
        raise node.fail(f"share and kl must be at least 0 and top1 within 0 to 1, but are {share}, {kl} and {top1}")
    return Row(node.key("plan").text(), node.key("mapped").boolean(), share, kl, ratio, low, high, top1)
