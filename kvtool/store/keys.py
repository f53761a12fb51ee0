"""Names of a store's objects: what a chunk of a prompt is called depends on all tokens up to its end, on the model and on the codec.

    space   = blake3(JSON of what all chunks of a space have in common: model, layers, codec, calibration, tokens a chunk)
    key_0   = space,  key_i = blake3(key_(i-1) | ids of chunk i, uint32 little-endian)

    spaces/<space>.json                                   that JSON
    chunks/<2>/<key>-<parent>-<start>-<tokens>.kv         the parent's first 16 digits, the first token, how many
    tails/<2>/<parent>/<start>-<tokens>-<recent>-<hash>.kv   what follows the parent's chunk at the end of one prompt, its newest rows exact
    models/<weights>.json                                 the model's name and size
    calibrations/<digest>.safetensors                     tables that chunks were coded with
    pins/<id>                                             the name of an object that stays

Where objects are encrypted, every blake3 above is keyed with a key derived from the store's.

A chunk's parent is in its name, so that a listing alone says which objects others need.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from formats.errors import DigestError, IncompatibleError, ManifestError
from formats.manifest import ModelInfo
from formats.strict_json import Room, loads
from kvtool.compat import identity_key
from kvtool.probe import CacheProbe, RoleProbe
from veloxquant_mlx.codecs import CodecPlan, parse_codec

SCHEMA = 1
CHUNK = 256
SHORT = 16  # digits of a parent in a chunk's name: enough to tell what needs what, never to find a chunk by
MAX_CHUNK = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"schema", "algorithm", "model", "layers", "codec", "calibration", "chunk"}
_CHUNK_NAME = re.compile(r"chunks/[0-9a-f]{2}/([0-9a-f]{64})-([0-9a-f]{16})-([0-9]{1,10})-([0-9]{1,6})\.kv")
_TAIL_NAME = re.compile(r"tails/[0-9a-f]{2}/([0-9a-f]{64})/([0-9]{1,10})-([0-9]{1,10})-([0-9]{1,6})-([0-9a-f]{32})\.kv")


@dataclass(frozen=True)
class Space:
    """What all chunks of a space have in common.

    Attributes:
        data: the JSON whose blake3 is the space's key.
        about: the same, parsed.
        secret: key of all hashes where objects are encrypted, so that nobody without it can test a guess of a prompt.
    """

    data: bytes
    about: dict[str, Any]
    secret: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        model: ModelInfo,
        probes: Sequence[CacheProbe],
        plan: CodecPlan,
        calibration: str | None,
        chunk: int = CHUNK,
        secret: bytes | None = None,
    ) -> "Space":
        """The space of what `model` computes and `plan` codes.

        Args:
            probes: the model's layers.
            plan: its newest exact rows are no part of it: chunks have none.
            calibration: digest of the tables that the codec takes, None without.
            chunk: tokens of a chunk.
            secret: the back end's `name_key`.
        Raises:
            IncompatibleError: the model has no identity.
            ValueError: chunk is not 1 to 65536.
        """
        if model.weights is None or model.tokenizer is None:
            raise IncompatibleError(f"{model.name} has no known weights or tokenizer, so that nothing says which prompts are its own")
        if type(chunk) is not int or not 1 <= chunk <= MAX_CHUNK:
            raise ValueError(f"[store] chunk must be 1 to 65536 tokens, but got {chunk!r}.")
        frames = {role: plan.frame or codec.default_frame(role) for role, codec in (("k", plan.k), ("v", plan.v))}  # type: ignore[arg-type]
        codec = {"k": plan.k.spec(), "v": plan.v.spec(), "sink": plan.sink, "frame": frames}
        about = {
            "schema": SCHEMA,
            "algorithm": "blake3",
            "model": {**identity_key(model, probes), "dtype": model.dtype},
            "layers": layers_digest(probes),
            "codec": codec,
            "calibration": calibration,
            "chunk": chunk,
        }
        return cls(json.dumps(about, sort_keys=True, separators=(",", ":")).encode(), about, secret)

    @classmethod
    def parse(cls, data: bytes, key: str, secret: bytes | None = None) -> "Space":
        """A space from its object.

        Raises:
            DigestError: its bytes are not those that its name says.
            ManifestError: it was written by another version.
        """
        found = keyed(data, secret).hexdigest()
        if found != key:
            raise DigestError(f"space {key[:12]} has digest {found[:12]}")
        about = loads(data.decode("utf-8", "replace"), "space", Room(len(data)))
        if not isinstance(about, dict) or set(about) != _FIELDS or about["schema"] != SCHEMA:
            raise ManifestError(f"space {key[:12]} is of another schema than {SCHEMA}", hint="update kvtool")
        space = cls(data, about, secret)
        space._check()
        return space

    def _check(self) -> None:
        """Raise ManifestError where a field cannot be: whoever can write to a store can write a space."""
        model, codec, chunk = self.about["model"], self.about["codec"], self.about["chunk"]
        digests = [self.about["layers"], self.about["calibration"] or "0" * 64]
        if isinstance(model, dict):
            digests += [model.get("weights"), model.get("tokenizer")]
        sound = (
            len(digests) == 4
            and all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests)
            and all(value is None or isinstance(value, str) for value in model.values())
            and type(chunk) is int
            and 1 <= chunk <= MAX_CHUNK
            and isinstance(codec, dict)
            and set(codec) == {"k", "v", "sink", "frame"}
            and type(codec["sink"]) is int
            and isinstance(codec["frame"], dict)
            and {"k", "v"} == set(codec["frame"])
        )
        if not sound:
            raise ManifestError(f"space {self.key[:12]} has fields that cannot be")
        try:
            _ = self.codec
        except (ValueError, TypeError) as error:
            raise ManifestError(
                f"space {self.key[:12]} has a codec that this version does not know ({error})", hint="update kvtool"
            ) from error

    @property
    def key(self) -> str:
        return keyed(self.data, self.secret).hexdigest()

    @property
    def name(self) -> str:
        """Of the object that holds it."""
        return f"spaces/{self.key}.json"

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return int(self.about["chunk"])

    @property
    def weights(self) -> str:
        return str(self.about["model"]["weights"])

    @property
    def codec(self) -> str:
        """The codec as a spec, for people."""
        codec = self.about["codec"]
        return parse_codec(f"k={codec['k']},v={codec['v']},sink={codec['sink']}").spec()

    @property
    def calibration(self) -> str | None:
        """Digest of the tables that its codec takes, None without."""
        return None if self.about["calibration"] is None else str(self.about["calibration"])

    def same_model(self, model: ModelInfo, probes: Sequence[CacheProbe]) -> bool:
        """Whether a model is this space's; its layers and dtype are compared apart."""
        about = self.about["model"]
        return all(name in about and about[name] == value for name, value in identity_key(model, probes).items())

    def keys(self, tokens: Sequence[int]) -> Iterator[str]:
        """Keys of the whole chunks of a prompt, one after the other."""
        return chain(self.key, tokens, self.chunk, self.secret)


