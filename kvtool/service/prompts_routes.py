"""Prompts: which are here, which beginnings of given tokens are, and what fits a given model."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from kvtool.service.access import Its, Known, Reads
from kvtool.service.errors import Refused
from kvtool.service.objects_routes import ERRORS
from kvtool.service.partition import Partition
from kvtool.store.described import Descriptions
from kvtool.store.finding import lines
from kvtool.store.keys import Space
from kvtool.store.listing import Listed, kinds, listed

router = APIRouter(prefix="/v1", tags=["prompts"])
Token = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Exact(BaseModel):
    """A body of a question; a name that none of its fields has is refused, for what is misspelt would not be compared."""

    model_config = ConfigDict(extra="forbid")


class Model(Exact):
    """A model's identity, `quantisation` and `config` by the digests that a space has; what is left out is not compared. Weights without
    an adapter are those of no adapter's."""

    architecture: str | None = None
    weights: Digest | None = None
    adapter: Digest | None = None
    quantisation: Digest | None = None
    tokenizer: Digest | None = None
    tokenizer_state: Digest | None = None
    config: Digest | None = None
    dtype: str | None = None
    layers: Digest | None = None


class Question(Exact):
    """Tokens of a prompt, and who would go on from it."""

    tokens: list[Token]
    model: Model = Model()


class Piece(BaseModel):
    """One object: its name, bytes, and the tokens whose rows it holds."""

    name: str
    size: int
    start: int
    tokens: int


class Found(BaseModel):
    """A beginning of the tokens that is here: of which space, how many tokens, in which objects; and whether its keys have to be turned for
    the model's rotation before they are used, null where the question did not give the model's `layers`."""

    space: str
    model: str
    codec: str
    tokens: int
    recode: bool | None
    objects: list[Piece]


class Answer(BaseModel):
    """Beginnings, the longest first, one for each space."""

    found: list[Found]


class Difference(BaseModel):
    """A field of an identity with both values."""

    field: str
    stored: str | None
    asked: str | None


class Fit(BaseModel):
    """How a space stands to a model: identical, dtype (computed in another), recode (same weights, keys rotated otherwise) or other."""

    space: str
    model: str
    codec: str
    verdict: str
    differences: list[Difference]


class Explained(BaseModel):
    """Every space beside a model."""

    spaces: list[Fit]


@dataclass(frozen=True)
class Rows(Listed):
    """One object with rows; `quality` is what its file says of every lossy step."""

    quality: list[dict[str, Any]] | None = None


class Entries(BaseModel):
    """Objects with rows, the last used first; `total` are all that match."""

    entries: list[Rows]
    total: int


class Stats(BaseModel):
    """A tenant's share of the store; and since this service started, look-ups that found something and those that did not, one for each
    space that was looked through, and objects that went for the quota."""

    bytes: int
    kinds: dict[str, dict[str, int]]
    models: dict[str, int]
    hits: int
    misses: int
    evicted: int
    uptime_seconds: float


@router.post("/lookup", responses={**ERRORS, 413: {"description": "Too many tokens"}})
async def lookup(objects: Reads, tenant: Known, state: Its, question: Question) -> Answer:
    """The longest beginnings of these tokens that are here."""
    if len(question.tokens) > state.limits.tokens:
        raise Refused(413, f"{len(question.tokens)} tokens, at most {state.limits.tokens} are looked up")
    found = await run_in_threadpool(_found, objects, question)
    best = max((one.tokens for one in found), default=0)
    state.asked(tenant, best, len(question.tokens))
    return Answer(found=found)


def _found(objects: Partition, question: Question) -> list[Found]:
    known, found = Descriptions(objects), []
    for space in known.spaces():
        if any(difference.field not in ("dtype", "layers") for difference in _differences(space, question.model)):
            continue
        best = max(lines(objects, space, question.tokens), key=lambda line: line[-1].stop, default=None)
        if not best:
            continue
        sizes = objects.sizes([node.name for node in best])
        pieces = [
            Piece(name=node.name, size=size, start=node.start, tokens=node.tokens)
            for node, size in zip(best, sizes, strict=True)
            if size is not None
        ]
        if len(pieces) == len(best):
            name = known.model_name(space.weights)
            layers = question.model.layers
            recode = None if layers is None else space.about["layers"] != layers
            found.append(Found(space=space.key, model=name, codec=space.codec, tokens=best[-1].stop, recode=recode, objects=pieces))
    return sorted(found, key=lambda one: -one.tokens)


@router.post("/explain", responses=ERRORS)
async def explain(objects: Reads, model: Model) -> Explained:
    """What is here beside a model: what fits it, and what differs by name."""

    def fits() -> list[Fit]:
        known, found = Descriptions(objects), []
        for space in known.spaces():
            differences = _differences(space, model)
            verdict = _verdict([one.field for one in differences])
            name = known.model_name(space.weights)
            found.append(Fit(space=space.key, model=name, codec=space.codec, verdict=verdict, differences=differences))
        return found

    return Explained(spaces=await run_in_threadpool(fits))


def _differences(space: Space, model: Model) -> list[Difference]:
    stored = {**space.about["model"], "layers": space.about["layers"]}
    asked: dict[str, str | None] = model.model_dump(exclude_none=True)
    if model.weights is not None:
        asked.setdefault("adapter", None)
    return [Difference(field=name, stored=stored.get(name), asked=value) for name, value in asked.items() if stored.get(name) != value]


def _verdict(fields: list[str]) -> str:
    if not fields:
        return "identical"
    if set(fields) == {"dtype"}:
        return "dtype"
    return "recode" if set(fields) <= {"dtype", "layers"} else "other"


@router.get("/entries", responses=ERRORS)
async def entries(
    objects: Reads,
    tenant: Known,
    state: Its,
    q: Annotated[str, Query(max_length=200, description="Part of an id, model or codec.")] = "",
    chunks: bool = False,
    skip: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Entries:
    """Ends of prompts (and chunks), with what their files say of their quality."""

    def page() -> Entries:
        shown, total = state.listings.page(tenant.folder, objects, q, chunks, skip, limit)
        quality = [state.listings.quality(tenant.folder, objects, one) for one in shown]
        return Entries(entries=[Rows(**vars(one), quality=steps) for one, steps in zip(shown, quality, strict=True)], total=total)

    return await run_in_threadpool(page)


@router.get("/stats", responses=ERRORS)
async def stats(objects: Reads, tenant: Known, state: Its) -> Stats:
    """Bytes by kind and by model; look-ups that found something and those that did not."""

    def counted() -> Stats:
        entries = list(objects.names())
        models: Counter[str] = Counter()
        for one in listed(entries, Descriptions(objects)):
            models[one.model] += one.bytes
        return Stats(bytes=sum(one.size for one in entries), kinds=kinds(entries), models=models, **state.answered(tenant))

    return await run_in_threadpool(counted)
