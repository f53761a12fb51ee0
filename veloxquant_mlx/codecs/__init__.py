"""The registry of codecs, and the spec strings that choose one for keys, one for values and which rows stay exact.

SPEC  = CODEC | FIELD, or several, with commas      rvq-2+2        rabitq,sink=0,recent=0        k=rabitq,v=rvq-2+2,frame=pre
FIELD = k=CODEC | v=CODEC | sink=N | recent=N | frame=post|pre
        sink=4, recent=32 of a lossy codec, 0 of raw, where they are not given: the first 4 positions and the newest 32 rows are exact
CODEC = raw | rvq-N[:OPTION...] | rvq-A+B[:OPTION...] | rabitq[:OPTION...] | rabitq-N[:OPTION...] | affine-N[:AFFINE...]
      | commvq-N[:PLANES] | commvq-N:additive[:carry] | commvq-N:product[:PLANES]
      | vecinfer-N[:SMOOTH] | qjl[:QJL...] | qjl-N[:QJL...] | tc-N[:TC...] | tcz-R
OPTION = norm | ls | unbiased | center | nocenter | seed=N
AFFINE = group=N | channel | token
PLANES = first=N:dims=N                               rotary entries, found from the model where it is there
additive: N one of 1, 1.5, 2, 3                       calibrated; carry as TC's
product: N 1 or 2                                     words of 8 or 4 entries
SMOOTH = smooth | nosmooth
QJL = center | nocenter | seed=N
TC = carry | seed=N                                   calibrated; carry puts the tables into the file
R = bits a value of the whole cache, 0.5 to 3         calibrated, for storage: entropy-coded, decoded when loaded
"""

from dataclasses import dataclass

from veloxquant_mlx.codecs._base import BLOCK_VALUES, Codec, Frame, RoleName, token_blocks
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.commvq import CommVq
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.commvq_product import CommVqProduct
from veloxquant_mlx.codecs.qjl import Qjl
from veloxquant_mlx.codecs.rabitq import Rabitq
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.codecs.tcz import Tcz
from veloxquant_mlx.codecs.vecinfer import VecInfer

__all__ = ["BLOCK_VALUES", "CODECS", "RECENT", "SINK", "Codec", "CodecPlan", "parse_codec", "token_blocks"]

# The exact rows of a lossy codec whose spec does not say; what they are worth stands in the docstring of `rvq`.
SINK, RECENT = 4, 32

# The first that takes a spec string has it: commvq leaves no option to others.
_ALL: tuple[type[Codec], ...] = (Raw, Rvq, Rabitq, Affine, CommVqAdditive, CommVqProduct, CommVq, VecInfer, Qjl, Tc, Tcz)
CODECS: dict[str, type[Codec]] = {codec.id: codec for codec in _ALL}
KNOWN = (
    "raw, rvq-N (rvq-4), rvq-A+B (rvq-2+2), rabitq, rabitq-N (rabitq-4), affine-N (affine-4), commvq-N (commvq-2), "
    "commvq-N:additive (commvq-2:additive, calibrated), commvq-N:product (commvq-2:product), "
    "vecinfer-N (vecinfer-2), qjl, qjl-N (qjl-2), tc-N (tc-2, calibrated), tcz-R (tcz-1.1, calibrated); "
    f"per role k=... and v=...; sink=N ({SINK} of a lossy codec), recent=N ({RECENT}), frame=post|pre"
)


@dataclass(frozen=True)
class CodecPlan:
    """What to do with one cache.

    Attributes:
        k: codec of the keys.
        v: codec of the values.
        sink: positions below this stay exact.
        recent: this many newest rows stay exact.
        frame: "post" or "pre" for the keys, or None for the codec's own choice.
    """

    k: Codec
    v: Codec
    sink: int
    recent: int
    frame: Frame | None = None

    @property
    def lossless(self) -> bool:
        return isinstance(self.k, Raw) and isinstance(self.v, Raw)

    def spec(self) -> str:
        """The shortest spec string that `parse_codec` reads back as this plan."""
        return self._spec(_exact_rows(self.k, self.v))

    def full_spec(self) -> str:
        """The spec string that says the exact rows whatever the defaults are; where no row is coded, only those asked for."""
        return self._spec({"sink": 0, "recent": 0} if self.lossless else {})

    def _spec(self, understood: dict[str, int]) -> str:
        k, v = self.k.spec("k"), self.v.spec("v")
        fields = [k] if _codec(k, "v") == self.v else [f"k={k}", f"v={v}"]
        fields += [f"{name}={n}" for name, n in (("sink", self.sink), ("recent", self.recent)) if understood.get(name) != n]
        return ",".join(fields + ([f"frame={self.frame}"] if self.frame else []))


def parse_codec(spec: str) -> CodecPlan:
    """Read a spec string.

    Args:
        spec: as in the module's grammar.

    Raises:
        ValueError: what is wrong with it, and what exists.
    """
    fields: dict[str, str] = {}
    for text in spec.split(","):
        key, separator, value = text.strip().partition("=")
        # An option such as seed=7 has its equals sign after a colon; it does not make a field.
        if not separator or ":" in key:
            key, value = "both", text.strip()
        if key in fields:
            raise ValueError(f"[parse_codec] {spec!r}: {'two codecs for both roles' if key == 'both' else f'{key}= stands twice'}.")
        fields[key] = value
    unknown = sorted(set(fields) - {"both", "k", "v", "sink", "recent", "frame"})
    if unknown:
        raise ValueError(f"[parse_codec] {spec!r}: unknown field {unknown[0]!r}; there are {KNOWN}.")
    for role in ("k", "v"):
        if "both" not in fields and role not in fields:
            raise ValueError(f"[parse_codec] {spec!r}: no codec for {'keys' if role == 'k' else 'values'}; there are {KNOWN}.")
    if fields.get("frame") not in (None, "post", "pre"):
        raise ValueError(f"[parse_codec] {spec!r}: frame must be post or pre, but got {fields['frame']!r}.")
    k, v = (_codec(fields.get(role, fields.get("both", "")), role) for role in ("k", "v"))
    exact = _exact_rows(k, v) | {name: _count(spec, name, fields[name]) for name in ("sink", "recent") if name in fields}
    return CodecPlan(k, v, **exact, frame=fields.get("frame"))


def _exact_rows(k: Codec, v: Codec) -> dict[str, int]:
    """What a spec of these codecs that does not say keeps exact."""
    lossless = isinstance(k, Raw) and isinstance(v, Raw)
    return {"sink": 0 if lossless else SINK, "recent": 0 if lossless else RECENT}


def _codec(text: str, role: RoleName) -> Codec:
    for codec in CODECS.values():
        found = codec.parse(text, role)
        if found is not None:
            return found
    raise ValueError(f"[parse_codec] no codec {text!r}; there are {KNOWN}.")


def _count(spec: str, name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"[parse_codec] {spec!r}: {name} must be a whole number, but got {value!r}.")
    return int(value)
