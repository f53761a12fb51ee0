"""Profiles: what a pair of models gave, plan by plan of recomputation. A header alone, as of maps, without arrays. SPEC.md, "Profiles"."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from formats.errors import ManifestError
from formats.manifest import ModelInfo, Node, model_of
from formats.tables import Arrays, Kind

VERSION = 1


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


def _described(profile: Profile) -> tuple[Mapping[str, Any], Arrays]:
    return asdict(profile) | {"texts": dict(profile.texts), "producer": dict(profile.producer)}, {}


def _made(root: Node, arrays: Arrays) -> Profile:
    if arrays:
        raise ManifestError(f"tensor {next(iter(arrays))!r:.40}, where a profile has none")
    rows: Sequence[Row] = [_row(node) for node in root.key("rows").elements()]
    mapping = root.key("mapping").optional(lambda node: node.digest())
    if mapping is None and any(row.mapped for row in rows):
        raise ManifestError("$.rows: one is mapped, but $.mapping names no map")
    if list(rows) != sorted(rows, key=lambda row: row.share):
        raise ManifestError("$.rows: must ascend by share")
    return Profile(
        source=model_of(root.key("source")),
        target=model_of(root.key("target")),
        mapping=mapping,
        texts={name: node.digest() for name, node in root.key("texts").items()},
        prefix=root.key("prefix").integer(1),
        scored=root.key("scored").integer(1),
        rows=tuple(rows),
        left_out=tuple(node.text() for node in root.key("left_out").elements()),
        producer=root.key("producer").texts(),
    )


def _row(node: Node) -> Row:
    share, kl, top1 = (node.key(name).number() for name in ("share", "kl", "top1"))
    ratio, low, high = (node.key(name).optional(lambda value: value.number()) for name in ("ratio", "low", "high"))
    if share < 0 or kl < 0 or not 0 <= top1 <= 1:
        raise node.fail(f"share and kl must be at least 0 and top1 within 0 to 1, but are {share}, {kl} and {top1}")
    return Row(node.key("plan").text(), node.key("mapped").boolean(), share, kl, ratio, low, high, top1)


KIND = Kind("profile", VERSION, "kvtool profile", described=_described, made=_made, sealed=True)
to_bytes, from_bytes, read_profile, write_profile = KIND.to_bytes, KIND.from_bytes, KIND.read, KIND.write