@dataclass(frozen=True)
class Node:
    """An object that holds rows, as its name tells.

    Attributes:
        name: of the object.
        id: what people call it: the key of a chunk, the hash of a tail.
        parent: first digits of the key of the chunk, or the space, that it follows.
        start, tokens: its rows.
        recent: of a tail, how many of them are exact; None of a chunk.
    """

    name: str
    id: str
    parent: str
    start: int
    tokens: int
    recent: int | None = None

    @property
    def tail(self) -> bool:
        return self.recent is not None

    @property
    def stop(self) -> int:
        return self.start + self.tokens


def keyed(data: bytes, secret: bytes | None) -> blake3:
    """blake3, keyed where there is a secret."""
    return blake3(data) if secret is None else blake3(data, key=secret)


def chain(parent: str, tokens: Sequence[int], chunk: int, secret: bytes | None = None) -> Iterator[str]:
    """Keys of the whole chunks of tokens that follow a key, one after the other."""
    ids, key, size = ids_bytes(tokens), bytes.fromhex(parent), 4 * chunk
    for at in range(0, len(ids) - size + 1, size):
        key = keyed(key + ids[at : at + size], secret).digest()
        yield key.hex()


def chunk_name(key: str, parent: str, start: int, tokens: int) -> str:
    return f"chunks/{key[:2]}/{key}-{parent[:SHORT]}-{start}-{tokens}.kv"


def tails_of(parent: str) -> str:
    """Prefix of the names of the tails that follow a chunk or begin a space."""
    return f"tails/{parent[:2]}/{parent}/"


def tail_name(parent: str, ids: Sequence[int], start: int, recent: int, secret: bytes | None = None) -> str:
    hashed = tail_hashes(parent, ids, [(recent, len(ids))], secret)[recent, len(ids)]
    return f"{tails_of(parent)}{start}-{len(ids)}-{recent}-{hashed}.kv"


def tail_hashes(
    parent: str, ids: Sequence[int], wanted: Iterable[tuple[int, int]], secret: bytes | None = None
) -> dict[tuple[int, int], str]:
    """Hashes of tails of the first tokens of `ids` after a parent: (recent, tokens) -> 32 digits. Ids are read once for each `recent`."""
    data, hashes, last = ids_bytes(ids), {}, (-1, 0)
    for recent, tokens in sorted(wanted):
        if recent != last[0]:
            hasher, last = keyed(b"tail" + bytes.fromhex(parent) + recent.to_bytes(4, "little"), secret), (recent, 0)
        hasher.update(data[4 * last[1] : 4 * tokens])
        hashes[recent, tokens], last = hasher.hexdigest()[:32], (recent, tokens)
    return hashes


def node_of(name: str) -> Node | None:
    """What the name of a chunk or tail says; None of any other object."""
    if found := _CHUNK_NAME.fullmatch(name):
        return Node(name, found[1], found[2], int(found[3]), int(found[4]))
    if found := _TAIL_NAME.fullmatch(name):
        return Node(name, found[5], found[1][:SHORT], int(found[2]), int(found[3]), int(found[4]))
    return None


def ids_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as uint32, little-endian."""
    return np.asarray(tokens, "<u4").tobytes()


def layers_digest(probes: Sequence[CacheProbe]) -> str:
    """Of what a model's layers cache: kinds, sizes and rotations, these to the six digits that back ends agree on."""
    return blake3(json.dumps([_layer(probe) for probe in probes], sort_keys=True).encode()).hexdigest()


def _layer(probe: CacheProbe) -> dict[str, Any]:
    roles = {"k": _role(probe.k), "v": _role(probe.v)}
    inner = [_layer(one) for one in probe.caches]
    return {"cls": probe.cls, "attention": probe.attention, "window": probe.window, "params": probe.params, **roles, "caches": inner}


def _role(role: RoleProbe | None) -> dict[str, Any] | None:
    if role is None:
        return None
    rope = None if role.rope is None else {name: _rounded(value) for name, value in role.rope.to_json().items()}
    return {"heads": role.heads, "dim": role.dim, "rope": rope}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
